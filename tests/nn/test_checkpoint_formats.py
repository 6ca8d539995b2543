"""Other people's weights: every format there and back, and every way they can be wrong.

A checkpoint of each format is made here from modules that are put together as the project in
question puts them together, and saved as it saves them. The features of the loaded backbone must
be those of the original modules.
"""

import argparse
import copy
import os
import pickle
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
import torchvision.models
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.testing import assert_close
from torchvision.models.resnet import BasicBlock, Bottleneck, ResNet

import xmoco
from xmoco.errors import UserError
from xmoco.nn.architectures import timm_models
from xmoco.nn.backbones import ScaledResNet, build_backbone
from xmoco.nn.checkpoint_formats import (
    ARCHITECTURES,
    FORMATS,
    IMAGENET,
    _architecture,
    _backbone_names,
    find_backbone,
    flat_tensors,
)
from xmoco.nn.weights import load_backbone, load_weights, read_card
from xmoco.settings import load_config

IMAGES = torch.randn(3, 3, 40, 40, generator=torch.Generator().manual_seed(0))
Checkpoint = dict[str, Any]


def some_resnet(stem: str = "imagenet") -> ResNet:
    """A small ResNet that differs from a fresh one in all its tensors, statistics too."""
    network = build_backbone("tiny", stem)
    for tensor in network.state_dict().values():
        if tensor.is_floating_point():
            tensor.mul_(torch.rand_like(tensor) + 0.5).add_(0.1 * torch.rand_like(tensor))
        else:
            tensor.fill_(7)
    return network.eval()


def listed(network: ResNet) -> nn.Sequential:
    """The network cut into a list of modules without its last, as many projects do it."""
    return nn.Sequential(*list(network.children())[:-1])


def model(**parts: nn.Module) -> nn.Module:
    whole = nn.Module()
    for name, part in parts.items():
        whole.add_module(name, part)
    return whole


def head() -> nn.Sequential:
    return nn.Sequential(nn.Linear(128, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 8))


def with_head(network: ResNet, fc: nn.Module) -> ResNet:
    network = copy.deepcopy(network)
    network.add_module("fc", fc)
    return network


def parallel(whole: nn.Module) -> dict[str, Tensor]:
    """The state of a network wrapped for several devices."""
    return {f"module.{name}": tensor for name, tensor in whole.state_dict().items()}


def optimizer(**extra: Any) -> dict[str, Any]:
    return {
        "state": {0: {"momentum_buffer": torch.zeros(2)}},
        "param_groups": [{"lr": 0.1, **extra}],
    }


def moco(network: ResNet, fc: nn.Module) -> Checkpoint:
    whole = model(encoder_q=with_head(network, fc), encoder_k=with_head(some_resnet(), fc))
    whole.register_buffer("queue", torch.randn(8, 16))
    whole.register_buffer("queue_ptr", torch.zeros(1, dtype=torch.long))
    return {
        "epoch": 200,
        "arch": "resnet50",
        "state_dict": parallel(whole),
        "optimizer": optimizer(),
    }


def mocov1(network: ResNet) -> Checkpoint:
    return moco(network, nn.Linear(128, 8))


def mocov2(network: ResNet) -> Checkpoint:
    return moco(network, nn.Sequential(nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 8)))


def mocov3(network: ResNet) -> Checkpoint:
    whole = model(
        base_encoder=with_head(network, head()),
        momentum_encoder=with_head(some_resnet(), head()),
        predictor=nn.Linear(8, 8),
    )
    return {"epoch": 300, "state_dict": parallel(whole), "optimizer": optimizer(), "scaler": {}}


def swav(network: ResNet) -> Checkpoint:
    network = copy.deepcopy(network)
    network.add_module("projection_head", head())
    network.add_module("prototypes", nn.Linear(8, 30, bias=False))
    return parallel(network)


def deepclusterv2(network: ResNet) -> Checkpoint:
    network = copy.deepcopy(network)
    network.add_module("projection_head", head())
    network.add_module(
        "prototypes", model(prototypes0=nn.Linear(8, 30), prototypes1=nn.Linear(8, 30))
    )
    return parallel(network)


def dino(network: ResNet) -> Checkpoint:
    whole = model(backbone=network, head=head())
    other = model(backbone=some_resnet(), head=head())
    return {
        "student": parallel(other),
        "teacher": parallel(whole),
        "optimizer": optimizer(),
        "epoch": 800,
        "args": argparse.Namespace(arch="resnet50", lr=0.3),
        "dino_loss": {"center": torch.zeros(1, 8)},
    }


