"""Backbone weights as a file: safetensors with torchvision's names and a card in the header."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import cast, get_args

import safetensors
from safetensors.torch import load_file, save
from torchvision.models.resnet import ResNet

from xmoco.config import Backbone
from xmoco.errors import UserError
from xmoco.files import write_whole
from xmoco.nn.backbones import build_backbone


@dataclass(frozen=True)
class BackboneCard:
    """What stands in the file's header beside the weights."""

    backbone: Backbone
    stem: str
    size: int  # side of the images it was trained on
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    method: str
    epochs: int
    seed: int


def save_backbone(backbone: ResNet, card: BackboneCard, path: Path) -> None:
    tensors = {
        name: value.detach().cpu().contiguous() for name, value in backbone.state_dict().items()
    }
    header = {"format": "pt", "xmoco": json.dumps(asdict(card))}
    write_whole(path, save(tensors, metadata=header))


def load_backbone(weights: str | Path) -> ResNet:
    """The trained backbone of a run folder or a ``backbone.safetensors``, in eval mode.

    It maps normalised images (N, 3, H, W) to features. The weights also load by hand::

        model = torchvision.models.resnet50()
        model.load_state_dict(safetensors.torch.load_file("backbone.safetensors"), strict=False)
    """
    card, path = read_card(weights)
    backbone = build_backbone(card.backbone, card.stem)
    try:
        backbone.load_state_dict(load_file(path))
    except RuntimeError:
        raise UserError(f"{path} does not fit the {card.backbone} it says it holds.") from None
    return backbone.eval()


def read_card(weights: str | Path) -> tuple[BackboneCard, Path]:
    """The card of a run folder's or a file's weights, and the file's path."""
    path = Path(weights)
    if path.is_dir():
        path = path / "backbone.safetensors"
        if not path.is_file() and (path.parent / "config.yaml").is_file():
            raise UserError(f"{path.parent} has no weights yet: finish it with --resume first.")
    if not path.is_file():
        raise UserError(f"no weights at {path}: give a run folder or a backbone.safetensors.")
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
        fields = json.loads(header["xmoco"])
        card = BackboneCard(**fields | {"mean": tuple(fields["mean"]), "std": tuple(fields["std"])})
        known = cast(tuple[str, ...], get_args(Backbone))
        if card.backbone not in known:
            raise KeyError(card.backbone)
    except (safetensors.SafetensorError, OSError):
        raise UserError(f"{path} is damaged or no safetensors file.") from None
    except (KeyError, TypeError, ValueError):
        raise UserError(
            f"{path} does not say which backbone it holds: xmoco did not write it."
        ) from None
    return card, path
