"""What tests of whole runs share: small images, a quick recipe, the command line in this process.

``run_cli`` calls the command line without starting a process, which would spend seconds on imports.
Where a process is the point (to kill it, say), ``start_cli`` starts one from a fork server that has
the imports behind it.
"""

import contextlib
import hashlib
import io
import json
import multiprocessing
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from PIL import Image
from safetensors.torch import load_file

from xmoco.config import ModelConfig

FAST: dict[str, dict[str, Any]] = {
    "input": {"size": 16},
    "views": {"blur": 0.0},
    "model": {
        "backbone": "tiny",
        "stem": "cifar",
        "head_layers": 2,
        "head_hidden": 32,
        "feature_size": 16,
        "batch_norm": "plain",
    },
    "method": {"bank_length": 64},
    "train": {"epochs": 2, "batch": 16, "log_every": 4},
    "monitor": {"knn_k": 5},
    "run": {"device": "cpu", "readers": 2},
}
"""128 images make 8 steps per epoch."""

TINY_SPLIT = ModelConfig(
    backbone="tiny",
    stem="cifar",
    head_layers=2,
    head_hidden=32,
    feature_size=16,
    batch_norm="split",
    batch_norm_groups=4,
)
"""An encoder of the smallest kind, its batch norm in groups."""


@dataclass(frozen=True)
class Outcome:
    """How a command ended and what it said."""

    status: int
    stdout: str
    stderr: str


def run_cli(*arguments: str | Path) -> Outcome:
    """``xmoco ARGUMENTS`` in this process."""
    from xmoco.cli import main

    out, err, status = io.StringIO(), io.StringIO(), 0
    before, sys.argv = sys.argv, ["xmoco", *map(str, arguments)]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            main()
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    finally:
        sys.argv = before
    return Outcome(status, out.getvalue(), err.getvalue())


def assert_refused(outcome: Outcome, *words: str) -> None:
    """Status 2 and one sentence on stderr that holds ``words``; no traceback anywhere."""
    assert outcome.status == 2, outcome
    assert outcome.stderr.startswith("xmoco: "), outcome.stderr
    assert outcome.stderr.count("\n") == 1, outcome.stderr
    assert outcome.stderr.endswith("\n")
    assert "Traceback" not in outcome.stdout + outcome.stderr
    for word in words:
        assert word in outcome.stderr, (word, outcome.stderr)


def assert_done(outcome: Outcome) -> None:
    assert outcome.status == 0, outcome
    assert "Traceback" not in outcome.stdout + outcome.stderr


def leave_pictures_out() -> None:
    """A report without curves and pictures, which take longer to draw than a small run."""
    from xmoco import pretraining

    pretraining.draw_report = _write_plain_report


def _write_plain_report(config: Any, training: Any, *_: Any) -> Path:
    page = training.run.path / "report.html"
    page.write_text("<p>no pictures")
    return page


@contextlib.contextmanager
def no_pictures() -> Iterator[None]:
    """As ``leave_pictures_out``, for a while."""
    from xmoco import pretraining

    before = pretraining.draw_report
    leave_pictures_out()
    try:
        yield
    finally:
        pretraining.draw_report = before


_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload(["xmoco.pretraining", "xmoco.cli"])


def start_cli(
    *arguments: str | Path, said: Path, prepare: Callable[[], None] | None = None
) -> ForkServerProcess:
    """``xmoco ARGUMENTS`` in a process of its own; what it says goes to the file ``said``.

    Its report has no pictures. ``prepare`` is called there beforehand.
    """
    process = _processes.Process(target=_cli_process, args=([*map(str, arguments)], said, prepare))
    process.start()
    return process


def _cli_process(arguments: list[str], said: Path, prepare: Callable[[], None] | None) -> None:
    from xmoco.cli import main

    if prepare is not None:
        prepare()
    file = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(file, 1)
    os.dup2(file, 2)
    torch.set_num_threads(1)
    leave_pictures_out()
    sys.argv = ["xmoco", *arguments]
    main()


def run_two(target: Callable[..., None], *arguments: Any) -> None:
    """``target(rank, *arguments)`` in two processes at once."""
    run_group(2, target, *arguments)


