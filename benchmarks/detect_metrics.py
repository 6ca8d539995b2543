"""Time the judging of detections, beside pycocotools: the same figures, in how many seconds.

    python benchmarks/detect_metrics.py

As many images as COCO's validation set has, with as many detections in each as it admits, all made
up from a seed: objects of 80 categories, and detections of which most lie near one of them. Both
begin with arrays and end with the six average precisions that xmoco tells, which must be equal. A
table is printed and records go to benchmarks/results.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import numpy as np
import torch
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval
from rich.console import Console
from rich.table import Table

from options import at_least
from pages.detection import JUDGES
from recipe import RESULTS
from xmoco.data import ArrayImages
from xmoco.detect.metrics import MEASURES, Detections, judge_coco
from xmoco.detect.objects import DetectionSet, Floats, Objects
from xmoco.records import Record, append_records

HEIGHT, WIDTH, CATEGORIES = 480, 640, 80
Figures = dict[str, float]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--images", type=at_least(1), default=5000)
    parser.add_argument("--detections", type=at_least(1), default=100, help="in each image")
    parser.add_argument("--objects", type=at_least(1), default=7, help="in an image, on average")
    parser.add_argument("--rounds", type=at_least(1), default=5, help="of ours; pycocotools has 1")
    parser.add_argument("--seed", type=at_least(0), default=0)
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()

    truth, found = made_up(options.images, options.objects, options.detections, options.seed)
    ours, seconds = timed(lambda: judge_coco(truth, found, "boxes").values, options.rounds)
    theirs, their_seconds = timed(lambda: by_pycocotools(truth, found), 1)
    if ours != theirs:
        raise SystemExit(f"The figures differ: {ours} here, {theirs} by pycocotools.")

    protocol = {
        "images": options.images,
        "objects": len(truth.objects),
        "detections": len(found),
        "categories": CATEGORIES,
        "figures": ours,
    }
    work = f"{options.images}-images-{options.detections}-detections"
    rows = {"xmoco": (seconds, options.rounds), "pycocotools": (their_seconds, 1)}
    append_records(
        options.results / "detect-metrics.jsonl",
        [
            Record("judge_seconds", value, "s", who, work, {**protocol, "rounds": n}, options.seed)
            for who, (value, n) in rows.items()
        ],
    )
    table = Table(title=f"{options.images:,} images, {len(found):,} detections: the same figures")
    table.add_column("")
    table.add_column("seconds", justify="right")
    for who, (value, _) in rows.items():
        table.add_row(JUDGES[who], f"{value:.2f}")
    Console().print(table)


def made_up(images: int, each: int, found: int, seed: int) -> tuple[DetectionSet, Detections]:
    rng = np.random.default_rng(seed)
    counts = rng.integers(1, 2 * each, images)
    where = np.repeat(np.arange(images), counts)
    true = boxes(rng, len(where))
    labels = rng.integers(0, CATEGORIES, len(where))
    crowds = rng.random(len(where)) < 0.01
    areas = (true[:, 2:] - true[:, :2]).prod(1)
    objects = Objects(where, true, labels, crowds, areas, masks=None)

    seen = np.repeat(np.arange(images), found)
    guesses, named = boxes(rng, len(seen)), rng.integers(0, CATEGORIES, len(seen))
    first = np.concatenate([[0], counts.cumsum()[:-1]])
    target = first[seen] + (rng.random(len(seen)) * counts[seen]).astype(np.int64)
    near = rng.random(len(seen)) < 0.7
    guesses[near] = true[target[near]] + rng.normal(0, 4, (int(near.sum()), 4))
    guesses[:, 2:] = np.maximum(guesses[:, 2:], guesses[:, :2] + 1)
    named[near] = labels[target[near]]
    detections = Detections(seen, guesses, rng.random(len(seen)), named)
    pictures = ArrayImages("pictures", torch.zeros(images, 3, 1, 1, dtype=torch.uint8))
    sizes = np.tile([HEIGHT, WIDTH], (images, 1))
    names = tuple(f"category {n}" for n in range(CATEGORIES))
    return DetectionSet(pictures, sizes, objects, names, "coco"), detections


def boxes(rng: np.random.Generator, count: int) -> Floats:
    corner = rng.random((count, 2)) * [WIDTH - 50, HEIGHT - 50]
    size = 8 + rng.random((count, 2)) ** 2 * ([WIDTH, HEIGHT] - corner - 8)
    return np.concatenate([corner, corner + size], axis=1)


def by_pycocotools(truth: DetectionSet, found: Detections) -> Figures:
    """Through the dictionaries that it takes, as its own documentation shows."""
    objects = truth.objects
    with redirect_stdout(StringIO()):
        expected = COCO()
        expected.dataset = {
            "images": [
                {"id": n, "height": HEIGHT, "width": WIDTH} for n in range(len(truth.sizes))
            ],
            "categories": [{"id": n + 1, "name": name} for n, name in enumerate(truth.categories)],
            "annotations": [
                {
                    "id": n + 1,
                    "image_id": int(objects.images[n]),
                    "category_id": int(objects.labels[n]) + 1,
                    "bbox": corner_and_size(objects.boxes[n]),
                    "area": float(objects.areas[n]),
                    "iscrowd": int(objects.ignored[n]),
                }
                for n in range(len(objects))
            ],
        }
        expected.createIndex()
        results = expected.loadRes(
            [
                {
                    "image_id": int(found.images[n]),
                    "category_id": int(found.labels[n]) + 1,
                    "bbox": corner_and_size(found.boxes[n]),
                    "score": float(found.scores[n]),
                }
                for n in range(len(found))
            ]
        )
        evaluation = COCOeval(expected, results, "bbox")
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    stats = zip(MEASURES, evaluation.stats, strict=False)
    return {name: 100 * float(value) for name, value in stats if value > -1}


def corner_and_size(box: Floats) -> list[float]:
    left, top, right, bottom = box.tolist()
    return [left, top, right - left, bottom - top]


def timed(judge: Callable[[], Figures], rounds: int) -> tuple[Figures, float]:
    """What is found, and the median of the seconds."""
    seconds = []
    for _ in range(rounds):
        started = time.perf_counter()
        figures = judge()
        seconds.append(time.perf_counter() - started)
    return figures, statistics.median(seconds)


if __name__ == "__main__":
    main()
