"""Where the time of a short run goes that is not training.

    python benchmarks/startup.py imagenette --data imagenette.tar

Runs ``xmoco.pretrain`` for two epochs in a new process, twice, and tells what the second one, whose
files are in the system's cache and whose kernels are compiled, spent before its first step and
after its last: the program, the images, the network, kNN, the first steps, weights, report.
"""

import argparse
import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

STARTED = time.time()  # the interpreter itself takes a few hundredths of a second before this

import torch  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

from recipe import RESULTS  # noqa: E402
from xmoco import pretraining  # noqa: E402
from xmoco.pretraining import work_name  # noqa: E402
from xmoco.records import Record, append_records  # noqa: E402
from xmoco.run_logger import RunLogger  # noqa: E402
from xmoco.settings import load_config  # noqa: E402
from xmoco.train.loop import Training  # noqa: E402

BEFORE, AFTER = "before the first step", "after the last step"
SETTINGS = ["epochs=2", "knn_every=1000", "log_every=1000", "checkpoint_minutes=1000"]
"""kNN is measured at the start and after the last epoch, nothing is written between."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipe")
    parser.add_argument("settings", nargs="*", help="changes to the recipe, key=value")
    parser.add_argument("--data", required=True)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--spans", type=Path, help=argparse.SUPPRESS)  # this is the new process
    options = parser.parse_intermixed_args()
    if options.spans is not None:
        found = run(options)
        options.spans.write_text(json.dumps(found), encoding="utf-8")
        for when, stages in found.items():  # of the first run too: it is what a machine's first is
            told = ", ".join(f"{name} {value:.1f} s" for name, value in stages.items())
            print(f"{when}: {sum(stages.values()):.1f} s ({told})", flush=True)
        return
    config = load_config(options.recipe, [*SETTINGS, *options.settings], {"source": options.data})
    with tempfile.TemporaryDirectory() as folder:
        spans = Path(folder) / "spans.json"
        for _ in range(2):
            # An installed program has its bytecode: the first run writes it, whatever is set here.
            environment = os.environ | {"PYTHONDONTWRITEBYTECODE": ""}
            command = [sys.executable, *sys.argv, "--spans", str(spans)]
            subprocess.run(command, check=True, env=environment)
        found = json.loads(spans.read_text(encoding="utf-8"))
    protocol = {"recipe": options.recipe, "changes": " ".join(options.settings), "rounds": 1}
    records = [
        Record(
            "seconds",
            sum(stages.values()),
            "s",
            when,
            work_name(config),
            protocol | {"stages": {name: round(value, 2) for name, value in stages.items()}},
            seed=config.train.seed,
        )
        for when, stages in found.items()
    ]
    append_records(options.results / "startup.jsonl", records)
    table = Table(title=f"{work_name(config)}: seconds around the training, one round")
    table.add_column("when")
    table.add_column("stage")
    table.add_column("seconds", justify="right")
    for when, stages in found.items():
        for name, value in stages.items():
            table.add_row(when, name, f"{value:.2f}")
        table.add_row(when, "[bold]together", f"[bold]{sum(stages.values()):.2f}")
    Console(width=100).print(table)


def run(options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """The stages of one run, each with its seconds; what is between them is 'the rest'."""
    clock = Stages()
    clock.end("starting Python, loading libraries", since=STARTED)
    clock.wrap(pretraining, "launched", "finding the device")
    clock.wrap(pretraining, "build_method", "building the network")
    clock.wrap(pretraining, "open_images", "listing the images")
    clock.wrap(pretraining, "_batches", "reading and decoding the training images")
    clock.wrap(pretraining, "_kept", "reading and decoding the test images")
    clock.wrap(pretraining, "fingerprint", "naming the images")
    clock.wrap(Training, "__post_init__", "moving the network to the device")
    clock.wrap(RunLogger, "__enter__", "kNN of pixels and of the untrained network")
    clock.wrap(Training, "advance", "the first step", first_only=True)
    clock.wrap(RunLogger, "on_epoch", "kNN")
    clock.wrap(Training, "save", "the checkpoint")
    clock.wrap(pretraining, "save_backbone", "the weights")
    clock.wrap(pretraining, "picture_views", "the picture of views")
    clock.wrap(pretraining, "picture_neighbours", "the picture of neighbours")
    clock.wrap(pretraining, "write_report", "the report's page")
    with tempfile.TemporaryDirectory() as folder:
        pretraining.pretrain(
            options.recipe,
            data=options.data,
            out=Path(folder) / "run",
            overrides=[*SETTINGS, *options.settings],
        )
        done = time.time()
    return {
        BEFORE: clock.between(STARTED, clock.ended("the first step")),
        AFTER: clock.between(clock.began("kNN"), done),
    }


class Stages:
    """When which stage of a run began and ended."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, float, float]] = []

    def wrap(self, owner: Any, name: str, stage: str, first_only: bool = False) -> None:
        """Time the calls of a function, or only the first: waiting for the device costs speed."""
        original: Callable[..., Any] = getattr(owner, name)

        @functools.wraps(original)
        def timed(*args: Any, **kwargs: Any) -> Any:
            since = time.time()
            result = original(*args, **kwargs)
            if not (first_only and any(span[0] == stage for span in self.spans)):
                finish()
                self.end(stage, since)
            return result

        setattr(owner, name, timed)

    def end(self, stage: str, since: float) -> None:
        self.spans.append((stage, since, time.time()))

    def ended(self, stage: str) -> float:
        return next(until for name, _, until in self.spans if name == stage)

    def began(self, stage: str) -> float:
        """The last time."""
        return next(since for name, since, _ in reversed(self.spans) if name == stage)

    def between(self, start: float, end: float) -> dict[str, float]:
        """Seconds by stage; what lies in none is the rest."""
        found: dict[str, float] = {}
        for name, since, until in self.spans:
            if start <= since and until <= end:
                found[name] = found.get(name, 0.0) + until - since
        return found | {"the rest": end - start - sum(found.values())}


def finish() -> None:
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