def byol_yaox12(network: ResNet) -> Checkpoint:
    whole = model(
        online_network=model(encoder=listed(network), projetion=head()),
        target_network=model(encoder=listed(some_resnet()), projetion=head()),
        predictor=model(predictor=head()),
    )
    return {"config": {"model": {}}, "epoch": 300, "model": parallel(whole), "amp": {}}


def byol_sthalles(network: ResNet) -> Checkpoint:
    online = model(encoder=listed(network), projetion=head())
    target = model(encoder=listed(some_resnet()), projetion=head())
    return {
        "online_network_state_dict": online.state_dict(),
        "target_network_state_dict": target.state_dict(),
        "optimizer_state_dict": optimizer(),
    }


def byol_lucidrains(network: ResNet) -> Checkpoint:
    whole = model(
        net=network,
        online_encoder=model(net=network, projector=head()),
        online_predictor=head(),
        target_encoder=model(net=some_resnet(), projector=head()),
    )
    return dict(whole.state_dict())


def simsiam(network: ResNet) -> Checkpoint:
    whole = model(encoder=with_head(network, head()), predictor=head())
    return {"epoch": 100, "state_dict": parallel(whole), "optimizer": optimizer()}


def barlowtwins(network: ResNet) -> Checkpoint:
    whole = model(backbone=network, projector=head(), bn=nn.BatchNorm1d(8, affine=False))
    return {"epoch": 1000, "model": parallel(whole), "optimizer": optimizer()}


def vicreg(network: ResNet) -> Checkpoint:
    whole = model(backbone=network, projector=head())
    return {"epoch": 1000, "model": parallel(whole), "optimizer": optimizer()}


def lightning(whole: nn.Module) -> Checkpoint:
    return {
        "epoch": 199,
        "global_step": 10,
        "pytorch-lightning_version": "2.0.0",
        "state_dict": whole.state_dict(),
        "hyper_parameters": {"lr": 0.1},
        "optimizer_states": [optimizer()],
    }


def lightly_imagenet(network: ResNet) -> Checkpoint:
    whole = model(
        backbone=network,
        projection_head=model(layers=head()),
        query_backbone=some_resnet(),
        online_classifier=model(linear=nn.Linear(128, 10)),
    )
    return lightning(whole)


def lightly_listed(network: ResNet) -> Checkpoint:
    return lightning(model(backbone=listed(network), projection_head=model(layers=head())))


def lightly_dino(network: ResNet) -> Checkpoint:
    whole = model(
        student_backbone=listed(some_resnet()),
        student_head=head(),
        teacher_backbone=listed(network),
        teacher_head=head(),
    )
    return lightning(whole)


def solo(network: ResNet) -> Checkpoint:
    whole = model(
        backbone=network,
        classifier=nn.Linear(128, 10),
        projector=head(),
        momentum_backbone=some_resnet(),
        momentum_projector=head(),
    )
    whole.register_buffer("queue", torch.randn(2, 8, 16))
    return lightning(whole)


def solo_before(network: ResNet) -> Checkpoint:
    whole = model(encoder=network, classifier=nn.Linear(128, 10), predictor=head())
    return lightning(whole)


def vissl(network: ResNet) -> Checkpoint:
    """Its trunk keeps the parts of torchvision's ResNet in a dictionary of modules."""
    parts = {
        "conv1": network.conv1,
        "bn1": network.bn1,
        "conv1_relu": network.relu,
        "maxpool": network.maxpool,
        **{f"layer{n}": getattr(network, f"layer{n}") for n in (1, 2, 3, 4)},
        "avgpool": network.avgpool,
        "flatten": nn.Flatten(1),
    }
    trunk = model(_feature_blocks=nn.ModuleDict(parts))
    base_model = {
        "model": {"trunk": trunk.state_dict(), "heads": {"0.clf.0.weight": torch.ones(2)}}
    }
    return {
        "phase_idx": 200,
        "iteration": 1000,
        "loss": {"queue": torch.zeros(2, 3)},
        "classy_state_dict": {
            "train": True,
            "base_model": base_model,
            "optimizer": optimizer(),
            "loss": {"queue": torch.zeros(2, 3)},
        },
        "type": "consolidated",
    }


class HuggingFaceConv(nn.Module):
    """A convolution with its norm, under the names of transformers."""

    def __init__(self, convolution: nn.Module, normalization: nn.Module) -> None:
        super().__init__()
        self.convolution, self.normalization = convolution, normalization


