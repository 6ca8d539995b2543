"""Where the time of a short run goes that is not training.

    python benchmarks/startup.py imagenette --data imagenette.tar

Runs ``xmoco.pretrain`` for two epochs in a new process, twice, and tells what each spent before its
first step and after its last: the program, the images, the network, kNN, the first step, weights,
report. The first run compiles its kernels; the second finds them compiled, and its files in the
system's cache.
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
from xmoco.evaluate.monitor import Monitor  # noqa: E402
from xmoco.pretraining import work_name  # noqa: E402
from xmoco.records import Record, append_records  # noqa: E402
from xmoco.run_logger import RunLogger  # noqa: E402
from xmoco.settings import load_config  # noqa: E402
from xmoco.train.loop import Training  # noqa: E402

BEFORE, AFTER, ALL = "before the first step", "after the last step", "together"
LATER = "later_run_seconds"
MEASURES = {"first_run_seconds": "first run", LATER: "later run"}
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
    protocol = {"recipe": options.recipe, "changes": " ".join(options.settings), "rounds": 1}
    found: dict[str, dict[str, dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        # An installed program has its bytecode: the first run writes it, whatever is set here. And
        # OpenMP's threads wait as they do under the command line.
        environment = os.environ | {
            "PYTHONDONTWRITEBYTECODE": "",
            "GOMP_SPINCOUNT": "1000",
            "TRITON_CACHE_DIR": str(Path(folder) / "kernels"),
        }
        for measure in MEASURES:
            spans = Path(folder) / f"{measure}.json"
            command = [sys.executable, *sys.argv, "--spans", str(spans)]
            subprocess.run(command, check=True, env=environment)
            found[measure] = json.loads(spans.read_text(encoding="utf-8"))
            append_records(
                options.results / "startup.jsonl",
                [
                    Record(
                        measure, value, "s", "xmoco", work_name(config),
                        protocol | {"when": when, "stage": stage}, config.train.seed,
                    )
                    for when, stages in found[measure].items()
                    for stage, value in (stages | {ALL: sum(stages.values())}).items()
                ],
            )  # fmt: skip
    table = Table(title=f"{work_name(config)}: seconds around the training, one round")
    table.add_column("when")
    table.add_column("stage")
    for name in MEASURES.values():
        table.add_column(name, justify="right")
    for when, stages in found[LATER].items():
        for stage in (*stages, ALL):
            style = "bold" if stage == ALL else ""
            values = [{**one[when], ALL: sum(one[when].values())} for one in found.values()]
            table.add_row(when, stage, *(f"{v.get(stage, 0):.2f}" for v in values), style=style)
    Console(width=110).print(table)


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
    clock.wrap(Monitor, "raw_pixels", "kNN of pixels")
    clock.wrap(Monitor, "initial", "kNN of the untrained network")
    clock.wrap(RunLogger, "_look", "what becomes of negatives")
    clock.wrap(Training, "advance", "the first step", first_only=True)
    clock.wrap(Monitor, "trained", "kNN")
    clock.wrap(Training, "save", "the checkpoint")
    clock.wrap(pretraining, "save_backbone", "the weights")
    clock.wrap(pretraining, "draw_report", "the report and its pictures")
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
        AFTER: clock.between(clock.last["the first step"], done),
    }


class Stages:
    """When which stage of a run began and ended."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, float, float]] = []
        self.last: dict[str, float] = {}
        """When the last call of a stage ended, timed or not."""

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
            self.last[stage] = time.time()
            return result

        setattr(owner, name, timed)

    def end(self, stage: str, since: float) -> None:
        self.spans.append((stage, since, time.time()))

    def ended(self, stage: str) -> float:
        return next(until for name, _, until in self.spans if name == stage)

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
