"""AP is pycocotools' to the last bit, and VOC's is that of a direct transcription."""

import io
import time
from contextlib import redirect_stdout
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from pycocotools import mask as reference
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from xmoco.data import ArrayImages
from xmoco.detect.masks import coco_rle, runs_of_bitmap
from xmoco.detect.metrics import IOUS, MEASURES, Detections, Judged, judge_coco, judge_voc
from xmoco.detect.objects import DetectionSet, Objects

HEIGHT, WIDTH = 120, 160


def boxes(rng: np.random.Generator, count: int) -> np.ndarray:
    sizes = np.exp(rng.uniform(np.log(4), np.log(110), (count, 2)))
    corners = rng.uniform(0, 1, (count, 2)) * (WIDTH, HEIGHT)
    return np.concatenate([corners, corners + sizes], axis=1)


def bitmap(box: np.ndarray) -> np.ndarray:
    """A mask that fills most of its box."""
    y, x = np.mgrid[:HEIGHT, :WIDTH]
    left, top, right, bottom = box
    return (x >= left) & (x < right) & (y >= top) & (y < bottom) & ((x + y) % 7 > 0)


def made_up(
    seed: int, images: int = 12, each: int = 4, found: int = 12, masks: bool = False
) -> tuple[DetectionSet, Detections]:
    """Objects, of which some are crowds and some images have none; and detections near and far,
    with equal scores among them, in all images but some."""
    rng = np.random.default_rng(seed)
    counts = rng.integers(0, 2 * each + 1, images)
    counts[rng.integers(images)] = 0
    where = np.repeat(np.arange(images), counts)
    true = boxes(rng, len(where))
    bitmaps = [bitmap(box) for box in true] if masks else None
    objects = Objects(
        where,
        true,
        rng.integers(0, 3, len(where)),
        rng.random(len(where)) < 0.15,
        np.array([b.sum() for b in bitmaps], float)
        if bitmaps
        else (true[:, 2:] - true[:, :2]).prod(1),
        tuple(runs_of_bitmap(b) for b in bitmaps) if bitmaps else None,
    )
    looked_at = rng.random(images) < 0.85
    looked_at[counts.argmax()] = False
    seen = np.repeat(np.arange(images), found * looked_at)
    guesses = boxes(rng, len(seen))
    labels = rng.integers(0, 3, len(seen))
    for row, image in enumerate(seen):
        near = np.flatnonzero(where == image)
        if len(near) and rng.random() < 0.7:
            target = rng.choice(near)
            guesses[row] = true[target] + rng.normal(0, rng.choice([0, 1, 4]), 4)
            guesses[row, 2:] = np.maximum(guesses[row, 2:], guesses[row, :2] + 1)
            labels[row] = objects.labels[target]
    detections = Detections(
        seen,
        guesses,
        rng.integers(1, 8, len(seen)) / 8,
        labels,
        tuple(coco_rle(runs_of_bitmap(bitmap(b)), HEIGHT, WIDTH) for b in guesses)
        if masks
        else None,
    )
    pictures = ArrayImages("pictures", torch.zeros(images, 3, 1, 1, dtype=torch.uint8))
    sizes = np.tile([HEIGHT, WIDTH], (images, 1))
    return DetectionSet(pictures, sizes, objects, ("a", "b", "c", "never"), "coco"), detections


def by_pycocotools(truth: DetectionSet, found: Detections, kind: str) -> tuple[Any, Any]:
    objects = truth.objects

    def entry(number: int, source: Any, row: int) -> dict[str, Any]:
        left, top, right, bottom = source.boxes[row].tolist()
        told = {
            "id": number,
            "image_id": int(source.images[row]),
            "category_id": int(source.labels[row]) + 1,
            "bbox": [left, top, right - left, bottom - top],
        }
        if kind == "segm":
            rle = source.masks[row]
            told["segmentation"] = rle if isinstance(rle, dict) else coco_rle(rle, HEIGHT, WIDTH)
        return told

    annotations = [
        entry(row + 1, objects, row)
        | {"iscrowd": int(objects.ignored[row]), "area": float(objects.areas[row])}
        for row in range(len(objects))
    ]
    results = [
        entry(row + 1, found, row) | {"score": float(found.scores[row])}
        for row in range(len(found))
    ]
    for result in results:
        if kind == "segm":  # results must be packed
            result["segmentation"] = reference.frPyObjects(result["segmentation"], HEIGHT, WIDTH)
            del result["bbox"]
    with redirect_stdout(io.StringIO()):
        expected = COCO()
        expected.dataset = {
            "info": {},
            "images": [{"id": n, "height": HEIGHT, "width": WIDTH} for n in range(len(truth))],
            "categories": [{"id": n + 1, "name": c} for n, c in enumerate(truth.categories)],
            "annotations": annotations,
        }
        expected.createIndex()
        evaluation = COCOeval(expected, expected.loadRes(results), kind)
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    return evaluation.stats, evaluation.eval["precision"]


def assert_equal(found: Judged, stats: Any, precision: Any) -> None:
    expected = {n: 100 * v for n, v in zip(MEASURES, stats, strict=False) if v > -1}
    assert found.values == expected  # to the last bit
    there = precision[0, 0, :, 0, -1] > -1
    for number, iou in enumerate(IOUS):
        curve = precision[number, :, there, 0, -1].mean(axis=0)
        np.testing.assert_allclose(found.precision[iou], curve, rtol=1e-12)


