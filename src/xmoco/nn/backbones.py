"""Backbones: ResNets of several depths and widths, and models of timm, without the classifier.

A backbone maps images (N, 3, H, W) to pooled features (N, ``feature_size``). Parameter names are
torchvision's or timm's own, so weights go to and fro. ``nn/architectures.py`` lists what there is.
"""

from contextlib import suppress
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torchvision.models.resnet import BasicBlock, Bottleneck, ResNet

from xmoco.errors import UserError
from xmoco.nn.architectures import (
    BACKBONES,
    check_backbone,
    check_stem,
    timm_library,
    timm_name,
)

Block = type[BasicBlock | Bottleneck]
BLOCKS: dict[str, Block] = {"basic": BasicBlock, "bottleneck": Bottleneck}
OVER_SAMPLE = ("LayerNorm", "GroupNorm", "RMSNorm", "RmsNorm", "SimpleNorm")
"""How the layers begin, torch's and timm's, that normalise each sample by itself."""


class ScaledResNet(ResNet):
    """A ResNet whose every stage has ``width`` · (1, 2, 4, 8) channels, its stem ``width``.

    Width 64 is the ordinary ResNet. (torchvision's ``wide_resnet50_2`` widens only the inner
    convolutions, which is another network.)
    """

    def __init__(self, block: Block, layers: list[int], width: int, num_classes: int = 1000):
        super().__init__(block, [1, 1, 1, 1], num_classes=1)  # its stages are replaced below
        self.inplanes = width
        self.conv1 = nn.Conv2d(3, width, kernel_size=7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.layer1 = self._make_layer(block, width, layers[0])
        self.layer2 = self._make_layer(block, 2 * width, layers[1], stride=2)
        self.layer3 = self._make_layer(block, 4 * width, layers[2], stride=2)
        self.layer4 = self._make_layer(block, 8 * width, layers[3], stride=2)
        self.fc = nn.Linear(8 * width * block.expansion, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")


def build_backbone(name: str, stem: str = "imagenet", size: int = 224) -> nn.Module:
    """A freshly initialised backbone. ``stem`` "cifar" is 3×3, stride 1, without pooling; ``size``
    of images matters to some models of timm, such as transformers."""
    try:
        check_stem(check_backbone(name), stem)
    except ValueError as error:
        raise UserError(f"no backbone {name} with {stem} stem: {error}.") from None
    model = timm_name(name)
    if model is None:
        resnet: nn.Module = build_resnet(name, stem)
        return resnet
    backbone, _ = create_timm(model, size)
    check_size(name, backbone, size)
    return backbone


def build_resnet(name: str, stem: str = "imagenet") -> ResNet:
    """One of ``BACKBONES``."""
    architecture = BACKBONES[name]
    block, layers = BLOCKS[architecture.block], list(architecture.blocks)
    if architecture.torchvision is None:
        backbone: ResNet = ScaledResNet(block, layers, architecture.width)
    else:
        backbone = ResNet(block, layers)
    if stem == "cifar":
        channels = backbone.conv1.out_channels
        backbone.conv1 = nn.Conv2d(3, channels, kernel_size=3, padding=1, bias=False)
        nn.init.kaiming_normal_(backbone.conv1.weight, mode="fan_out", nonlinearity="relu")
        backbone.add_module("maxpool", nn.Identity())
    backbone.add_module("fc", nn.Identity())
    return backbone


def create_timm(name: str, size: int, **options: Any) -> tuple[nn.Module, dict[str, Any]]:
    """timm's model without its classifier, for images of ``size`` and, where it can, of others; and
    the arguments that make it so."""
    library = timm_library()
    taken: list[dict[str, Any]] = [
        {"img_size": size, "dynamic_img_size": True},
        {"img_size": size},
        {},
    ]
    for arguments in taken:
        try:
            model: nn.Module = library.create_model(name, num_classes=0, **arguments, **options)
        except TypeError:  # it has no such arguments
            if arguments:
                continue
            raise
        break
    model.register_forward_pre_hook(_SizeCheck(f"timm:{name}"))
    return model, arguments


class _SizeCheck:
    """Asks a model of timm, once for every size of images it is shown, whether it can take them."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.suits: set[tuple[int, ...]] = set()

    def __call__(self, model: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if torch.compiler.is_exporting():
            return  # sizes may be symbols then
        size = tuple(inputs[0].shape[2:])
        if size not in self.suits:
            _try(self.name, model, inputs[0].new_zeros(1, 3, *size))
            self.suits.add(size)


def check_size(name: str, backbone: nn.Module, size: int) -> None:
    """A ``UserError`` if the backbone cannot take images of this size, as some of timm's."""
    if timm_name(name) is not None:
        _try(name, backbone, next(backbone.parameters()).new_zeros(1, 3, size, size))


def suitable_size(name: str, wanted: int) -> int:
    """The size of images that a backbone can take: as wanted, or in patches of 14 pixels, as many
    transformers cut them, or what it is made for."""
    model = timm_name(name)
    if model is None:
        return wanted
    for size in (wanted, wanted // 14 * 14):
        with suppress(UserError):
            outline(name, size)
            return size
    return int(timm_library().get_pretrained_cfg(model).input_size[-1])


def wants_adamw(name: str, size: int) -> bool:
    """Whether a backbone is trained like a transformer. Its layers tell: those that are trained by
    SGD are normalised over the batch."""
    if timm_name(name) is None:
        return False
    kinds = [
        {kind.__name__ for kind in type(layer).__mro__} for layer in outline(name, size).modules()
    ]
    over_batch = sum("_BatchNorm" in names for names in kinds)
    over_sample = sum(any(kind.startswith(OVER_SAMPLE) for kind in names) for names in kinds)
    return over_sample > over_batch or over_sample == over_batch == 0


@lru_cache(maxsize=8)
def outline(name: str, size: int) -> nn.Module:
    """A model of timm for images of this size, to look at: where possible, without its memory."""
    with torch.random.fork_rng(devices=[]):
        try:
            with torch.device("meta"):
                return build_backbone(name, size=size)
        except Exception:  # of some models of timm, which look at numbers; or it cannot be at all
            return build_backbone(name, size=size)


def _try(name: str, model: nn.Module, image: Tensor) -> None:
    """Which sizes suit is told nowhere, and every model that cannot take one fails in its way."""
    was_training = model.training
    try:
        with torch.no_grad():
            features: Tensor = model.eval().forward(image)
    except (AssertionError, RuntimeError, IndexError, ValueError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
        side = image.shape[-1]
        raise UserError(f"{name} cannot take images of {side} px ({reason}).") from None
    finally:
        model.train(was_training)
    if features.shape != (1, feature_size(model)):
        numbers = " × ".join(map(str, features.shape[1:]))
        raise UserError(f"{name} makes {numbers} numbers of an image, so it is no backbone here.")


def feature_size(backbone: nn.Module) -> int:
    """Length of the pooled features."""
    if isinstance(backbone, ResNet):
        last = backbone.layer4[-1]
        return int((last.bn3 if isinstance(last, Bottleneck) else last.bn2).num_features)
    # Some models of timm widen their features once more where a classifier would follow.
    length: Any = getattr(backbone, "head_hidden_size", None) or backbone.num_features
    return int(length)
