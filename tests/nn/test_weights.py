"""Backbone files: there and back, of unfinished runs, into torchvision by hand, and every way they
can be wrong."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision.models
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from torch.testing import assert_close

from xmoco.checkpoints import Checkpoints
from xmoco.config import Config
from xmoco.errors import UserError
from xmoco.nn import weights as weights_module
from xmoco.nn.backbone_files import BackboneCard, save_backbone
from xmoco.nn.backbones import build_backbone
from xmoco.nn.weights import load_backbone, load_weights, read_card
from xmoco.settings import config_yaml, load_config

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
    input = read_card(path)[0].input()
    assert (input.size, input.central_size) == (32, 40)
    input = read_card(path)[0].input(64)
    assert (input.size, input.central_size) == (64, 64)
    input = read_card(path)[0].input(eval_size=48)
    assert (input.size, input.central_size) == (32, 48)


def test_a_card_that_names_no_size_to_be_judged_at(tmp_path: Path) -> None:
    path = tmp_path / "backbone.safetensors"
    save_backbone(build_backbone("tiny", "cifar"), CARD, path)
    with safe_open(path, framework="pt") as file:
        assert "eval_size" not in file.metadata()["xmoco"]  # as before there was such a thing
    input = read_card(path)[0].input()
    assert (input.size, input.central_size) == (32, 32)


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


def test_a_run_that_has_not_saved_anything(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("train: {}\n")
    with pytest.raises(UserError, match=r"no weights yet, nor a checkpoint.*--resume"):
        load_backbone(tmp_path)


def checkpoint(config: Config, backbone: nn.Module, epoch: float) -> dict[str, Any]:
    """What a run saves of itself, as far as weights are concerned."""
    state = {f"encoder.backbone.{k}": v for k, v in backbone.state_dict().items()}
    other = {f"momentum_encoder.backbone.{k}": -v for k, v in backbone.state_dict().items()}
    return {
        "identity": {"settings": config.model_dump(mode="json", exclude={"run"}), "images": "8"},
        "task": state | other | {"encoder.head.0.weight": torch.zeros(2)},
        "optimizer": {},
        "epoch": epoch,
    }


@pytest.fixture
def unfinished(tmp_path: Path) -> tuple[Path, nn.Module]:
    config = load_config("demo", ["epochs=9", "eval_size=40", "seed=3"])
    (tmp_path / "config.yaml").write_text(config_yaml(config))
    backbone, saved = build_backbone("tiny", "cifar"), Checkpoints(tmp_path / "checkpoints")
    saved.save(4, checkpoint(config, build_backbone("tiny", "cifar"), 0.5))
    saved.save(20, checkpoint(config, backbone, 2.5))
    return tmp_path, backbone.eval()


def test_unfinished_runs_are_read_from_their_last_checkpoint(
    unfinished: tuple[Path, nn.Module],
) -> None:
    run, backbone = unfinished
    last = run / "checkpoints" / "step-000000020.ckpt"
    images = torch.randn(2, 3, 32, 32)
    for weights in (run, last):
        loaded = load_weights(weights)
        assert not loaded.backbone.training
        with torch.no_grad():
            assert torch.equal(loaded.backbone(images), backbone(images))
        assert read_card(weights) == (loaded.card, last)
        assert loaded.card == BackboneCard(
            "tiny", "cifar", 32, (0.5,) * 3, (0.25,) * 3, "xmoco", 2, 3, eval_size=40
        )
        assert loaded.report.format == "xmoco"
        assert not loaded.report.labelled
        assert str(loaded.report).endswith(
            "dropped: momentum_encoder, encoder.head; missing: nothing; "
            "as it was at epoch 2.5 of 9, step 20"
        )


def test_a_finished_run_is_read_from_its_weights(unfinished: tuple[Path, nn.Module]) -> None:
    run, backbone = unfinished
    save_backbone(backbone, CARD, run / "backbone.safetensors")
    assert read_card(run) == (CARD, run / "backbone.safetensors")
    assert load_weights(run).report.notes == ()


@pytest.mark.parametrize("change", ["no task", "other settings", "no epoch"])
def test_checkpoints_of_something_else(unfinished: tuple[Path, nn.Module], change: str) -> None:
    run, _ = unfinished
    path = run / "checkpoints" / "step-000000020.ckpt"
    content = torch.load(path, weights_only=True)
    if change == "other settings":
        content["identity"] = {"settings": {"rate": 0.1}}
    else:
        del content[change.removeprefix("no ")]
    torch.save(content, path)
    with pytest.raises(UserError, match=r"step-000000020.ckpt is no checkpoint of pre-training"):
        load_weights(run)


def test_checkpoints_that_do_not_fit_their_settings(
    unfinished: tuple[Path, nn.Module],
) -> None:
    run, _ = unfinished
    config = load_config("demo")
    Checkpoints(run / "checkpoints").save(30, checkpoint(config, build_backbone("resnet18"), 3.0))
    with pytest.raises(UserError, match="does not fit the tiny"):
        load_weights(run)


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
        {"xmoco": "[" * 10_000},
        {"xmoco": '{"backbone": ' * 10_000},
    ],
    ids=["no header", "no json", "empty", "list", "nested", "nested cards"],
)
def test_weights_of_somebody_else(tmp_path: Path, header: dict[str, str] | None) -> None:
    path = tmp_path / "other.safetensors"
    save_file({"weight": torch.zeros(3)}, path, metadata=header)
    with pytest.raises(UserError, match="does not say which backbone"):
        load_backbone(path)


def with_header(path: Path, card: dict[str, Any]) -> Path:
    tensors = build_backbone("tiny", "cifar").state_dict()
    save_file(tensors, path, metadata={"xmoco": json.dumps(card)})
    return path


IMPOSSIBLE: list[tuple[str, Any]] = [
    *(("size", wrong) for wrong in (0, -1, 4000, "text", None, 32.5, [32], 10**400, True)),
    *(("eval_size", wrong) for wrong in (0, 10**9, "32", [])),
    *(("mean", wrong) for wrong in (None, 3, "abc", [1, 2], [0, 0, float("nan")], [0, 0, 1e300])),
    *(("std", wrong) for wrong in ([0, 1, 1], [1, 1, float("inf")], [-1, 1, 1], {"a": 1})),
    *(("stem", wrong) for wrong in ("", "text", None, 3)),
    *(("method", wrong) for wrong in ("", None, 3, "x" * 10**6)),
    *(("epochs", wrong) for wrong in (-1, 1.5, "3", None, float("inf"), 10**400)),
    *(("seed", wrong) for wrong in (-1, "0", None)),
    *(("backbone", wrong) for wrong in (None, 3, ["tiny"], {})),
]


@pytest.mark.parametrize(("field", "value"), IMPOSSIBLE, ids=lambda part: str(part)[:20])
def test_a_header_that_cannot_be(tmp_path: Path, field: str, value: Any) -> None:
    path = with_header(tmp_path / "odd.safetensors", asdict(CARD) | {field: value})
    with pytest.raises(UserError, match=f"has a header that cannot be: {field} is ") as refused:
        load_backbone(path)
    assert len(str(refused.value)) < 300 + len(str(path))


@pytest.mark.parametrize("field", ["stem", "size", "mean", "std", "method", "epochs", "seed"])
def test_a_header_that_lacks_something(tmp_path: Path, field: str) -> None:
    card = {name: value for name, value in asdict(CARD).items() if name != field}
    with pytest.raises(UserError, match=f"header that cannot be: {field} is None"):
        load_backbone(with_header(tmp_path / "odd.safetensors", card))


def test_a_card_that_names_a_giant_takes_no_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[str] = []
    real = weights_module.build_backbone

    def build(*arguments: Any) -> nn.Module:
        built.append(torch.get_default_device().type)
        return real(*arguments)

    monkeypatch.setattr(weights_module, "build_backbone", build)
    card = asdict(CARD) | {"backbone": "resnet50w4", "stem": "imagenet"}
    with pytest.raises(UserError, match="does not fit the resnet50w4"):
        load_backbone(with_header(tmp_path / "odd.safetensors", card))
    assert built == ["meta"]


def test_files_of_the_first_version_load(tmp_path: Path) -> None:
    """The header as version 0.1 wrote it, of a recipe with a size to be judged at and without."""
    card = {
        "backbone": "tiny",
        "stem": "cifar",
        "size": 32,
        "mean": [0.4914, 0.4822, 0.4465],
        "std": [0.247, 0.2435, 0.2616],
        "method": "xmoco",
        "epochs": 200,
        "seed": 0,
    }
    path = with_header(tmp_path / "old.safetensors", card)
    assert load_weights(path).card.input().central_size == 32
    path = with_header(tmp_path / "old.safetensors", card | {"judged_size": 48})
    loaded = load_weights(path)
    assert loaded.card.eval_size == 48
    assert (loaded.card.epochs, loaded.card.std) == (200, (0.247, 0.2435, 0.2616))


def test_files_of_a_newer_version_are_refused(tmp_path: Path) -> None:
    path = with_header(tmp_path / "new.safetensors", asdict(CARD) | {"foo": 3})
    sentence = r"was written by a newer xmoco \(it has a field foo\): upgrade xmoco\."
    for read in (load_backbone, read_card):
        with pytest.raises(UserError, match=sentence):
            read(path)


def test_a_backbone_that_nobody_has(tmp_path: Path) -> None:
    path = with_header(tmp_path / "new.safetensors", asdict(CARD) | {"backbone": "vit"})
    with pytest.raises(UserError, match=r"holds a vit, but there are tiny, .* and timm:NAME"):
        load_backbone(path)
    path = with_header(path, asdict(CARD) | {"backbone": "timm:vit_for_all"})
    with pytest.raises(UserError, match=r"holds a timm:vit_for_all, but timm has no such model"):
        load_backbone(path)


@pytest.mark.parametrize("name", ["timm:test_convnext", "timm:test_vit"])
def test_models_of_timm_there_and_back(tmp_path: Path, name: str) -> None:
    backbone = build_backbone(name, size=32).eval()
    card = replace(CARD, backbone=name, stem="imagenet")
    save_backbone(backbone, card, tmp_path / "backbone.safetensors")
    loaded = load_weights(tmp_path)
    assert loaded.card == card
    for size in (32, 48):
        images = torch.randn(2, 3, size, size)
        with torch.no_grad():
            assert torch.equal(loaded.backbone(images), backbone(images))


def test_what_is_given_counts_more_than_the_card(weights: Path) -> None:
    loaded = load_weights(weights, mean=(0.1, 0.2, 0.3), labelled=True)
    assert (loaded.card.mean, loaded.card.std) == ((0.1, 0.2, 0.3), CARD.std)
    assert loaded.report.labelled
    assert load_weights(weights, std=(0.1, 0.2, 0.3)).card.std == (0.1, 0.2, 0.3)


def test_weights_that_do_not_fit_their_card(tmp_path: Path) -> None:
    path = tmp_path / "backbone.safetensors"
    save_backbone(build_backbone("tiny", "cifar"), replace(CARD, backbone="resnet18"), path)
    with pytest.raises(UserError, match="does not fit the resnet18"):
        load_backbone(path)
