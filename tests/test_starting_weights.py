"""Runs that start from weights: both encoders have them, whenever the run was interrupted, and
whatever is told of the run says so."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from helpers import (
    assert_done,
    assert_refused,
    assert_same_end,
    knn_records,
    make_images,
    metrics,
    no_pictures,
    run_cli,
    write_recipe,
)
from xmoco import pretraining, starting_weights
from xmoco.config import KINDS
from xmoco.data import ArrayImages
from xmoco.evaluate.classification import evaluate_knn
from xmoco.evaluate.evaluation import EvalOptions
from xmoco.methods import build_method
from xmoco.methods.base import MomentumMethod
from xmoco.nn.backbone_files import BackboneCard, Weights, save_backbone, weights_name
from xmoco.nn.backbones import build_backbone
from xmoco.nn.checkpoint_formats import LoadReport
from xmoco.nn.weights import load_weights, read_card
from xmoco.settings import load_config
from xmoco.starting_weights import start_from_weights

SMALL = (
    *("backbone=tiny", "stem=cifar", "size=16", "eval_size=null", "batch=8", "batch_norm=plain"),
    *("head_hidden=16", "feature_size=8"),
)


@pytest.fixture(autouse=True)
def quick() -> Iterator[None]:
    with no_pictures():
        yield


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    """Of nobody's run: as random as any, but not those that a run starts from by itself."""
    torch.manual_seed(1234)
    backbone = build_backbone("tiny", "cifar")
    card = BackboneCard.of_run(load_config(None, SMALL), epochs=7)
    save_backbone(backbone, card, tmp_path / "given.safetensors")
    return tmp_path / "given.safetensors"


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    images = make_images(tmp_path / "images", each=8)
    return write_recipe(tmp_path / "fast.yaml", images, train={"epochs": 2})


def test_the_rest_of_a_method_starts_as_it_would_without_them(weights: Path) -> None:
    config = load_config(None, [*SMALL, f"weights={weights}"])
    drawn = []
    for settings in (config, load_config(None, SMALL)):
        torch.manual_seed(0)
        method = build_method(settings)
        start_from_weights(method, settings)
        drawn.append((method.encoder.head[-1].weight, torch.rand(3)))
    assert torch.equal(drawn[0][0], drawn[1][0])
    assert torch.equal(drawn[0][1], drawn[1][1])


@pytest.mark.parametrize("name", KINDS["method"])
def test_every_encoder_of_a_method_has_them(name: str, weights: Path) -> None:
    config = load_config(None, [*SMALL, f"method={name}", f"weights={weights}"])
    method = build_method(config)
    assert start_from_weights(method, config).warnings == ()
    given = load_weights(weights).backbone.state_dict()
    for key, value in method.encoder.backbone.state_dict().items():
        assert torch.equal(value, given[key]), key
    if isinstance(method, MomentumMethod):
        for key, value in method.momentum_encoder.state_dict().items():
            assert torch.equal(value, method.encoder.state_dict()[key]), key
        assert not any(p.requires_grad for p in method.momentum_encoder.parameters())


@pytest.mark.parametrize("method", ["xmoco", "supervised"])  # which draws a classifier later
def test_a_run_killed_before_its_first_checkpoint_still_starts_from_them(
    method: str, recipe: Path, weights: Path, tmp_path: Path
) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    for run in (whole, killed):
        start = ("-r", recipe, "--out", run, "--weights", weights, f"method={method}")
        assert_done(run_cli("pretrain", *start))
    shutil.rmtree(killed / "checkpoints")
    (killed / "backbone.safetensors").unlink()
    assert_done(run_cli("pretrain", "--resume", "--out", killed))
    assert_same_end(killed, whole)
    assert (killed / "backbone.safetensors").read_bytes() == (
        whole / "backbone.safetensors"
    ).read_bytes()


def test_what_is_told_of_a_run_says_what_it_started_from(
    recipe: Path, weights: Path, tmp_path: Path
) -> None:
    run, plain = tmp_path / "run", tmp_path / "plain"
    outcome = run_cli("pretrain", "-r", recipe, "--out", run, "--weights", weights)
    assert_done(outcome)
    assert f"the backbone starts from {weights}" in outcome.stdout
    assert knn_records(run)[:2] == [("raw pixels", 0), ("initial weights", 0)]
    assert f"weights: {weights}" in (run / "config.yaml").read_text()
    assert read_card(run)[0].started_from == "given.safetensors"
    options = EvalOptions("cpu")
    (record, *_) = evaluate_knn(run, tmp_path / "images", ks=(5,), options=options)
    assert record.protocol["started_from"] == "given.safetensors"
    judged = [line for line in metrics(run) if line.get("measure") == "knn_top1"]
    assert {line["protocol"]["started_from"] for line in judged} == {"given.safetensors"}

    assert_done(run_cli("pretrain", "-r", recipe, "--out", plain))
    assert read_card(plain)[0].started_from is None
    assert knn_records(plain)[:2] == [("raw pixels", 0), ("untrained", 0)]
    (record, *_) = evaluate_knn(plain, tmp_path / "images", ks=(5,), options=options)
    assert "started_from" not in record.protocol