def hugging_face_block(block: BasicBlock | Bottleneck) -> nn.Module:
    layers = [HuggingFaceConv(block.conv1, block.bn1), HuggingFaceConv(block.conv2, block.bn2)]
    if isinstance(block, Bottleneck):
        layers.append(HuggingFaceConv(block.conv3, block.bn3))
    shortcut = HuggingFaceConv(*block.downsample) if block.downsample else nn.Identity()
    return model(shortcut=shortcut, layer=nn.Sequential(*layers))


def hugging_face_model(network: ResNet) -> nn.Module:
    """ResNetModel of transformers, as far as names go."""
    stages = [network.layer1, network.layer2, network.layer3, network.layer4]
    blocks = [nn.Sequential(*map(hugging_face_block, stage)) for stage in stages]
    return model(
        embedder=model(
            embedder=HuggingFaceConv(network.conv1, network.bn1), pooler=network.maxpool
        ),
        encoder=model(stages=nn.ModuleList([model(layers=layers) for layers in blocks])),
        pooler=network.avgpool,
    )


def hugging_face(network: ResNet) -> Checkpoint:
    """ResNetForImageClassification of transformers."""
    classifier = nn.Sequential(nn.Flatten(), nn.Linear(128, 10))
    return dict(model(resnet=hugging_face_model(network), classifier=classifier).state_dict())


def hugging_face_bare(network: ResNet) -> Checkpoint:
    return dict(hugging_face_model(network).state_dict())


def plain(network: ResNet) -> Checkpoint:
    return dict(with_head(network, nn.Linear(128, 1000)).state_dict())


MAKERS: dict[Callable[[ResNet], Checkpoint], tuple[str, set[str]]] = {
    mocov1: ("mocov1", {"encoder_q.fc", "encoder_k", "queue", "queue_ptr", "optimizer"}),
    mocov2: ("mocov2", {"encoder_q.fc", "encoder_k", "queue", "queue_ptr", "optimizer"}),
    mocov3: ("mocov3", {"base_encoder.fc", "momentum_encoder", "predictor", "optimizer"}),
    swav: ("swav", {"projection_head", "prototypes"}),
    deepclusterv2: ("deepclusterv2", {"projection_head", "prototypes"}),
    dino: ("dino", {"student", "teacher.head", "optimizer", "dino_loss"}),
    byol_yaox12: ("byol", {"online_network.projetion", "target_network", "predictor"}),
    byol_sthalles: (
        "byol",
        {
            "online_network_state_dict.projetion",
            "target_network_state_dict",
            "optimizer_state_dict",
        },
    ),
    byol_lucidrains: (
        "byol",
        {"net", "online_encoder.projector", "online_predictor", "target_encoder"},
    ),
    simsiam: ("simsiam", {"encoder.fc", "predictor", "optimizer"}),
    barlowtwins: ("barlowtwins", {"projector", "bn", "optimizer"}),
    vicreg: ("vicreg", {"projector", "optimizer"}),
    lightly_imagenet: ("lightly", {"projection_head", "query_backbone", "online_classifier"}),
    lightly_listed: ("lightly", {"projection_head"}),
    lightly_dino: ("lightly", {"student_backbone", "student_head", "teacher_head"}),
    solo: (
        "solo-learn",
        {"classifier", "projector", "momentum_backbone", "momentum_projector", "queue"},
    ),
    solo_before: ("solo-learn", {"classifier", "predictor"}),
    vissl: (
        "vissl",
        {
            "loss",
            "classy_state_dict.base_model.model.heads",
            "classy_state_dict.optimizer",
            "classy_state_dict.loss",
        },
    ),
    hugging_face: ("huggingface", {"classifier"}),
    hugging_face_bare: ("huggingface", set()),
    plain: ("torchvision", {"fc"}),
}


@pytest.mark.parametrize("make", MAKERS, ids=lambda make: make.__name__)
def test_every_format(tmp_path: Path, make: Callable[[ResNet], Checkpoint]) -> None:
    network = some_resnet()
    path = tmp_path / "weights.pth.tar"
    torch.save(make(network), path)
    whose, dropped = MAKERS[make]
    loaded = load_weights(path)
    assert not loaded.backbone.training
    with torch.no_grad():
        assert_close(loaded.backbone(IMAGES), network(IMAGES), rtol=0, atol=0)
    assert loaded.report.format == whose
    assert set(loaded.report.dropped) == dropped
    assert loaded.report.loaded == len(network.state_dict())
    assert loaded.report.missing == ()
    assert loaded.report.labelled == (make in (plain, hugging_face))
    card, where = read_card(path)
    assert where == path
    assert card == loaded.card
    assert (card.backbone, card.stem, card.size) == ("tiny", "imagenet", 224)
    assert (card.mean, card.std) == ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    assert card.method == ("weights" if make is plain else f"{whose} (weights)")


