"""For torchvision: a plain state dict under its names, without fc.

torchvision itself makes the standard ResNets. Other widths and the cifar stem are its ResNet class
put together by ``build_resnet``; ``xmoco.load_backbone`` loads them.
"""

from pathlib import Path
from typing import BinaryIO

import torch
import torchvision.models
from torch import Tensor, nn

from xmoco.errors import UserError
from xmoco.nn.architectures import BACKBONES, Architecture
from xmoco.nn.backbone_files import BackboneCard
from xmoco.nn.backbones import build_resnet


def write(backbone: nn.Module, card: BackboneCard, file: BinaryIO) -> None:
    _architecture(card)  # refuses what torchvision cannot build
    torch.save(backbone.state_dict(), file)


def features(path: Path, card: BackboneCard, images: Tensor) -> Tensor:
    name = _standard_name(card)
    if name is not None:
        model: nn.Module = torchvision.models.get_model(name)
        model.add_module("fc", nn.Identity())
    else:
        model = build_resnet(card.backbone, card.stem)
    model.load_state_dict(torch.load(path, weights_only=True))
    found: Tensor = model.eval()(images)
    return found


def loading(path: Path, card: BackboneCard) -> str:
    name = _standard_name(card)
    if name is not None:
        return (
            "import torch, torchvision\n"
            f"model = torchvision.models.{name}()\n"
            f"model.load_state_dict(torch.load({str(path)!r}, weights_only=True), strict=False)"
            "  # all but fc"
        )
    return (
        "import xmoco\n"
        f"model = xmoco.load_backbone({str(path)!r})  # a torchvision ResNet without fc"
    )


def _standard_name(card: BackboneCard) -> str | None:
    """What torchvision calls this backbone, if it makes it by itself."""
    architecture = _architecture(card)
    return architecture.torchvision if card.stem == "imagenet" else None


def _architecture(card: BackboneCard) -> Architecture:
    if card.backbone not in BACKBONES:
        raise UserError(f"torchvision has no {card.backbone}: export this one to timm or onnx.")
    return BACKBONES[card.backbone]
