"""At which size central views suit a backbone best: what a recipe's ``eval_size`` should be.

    python benchmarks/validation_split.py cifar10.tar.xz --out tuning.tar
    python benchmarks/eval_size.py runs/cifar10 --data tuning.tar 32 36 40 44 48

A random crop shows things larger than the whole image does at the same size, so that a backbone
trained on crops may know things best in a larger image. (From 64 px on, a central view leaves out
the border of the image, which shows things larger too.) Judged are kNN (k 200) and logistic
regression on frozen features, as in ``tune.py``: ``val/`` by ``train/``. The labels of the test
images take no part, and should not: the size is chosen by this table.
"""

import argparse
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from recipe import RESULTS
from tune import STRENGTHS, K, check_splits, judge
from xmoco.data.sources import source_name
from xmoco.evaluate.evaluation import EvalOptions, Evaluation
from xmoco.records import Record, append_records


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("weights", help="a run folder or a file of weights")
    parser.add_argument("sizes", nargs="+", type=int, help="sides in pixels")
    parser.add_argument("--data", required=True, help="images with a train/ and a val/ folder")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_intermixed_args()
    sizes = [EvalOptions(size=size) for size in options.sizes]  # a mistake is told now
    check_splits(options.data)
    table = Table(title="central views of these sizes, judged by held-out labels")
    for heading in ("px", "kNN", "logistic", "mean"):
        table.add_column(heading, justify="right")
    for at_size in sizes:
        evaluation = Evaluation.open(options.weights, at_size)
        knn, logistic = judge(evaluation, options.data)
        append_records(
            options.results / "eval-size.jsonl", records(evaluation, options, knn, logistic)
        )
        values = (knn, logistic, (knn + logistic) / 2)
        table.add_row(str(at_size.size), *(f"{value:.2f} %" for value in values))
        print(f"{at_size.size} px: kNN {knn:.2f} %, logistic {logistic:.2f} %", flush=True)
    Console().print(table)


def records(
    evaluation: Evaluation, options: argparse.Namespace, knn: float, logistic: float
) -> list[Record]:
    card = evaluation.weights.card
    protocol: dict[str, Any] = {
        "data": source_name(options.data),
        "split": "validation, held out of the training images",
        "backbone": card.backbone,
        "digest": evaluation.digest,
        "epoch": card.epochs,
        "trained_size": card.size,
        "size": evaluation.input.central_size,
        "knn_k": K,
        "strengths": list(STRENGTHS),
    }
    work = f"eval-size-{source_name(options.data)}-{card.backbone}"
    return [
        Record("knn_top1", knn, "%", card.method, work, protocol, card.seed),
        Record("logistic_top1", logistic, "%", card.method, work, protocol, card.seed),
    ]


if __name__ == "__main__":
    main()
