"""Records of detectors become tables: a row for each backbone, mean and deviation over seeds."""

import importlib
from pathlib import Path
from typing import Any

from xmoco.records import Record, append_records


def record(measure: str, value: float, subject: str, seed: int, **protocol: Any) -> Record:
    told: dict[str, Any] = {
        "data": "folder street (train)", "backbone": "resnet50", "digest": subject, "epoch": 0,
        "size": 400, "judged_images": 50, "model": "mask-rcnn-fpn", "schedule": "500-steps",
        "metric": "COCO", "batch": 16, "steps": 500, "categories": 1, "train_images": 120,
    }  # fmt: skip
    return Record(
        measure, value, "%", subject, "street-resnet50", told | protocol, seed,
        commit="0123456789ab", versions={"torch": "2.11.0"},
        machine={"processor": "Abacus", "threads": 2}, time="2026-01-02T03:04:05Z",
    )  # fmt: skip


def test_tables_of_detectors(benchmarks: None, tmp_path: Path) -> None:
    program = importlib.import_module("detection_tables")
    place = importlib.import_module("told").Place(tmp_path)
    assert program.detection_tables(place) == ""
    records = [
        record("box_ap", 30.0, "scratch", 0),
        record("box_ap", 99.0, "xmoco", 0, epoch=200),
        record("box_ap", 40.0, "xmoco", 0, epoch=200),  # measured again
        record("box_ap", 44.0, "xmoco", 1, epoch=200),
        record("mask_ap50", 50.0, "xmoco", 0, epoch=200),
        record("box_aps", 10.0, "xmoco", 0, epoch=200),  # has no column
        record("box_ap", 20.0, "xmoco", 0, model="faster-rcnn-c4"),
    ]
    append_records(tmp_path / "detect.jsonl", records)
    text = program.detection_tables(place)
    assert [line for line in text.splitlines() if line.startswith(("|", "**"))] == [
        "**Mask R-CNN FPN, street-resnet50, 500-steps**",
        "| backbone | AP, boxes | AP50, masks |",
        "| --- | ---: | ---: |",
        "| scratch | 30.0 | – |",
        "| XMoCo, 200 epochs | 42.0 ± 2.8 | 50.0 |",
        "**Faster R-CNN C4, street-resnet50, 500-steps**",
        "| backbone | AP, boxes |",
        "| --- | ---: |",
        "| XMoCo | 20.0 |",
    ]
    for fact in ("Seeds 0, 1;", "120 training images", "50 judged", "metric COCO", "Abacus"):
        assert fact in text, fact
