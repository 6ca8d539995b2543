"""Compare methods and settings of a recipe: each entry trained with several seeds, then judged.

    python benchmarks/compare.py imagenette --data imagenette.tar --seeds 0 1 2 --epochs 200 \\
        "mocov2plus: method=mocov2plus" "xmoco:" "xmoco+: teacher=keys weak_keys=true"

An entry is a name and changes to the recipe. Images are decoded once for all runs. Judged are kNN
(k 20 and 200) and logistic regression on frozen features of the test images, after the last epoch;
``--linear`` adds a linear classifier by MoCo's settings for the last seed of every entry. The table
shows the mean over seeds, the deviation and how many seeds there were.

With ``--held-out`` the test images are not looked at: a share of the training images is held out by
a fixed rule, and judged in their place. That is how settings are to be chosen. With ``--watch 20``
they are judged every 20 epochs as well, by kNN, which goes into the records of new runs with the
loss and all else that a run tells: it shows whether longer training helps, and what becomes of it
if it does not. Runs that have their records already are not trained again, so that a call that was
interrupted goes on. ``--sizes`` judges new runs by images of further sizes. ``--at-once 2`` trains
two runs side by side; their records say so, as their seconds are no measure of speed.
"""

import argparse
import json
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from rich.console import Console
from rich.table import Table

from at_once import CONTEXT, in_processes, multi_process_service
from options import at_least
from recipe import RESULTS
from tune import digest
from xmoco.config import Config
from xmoco.errors import Interrupted, UserError
from xmoco.files import write_whole
from xmoco.methods import Method
from xmoco.records import Record, append_records
from xmoco.settings import load_config
from xmoco.tables.bench import (
    Bench,
    Images,
    Kept,
    Trial,
    known_records,
    split_facts,
)
from xmoco.tables.columns import COLUMNS
from xmoco.tables.running import run_name
from xmoco.train.engine import build_fabric
from xmoco.train.loop import Callback, Training
from xmoco.train.run_folder import RunFolder


@dataclass(frozen=True)
class Entry:
    name: str
    changes: str

    @classmethod
    def parse(cls, text: str) -> "Entry":
        name, colon, changes = text.partition(":")
        if not colon:
            raise SystemExit(f"{text!r} is not of the form 'name: key=value …'.")
        return cls(name.strip(), changes.strip())

    def config(self, options: argparse.Namespace, seed: int) -> Config:
        usual = ["log_every=100", "checkpoint_minutes=1000"]
        fixed = [f"seed={seed}"]
        if options.epochs is not None:
            fixed.append(f"epochs={options.epochs}")
        return load_config(
            options.recipe, [*usual, *self.changes.split(), *fixed], {"source": options.data}
        )

    def trial(self, options: argparse.Namespace, seed: int) -> Trial:
        config = self.config(options, seed)
        facts = {
            "recipe": options.recipe,
            "recipe_digest": digest(load_config(options.recipe)),
            "changes": self.changes,
            **split_facts(options.share if options.held_out else None),
            "epochs": config.train.epochs,
            "epoch": config.train.epochs,
        }
        return Trial(self.name, config, facts)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipe")
    parser.add_argument("entries", nargs="+", type=Entry.parse, help="'name: key=value …'")
    parser.add_argument("--data", required=True, help="labelled images with two splits")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--epochs", type=int, help="where not the recipe's")
    parser.add_argument("--held-out", action="store_true", help="do not look at the test images")
    parser.add_argument("--share", type=float, default=0.2, help="that is held out")
    parser.add_argument(
        "--watch", type=at_least(1), metavar="EPOCHS", help="also judge every so often, by kNN"
    )
    parser.add_argument(
        "--sizes", nargs="+", type=at_least(1), default=[], help="also judge images of these, px"
    )
    parser.add_argument("--at-once", type=at_least(1), default=1, help="runs side by side")
    parser.add_argument("--mps", action="store_true", help="use the multi-process service for that")
    parser.add_argument(
        "--beside", type=at_least(0), default=0, help="runs that another call trains meanwhile"
    )
    parser.add_argument("--linear", action="store_true", help="also a linear classifier (slow)")
    parser.add_argument("--runs", type=Path, help="keep runs here, so that one goes on if stopped")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_intermixed_args()
    if options.mps and options.at_once == 1:
        parser.error("--mps needs --at-once: alone, a run has nobody to share the GPU with.")
    if options.watch and not options.held_out:
        parser.error("--watch needs --held-out: test images are looked at once.")

    trials = [  # a mistake is told before anything is trained
        (entry, entry.trial(options, seed)) for seed in options.seeds for entry in options.entries
    ]
    path = records_file(options)
    known = known_records(path)
    missing = [(entry, trial) for entry, trial in trials if not trial.own(known)]
    failed = 0
    if missing and options.at_once > 1:
        taken = CONTEXT.Value("i", 0)
        with multi_process_service(options.mps):
            failed = in_processes(work, [(options, missing, taken)] * options.at_once)
    elif missing:
        failed = attempt_all(options, missing)
    show(trials, known_records(path), options)
    if failed:
        sys.exit("not everything could be trained and judged, see above.")


def work(options: argparse.Namespace, jobs: Sequence[tuple[Entry, Trial]], taken: Any) -> None:
    """In one of several processes: whatever is next, until nothing is."""
    sys.exit(attempt_all(options, next_of(jobs, taken)))


def next_of(jobs: Sequence[tuple[Entry, Trial]], taken: Any) -> Iterator[tuple[Entry, Trial]]:
    """Those that no other process has taken."""
    while True:
        with taken.get_lock():
            place = taken.value
            taken.value += 1
        if place >= len(jobs):
            return
        yield jobs[place]


