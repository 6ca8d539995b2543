"""Two CPU processes train as one: on the command line, and number by number where it can be told.

The second half leaves batch norm out, whose statistics belong to a process, and compares loss,
gradients, banks and parameters with one process on the same global batches.
"""

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

from helpers import (
    assert_done,
    checkpoints,
    knn_records,
    logged_steps,
    make_images,
    no_pictures,
    run_cli,
    run_two,
    write_recipe,
)
from xmoco.config import Config
from xmoco.data import Batches, open_images
from xmoco.losses.bank import PairedRing
from xmoco.methods import build_method
from xmoco.settings import load_config
from xmoco.train.checkpoints import load_checkpoint
from xmoco.train.engine import build_fabric
from xmoco.train.loop import Callback, Training
from xmoco.train.run_folder import RunFolder

KINDS = ["queries", "probabilities", "none", "mocov2plus"]


def xmoco_with_two(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "xmoco", "pretrain", "--data", "images", "--out", "run"]
    return subprocess.run(
        [*command, "devices=2", "device=cpu", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=240,
    )


def test_the_demo_recipe_trains_with_two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_images(tmp_path / "images", each=64)
    settings = ("epochs=2", "batch=32", "bank_length=96", "size=16", "knn_k=5", "log_every=4")
    done = xmoco_with_two("--recipe", "demo", *settings, folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 × cpu, batch 32" in done.stdout
    assert done.stdout.count("run folder: run") == 1  # one process speaks
    run = tmp_path / "run"
    assert logged_steps(run) == [4, 8, 12, 16]
    assert knn_records(run) == [("raw pixels", 0), ("untrained", 0), ("xmoco", 1), ("xmoco", 2)]
    assert {"backbone.safetensors", "report.html"} <= {path.name for path in run.iterdir()}
    state = load_checkpoint(checkpoints(run)[-1])["method"]
    assert state["loss.banks._extra_state"] == 16 * 32  # the keys of both
    # Where it runs may change on resuming.
    checkpoints(run)[-1].unlink()
    monkeypatch.chdir(tmp_path)
    with no_pictures():
        assert_done(run_cli("pretrain", "--resume", "--out", "run", "devices=1"))
    assert logged_steps(run) == [4, 8, 12, 16]


def test_a_mistake_of_two_is_told_once(tmp_path: Path) -> None:
    make_images(tmp_path / "images", each=4)
    recipe = str(write_recipe(tmp_path / "fast.yaml", "images"))
    done = xmoco_with_two("--recipe", recipe, "batch=15", folder=tmp_path)
    assert done.returncode == 2
    sentences = [line for line in done.stderr.splitlines() if line.startswith("xmoco: ")]
    assert sentences == ["xmoco: a batch of 15 cannot be shared equally by 2 processes."]
    assert "Traceback" not in done.stdout + done.stderr
    assert not (tmp_path / "run").exists()


def without_batch_norm(module: nn.Module) -> None:
    for name, child in module.named_children():
        if isinstance(child, nn.BatchNorm1d | nn.BatchNorm2d):
            setattr(module, name, nn.Identity())
        else:
            without_batch_norm(child)


def settings(recipe: Path, kind: str, devices: int) -> Config:
    method = "method=mocov2plus" if kind == "mocov2plus" else f"history={kind}"
    return load_config(recipe, [method, f"devices={devices}"])


def new_training(recipe: Path, kind: str, devices: int, folder: Path) -> Training:
    config = settings(recipe, kind, devices)
    fabric = build_fabric(config.run)
    fabric.launch()
    torch.manual_seed(0)
    method = build_method(config.model, config.method)
    without_batch_norm(method)
    images = open_images(config.data, "train")
    assert images is not None
    batches = Batches(
        images,
        batch=config.train.batch,
        seed=config.train.seed,
        device=fabric.device,
        rank=fabric.global_rank,
        processes=fabric.world_size,
        readers=1,
    )
    folder.mkdir(exist_ok=True)
    return Training(config, fabric, method, batches, RunFolder(folder))


def play(recipe: Path, kind: str, devices: int, folder: Path) -> dict[str, Any]:
    """The first step by hand, for its gradients; then a whole run of 8 steps by the loop."""
    training = new_training(recipe, kind, devices, folder / kind)
    batch = next(training.batches.from_step(0))
    step = training.stepper.model(*training.views(batch, 0))
    training.fabric.backward(step.loss)
    encoder = training.method.encoder
    found = {
        "terms": torch.stack([step.loss, *step.terms.values()]).detach(),
        "gradients": {name: p.grad.clone() for name, p in encoder.named_parameters()},
        "banks": rings(training),
    }
    training = new_training(recipe, kind, devices, folder / kind)
    training.train(Callback())
    return found | {
        "trained": {name: p.detach() for name, p in training.method.named_parameters()},
        "trained banks": rings(training),
    }


def rings(training: Training) -> dict[str, torch.Tensor]:
    """Copies of both banks and of the history."""
    return {
        f"{name} {side}": getattr(ring, side).clone()
        for name, ring in training.method.named_modules()
        if isinstance(ring, PairedRing)
        for side in ("source", "target")
    }


def process(rank: int, recipe: Path, folder: Path, port: int) -> None:
    torch.set_num_threads(1)
    os.environ |= {
        "LOCAL_RANK": str(rank),
        "NODE_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    found = {kind: play(recipe, kind, 2, folder / "two") for kind in KINDS}
    torch.save(found, folder / f"{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two")
    (folder / "one").mkdir()
    (folder / "two").mkdir()
    images = make_images(folder / "images")
    # 8 steps of 16 images: the history of 50 joins at the fifth, and rings wrap around.
    method = {"bank_length": 50, "key_momentum": 0.9}
    write_recipe(folder / "fast.yaml", images, train={"epochs": 1}, method=method)
    return folder


@pytest.fixture(scope="module")
def both(place: Path) -> list[dict[str, dict[str, Any]]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    run_two(process, place / "fast.yaml", place, port)
    return [torch.load(place / f"{rank}.pt") for rank in range(2)]


@pytest.fixture(scope="module")
def alone(place: Path) -> dict[str, dict[str, Any]]:
    return {kind: play(place / "fast.yaml", kind, 1, place / "one") for kind in KINDS}


@pytest.mark.parametrize("kind", KINDS)
def test_the_first_step_is_that_of_one_process(both: Any, alone: Any, kind: str) -> None:
    first, second, one = both[0][kind], both[1][kind], alone[kind]
    terms = (first["terms"] + second["terms"]) / 2
    assert_close(terms, one["terms"], rtol=0, atol=1e-5)
    assert not torch.equal(first["terms"], second["terms"])  # each has its own images
    assert sum(gradient.norm() for gradient in one["gradients"].values()) > 0.1
    for name, gradient in one["gradients"].items():
        assert torch.equal(first["gradients"][name], second["gradients"][name])
        assert_close(first["gradients"][name], gradient, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("when", ["banks", "trained banks"])
def test_banks_are_identical_on_both(both: Any, alone: Any, kind: str, when: str) -> None:
    first, second, one = both[0][kind][when], both[1][kind][when], alone[kind][when]
    assert len(one) == (2 if kind in ("none", "mocov2plus") else 4)
    for name, expected in one.items():
        assert torch.equal(first[name], second[name])
        assert_close(first[name], expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_a_whole_run_is_that_of_one_process(both: Any, alone: Any, kind: str) -> None:
    for name, expected in alone[kind]["trained"].items():
        assert torch.equal(both[0][kind]["trained"][name], both[1][kind]["trained"][name])
        assert_close(both[0][kind]["trained"][name], expected, rtol=1e-3, atol=1e-5)