@pytest.mark.parametrize("seed", range(5))
def test_boxes_are_judged_as_by_pycocotools(seed: int) -> None:
    truth, found = made_up(seed)
    assert truth.objects.ignored.any()
    assert set(range(len(truth))) - set(truth.objects.images), "an image without objects"
    assert set(truth.objects.images) - set(found.images), "one in which nothing was found"
    assert len(set(found.scores)) < len(found), "equal scores"
    judged = judge_coco(truth, found, "boxes")
    assert 5 < judged.values["AP"] < 95
    assert_equal(judged, *by_pycocotools(truth, found, "bbox"))


def test_masks_are_judged_as_by_pycocotools() -> None:
    truth, found = made_up(7, images=6, masks=True)
    judged = judge_coco(truth, found, "masks")
    assert 5 < judged.values["AP"] < 95
    assert_equal(judged, *by_pycocotools(truth, found, "segm"))


def test_more_than_a_hundred_detections_do_not_count() -> None:
    truth, found = made_up(3, images=3, found=150)
    assert_equal(judge_coco(truth, found, "boxes"), *by_pycocotools(truth, found, "bbox"))


def test_nothing_found_is_nothing_right() -> None:
    truth, found = made_up(0)
    nobody = Detections(*(getattr(found, n)[:0] for n in ("images", "boxes", "scores", "labels")))
    judged = judge_coco(truth, nobody, "boxes")
    assert judged.values == dict.fromkeys(judge_coco(truth, found, "boxes").values, 0.0)
    assert not any(curve.any() for curve in judged.precision.values())
    assert judge_voc(truth, nobody).values == {"AP": 0, "AP50": 0, "AP75": 0}


def test_large_sets_are_quick() -> None:
    """5,000 images with 100 detections each have to take less than 2 seconds on a server; this is a
    tenth of them, on whatever runs the tests."""
    truth, found = made_up(0, images=500, each=7, found=100)
    started = time.perf_counter()
    judge_coco(truth, found, "boxes")
    assert time.perf_counter() - started < 1


def devkit(truth: DetectionSet, found: Detections, iou: float, eleven: bool) -> float:
    """VOC's own program, line by line: classes, then detections, best first."""
    averages = []
    for label in range(len(truth.categories)):
        rows = [r for r in range(len(truth.objects)) if truth.objects.labels[r] == label]
        positives = sum(not truth.objects.ignored[r] for r in rows)
        if positives == 0:
            continue
        taken: set[int] = set()
        order = [r for r in range(len(found)) if found.labels[r] == label]
        order.sort(key=lambda r: -found.scores[r])
        right, wrong = [], []
        for row in order:
            best, most = None, -np.inf
            for one in rows:
                if truth.objects.images[one] != found.images[row]:
                    continue
                # boxes as VOC has them: pixels from 1, the last included
                (l1, t1, r1, b1), (l2, t2, r2, b2) = found.boxes[row], truth.objects.boxes[one]
                l1, t1, l2, t2 = l1 + 1, t1 + 1, l2 + 1, t2 + 1
                wide = min(r1, r2) - max(l1, l2) + 1
                high = min(b1, b2) - max(t1, t2) + 1
                if wide > 0 and high > 0:
                    area = (r1 - l1 + 1) * (b1 - t1 + 1) + (r2 - l2 + 1) * (b2 - t2 + 1)
                    share = wide * high / (area - wide * high)
                    if share > most:
                        best, most = one, share
            hit = missed = 0
            if best is not None and most > iou:
                if not truth.objects.ignored[best]:
                    hit, missed = (0, 1) if best in taken else (1, 0)
                    taken.add(best)
            else:
                missed = 1
            right.append(hit)
            wrong.append(missed)
        hits, misses = np.cumsum(right), np.cumsum(wrong)
        recall = hits / positives
        precision = hits / np.maximum(hits + misses, np.finfo(float).eps)
        if eleven:
            best_at = [
                max(
                    (p for p, r in zip(precision, recall, strict=True) if r >= t),
                    default=0,
                )
                for t in np.arange(0.0, 1.1, 0.1)
            ]
            averages.append(sum(best_at) / 11)
        else:
            r = [0.0, *recall, 1.0]
            p = [0.0, *precision, 0.0]
            for i in range(len(p) - 2, -1, -1):
                p[i] = max(p[i], p[i + 1])
            averages.append(sum((r[i + 1] - r[i]) * p[i + 1] for i in range(len(r) - 1)))
    return 100 * float(np.mean(averages))


@pytest.mark.parametrize("eleven", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_voc_is_judged_as_by_its_own_program(seed: int, eleven: bool) -> None:
    truth, found = made_up(seed)
    judged = judge_voc(truth, found, eleven_points=eleven)
    expected = {iou: devkit(truth, found, iou, eleven) for iou in IOUS}
    assert 5 < expected[0.5] < 95
    assert judged.values == pytest.approx(
        {"AP": np.mean([*expected.values()]), "AP50": expected[0.5], "AP75": expected[0.75]}
    )
    assert judged.precision[0.5].mean() == pytest.approx(devkit(truth, found, 0.5, True) / 100)


def test_recalls_of_exactly_three_tenths_are_counted_as_by_vocs_programs() -> None:
    """Three of ten objects are found: 3 / 10 is less than the 0.1 + 0.1 + 0.1 they compare with."""
    truth, _ = made_up(0)
    box = np.array([[10.0, 10.0, 50.0, 50.0]])
    nothing = np.zeros(10, dtype=np.int64)
    objects = Objects(
        np.arange(10), box.repeat(10, 0), nothing, nothing > 0, np.full(10, 1600.0), None
    )
    truth = replace(truth, objects=objects)
    found = Detections(np.arange(3), box.repeat(3, 0), np.ones(3), nothing[:3])
    assert devkit(truth, found, 0.5, True) == pytest.approx(100 * 3 / 11)
    assert judge_voc(truth, found).values["AP50"] == pytest.approx(100 * 3 / 11)
