"""Detectors learn, are judged, are found again, and go on after a kill to the same weights."""

import importlib
import json
import math
import multiprocessing
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from scenes import CATEGORIES, write_scenes
from small_detectors import small_detectors
from torch.testing import assert_close

import xmoco
from helpers import assert_done, assert_refused, metrics, run_cli, wait_until
from xmoco.detect import prediction
from xmoco.detect.detector_files import FILE, read_detector
from xmoco.detect.evaluation import summary
from xmoco.detect.models import DESIGNS
from xmoco.detect.prediction import Sight, looked_at
from xmoco.detect.sources import open_detection
from xmoco.nn.backbone_files import BackboneCard, save_backbone
from xmoco.nn.backbones import build_backbone
from xmoco.records import DetectionProtocol, Measured, read_records
from xmoco.train import loop

QUICK = ("--schedule", "4-steps", "--batch", "2", "--size", "64", "--device", "cpu")
PROCESSES = multiprocessing.get_context("forkserver")


@pytest.fixture(autouse=True)
def _small() -> Iterator[None]:
    with small_detectors():
        yield


@pytest.fixture
def scenes(tmp_path: Path) -> Path:
    return write_scenes(tmp_path / "scenes")


@pytest.mark.parametrize("model", DESIGNS)
def test_every_model_learns_two_pictures_by_heart(model: str, tmp_path: Path) -> None:
    data = write_scenes(tmp_path / "scenes", train=2, val=0)
    steps = 100 if DESIGNS[model].two_stages else 200
    records = xmoco.evaluate_detect(
        "scratch:tiny",
        data,
        model=model,
        schedule=f"{steps}-steps",
        batch=2,
        out=tmp_path / "run",
        options=xmoco.EvalOptions("cpu", size=64, readers=1),
    )
    reached = {record.measure: record.value for record in records}
    kinds = ("box", "mask") if DESIGNS[model].masks else ("box",)
    assert {measure.partition("_")[0] for measure in reached} == set(kinds)
    for kind in kinds:
        assert reached[f"{kind}_ap50"] > 90, reached
    curve = [line["values"] for line in metrics(tmp_path / "run") if "values" in line]
    assert max(values.get("box_ap50", 0) for values in curve) > 50, "AP is followed on the way"
    losses = [values["loss"] for values in curve if "loss" in values]
    assert losses[-1] < losses[0] / 2

    detector: Any = xmoco.load_detector(tmp_path / "run")
    assert detector.categories == CATEGORIES
    (found,) = detector([torch.rand(3, 70, 50)])
    assert {"boxes", "labels", "scores"} <= found.keys()
    assert ("masks" in found) == DESIGNS[model].masks


def test_the_command_of_several_seeds(scenes: Path, tmp_path: Path) -> None:
    file = tmp_path / "records.jsonl"
    command = ("evaluate", "detect", "scratch:tiny", scenes, "--model", "mask-rcnn-fpn", *QUICK)
    command += ("--seed", "3", "--seeds", "2", "--out", tmp_path / "runs", "--records", file)
    outcome = run_cli(*command)
    assert_done(outcome)
    assert "Mask R-CNN FPN, 4-steps, on folder scenes (train)" in outcome.stdout
    assert "mean ± deviation of 2 seeds" in outcome.stdout
    assert "2 images of folder scenes (val), shorter side 64 px" in outcome.stdout
    assert "; weights: random, nothing was loaded" in outcome.stdout
    records = read_records(file, Measured[DetectionProtocol])
    assert {record.seed for record in records} == {3, 4}
    assert {"box_ap", "box_ap50", "box_ap75", "mask_ap"} <= {r.measure for r in records}
    assert {r.subject for r in records} == {"scratch"}
    assert {r.work for r in records} == {"scenes-tiny"}
    protocol = records[0].protocol
    assert (protocol.model, protocol.schedule, protocol.metric) == (
        *("mask-rcnn-fpn", "4-steps", "COCO"),
    )
    seconds = read_records(file, Measured[dict[str, Any]])[0].protocol
    assert min(seconds["training_seconds"], seconds["judging_seconds"]) > 0
    states = [load_file(tmp_path / "runs" / f"seed-{seed}" / FILE) for seed in (3, 4)]
    assert not torch.equal(*(state["backbone.body.conv1.weight"] for state in states))

    again = run_cli(*command)
    assert_done(again)
    assert again.stderr.count("holds the finished detector") == 2
    rerun = read_records(file, Measured[DetectionProtocol])[len(records) :]
    assert [r.value for r in rerun] == [r.value for r in records]
    for seed in (3, 4):
        kept = [line for line in metrics(tmp_path / "runs" / f"seed-{seed}") if "measure" in line]
        assert len(kept) == len({line["measure"] for line in kept}), "each record stands once"


