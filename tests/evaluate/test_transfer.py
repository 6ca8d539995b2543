"""Transfer, frozen and end to end: choices, records, interruption, and mistakes."""

import json
import os
import random
import shlex
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.linear_model import LogisticRegression

import xmoco
from helpers import assert_refused, make_images, run_cli
from xmoco.data.fingerprint import tensors_digest
from xmoco.data.transfer_sets import open_transfer_set
from xmoco.evaluate import logistic, transfer
from xmoco.evaluate.classify import Classifier
from xmoco.evaluate.evaluation import EvalOptions, Evaluation, Listener
from xmoco.evaluate.grid import GRIDS, Grid
from xmoco.evaluate.logistic import STRENGTHS
from xmoco.nn.backbone_files import BackboneCard, save_backbone
from xmoco.nn.backbones import build_backbone
from xmoco.train import loop
from xmoco.train.loop import Training

CARD = BackboneCard("tiny", "cifar", 16, (0.5, 0.5, 0.5), (0.2, 0.2, 0.2), "xmoco", 3, 7)
PLACE = EvalOptions("cpu", readers=2)
TINY = Grid("tiny", (0.01, 0.1), (0.0,), 3, 8)


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    save_backbone(build_backbone("tiny", "cifar"), CARD, tmp_path / "backbone.safetensors")
    return tmp_path / "backbone.safetensors"


@pytest.fixture
def images(tmp_path: Path) -> Path:
    for split, each in (("train", 10), ("val", 4), ("test", 6)):
        make_images(tmp_path / "photos" / split, each=each)
    return tmp_path / "photos"


@pytest.fixture
def tiny_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(GRIDS, "tiny", TINY)


def test_frozen_transfer_is_the_search_by_scikit_learn(weights: Path, images: Path) -> None:
    record = xmoco.evaluate_transfer(weights, images, options=PLACE)
    assert (record.measure, record.unit, record.subject) == ("transfer_frozen", "%", "xmoco")
    protocol = record.protocol
    assert (protocol["set"], protocol["metric"], protocol["size"]) == ("photos", "top-1", 16)
    counts = [protocol[f"{name}_images"] for name in ("train", "validation", "judged")]
    assert counts == [40, 16, 24]
    assert protocol["strengths"] == 45

    parts = open_transfer_set(str(images))
    evaluation = Evaluation.open(weights, PLACE)
    (x, y), (x_val, y_val), (x_test, y_test) = (
        evaluation.features(part, "", border=False)[:2]
        for part in (parts.train, parts.validation, parts.test)
    )
    scores = {}
    for strength in STRENGTHS:
        model = LogisticRegression(C=1 / strength, max_iter=3000, tol=1e-6).fit(x, y)
        scores[strength] = 100 * model.score(x_val, y_val)
    # Ours has stopped at another point of a flat optimum: one image of 16, one of 24.
    assert abs(protocol["validation"] - max(scores.values())) <= 100 / 16
    model = LogisticRegression(C=1 / protocol["strength"], max_iter=3000, tol=1e-6)
    model.fit(torch.cat([x, x_val]), torch.cat([y, y_val]))
    assert abs(record.value - 100 * model.score(x_test, y_test)) <= 100 / 24


@pytest.mark.usefixtures("tiny_grid")
def test_end_to_end_transfer(weights: Path, images: Path, tmp_path: Path) -> None:
    before = weights.read_bytes()
    record = xmoco.evaluate_transfer(
        weights, images, mode="end-to-end", grid="tiny", metric="mean per class", seed=3,
        out=tmp_path / "grid", options=PLACE,
    )  # fmt: skip
    protocol = record.protocol
    assert (record.measure, record.seed) == ("transfer_end_to_end", 3)
    assert (protocol["metric"], protocol["grid"], protocol["steps"]) == (
        "mean per class",
        "tiny",
        3,
    )
    assert protocol["name"] == "transfer, end to end (tiny grid)"
    folder = tmp_path / "grid" / "photos"
    settings, *points, result = map(json.loads, (folder / "grid.jsonl").read_text().splitlines())
    assert settings["seed"] == 3
    assert result == {"result": record.value}
    assert [path.name for path in folder.iterdir()] == ["grid.jsonl"]  # no checkpoints are left
    assert [point["rate"] for point in points] == [0.01, 0.1]
    best = max(points, key=lambda point: (point["value"], -point["rate"]))
    assert (protocol["head_rate"], protocol["validation"]) == (best["rate"], best["value"])
    assert 0 <= record.value <= 100
    assert weights.read_bytes() == before


