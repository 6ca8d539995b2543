"""Backbones: torchvision's ResNets and relatives of other widths, without the classifier.

Parameter names are torchvision's, so weights go to and fro. A backbone maps images (N, 3, H, W) to
pooled features (N, ``feature_size``).
"""

from collections.abc import Callable

import torchvision.models
from torch import nn
from torchvision.models.resnet import BasicBlock, Bottleneck, ResNet

from xmoco.config import Backbone

Block = type[BasicBlock | Bottleneck]


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


BUILDERS: dict[Backbone, Callable[[], ResNet]] = {
    "tiny": lambda: ScaledResNet(BasicBlock, [1, 1, 1, 1], width=16),
    "resnet18": torchvision.models.resnet18,
    "resnet34": torchvision.models.resnet34,
    "resnet50": torchvision.models.resnet50,
    "resnet101": torchvision.models.resnet101,
    "resnet152": torchvision.models.resnet152,
    "resnet50w2": lambda: ScaledResNet(Bottleneck, [3, 4, 6, 3], width=128),
    "resnet50w4": lambda: ScaledResNet(Bottleneck, [3, 4, 6, 3], width=256),
}


def build_backbone(name: Backbone, stem: str = "imagenet") -> ResNet:
    """A freshly initialised backbone. ``stem`` "cifar" is 3×3, stride 1, without pooling."""
    backbone = BUILDERS[name]()
    if stem == "cifar":
        channels = backbone.conv1.out_channels
        backbone.conv1 = nn.Conv2d(3, channels, kernel_size=3, padding=1, bias=False)
        nn.init.kaiming_normal_(backbone.conv1.weight, mode="fan_out", nonlinearity="relu")
        backbone.add_module("maxpool", nn.Identity())
    backbone.add_module("fc", nn.Identity())
    return backbone


def feature_size(backbone: ResNet) -> int:
    """Length of the pooled features."""
    last = backbone.layer4[-1]
    return int((last.bn3 if isinstance(last, Bottleneck) else last.bn2).num_features)
