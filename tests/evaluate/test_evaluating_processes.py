"""Two CPU processes train a classifier as one, by every protocol that trains."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import xmoco
from helpers import assert_done, logged_steps, make_images, run_cli, run_two
from xmoco.config import DataConfig
from xmoco.data import open_images
from xmoco.evaluate.classify import CosineProtocol, EpochProtocol, train_classifier
from xmoco.evaluate.evaluation import EvalOptions
from xmoco.evaluate.grid import GRIDS, Grid
from xmoco.nn.backbone_files import BackboneCard, save_backbone
from xmoco.nn.backbones import build_backbone

CARD = BackboneCard("tiny", "cifar", 16, (0.5, 0.5, 0.5), (0.2, 0.2, 0.2), "xmoco", 3, 7)
KINDS = {
    "linear": EpochProtocol("linear", 16, 0.5, 0.0, 1e-3, 3, (2,), 0.1),
    "tuned": EpochProtocol("tuned", 16, 0.2, 0.02, 1e-4, 3, (2,), 0.2),
    "by steps": CosineProtocol("by steps", 16, 0.05, 0.05, 1e-4, 10),
}
TINY = Grid("tiny", (0.01, 1e25), (0.0,), 4, 8)
"""Its second point explodes, which all must notice."""


class FixedNorm(nn.BatchNorm2d):
    """Statistics belong to a process; without them, all is to be that of one."""

    def train(self, _mode: bool = True) -> "FixedNorm":
        super().train(False)
        return self


def train(kind: str, devices: int, folder: Path, normed: bool) -> dict[str, torch.Tensor]:
    images = open_images(DataConfig(source=str(folder.parent / "images" / "train")), "train")
    assert images is not None
    torch.manual_seed(0)
    backbone = build_backbone("tiny", "cifar")
    for module in backbone.modules():
        if isinstance(module, nn.BatchNorm2d) and not normed:
            module.__class__ = FixedNorm
    options = EvalOptions("cpu", devices=devices)
    classifier = train_classifier(
        backbone,
        images,
        KINDS[kind],
        folder / f"{kind}{' normed' if normed else ''}",
        {"kind": kind},
        input=CARD.input(),
        fabric=options.fabric(),
        readers=1,
    )
    return classifier.state_dict()


def evaluate(devices: int, folder: Path) -> dict[str, Any]:
    """Every protocol that trains, by its own function."""
    weights, images = folder.parent / "weights.safetensors", folder.parent / "images"
    GRIDS["tiny"] = TINY
    given = {"options": EvalOptions("cpu", devices=devices, readers=1)}
    linear = xmoco.evaluate_linear(weights, images, epochs=2, out=folder / "a", **given)
    tuned = xmoco.evaluate_finetune(weights, images, epochs=1, out=folder / "b", **given)
    transfer = xmoco.evaluate_transfer(
        weights, images, mode="end-to-end", grid="tiny", out=folder / "grid", **given
    )
    return {record.measure: record for record in (*linear, *tuned, transfer)}


def play(devices: int, folder: Path) -> dict[str, Any]:
    trained = {kind: train(kind, devices, folder, normed=kind == "linear") for kind in KINDS}
    return trained | {"normed": train("tuned", devices, folder, normed=True)}


def process(rank: int, folder: Path, port: int) -> None:
    torch.set_num_threads(1)
    os.environ |= {
        "LOCAL_RANK": str(rank),
        "NODE_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    found = play(2, folder / "two")
    found["records"] = {
        measure: (record.value, record.protocol)
        for measure, record in evaluate(2, folder / "two").items()
    }
    torch.save(found, folder / f"{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("processes")
    for name in ("one", "two"):
        (folder / name).mkdir()
    make_images(folder / "images" / "train", each=10)
    make_images(folder / "images" / "val", each=4)
    make_images(folder / "images" / "test", each=4)
    torch.manual_seed(0)
    save_backbone(build_backbone("tiny", "cifar"), CARD, folder / "weights.safetensors")
    return folder


@pytest.fixture(scope="module")
def both(place: Path) -> list[dict[str, Any]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    run_two(process, place, port)
    return [torch.load(place / f"{rank}.pt") for rank in range(2)]


@pytest.fixture(scope="module")
def alone(place: Path) -> dict[str, Any]:
    return play(1, place / "one")


@pytest.mark.parametrize("kind", KINDS)
def test_the_classifier_is_that_of_one_process(both: Any, alone: Any, kind: str) -> None:
    for name, expected in alone[kind].items():
        assert torch.equal(both[0][kind][name], both[1][kind][name]), name
        assert_close(both[0][kind][name], expected, rtol=1e-3, atol=1e-5)


def test_weights_agree_where_statistics_belong_to_a_process(both: Any, alone: Any) -> None:
    for name in alone["normed"]:
        if "running" not in name:
            assert torch.equal(both[0]["normed"][name], both[1]["normed"][name]), name
    statistics = "backbone.bn1.running_mean"
    assert not torch.equal(both[0]["normed"][statistics], both[1]["normed"][statistics])


def test_every_protocol_runs_with_two(both: Any, place: Path) -> None:
    first, second = both[0]["records"], both[1]["records"]
    assert first == second
    assert list(first) == [
        *("linear_top1", "linear_top5", "linear_mean_per_class"),
        *("finetune_top1", "finetune_top5", "finetune_mean_per_class", "transfer_end_to_end"),
    ]
    assert all(protocol["processes"] == 2 for _, protocol in first.values())
    for run, steps in (("a", [2]), ("b", [2])):
        assert logged_steps(place / "two" / run) == steps
    _, *points, result = map(
        json.loads, (place / "two" / "grid" / "images" / "grid.jsonl").read_text().splitlines()
    )
    assert points[1]["value"] == -1
    assert result == {"result": first["transfer_end_to_end"][0]}


def test_frozen_results_are_those_of_one_process(both: Any, place: Path) -> None:
    """And one process finds what two have trained, and tells of them."""
    given = {"epochs": 2, "options": EvalOptions("cpu", readers=1)}
    images, weights = place / "images", place / "weights.safetensors"
    for out, trained_by in (("one", None), ("two", 2)):
        record, *_ = xmoco.evaluate_linear(weights, images, out=place / out / "a", **given)
        assert record.value == pytest.approx(both[0]["records"]["linear_top1"][0], abs=100 / 16)
        assert record.protocol.get("processes") == trained_by


def test_from_the_command_line(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights, images = place / "weights.safetensors", place / "images"
    given = ("evaluate", "linear", weights, images, "--epochs", "2", "--device", "cpu")
    command = [sys.executable, "-m", "xmoco", *given, "--devices", "2", "--records", "kept.jsonl"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("top-1") == 1  # one process speaks
    records = [json.loads(line) for line in (tmp_path / "kept.jsonl").read_text().splitlines()]
    assert [record["protocol"]["processes"] for record in records] == [2, 2, 2]
    monkeypatch.chdir(tmp_path)
    again = run_cli(*given)
    assert_done(again)
    assert "holds the finished classifier" in again.stderr
