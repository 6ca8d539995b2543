"""Do runs finish sooner side by side on one GPU than one after the other?

    python benchmarks/side_by_side.py imagenette --data imagenette.tar

One, two and more processes train the same recipe at once, each with its own images in memory, its
own seed and its own CUDA graph. Counted is what all of them together train in the same seconds,
after a warm-up. ``--mps`` has NVIDIA's multi-process service run their kernels at the same time;
without it the GPU takes turns between processes.
"""

import argparse
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from at_once import CONTEXT, in_processes, multi_process_service
from recipe import RESULTS
from xmoco.data.batches import preload
from xmoco.evaluate.evaluation import EvalOptions, labelled_splits
from xmoco.pretraining import prepare_training, work_name
from xmoco.records import Record, append_records
from xmoco.settings import load_config
from xmoco.train.engine import build_fabric
from xmoco.train.run_folder import RunFolder

WARM_UP = 60  # steps: compiling, capturing, filling banks


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipe")
    parser.add_argument("settings", nargs="*", help="changes to the recipe, key=value")
    parser.add_argument("--data", required=True, help="labelled images")
    parser.add_argument("--runs", nargs="+", type=int, default=[1, 2, 3], help="at once")
    parser.add_argument("--seconds", type=float, default=8.0, help="that are counted, each")
    parser.add_argument("--mps", action="store_true", help="use the multi-process service")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_intermixed_args()
    config = load_config(options.recipe, options.settings, {"source": options.data})

    protocol = {
        "recipe": options.recipe,
        "changes": " ".join(options.settings),
        "batch": config.train.batch,
        "multi_process_service": options.mps,
        "seconds": options.seconds,
        "rounds": 1,
    }
    speeds: dict[int, list[float]] = {}
    with multi_process_service(options.mps):
        for runs in options.runs:
            found = speeds[runs] = together(options, runs)
            record = Record(
                "images_per_second",
                sum(found),
                "images/s",
                "xmoco",
                work_name(config),
                protocol | {"runs": runs, "each": [round(speed) for speed in found]},
                seed=0,
            )
            append_records(options.results / "side-by-side.jsonl", [record])
            print(f"{runs} at once: {sum(found):,.0f} images/s", flush=True)
    table = Table(title=f"{work_name(config)}, batch {config.train.batch}, one round")
    for heading in ("runs at once", "images/s together", "each", "times one run"):
        table.add_column(heading, justify="right")
    for runs, found in speeds.items():
        each = ", ".join(f"{speed:,.0f}" for speed in found)
        gain = f"{sum(found) / speeds[1][0]:.2f}" if 1 in speeds else ""
        table.add_row(str(runs), f"{sum(found):,.0f}", each, gain)
    Console(width=120).print(table)


def together(options: argparse.Namespace, runs: int) -> list[float]:
    """Images per second of each of so many runs at once."""
    barrier, answers = CONTEXT.Barrier(runs), CONTEXT.SimpleQueue()
    if in_processes(train, [(options, seed, barrier, answers) for seed in range(runs)]):
        sys.exit(f"a run of {runs} at once failed.")
    return [answers.get() for _ in range(runs)]


def train(options: argparse.Namespace, seed: int, barrier: Any, answers: Any) -> None:
    try:
        settings = [*options.settings, f"seed={seed}", "epochs=1000"]
        config = load_config(options.recipe, settings, {"source": options.data})
        fabric = build_fabric(config.run)
        images, _ = labelled_splits(options.data, EvalOptions())
        with tempfile.TemporaryDirectory() as folder:
            kept = preload(images, fabric.device)
            training = prepare_training(config, fabric, kept, RunFolder(Path(folder)))
            training.task.train()
            with closing(training.batches.from_step(0)) as stream:
                for _ in range(WARM_UP):
                    training.advance(stream)
                finish(fabric.device)
                print(f"run {seed} is warm, {time.process_time():.0f} s of processor", flush=True)
                barrier.wait()
                started, steps = time.perf_counter(), 0
                while time.perf_counter() - started < options.seconds:
                    for _ in range(10):
                        training.advance(stream)
                    finish(fabric.device)  # so that no run queues up work for later
                    steps += 10
                seconds = time.perf_counter() - started
        answers.put(steps * config.train.batch / seconds)
    except BaseException:
        barrier.abort()  # the others would wait for ever
        raise


def finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
