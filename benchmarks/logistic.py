"""Time the whole frozen transfer of one set of features, beside scikit-learn.

    python benchmarks/logistic.py --features cifar10.safetensors --device cuda

All fit the 45 strengths on four fifths of the training part, choose by the accuracy on the rest,
fit that strength on everything and are tested once. scikit-learn's solver is its default, on the
CPU. As it comes it begins anew each time and stops after 100 iterations, which on such features is
long before it has converged; so it takes part again with ten times as many, and once more with each
fit begun where the last one ended, as xmoco's are. Without a file, features are made up from a
seed. A table is printed and records go to benchmarks/results.
"""

import argparse
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression
from torch import Tensor

from xmoco.evaluate.logistic import STRENGTHS, LinearModel, fit, fit_path
from xmoco.evaluate.metrics import top_k
from xmoco.records import Record, append_records

RESULTS = Path(__file__).parent / "results"
LIBRARY: dict[str, dict[str, Any]] = {
    "scikit-learn": {},
    "scikit-learn, 1,000 iterations": {"max_iter": 1000},
    "scikit-learn, 1,000 iterations, warm starts": {"max_iter": 1000, "warm_start": True},
}


class Part(NamedTuple):
    vectors: Tensor
    labels: Tensor

    def to(self, device: str) -> "Part":
        return Part(self.vectors.to(device), self.labels.to(device))


class Result(NamedTuple):
    strength: float
    accuracy: float
    stopped_early: int | None = None
    """Of scikit-learn's fits, how many reached their limit of iterations."""
    seconds: float = 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--features",
        type=Path,
        help=".safetensors with train_vectors, train_labels, test_vectors, test_labels",
    )
    parser.add_argument("--dimensions", type=int, default=512, help="of features made up")
    parser.add_argument("--limit", type=int, default=50_000, help="training vectors at most")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0, help="of the split and of features made up")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()

    if options.features:
        file = load_file(options.features)
        train = Part(file["train_vectors"], file["train_labels"])
        test = Part(file["test_vectors"], file["test_labels"])
    else:
        train, test = made_up(options.limit, options.dimensions, options.seed)
    order = torch.randperm(
        len(train.labels), generator=torch.Generator().manual_seed(options.seed)
    )[: options.limit]
    train = Part(train.vectors[order].float(), train.labels[order])
    classes = int(torch.cat([train.labels, test.labels]).max()) + 1
    count, dimensions = train.vectors.shape

    # The first fit of a process loads libraries and wakes the device.
    there = train.to(options.device), test.to(options.device)
    few = Part(there[0].vectors[:1000], there[0].labels[:1000])
    ours(few, few, classes)
    results = {"xmoco": timed(lambda: ours(*there, classes))}
    for subject, settings in LIBRARY.items():
        results[subject] = timed(partial(scikit_learns, train, test, settings))

    protocol = {
        "data": options.features.stem if options.features else "made up",
        "split": f"{count - count // 5} train, {count // 5} validation, {len(test.labels)} test",
        "classes": classes,
        "strengths": len(STRENGTHS),
        "refit": "train and validation",
    }
    records = []
    for subject, result in results.items():
        shared: dict[str, Any] = {
            "subject": subject,
            "work": f"logistic-{count}x{dimensions}",
            "protocol": {
                **protocol,
                "chosen": result.strength,
                "fits": len(STRENGTHS) + 1,  # the last one on everything
                "stopped_early": result.stopped_early,
                "device": options.device if subject == "xmoco" else "cpu",
            },
            "seed": options.seed,
        }
        records.append(Record("logistic_seconds", round(result.seconds, 3), "s", **shared))
        records.append(Record("logistic_top1", round(result.accuracy, 3), "%", **shared))
    path = options.results / "logistic.jsonl"
    append_records(path, records)

    table = Table(title=f"{count} × {dimensions}, {classes} classes, {len(STRENGTHS)} strengths")
    for heading in ("subject", "device", "seconds", "stopped early", "chosen", "test top-1"):
        table.add_column(heading, justify="left" if heading in ("subject", "device") else "right")
    for subject, result in results.items():
        table.add_row(
            subject,
            options.device if subject == "xmoco" else "cpu",
            f"{result.seconds:.2f}",
            "" if result.stopped_early is None else f"{result.stopped_early}",
            f"{result.strength:.3g}",
            f"{result.accuracy:.2f} %",
        )
    Console().print(table)
    for subject in LIBRARY:
        ratio = results[subject].seconds / results["xmoco"].seconds
        print(f"{ratio:.1f} times as fast as {subject}")
    print(f"records in {path}")


def timed(transfer: Callable[[], Result]) -> Result:
    """A transfer ends with an accuracy off the device, so its own end needs no waiting."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    began = time.perf_counter()
    result = transfer()
    return result._replace(seconds=time.perf_counter() - began)


def split(part: Part) -> tuple[Part, Part]:
    """Four fifths and one fifth; the part was shuffled before."""
    held_out = len(part.labels) // 5
    vectors, labels = part
    return (
        Part(vectors[held_out:], labels[held_out:]),
        Part(vectors[:held_out], labels[:held_out]),
    )


def ours(train: Part, test: Part, classes: int) -> Result:
    fitted, validation = split(train)
    best: tuple[float, float, LinearModel] | None = None
    for strength, model in fit_path(*fitted, classes):
        accuracy = top_k(model.scores(validation.vectors), validation.labels, 1)
        if best is None or accuracy > best[0]:
            best = accuracy, strength, model
    assert best is not None
    _, strength, model = best
    final = fit(*train, classes, strength, start=model)
    return Result(strength, top_k(final.scores(test.vectors), test.labels, 1))


def scikit_learns(train: Part, test: Part, settings: dict[str, Any]) -> Result:
    fitted, validation = split(train)
    model = LogisticRegression(**settings)
    stopped_early = 0

    def fit_to(part: Part, strength: float) -> None:
        nonlocal stopped_early
        model.set_params(C=1 / strength)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)  # counted instead
            model.fit(part.vectors.numpy(), part.labels.numpy())
        stopped_early += int(model.n_iter_.max() >= model.max_iter)

    accuracies: dict[float, float] = {}
    for strength in sorted(STRENGTHS, reverse=True):
        fit_to(fitted, strength)
        accuracies[strength] = model.score(validation.vectors.numpy(), validation.labels.numpy())
    strength = max(accuracies, key=lambda strength: accuracies[strength])
    fit_to(train, strength)
    accuracy = 100 * model.score(test.vectors.numpy(), test.labels.numpy())
    return Result(strength, accuracy, stopped_early)


def made_up(count: int, dimensions: int, seed: int, classes: int = 10) -> tuple[Part, Part]:
    """Features like a backbone's: non-negative, strongly correlated, with overlapping classes."""
    generator = torch.Generator().manual_seed(seed)
    total = count + count // 5
    labels = torch.randint(classes, (total,), generator=generator)
    hidden = torch.randn(total, dimensions, generator=generator)
    hidden[:, :32] += 0.5 * torch.randn(classes, min(32, dimensions), generator=generator)[labels]
    hidden *= 3 * torch.arange(1.0, dimensions + 1) ** -0.8
    mixing = torch.randn(dimensions, dimensions, generator=generator) / 2
    vectors = F.relu(hidden @ mixing + torch.randn(dimensions, generator=generator) / 2)
    return Part(vectors[:count], labels[:count]), Part(vectors[count:], labels[count:])


if __name__ == "__main__":
    main()
