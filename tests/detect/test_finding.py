"""Pictures in, boxes out; and the page that shows what a detector does."""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from scenes import write_scenes
from small_detectors import small_detectors
from torch import Tensor, nn

import xmoco
from helpers import assert_done, assert_refused, run_cli
from xmoco.detect import finding
from xmoco.detect.detector_files import DetectorCard, save_detector
from xmoco.detect.drawing import drawn, enlarged, framed
from xmoco.detect.evaluation import verdicts
from xmoco.detect.masks import bitmap_of_runs
from xmoco.detect.metrics import judge_coco, judge_voc
from xmoco.detect.report import picture_detections, write_detection_report
from xmoco.detect.sources import open_detection
from xmoco.nn.weights import load_weights, read_card
from xmoco.report import page

CARD = DetectorCard(
    model="mask-rcnn-fpn", backbone="tiny", stem="imagenet", categories=("block", "disc"), size=64,
    mean=(0.5, 0.5, 0.5), std=(0.2, 0.2, 0.2), method="xmoco", schedule="1x", data="scenes", seed=0,
)  # fmt: skip


class RedAndBlue(nn.Module):
    """Finds what is red or blue: one of each at most, with its mask."""

    def forward(self, images: list[Tensor]) -> list[dict[str, Tensor]]:
        return [self.look(image) for image in images]

    @staticmethod
    def look(image: Tensor) -> dict[str, Tensor]:
        red, green, blue = image
        seems_blue = (blue > red + 0.3) & (blue > green + 0.3)
        seems_red = (red > blue + 0.3) & (red > green + 0.3)
        masks = [seems_blue, seems_red]
        boxes, labels, kept = [], [], []
        for label, mask in enumerate(masks, start=1):
            if mask.any():
                y, x = mask.nonzero().unbind(1)
                boxes.append([x.min(), y.min(), x.max() + 1, y.max() + 1])
                labels.append(label)
                kept.append(mask[None].float())
        boxes.append([0, 0, 5, 5])  # and something nobody would believe in
        labels.append(1)
        kept.append(torch.zeros_like(masks[0])[None].float())
        return {
            "boxes": torch.tensor(boxes, dtype=torch.float32),
            "labels": torch.tensor(labels),
            "scores": torch.tensor([0.9] * (len(boxes) - 1) + [0.1]),
            "masks": torch.stack(kept),
        }


@pytest.fixture
def sharp_eye(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finding, "read_detector", lambda _weights: (RedAndBlue(), CARD))


@pytest.fixture
def picture(tmp_path: Path) -> Path:
    """A red rectangle in a grey picture."""
    pixels = np.full((40, 60, 3), 128, dtype=np.uint8)
    pixels[10:30, 20:50] = (250, 20, 20)
    (tmp_path / "in" / "deep").mkdir(parents=True)
    Image.fromarray(pixels).save(tmp_path / "in" / "deep" / "red.png")
    return tmp_path / "in" / "deep" / "red.png"


