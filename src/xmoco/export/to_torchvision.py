"""For torchvision: a plain state dict under its names, without fc.

torchvision itself makes the standard ResNets. Other widths and the cifar stem are its ResNet class
put together by ``xmoco.nn.backbones.build_backbone``, which is what loads them.
"""

from pathlib import Path
from typing import BinaryIO

import torch
import torchvision.models
from torch import Tensor, nn
from torchvision.models.resnet import ResNet

from xmoco.nn.backbones import build_backbone
from xmoco.nn.weights import BackboneCard


def write(backbone: ResNet, _card: BackboneCard, file: BinaryIO) -> None:
    torch.save(backbone.state_dict(), file)


def features(path: Path, card: BackboneCard, images: Tensor) -> Tensor:
    if _is_standard(card):
        model: ResNet = torchvision.models.get_model(card.backbone)
        model.add_module("fc", nn.Identity())
    else:
        model = build_backbone(card.backbone, card.stem)
    model.load_state_dict(torch.load(path, weights_only=True))
    found: Tensor = model.eval()(images)
    return found


def loading(path: Path, card: BackboneCard) -> str:
    state = f"torch.load({str(path)!r}, weights_only=True)"
    if _is_standard(card):
        return (
            "import torch, torchvision\n"
            f"model = torchvision.models.{card.backbone}()\n"
            f"model.load_state_dict({state}, strict=False)  # all but fc"
        )
    return (
        "import torch\n"
        "from xmoco.nn.backbones import build_backbone\n"
        f"model = build_backbone({card.backbone!r}, {card.stem!r})  # a torchvision ResNet\n"
        f"model.load_state_dict({state})"
    )


def _is_standard(card: BackboneCard) -> bool:
    return card.stem == "imagenet" and card.backbone in torchvision.models.list_models()
