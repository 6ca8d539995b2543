"""Backbones: sizes, names of parameters, features; models of timm."""

import copy
import sys

import pytest
import timm
import torch
import torchvision.models
from torch import nn

from xmoco.config import InputConfig, ModelConfig
from xmoco.errors import UserError
from xmoco.nn import architectures
from xmoco.nn.architectures import BACKBONES
from xmoco.nn.backbones import build_backbone, build_resnet, check_size, feature_size
from xmoco.nn.encoder import build_encoder
from xmoco.nn.encoding import EncoderRunner
from xmoco.settings import load_config

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
def test_wide_backbones_have_the_specified_parameters(name: str, millions: float) -> None:
    with torch.device("meta"):
        classifier = 1000 * (LENGTHS[name] + 1)
        assert round((parameters(build_resnet(name)) + classifier) / 1e6, 1) == millions


@pytest.mark.parametrize("name", BACKBONES)
@pytest.mark.parametrize("stem", ["imagenet", "cifar"])
def test_features_are_as_long_as_announced(name: str, stem: str) -> None:
    with torch.device("meta"):
        backbone = build_backbone(name, stem)
        features = backbone(torch.empty(2, 3, 32, 32))
    assert features.shape == (2, feature_size(backbone))
    assert feature_size(backbone) == LENGTHS[name]


@pytest.mark.parametrize("name", [name for name, b in BACKBONES.items() if b.torchvision])
def test_parameters_are_torchvisions_without_the_classifier(name: str) -> None:
    with torch.device("meta"):
        ours = build_backbone(name).state_dict()
        theirs = torchvision.models.get_model(BACKBONES[name].torchvision).state_dict()
    shapes = {key: value.shape for key, value in theirs.items() if not key.startswith("fc.")}
    assert {key: value.shape for key, value in ours.items()} == shapes


@pytest.mark.parametrize("name", ["tiny", "resnet50w2", "resnet50w4"])
def test_scaled_backbones_use_torchvisions_names(name: str) -> None:
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


def test_the_number_in_a_name_is_the_depth() -> None:
    for name, architecture in BACKBONES.items():
        if name != "tiny":
            assert name.partition("w")[0] == f"resnet{architecture.depth}"


def test_standard_backbones_start_as_torchvisions() -> None:
    """The same random numbers make the same weights."""
    torch.manual_seed(0)
    ours = build_backbone("resnet18").state_dict()
    torch.manual_seed(0)
    theirs = torchvision.models.resnet18().state_dict()
    assert all(torch.equal(value, theirs[key]) for key, value in ours.items())


# Models of timm: a convolutional one, a transformer, batch norms that are not plain, a head that
# widens, a transformer of one size only.
ANY_SIZE = ["test_convnext", "test_vit", "test_efficientnet", "mobilenetv3_small_050"]
ONE_SIZE = "mixer_s32_224"


@pytest.mark.parametrize("name", ANY_SIZE)
def test_models_of_timm(name: str) -> None:
    backbone = build_backbone(f"timm:{name}", size=32).eval()
    images = torch.randn(2, 3, 32, 32)
    for size in (32, 64):
        with torch.no_grad():
            features = backbone(torch.randn(2, 3, size, size))
        assert features.shape == (2, feature_size(backbone))
    sized = {"img_size": 32} if name == "test_vit" else {}
    theirs = timm.create_model(name, num_classes=0, **sized).eval()
    theirs.load_state_dict(backbone.state_dict())
    with torch.no_grad():
        assert torch.equal(backbone(images), theirs(images))


def test_they_train_at_once_and_as_a_copy() -> None:
    backbone = copy.deepcopy(build_backbone("timm:test_convnext", size=32))
    assert backbone.training
    backbone(torch.randn(2, 3, 40, 40)).sum().backward()
    assert backbone.training
    assert all(parameter.grad is not None for parameter in backbone.parameters())


def test_a_model_of_one_size_says_so() -> None:
    backbone = build_backbone(f"timm:{ONE_SIZE}", size=64)
    check_size(f"timm:{ONE_SIZE}", backbone, 64)
    sentence = rf"timm:{ONE_SIZE} cannot take images of 96 px \(Input height"
    with pytest.raises(UserError, match=sentence):
        backbone(torch.randn(2, 3, 96, 96))
    assert backbone.training
    model = ModelConfig(backbone=f"timm:{ONE_SIZE}")
    with pytest.raises(UserError, match=sentence):
        build_encoder(model, InputConfig(size=64, eval_size=96))


def test_a_size_that_does_not_suit_at_all() -> None:
    with pytest.raises(UserError, match=r"cannot take images of 40 px \(.*divisible by patch size"):
        build_backbone("timm:test_vit", size=40)


def test_norms_that_cannot_be_stacked_are_told_of() -> None:
    model = ModelConfig(
        backbone="timm:test_efficientnet", batch_norm="split", batch_norm_groups=2, head_hidden=16
    )
    runner, encoder = EncoderRunner(model), build_encoder(model, InputConfig(size=32))
    runner.prepare(encoder)
    assert runner.notes == [
        "batch norm is not split in BatchNormAct2d: only plain layers of PyTorch can be"
    ]
    runner.optimize_for(torch.device("cuda"), encoder)
    assert "views go through the encoder one by one: BatchNormAct2d" in runner.notes[1]
    views = [torch.randn(4, 3, 32, 32) for _ in range(2)]
    for features in (*runner.encode(encoder, views), *runner.encode_keys(encoder, views)):
        assert features.shape == (4, 128)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            "backbone=resnet19",
            r"model.backbone = 'resnet19': there are tiny, resnet18, .*, resnet50w4 and timm:NAME "
            r"\(did you mean resnet1",
        ),
        (
            "backbone=timm:convnext_ato",
            r"'timm:convnext_ato': timm has no such model \(did you mean convnext_atto\?\)",
        ),
        ("backbone=timm:", "'timm:': timm has no such model"),
        ("backbone=3", r"model.backbone = '3': there are tiny"),
    ],
)
def test_unknown_names_are_refused_as_settings(change: str, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        load_config(None, [change])
    name = change.removeprefix("backbone=")
    with pytest.raises(UserError, match="no backbone"):
        build_backbone(name)


def test_models_of_timm_have_a_stem_of_their_own() -> None:
    assert load_config(None, ["backbone=timm:test_vit"]).model.stem == "imagenet"
    with pytest.raises(UserError, match=r"model.stem = 'cifar': timm:test_vit has a stem of its"):
        load_config("demo", ["backbone=timm:test_vit"])
    with pytest.raises(UserError, match="has a stem of its own; set stem=imagenet"):
        build_backbone("timm:test_vit", "cifar")


def test_timm_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)
    architectures.timm_models.cache_clear()
    with pytest.raises(
        UserError, match=r"'timm:test_vit': it needs timm: pip install 'xmoco\[timm"
    ):
        load_config(None, ["backbone=timm:test_vit"])
    assert load_config("demo").model.backbone == "tiny"