@pytest.mark.usefixtures("sharp_eye")
def test_a_picture_in_boxes_out(picture: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    outcome = run_cli("detect", "runs/any", picture, "--out", out, "--device", "cpu")
    assert_done(outcome)
    assert f"1 object in 1 image: {out / 'detections.json'}" in outcome.stdout
    (found,) = json.loads((out / "detections.json").read_text())
    assert (found["image"], found["width"], found["height"]) == ("red.png", 60, 40)
    (thing,) = found["objects"]
    assert (thing["category"], thing["box"]) == ("disc", [20, 10, 50, 30])
    assert thing["score"] == pytest.approx(0.9)
    mask = bitmap_of_runs(np.array(thing["mask"]["counts"]), *thing["mask"]["size"])
    assert np.argwhere(mask).min(0).tolist() == [10, 20]
    assert mask.sum() == 20 * 30
    before, after = (np.asarray(Image.open(path)) for path in (picture, out / "red.png"))
    assert before.shape == after.shape
    assert (before != after).any()
    assert (before[35:] == after[35:]).all(), "nothing is drawn elsewhere"


@pytest.mark.usefixtures("sharp_eye")
def test_folders_and_what_cannot_be_read(picture: Path, tmp_path: Path) -> None:
    for number in range(120):
        Image.new("RGB", (8, 8), "blue").save(tmp_path / "in" / f"{number}.png")
    broken = ("0.png", "1.png", "77.png")  # far more than one in a hundred
    for name in broken:
        (tmp_path / "in" / name).write_bytes(b"no picture")
    Image.new("RGB", (8, 8), "red").save(tmp_path / "in" / "5.jpg")
    out = tmp_path / "out"
    outcome = run_cli(
        *("detect", "runs/any", tmp_path / "in", "--out", out, "--threshold", "0.05"),
        *("--device", "cpu"),
    )
    assert_done(outcome)
    for name in broken:
        assert f"{name} cannot be read" in outcome.stderr
        assert not (tmp_path / "out" / name).exists()
    assert outcome.stderr.count("it was left out.") == 3
    told = json.loads((out / "detections.json").read_text())
    content = {entry["image"]: entry["objects"] for entry in told}
    assert len(content) == 119
    assert not set(broken) & set(content)
    assert [thing["category"] for thing in content["3.png"]] == ["block", "block"]
    assert (out / "deep" / "red.png").is_file()
    assert {path.name for path in out.glob("5.*")} == {"5.png.png", "5.jpg.png"}


@pytest.mark.usefixtures("sharp_eye")
def test_mistakes_of_finding(picture: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "no.jpg").write_bytes(b"no picture")
    for arguments, words in (
        ((picture, "--out", tmp_path / "empty"), "already exists"),
        ((picture, "--threshold", "1.5"), "threshold=1.5 is not from 0 to 1"),
        ((tmp_path / "empty", "--out", tmp_path / "out"), "there are no images in"),
        ((tmp_path / "no.jpg", "--out", tmp_path / "out"), "the only image cannot be read"),
        ((tmp_path / "gone.jpg", "--out", tmp_path / "out"), "there is no folder or archive"),
    ):
        assert_refused(run_cli("detect", "runs/any", *arguments), words)
    assert not (tmp_path / "out").exists()


def test_weights_of_a_backbone_find_nothing(picture: Path, tmp_path: Path) -> None:
    outcome = run_cli("detect", tmp_path, picture, "--out", tmp_path / "out")
    assert_refused(outcome, "no detector at", "xmoco evaluate detect")


def test_the_backbone_of_a_detector_serves_again(tmp_path: Path) -> None:
    mean, std = (0.4, 0.5, 0.6), (0.1, 0.2, 0.3)
    card = DetectorCard(
        *("retinanet-fpn", "tiny", "imagenet", ("cat",), 64, mean, std, "xmoco"),
        *("1x", "street", 0),
        started_from="torchvision:resnet50",
    )
    detector = card.built()
    save_detector(detector, card, tmp_path / "detector.safetensors")
    (tmp_path / "config.yaml").touch()  # a run folder's
    state, body = xmoco.load_backbone(tmp_path).state_dict(), "backbone.body."
    known = detector.state_dict()
    assert state.keys() == {k.removeprefix(body) for k in known if k.startswith(body)}
    assert all(torch.equal(value, known[f"{body}{name}"]) for name, value in state.items())
    own, _ = read_card(tmp_path)
    assert (own.mean, own.std) == (mean, std), "what it was shown, not a guess"
    assert own.method == "xmoco, retinanet-fpn on street"
    assert own.started_from == "torchvision:resnet50"
    assert not any("guess" in note for note in load_weights(tmp_path).report.notes)


@pytest.mark.parametrize("wrong", [{"mean": "grey"}, {"started_from": ["a"]}, {"method": None}])
def test_a_detectors_header_that_cannot_be(wrong: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "detector.safetensors"
    save_detector(CARD.built(), replace(CARD, **wrong), file)
    with pytest.raises(xmoco.UserError, match=rf"has an invalid header: {next(iter(wrong))}.*\.$"):
        xmoco.load_backbone(file)


def test_what_is_drawn() -> None:
    grey = torch.full((3, 80, 100), 128, dtype=torch.uint8)
    box, label, score = torch.tensor([[30.0, 20, 70, 60]]), torch.tensor([1]), torch.tensor([0.8])
    mask = torch.zeros(1, 80, 100, dtype=torch.bool)
    mask[:, 30:50, 40:60] = True
    found = drawn(grey, box, label, score, ("cat",), mask)
    changed = (found != grey).any(0)
    assert changed[20, 30:70].all(), "the frame"
    assert changed[30:50, 40:60].all(), "the mask"
    assert changed[10:18, 32:60].any(), "the name, above"
    assert not changed[:6].any()
    assert not changed[:, 75:].any()
    assert not changed[22:28, 34:66].any(), "nothing covers the object"
    twice = drawn(grey, box.repeat(2, 1), label.repeat(2), torch.tensor([0.8, 0.7]), ("cat",))
    assert (twice != grey).any(0)[62:70, 32:60].any(), "a second name stands elsewhere"
    nothing = drawn(grey, box[:0], label[:0], score[:0], ("cat",))
    assert torch.equal(nothing, grey)
    large, boxes = enlarged(grey, box, 200)
    assert large.shape == (3, 240, 300)
    assert boxes.tolist() == [[90, 60, 210, 180]]


def test_sets_are_judged_by_their_own_rules(tmp_path: Path) -> None:

    from xmoco.detect.prediction import predicted

    _, data = open_detection(write_scenes(tmp_path / "scenes"))
    found = predicted(RedAndBlue(), data, torch.device("cpu"))
    boxes, masks = verdicts(data, found, masks=True)
    assert (boxes.kind, boxes.metric, masks.kind) == ("box", "COCO", "mask")
    assert boxes.judged.values == judge_coco(data, found, "boxes").values
    assert masks.judged.values["AP"] > 60, "it has a sharp eye"
    eleven, area = verdicts(replace(data, rules="voc"), found, masks=False)
    assert (eleven.metric, area.metric) == ("VOC, 11 points", "VOC, area")
    assert eleven.judged.values == judge_voc(data, found).values


@pytest.fixture
def run(tmp_path: Path) -> Iterator[tuple[Path, list[xmoco.records.Record]]]:
    """A run folder of a detector that was trained for six steps."""
    with small_detectors(report=True):
        records = xmoco.evaluate_detect(
            "scratch:tiny",
            write_scenes(tmp_path / "scenes"),
            model="mask-rcnn-c4",
            schedule="6-steps",
            batch=2,
            out=tmp_path / "run",
            options=xmoco.EvalOptions("cpu", size=64, readers=1),
        )
        yield tmp_path / "run", records


def test_the_report(run: tuple[Path, list[Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    folder, records = run
    text = (folder / "report.html").read_text()
    assert text.count("<h1>Mask R-CNN C4 on folder scenes (train), scratch tiny</h1>") == 1
    for fact in ("AP50, boxes (COCO)", "AP small, masks (COCO)", "6-steps: 6 steps of 2 images"):
        assert fact in text, fact
    pictures = re.findall(r'<img src="data:image/[^"]+" alt="([^"]*)"', text)
    titles = [alt.partition(" by ")[0] for alt in pictures]
    assert titles == [
        *("Average precision of boxes", "Average precision of masks"),
        *("Loss", "Terms of the loss", "Learning rate"),
        *("Precision of boxes", "Precision of masks", "Detections"),
    ]
    assert "Those before are of at most 500 of them" in text, "what its points are"
    ap = next(record.value for record in records if record.measure == "box_ap")
    assert f"at the end: AP {ap:.4g}" in pictures[0]

    seen: list[Any] = []
    monkeypatch.setattr(page, "panel_svg", lambda panel: seen.append(panel) or "")
    judged = {"boxes": judge_coco(*perfect(folder.parent / "scenes"), "boxes")}
    page_file = write_detection_report(
        folder, replace(CARD, started_from="torchvision:resnet50"), records, judged, b""
    )
    assert "tiny, xmoco, which started from torchvision:resnet50" in page_file.read_text()
    assert "which started from" not in text
    (precision,) = (panel for panel in seen if panel.title == "Precision of boxes")
    assert (precision.unit, precision.along) == ("precision, %", "recall, %")
    assert all(min(curve.values) == 100 for curve in precision.curves.values())


def perfect(scenes: Path) -> tuple[Any, Any]:
    """A set, and exactly its objects as detections."""
    from xmoco.detect.metrics import Detections

    _, data = open_detection(scenes)
    objects = data.objects
    scores = np.linspace(1, 0.5, len(objects))
    return data, Detections(objects.images, objects.boxes, scores, objects.labels)


def test_pictures_of_detections(tmp_path: Path) -> None:
    import io

    _, data = open_detection(write_scenes(tmp_path / "scenes", val=3))
    png = picture_detections(RedAndBlue(), data, torch.device("cpu"))
    picture = np.asarray(Image.open(io.BytesIO(png)).convert("RGB"))
    assert picture.shape[0] == picture.shape[1], "three pictures in two rows of two"
    corner = picture[-picture.shape[0] // 3 :, -picture.shape[1] // 3 :]
    assert (corner == corner[0, 0]).all(), "the fourth is empty"


def test_what_is_there_is_framed_in_white(tmp_path: Path) -> None:
    grey = torch.full((3, 40, 50), 128, dtype=torch.uint8)
    found = framed(grey, torch.tensor([[10.0, 5, 30, 25]]))
    assert (found[:, 5:25, 9] == 255).all()
    assert (found[:, :2] == 128).all()
    assert torch.equal(framed(grey, torch.zeros(0, 4)), grey)
    _, data = open_detection(write_scenes(tmp_path / "scenes", val=3))

    class Blind(RedAndBlue):
        def forward(self, images: list[Tensor]) -> list[dict[str, Tensor]]:
            nothing = torch.zeros(0, 4), torch.zeros(0, dtype=torch.int64), torch.zeros(0)
            return [dict(zip(("boxes", "labels", "scores"), nothing, strict=True))] * len(images)

    plain, told = (
        picture_detections(Blind(), data, torch.device("cpu"), truth=truth)
        for truth in (False, True)
    )
    (tmp_path / "truth.png").write_bytes(told)
    assert plain != told, "also where nothing is found"
