"""How good detections are: COCO's average precision, and PASCAL VOC's.

COCO's is computed by hotcoco, whose results are those of pycocotools to the last bit (the tests
hold one against the other) in a hundredth of the time.
"""

from collections.abc import Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from xmoco.detect.masks import coco_rle, hotcoco
from xmoco.detect.objects import DetectionSet, Flags, Floats, Integers

Kind = Literal["boxes", "masks"]
IOUS = tuple(round(0.5 + 0.05 * step, 2) for step in range(10))
MEASURES = ("AP", "AP50", "AP75", "APs", "APm", "APl")
"""Over all thresholds, at 0.5, at 0.75; and over all, of small, medium and large objects."""
TITLES = dict(
    zip(
        (measure.lower() for measure in MEASURES),
        ("AP", "AP50", "AP75", "AP small", "AP medium", "AP large"),
        strict=True,
    )
)
"""By how records call them."""
PLURALS = {"box": "boxes", "mask": "masks"}
"""What is judged, by how records call it."""
TENTHS = np.arange(0, 1.1, 0.1)
"""VOC's eleven recalls, as py-faster-rcnn and Detectron2 have them: what is less than
0.30000000000000004 falls short of the fourth, 3 of 10 objects among it."""


@dataclass(frozen=True)
class Detections:
    """What a detector found in the images of a set, one a row, in any order."""

    images: Integers
    boxes: Floats
    """(d, 4): left, top, right, bottom in pixels of the image as it was annotated."""
    scores: Floats
    labels: Integers
    masks: tuple[Mapping[str, Any], ...] | None = None
    """COCO's RLE of each, where the detector draws masks."""

    def __len__(self) -> int:
        return len(self.images)


@dataclass(frozen=True)
class Judged:
    """Measures in %, by name, those left out of which the images have no objects; and the curves
    behind them."""

    values: dict[str, float]
    recall: Floats
    precision: dict[float, Floats]
    """By IoU threshold: precision at each recall, the mean over the categories there are."""


def judge_coco(truth: DetectionSet, found: Detections, kind: Kind) -> Judged:
    """As COCO does: at most 100 detections an image; finding a crowd is neither right nor wrong."""
    library = hotcoco()
    objects = truth.objects
    masks = None
    if kind == "masks":
        assert objects.masks is not None
        masks = [
            coco_rle(runs, *map(int, truth.sizes[image]))
            for runs, image in zip(objects.masks, objects.images, strict=True)
        ]
    categories = [{"id": n + 1, "name": name} for n, name in enumerate(truth.categories)]
    images = [
        {"id": n, "height": int(high), "width": int(wide)}
        for n, (high, wide) in enumerate(truth.sizes)
    ]
    expected = library.COCO.from_arrays(
        images,
        categories,
        objects.images,
        objects.labels + 1,
        _corner_and_size(objects.boxes),
        area=objects.areas,
        iscrowd=objects.ignored.astype(np.int64),
        segmentation=masks,
    )
    if len(found) == 0:  # the library takes no empty list
        return _nothing_found(truth)
    table = np.column_stack(
        [found.images, _corner_and_size(found.boxes), found.scores, found.labels + 1]
    )
    drawn = {} if kind == "boxes" or found.masks is None else {"segmentation": [*found.masks]}
    results = expected.load_res(table, **drawn)
    evaluation = library.COCOeval(expected, results, "bbox" if kind == "boxes" else "segm")
    with redirect_stdout(StringIO()):
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    values = dict(zip(MEASURES, evaluation.stats, strict=False))
    # (threshold, recall, category, size, detections): of objects of all sizes, at most 100
    precision = np.asarray(evaluation.eval["precision"])[:, :, :, 0, -1]
    there = (precision > -1).all(axis=(0, 1))
    curves = precision[:, :, there].mean(axis=2)
    return Judged(
        {name: 100 * float(value) for name, value in values.items() if value > -1},
        np.linspace(0, 1, precision.shape[1]),
        dict(zip(IOUS, curves, strict=True)),
    )


def _corner_and_size(boxes: Floats) -> Floats:
    return np.concatenate([boxes[:, :2], boxes[:, 2:] - boxes[:, :2]], axis=1)


