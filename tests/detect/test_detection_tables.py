"""Records of detectors become tables: a row for each backbone, mean and deviation over seeds."""

import importlib
import re
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from PIL import Image

from helpers import assert_done, assert_refused, run_cli
from xmoco.detect.models import DESIGNS
from xmoco.detect.tables import draw_detection
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
    program = importlib.import_module("pages.detection")
    place = importlib.import_module("pages.common").Place(tmp_path)
    assert program.detection_tables(place).startswith("## Results\n\nAverage precision on COCO")
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
        "| backbone | box AP | mask AP50 | box AP above scratch |",
        "| --- | ---: | ---: | ---: |",
        "| scratch | 30.0 | – |  |",
        "| XMoCo, 200 epochs | 42.0 ± 2.8 | 50.0 | +12.0 |",
        "**Faster R-CNN C4, street-resnet50, 500-steps**",
        "| backbone | box AP |",
        "| --- | ---: |",
        "| XMoCo | 20.0 |",
    ]
    for fact in ("Seeds 0, 1;", "120 training images", "50 evaluated", "metric COCO", "Abacus"):
        assert fact in text, fact


def test_detectors_that_overfit_are_columns_of_one_table(benchmarks: None, tmp_path: Path) -> None:
    program = importlib.import_module("pages.detection")
    place = importlib.import_module("pages.common").Place(tmp_path)
    assert program.overfit_tables(place) == ""
    records = [
        record("box_ap50", 90.0, "scratch", 0, model="faster-rcnn-c4"),
        record("box_ap50", 91.0, "scratch", 0),
        record("mask_ap50", 80.0, "scratch", 0),
        record("box_apm", 10.0, "scratch", 0),  # has no column
        record("box_ap50", 92.0, "scratch", 0, model="retinanet-fpn"),
    ]
    append_records(tmp_path / "detect-overfit.jsonl", records)
    text = program.overfit_tables(place)
    assert text.startswith("## Sanity check: overfitting a few images\n\nEvery detector is trained")
    assert [line for line in text.splitlines() if line.startswith(("|", "**"))] == [
        "**120 images, 500-steps**",
        "|  | Faster R-CNN C4 | RetinaNet FPN | Mask R-CNN FPN |",
        "| --- | ---: | ---: | ---: |",
        "| box AP50 | 90.0 | 92.0 | 91.0 |",
        "| mask AP50 | – | – | 80.0 |",
    ]


def test_the_table_of_judging_tells_who_judged_on_the_host(
    benchmarks: None, tmp_path: Path
) -> None:
    program = importlib.import_module("pages.detection")
    place = importlib.import_module("pages.common").Place(tmp_path)
    assert program.judging_tables(place) == ""
    machine = {"processor": "Abacus", "threads": 2, "gpus": ["Loom"]}
    made = {"images": 5000, "objects": 35077, "detections": 500000, "categories": 80}
    append_records(
        tmp_path / "detect-metrics.jsonl",
        [
            Record("judge_seconds", seconds, "s", subject, "", {**made, **more}, 0, machine=machine)
            for subject, seconds, more in (
                ("xmoco", 99.0, {"rounds": 5}),
                ("xmoco", 0.16268, {"rounds": 5}),  # measured again
                ("pycocotools", 41.3176, {"rounds": 1}),
                ("xmoco", 0.02, {"rounds": 3, "images": 500}),
            )
        ],
    )
    text = program.judging_tables(place)
    assert [line for line in text.splitlines() if line.startswith(("|", "**"))] == [
        "**5,000 images, 35,077 objects, 500,000 detections, 80 categories**",
        "| evaluated by | median time | rounds |",
        "| --- | ---: | ---: |",
        "| xmoco, by hotcoco | 0.163 s | 5 |",
        "| pycocotools | 41.3 s | 1 |",
        "**500 images, 35,077 objects, 500,000 detections, 80 categories**",
        "| evaluated by | median time | rounds |",
        "| --- | ---: | ---: |",
        "| xmoco, by hotcoco | 0.0200 s | 3 |",
    ]
    assert "Abacus, 2 threads" in text
    assert "Loom" not in text, "no GPU took part"