def test_weights_are_named_without_telling_where_they_are() -> None:
    assert weights_name(None) is None
    assert weights_name("torchvision:resnet50") == "torchvision:resnet50"
    assert weights_name("/home/me/runs/photos") == "photos"
    assert weights_name("/home/me/runs/photos/backbone.safetensors") == "photos"
    assert weights_name("/home/me/runs/photos/checkpoints/step-000012.ckpt") == "photos"
    assert weights_name("/home/me/moco.pth.tar") == "moco.pth.tar"
    assert weights_name("/home/me/runs/cats/classifier.safetensors") == "cats"
    assert weights_name("/home/me/runs/street/detector.safetensors") == "street"
    assert weights_name("/backbone.safetensors") == "backbone.safetensors"


def starting_with(
    backbone: nn.Module, monkeypatch: pytest.MonkeyPatch, *settings: str
) -> tuple[str, ...]:
    """Warnings of a run that starts from this backbone of somebody else's."""
    card = BackboneCard.of_run(load_config(None, SMALL), epochs=0)
    loaded = Weights(backbone, card, LoadReport("somebody", 1))
    monkeypatch.setattr(starting_weights, "load_weights", lambda _: loaded)
    config = load_config(None, [*SMALL, "weights=theirs.pth", *settings])
    return start_from_weights(build_method(config), config).warnings


def test_a_backbone_that_is_built_otherwise_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As solo-learn's stem is: its tensors would fit."""
    backbone = build_backbone("tiny", "cifar")
    assert starting_with(backbone, monkeypatch) == ()
    backbone.conv1.padding = (2, 2)
    with pytest.raises(Exception, match=r"theirs.pth holds a tiny .* padding=\(2, 2\)"):
        starting_with(backbone, monkeypatch)


def test_other_pixels_are_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    backbone = build_backbone("tiny", "cifar")
    (warning,) = starting_with(backbone, monkeypatch, "mean=[0.5,0.5,0.5]")
    assert "normalised by mean [0.485, 0.456, 0.406]" in warning
    assert starting_with(backbone, monkeypatch, "mean=[0.486,0.457,0.405]") == ()


def test_a_run_keeps_its_weights_however_it_is_resumed(
    recipe: Path, weights: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    again = ("pretrain", "--recipe", recipe, "--out", run)
    assert_done(run_cli(*again, "--weights", weights))
    weights.unlink()  # which a checkpoint needs no more
    assert_done(run_cli(*again, "--resume"))
    assert_done(run_cli(*again, "--resume", "--weights", weights))
    other = run_cli(*again, "--resume", "--weights", tmp_path / "other")
    assert_refused(other, "model.weights: ", "given.safetensors → ")


def test_weights_that_have_changed_before_the_first_checkpoint_are_refused(
    recipe: Path, weights: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    assert_done(run_cli("pretrain", "-r", recipe, "--out", run, "--weights", weights))
    save_backbone(build_backbone("tiny", "cifar"), read_card(weights)[0], weights)
    assert_done(run_cli("pretrain", "--resume", "--out", run))
    shutil.rmtree(run / "checkpoints")
    refused = run_cli("pretrain", "--resume", "--out", run)
    assert_refused(refused, "given.safetensors has changed since the run started from it")


def test_a_plan_finds_out_what_the_run_would(recipe: Path, weights: Path) -> None:
    plan = ("pretrain", "-r", recipe, "--dry-run", "--weights")
    outcome = run_cli(*plan, weights, "std=[0.5,0.5,0.5]")
    assert_done(outcome)
    assert f"the backbone starts from {weights}" in outcome.stdout
    assert "warning: " in outcome.stdout
    assert_refused(run_cli(*plan, weights, "backbone=resnet18"), "but the run trains a resnet18")
    assert_refused(run_cli(*plan, "nowhere"), "no weights at ", "nowhere")


def test_programs_start_from_them_as_well(weights: Path, tmp_path: Path) -> None:
    """Such as tables of several runs."""
    pixels = torch.zeros(16, 3, 16, 16, dtype=torch.uint8)
    config = load_config(None, [*SMALL, "bank_length=8", f"weights={weights}", "device=cpu"])
    training = pretraining.prepare_training(
        config,
        pretraining.launched(config.run)[0],
        ArrayImages("black", pixels),
        pretraining.RunFolder(tmp_path / "run"),
    )
    given = load_weights(weights).backbone.conv1.weight
    assert_close(training.task.encoder.backbone.conv1.weight.detach(), given.detach())
