"""Compare methods and settings of a recipe: each entry trained with several seeds, then judged.

    python benchmarks/compare.py imagenette --data imagenette.tar --seeds 0 1 2 --epochs 200 \\
        "mocov2plus: method=mocov2plus" "xmoco:" "xmoco+: teacher=keys weak_keys=true"

An entry is a name and changes to the recipe; what is trained is told by the settings that these
make, not by the name or the order. Images are decoded once for all runs. Judged are kNN (k 20 and
200) and logistic regression on frozen features of the test images, after the last epoch;
``--linear`` adds a linear classifier by MoCo's settings. The table shows the mean over seeds, the
deviation and how many seeds there were.

With ``--held-out`` the test images are not looked at: a share of the training images is held out by
a fixed rule, and judged in their place. That is how settings are to be chosen. With ``--watch 20``
they are judged every 20 epochs as well, by kNN, which goes into the records of new runs with what
the run told last, its loss among it: it shows whether longer training helps, and what becomes of it
if it does not. ``--sizes`` judges new runs by images of further sizes.

What has its records is not measured again, so that a call that was interrupted goes on; records of
``xmoco tables`` in ``--results`` count as well. Runs stay in ``--runs``, by whose weights
``--linear`` can be measured later; those of which only records are left are not trained again for
it. Several calls may work on the same entries: each leaves alone what another one trains, and says
so. ``--at-once 2`` trains two runs side by side. Records tell how many runs shared the GPU: of
those, seconds are no measure of speed.
"""

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from at_once import in_processes, multi_process_service
from options import at_least, share_of_one
from recipe import RESULTS
from xmoco.config import Config
from xmoco.errors import Interrupted, UserError
from xmoco.files import write_whole
from xmoco.methods import Method, build_method
from xmoco.records import Record, append_records
from xmoco.report.circumstances import mean_and_deviation
from xmoco.settings import load_config
from xmoco.tables.attempts import Books, Wanted, attempt
from xmoco.tables.bench import Benches
from xmoco.tables.columns import COLUMNS
from xmoco.tables.images import Images
from xmoco.tables.judging import Judge
from xmoco.tables.processes import end_with_parent
from xmoco.tables.trials import (
    Kept,
    Trial,
    divergences,
    recipe_told,
    refuse_twins,
)
from xmoco.train.callback import Callback
from xmoco.train.engine import choose_device
from xmoco.train.loop import Training
from xmoco.train.run_folder import RunFolder

CURVE = "curve.json"
"""In the folder of a run that was watched."""
OPTIONS = {"seed": "--seeds", "epochs": "--epochs", "source": "--data"}
"""What an entry cannot set, as all have it in common."""
RECORDS = ("compare-*.jsonl", "trials-*.jsonl", "tables*.jsonl")
"""The files in which trials are found, whoever ran them."""


@dataclass(frozen=True)
class Entry:
    name: str
    changes: str
    build: Callable[[Config], Method] = build_method
    subject: str | None = None
    """What records call the method, if it is not one of ours."""

    @classmethod
    def parse(cls, text: str) -> "Entry":
        name, colon, changes = text.partition(":")
        if not (colon and name.strip()):
            raise SystemExit(f"{text!r} is not of the form 'name: key=value …'.")
        for change in changes.split():
            option = OPTIONS.get(change.partition("=")[0].rpartition(".")[2])
            if option is not None:
                raise SystemExit(f"{text!r}: give {option} instead of {change}, for all entries.")
        return cls(name.strip(), changes.strip())

    def wanted(self, options: argparse.Namespace, seed: int) -> Wanted:
        """At the sizes of the views, of the recipe's evaluation, and of those asked for."""
        usual = [f"log_every={10 if options.watch else 100}", "checkpoint_minutes=1000"]
        own, fixed = self.changes.split(), [f"seed={seed}"]
        if options.epochs is not None:
            fixed.append(f"epochs={options.epochs}")
        config = load_config(options.recipe, [*usual, *own, *fixed], {"source": options.data})
        linear = ["linear"] if options.linear else []
        columns = [COLUMNS[name] for name in ("knn20", "knn200", *linear, "logistic")]
        sizes = sorted({config.input.size, config.input.central_size, *options.sizes})
        told = recipe_told(options.recipe, own)
        trial = Trial.of(config, share(options), told, self.subject)
        label = f"{self.name} [{self.changes}] seed {seed}"
        return Wanted(label, trial, columns, sizes, self.build)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("entries", nargs="+", type=Entry.parse, help="'name: key=value …'")
    options = parser.parse_intermixed_args()
    topic = Path(options.recipe).stem
    run(options, options.entries, f"{'trials' if options.held_out else 'compare'}-{topic}.jsonl")