def test_every_format_is_tested() -> None:
    assert {name for name, _ in MAKERS.values()} == {row.name for row in FORMATS}


@pytest.mark.parametrize("make", [hugging_face_bare, vissl])
def test_bottlenecks_under_names_of_others(make: Callable[[ResNet], Checkpoint]) -> None:
    """Three layers in a block, several blocks in a stage, a shortcut in every first one."""
    with torch.device("meta"):
        network = build_backbone("resnet50")
        assert isinstance(network, ResNet)
        names = _backbone_names(flat_tensors(make(network)), _prefix_of(make))
    assert sorted(names.values()) == sorted(network.state_dict())


def _prefix_of(make: Callable[[ResNet], Checkpoint]) -> str:
    return next(row.prefix for row in FORMATS[::-1] if row.name == MAKERS[make][0])


@pytest.mark.parametrize("cut", [lambda network: network, listed], ids=["whole", "listed"])
@pytest.mark.parametrize("prefix", ["my.", "a.b.c.", "0."])
def test_a_single_resnet_under_any_prefix(
    tmp_path: Path, prefix: str, cut: Callable[[ResNet], nn.Module]
) -> None:
    network = some_resnet()
    tensors = {f"{prefix}{k}": v for k, v in cut(network).state_dict().items()}
    torch.save(tensors | {"head.weight": torch.zeros(2, 2)}, tmp_path / "weights.pth")
    loaded = load_weights(tmp_path / "weights.pth")
    with torch.no_grad():
        assert_close(loaded.backbone(IMAGES), network(IMAGES), rtol=0, atol=0)
    assert loaded.report.format == f"torchvision under {prefix}"
    assert loaded.report.dropped == ("head",)
    assert not loaded.report.labelled
    assert loaded.card.method == f"torchvision under {prefix} (weights)"


def test_a_classifier_under_a_prefix_was_trained_with_labels(tmp_path: Path) -> None:
    torch.save({f"my.{k}": v for k, v in plain(some_resnet()).items()}, tmp_path / "weights.pth")
    assert load_weights(tmp_path / "weights.pth").report.labelled
    assert not load_weights(tmp_path / "weights.pth", labelled=False).report.labelled


@pytest.mark.parametrize("labelled", [None, True, False])
def test_who_knows_better_says_whether_there_were_labels(
    tmp_path: Path, labelled: bool | None
) -> None:
    torch.save(plain(some_resnet()), tmp_path / "weights.pth")
    report = load_weights(tmp_path / "weights.pth", labelled=labelled).report
    assert report.labelled == (labelled is not False)


@pytest.mark.parametrize("ending", [".pth", ".pt", ".ckpt", ".safetensors", ".PTH", ".pkl", ""])
def test_endings_and_the_format_before_zip(tmp_path: Path, ending: str) -> None:
    network = some_resnet()
    path = tmp_path / f"weights{ending}"
    if ending == ".safetensors":
        save_file({f"module.{k}": v for k, v in plain(network).items()}, path)
    else:
        torch.save(plain(network), path, _use_new_zipfile_serialization=ending == ".ckpt")
    with torch.no_grad():
        assert_close(load_backbone(path)(IMAGES), network(IMAGES), rtol=0, atol=0)


def test_torch_compile_and_parallel_wrappers_leave_no_trace() -> None:
    whole = model(backbone=some_resnet(), projector=head())
    tensors = {f"_orig_mod.module.{k}": v for k, v in whole.state_dict().items()}
    assert list(flat_tensors({"model": tensors})) == list(whole.state_dict())


def test_real_models_of_torchvision_and_timm(tmp_path: Path) -> None:
    for network in (torchvision.models.resnet18(), timm.create_model("resnet18")):
        torch.save(network.state_dict(), tmp_path / "weights.pth")
        loaded = load_weights(tmp_path / "weights.pth")
        assert loaded.card.backbone == "resnet18"
        assert loaded.report.dropped == ("fc",)
        network.add_module("fc", nn.Identity())
        with torch.no_grad():
            assert_close(loaded.backbone(IMAGES), network.eval()(IMAGES))


@pytest.mark.parametrize("name", ARCHITECTURES.values())
@pytest.mark.parametrize("stem", ["imagenet", "cifar"])
def test_every_architecture_is_told_by_its_shapes(name: Any, stem: str) -> None:
    with torch.device("meta"):
        state = build_backbone(name, stem).state_dict()
    assert _architecture(state, "here") == (name, stem)


