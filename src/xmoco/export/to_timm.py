"""For timm: a state dict that ``timm.create_model`` loads strictly, without a classifier.

timm's resnet18 … resnet152 have torchvision's names. Its ResNet cannot widen the stem, but its
ResNetV2 can, and is an ordinary ResNet when told not to activate before convolutions: that one
takes resnet50w2 and resnet50w4, under its own names. timm builds neither the cifar stem nor the
tiny ResNet.
"""

import importlib
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor
from torchvision.models.resnet import ResNet

from xmoco.errors import UserError
from xmoco.export.names import renamed
from xmoco.nn.weights import BackboneCard

WIDE: dict[str, dict[str, Any]] = {
    "resnet50w2": {"preact": False, "width_factor": 2},
    "resnet50w4": {"preact": False, "width_factor": 4},
}
"""Arguments that make timm's resnetv2_50 one of these."""

RESNETV2_NAMES = [
    (r"^conv1\.", "stem.conv."),
    (r"^bn1\.", "stem.norm."),
    *[(rf"^layer{stage}\.", f"stages.{stage - 1}.blocks.") for stage in (1, 2, 3, 4)],
    (r"\.bn(\d)\.", r".norm\1."),
    (r"\.downsample\.0\.", ".downsample.conv."),
    (r"\.downsample\.1\.", ".downsample.norm."),
]


def write(backbone: ResNet, card: BackboneCard, file: BinaryIO) -> None:
    name, _ = _model(card)
    rules = RESNETV2_NAMES if name == "resnetv2_50" else []
    torch.save(renamed(backbone.state_dict(), rules), file)


def features(path: Path, card: BackboneCard, images: Tensor) -> Tensor:
    timm = importlib.import_module("timm")
    name, arguments = _model(card)
    model = timm.create_model(name, num_classes=0, checkpoint_path=str(path), **arguments)
    found: Tensor = model.eval()(images)
    return found


def loading(path: Path, card: BackboneCard) -> str:
    name, arguments = _model(card)
    more = "".join(f", {key}={value}" for key, value in arguments.items())
    return (
        "import timm\n"
        "model = timm.create_model(\n"
        f"    {name!r}, num_classes=0, checkpoint_path={str(path)!r}{more}\n"
        ")"
    )


def _model(card: BackboneCard) -> tuple[str, dict[str, Any]]:
    """Name and arguments of the model that timm makes for this backbone."""
    if card.backbone == "tiny":
        raise UserError("timm has no tiny ResNet: export this one to torchvision or onnx.")
    if card.stem != "imagenet":
        raise UserError(f"timm has no {card.stem} stem: export this one to torchvision or onnx.")
    if card.backbone in WIDE:
        return "resnetv2_50", WIDE[card.backbone]
    return card.backbone, {}
