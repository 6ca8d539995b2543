"""Backbones: sizes, names of parameters, features."""

from typing import get_args

import pytest
import torch
import torchvision.models
from torch import nn

from xmoco.config import Backbone
from xmoco.nn.backbones import BUILDERS, build_backbone, feature_size

NAMES: tuple[Backbone, ...] = get_args(Backbone)
LENGTHS = {
    "tiny": 128,
    "resnet18": 512,
    "resnet34": 512,
    "resnet50": 2048,
    "resnet101": 2048,
    "resnet152": 2048,
    "resnet50w2": 4096,
    "resnet50w4": 8192,
}


def parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(("name", "millions"), [("resnet50w2", 98.0), ("resnet50w4", 383.6)])
def test_wide_backbones_have_the_specified_parameters(name: Backbone, millions: float) -> None:
    with torch.device("meta"):
        assert round(parameters(BUILDERS[name]()) / 1e6, 1) == millions


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("stem", ["imagenet", "cifar"])
def test_features_are_as_long_as_announced(name: Backbone, stem: str) -> None:
    with torch.device("meta"):
        backbone = build_backbone(name, stem)
        features = backbone(torch.empty(2, 3, 32, 32))
    assert features.shape == (2, feature_size(backbone))
    assert feature_size(backbone) == LENGTHS[name]


@pytest.mark.parametrize("name", [name for name in NAMES if hasattr(torchvision.models, name)])
def test_parameters_are_torchvisions_without_the_classifier(name: Backbone) -> None:
    with torch.device("meta"):
        ours = build_backbone(name).state_dict()
        theirs = torchvision.models.get_model(name).state_dict()
    shapes = {key: value.shape for key, value in theirs.items() if not key.startswith("fc.")}
    assert {key: value.shape for key, value in ours.items()} == shapes


@pytest.mark.parametrize("name", ["tiny", "resnet50w2", "resnet50w4"])
def test_scaled_backbones_use_torchvisions_names(name: Backbone) -> None:
    with torch.device("meta"):
        ours = set(build_backbone(name).state_dict())
        theirs = set(torchvision.models.resnet50().state_dict())
    assert ours <= theirs


def test_weights_go_to_torchvision_and_back() -> None:
    backbone, model = build_backbone("resnet18").eval(), torchvision.models.resnet18().eval()
    report = model.load_state_dict(backbone.state_dict(), strict=False)
    assert set(report.missing_keys) == {"fc.weight", "fc.bias"}
    assert not report.unexpected_keys
    images = torch.randn(2, 3, 32, 32)
    model.add_module("fc", nn.Identity())
    with torch.no_grad():
        assert torch.equal(model(images), backbone(images))
    back = build_backbone("resnet18")
    back.load_state_dict(model.state_dict())


def test_cifar_stem_keeps_the_resolution() -> None:
    backbone = build_backbone("tiny", "cifar")
    images = torch.randn(2, 3, 16, 16)
    stem = backbone.maxpool(backbone.relu(backbone.bn1(backbone.conv1(images))))
    assert stem.shape == (2, 16, 16, 16)
    backbone = build_backbone("tiny", "imagenet")
    stem = backbone.maxpool(backbone.relu(backbone.bn1(backbone.conv1(images))))
    assert stem.shape == (2, 16, 4, 4)


@pytest.mark.parametrize("stem", ["imagenet", "cifar"])
def test_every_convolution_starts_as_torchvision_starts_them(stem: str) -> None:
    """Kaiming normal by fan-out: activations neither die nor explode with depth."""
    torch.manual_seed(0)
    for module in build_backbone("tiny", stem).modules():
        if isinstance(module, nn.Conv2d):
            fan_out = module.out_channels * module.kernel_size[0] * module.kernel_size[1]
            expected = (2 / fan_out) ** 0.5
            assert module.weight.std().item() == pytest.approx(expected, rel=0.15)
