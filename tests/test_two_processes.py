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
    leave_pictures_out,
    logged_steps,
    make_images,
    no_pictures,
    run_cli,
    run_two,
    write_recipe,
)
from xmoco.checkpoints import load_checkpoint
from xmoco.config import Config
from xmoco.data import open_images
from xmoco.losses.bank import PairedRing
from xmoco.methods import Method, build_method
from xmoco.pretraining import prepare_training, pretrain
from xmoco.settings import load_config
from xmoco.train.engine import build_fabric
from xmoco.train.loop import Callback, Training
from xmoco.train.run_folder import RunFolder

KINDS = {
    "queries": "history=queries",
    "probabilities": "history=probabilities",
    "none": "history=none",
    "mocov2plus": "method=mocov2plus",
    "in two parts": "method=mocov2plus accumulate=2",
    "simclr": "method=simclr",
    "byol": "method=byol predictor_hidden=16",
    "swav": "method=swav prototypes=8 freeze_prototypes_epochs=0.25 queue_length=50 "
    "queue_from_epoch=0 local_crops=2 local_size=8",
}


RINGS = {"queries": 4, "probabilities": 4, "simclr": 0, "byol": 0}
"""Tensors that a method remembers past batches in; others have two."""


def xmoco_with_two(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "xmoco", "pretrain", "--data", "images", "--out", "run"]
    return subprocess.run(
        [*command, "devices=2", "device=cpu", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=240,
    )


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    return port


def be_process(rank: int, port: int) -> None:
    """As if started by a launcher of two."""
    torch.set_num_threads(1)
    os.environ |= {
        "LOCAL_RANK": str(rank),
        "NODE_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def log(run: Path) -> list[str]:
    file = run / "train.log"
    return file.read_text().splitlines() if file.exists() else []


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
    state = load_checkpoint(checkpoints(run)[-1])["task"]
    assert state["loss.banks._extra_state"] == 16 * 32  # the keys of both
    # Where it runs may change on resuming.
    checkpoints(run)[-1].unlink()
    monkeypatch.chdir(tmp_path)
    with no_pictures():
        assert_done(run_cli("pretrain", "--resume", "--out", "run", "devices=1"))
    assert logged_steps(run) == [4, 8, 12, 16]


def pretrain_in_two(rank: int, port: int, arguments: dict[str, Any]) -> None:
    be_process(rank, port)
    leave_pictures_out()
    pretrain(**arguments, devices=2)
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("devices", [1, 2], ids=["begun in one process", "begun in two"])
def test_what_was_automatic_is_chosen_anew_where_a_run_goes_on(
    tmp_path: Path, devices: int
) -> None:
    """``auto`` means shuffled in several processes and split in one: a run may change between."""
    images, run = make_images(tmp_path / "images", each=8), tmp_path / "run"
    model = {"batch_norm": "auto", "batch_norm_groups": 4}
    train = {"checkpoint_minutes": 0.0}
    recipe = write_recipe(tmp_path / "fast.yaml", images, model=model, train=train)

    def lines_of_a_session(devices: int, **arguments: Any) -> list[str]:
        said = len(log(run))
        if devices == 2:
            run_two(pretrain_in_two, free_port(), arguments | {"out": run})
        else:
            with no_pictures():
                pretrain(**arguments, out=run, devices=1)
        assert RunFolder(run).config().model.batch_norm == "auto"
        assert RunFolder(run).environment()["batch_norm"] == chosen[devices]
        return [line.partition(" ")[2] for line in log(run)[said:]]

    chosen = {1: "split", 2: "shuffled"}
    words = {
        1: "batch norm: split into 4 groups, keys regrouped",
        2: "batch norm: keys shuffled between processes",
    }
    assert words[devices] in lines_of_a_session(devices, recipe=recipe)
    checkpoints(run)[-1].unlink()
    other = 3 - devices
    said = lines_of_a_session(other, resume=True)
    assert f"{words[other]} ({chosen[devices]} before, on {devices} × cpu)" in said
    assert "going on after step 3 (epoch 1.5)" in said
    assert logged_steps(run) == [4]
    checkpoints(run)[-1].unlink()
    assert words[other] in lines_of_a_session(other, resume=True)  # nothing changed this time


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
    return load_config(recipe, [*KINDS[kind].split(), f"devices={devices}", "readers=1"])


def built(config: Config) -> Method:
    method = build_method(config)
    without_batch_norm(method)
    return method


def new_training(recipe: Path, kind: str, devices: int, folder: Path) -> Training:
    config = settings(recipe, kind, devices)
    fabric = build_fabric(config.run)
    fabric.launch()
    images = open_images(config.data, "train")
    assert images is not None
    folder.mkdir(exist_ok=True)
    return prepare_training(config, fabric, images, RunFolder(folder), built)


def play(recipe: Path, kind: str, devices: int, folder: Path) -> dict[str, Any]:
    """The first step by hand, for its gradients; then a whole run of 8 steps by the loop."""
    training = new_training(recipe, kind, devices, folder / kind)
    inputs = training.inputs(next(training.batches.from_step(0)), 0)
    first_part = [view.chunk(training.plan.accumulate)[0] for view in inputs]
    step = training.stepper.model(first_part, training.stepper.values.at(training.clock(0)))
    training.fabric.backward(step.loss)
    encoder = training.task.encoder
    found = {
        "terms": torch.stack([step.loss, *step.terms.values()]).detach(),
        "gradients": {name: p.grad.clone() for name, p in encoder.named_parameters()},
        "banks": rings(training),
    }
    training = new_training(recipe, kind, devices, folder / kind)
    training.train(Callback())
    return found | {
        "trained": {name: p.detach() for name, p in training.task.named_parameters()},
        "trained banks": rings(training),
    }


def rings(training: Training) -> dict[str, torch.Tensor]:
    """Copies of both banks and of the history."""
    return {
        f"{name} {side}": getattr(ring, side).clone()
        for name, ring in training.task.named_modules()
        if isinstance(ring, PairedRing)
        for side in ("source", "target")
    }


def process(rank: int, recipe: Path, folder: Path, port: int) -> None:
    be_process(rank, port)
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
    run_two(process, place / "fast.yaml", place, free_port())
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
    assert len(one) == RINGS.get(kind, 2)
    for name, expected in one.items():
        assert torch.equal(first[name], second[name])
        assert_close(first[name], expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_a_whole_run_is_that_of_one_process(both: Any, alone: Any, kind: str) -> None:
    for name, expected in alone[kind]["trained"].items():
        assert torch.equal(both[0][kind]["trained"][name], both[1][kind]["trained"][name])
        assert_close(both[0][kind]["trained"][name], expected, rtol=1e-3, atol=1e-5)
