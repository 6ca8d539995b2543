"""Backbone files: there and back, into torchvision by hand, and every way they can be wrong."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
import torchvision.models
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.testing import assert_close

from xmoco.errors import UserError
from xmoco.nn.backbones import build_backbone
from xmoco.nn.weights import BackboneCard, load_backbone, read_card, save_backbone

CARD = BackboneCard(
    backbone="tiny",
    stem="cifar",
    size=32,
    mean=(0.5, 0.4, 0.3),
    std=(0.2, 0.25, 0.3),
    method="xmoco",
    epochs=2,
    seed=0,
)


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    path = tmp_path / "backbone.safetensors"
    save_backbone(build_backbone("tiny", "cifar"), CARD, path)
    return path


def test_round_trip_of_weights_statistics_and_card(tmp_path: Path) -> None:
    backbone = build_backbone("tiny", "cifar").to(memory_format=torch.channels_last)
    images = torch.randn(4, 3, 16, 16)
    backbone(images)  # moves the running statistics
    save_backbone(backbone, CARD, tmp_path / "backbone.safetensors")
    assert read_card(tmp_path) == (CARD, tmp_path / "backbone.safetensors")
    for where in (tmp_path, tmp_path / "backbone.safetensors", str(tmp_path)):
        loaded = load_backbone(where)
        assert not loaded.training
        with torch.no_grad():
            assert_close(loaded(images), backbone.eval()(images))


def test_the_size_to_be_judged_at(tmp_path: Path) -> None:
    path = tmp_path / "backbone.safetensors"
    save_backbone(build_backbone("tiny", "cifar"), replace(CARD, eval_size=40), path)
    views = read_card(path)[0].views()
    assert (views.size, views.central_size) == (32, 40)
    views = read_card(path)[0].views(64)
    assert (views.size, views.central_size) == (64, 64)
    views = read_card(path)[0].views(eval_size=48)
    assert (views.size, views.central_size) == (32, 48)


def test_a_card_that_names_no_size_to_be_judged_at(tmp_path: Path) -> None:
    path = tmp_path / "backbone.safetensors"
    save_backbone(build_backbone("tiny", "cifar"), CARD, path)
    with safe_open(path, framework="pt") as file:
        assert "eval_size" not in file.metadata()["xmoco"]  # as before there was such a thing
    views = read_card(path)[0].views()
    assert (views.size, views.central_size) == (32, 32)


def test_loads_into_torchvision_by_hand(tmp_path: Path) -> None:
    path = tmp_path / "backbone.safetensors"
    save_backbone(build_backbone("resnet18"), replace(CARD, backbone="resnet18"), path)
    model = torchvision.models.resnet18()
    report = model.load_state_dict(load_file(path), strict=False)
    assert set(report.missing_keys) == {"fc.weight", "fc.bias"}
    assert not report.unexpected_keys


def test_missing_weights(tmp_path: Path) -> None:
    for where in (tmp_path / "nowhere", tmp_path, tmp_path / "backbone.safetensors"):
        with pytest.raises(UserError, match="no weights at"):
            load_backbone(where)


def test_unfinished_run(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("train: {}\n")
    with pytest.raises(UserError, match=r"no weights yet.*--resume"):
        load_backbone(tmp_path)


@pytest.mark.parametrize("kept", [0, 5, 1000])
def test_truncated_weights(weights: Path, kept: int) -> None:
    weights.write_bytes(weights.read_bytes()[:kept])
    with pytest.raises(UserError, match="damaged or no safetensors"):
        load_backbone(weights)


@pytest.mark.parametrize(
    "header",
    [
        None,
        {"xmoco": "no json"},
        {"xmoco": "{}"},
        {"xmoco": "[1]"},
        {"xmoco": json.dumps(asdict(CARD) | {"backbone": "vit"})},
        {"xmoco": json.dumps(asdict(CARD) | {"mean": None})},
    ],
    ids=["no header", "no json", "empty", "list", "unknown backbone", "no mean"],
)
def test_weights_of_somebody_else(tmp_path: Path, header: dict[str, str] | None) -> None:
    path = tmp_path / "other.safetensors"
    save_file({"weight": torch.zeros(3)}, path, metadata=header)
    with pytest.raises(UserError, match="does not say which backbone"):
        load_backbone(path)


def test_weights_that_do_not_fit_their_card(tmp_path: Path) -> None:
    path = tmp_path / "backbone.safetensors"
    save_backbone(build_backbone("tiny", "cifar"), replace(CARD, backbone="resnet18"), path)
    with pytest.raises(UserError, match="does not fit the resnet18"):
        load_backbone(path)
