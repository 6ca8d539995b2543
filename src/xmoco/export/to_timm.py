"""For timm: a state dict that ``timm.create_model`` loads strictly, with its classifier or without.

Models of timm are what they were. Of the ResNets, timm has resnet18 … resnet152 under torchvision's
names, and those of other widths as its ResNetV2, under names of its own; neither the cifar stem nor
the tiny ResNet.
"""

import importlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor, nn

from xmoco.errors import UserError
from xmoco.export.contents import Contents
from xmoco.export.names import renamed
from xmoco.nn.architectures import BACKBONES, timm_name
from xmoco.nn.backbone_files import BackboneCard
from xmoco.nn.backbones import create_timm
from xmoco.nn.classifier_files import HEADS
from xmoco.nn.weights import INSIDE

RESNETV2_NAMES = [
    (r"^conv1\.", "stem.conv."),
    (r"^bn1\.", "stem.norm."),
    *[(rf"^layer{stage}\.", f"stages.{stage - 1}.blocks.") for stage in (1, 2, 3, 4)],
    (r"\.bn(\d)\.", r".norm\1."),
    (r"\.downsample\.0\.", ".downsample.conv."),
    (r"\.downsample\.1\.", ".downsample.norm."),
]


def write(model: nn.Module, contents: Contents, file: BinaryIO) -> None:
    card = contents.card
    name, arguments = _model(card)
    is_renamed = name == "resnetv2_50" and timm_name(card.backbone) is None
    rules = RESNETV2_NAMES if is_renamed else []
    if not contents.classes:
        torch.save(renamed(model.state_dict(), rules), file)
        return
    timm = importlib.import_module("timm")
    theirs = timm.create_model(name, num_classes=len(contents.classes), **arguments)
    head = theirs.pretrained_cfg["classifier"]
    if not isinstance(head, str):
        raise UserError(
            f"timm's {name} has several classifiers: export the backbone alone with --backbone, or "
            "to onnx."
        )
    # Ours first: what timm calls a part of the backbone may begin as our classifier does.
    ours = (rf"^({'|'.join(HEADS)})\.", f"{head}.")
    state = renamed(model.state_dict(), [ours, (rf"^{re.escape(INSIDE)}", ""), *rules])
    weight = f"{head}.weight"  # timm has convolutions of 1 × 1 for some classifiers
    state[weight] = state[weight].reshape(theirs.get_parameter(weight).shape)
    torch.save(state, file)


def outputs(path: Path, contents: Contents, images: Tensor) -> Tensor:
    timm = importlib.import_module("timm")
    name, arguments = _model(contents.card)
    classes = len(contents.classes)
    model = timm.create_model(name, num_classes=classes, checkpoint_path=str(path), **arguments)
    found: Tensor = model.eval()(images)
    return found


def loading(path: Path, contents: Contents) -> str:
    name, arguments = _model(contents.card)
    more = "".join(f", {key}={value}" for key, value in arguments.items())
    classes = contents.classes
    lines = [
        "import timm",
        "model = timm.create_model(",
        f"    {name!r}, num_classes={len(classes)}, checkpoint_path={str(path)!r}{more}",
        ")",
    ]
    if classes:
        lines += ["model.eval()", f"classes = {list(classes)}"]
    return "\n".join(lines)


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
