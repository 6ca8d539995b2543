"""Tune a recipe: try changes one after the other, and keep those that pay.

    python benchmarks/validation_split.py cifar10.tar.xz --out tuning.tar
    python benchmarks/tune.py cifar10 --data tuning.tar --epochs 40 temperature=0.1 \
        "batch=256 key_momentum=0.995"

Each argument is a change: one or several settings. The recipe is trained as it is, then with each
change on top of those kept so far. A change is kept if it raises the mean of two accuracies on the
held-out images: kNN (k 200), and logistic regression on frozen features. Neither the schedule nor
the images are those of the final run, and the test images take no part. Every trial leaves records
in benchmarks/results/tuning.jsonl, and one that is there already is not trained again. With
``--seconds``, no trial begins that would end later.
"""

import argparse
import gc
import hashlib
import json
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

import xmoco
from recipe import RESULTS
from xmoco.evaluate.case import Case, Place, labelled_splits, source_name
from xmoco.evaluate.knn import knn_accuracy
from xmoco.evaluate.logistic import fit_path
from xmoco.evaluate.metrics import top_k
from xmoco.records import Record, append_records
from xmoco.settings import load_config

K = 200
STRENGTHS = (1.0, 10.0, 100.0)
"""Of the penalty of the logistic regression; the best one counts."""


NONE = "none"


def in_words(settings: list[str]) -> str:
    return " ".join(settings) or NONE


class Trial(NamedTuple):
    settings: list[str]
    knn: float
    logistic: float
    seconds: float
    kept: bool = False

    @property
    def changes(self) -> str:
        return in_words(self.settings)

    @property
    def value(self) -> float:
        return (self.knn + self.logistic) / 2


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipe")
    parser.add_argument("changes", nargs="+", help="settings to try, key=value")
    parser.add_argument("--data", required=True, help="images with a train/ and a val/ folder")
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--with", dest="base", default="", help="settings all trials have")
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_intermixed_args()

    for change in options.changes:
        load_config(
            options.recipe, [*options.base.split(), *change.split()]
        )  # a mistake is told now
    started = time.perf_counter()
    known = known_trials(options)
    trials: list[Trial] = []
    best: Trial | None = None
    for change in ["", *options.changes]:
        settings = changed(best.settings if best else options.base.split(), change.split())
        found = known.get(in_words(settings))
        if found is None:
            spent = time.perf_counter() - started
            if spent + max((trial.seconds for trial in trials), default=0.0) > options.seconds:
                print(f"no time left for {change}")
                break
            found = attempt(options.recipe, settings, options.data, options.epochs)
        trial = found._replace(kept=best is None or found.value > best.value)
        best = trial if trial.kept else best
        trials.append(trial)
        if in_words(settings) not in known:
            append_records(options.results / "tuning.jsonl", records(trial, options))
        print(
            f"{trial.changes}: kNN {trial.knn:.2f} %, "
            f"logistic {trial.logistic:.2f} %, {trial.seconds:.0f} s"
            f"{', kept' if trial.kept else ''}",
            flush=True,
        )
    show(trials)


def changed(settings: list[str], change: list[str]) -> list[str]:
    """Of a setting that is given twice the second counts, in the place of the first."""
    values = dict(setting.partition("=")[::2] for setting in [*settings, *change])
    return [f"{key}={value}" for key, value in values.items()]


def attempt(recipe: str, settings: list[str], data: str, epochs: int) -> Trial:
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        result = xmoco.pretrain(
            recipe,
            data=data,
            out=Path(folder) / "run",
            overrides=[f"epochs={epochs}", "knn_every=0", "log_every=200", *settings],
        )
        knn, logistic = judge(result.weights, data)
    gc.collect()  # a recorded CUDA graph is freed with the last run's cycles
    return Trial(settings, knn, logistic, time.perf_counter() - started)


def judge(weights: Path, data: str) -> tuple[float, float]:
    case = Case.open(weights, Place())
    train, held = (
        case.features(images, "features")
        for images in labelled_splits(data, case.place)
        if images is not None
    )
    assert train.labels is not None
    assert held.labels is not None
    knn = knn_accuracy(
        train.vectors, train.labels, held.vectors, held.labels, ks=(K,), device=case.device
    )[K]
    labels, held_labels = train.labels.to(case.device), held.labels.to(case.device)
    classes = int(labels.max()) + 1
    logistic = max(
        top_k(model.scores(held.vectors), held_labels, 1)
        for _, model in fit_path(train.vectors, labels, classes, STRENGTHS)
    )
    return knn, logistic


def identity(options: argparse.Namespace) -> dict[str, Any]:
    """What trials that can be compared have in common."""
    settings = load_config(options.recipe).model_dump_json()
    return {
        "recipe": hashlib.blake2b(settings.encode(), digest_size=4).hexdigest(),
        "data": source_name(options.data),
        "split": "validation, held out of the training images",
        "epochs": options.epochs,
        "knn_k": K,
    }


def records(trial: Trial, options: argparse.Namespace) -> list[Record]:
    protocol = identity(options) | {
        "changes": trial.changes,
        "kept": trial.kept,
        "seconds": round(trial.seconds, 1),
    }
    work = f"tuning-{options.recipe}"
    return [
        Record("knn_top1", trial.knn, "%", "xmoco", work, protocol, 0),
        Record("logistic_top1", trial.logistic, "%", "xmoco", work, protocol, 0),
    ]


def known_trials(options: argparse.Namespace) -> dict[str, Trial]:
    """Trials of earlier calls, by their settings."""
    path = options.results / "tuning.jsonl"
    if not path.exists():
        return {}
    lines = map(json.loads, path.read_text().splitlines())
    same = [
        line
        for line in lines
        if line["work"] == f"tuning-{options.recipe}"
        and identity(options).items() <= line["protocol"].items()
    ]
    knn, logistic = (
        {line["protocol"]["changes"]: line for line in same if line["measure"] == measure}
        for measure in ("knn_top1", "logistic_top1")
    )
    return {
        changes: Trial(
            [] if changes == NONE else changes.split(),
            line["value"],
            logistic[changes]["value"],
            line["protocol"]["seconds"],
        )
        for changes, line in knn.items()
    }


def show(trials: list[Trial]) -> None:
    table = Table(title="held-out images")
    for heading in ("changes", "kNN", "logistic", "seconds", ""):
        table.add_column(heading, justify="left" if heading == "changes" else "right")
    for trial in trials:
        table.add_row(
            trial.changes,
            f"{trial.knn:.2f} %",
            f"{trial.logistic:.2f} %",
            f"{trial.seconds:.0f}",
            "kept" if trial.kept else "",
        )
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