# CIFAR stems: where projects differ in more than names


def test_cifar_stem(tmp_path: Path) -> None:
    network = some_resnet("cifar")
    torch.save(mocov2(network), tmp_path / "weights.pth")
    loaded = load_weights(tmp_path / "weights.pth")
    assert (loaded.card.stem, loaded.card.size) == ("cifar", 32)
    with torch.no_grad():
        assert_close(loaded.backbone(IMAGES), network(IMAGES), rtol=0, atol=0)


def test_mean_and_std_of_a_cifar_stem_are_a_guess(tmp_path: Path) -> None:
    """The recipe's for CIFAR-10, but of lightly those that its benchmarks have."""
    path = tmp_path / "weights.pth"
    torch.save(mocov2(some_resnet("cifar")), path)
    loaded, recipe = load_weights(path), load_config("cifar10").input
    assert (loaded.card.mean, loaded.card.std) == (recipe.mean, recipe.std)
    assert str(loaded.report).endswith("; mean and std are a guess: CIFAR-10's")
    torch.save(lightly_listed(some_resnet("cifar")), path)
    loaded = load_weights(path)
    assert (loaded.card.mean, loaded.card.std) == IMAGENET
    assert str(loaded.report).endswith("; mean and std are a guess: ImageNet's")


def test_who_knows_better_says_mean_and_std(tmp_path: Path) -> None:
    path, third, half = tmp_path / "weights.pth", (0.3, 0.3, 0.3), (0.5, 0.5, 0.5)
    torch.save(mocov2(some_resnet("cifar")), path)
    loaded = load_weights(path, mean=third, std=half)
    assert (loaded.card.mean, loaded.card.std) == (third, half)
    assert loaded.report.notes == ()
    loaded = load_weights(path, mean=third)
    assert loaded.card.mean == third
    assert loaded.report.notes == ("std is a guess: CIFAR-10's",)  # the rest still is
    assert load_weights(path, std=half).report.notes == ("mean is a guess: CIFAR-10's",)


def test_cifar_stem_of_solo_learn_pads_more(tmp_path: Path) -> None:
    network = some_resnet("cifar")
    network.conv1.padding = (2, 2)
    torch.save(solo(network), tmp_path / "weights.ckpt")
    with torch.no_grad():
        loaded = load_backbone(tmp_path / "weights.ckpt")(IMAGES)
        assert_close(loaded, network(IMAGES), rtol=0, atol=0)
        network.conv1.padding = (1, 1)
        assert (loaded - network(IMAGES)).abs().max() > 1e-3


class LightlyBlock(nn.Module):
    """A basic block with lightly's names."""

    def __init__(self, block: BasicBlock) -> None:
        super().__init__()
        self.conv1, self.bn1 = block.conv1, block.bn1
        self.conv2, self.bn2 = block.conv2, block.bn2
        self.shortcut = block.downsample or nn.Sequential()

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(out)) + self.shortcut(x))


def test_cifar_benchmark_of_lightly_has_no_first_relu(tmp_path: Path) -> None:
    network = some_resnet("cifar")
    stages = [
        nn.Sequential(*(LightlyBlock(block) for block in stage))
        for stage in (network.layer1, network.layer2, network.layer3, network.layer4)
    ]
    theirs = nn.Sequential(network.conv1, network.bn1, *stages, nn.AdaptiveAvgPool2d(1))
    whole = model(backbone=theirs, projection_head=head())
    torch.save(lightning(whole), tmp_path / "weights.ckpt")
    loaded = load_weights(tmp_path / "weights.ckpt")
    assert loaded.report.format == "lightly"
    with torch.no_grad():
        assert_close(loaded.backbone(IMAGES), theirs(IMAGES).flatten(1))


def test_split_batch_norm_is_averaged(tmp_path: Path) -> None:
    network = some_resnet("cifar")
    checkpoint = lightly_listed(network)
    for name, tensor in checkpoint["state_dict"].items():
        if name.startswith("backbone.") and ".running_" in name:
            noise = torch.linspace(-0.1, 0.1, 4)[:, None]  # its mean is 0
            checkpoint["state_dict"][name] = (tensor + noise).flatten()
    torch.save(checkpoint, tmp_path / "weights.ckpt")
    with torch.no_grad():
        assert_close(load_backbone(tmp_path / "weights.ckpt")(IMAGES), network(IMAGES))


# Reports