def attempt_all(options: argparse.Namespace, jobs: Iterable[tuple[Entry, Trial]]) -> int:
    """Tells how many failed: the others may be right."""
    path, bench, failed = records_file(options), None, 0
    for entry, trial in jobs:
        if trial.own(known_records(path)):
            continue  # another call was faster
        if bench is None:
            fabric = build_fabric(trial.config.run)
            share = options.share if options.held_out else None
            bench = Bench(fabric, Images.open(trial.config.data, share).decoded(fabric.device))
        try:
            attempt(bench, entry, trial, path, options)
        except UserError as error:
            failed += 1
            print(f"{entry.name}, seed {trial.seed}: {error}", file=sys.stderr, flush=True)
    return failed


def records_file(options: argparse.Namespace) -> Path:
    name = "trials" if options.held_out else "compare"
    return Path(options.results) / f"{name}-{Path(options.recipe).stem}.jsonl"


def attempt(
    bench: Bench, entry: Entry, trial: Trial, path: Path, options: argparse.Namespace
) -> None:
    """Train and judge, at the size of the views and at the recipe's for evaluation."""
    linear = options.linear and trial.seed == options.seeds[-1]
    names = ["knn20", "knn200", *(["linear"] if linear else []), "logistic"]
    input = trial.config.input
    try:
        with tempfile.TemporaryDirectory() as temporary:
            folder = kept_run(options, trial, bench.images) or Path(temporary)
            curve = Curve(bench, trial.config, options.watch, folder)
            found = bench.attempt(
                trial,
                [COLUMNS[name] for name in names],
                RunFolder(folder),
                sizes=sorted({input.size, input.central_size, *options.sizes}),
                watch=curve.of,
            )
    except Interrupted as stop:
        kept = "the same command goes on" if options.runs else "it is lost: --runs would keep it"
        print(f"{entry.name}, seed {trial.seed} was stopped; {kept}.", file=sys.stderr)
        sys.exit(stop.status)
    settings = trial.config.model_dump(mode="json", exclude={"run", "data", "monitor"})
    found[-1].protocol["settings"] = settings
    if curve.points:  # a kept run may have been trained before anyone watched
        found[0].protocol["curve"] = curve.points
        for record in found:  # whose seconds of training have that in them
            record.protocol["watched_every"] = options.watch
    if (together := options.at_once + options.beside) > 1:
        for record in found:
            record.protocol["runs_at_once"] = together
    append_records(path, found)
    values = ", ".join(f"{label(record)} {record.value:.2f}" for record in found)
    print(f"{entry.name} [{entry.changes}] seed {trial.seed}: {values}", flush=True)


class Curve(Callback):
    """What a run is worth as it goes: kNN (k 20) every so many epochs, and what the run told last,
    its loss among it. Points are kept in the run's folder, for when it goes on."""

    def __init__(self, bench: Bench, config: Config, every: int | None, folder: Path) -> None:
        self.bench, self.config, self.every = bench, config, every
        self.file = folder / "curve.json"
        self.points: list[dict[str, float]] = []
        if every and self.file.exists():
            self.points = json.loads(self.file.read_text(encoding="utf-8"))
        self.told: dict[str, float] = {}

    def of(self, training: Training) -> Self:
        assert isinstance(training.task, Method)
        self.backbone = training.task.encoder.backbone
        return self

    def on_values(self, step: int, epoch: float, values: Mapping[str, float]) -> None:
        self.told = {"step": step, "epoch": epoch, **values}

    def on_epoch(self, epoch: int, step: int) -> None:
        if not self.every or epoch % self.every:
            return
        knn = self.bench.knn(self.backbone, self.config.input, k=20)
        now = {**self.told, "step": step, "epoch": epoch, "knn": knn}
        self.points = [point for point in self.points if point["epoch"] < epoch]
        self.points.append({name: round(value, 4) for name, value in now.items()})
        write_whole(self.file, json.dumps(self.points).encode())
        loss = f", loss {now['loss']:.3f}" if "loss" in now else ""
        print(f"  epoch {epoch}: kNN {knn:.2f}{loss}", flush=True)


def kept_run(options: argparse.Namespace, trial: Trial, images: Images) -> Path | None:
    """Where the run of a trial is kept: runs of other settings lie elsewhere."""
    if options.runs is None:
        return None
    folder = Path(options.runs) / run_name(trial, images.fingerprints)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def label(record: Record | Kept) -> str:
    protocol: dict[str, Any] = record.protocol
    k = f" k {protocol['k']}" if "k" in protocol else ""
    return f"{record.measure.removesuffix('_top1')}{k}, {protocol['size']} px"


def show(trials: list[tuple[Entry, Trial]], known: list[Kept], options: argparse.Namespace) -> None:
    """Mean ± deviation over the seeds asked for, and their number."""
    rows: dict[Entry, dict[str, list[float]]] = {}
    for entry, trial in trials:
        cells = rows.setdefault(entry, defaultdict(list))
        for record in trial.own(known):
            cells[label(record)].append(record.value)
    headings = list(dict.fromkeys(heading for cells in rows.values() for heading in cells))
    table = Table(title="held-out images" if options.held_out else "test images")
    for heading in ("", *headings, "seeds"):
        table.add_column(heading, justify="left" if heading == "" else "right")
    for entry, cells in rows.items():
        seeds = max((len(values) for values in cells.values()), default=0)
        shown = [mean_and_deviation(cells[heading]) for heading in headings]
        table.add_row(f"{entry.name}  {entry.changes}", *shown, str(seeds))
    Console(width=160).print(table)


def mean_and_deviation(values: list[float]) -> str:
    if not values:
        return ""
    deviation = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.2f}{deviation}"


if __name__ == "__main__":
    main()