def test_records_beneath_the_papers_rows(tmp_path: Path) -> None:
    file = tmp_path / "detect.jsonl"
    append_records(
        file,
        [
            record("box_ap", 99.0, "xmoco", 0, epoch=200),
            record("box_ap", 40.0, "xmoco", 0, epoch=200),  # measured again
            record("box_ap", 44.0, "xmoco", 1, epoch=200),
            record("box_ap", 41.0, "xmoco", 0, epoch=200, digest="another"),
            record("box_ap", 50.0, "supervised", 0),
            record("box_aps", 10.0, "xmoco", 0, epoch=200),  # has no column
        ],
    )
    outcome = run_cli("tables", "detection", file, "--out", tmp_path / "tables")
    assert_done(outcome)
    name = "detection-mask-rcnn-fpn"
    assert {path.name for path in (tmp_path / "tables").iterdir()} == {f"{name}.md", f"{name}.png"}
    text = (tmp_path / "tables" / f"{name}.md").read_text(encoding="utf-8")
    assert "| *Paper: COCO, 3x, ResNet-50* |" in text
    assert "| XMoCo | 42.0 | 62.8 | 46.0 | 38.0 | 59.9 | 41.0 |" in text
    measured = text.partition("*Measured: ")[2].splitlines()
    assert measured[0].startswith(
        "folder street (train), 500-steps, shorter side 400 px, metric COCO, ResNet-50*"
    )
    assert [line.split(" | ")[:2] for line in measured[1:4]] == [
        ["| XMoCo, ResNet-50, 200 epochs (xmoco)", "**42.0 ± 2.8**"],
        ["| XMoCo, ResNet-50, 200 epochs (anothe)", "<u>41.0</u>"],
        ["| Supervised, ResNet-50", "50.0"],
    ]


def test_the_picture_is_as_wide_as_its_headings(tmp_path: Path) -> None:
    long = "folder of streets, squares and other places in the open air (train)"
    told = record("box_ap", 40.0, "xmoco", 0, model="faster-rcnn-fpn", data=long)
    append_records(tmp_path / "x.jsonl", [told])
    _, path = draw_detection([tmp_path / "x.jsonl"], tmp_path)
    picture = np.asarray(Image.open(path).convert("L"))
    assert picture[:, -picture.shape[1] // 40 :].min() > 200, "the longest line ends before it does"


def test_no_records_of_detectors(tmp_path: Path) -> None:
    append_records(tmp_path / "x.jsonl", [record("box_aps", 10.0, "xmoco", 0)])
    outcome = run_cli("tables", "detection", tmp_path / "x.jsonl", "--out", tmp_path / "out")
    assert_refused(outcome, "no records of detection in", "xmoco evaluate detect")
    assert not (tmp_path / "out").exists()


def test_the_papers_figures_are_whole() -> None:
    text = (resources.files("xmoco") / "report" / "paper_detection.yaml").read_text("utf-8")
    for block in yaml.safe_load(text):
        wanted = 6 if DESIGNS[block["model"]].masks else 3
        for values in block["rows"].values():
            assert len(values) == wanted
            for ap, ap50, ap75 in zip(values[::3], values[1::3], values[2::3], strict=True):
                assert ap < ap50
                assert ap75 < ap50


def test_the_papers_figures_are_its_own() -> None:
    source = Path(__file__).parents[3] / "shared" / "paper" / "xmoco.tex"
    if not source.is_file():
        pytest.skip("the paper is not here")
    plain = re.sub(r"\\textbf|[{}~$ ]|\\quad", "", source.read_text(encoding="utf-8"))
    text = (resources.files("xmoco") / "report" / "paper_detection.yaml").read_text("utf-8")
    for block in yaml.safe_load(text):
        for method, values in block["rows"].items():
            for first in range(0, len(values), 3):
                assert "&".join(map(str, values[first : first + 3])) in plain, (method, values)
