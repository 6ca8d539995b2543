"""For timm: a state dict that ``timm.create_model`` loads strictly, without a classifier.

Models of timm are what they were. Of the ResNets, timm has resnet18 … resnet152 under torchvision's
names, and those of other widths as its ResNetV2, under names of its own; neither the cifar stem nor
the tiny ResNet.
"""

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor, nn

from xmoco.errors import UserError
from xmoco.export.names import renamed
from xmoco.nn.architectures import BACKBONES, timm_name
from xmoco.nn.backbone_files import BackboneCard
from xmoco.nn.backbones import create_timm

RESNETV2_NAMES = [
    (r"^conv1\.", "stem.conv."),
    (r"^bn1\.", "stem.norm."),
    *[(rf"^layer{stage}\.", f"stages.{stage - 1}.blocks.") for stage in (1, 2, 3, 4)],
    (r"\.bn(\d)\.", r".norm\1."),
    (r"\.downsample\.0\.", ".downsample.conv."),
    (r"\.downsample\.1\.", ".downsample.norm."),
]


def write(backbone: nn.Module, card: BackboneCard, file: BinaryIO) -> None:
    name, _ = _model(card)
    is_renamed = name == "resnetv2_50" and timm_name(card.backbone) is None
    torch.save(renamed(backbone.state_dict(), RESNETV2_NAMES if is_renamed else []), file)


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


def _model(card: BackboneCard) -> tuple[str, Mapping[str, Any]]:
    """Name and arguments of the model that timm makes for this backbone."""
    name = timm_name(card.backbone)
    if name is not None:
        return name, create_timm(name, card.size)[1]
    model = BACKBONES[card.backbone].timm
    if model is None:
        raise UserError(
            f"timm has no {card.backbone} ResNet: export this one to torchvision or onnx."
        )
    if card.stem != "imagenet":
        raise UserError(f"timm has no {card.stem} stem: export this one to torchvision or onnx.")
    return model.name, model.arguments
