"""For Detectron2: a pickle of numpy arrays under its names (stem, res2 … res5), without fc.

Of a classifier it is the backbone, as Detectron2 puts heads of its own on it.

It is the format that MoCo's detection experiments read; Detectron2 finds its backbone by the ends
of the names (``matching_heuristics``). Detectron2 is not on the package index, so the file is read
back by a forward pass written from Detectron2's own rules for names, strides and shortcuts.
"""

import pickle
from pathlib import Path
from typing import Any, BinaryIO

import torch
import torch.nn.functional as F
import yaml
from torch import Tensor, nn

from xmoco.errors import UserError
from xmoco.export.contents import Contents
from xmoco.export.names import renamed
from xmoco.nn.architectures import BACKBONES, Architecture
from xmoco.nn.backbone_files import BackboneCard

NAMES = [
    (r"^conv1\.", "stem.conv1."),
    (r"^bn1\.", "stem.conv1.norm."),
    *[(rf"^layer{stage}\.", f"res{stage + 1}.") for stage in (1, 2, 3, 4)],
    (r"\.bn(\d)\.", r".conv\1.norm."),
    (r"\.downsample\.0\.", ".shortcut."),
    (r"\.downsample\.1\.", ".shortcut.norm."),
]

DEPTHS = (18, 34, 50, 101, 152)
"""Of the ResNets that Detectron2 builds."""


def write(backbone: nn.Module, contents: Contents, file: BinaryIO) -> None:
    architecture_of(contents.card)  # refuses what Detectron2 cannot build
    arrays = {name: value.numpy() for name, value in renamed(backbone.state_dict(), NAMES).items()}
    pickle.dump({"model": arrays, "__author__": "xmoco", "matching_heuristics": True}, file)


def outputs(path: Path, contents: Contents, images: Tensor) -> Tensor:
    with path.open("rb") as file:
        arrays = pickle.load(file)["model"]
    left = {name: torch.from_numpy(array) for name, array in arrays.items()}
    architecture = architecture_of(contents.card)

    def conv(x: Tensor, name: str, stride: int = 1) -> Tensor:
        kernel = left.pop(f"{name}.weight")
        x = F.conv2d(x, kernel, stride=stride, padding=kernel.shape[-1] // 2)
        left.pop(f"{name}.norm.num_batches_tracked")
        mean, variance, weight, bias = (
            left.pop(f"{name}.norm.{part}")
            for part in ("running_mean", "running_var", "weight", "bias")
        )
        return F.batch_norm(x, mean, variance, weight, bias)

    def block(x: Tensor, name: str, stride: int) -> Tensor:
        if architecture.block == "basic":
            y = conv(conv(x, f"{name}.conv1", stride).relu(), f"{name}.conv2")
        else:  # STRIDE_IN_1X1: false
            y = conv(conv(x, f"{name}.conv1").relu(), f"{name}.conv2", stride)
            y = conv(y.relu(), f"{name}.conv3")
        if x.shape[1] != y.shape[1]:
            x = conv(x, f"{name}.shortcut", stride)
        return (x + y).relu()

    x = F.max_pool2d(conv(images, "stem.conv1", stride=2).relu(), 3, stride=2, padding=1)
    for stage, blocks in enumerate(architecture.blocks, start=2):
        for number in range(blocks):
            x = block(x, f"res{stage}.{number}", stride=2 if stage > 2 and number == 0 else 1)
    if left:
        raise ValueError(f"Detectron2 has no {next(iter(left))}")
    return x.mean((2, 3))


def settings_of(card: BackboneCard, path: Path) -> dict[str, dict[str, Any]]:
    """What Detectron2 must be told of a backbone and its file."""
    architecture = architecture_of(card)
    width = architecture.width
    return {
        "INPUT": {"FORMAT": "RGB"},
        "MODEL": {
            "WEIGHTS": str(path),
            "PIXEL_MEAN": [round(255 * value, 3) for value in card.mean],
            "PIXEL_STD": [round(255 * value, 3) for value in card.std],
            "RESNETS": {
                "DEPTH": architecture.depth,
                "STRIDE_IN_1X1": False,
                "STEM_OUT_CHANNELS": width,
                "RES2_OUT_CHANNELS": width if architecture.block == "basic" else 4 * width,
                "WIDTH_PER_GROUP": width,
            },
        },
    }


def loading(path: Path, contents: Contents) -> str:
    settings = settings_of(contents.card, path)
    lines = yaml.safe_dump(settings, sort_keys=False, default_flow_style=None)
    return lines.rstrip()


def architecture_of(card: BackboneCard) -> Architecture:
    """What the backbone is, if Detectron2 can make it."""
    architecture = BACKBONES.get(card.backbone)
    if architecture is None:
        raise UserError(f"Detectron2 has no {card.backbone}: export this one to timm or onnx.")
    if architecture.depth not in DEPTHS:
        raise UserError(
            f"Detectron2 has no {card.backbone} ResNet: export this one to torchvision or onnx."
        )
    if card.stem != "imagenet":
        raise UserError(
            f"Detectron2 has no {card.stem} stem: export this one to torchvision or onnx."
        )
    return architecture
