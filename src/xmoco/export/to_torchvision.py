"""For torchvision: a plain state dict under its names, without fc or, of a classifier, with it.

torchvision itself makes the standard ResNets. Other widths and the cifar stem are its ResNet class
put together by ``build_resnet``; ``xmoco.load_backbone`` loads them.
"""

from pathlib import Path
from typing import BinaryIO

import torch
import torchvision.models
from torch import Tensor, nn

from xmoco.errors import UserError
from xmoco.export.contents import Contents
from xmoco.nn.architectures import BACKBONES, Architecture
from xmoco.nn.backbone_files import BackboneCard
from xmoco.nn.backbones import build_resnet, feature_size


def write(model: nn.Module, contents: Contents, file: BinaryIO) -> None:
    _architecture(contents.card)  # refuses what torchvision cannot build
    torch.save(model.state_dict(), file)


def outputs(path: Path, contents: Contents, images: Tensor) -> Tensor:
    card, classes = contents.card, len(contents.classes)
    name = _standard_name(card)
    model: nn.Module
    if name is None:
        model = build_resnet(card.backbone, card.stem)
        if classes:
            model.add_module("fc", nn.Linear(_feature_size(card), classes))
    elif classes:
        model = torchvision.models.get_model(name, num_classes=classes)
    else:
        model = torchvision.models.get_model(name)
        model.add_module("fc", nn.Identity())
    model.load_state_dict(torch.load(path, weights_only=True))
    found: Tensor = model.eval()(images)
    return found


def loading(path: Path, contents: Contents) -> str:
    name, classes = _standard_name(contents.card), contents.classes
    load = f"model.load_state_dict(torch.load({str(path)!r}, weights_only=True))"
    if name is not None and classes:
        lines = [
            "import torch, torchvision",
            f"model = torchvision.models.{name}(num_classes={len(classes)})",
            load,
        ]
    elif name is not None:
        lines = [
            "import torch, torchvision",
            f"model = torchvision.models.{name}()",
            "model.fc = torch.nn.Identity()",
            load,
        ]
    elif classes:
        lines = [
            "import torch, xmoco",
            f"model = xmoco.load_backbone({str(path)!r})  # a torchvision ResNet without fc",
            f"model.fc = torch.nn.Linear({_feature_size(contents.card)}, {len(classes)})",
            load,
        ]
    else:
        lines = [
            "import xmoco",
            f"model = xmoco.load_backbone({str(path)!r})  # a torchvision ResNet without fc",
        ]
    if classes:
        lines += ["model.eval()", f"classes = {list(classes)}"]
    return "\n".join(lines)


def _feature_size(card: BackboneCard) -> int:
    with torch.device("meta"):  # its weights are not needed
        return feature_size(build_resnet(card.backbone, card.stem))


def _standard_name(card: BackboneCard) -> str | None:
    """What torchvision calls this backbone, if it makes it by itself."""
    architecture = _architecture(card)
    return architecture.torchvision if card.stem == "imagenet" else None


def _architecture(card: BackboneCard) -> Architecture:
    if card.backbone not in BACKBONES:
        raise UserError(f"torchvision has no {card.backbone}: export this one to timm or onnx.")
    return BACKBONES[card.backbone]
