"""Compare methods and settings of a recipe: each entry trained with several seeds, then judged.

    python benchmarks/compare.py imagenette --data imagenette.tar --seeds 0 1 2 --epochs 200 \\
        "mocov2plus: method=mocov2plus" "xmoco:" "xmoco+: teacher=keys weak_keys=true"

An entry is a name and changes to the recipe. Images are decoded once for all runs. Judged are kNN
(k 20 and 200) and logistic regression on frozen features of the test images, after the last epoch;
``--linear`` adds a linear classifier by MoCo's settings for the last seed of every entry. The table
shows the mean over seeds, the deviation and how many seeds there were.

With ``--held-out`` the test images are not looked at: a share of the training images is held out by
a fixed rule, and judged in their place. That is how settings are to be chosen. Runs that have their
records already are not trained again, so that a call that was interrupted goes on.
"""

import argparse
import copy
import gc
import statistics
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning_fabric import Fabric
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from recipe import RESULTS
from tune import STRENGTHS, digest
from xmoco.config import Config, InputConfig
from xmoco.data import ImageSet
from xmoco.data.batches import preload
from xmoco.data.subset import held_out
from xmoco.evaluate.classify import LINEAR, TrainingProtocol, class_scores, train_classifier
from xmoco.evaluate.evaluation import EvalOptions, labelled_splits
from xmoco.evaluate.features import backbone_features
from xmoco.evaluate.knn import knn_accuracy
from xmoco.evaluate.logistic import fit_path
from xmoco.evaluate.metrics import top_k
from xmoco.methods import Method
from xmoco.pretraining import prepare_training, work_name
from xmoco.records import Measured, Record, append_records, read_records
from xmoco.settings import load_config
from xmoco.train.engine import build_fabric
from xmoco.train.loop import Callback, DivergedError
from xmoco.train.run_folder import RunFolder

KS = (20, 200)
HELD_OUT = "validation, held out of the training images"

Kept = Measured[dict[str, Any]]
Judgement = tuple[str, float, dict[str, Any]]
"""A measure, its value, and what its protocol has of its own."""


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
        fixed = [f"seed={seed}", "log_every=100", "checkpoint_minutes=1000"]
        if options.epochs is not None:
            fixed.append(f"epochs={options.epochs}")
        return load_config(
            options.recipe, [*self.changes.split(), *fixed], {"source": options.data}
        )


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
    parser.add_argument("--linear", action="store_true", help="also a linear classifier (slow)")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_intermixed_args()

    configs = {  # a mistake is told before anything is trained
        (entry, seed): entry.config(options, seed)
        for seed in options.seeds
        for entry in options.entries
    }
    fabric = build_fabric(next(iter(configs.values())).run)
    bench = Bench(options, fabric, *opened(options, fabric.device))
    for (entry, seed), config in configs.items():
        if not any(record.seed == seed for record in bench.known(entry, config)):
            try:
                found = bench.attempt(entry, config, linear=seed == options.seeds[-1])
            except DivergedError as error:
                print(f"{entry.name}, seed {seed}: {error}", flush=True)
                continue
            append_records(bench.path, found)
            values = ", ".join(f"{label(r)} {r.value:.2f}" for r in found)
            print(f"{entry.name} [{entry.changes}] seed {seed}: {values}", flush=True)
    show(bench, configs)


def opened(options: argparse.Namespace, device: torch.device) -> tuple[ImageSet, ImageSet]:
    """Images to learn from and to judge by, decoded on the device."""
    train, test = labelled_splits(options.data, EvalOptions())
    if options.held_out:
        train, test = held_out(train, options.share)
    elif test is None:
        raise SystemExit(f"{options.data} has no test images: use --held-out.")
    return preload(train, device), preload(test, device)