def arguments(says: str) -> argparse.ArgumentParser:
    """Those of all programs that compare."""
    parser = argparse.ArgumentParser(
        description=says, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipe")
    parser.add_argument("--data", required=True, help="labelled images with two splits")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--epochs", type=at_least(1), help="where not the recipe's")
    parser.add_argument("--held-out", action="store_true", help="do not look at the test images")
    parser.add_argument("--share", type=share_of_one, default=0.2, help="that is held out")
    parser.add_argument(
        "--watch", type=at_least(1), metavar="EPOCHS", help="also judge every so often, by kNN"
    )
    parser.add_argument(
        "--sizes", nargs="+", type=at_least(1), default=[], help="also judge images of these, px"
    )
    parser.add_argument("--at-once", type=at_least(1), default=1, help="runs side by side")
    parser.add_argument("--mps", action="store_true", help="use the multi-process service for that")
    parser.add_argument("--linear", action="store_true", help="also a linear classifier (slow)")
    parser.add_argument("--runs", type=Path, default=Path("runs/compare"), help="of all trials")
    parser.add_argument("--results", type=Path, default=RESULTS)
    return parser


def run(options: argparse.Namespace, entries: Sequence[Entry], file: str) -> None:
    """Train and judge what is missing, and show all."""
    if options.mps and options.at_once == 1:
        sys.exit("--mps needs --at-once: alone, a run has nobody to share the GPU with.")
    if options.watch and not options.held_out:
        sys.exit("--watch needs --held-out: test images are looked at once.")
    try:  # a mistake is told before anything is trained
        all_wanted = [one.wanted(options, seed) for seed in options.seeds for one in entries]
        refuse_twins({wanted.label: wanted.trial for wanted in all_wanted})
        for wanted in all_wanted:
            if wanted.trial.config.data != all_wanted[0].trial.config.data:
                sys.exit(f"{wanted.label} has other images than {all_wanted[0].label}.")
        images = Images.open(all_wanted[0].trial.config.data, share(options)).fingerprints
    except UserError as error:
        sys.exit(str(error))
    others = [path for pattern in RECORDS for path in sorted(options.results.glob(pattern))]
    also = [path for path in others if path.name != file]
    books = Books(options.results / file, options.runs, images, also)
    missing = []
    for wanted in all_wanted:
        if wanted.lacks_any(known := books.known()):
            if wanted.trial.own(known) and not books.weights_kept(wanted.trial):
                print(
                    f"{wanted.label} has records, but no weights in {options.runs}: left as it is"
                )
            else:
                missing.append(wanted)
    if missing:
        try:  # who cannot write there learns it before the training
            append_records(books.records, ())
        except UserError as error:
            sys.exit(str(error))
    if missing and options.at_once > 1:
        with multi_process_service(options.mps):
            in_processes(attempt_all, [(options, missing, books)] * options.at_once)
    elif missing:
        attempt_all(options, missing, books)
    known = books.known()
    show(all_wanted, known, options)
    if left := [wanted.label for wanted in missing if wanted.lacks_any(known)]:
        sys.exit(f"not measured, as told above, or as another call does: {'; '.join(left)}.")


def share(options: argparse.Namespace) -> float | None:
    return options.share if options.held_out else None


def attempt_all(options: argparse.Namespace, missing: Sequence[Wanted], books: Books) -> None:
    """Whatever fails: the others may be right."""
    end_with_parent()
    failed: dict[str, str] = {}
    benches = Benches()
    for wanted in missing:
        if not wanted.lacks_any(books.known()):
            continue  # another process was faster
        config = wanted.trial.config
        bench = benches.of(config, share(options))
        watch = partial(Curve, bench.judge, config, options.watch)
        wanted = wanted.with_all_that_is_told(choose_device(config.run.device))
        try:
            line = attempt(wanted, books, bench, failed, watch=watch, mark=add_curve)
        except Interrupted as stop:
            print(f"{wanted.label} was stopped; the same command goes on.", file=sys.stderr)
            sys.exit(stop.status)
        if line is not None:
            print(line, flush=True, file=sys.stderr if wanted.label in failed else sys.stdout)


def add_curve(run: RunFolder, found: Sequence[Record]) -> None:
    """What was seen of the training, if it was watched: today's call may only have measured."""
    if (watched := curve_in(run.path)) is not None:
        for record in found:
            record.protocol["watched_every"] = watched[0]
        if found:
            found[0].protocol["curve"] = watched[1]


def curve_in(folder: Path) -> Any:
    file = folder / CURVE
    return json.loads(file.read_bytes()) if file.exists() else None


class Curve(Callback):
    """What a run is worth as it goes: kNN (k 20) every so many epochs, and what the run told last,
    its loss among it. Points are kept in the run's folder, for when it goes on."""

    def __init__(self, judge: Judge, config: Config, every: int | None, training: Training) -> None:
        assert isinstance(training.task, Method)
        self.judge, self.config, self.every = judge, config, every
        self.backbone = training.task.encoder.backbone
        self.file = training.run.path / CURVE
        self.points: list[dict[str, float]] = (curve_in(training.run.path) or (every, []))[1]
        self.told: dict[str, float] = {}

    def on_values(self, step: int, epoch: float, values: Mapping[str, float]) -> None:
        self.told = {**values, "told_at_step": step, "told_at_epoch": epoch}

    def on_epoch(self, epoch: int, step: int) -> None:
        if not self.every or epoch % self.every:
            return
        knn = self.judge.knn(self.backbone, self.config.input, k=20)
        now = {**self.told, "step": step, "epoch": epoch, "knn": knn}
        self.points = [point for point in self.points if point["epoch"] < epoch]
        self.points.append({name: round(value, 4) for name, value in now.items()})
        write_whole(self.file, json.dumps([self.every, self.points]).encode())
        loss = f", loss {now['loss']:.3f}" if "loss" in now else ""
        print(f"  epoch {epoch}: kNN {knn:.2f}{loss}", flush=True)


def show(all_wanted: Sequence[Wanted], known: Sequence[Kept], options: argparse.Namespace) -> None:
    """Mean ± deviation over the seeds asked for, and their number."""
    rows: dict[str, dict[str, dict[int, float]]] = {}
    diverged = []
    for wanted in all_wanted:
        own = wanted.trial.own(known)
        cells = rows.setdefault(wanted.label.rpartition(" seed ")[0], defaultdict(dict))
        for record in own:
            if record.measure.endswith("_top1"):
                cells[heading(record)][record.seed] = record.value
        diverged += [f"{wanted.label} diverged{end}" for end in divergences(own).values()]
    headings = list(dict.fromkeys(heading for cells in rows.values() for heading in cells))
    table = Table(title="held-out images" if options.held_out else "test images")
    for name in ("", *headings, "seeds"):
        table.add_column(name, justify="left" if name == "" else "right")
    for entry, cells in rows.items():
        seeds = max((len(values) for values in cells.values()), default=0)
        shown = [mean_and_deviation(cells[name].values(), digits=2) for name in headings]
        table.add_row(escape(entry), *shown, str(seeds))
    console = Console(width=160)
    console.print(table)
    for line in diverged:
        console.print(line, markup=False)


def heading(record: Kept) -> str:
    protocol: dict[str, Any] = record.protocol
    k = f" k {protocol['k']}" if "k" in protocol else ""
    return f"{record.measure.removesuffix('_top1')}{k}, {protocol['size']} px"


if __name__ == "__main__":
    main()
