"""Let everything go wrong that goes wrong on clusters, by a long random schedule, over a small run.

    python benchmarks/chaos.py
    python benchmarks/chaos.py --faults 200 --seed 3

A run is trained undisturbed, and again while faults befall it: it is killed (also in the middle of
writing a checkpoint), asked to stop by signals, its disk fills, its images vanish or are cut, its
loss is no number or jumps, memory runs out, a second run is started in its folder, the clock jumps,
and between sessions its last checkpoint is damaged or lost and its notes are spoilt. After each it
is resumed. In the end both runs must have the same weights, bit for bit; no checkpoint may be lost
but those that were taken away, and no step taken again that a checkpoint holds. Records go to
benchmarks/results.
"""

import argparse
import json
import multiprocessing
import os
import random
import resource
import shutil
import signal
import stat
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from PIL import Image
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file

from xmoco.checkpoints import Checkpoints, load_checkpoint
from xmoco.errors import TRY_AGAIN
from xmoco.records import Record, append_records, now

RESULTS = Path(__file__).parent / "results"
EPOCH = 4  # steps
PATIENCE = 300.0  # seconds for a session to take a step, or to end
processes = multiprocessing.get_context("forkserver")


def recipe(images: Path, epochs: int) -> dict[str, Any]:
    """Images are read while training, and so few that none may be missing."""
    return {
        "data": {"source": str(images), "preload_gib": 0.0},
        "input": {"size": 16},
        "views": {"blur": 0.0},
        "model": {
            **{"backbone": "tiny", "stem": "cifar", "batch_norm": "plain"},
            **{"head_layers": 2, "head_hidden": 32, "feature_size": 16},
        },
        "method": {"bank_length": 64},
        "train": {"epochs": epochs, "batch": 16, "log_every": 3, "checkpoint_minutes": 0.0005},
        "monitor": {"knn_every": 0},
        "run": {"device": "cpu", "readers": 2},
    }


def write_images(folder: Path) -> Path:
    rng = np.random.default_rng(0)
    folder.mkdir(parents=True)
    for number in range(16 * EPOCH):
        small = Image.fromarray(rng.integers(0, 255, (4, 4, 3), dtype=np.uint8))
        small.resize((16, 16), Image.Resampling.BICUBIC).save(folder / f"{number:03}.png")
    return folder


# In the process that trains


def session(arguments: list[str], folder: Path, fault: str, at: int) -> None:
    """``xmoco ARGUMENTS``, whose steps are noted; after ``at`` of them the fault comes from inside,
    if it is of that kind."""
    from xmoco.cli import main
    from xmoco.report import pictures
    from xmoco.run_logger import RunLogger

    said = os.open(folder / "said.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(said, 1)
    os.dup2(said, 2)
    torch.set_num_threads(1)
    pictures.picture_views = lambda *_: None  # type: ignore[assignment]
    pictures.picture_neighbours = lambda *_: None  # type: ignore[assignment]
    on_step, taken = RunLogger.on_step, 0
    begin = INSIDE.get(fault)

    def note_and_fail(self: RunLogger, step: int) -> None:
        nonlocal taken
        on_step(self, step)
        taken += 1
        with (folder / "steps.txt").open("a") as file:
            file.write(f"{step}\n")
        if taken == at and begin is not None:
            begin(folder)

    RunLogger.on_step = note_and_fail  # type: ignore[method-assign]
    sys.argv = ["xmoco", *arguments]
    main()


def fill_the_disk(_: Path) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, 2**16))  # no file may be longer