def test_missing_batch_counters_are_reported(tmp_path: Path) -> None:
    network = some_resnet()
    state = {k: v for k, v in network.state_dict().items() if "num_batches" not in k}
    torch.save(state, tmp_path / "weights.pth")
    loaded = load_weights(tmp_path / "weights.pth")
    counters = {k for k in network.state_dict() if "num_batches" in k}
    assert set(loaded.report.missing) == counters
    assert str(loaded.report) == (
        f"format torchvision: {len(state)} tensors loaded; dropped: nothing; "
        f"missing: {len(counters)} batch counters"
    )
    with torch.no_grad():
        assert_close(loaded.backbone(IMAGES), network(IMAGES), rtol=0, atol=0)


def test_report_names_what_was_dropped() -> None:
    report = str(find_backbone(flat_tensors(swav(some_resnet())), "here").report)
    assert "dropped: projection_head, prototypes; missing: nothing" in report


# What is refused


def refusal(path: Path, content: object) -> str:
    torch.save(content, path)
    with pytest.raises(UserError) as error:
        load_backbone(path)
    sentence = str(error.value)
    assert str(path) in sentence
    assert "\n" not in sentence
    with pytest.raises(UserError):
        read_card(path)
    return sentence


def test_unknown_format_shows_the_first_names(tmp_path: Path) -> None:
    state = {f"some.name{n}.weight": torch.zeros(2) for n in range(9)}
    sentence = refusal(tmp_path / "weights.pth", {"state_dict": state})
    assert "some.name0.weight, some.name1.weight" in sentence
    assert "name4.weight, …" in sentence
    assert "name5" not in sentence
    sentence = refusal(tmp_path / "weights.pth", {"x.weight": torch.zeros(2)})
    assert sentence.endswith("such names: x.weight.")


def test_several_resnets_where_nobody_has_them(tmp_path: Path) -> None:
    state = model(mine=some_resnet(), yours=some_resnet()).state_dict()
    sentence = refusal(tmp_path / "weights.pth", state)
    assert "several ResNets, under mine. and yours., and nobody's format says which" in sentence


def test_a_regnet_of_hugging_face_is_no_resnet(tmp_path: Path) -> None:
    """Both have the same names but for the first."""
    state = {f"regnet.{k}": v for k, v in hugging_face_bare(some_resnet()).items()}
    assert "holds a RegNet, but" in refusal(tmp_path / "weights.pth", state)


def test_no_tensors(tmp_path: Path) -> None:
    assert "none at all" in refusal(tmp_path / "weights.pth", {"epoch": 3, "state_dict": {}})
    assert "no named tensors" in refusal(tmp_path / "weights.pth", [torch.zeros(3)])


@pytest.mark.parametrize(
    ("build", "found"),
    [
        (lambda: torchvision.models.vit_b_16(), "a vision transformer"),
        (lambda: timm.create_model("vit_tiny_patch16_224"), "a vision transformer"),
        (lambda: torchvision.models.vgg11(), "a VGG, EfficientNet or the like"),
        (lambda: timm.create_model("convnext_atto"), "a RegNet, ConvNeXt or the like"),
        (lambda: timm.create_model("resnet18d"), "stem has several convolutions"),
        (
            lambda: torchvision.models.wide_resnet50_2(),
            "a relative of resnet50 whose layer1.0.conv1.weight is 128 × 64 × 1 × 1, "
            "not 64 × 64 × 1 × 1",
        ),
        (lambda: torchvision.models.resnext50_32x4d(), "a relative of resnet50 whose layer1.0"),
        (lambda: timm.create_model("seresnet18"), "has a layer1.0.se.fc1.weight as well"),
        (lambda: timm.create_model("resnet26"), "a ResNet of 2, 2, 2, 2 bottleneck blocks"),
        (
            lambda: ScaledResNet(BasicBlock, [1, 1, 1, 1], width=8),
            "a ResNet of 1, 1, 1, 1 basic blocks on a stem of 8 × 3 × 7 × 7",
        ),
    ],
)
def test_other_architectures_are_named(build: Callable[[], nn.Module], found: str) -> None:
    with torch.device("meta"):
        state = build().state_dict()
    for tensors in (state, {f"module.base_encoder.{k}": v for k, v in state.items()}):
        tensors = flat_tensors({"state_dict": tensors, "momentum_encoder.x": torch.zeros(1)})
        with pytest.raises(UserError, match="resnet18, resnet34, resnet50") as error:
            find_backbone(tensors, "weights.pth")
        assert found in str(error.value)


def test_incomplete_network(tmp_path: Path) -> None:
    state = plain(some_resnet())
    del state["layer3.0.bn2.running_mean"], state["layer3.0.conv2.weight"]
    sentence = refusal(tmp_path / "weights.pth", state)
    assert "a tiny without 2 of its tensors, as layer3.0.conv2.weight" in sentence