def _nothing_found(truth: DetectionSet) -> Judged:
    """0 for everything there is to find."""
    areas = truth.objects.areas[~truth.objects.ignored]
    there = {
        "APs": (areas < 32**2).any(),
        "APm": ((areas >= 32**2) & (areas < 96**2)).any(),
        "APl": (areas >= 96**2).any(),
    }
    recall = np.linspace(0, 1, 101)
    return Judged(
        {name: 0.0 for name in MEASURES if there.get(name, True)},
        recall,
        {iou: np.zeros_like(recall) for iou in IOUS},
    )


def judge_voc(truth: DetectionSet, found: Detections, eleven_points: bool = True) -> Judged:
    """As PASCAL VOC does, for boxes: with 11 points until 2009, by the curve's area since then.

    AP is the mean over COCO's ten thresholds, as Detectron2 and MoCo tell it of VOC; AP50 is VOC's
    own. Objects marked difficult need not be found, and finding them is not wrong.
    """
    # A box is right if its overlap is more than the threshold, where COCO takes as much, too.
    average: dict[float, list[float]] = {iou: [] for iou in IOUS}
    curves: dict[float, list[Floats]] = {iou: [] for iou in IOUS}
    for label in range(len(truth.categories)):
        ours = truth.objects.labels == label
        wanted = int((ours & ~truth.objects.ignored).sum())
        if wanted == 0:
            continue
        overlap, match = _best_matches(truth, found, label)
        for iou in IOUS:
            right, wrong = _right_and_wrong(overlap > iou, match, truth.objects.ignored)
            hits = right.cumsum()
            recall = hits / wanted
            precision = hits / np.maximum(hits + wrong.cumsum(), 1)
            best = np.array([precision[recall >= tenth].max(initial=0) for tenth in TENTHS])
            average[iou].append(best.mean() if eleven_points else _area(recall, precision))
            curves[iou].append(best)
    mean = {iou: 100 * float(np.mean(values)) for iou, values in average.items()}
    return Judged(
        {"AP": float(np.mean([*mean.values()])), "AP50": mean[0.5], "AP75": mean[0.75]},
        TENTHS,
        {iou: np.mean(values, axis=0) for iou, values in curves.items()},
    )


def _best_matches(truth: DetectionSet, found: Detections, label: int) -> tuple[Floats, Integers]:
    """Of every detection of a category, best first: its largest overlap with an object, and which
    that is."""
    rows = np.flatnonzero(found.labels == label)
    rows = rows[np.argsort(-found.scores[rows], kind="stable")]
    overlap, match = np.zeros(len(rows)), np.full(len(rows), -1)
    objects = np.flatnonzero(truth.objects.labels == label)
    for image in np.intersect1d(found.images[rows], truth.objects.images[objects]):
        here = np.flatnonzero(found.images[rows] == image)
        there = objects[truth.objects.images[objects] == image]
        shares = _overlaps(found.boxes[rows[here]], truth.objects.boxes[there])
        overlap[here], match[here] = shares.max(axis=1), there[shares.argmax(axis=1)]
    return overlap, match


def _overlaps(some: Floats, others: Floats) -> Floats:
    """Intersection over union of each with each."""
    low = np.maximum(some[:, None, :2], others[None, :, :2])
    high = np.minimum(some[:, None, 2:], others[None, :, 2:])
    shared = (high - low).clip(min=0).prod(axis=2)
    areas = [(boxes[:, 2:] - boxes[:, :2]).prod(axis=1) for boxes in (some, others)]
    whole: Floats = shared / (areas[0][:, None] + areas[1][None, :] - shared)
    return whole


def _right_and_wrong(
    enough: Flags, match: Integers, difficult: Flags
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Each object is found once; a second time is wrong. What is difficult does not count."""
    first = np.zeros(len(match), dtype=bool)
    _, places = np.unique(np.where(enough, match, -1), return_index=True)
    first[places] = True
    passed_over = enough & difficult[match]
    right = enough & first & ~passed_over
    return right.astype(np.int64), (~right & ~passed_over).astype(np.int64)


def _area(recall: Floats, precision: Floats) -> float:
    """Under the curve of the best precision at any recall of at least this one."""
    ends = np.concatenate([[0], recall, [1]])
    best = np.maximum.accumulate(np.concatenate([precision, [0]])[::-1])[::-1]
    return float((np.diff(ends) * best).sum())