def die_in_writing(_: Path) -> None:
    real = os.fsync

    def fsync(descriptor: int) -> None:
        status = os.fstat(descriptor)
        if stat.S_ISREG(status.st_mode):
            os.ftruncate(descriptor, status.st_size // 2)
            os.kill(os.getpid(), signal.SIGKILL)
        real(descriptor)

    os.fsync = fsync


def spoil(change: Callable[[Any], Any]) -> Callable[[Path], None]:
    def begin(_: Path) -> None:
        from xmoco.train.loop import Training

        advance = Training.advance

        def spoilt(self: Training, *given: Any, **options: Any) -> Any:
            step = advance(self, *given, **options)
            return step._replace(loss=change(step.loss))

        Training.advance = spoilt  # type: ignore[method-assign]

    return begin


def run_out_of_memory(_: Path) -> None:
    from xmoco.train.step import Stepper

    def take(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB.")

    Stepper.take = take  # type: ignore[assignment,method-assign]


def lose_images(folder: Path) -> None:
    (folder / "images").rename(folder / "away")


def cut_images(folder: Path) -> None:
    shutil.copytree(folder / "images", folder / "away")
    for path in (folder / "images").iterdir():
        os.truncate(path, 50)


def move_the_clock(_: Path) -> None:
    real = time.time
    time.time = lambda: real() + random.choice((-(10.0**6), 10.0**6))


INSIDE: dict[str, Callable[[Path], None]] = {
    "killed while writing": die_in_writing,
    "disk full": fill_the_disk,
    "loss no number": spoil(lambda loss: loss * float("nan")),
    "loss jumps": spoil(lambda loss: loss * 1e9),
    "out of memory": run_out_of_memory,
    "images vanish": lose_images,
    "images cut": cut_images,
    "clock jumps": move_the_clock,
}
SIGNALS = {
    "SIGKILL": signal.SIGKILL,
    "SIGTERM": signal.SIGTERM,
    "SIGUSR1": signal.SIGUSR1,
    "SIGINT": signal.SIGINT,
}
BETWEEN = ("checkpoint damaged", "checkpoint cut", "checkpoint lost", "notes spoilt")
SECOND_RUN = "second run"
FAULTS = (*INSIDE, *SIGNALS, *BETWEEN, SECOND_RUN)

ENDS = {
    **dict.fromkeys(("SIGKILL", "killed while writing"), -signal.SIGKILL),
    **dict.fromkeys(("SIGTERM", "SIGUSR1"), TRY_AGAIN),
    "SIGINT": 130,
    **dict.fromkeys(("disk full", "loss no number", "loss jumps", "out of memory"), 2),
    **dict.fromkeys(("images vanish", "images cut"), 2),
}
"""How a session ends in which a fault befalls it; after the others it is killed."""
IN_ORDER = ("SIGTERM", "SIGUSR1", "SIGINT", "images vanish", "images cut")
"""Sessions that save at the step they have reached."""


# In the process that watches


@dataclass
class Chaos:
    folder: Path
    rng: random.Random
    total_steps: int
    befallen: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    lost: int = 0
    """Checkpoints that were whole and are not there any more."""
    repeated: int = 0
    """Steps that were taken though a whole checkpoint held them."""
    again: int = 0
    """Steps that were taken again, since nothing had held them."""

    @property
    def run(self) -> Path:
        return self.folder / "run"

    def newest(self) -> int:
        """The step of the last whole checkpoint."""
        saved = Checkpoints(self.run / "checkpoints")
        whole = [path for path in saved.paths() if _is_whole(path)]
        return int(whole[-1].stem.removeprefix("step-")) if whole else 0

    def steps(self) -> list[int]:
        file = self.folder / "steps.txt"
        return [int(line) for line in file.read_text().split()] if file.exists() else []

    def start(self, fault: str, at: int) -> ForkServerProcess:
        begun = (self.run / "config.yaml").exists()
        way = ["--resume"] if begun else ["--recipe", str(self.folder / "recipe.yaml")]
        arguments = ["pretrain", *way, "--out", str(self.run)]
        process = processes.Process(target=session, args=(arguments, self.folder, fault, at))
        process.start()
        return process

    def befall(self, fault: str) -> None:
        """A session, and what happens before it, in it and to it."""
        saved = Checkpoints(self.run / "checkpoints").paths()
        if fault.startswith("checkpoint") and len(saved) < 2:  # one must be left
            fault = "SIGKILL"
        self.befallen[fault] += 1
        if fault in BETWEEN:
            self._harm(fault)
        before, known, begun = self.newest(), len(self.steps()), now()
        process = self.start(fault, at=self.rng.randrange(1, 6))
        if fault not in INSIDE or fault == "clock jumps":
            self._wait_for_steps(process, known + self.rng.randrange(1, 8))
            if fault == SECOND_RUN:
                self._expect(self.start("", 0), 2, f"{fault}: the second")
            time.sleep(self.rng.uniform(0, 0.05))
            os.kill(process.pid or 0, SIGNALS.get(fault, signal.SIGKILL))
        self._expect(process, ENDS.get(fault, -signal.SIGKILL), f"{fault}, {begun}")
        self._put_back()
        after, taken = self.newest(), self.steps()[known:]
        self.lost += after < before
        self.repeated += sum(step <= before for step in taken)
        if taken and taken[0] != before + 1:
            self.problems.append(f"{fault}: went on with step {taken[0]} after {before}")
        if fault in IN_ORDER and taken and taken[-1] != after:
            self.problems.append(f"{fault}: saved step {after} after step {taken[-1]}")
        self.again += max(0, (taken[-1] if taken else 0) - after)

    def finish(self) -> None:
        self._expect(self.start("", 0), 0, "the end")

    def _wait_for_steps(self, process: ForkServerProcess, count: int) -> None:
        patience = time.monotonic() + PATIENCE
        while len(self.steps()) < count and process.is_alive() and time.monotonic() < patience:
            time.sleep(0.005)

    def _expect(self, process: ForkServerProcess, status: int, what: str) -> None:
        if not self._ended(process):
            process.kill()
            process.join()
            self.problems.append(f"{what}: it hung")
        elif process.exitcode not in (status, 0 if status < 0 else status):
            self.problems.append(f"{what}: ended with {process.exitcode} instead of {status}")
        if "Traceback" in (self.folder / "said.txt").read_text(errors="replace"):
            self.problems.append(f"{what}: a traceback")

    def _ended(self, process: ForkServerProcess) -> bool:
        """Whether it ends by itself; while it takes steps, it is waited for."""
        known, until = -1, 0.0
        while process.is_alive():
            if len(self.steps()) > known:
                known, until = len(self.steps()), time.monotonic() + PATIENCE
            if time.monotonic() > until:
                return False
            process.join(0.2)
        return True

    def _harm(self, fault: str) -> None:
        saved = Checkpoints(self.run / "checkpoints").paths()
        if fault == "notes spoilt":
            with (self.run / "metrics.jsonl").open("a") as file:
                file.write('{"values": []}\n3\n{"step": 9')
            (self.run / "environment.json").write_text("[")
        else:
            last = saved[-1]
            content = bytearray(last.read_bytes())
            if fault == "checkpoint lost":
                last.unlink()
            elif fault == "checkpoint cut":
                last.write_bytes(content[: self.rng.randrange(len(content))])
            else:
                content[len(content) // 2] ^= 1
                last.write_bytes(content)

    def _put_back(self) -> None:
        if (self.folder / "away").exists():
            shutil.rmtree(self.folder / "images", ignore_errors=True)
            (self.folder / "away").rename(self.folder / "images")


def _is_whole(path: Path) -> bool:
    try:
        load_checkpoint(path)
    except Exception:
        return False
    return True


def differing(run: Path, other: Path) -> list[str]:
    """Tensors of weights and of the last checkpoint that are not the same, bit for bit."""
    ours, theirs = (load_file(folder / "backbone.safetensors") for folder in (run, other))
    last = [Checkpoints(folder / "checkpoints").latest() for folder in (run, other)]
    found = [name for name in {*ours, *theirs} if not _same(ours.get(name), theirs.get(name))]
    mine, its = (dict(_leaves(load_checkpoint(path))) for path in last if path is not None)
    return found + [name for name in {*mine, *its} if not _same(mine.get(name), its.get(name))]


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one, other)
    return bool(one == other)


def _leaves(state: Any, name: str = "") -> Any:
    if isinstance(state, dict):
        for key, value in state.items():
            if (name, key) not in (("", "seconds"), ("", "identity")):
                yield from _leaves(value, f"{name}/{key}")
    elif isinstance(state, list):
        for place, value in enumerate(state):
            yield from _leaves(value, f"{name}/{place}")
    else:
        yield name, state


def logged(run: Path) -> list[int]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [line["step"] for line in lines if "values" in line]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--faults", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    processes.set_forkserver_preload(["xmoco.pretraining", "xmoco.cli", "chaos"])
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="xmoco-chaos-") as place:
        chaos, calm = run_both(Path(place), options.faults, options.seed)
        unlike = differing(chaos.run, calm.run)
        if logged(chaos.run) != logged(calm.run):
            chaos.problems.append("the metrics are not of the same steps")
    minutes = (time.monotonic() - started) / 60
    show(chaos, unlike, minutes)
    append_records(
        options.results / "chaos.jsonl", records_of(chaos, unlike, options.seed, minutes)
    )
    if unlike or chaos.problems or chaos.lost or chaos.repeated:
        sys.exit(1)


def run_both(place: Path, faults: int, seed: int) -> tuple[Chaos, Chaos]:
    rng = random.Random(seed)
    epochs = 3 * faults // 2  # so that faults, not steps, are what ends first
    both = []
    for name in ("chaos", "calm"):
        folder = place / name
        settings = recipe(write_images(folder / "images"), epochs)
        (folder / "recipe.yaml").write_text(yaml.safe_dump(settings))
        both.append(Chaos(folder, rng, epochs * EPOCH))
    chaos, calm = both
    calm.finish()
    if calm.problems:
        raise RuntimeError(f"the undisturbed run: {calm.problems}")
    # Each kind as often as the others, in any order.
    schedule = [FAULTS[number % len(FAULTS)] for number in range(faults)]
    rng.shuffle(schedule)
    for number, fault in enumerate(schedule, start=1):
        chaos.befall(fault)
        print(
            f"{number} of {faults}: {fault}; step {chaos.newest()} of {chaos.total_steps}, "
            f"{len(chaos.problems)} problems",
            flush=True,
        )
    chaos.finish()
    return chaos, calm


def records_of(chaos: Chaos, unlike: list[str], seed: int, minutes: float) -> list[Record]:
    protocol = {
        "data": f"{16 * EPOCH} made-up images of 16 px, read while training",
        "steps": chaos.total_steps,
        "faults": chaos.befallen.total(),
        "kinds": dict(sorted(chaos.befallen.items())),
        "steps_taken_again": chaos.again,
        "problems": chaos.problems,
        "minutes": round(minutes, 1),
    }
    return [
        Record(measure, value, unit, "xmoco", "chaos", protocol, seed)
        for measure, value, unit in (
            ("chaos_faults", chaos.befallen.total(), "faults"),
            ("chaos_differing_tensors", len(unlike), "tensors"),
            ("chaos_checkpoints_lost", chaos.lost, "checkpoints"),
            ("chaos_steps_repeated", chaos.repeated, "steps"),
            ("chaos_problems", len(chaos.problems), "problems"),
        )
    ]


def show(chaos: Chaos, unlike: list[str], minutes: float) -> None:
    table = Table()
    table.add_column("fault")
    table.add_column("times", justify="right")
    for fault, count in sorted(chaos.befallen.items()):
        table.add_row(fault, f"{count}")
    Console().print(table)
    print(
        f"{chaos.befallen.total()} faults in {minutes:.1f} minutes: {len(unlike)} tensors differ, "
        f"{chaos.lost} checkpoints lost, {chaos.repeated} steps repeated that a checkpoint held; "
        f"{chaos.again} were taken again that none held"
    )
    for line in [*chaos.problems, *unlike]:
        print(line)


if __name__ == "__main__":
    main()