def test_what_was_trained_in_bfloat16_is_judged_in_float32(
    scenes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bfloat16, boxes beyond 256 px are off by pixels."""
    judged: list[Sight] = []

    def watched(*given: Any, **named: Any) -> Iterator[Sight]:
        for sight in looked_at(*given, **named):
            judged.append(sight)
            yield sight

    monkeypatch.setattr(prediction, "looked_at", watched)
    xmoco.evaluate_detect(
        "scratch:tiny",
        scenes,
        model="mask-rcnn-fpn",
        schedule="4-steps",
        batch=2,
        out=tmp_path / "run",
        options=xmoco.EvalOptions("cpu", "bf16", size=64, readers=1),
    )
    _, test = open_detection(scenes)
    last = judged[-len(test) :]
    expected = looked_at(read_detector(tmp_path / "run")[0], test.images, torch.device("cpu"))
    for sight, other in zip(last, expected, strict=True):
        assert len(other.output["boxes"])
        for name, values in other.output.items():
            assert_close(sight.output[name], values, rtol=1e-5, atol=1e-4)  # of one dtype, too
            assert values.dtype == (torch.int64 if name == "labels" else torch.float32)


def test_nobody_looks_on_the_way_unless_asked(scenes: Path, tmp_path: Path) -> None:
    """Two steps are an epoch; the weights are the same either way."""
    states = []
    for looks, seen in ((2, [2]), (0, [])):
        out = tmp_path / f"looks-{looks}"
        command = ("evaluate", "detect", "scratch:tiny", scenes, "--model", "retinanet-fpn", *QUICK)
        assert_done(run_cli(*command, "--out", out, "--looks", looks))
        lines = [line for line in metrics(out) if "box_ap" in line.get("values", {})]
        assert [line["step"] for line in lines] == seen
        states.append(load_file(out / FILE))
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())


@pytest.mark.gpu
@pytest.mark.parametrize("model", DESIGNS)
def test_on_a_gpu(model: str, scenes: Path, tmp_path: Path) -> None:
    """In bfloat16, with fused norms; what is kept is judged alike by the CPU."""
    command = ("evaluate", "detect", "scratch:tiny", scenes, "--model", model, *QUICK[:-2])
    outcome = run_cli(
        *command, "--device", "cuda", "--precision", "bf16", "--out", tmp_path / "run"
    )
    assert_done(outcome)
    lines = [line["values"] for line in metrics(tmp_path / "run") if "values" in line]
    losses = [values["loss"] for values in lines if "loss" in values]
    assert losses
    assert all(map(math.isfinite, losses))
    assert xmoco.load_detector(tmp_path / "run")([torch.rand(3, 70, 50)])


def test_the_mean_and_deviation_of_seeds(scenes: Path) -> None:
    def record(seed: int, value: float) -> Any:
        protocol = {"metric": "COCO"}
        return xmoco.records.Record("box_ap50", value, "%", "s", "w", protocol, seed)

    assert summary([record(0, 50.0)]) == [("box, COCO", "AP50", 50.0, None)]
    assert summary([record(0, 50.0), record(1, 54.0)]) == [
        ("box, COCO", "AP50", 52.0, pytest.approx(8**0.5))
    ]


def train_somewhere(scenes: Path, out: Path, pause: float) -> None:
    """With a checkpoint after every step, and slowly enough to be killed between two."""
    with small_detectors(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop.SaveClock, "due", lambda *_: True)
        advance = loop.Training.advance

        def slowly(self: loop.Training, *arguments: Any, **named: Any) -> Any:
            time.sleep(pause)
            return advance(self, *arguments, **named)

        patch.setattr(loop.Training, "advance", slowly)
        xmoco.evaluate_detect(
            "scratch:tiny",
            scenes,
            model="mask-rcnn-c4",
            schedule="6-steps",
            batch=2,
            out=out,
            options=xmoco.EvalOptions("cpu", size=64, readers=1),
        )


def test_killed_at_a_random_moment_it_ends_with_the_same_weights(
    scenes: Path, tmp_path: Path
) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    train_somewhere(scenes, whole, 0)
    process = PROCESSES.Process(target=train_somewhere, args=(scenes, killed, 0.2))
    process.start()
    wait_until(lambda: len(list(killed.rglob("step-*.ckpt"))) >= 2 or not process.is_alive())
    time.sleep(random.Random().uniform(0, 0.3))
    process.kill()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    assert not (killed / FILE).exists()
    train_somewhere(scenes, killed, 0)
    ours, theirs = (load_file(run / FILE) for run in (whole, killed))
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert torch.equal(value, theirs[name]), name
    steps = [line["step"] for line in metrics(killed) if "values" in line]
    assert steps == sorted(set(steps), key=steps.index), "no step is told of twice"


MISTAKES = {
    "unknown model": (("--model", "faster-rcnn"), "unknown model 'faster-rcnn' (did you mean"),
    "in capitals": (("--model", "Mask-RCNN-FPN"), "(did you mean mask-rcnn-fpn?)"),
    "unknown schedule": (("--schedule", "4x"), "unknown schedule '4x'"),
    "no steps": (("--schedule", "0-steps"), "unknown schedule '0-steps'"),
    "one image": (("--batch", "1"), "batch norm needs at least two images"),
    "no image": (("--batch", "0"), "batch=0 is too small"),
    "size": (("--size", "20"), "size=20 is not a whole number from 32 to 1024"),
    "looks": (("--looks", "-1"), "looks=-1 is too few: give how often, or 0 for never"),
    "seeds": (("--seeds", "0"), "give at least one seed"),
    "seed": (("--seed", "-1"), "seed=-1"),
}


@pytest.mark.parametrize(("changes", "sentence"), MISTAKES.values(), ids=MISTAKES.keys())
def test_mistakes_in_the_command(
    changes: tuple[str, ...], sentence: str, scenes: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    outcome = run_cli(
        *("evaluate", "detect", "scratch:tiny", scenes, "--model", "faster-rcnn-fpn"),
        *(*QUICK, "--out", out, *changes),
    )
    assert_refused(outcome, sentence)
    assert not out.exists()


def test_what_a_backbone_started_from_is_told_of_its_detectors(
    scenes: Path, tmp_path: Path
) -> None:
    grey = (0.5, 0.5, 0.5)
    card = BackboneCard("tiny", "imagenet", 32, grey, grey, "xmoco", 1, 0, started_from="cats")
    save_backbone(build_backbone("tiny"), card, tmp_path / "backbone.safetensors")
    out = tmp_path / "run"
    outcome = run_cli(
        *("evaluate", "detect", tmp_path / "backbone.safetensors", scenes, *QUICK, "--out", out),
        *("--model", "retinanet-fpn"),
    )
    assert_done(outcome)
    assert read_detector(out)[1].started_from == "cats"


def test_weights_without_five_stages(scenes: Path, tmp_path: Path) -> None:
    name = "timm:vit_tiny_patch16_224"
    card = BackboneCard(name, "imagenet", 32, (0.5,) * 3, (0.2,) * 3, "xmoco", 1, 0)
    file = tmp_path / "vit.safetensors"
    save_backbone(build_backbone(name, size=32), card, file)
    outcome = run_cli("evaluate", "detect", file, scenes, *QUICK, "--out", tmp_path / "run")
    assert_refused(outcome, "needs a backbone of five stages", "VisionTransformer has no such")
    assert not (tmp_path / "run").exists()
    outcome = run_cli("evaluate", "detect", "scratch:resnet5", scenes, *QUICK)
    assert_refused(outcome, "scratch:resnet5 is no backbone", "did you mean resnet50?")


@pytest.mark.parametrize("split", ["train", "val"])
def test_masks_that_are_not_there(split: str, scenes: Path, tmp_path: Path) -> None:
    file = scenes / f"instances_{split}.json"
    content = json.loads(file.read_text())
    del content["annotations"][0]["segmentation"]
    file.write_text(json.dumps(content))
    command = ("evaluate", "detect", "scratch:tiny", scenes, *QUICK, "--out", tmp_path / "run")
    outcome = run_cli(*command, "--model", "mask-rcnn-c4")
    assert_refused(outcome, f"not every object of folder scenes ({split}) has one")


def test_boxes_left_out_are_told_of(scenes: Path, tmp_path: Path) -> None:
    file = scenes / "instances_train.json"
    content = json.loads(file.read_text())
    content["annotations"].append(
        {"id": 99, "image_id": 0, "category_id": 1, "bbox": [70, 0, 5, 5]}
    )
    file.write_text(json.dumps(content))
    command = ("evaluate", "detect", "scratch:tiny", scenes, *QUICK, "--out", tmp_path / "run")
    outcome = run_cli(*command, "--model", "retinanet-fpn")
    assert_done(outcome)
    assert "1 box of folder scenes (train) with no area inside the image left out" in outcome.stderr
    assert "annotation 99 of" in outcome.stderr


def test_an_image_of_another_shape_than_annotated(scenes: Path, tmp_path: Path) -> None:
    file = scenes / "instances_train.json"
    content = json.loads(file.read_text())
    for entry in content["images"]:
        entry["width"] = 80
    for entry in content["annotations"]:
        del entry["segmentation"]
    file.write_text(json.dumps(content))
    outcome = run_cli(
        *("evaluate", "detect", "scratch:tiny", scenes, *QUICK, "--out", tmp_path / "run")
    )
    assert_refused(outcome, "is of 64 × 64 pixels, but its annotations are for 80 × 64")


def test_other_settings_in_the_same_folder(scenes: Path, tmp_path: Path) -> None:
    command = ("evaluate", "detect", "scratch:tiny", scenes, "--out", tmp_path / "run", *QUICK)
    assert_done(run_cli(*command, "--model", "retinanet-fpn"))
    outcome = run_cli(*command, "--model", "retinanet-fpn", "--seed", "1")
    assert_refused(outcome, "was begun with other settings: seed was 0 and is 1 now")


def test_without_the_library(scenes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.import_module

    def without(name: str, *given: Any) -> Any:
        if name.startswith("hotcoco"):
            raise ModuleNotFoundError(name)
        return real(name, *given)

    monkeypatch.setattr("importlib.import_module", without)
    outcome = run_cli("evaluate", "detect", "scratch:tiny", scenes, *QUICK)
    assert_refused(outcome, "detection needs hotcoco: pip install 'xmoco[detect]'")
