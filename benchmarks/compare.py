"""Compare methods and settings of a recipe: each entry trained with several seeds, then judged.

    python benchmarks/compare.py imagenette --data imagenette.tar --seeds 0 1 2 --epochs 200 \\
        "mocov2plus: method=mocov2plus" "xmoco:" "xmoco+: teacher=keys weak_keys=true"

An entry is a name and changes to the recipe. Images are decoded once for all runs. Judged are kNN
(k 20 and 200) and logistic regression on frozen features of the test images, after the last epoch;
``--linear`` adds a linear classifier by MoCo's settings for the last seed of every entry. The table
shows the mean over seeds, the deviation and how many seeds there were.

With ``--held-out`` the test images are not looked at: a share of the training images is held out by
a fixed rule, and judged in their place. That is how settings are to be chosen. With ``--watch 20``
they are judged every 20 epochs as well, by kNN, which goes into the records of new runs with what
the run told last, its loss among it: it shows whether longer training helps, and what becomes of it
if it does not. ``--sizes`` judges new runs by images of further sizes.

What has its records is not measured again, so that a call that was interrupted goes on. Runs stay
in ``--runs``, by whose weights ``--linear`` can be measured later; those of which only records are
left are not trained again for it. Several calls may work on the same entries: each leaves alone
what another one trains, and says so. ``--at-once 2`` trains two runs side by side; their records
say so, as their seconds are no measure of speed.
"""

import argparse
import json
import statistics
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
from options import at_least
from recipe import RESULTS
from tune import digest
from xmoco.config import Config
from xmoco.errors import Interrupted, UserError
from xmoco.files import write_whole
from xmoco.methods import Method, build_method
from xmoco.records import Record, append_records
from xmoco.settings import load_config
from xmoco.tables.attempts import Books, Wanted, attempt
from xmoco.tables.bench import Bench, Images
from xmoco.tables.columns import COLUMNS
from xmoco.tables.trials import DIVERGED, Kept, Trial, divergences, split_facts
from xmoco.train.callback import Callback
from xmoco.train.engine import build_fabric
from xmoco.train.loop import Training
from xmoco.train.run_folder import RunFolder

CURVE = "curve.json"
"""In the folder of a run that was watched."""
TOGETHER = "runs_at_once"
"""In a run's folder, how many shared the GPU while it was trained, at the most."""


@dataclass(frozen=True)
class Entry:
    name: str
    changes: str
    build: Callable[[Config], Method] = build_method

    @classmethod
    def parse(cls, text: str) -> "Entry":
        name, colon, changes = text.partition(":")
        if not colon:
            raise SystemExit(f"{text!r} is not of the form 'name: key=value …'.")
        return cls(name.strip(), changes.strip())

    def wanted(self, options: argparse.Namespace, seed: int) -> Wanted:
        """At the sizes of the views, of the recipe's evaluation, and of those asked for."""
        usual = [f"log_every={10 if options.watch else 100}", "checkpoint_minutes=1000"]
        fixed = [f"seed={seed}"]
        if options.epochs is not None:
            fixed.append(f"epochs={options.epochs}")
        changes = [*usual, *self.changes.split(), *fixed]
        config = load_config(options.recipe, changes, {"source": options.data})
        facts = {
            "recipe": options.recipe,
            "recipe_digest": digest(load_config(options.recipe)),
            "changes": self.changes,
            **split_facts(options.share if options.held_out else None),
            "epochs": config.train.epochs,
            "epoch": config.train.epochs,
        }
        linear = ["linear"] if options.linear and seed == options.seeds[-1] else []
        columns = [COLUMNS[name] for name in ("knn20", "knn200", *linear, "logistic")]
        sizes = sorted({config.input.size, config.input.central_size, *options.sizes})
        trial = Trial(self.name, config, facts)
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
        for wanted in all_wanted:
            if wanted.trial.config.data != all_wanted[0].trial.config.data:
                sys.exit(f"{wanted.label} has other images than {all_wanted[0].label}.")
        images = Images.open(all_wanted[0].trial.config.data, share(options)).fingerprints
    except UserError as error:
        sys.exit(str(error))
    books = Books(options.results / file, options.runs, images)
    missing = []
    for wanted in all_wanted:
        if wanted.lacks_any(known := books.known()):
            if wanted.trial.own(known) and not books.weights_kept(wanted.trial):
                print(
                    f"{wanted.label} has records, but no weights in {options.runs}: left as it is"
                )
            else:
                missing.append(wanted)
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
    failed: dict[str, str] = {}
    append_records(books.records, ())  # who cannot write there learns it before the training
    bench = None
    for wanted in missing:
        if not wanted.lacks_any(books.known()):
            continue  # another process was faster
        if bench is None:
            config = wanted.trial.config
            fabric, images = build_fabric(config.run), Images.open(config.data, share(options))
            bench = Bench(fabric, images.decoded(fabric.device, config.data.preload_gib))
        together = options.at_once + options.beside
        watch = partial(Curve, bench, wanted.trial.config, options.watch, together)
        mark = partial(add_to, wanted.trial.config)
        try:
            line = attempt(wanted, books, bench, failed, watch=watch, mark=mark)
        except Interrupted as stop:
            print(f"{wanted.label} was stopped; the same command goes on.", file=sys.stderr)
            sys.exit(stop.status)
        if line is not None:
            print(line, flush=True, file=sys.stderr if wanted.label in failed else sys.stdout)


