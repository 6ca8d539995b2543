"""What a file for another program holds."""

from dataclasses import dataclass

from xmoco.nn.backbone_files import BackboneCard


@dataclass(frozen=True)
class Contents:
    """A backbone or, if there are classes, the classifier on it."""

    card: BackboneCard
    classes: tuple[str, ...] = ()

    @property
    def outputs(self) -> str:
        """What images are mapped to."""
        return "scores" if self.classes else "features"
