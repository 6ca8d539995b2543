"""The backbones there are: one registry for configuration, weights, checkpoints and exports.

It is plain data, so that settings need not wait for torch. Beside its rows, ``timm:NAME`` is any
model of timm.
"""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from types import MappingProxyType
from typing import Any, Literal

from xmoco.errors import nearest


@dataclass(frozen=True)
class TimmModel:
    """A model of timm, by name and arguments."""

    name: str
    arguments: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))


@dataclass(frozen=True)
class Architecture:
    """A ResNet, and what others call it."""

    block: Literal["basic", "bottleneck"]
    blocks: tuple[int, int, int, int]  # in each stage
    width: int = 64  # channels of the stem; the stages have 1, 2, 4 and 8 times as many
    torchvision: str | None = None  # None: torchvision does not make it
    timm: TimmModel | None = None

    @property
    def depth(self) -> int:
        """Layers on the longest way, stem and classifier included: the number in its name."""
        return 2 + sum(self.blocks) * (2 if self.block == "basic" else 3)


def _standard(
    name: str, block: Literal["basic", "bottleneck"], blocks: tuple[int, int, int, int]
) -> Architecture:
    return Architecture(block, blocks, torchvision=name, timm=TimmModel(name))


def _wide(factor: int) -> Architecture:
    """timm's ResNet cannot widen the stem, but its ResNetV2 can, and is an ordinary ResNet when
    told not to activate before convolutions."""
    timm = TimmModel("resnetv2_50", {"preact": False, "width_factor": factor})
    return Architecture("bottleneck", (3, 4, 6, 3), 64 * factor, timm=timm)


BACKBONES: dict[str, Architecture] = {
    "tiny": Architecture("basic", (1, 1, 1, 1), 16),
    "resnet18": _standard("resnet18", "basic", (2, 2, 2, 2)),
    "resnet34": _standard("resnet34", "basic", (3, 4, 6, 3)),
    "resnet50": _standard("resnet50", "bottleneck", (3, 4, 6, 3)),
    "resnet101": _standard("resnet101", "bottleneck", (3, 4, 23, 3)),
    "resnet152": _standard("resnet152", "bottleneck", (3, 8, 36, 3)),
    "resnet50w2": _wide(2),
    "resnet50w4": _wide(4),
}


def timm_name(backbone: str) -> str | None:
    """NAME of ``timm:NAME``; None for the rows of the registry."""
    library, colon, name = backbone.partition(":")
    return name if (library, colon) == ("timm", ":") else None


def check_backbone(backbone: str) -> str:
    """The name itself, if a backbone has it; otherwise a ``ValueError`` says which there are."""
    name = timm_name(backbone)
    if name is None:
        if backbone not in BACKBONES:
            known = ", ".join(BACKBONES)
            raise ValueError(f"there are {known} and timm:NAME{nearest(backbone, BACKBONES)}")
    elif name not in timm_models():
        raise ValueError(f"timm has no such model{nearest(name, timm_models())}")
    return backbone


def check_stem(backbone: str, stem: str) -> str:
    """The stem itself, if the backbone can have it."""
    if timm_name(backbone) is not None and stem != "imagenet":
        raise ValueError(f"{backbone} has a stem of its own; set stem=imagenet")
    return stem


@cache
def timm_models() -> frozenset[str]:
    return frozenset(timm_library().list_models())


def timm_library() -> Any:
    try:
        return importlib.import_module("timm")
    except ImportError:
        raise ValueError("it needs timm: pip install 'xmoco[timm]'") from None