def add_to(config: Config, run: RunFolder, found: Sequence[Record]) -> None:
    """What records tell besides, of the training: today's call may only have measured."""
    settings = config.model_dump(mode="json", exclude={"run", "data", "monitor"})
    together, watched = told_in(run.path / TOGETHER), told_in(run.path / CURVE)
    for record in found:
        if together is not None and together > 1:
            record.protocol["runs_at_once"] = together
        if watched is not None:  # the seconds of training have that in them
            record.protocol["watched_every"] = watched[0]
    if found:
        found[-1].protocol["settings"] = settings
        if watched is not None:
            found[0].protocol["curve"] = watched[1]


def told_in(file: Path) -> Any:
    return json.loads(file.read_bytes()) if file.exists() else None


class Curve(Callback):
    """What a run is worth as it goes: kNN (k 20) every so many epochs, and what the run told last,
    its loss among it. Points are kept in the run's folder, for when it goes on."""

    def __init__(
        self, bench: Bench, config: Config, every: int | None, together: int, training: Training
    ) -> None:
        assert isinstance(training.task, Method)
        self.bench, self.config, self.every = bench, config, every
        self.backbone = training.task.encoder.backbone
        self.file = training.run.path / CURVE
        _, self.points = told_in(self.file) or (every, [])
        self.told: dict[str, float] = {}
        shared = training.run.path / TOGETHER
        write_whole(shared, json.dumps(max(together, told_in(shared) or 1)).encode())

    def on_values(self, step: int, epoch: float, values: Mapping[str, float]) -> None:
        self.told = {**values, "told_at_step": step, "told_at_epoch": epoch}

    def on_epoch(self, epoch: int, step: int) -> None:
        if not self.every or epoch % self.every:
            return
        knn = self.bench.knn(self.backbone, self.config.input, k=20)
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
        trial, own = wanted.trial, wanted.trial.own(known)
        changes = trial.facts["changes"]
        cells = rows.setdefault(f"{trial.subject}  {changes}", defaultdict(dict))
        for record in own:
            if record.measure != DIVERGED:
                cells[heading(record)][trial.seed] = record.value
        diverged += [f"{wanted.label} diverged{end}" for end in divergences(own).values()]
    headings = list(dict.fromkeys(heading for cells in rows.values() for heading in cells))
    table = Table(title="held-out images" if options.held_out else "test images")
    for name in ("", *headings, "seeds"):
        table.add_column(name, justify="left" if name == "" else "right")
    for entry, cells in rows.items():
        seeds = max((len(values) for values in cells.values()), default=0)
        shown = [mean_and_deviation([*cells[name].values()]) for name in headings]
        table.add_row(escape(entry), *shown, str(seeds))
    console = Console(width=160)
    console.print(table)
    for line in diverged:
        console.print(line, markup=False)


def heading(record: Kept) -> str:
    protocol: dict[str, Any] = record.protocol
    k = f" k {protocol['k']}" if "k" in protocol else ""
    return f"{record.measure.removesuffix('_top1')}{k}, {protocol['size']} px"


def mean_and_deviation(values: Sequence[float]) -> str:
    if not values:
        return ""
    deviation = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.2f}{deviation}"


if __name__ == "__main__":
    main()