@pytest.mark.usefixtures("tiny_grid")
def test_crops_and_images_judged_of_two_sizes(weights: Path, images: Path, tmp_path: Path) -> None:
    two = tmp_path / "two.safetensors"
    save_backbone(build_backbone("tiny", "cifar"), replace(CARD, eval_size=24), two)
    options = {"mode": "end-to-end", "grid": "tiny", "out": tmp_path / "grid"}
    record = xmoco.evaluate_transfer(two, images, options=PLACE, **options)
    assert (record.protocol["size"], record.protocol["crop_size"]) == (24, 16)
    assert xmoco.evaluate_transfer(two, images, options=PLACE).protocol["size"] == 24
    with pytest.raises(xmoco.UserError, match="crop_size was 16 and is null now"):
        xmoco.evaluate_transfer(two, images, options=replace(PLACE, size=24), **options)


class StopAfter(Listener):
    """Pulls the plug after so many finished grid points."""

    def __init__(self, points: int) -> None:
        self.points = points

    def progress(self, stage: str, done: int, *_: object) -> None:
        if stage == "grid" and done == self.points:
            raise KeyboardInterrupt


@pytest.mark.usefixtures("tiny_grid")
def test_an_interrupted_grid_goes_on_where_it_stopped(
    weights: Path, images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"mode": "end-to-end", "grid": "tiny", "options": PLACE}
    whole = xmoco.evaluate_transfer(weights, images, out=tmp_path / "whole", **options)
    with pytest.raises(KeyboardInterrupt):
        xmoco.evaluate_transfer(
            weights, images, out=tmp_path / "cut", listener=StopAfter(1), **options
        )
    trained = []
    reached = transfer._Search._reached
    monkeypatch.setattr(
        transfer._Search, "_reached", lambda *a: trained.append(a[1].rate) or reached(*a)
    )
    again = xmoco.evaluate_transfer(weights, images, out=tmp_path / "cut", **options)
    assert trained == [0.1, again.protocol["head_rate"]]  # the second point, then the chosen one
    assert again.value == whole.value
    assert again.protocol == whole.protocol
    once_more = xmoco.evaluate_transfer(weights, images, out=tmp_path / "cut", **options)
    assert len(trained) == 2  # nothing was left to do
    assert (once_more.value, once_more.protocol) == (again.value, again.protocol)
    with pytest.raises(xmoco.UserError, match="seed was 0 and is 1 now"):
        xmoco.evaluate_transfer(weights, images, out=tmp_path / "cut", seed=1, **options)