@dataclass(frozen=True)
class Bench:
    """Where all entries are trained and judged."""

    options: argparse.Namespace
    fabric: Fabric
    train: ImageSet
    test: ImageSet

    @property
    def path(self) -> Path:
        name = "trials" if self.options.held_out else "compare"
        return Path(self.options.results) / f"{name}-{Path(self.options.recipe).stem}.jsonl"

    def known(self, entry: Entry, config: Config) -> list[Kept]:
        """Records of this entry's runs, of any seed."""
        if not self.path.exists():
            return []
        wanted = self.identity(entry, config).items()
        return [
            record
            for record in read_records(self.path, Kept)
            if (record.subject, record.work) == (entry.name, work_name(config))
            and wanted <= record.protocol.items()
        ]

    def identity(self, entry: Entry, config: Config) -> dict[str, Any]:
        """What tells a run from others, but for its seed."""
        share = {"held_out_share": self.options.share} if self.options.held_out else {}
        return {
            "recipe": self.options.recipe,
            "recipe_digest": digest(load_config(self.options.recipe)),
            "changes": entry.changes,
            "split": HELD_OUT if self.options.held_out else "test",
            **share,
            "epochs": config.train.epochs,
            "epoch": config.train.epochs,
        }

    def attempt(self, entry: Entry, config: Config, linear: bool) -> list[Record]:
        """Train, then judge, at the size of the views and at the recipe's for evaluation."""
        with tempfile.TemporaryDirectory() as folder:
            training = prepare_training(config, self.fabric, self.train, RunFolder(Path(folder)))
            started = time.perf_counter()
            training.train(Callback())
            if self.fabric.device.type == "cuda":
                torch.cuda.synchronize()
            seconds = time.perf_counter() - started
        method = training.task
        assert isinstance(method, Method)
        common = self.identity(entry, config) | {
            "features": "backbone",
            "train_seconds": round(seconds, 1),
            "images_per_second": round(training.total_steps * config.train.batch / seconds),
        }
        found = [
            Record(measure, value, "%", entry.name, work_name(config), common | protocol, seed)
            for seed in [config.train.seed]
            for size in sorted({config.input.size, config.input.central_size})
            for measure, value, protocol in self.judged(
                method.encoder.backbone,
                config.input.model_copy(update={"eval_size": size}),
                linear=linear and self.options.linear,
            )
        ]
        settings = config.model_dump(mode="json", exclude={"run", "data", "monitor"})
        found[-1].protocol["settings"] = settings
        del training, method
        gc.collect()  # a recorded CUDA graph is freed with the run's cycles
        if self.fabric.device.type == "cuda":
            torch.cuda.empty_cache()
        return found

    def judged(self, backbone: nn.Module, input: InputConfig, linear: bool) -> list[Judgement]:
        """On ``test``, by the labels of ``train``."""
        device, size = self.fabric.device, input.central_size
        bank, asked = (
            backbone_features(backbone, part, input, device) for part in (self.train, self.test)
        )
        assert bank.labels is not None
        assert asked.labels is not None
        accuracies = knn_accuracy(
            bank.vectors, bank.labels, asked.vectors, asked.labels, ks=KS, device=device
        )
        found: list[Judgement] = [
            ("knn_top1", accuracies[k], {"size": size, "k": k, "temperature": 0.1}) for k in KS
        ]
        if linear:
            protocol = LINEAR["moco"]
            value = self.linear(copy.deepcopy(backbone), input, protocol)
            facts = {"size": size, "name": protocol.name, "crop_size": input.size}
            found.append(("linear_top1", value, facts))
        labels = [part.labels.to(device) for part in (bank, asked) if part.labels is not None]
        value = logistic(bank.vectors, labels[0], asked.vectors, labels[1])
        facts = {"size": size, "strengths": list(STRENGTHS)}
        return [*found, ("logistic_top1", value, facts)]

    def linear(self, backbone: nn.Module, input: InputConfig, protocol: TrainingProtocol) -> float:
        with tempfile.TemporaryDirectory() as folder:
            classifier = train_classifier(
                backbone,
                self.train,
                protocol,
                Path(folder) / "run",
                {"name": protocol.name},
                input=input,
                fabric=self.fabric,
            )
        scores, labels = class_scores(
            classifier.backbone, classifier.head, self.test, input=input, device=self.fabric.device
        )
        return top_k(scores, labels, 1)


def logistic(train: Tensor, labels: Tensor, test: Tensor, test_labels: Tensor) -> float:
    """Of the best of a few strengths."""
    classes = int(labels.max()) + 1
    return max(
        top_k(model.scores(test), test_labels, 1)
        for _, model in fit_path(train, labels, classes, STRENGTHS)
    )


def label(record: Record | Kept) -> str:
    protocol = record.protocol
    k = f" k {protocol['k']}" if "k" in protocol else ""
    return f"{record.measure.removesuffix('_top1')}{k}, {protocol['size']} px"


def show(bench: Bench, configs: dict[tuple[Entry, int], Config]) -> None:
    """Mean ± deviation over the seeds asked for, and their number."""
    rows: dict[Entry, dict[str, list[float]]] = {}
    for (entry, seed), config in configs.items():
        cells = rows.setdefault(entry, defaultdict(list))
        for record in bench.known(entry, config):
            if record.seed == seed:
                cells[label(record)].append(record.value)
    headings = list(dict.fromkeys(heading for cells in rows.values() for heading in cells))
    table = Table(title="held-out images" if bench.options.held_out else "test images")
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
