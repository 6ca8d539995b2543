"""Whether a long run keeps its memory, threads and open files as they are.

    python benchmarks/endurance.py
    python benchmarks/endurance.py --steps 100000 --device cuda

A small network is trained for many steps, on images that are read from files all the time, with
checkpoints, a log, TensorBoard's events and a kNN monitor. Every hundred steps it is asked what the
process holds. Compared are the medians of the second and of the last tenth of the run: the first
tenth is for caches to fill. Records go to benchmarks/results.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import torch
import yaml
from rich.console import Console
from rich.table import Table

from chaos import EPOCH, recipe, write_images
from xmoco import pretraining
from xmoco.records import Record, append_records
from xmoco.run_logger import RunLogger

RESULTS = Path(__file__).parent / "results"
EVERY = 100
LIMIT = 2.0  # percent


class Held(NamedTuple):
    """By the process and the system's account of it."""

    memory_mib: float
    threads: int
    files: int

    @classmethod
    def now(cls) -> "Held":
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        threads, files = (len(os.listdir(f"/proc/self/{what}")) for what in ("task", "fd"))  # noqa: PTH208
        return cls(pages * os.sysconf("SC_PAGESIZE") / 2**20, threads, files)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    started = time.monotonic()
    held = watched_run(options.steps, options.device)
    minutes = (time.monotonic() - started) / 60
    tenth = len(held) // 10
    early, late = held[tenth : 2 * tenth], held[-tenth:]
    table = Table()
    for heading in ("", "second tenth", "last tenth", "growth"):
        table.add_column(heading, justify="left" if not heading else "right")
    records, worst = [], 0.0
    for place, name in enumerate(Held._fields):
        before, after = (statistics.median(one[place] for one in part) for part in (early, late))
        growth = 100 * (after / before - 1)
        worst = max(worst, growth)
        table.add_row(name, f"{before:,.1f}", f"{after:,.1f}", f"{growth:+.2f} %")
        protocol = {
            **{"data": "made-up images of 16 px, read while training", "steps": options.steps},
            **{"device": options.device, "what": name.partition("_")[0]},
            **{"before": round(before, 1), "after": round(after, 1), "minutes": round(minutes, 1)},
        }
        record = Record(
            "endurance_growth", round(growth, 3), "%", "xmoco", f"endurance-{name}", protocol, 0
        )
        records.append(record)
    Console().print(table)
    append_records(options.results / "endurance.jsonl", records)
    if worst > LIMIT:
        sys.exit(f"it grew by more than {LIMIT:g} %")


def watched_run(steps: int, device: str) -> list[Held]:
    held: list[Held] = []
    on_step = RunLogger.on_step

    def look(self: RunLogger, step: int) -> None:
        on_step(self, step)
        if step % EVERY == 0:
            held.append(Held.now())
        if step % (steps // 20) == 0:
            print(f"step {step:,}: {held[-1]}", flush=True)

    RunLogger.on_step = look  # type: ignore[method-assign]
    with tempfile.TemporaryDirectory(prefix="xmoco-endurance-") as place:
        folder = Path(place)
        settings = recipe(write_images(folder / "images"), steps // EPOCH)
        # A checkpoint every few seconds, kNN now and then: what happens once must happen often.
        settings["train"] |= {"checkpoint_minutes": 0.05, "log_every": 20}
        settings["monitor"] = {"knn_every": 50, "knn_k": 5}
        settings["data"] |= {"labels": "folders"}
        settings["run"]["device"] = device
        for number, path in enumerate(sorted((folder / "images").iterdir())):
            (folder / "images" / f"class{number % 4}").mkdir(exist_ok=True)
            path.rename(folder / "images" / f"class{number % 4}" / path.name)
        (folder / "recipe.yaml").write_text(yaml.safe_dump(settings))
        pretraining.pretrain(folder / "recipe.yaml", out=folder / "run")
    return held


if __name__ == "__main__":
    main()