def run_group(count: int, target: Callable[..., None], *arguments: Any) -> None:
    """``target(rank, *arguments)`` in so many processes at once."""
    processes = [
        _processes.Process(target=target, args=(rank, *arguments)) for rank in range(count)
    ]
    for process in processes:
        process.start()
    try:
        for process in processes:
            process.join(300)
            assert process.exitcode == 0
    finally:
        for process in processes:
            process.kill()


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    return port


def be_process(rank: int, port: int) -> None:
    """As if started by a launcher of several, on one machine."""
    torch.set_num_threads(1)
    os.environ |= {
        "LOCAL_RANK": str(rank),
        "NODE_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def wait_until(condition: Callable[[], Any], seconds: float = 60) -> None:
    patience = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < patience, "waited in vain"
        time.sleep(0.005)


def interpreter_out_of_date() -> bool:
    """Triton 3.6's interpreter cannot count loops with numpy 2.4."""
    triton, numpy = (tuple(map(int, version(n).split(".")[:2])) for n in ("triton", "numpy"))
    return triton < (3, 7) and numpy >= (2, 4)


def make_images(folder: Path, each: int = 32, classes: int = 4, side: int = 16) -> Path:
    """A folder per class, with gratings of one direction, any colour, phase and noise."""
    rng = np.random.default_rng(0)
    y, x = np.mgrid[:side, :side]
    for label in range(classes):
        (folder / f"class{label}").mkdir(parents=True)
        angle = np.pi * label / classes
        for number in range(each):
            phase = 1.2 * (x * np.cos(angle) + y * np.sin(angle)) + rng.uniform(0, 2 * np.pi)
            colour = rng.uniform(0.3, 1, 3) * rng.choice([-1, 1], 3)
            pixels = 127 + 80 * np.sin(phase)[..., None] * colour + rng.normal(0, 15, (*x.shape, 3))
            image = Image.fromarray(pixels.clip(0, 255).astype(np.uint8))
            image.save(folder / f"class{label}" / f"{number:03}.png")
    return folder


def two_splits(folder: Path, each: int = 12) -> Path:
    """Such images to learn from and others to judge by."""
    for split in ("train", "val"):
        make_images(folder / split, each=each)
    return folder


def write_recipe(path: Path, source: Path | str, **sections: dict[str, Any]) -> Path:
    """The quick recipe on the images in ``source``, with changes by section."""
    recipe = {"data": {"source": str(source)}} | FAST
    for section, fields in sections.items():
        recipe[section] = recipe.get(section, {}) | fields
    path.write_text(yaml.safe_dump(recipe))
    return path


def fingerprint(folder: Path) -> dict[str, str]:
    """Every file below ``folder`` with a hash of its content, every folder with none."""
    return {
        str(path.relative_to(folder)): (
            hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
        )
        for path in sorted(folder.rglob("*"))
    }


def metrics(run: Path) -> list[dict[str, Any]]:
    """All lines of a run's metrics.jsonl."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def logged_steps(run: Path) -> list[int]:
    return [line["step"] for line in metrics(run) if "values" in line]


def knn_records(run: Path) -> list[tuple[str, int]]:
    """Subject and epoch of every kNN record."""
    return [
        (line["subject"], line["protocol"]["epoch"])
        for line in metrics(run)
        if line.get("measure") == "knn_top1"
    ]


def checkpoints(run: Path) -> list[Path]:
    return sorted((run / "checkpoints").glob("step-*.ckpt"))


def tensors(state: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Every leaf of a nested state with its path."""
    if isinstance(state, dict):
        for key, value in state.items():
            yield from tensors(value, f"{name}/{key}")
    elif isinstance(state, list | tuple):
        for position, value in enumerate(state):
            yield from tensors(value, f"{name}/{position}")
    else:
        yield name, state


UNLIKE = {
    "/seconds",
    "/identity/settings/data/source",
    "/identity/settings/train/checkpoint_minutes",
}


def assert_same_end(run: Path, other: Path) -> None:
    """Two finished runs have the same weights and the same last checkpoint, bit for bit.

    All but the time they took, how often they saved and where their images lay.
    """
    ours, theirs = (load_file(r / "backbone.safetensors") for r in (run, other))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert checkpoints(run)[-1].name == checkpoints(other)[-1].name
    states = [
        dict(tensors(torch.load(checkpoints(r)[-1], weights_only=True))) for r in (run, other)
    ]
    assert states[0].keys() == states[1].keys()
    for name, value in states[0].items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, states[1][name]), name
        else:
            assert value == states[1][name] or name in UNLIKE, name