class Malice:
    def __init__(self, call: tuple[Callable[..., Any], tuple[Any, ...]]) -> None:
        self.call = call

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.call


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "before zip"])
@pytest.mark.parametrize("ending", [".pth", ".pt", ".ckpt", ".pth.tar", ".bin"])
def test_code_in_a_pickle_is_not_run(tmp_path: Path, ending: str, zipped: bool) -> None:
    for function, argument in ((os.mkdir, str(tmp_path / "trap")), (exec, "1/0")):
        path = tmp_path / f"weights{ending}"
        content = plain(some_resnet()) | {"extra": Malice((function, (argument,)))}
        torch.save(content, path, _use_new_zipfile_serialization=zipped)
        with pytest.raises(UserError, match=r"could run code.*refused"):
            load_backbone(path)
        assert not (tmp_path / "trap").exists()


def test_a_function_in_the_optimizer_of_barlow_twins_is_not_looked_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its checkpoints name a function of the training program, which nobody else has."""

    def exclude_bias_and_norm() -> None: ...

    exclude_bias_and_norm.__module__ = "__main__"
    exclude_bias_and_norm.__qualname__ = "exclude_bias_and_norm"
    network = some_resnet()
    checkpoint = barlowtwins(network)
    checkpoint["optimizer"] = optimizer(weight_decay_filter=exclude_bias_and_norm)
    with monkeypatch.context() as training_program:
        main = sys.modules["__main__"]
        training_program.setattr(main, "exclude_bias_and_norm", exclude_bias_and_norm, False)
        torch.save(checkpoint, tmp_path / "checkpoint.pth")
    allowed = torch.serialization.get_safe_globals()
    assert load_weights(tmp_path / "checkpoint.pth").report.format == "barlowtwins"
    assert set(torch.serialization.get_safe_globals()) == set(allowed)  # no more than before


@pytest.mark.parametrize("core", ["core", "_core"])  # before and since numpy 2
@pytest.mark.parametrize("kind", [np.float64, np.float32, np.int64, np.int32, np.uint8, np.bool_])
def test_numbers_of_numpy_do_no_harm(tmp_path: Path, kind: type, core: str) -> None:
    path = tmp_path / "checkpoint.pth"
    content = {"state_dict": plain(some_resnet()), "epoch": kind(1), "best": [kind(0)]}
    torch.save(content, path, _use_new_zipfile_serialization=False)
    names = re.compile(rb"numpy\.(_core|core)\.multiarray")
    assert names.search(path.read_bytes())
    path.write_bytes(names.sub(f"numpy.{core}.multiarray".encode(), path.read_bytes()))
    assert load_weights(path).report.format == "torchvision"


def test_objects_in_numpy_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.pth"
    torch.save(plain(some_resnet()) | {"history": np.array(["a", None])}, path)
    with pytest.raises(UserError, match=r"could run code.*refused"):
        load_weights(path)


def test_pickles_are_read_as_weights_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save(plain(some_resnet()), tmp_path / "weights.pth")
    seen = []
    load = torch.load

    def spy(*args: Any, **kwargs: Any) -> Any:
        seen.append(kwargs["weights_only"])
        return load(*args, **kwargs)

    monkeypatch.setattr(torch, "load", spy)
    load_backbone(tmp_path / "weights.pth")
    assert seen == [True]


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "before zip"])
@pytest.mark.parametrize("share", [0, 0.0001, 0.01, 0.5, 0.9, 0.9999])
def test_truncated_checkpoint(tmp_path: Path, zipped: bool, share: float) -> None:
    path = tmp_path / "weights.pth"
    torch.save(plain(some_resnet()), path, _use_new_zipfile_serialization=zipped)
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])
    with pytest.raises(UserError, match="damaged or no checkpoint of PyTorch"):
        load_backbone(path)


@pytest.mark.parametrize(
    "content", [b"hello\n", b"\0" * 100, pickle.dumps({"a": 1}, protocol=2), b"PK\3\4"]
)
def test_no_checkpoint_at_all(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "weights.pth"
    path.write_bytes(content)
    with pytest.raises(UserError, match="damaged or no checkpoint of PyTorch"):
        load_backbone(path)


TENSORS = plain(some_resnet())


@settings(max_examples=30, deadline=None)
@given(
    name=st.sampled_from(list(TENSORS)), shape=st.none() | st.lists(st.integers(0, 5), max_size=4)
)
def test_no_tensor_out_of_place_goes_unnoticed(name: str, shape: list[int] | None) -> None:
    tensors = dict(TENSORS)
    right = name.startswith("fc.") or (shape is None and name.endswith("num_batches_tracked"))
    right = right or (shape == [] and name.endswith("num_batches_tracked"))
    if shape is None:
        del tensors[name]
    else:
        tensors[name] = torch.zeros(shape)
    if right:
        find_backbone(tensors, "here")
    else:
        with pytest.raises(UserError, match="here"):
            find_backbone(tensors, "here")


# Models by name


def test_torchvision_model_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    network = torchvision.models.resnet18()
    asked = []

    def download(url: str, **options: Any) -> dict[str, Tensor]:
        asked.append((url, options["weights_only"], options["check_hash"]))
        return dict(network.state_dict())

    monkeypatch.setattr("torchvision.models._api.load_state_dict_from_url", download)
    names = ("torchvision:resnet18", Path("torchvision:resnet18:IMAGENET1K_V1"))
    for name in names:
        loaded = load_weights(name)
        assert read_card(name) == (loaded.card, Path(name))
        assert loaded.card.method == str(name)
        assert (loaded.card.backbone, loaded.card.size) == ("resnet18", 224)
    url = torchvision.models.ResNet18_Weights.DEFAULT.url
    assert asked == [(url, True, True)] * 4
    network.add_module("fc", nn.Identity())
    with torch.no_grad():
        assert_close(loaded.backbone(IMAGES), network.eval()(IMAGES))


def trained_by_timm(monkeypatch: pytest.MonkeyPatch) -> list[nn.Module]:
    """Lets timm make models without fetching their weights; those it made."""
    made, create_model = [], timm.create_model

    def create(name: str, pretrained: bool, **arguments: Any) -> nn.Module:
        assert pretrained
        made.append(create_model(name, **arguments))
        return made[-1]

    monkeypatch.setattr(timm, "create_model", create)
    return made


def test_timm_model_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    made = trained_by_timm(monkeypatch)
    loaded = load_weights("timm:resnet18.a1_in1k")
    assert loaded.card.backbone == "resnet18"
    assert loaded.card.method == "timm:resnet18.a1_in1k"
    assert loaded.card.mean == (0.485, 0.456, 0.406)
    assert loaded.report.labelled
    with torch.no_grad():
        assert_close(loaded.backbone(IMAGES), made[-1].eval()(IMAGES))


def test_timm_model_that_is_no_resnet_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    made = trained_by_timm(monkeypatch)
    loaded = load_weights("timm:test_vit.r160_in1k")
    assert loaded.backbone is made[-1]
    assert not loaded.backbone.training
    assert (loaded.card.backbone, loaded.card.stem) == ("timm:test_vit", "imagenet")
    assert (loaded.card.size, loaded.card.mean) == (160, (0.5, 0.5, 0.5))
    assert loaded.report.format == "timm"
    assert loaded.report.labelled
    assert read_card("timm:test_vit.r160_in1k")[0] == loaded.card


@pytest.mark.parametrize("name", ["torchvision:resnet18", "timm:resnet18.a1_in1k"])
def test_no_network(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError("no route to host.\nmore")

    monkeypatch.setattr("torchvision.models._api.load_state_dict_from_url", fail)
    monkeypatch.setattr(timm, "create_model", fail)
    with pytest.raises(UserError, match=rf"weights of {name}.*\(no route to host\).*give the file"):
        load_backbone(name)


def test_timm_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)
    timm_models.cache_clear()
    with pytest.raises(UserError, match=r"needs timm: pip install 'xmoco\[timm\]'"):
        load_backbone("timm:resnet50")


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("torchvision:resnet51", r"did you mean resnet50\?"),
        ("timm:resnet_18", r"did you mean resnet18\?"),
        ("torchvision:vit_b_16", "taken by name, which are resnet18, resnet34"),
        ("timm:", "timm has no model"),
        ("timm:nonsense", r"timm has no model nonsense\.$"),
        ("torchvision:resnet50:V9", "no weights V9 for resnet50: IMAGENET1K_V1, IMAGENET1K_V2"),
    ],
)
def test_unknown_names(name: str, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        load_backbone(name)


def test_foreign_weights_have_neither_epochs_nor_seed(tmp_path: Path) -> None:
    torch.save(mocov2(some_resnet()), tmp_path / "weights.pth")
    card = read_card(tmp_path / "weights.pth")[0]
    assert card == replace(card, epochs=0, seed=0)
    assert xmoco.load_backbone(tmp_path / "weights.pth") is not None
