"""Tune a recipe: train it with other settings, and judge each on images held out of training.

    python benchmarks/validation_split.py cifar10.tar.xz --out tuning.tar
    python benchmarks/tune.py cifar10 --data tuning.tar --epochs 100 --runs runs/tuning \
        none learning_rate=0.06 "batch=256 learning_rate=0.06 key_momentum=0.995"

Each argument is a trial: settings in place of the recipe's, or ``none``. Judged are kNN (k 200) and
logistic regression on frozen features; the best mean of the two wins. The test images take no part.
Every trial leaves records in benchmarks/results/tuning.jsonl, and one that is there already is not
trained again. A call that was interrupted goes on from its last checkpoint, where ``--runs`` is the
same.

Small networks do not fill a GPU: with NVIDIA's MPS running (``nvidia-cuda-mps-control -d``),
several calls at the same time, a trial each, may share it. Choose as many epochs as the recipe has,
or not many fewer: what pays in a short course may be worth nothing in a long one.

Records that do not name their strengths are of 1, 10 and 100, which is far too strong a penalty for
these features: their logistic regressions tell little.
"""

import argparse
import gc
import hashlib
import json
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

import xmoco
from recipe import RESULTS
from xmoco.config import KINDS, Config
from xmoco.data.sources import source_name
from xmoco.evaluate.evaluation import EvalOptions, Evaluation, labelled_splits
from xmoco.evaluate.knn import knn_accuracy
from xmoco.evaluate.logistic import fit_path
from xmoco.evaluate.metrics import top_k
from xmoco.records import Measured, Record, append_records, read_records
from xmoco.settings import load_config
from xmoco.tables.bench import STRENGTHS

K = 200
NONE = "none"


class Trial(NamedTuple):
    changes: str
    knn: float
    logistic: float

    @property
    def value(self) -> float:
        return (self.knn + self.logistic) / 2


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipe")
    parser.add_argument("trials", nargs="+", help="settings, key=value; or none")
    parser.add_argument("--data", required=True, help="images with a train/ and a val/ folder")
    parser.add_argument("--epochs", type=int, required=True)
    parser.add_argument("--runs", type=Path, required=True, help="folder for the runs")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_intermixed_args()

    for changes in options.trials:
        load_config(options.recipe, settings_of(changes))  # a mistake is told now
    check_splits(options.data)
    known = known_trials(options)
    trials = []
    for changes in options.trials:
        trial = known.get(changes)
        if trial is None:
            trial = attempt(changes, options)
            append_records(options.results / "tuning.jsonl", records(trial, options))
            print(f"{changes}: kNN {trial.knn:.2f} %, logistic {trial.logistic:.2f} %", flush=True)
        trials.append(trial)
    show(trials)


def check_splits(data: str) -> None:
    if None in labelled_splits(data, EvalOptions()):
        raise SystemExit(f"{data} has no images to judge by: see validation_split.py.")


def digest(config: Config) -> str:
    """Of the settings, in whatever order. Those at their defaults take no part: there was a time
    without them."""
    settings = config.model_dump(mode="json", exclude_defaults=True)
    for section in KINDS:  # each kind of method has its own name for a default
        kind = getattr(config, section)
        if type(kind) is not type(getattr(Config(), section)):
            settings.setdefault(section, {})["name"] = kind.name
    text = json.dumps(settings, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=4).hexdigest()


def settings_of(changes: str) -> list[str]:
    return [] if changes == NONE else changes.split()


def attempt(changes: str, options: argparse.Namespace) -> Trial:
    fixed = [f"epochs={options.epochs}", "knn_every=0", "log_every=200"]
    overrides = [*settings_of(changes), *fixed]
    run = options.runs / digest(load_config(options.recipe, overrides))
    result = xmoco.pretrain(
        options.recipe, data=options.data, out=run, overrides=overrides, resume=run.exists()
    )
    knn, logistic = judge(Evaluation.open(result.weights), options.data)
    gc.collect()  # a recorded CUDA graph is freed with the last run's cycles
    return Trial(changes, knn, logistic)


def judge(evaluation: Evaluation, data: str) -> tuple[float, float]:
    """kNN and logistic regression on ``val/``, by the labels of ``train/``."""
    train, held = (
        evaluation.features(images, "images")
        for images in labelled_splits(data, evaluation.options)
        if images is not None  # as was checked at the start
    )
    assert train.labels is not None
    assert held.labels is not None
    knn = knn_accuracy(
        train.vectors, train.labels, held.vectors, held.labels, ks=(K,), device=evaluation.device
    )[K]
    labels, held_labels = train.labels.to(evaluation.device), held.labels.to(evaluation.device)
    classes = int(labels.max()) + 1
    logistic = max(
        top_k(model.scores(held.vectors), held_labels, 1)
        for _, model in fit_path(train.vectors, labels, classes, STRENGTHS)
    )
    return knn, logistic


def identity(options: argparse.Namespace) -> dict[str, Any]:
    """What trials that can be compared have in common."""
    return {
        "recipe": digest(load_config(options.recipe)),
        "data": source_name(options.data),
        "split": "validation, held out of the training images",
        "epochs": options.epochs,
        "knn_k": K,
        "strengths": list(STRENGTHS),
    }


def records(trial: Trial, options: argparse.Namespace) -> list[Record]:
    protocol = identity(options) | {"changes": trial.changes}
    work = f"tuning-{options.recipe}"
    seed = load_config(options.recipe, settings_of(trial.changes)).train.seed
    return [
        Record("knn_top1", trial.knn, "%", "xmoco", work, protocol, seed),
        Record("logistic_top1", trial.logistic, "%", "xmoco", work, protocol, seed),
    ]


def known_trials(options: argparse.Namespace) -> dict[str, Trial]:
    """Trials of earlier calls, by their changes."""
    path = options.results / "tuning.jsonl"
    if not path.exists():
        return {}
    same = [
        record
        for record in read_records(path, Measured[dict[str, Any]])
        if record.work == f"tuning-{options.recipe}"
        and identity(options).items() <= record.protocol.items()
    ]
    knn, logistic = (
        {record.protocol["changes"]: record.value for record in same if record.measure == measure}
        for measure in ("knn_top1", "logistic_top1")
    )
    return {changes: Trial(changes, value, logistic[changes]) for changes, value in knn.items()}


def show(trials: list[Trial]) -> None:
    table = Table(title="held-out images")
    for heading in ("changes", "kNN", "logistic", "mean"):
        table.add_column(heading, justify="left" if heading == "changes" else "right")
    for trial in sorted(trials, key=lambda trial: trial.value, reverse=True):
        values = (trial.knn, trial.logistic, trial.value)
        table.add_row(trial.changes, *(f"{value:.2f} %" for value in values))
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