def test_a_refit_that_does_not_come_to_its_end_is_told(
    weights: Path, images: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard = []
    listener = Listener()
    monkeypatch.setattr(listener, "say", heard.append)
    xmoco.evaluate_transfer(weights, images, options=PLACE, listener=listener)
    assert heard == []
    for module in (logistic, transfer):
        monkeypatch.setattr(module, "ITERATIONS_ALONE", 1)
    xmoco.evaluate_transfer(weights, images, options=PLACE, listener=listener)
    (sentence,) = heard
    assert "was stopped after 1 iterations" in sentence


class Killed(BaseException):
    """Nothing can be done any more, as after a SIGKILL."""


@pytest.mark.usefixtures("tiny_grid")
@pytest.mark.parametrize("seed", range(2))
def test_killed_at_random_a_search_comes_to_the_same_end(
    weights: Path, images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """After any step, when a point is noted, and when its folder goes."""
    chance, judged = random.Random(f"grid {seed}"), {}
    scores, advance, rmtree = Evaluation.scores, Training.advance, shutil.rmtree
    options = {"mode": "end-to-end", "grid": "tiny", "options": PLACE}

    def look(self: Evaluation, classifier: Classifier, *arguments: Any, **given: Any) -> Any:
        state = classifier.state_dict()
        judged.setdefault(out, []).append(tensors_digest(state))
        return scores(self, classifier, *arguments, **given)

    monkeypatch.setattr(Evaluation, "scores", look)
    out = "whole"
    whole = xmoco.evaluate_transfer(weights, images, out=tmp_path / out, **options)

    def deadly(action: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **given: Any) -> Any:
            if chance.random() < 0.15:
                raise Killed
            return action(*arguments, **given)

        return call

    out, killed, kills = "killed", None, 0
    with monkeypatch.context() as patch:
        patch.setattr(loop.SaveClock, "due", lambda *_: chance.random() < 0.4)
        patch.setattr(Training, "advance", deadly(advance))
        patch.setattr(transfer.shutil, "rmtree", deadly(rmtree))
        while killed is None:
            try:
                killed = xmoco.evaluate_transfer(weights, images, out=tmp_path / out, **options)
            except Killed:
                kills += 1
    assert kills > 0
    assert (killed.value, killed.protocol) == (whole.value, whole.protocol)
    # What was judged twice, as the number was lost, was the same.
    assert list(dict.fromkeys(judged["killed"])) == judged["whole"]
    files = [tmp_path / name / "photos" / "grid.jsonl" for name in ("whole", "killed")]
    assert files[0].read_text() == files[1].read_text()
    assert [path.name for path in files[1].parent.iterdir()] == ["grid.jsonl"]


@pytest.mark.usefixtures("tiny_grid")
def test_a_signal_in_the_middle_of_a_point(
    weights: Path, images: Path, in_tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["evaluate", "transfer", weights, images, "--mode", "end-to-end", "--grid", "tiny"]
    advance = Training.advance

    def stopping(self: Training, *given: Any, **options: Any) -> Any:
        if self.step == 1:
            os.kill(os.getpid(), signal.SIGINT)
        return advance(self, *given, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Training, "advance", stopping)
        outcome = run_cli(*arguments, "--out", "grid", "--device", "cpu")
    assert outcome.status == 128 + signal.SIGINT
    assert "stopped by SIGINT after step 2 of 3" in outcome.stderr
    offered = shlex.split(outcome.stderr.rpartition("Resume with: ")[2])
    assert (in_tmp / "grid" / "photos" / "rate-0.01-decay-0" / "checkpoints").is_dir()
    outcome = run_cli(*offered[1:])
    assert outcome.status == 0, outcome.stderr
    assert "resuming in grid/photos/rate-0.01-decay-0 after step 2 of 3" in outcome.stderr


@pytest.mark.usefixtures("tiny_grid")
def test_the_choice_is_made_on_validation_images_and_tested_once(
    weights: Path, images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = open_transfer_set(str(images))
    seen, borders = [], []
    reached, scores = transfer._Search._reached, Evaluation.scores

    def spy(search, point, train, judged, place, stage) -> float:
        seen.append((len(train), len(judged)))
        return reached(search, point, train, judged, place, stage)

    def look(*arguments, border: bool):
        borders.append(border)
        return scores(*arguments, border=border)

    monkeypatch.setattr(transfer._Search, "_reached", spy)
    monkeypatch.setattr(Evaluation, "scores", look)
    xmoco.evaluate_transfer(
        weights, images, mode="end-to-end", grid="tiny", out=tmp_path / "grid", options=PLACE
    )
    train, validation, test = map(len, (parts.train, parts.validation, parts.test))
    assert len({train, validation, test}) == 3
    assert seen == [(train, validation)] * 2 + [(train + validation, test)]
    assert borders == [False] * 3  # the paper's transfer leaves no border out


def test_frozen_features_leave_no_border_out(
    weights: Path, images: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    borders = []
    features = Evaluation.features

    def look(self, part, stage: str, border: bool = True):
        borders.append(border)
        return features(self, part, stage, border)

    monkeypatch.setattr(Evaluation, "features", look)
    xmoco.evaluate_transfer(weights, images, options=PLACE)
    assert borders == [False] * 3


@pytest.mark.usefixtures("tiny_grid")
@pytest.mark.parametrize("change", ["labels", "pixels", "precision"])
def test_a_grid_goes_on_with_the_very_same_images_and_settings(
    weights: Path, images: Path, tmp_path: Path, change: str
) -> None:
    options = {"mode": "end-to-end", "grid": "tiny", "out": tmp_path / "grid", "options": PLACE}
    xmoco.evaluate_transfer(weights, images, **options)
    if change == "labels":
        one, other = images / "train" / "class0", images / "train" / "class1"
        (
            one.rename(images / "train" / "x"),
            other.rename(one),
            (images / "train" / "x").rename(other),
        )
    elif change == "pixels":
        first, second, *_ = sorted((images / "test" / "class0").iterdir())
        first.write_bytes(second.read_bytes())
    else:
        options["options"] = EvalOptions("cpu", precision="bf16", readers=2)
    with pytest.raises(xmoco.UserError, match=r"begun with other settings: (images|precision)"):
        xmoco.evaluate_transfer(weights, images, **options)


@pytest.mark.usefixtures("tiny_grid")
def test_a_chosen_point_that_explodes_in_the_end_is_no_result(
    weights: Path, images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = iter([(50.0, 8), (60.0, 8), (-1.0, 8)])  # each of 8 images
    monkeypatch.setattr(transfer._Search, "_reached", lambda *_: next(answers))
    with pytest.raises(xmoco.UserError, match=r"rate 0.1, .* diverged"):
        xmoco.evaluate_transfer(
            weights, images, mode="end-to-end", grid="tiny", out=tmp_path / "grid", options=PLACE
        )


def test_a_path_is_never_one_of_the_papers_sets(weights: Path, images: Path, in_tmp: Path) -> None:
    images.rename(in_tmp / "pets")
    record = xmoco.evaluate_transfer(weights, Path("pets"), options=PLACE)
    assert record.protocol["set"] == "pets (own)"


@pytest.mark.usefixtures("tiny_grid")
def test_points_whose_loss_explodes_are_never_chosen(
    weights: Path, images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(GRIDS, "wild", Grid("wild", (1e25, 0.01), (0.0,), 20, 8))
    options = {"mode": "end-to-end", "out": tmp_path / "grid", "options": PLACE}
    record = xmoco.evaluate_transfer(weights, images, grid="wild", **options)
    assert record.protocol["head_rate"] == 0.01
    monkeypatch.setitem(GRIDS, "wild", Grid("wild", (1e25,), (0.0,), 20, 8))
    options["out"] = tmp_path / "other"
    with pytest.raises(xmoco.UserError, match="no point of the grid wild"):
        xmoco.evaluate_transfer(weights, images, grid="wild", **options)


@pytest.fixture
def several(tmp_path: Path) -> Path:
    """Images of several classes at once: which channels are bright."""
    generator = np.random.default_rng(0)
    for split, count in (("train", 24), ("val", 12), ("test", 16)):
        folder = tmp_path / "several" / split
        folder.mkdir(parents=True)
        rows = ["image,labels"]
        for number in range(count):
            bright = generator.random(3) < 0.5
            pixels = generator.integers(0, 100, (16, 16, 3)) + 140 * bright
            Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{number}.png")
            names = [n for n, on in zip(("red", "green", "blue"), bright, strict=True) if on]
            rows.append(f"{number}.png,{';'.join(names)}")
        (folder / "labels.csv").write_text("\n".join(rows) + "\n")
    return tmp_path / "several"


@pytest.mark.usefixtures("tiny_grid")
@pytest.mark.parametrize("mode", ["frozen", "end-to-end"])
def test_images_of_several_classes_are_judged_by_mean_precision(
    weights: Path, several: Path, tmp_path: Path, mode: str
) -> None:
    record = xmoco.evaluate_transfer(
        weights, several, mode=mode, grid="tiny", out=tmp_path / "grid", options=PLACE
    )
    assert record.protocol["metric"] == "11-point mAP"
    assert record.value > 60  # chance is the share of bright channels, about a half


def test_images_of_several_classes_cannot_be_judged_by_knn(weights: Path, several: Path) -> None:
    with pytest.raises(xmoco.UserError, match="several classes at once"):
        xmoco.evaluate_knn(weights, several, options=PLACE)


@pytest.fixture
def in_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.usefixtures("tiny_grid")
def test_from_the_command_line(weights: Path, images: Path, in_tmp: Path) -> None:
    kept = in_tmp / "kept.jsonl"
    options = ["--device", "cpu", "--records", kept]
    outcome = run_cli("evaluate", "transfer", weights, images, images, *options)
    assert outcome.status == 0, outcome.stderr
    assert "transfer, frozen, to photos" in outcome.stdout
    outcome = run_cli(
        "evaluate", "transfer", weights, images, "--mode", "end-to-end", "--grid", "tiny", *options
    )
    assert outcome.status == 0, outcome.stderr
    (grid,) = (in_tmp / "runs" / "transfer").glob("xmoco-*-tiny/photos/grid.jsonl")
    assert len(grid.read_text().splitlines()) == 1 + len(TINY.points) + 1
    records = [json.loads(line) for line in kept.read_text().splitlines()]
    measures = ["transfer_frozen", "transfer_frozen", "transfer_end_to_end"]
    assert [record["measure"] for record in records] == measures
    assert records[0]["value"] == records[1]["value"]

    outcome = run_cli("tables", "transfer", kept, "--out", "tables")
    assert outcome.status == 0, outcome.stderr
    markdown = (in_tmp / "tables" / "transfer-frozen.md").read_text()
    assert f"{records[0]['value']:.1f}" in markdown


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["IMAGES", "--mode", "frosen"], ["frosen", "did you mean frozen"]),
        (["IMAGES", "--mode", "end-to-end", "--grid", "smal"], ["smal", "did you mean small"]),
        (["IMAGES", "--metric", "accuracy"], ["accuracy"]),
        (["petz"], ["petz", "pets"]),
        (["pets", "--root", "nowhere"], ["nowhere"]),
        (["IMAGES", "--mode", "end-to-end", "--precision", "fp8"], ["fp8"]),
        (["IMAGES", "--size", "2"], ["2 px"]),
        (["IMAGES", "--devices", "2"], ["frozen transfer runs in one process"]),
        (["IMAGES", "--mean", "1"], ["'1' is not three numbers"]),
        (["IMAGES", "--mode", "end-to-end", "--seed", "-1"], ["seed=-1"]),
        (["IMAGES", "nowhere"], ["nowhere"]),
        (["IMAGES", "--records", "IMAGES"], ["records cannot be written"]),
    ],
)
def test_mistakes(weights: Path, images: Path, arguments: list[str], words: list[str]) -> None:
    told = [str(images) if argument == "IMAGES" else argument for argument in arguments]
    assert_refused(run_cli("evaluate", "transfer", weights, *told), *words)
