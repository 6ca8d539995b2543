"""Judging weights from Python: records, splits, and mistakes."""

import json
import os
import shlex
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torchvision
import yaml
from torch import Tensor

import xmoco
from helpers import assert_refused, checkpoints, make_images, metrics, run_cli
from xmoco.errors import TRY_AGAIN
from xmoco.evaluate import classify
from xmoco.evaluate.evaluation import EvalOptions, Evaluation, Listener
from xmoco.nn.backbone_files import BackboneCard, save_backbone
from xmoco.nn.backbones import build_backbone
from xmoco.nn.classifier_files import FILE
from xmoco.train import loop
from xmoco.train.loop import Training
from xmoco.train.run_folder import RunFolder

CARD = BackboneCard("tiny", "cifar", 16, (0.5, 0.5, 0.5), (0.2, 0.2, 0.2), "xmoco", 3, 7)

MEASURED = ("top1", "top5", "mean_per_class")


@pytest.fixture(autouse=True)
def in_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where ``runs/evaluate`` goes."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    save_backbone(build_backbone("tiny", "cifar"), CARD, tmp_path / "backbone.safetensors")
    return tmp_path / "backbone.safetensors"


def test_records_of_a_set_with_two_splits(weights: Path, tmp_path: Path) -> None:
    make_images(tmp_path / "Set.v2" / "train", each=6)
    make_images(tmp_path / "Set.v2" / "val", each=3)
    records = xmoco.evaluate_knn(
        weights, tmp_path / "Set.v2", ks=(2, 3), options=EvalOptions("cpu")
    )
    assert [record.protocol["k"] for record in records] == [2, 3]
    for record in records:
        assert (record.subject, record.work, record.seed) == ("xmoco", "set.v2-tiny", 7)
        protocol = record.protocol
        assert (protocol["split"], protocol["epoch"], protocol["size"]) == ("test", 3, 16)
        assert (protocol["bank_images"], protocol["judged_images"]) == (24, 12)
        assert protocol["voters"] == protocol["k"]
        assert "weights" not in protocol  # our own are told by subject, work and epoch
    assert xmoco.evaluate_knn(weights, tmp_path / "Set.v2", ks=(2,))[0].value == records[0].value


def seen_sizes(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Sides of the views that a classifier is trained on and judged by, once it was."""
    sides: dict[str, int] = {}

    def watched(name: str, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def watch(*args: object, **kwargs: object) -> Tensor:
            pixels = function(*args, **kwargs)
            sides[name] = pixels[0].shape[-1]
            return pixels

        return watch

    for name in ("views_of", "central"):
        monkeypatch.setattr(classify, name, watched(name, getattr(classify, name)))
    return sides


def test_whole_images_may_be_shown_at_another_size_than_crops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = tmp_path / "backbone.safetensors"
    save_backbone(build_backbone("tiny", "cifar"), replace(CARD, eval_size=24), weights)
    make_images(tmp_path / "images" / "train", each=3)
    make_images(tmp_path / "images" / "val", each=2)
    sides = seen_sizes(monkeypatch)
    linear = partial(xmoco.evaluate_linear, weights, tmp_path / "images", epochs=1)
    record, *_ = linear(options=EvalOptions("cpu"))
    assert sides == {"views_of": 16, "central": 24}
    assert (record.protocol["crop_size"], record.protocol["size"]) == (16, 24)
    record, *_ = linear(options=EvalOptions("cpu", size=20))
    assert sides == {"views_of": 20, "central": 20}
    assert (record.protocol["crop_size"], record.protocol["size"]) == (20, 20)

    knn = partial(xmoco.evaluate_knn, weights, tmp_path / "images", ks=(2,))
    (own,), (asked,) = knn(options=EvalOptions("cpu")), knn(options=EvalOptions("cpu", size=24))
    assert (own.protocol["size"], own.value) == (24, asked.value)


def test_one_split_is_judged_by_leaving_one_out(weights: Path, tmp_path: Path) -> None:
    images = make_images(tmp_path / "images", each=4)
    ear = Ear()
    record, *_ = xmoco.evaluate_knn(str(weights), str(images), ks=(200, 100, 15), listener=ear)
    assert ear.heard == ["only 15 images can vote: for k = 100 and 200 these are all."]
    assert record.protocol["split"] == "leave one out"
    assert record.protocol["judged_images"] == 16
    assert (record.protocol["k"], record.protocol["voters"]) == (200, 15)


def test_folders_whose_names_are_no_text(weights: Path, tmp_path: Path) -> None:
    images = make_images(tmp_path / os.fsdecode(b"\xff"), each=4)
    next(images.iterdir()).rename(images / os.fsdecode(b"\xfe\n"))
    (record,) = xmoco.evaluate_knn(weights, images, ks=(1,), options=EvalOptions("cpu"))
    assert (record.work, record.protocol["data"]) == (r"\xff-tiny", r"folder \xff")


def test_records_of_other_peoples_weights_tell_what_was_loaded(tmp_path: Path) -> None:
    torch.save(torchvision.models.resnet18().state_dict(), tmp_path / "theirs.pth")
    images = make_images(tmp_path / "images", each=1)
    (record,) = xmoco.evaluate_knn(
        tmp_path / "theirs.pth", images, ks=(1,), options=EvalOptions("cpu")
    )
    assert "format torchvision" in record.protocol["weights"]
    assert record.protocol["labelled"]  # it is a classifier


def test_what_is_known_of_other_peoples_weights_may_be_told(tmp_path: Path) -> None:
    torch.save(build_backbone("resnet18", "cifar").state_dict(), tmp_path / "theirs.pth")
    images = make_images(tmp_path / "images", each=2)
    knn = partial(xmoco.evaluate_knn, tmp_path / "theirs.pth", images, ks=(1,))
    ear = Ear()
    guessed = knn(options=EvalOptions("cpu"), listener=ear)[0]
    assert "mean and std are a guess" in ear.heard[0]
    ear, half = Ear(), (0.5, 0.5, 0.5)
    told = EvalOptions("cpu", mean=half, std=half, labelled=not guessed.protocol["labelled"])
    record, *_ = knn(options=told, listener=ear)
    assert ear.heard == []
    assert record.protocol["labelled"] is told.labelled
    assert "guess" not in record.protocol["weights"]
    assert (record.protocol["mean"], record.protocol["std"]) == (half, half)
    assert "mean" not in guessed.protocol
    assert Evaluation.open(tmp_path / "theirs.pth", told).input.mean == half
    outcome = run_cli(
        *("evaluate", "knn", tmp_path / "theirs.pth", images, "--k", "1", "--no-cache"),
        *("--mean", "0.5,0.5,0.5", "--std", "0.5,0.5,0.5", "--unlabelled"),
        *("--records", tmp_path / "kept.jsonl"),
    )
    assert outcome.status == 0, outcome.stderr
    kept = json.loads((tmp_path / "kept.jsonl").read_text())
    assert kept["value"] == record.value
    assert kept["protocol"]["labelled"] is False


def evaluate(function: Callable, weights: Path, data: Path, changes: dict) -> None:
    if "options" in changes:
        changes = changes | {"options": EvalOptions(**changes["options"])}
    function(weights, data, **changes)


def test_a_k_asked_for_twice_counts_once(weights: Path, tmp_path: Path) -> None:
    images = make_images(tmp_path / "images", each=4)
    once, twice = (xmoco.evaluate_knn(weights, images, ks=ks) for ks in ((3,), (3, 3)))
    assert [record.value for record in twice] == [record.value for record in once]


def test_weights_that_are_no_numbers_are_refused(weights: Path, tmp_path: Path) -> None:
    backbone = build_backbone("tiny", "cifar")
    torch.nn.init.constant_(backbone.conv1.weight, torch.nan)
    save_backbone(backbone, CARD, tmp_path / "broken.safetensors")
    images = make_images(tmp_path / "images", each=4)
    with pytest.raises(xmoco.UserError, match="not all numbers"):
        xmoco.evaluate_knn(tmp_path / "broken.safetensors", images)


class Ear(Listener):
    def __init__(self) -> None:
        self.heard: list[str] = []
        self.stages: dict[str, list[tuple[int, int]]] = {}

    def say(self, sentence: str) -> None:
        self.heard.append(sentence)

    def progress(self, stage: str, done: int, total: int, *_: object) -> None:
        self.stages.setdefault(stage, []).append((done, total))


def test_images_that_cannot_be_read_are_told(weights: Path, tmp_path: Path) -> None:
    for split, broken in (("train", "class2/003.png"), ("val", "class1/007.png")):
        make_images(tmp_path / "set" / split, each=30)
        (tmp_path / "set" / split / broken).write_bytes(b"broken")
    for function, options in ((xmoco.evaluate_knn, {}), (xmoco.evaluate_linear, {"epochs": 1})):
        ear = Ear()
        record, *_ = function(weights, tmp_path / "set", listener=ear, **options)
        in_training, in_test = (said for said in ear.heard if "cannot be read" in said)
        assert "003.png cannot be read" in in_training
        assert "007.png cannot be read" in in_test
        assert record.protocol["judged"] == "folder set (val)"


def test_every_stage_tells_how_far_it_is(weights: Path, two_splits: Path, tmp_path: Path) -> None:
    ear = Ear()
    options = EvalOptions("cpu", cache=tmp_path / "cache")
    xmoco.evaluate_knn(weights, two_splits, ks=(1,), options=options, listener=ear)
    assert list(ear.stages) == [
        *("reading training images", "features of training images"),
        *("reading test images", "features of test images", "neighbours"),
    ]
    assert all(told[-1][0] == told[-1][1] for told in ear.stages.values())
    ear = Ear()
    xmoco.evaluate_finetune(weights, two_splits, epochs=2, listener=ear)
    reading, training, judging = ear.stages.values()
    assert reading[-1] == (32, 32)
    assert (training[0], training[-1]) == ((0, 4), (4, 4))
    assert judging == [(16, 16)]


@pytest.mark.parametrize("split", ["train", "val"])
def test_splits_of_different_classes_are_refused(
    weights: Path, two_splits: Path, split: str
) -> None:
    shutil.rmtree(two_splits / split / "class2")
    for function in (xmoco.evaluate_knn, xmoco.evaluate_linear, xmoco.evaluate_finetune):
        with pytest.raises(xmoco.UserError, match="class2") as refusal:
            function(weights, two_splits, options=EvalOptions("cpu"))
        assert "\n" not in str(refusal.value)
        assert "pre-trains" not in str(refusal.value)


def test_a_class_of_one_image_that_nobody_can_vote_for_is_told(
    weights: Path, tmp_path: Path
) -> None:
    images = make_images(tmp_path / "images", each=4)
    for name in ("001.png", "002.png", "003.png"):
        (images / "class3" / name).unlink()
    ear = Ear()
    xmoco.evaluate_knn(weights, images, ks=(1,), listener=ear)
    (sentence,) = ear.heard
    assert "single image of class class3" in sentence


def test_records_tell_weights_apart_as_they_came(weights: Path, two_splits: Path) -> None:
    """Fine-tuning changes the backbone, but it is the given one that is judged."""
    knn, *_ = xmoco.evaluate_knn(weights, two_splits, ks=(1,))
    tuned, *_ = xmoco.evaluate_finetune(weights, two_splits, epochs=1)
    assert knn.protocol["digest"] == tuned.protocol["digest"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"ks": ()}, "k must be"),
        ({"ks": (5, 0)}, "k must be"),
        ({"ks": 0}, "k must be at least 1"),
        ({"ks": (20, 2.5)}, "k must be whole numbers"),
        ({"temperature": -1.0}, "temperature"),
        ({"options": {"size": 4}}, "4 px are too small"),
        ({"options": {"size": 1025}}, "1025 px are too large"),
        ({"options": {"eval_size": 7}}, "7 px are too small"),
        ({"options": {"readers": 0}}, "readers=0"),
        ({"options": {"devices": 0}}, "devices=0 is too few"),
        ({"options": {"nodes": -1}}, "nodes=-1 is too few"),
        ({"options": {"devices": 2}}, "kNN runs in one process"),
        ({"options": {"mean": (0.5, 0.5)}}, "mean=0.5,0.5 is not three numbers"),
        ({"options": {"std": (0.5, 0.5, 0.0)}}, "std=0.5,0.5,0.0 is not three positive numbers"),
        ({"options": {"mean": (124, 116, 104)}}, "mean=124,116,104 is not three numbers from 0 to"),
        ({"temperature": float("nan")}, "temperature"),
        ({"options": {"device": "cuda"}}, "device=cuda is not available"),
        (
            {"options": {"device": "abacus"}},
            "there is no device 'abacus': give auto, cpu, cuda or mps",
        ),
    ],
)
def test_mistakes(
    weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict, words: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    images = make_images(tmp_path / "images", each=2)
    with pytest.raises(xmoco.UserError, match=words):
        evaluate(xmoco.evaluate_knn, weights, images, changes)


@pytest.fixture
def two_splits(tmp_path: Path) -> Path:
    make_images(tmp_path / "both" / "train", each=8)
    make_images(tmp_path / "both" / "val", each=4)
    return tmp_path / "both"


def test_linear_records_name_their_protocol(weights: Path, two_splits: Path) -> None:
    top1, top5, per_class = xmoco.evaluate_linear(
        weights, two_splits, preset="moco", epochs=2, seed=3
    )
    assert (top1.measure, top5.measure) == ("linear_top1", "linear_top5")
    assert per_class.measure == "linear_mean_per_class"
    assert per_class.value == pytest.approx(top1.value), "there are as many images of each class"
    assert 0 <= top1.value <= top5.value == 100
    protocol = top1.protocol
    assert protocol["name"] == "linear (MoCo), 2 epochs"
    assert (protocol["head_rate"], protocol["backbone_rate"]) == (30.0, 0.0)
    assert (protocol["train_images"], protocol["judged_images"]) == (32, 16)
    assert (protocol["label_fraction"], top1.seed) == (1.0, 3)


def test_fine_tuning_on_a_share_of_the_labels(weights: Path, two_splits: Path) -> None:
    before = weights.read_bytes()
    ear = Ear()
    top1, *_ = xmoco.evaluate_finetune(weights, two_splits, fraction=0.25, epochs=1, listener=ear)
    assert not any("too few" in said for said in ear.heard), "its batch shrinks"
    assert top1.measure == "finetune_top1"
    assert (top1.protocol["train_images"], top1.protocol["label_fraction"]) == (8, 0.25)
    assert weights.read_bytes() == before


@pytest.mark.parametrize(
    ("function", "changes", "words"),
    [
        (xmoco.evaluate_linear, {"preset": "papier"}, "did you mean paper"),
        (xmoco.evaluate_linear, {"epochs": 0}, "at least 1"),
        (xmoco.evaluate_finetune, {"epochs": 1.5}, "epochs=1.5 is no whole number"),
        (xmoco.evaluate_linear, {"batch": 8.0}, "batch=8.0 is no whole number"),
        (xmoco.evaluate_linear, {"batch": 1}, "batches of 1 are too small"),
        (xmoco.evaluate_linear, {"head_rate": float("nan")}, "head_rate=nan is no learning rate"),
        (xmoco.evaluate_finetune, {"backbone_rate": 0.0}, "backbone_rate=0 is no learning rate"),
        (xmoco.evaluate_finetune, {"fraction": 0.0}, "fraction"),
        (xmoco.evaluate_finetune, {"fraction": 1.5}, "fraction"),
        (xmoco.evaluate_finetune, {"options": {"precision": "fp8"}}, "fp8"),
        (xmoco.evaluate_linear, {"seed": -1}, "seed=-1"),
        (xmoco.evaluate_finetune, {"seed": 2**63}, "seed=9223372036854775808"),
    ],
)
def test_mistakes_with_classifiers(
    weights: Path, two_splits: Path, function: Callable, changes: dict, words: str
) -> None:
    with pytest.raises(xmoco.UserError, match=words):
        evaluate(function, weights, two_splits, changes)


def test_a_classifier_needs_a_test_split(weights: Path, tmp_path: Path) -> None:
    images = make_images(tmp_path / "one", each=4)
    with pytest.raises(xmoco.UserError, match=r"no test split: .* --held-out 0\.2"):
        xmoco.evaluate_linear(weights, images, epochs=1)


@pytest.mark.parametrize("command", ["linear", "finetune"])
def test_or_a_share_is_held_out(weights: Path, tmp_path: Path, command: str) -> None:
    images, kept = make_images(tmp_path / "one", each=10), tmp_path / "kept.jsonl"
    outcome = run_cli(
        *("evaluate", command, weights, images, "--epochs", "1", "--held-out", "0.2"),
        *("--records", kept),
    )
    assert outcome.status == 0, outcome.stderr
    assert "judged: 8 images of folder one, 20 % held out" in outcome.stdout
    protocol = json.loads(kept.read_text().splitlines()[0])["protocol"]
    assert protocol["split"] == "validation, held out of the training images"
    assert (protocol["held_out_share"], protocol["train_images"]) == (0.2, 32)
    assert protocol["data"] == "folder one, 80 % kept"


@pytest.mark.parametrize("share", [0.0, 0.6, float("nan")])
def test_shares_that_cannot_be_held_out(weights: Path, tmp_path: Path, share: float) -> None:
    images = make_images(tmp_path / "one", each=4)
    with pytest.raises(xmoco.UserError, match=r"above 0 and at most 0\.5"):
        xmoco.evaluate_finetune(weights, images, held_out=share)


def test_there_is_nothing_to_hold_out_beside_a_test_split(weights: Path, two_splits: Path) -> None:
    with pytest.raises(xmoco.UserError, match="has a test split already"):
        xmoco.evaluate_linear(weights, two_splits, held_out=0.2)


@pytest.mark.parametrize("command", ["linear", "finetune"])
def test_classifiers_from_the_command_line(
    weights: Path, two_splits: Path, tmp_path: Path, command: str
) -> None:
    kept = tmp_path / "kept.jsonl"
    outcome = run_cli("evaluate", command, weights, two_splits, "--epochs", "1", "--records", kept)
    assert outcome.status == 0, outcome.stderr
    assert "top-1" in outcome.stdout
    assert "top-5" not in outcome.stdout  # there are four classes
    assert "random crops" not in outcome.stdout  # they are of the same size
    measures = [json.loads(line)["measure"] for line in kept.read_text().splitlines()]
    assert "mean per class" in outcome.stdout
    assert measures == [f"{command}_{what}" for what in MEASURED]


def test_another_course_from_the_command_line(
    weights: Path, two_splits: Path, tmp_path: Path
) -> None:
    kept = tmp_path / "kept.jsonl"
    changes = {"--epochs": 3, "--batch": 16, "--head-rate": 0.1, "--backbone-rate": 0.05}
    options = [str(word) for pair in changes.items() for word in pair]
    command = ("evaluate", "finetune", weights, two_splits, "--out", tmp_path / "run", *options)
    outcome = run_cli(*command, "--records", kept)
    assert outcome.status == 0, outcome.stderr
    assert f"the report is {tmp_path / 'run' / 'report.html'}" in outcome.stderr
    protocol = json.loads(kept.read_text().splitlines()[0])["protocol"]
    name = "fine-tune, 3 epochs, batch 16, head rate 0.1, backbone rate 0.05"
    assert protocol["name"] == name
    assert (protocol["epochs"], protocol["batch"]) == (3, 16)
    assert (protocol["head_rate"], protocol["backbone_rate"]) == (0.1, 0.05)
    assert protocol["milestones"] == [2, 2]
    assert "Class by class" in (tmp_path / "run" / "report.html").read_text()
    again = run_cli(*command, "--batch", "8")
    assert_refused(again, "batch was 16 and is 8 now")


@pytest.mark.parametrize("command", ["linear", "finetune"])
def test_sizes_are_told_on_the_command_line(
    command: str, weights: Path, two_splits: Path, tmp_path: Path
) -> None:
    kept = tmp_path / "records.jsonl"
    sizes = ("--size", "20", "--eval-size", "28")
    outcome = run_cli(
        *("evaluate", command, weights, two_splits, "--epochs", "1", "--records", kept, *sizes)
    )
    assert outcome.status == 0, outcome.stderr
    protocol = json.loads(kept.read_text().splitlines()[0])["protocol"]
    assert (protocol["crop_size"], protocol["size"]) == (20, 28)
    assert "28 px (random crops: 20 px)" in outcome.stdout


def the_run() -> Path:
    (run,) = Path("runs/evaluate").iterdir()
    return run


def no_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Training, "train", lambda *_: pytest.fail("it was trained again"))


def test_a_finished_classifier_is_judged_again_without_training(
    weights: Path, two_splits: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    linear = partial(xmoco.evaluate_linear, weights, two_splits, epochs=1)
    monkeypatch.setattr(loop.SaveClock, "due", lambda *_: True)
    first = linear()
    assert len(checkpoints(the_run())) == 1, "the classifier is kept beside it"
    name = the_run().name
    assert name.startswith("xmoco-")
    assert "both-linear_paper_1_epoch-seed0-" in name
    settings = yaml.safe_load((the_run() / "config.yaml").read_text())
    assert (settings["head_rate"], settings["batch"], settings["seed"]) == (60.0, 32, 0)
    no_training(monkeypatch)
    ear = Ear()
    again = linear(listener=ear)
    assert [record.value for record in again] == [record.value for record in first]
    told = [line["measure"] for line in metrics(the_run()) if "measure" in line]
    linear_measures = [f"linear_{what}" for what in MEASURED]
    assert told == linear_measures, "nothing is told twice"
    few = "the 32 training images make 1 step per epoch, too few for linear (paper), 1 epoch with"
    assert ear.heard.pop(0).startswith(few), "before anything is trained"
    assert ear.heard == [
        f"{the_run()} holds the finished classifier, which is evaluated without training it again.",
        f"the classifier is kept in {the_run() / FILE}; `xmoco classify` applies it.",
        f"the report is {the_run() / 'report.html'}",
    ]
    # How it is judged is no matter of training.
    other, *_ = linear(options=EvalOptions(eval_size=24))
    assert (other.protocol["crop_size"], other.protocol["size"]) == (16, 24)
    kept = [line["measure"] for line in metrics(the_run()) if "measure" in line]
    assert kept == linear_measures * 2
    # But those who trained are told of, not who is here now.
    assert "processes" not in other.protocol
    RunFolder(the_run()).write_environment(processes=2)
    assert linear()[0].protocol["processes"] == 2


def test_what_was_measured_is_recorded_even_if_the_classifier_cannot_be_kept(
    weights: Path, two_splits: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("of whatever kind")

    monkeypatch.setattr("xmoco.evaluate.classification.save_classifier", fails)
    with pytest.raises(RuntimeError, match="of whatever kind"):
        xmoco.evaluate_linear(weights, two_splits, epochs=1)
    kept = [line["measure"] for line in metrics(the_run()) if "measure" in line]
    assert kept == [f"linear_{what}" for what in MEASURED]


def test_other_settings_are_trained_elsewhere(weights: Path, two_splits: Path) -> None:
    linear = partial(xmoco.evaluate_linear, weights, two_splits, epochs=1)
    tune = partial(xmoco.evaluate_finetune, weights, two_splits, epochs=1)
    for call in (
        linear,
        partial(linear, preset="moco"),
        partial(linear, seed=1),
        partial(linear, options=EvalOptions(size=12)),
        partial(linear, options=EvalOptions(precision="bf16")),
        tune,
        partial(tune, fraction=0.5),
    ):
        before = set(Path("runs/evaluate").glob("*"))
        call()
        assert len(set(Path("runs/evaluate").glob("*")) - before) == 1
    (two_splits / "train" / "class0" / "000.png").unlink()
    before = set(Path("runs/evaluate").glob("*"))
    linear()
    assert len(set(Path("runs/evaluate").glob("*")) - before) == 1


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"seed": 1}, "seed was 0 and is 1 now"),
        ({"preset": "moco"}, r"name was .*paper.* and is .*MoCo"),
        ({"options": {"size": 12}}, "crop_size was 16 and is 12 now"),
        ({"options": {"precision": "bf16"}}, "precision was .fp32. and is .bf16. now"),
    ],
)
def test_other_settings_in_the_same_folder_are_refused(
    weights: Path, two_splits: Path, changes: dict, words: str
) -> None:
    given = {"epochs": 1, "out": "run"}
    xmoco.evaluate_linear(weights, two_splits, **given)
    with pytest.raises(xmoco.UserError, match=f"run was begun with other settings: {words}"):
        evaluate(xmoco.evaluate_linear, weights, two_splits, given | changes)
    with pytest.raises(xmoco.UserError, match="begun with other settings"):
        xmoco.evaluate_finetune(weights, two_splits, **given)
    with pytest.raises(xmoco.UserError, match="other settings: epochs was 1 and is 2 now"):
        xmoco.evaluate_linear(weights, two_splits, epochs=2, out="run")
    next((two_splits / "train" / "class0").iterdir()).unlink()
    with pytest.raises(xmoco.UserError, match="run was begun with other settings: "):
        xmoco.evaluate_linear(weights, two_splits, **given)


def test_a_folder_with_something_else_is_refused(weights: Path, two_splits: Path) -> None:
    outcome = run_cli("evaluate", "linear", weights, two_splits, "--out", two_splits)
    assert_refused(outcome, "already exists")


@pytest.mark.parametrize("command", ["linear", "finetune"])
def test_an_interrupted_command_goes_on(
    weights: Path, two_splits: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    """It tells the command that goes on, and that command does."""
    arguments = ("evaluate", command, weights, two_splits, "--epochs", "4", "--device", "cpu")
    whole = run_cli(*arguments, "--out", "whole")
    assert whole.status == 0, whole.stderr
    advance = Training.advance

    def stopping(self: Training, *given: object, **options: object) -> object:
        if self.step == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return advance(self, *given, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Training, "advance", stopping)
        outcome = run_cli(*arguments, "--out", "cut")
    assert outcome.status == TRY_AGAIN
    for other in (("evaluate", "knn", "cut", two_splits), ("classify", "cut", two_splits)):
        assert_refused(run_cli(*other), "finish it first, with the same command again.")
    *warnings, _ = outcome.stderr.splitlines()
    assert len(warnings) == (command == "linear"), "of too few images"
    assert "stopped by SIGTERM after step 2 of " in outcome.stderr
    offered = shlex.split(outcome.stderr.rpartition("Resume with: ")[2])
    assert offered == ["xmoco", *map(str, arguments), "--out", "cut"]
    outcome = run_cli(*offered[1:])
    assert outcome.status == 0, outcome.stderr
    assert "resuming in cut after step 2 of " in outcome.stderr
    states = [
        torch.load(checkpoints(Path(run))[-1], weights_only=True)["task"]
        for run in ("whole", "cut")
    ]
    assert states[0].keys() == states[1].keys()
    for name, value in states[0].items():
        assert torch.equal(states[1][name], value), name


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--mean", "0.5,0.5"], ["'0.5,0.5' is not three numbers"]),
        (["--mean", "half,half,half"], ["half"]),
        (["--std", "0.2,0.2,-1"], ["std=0.2,0.2,-1.0", "positive"]),
        (["--devices", "0"], ["devices=0"]),
    ],
)
def test_mistakes_on_the_command_line(
    weights: Path, two_splits: Path, arguments: list[str], words: list[str]
) -> None:
    assert_refused(run_cli("evaluate", "linear", weights, two_splits, *arguments), *words)
    assert not Path("runs").exists()


def test_knn_at_another_size_from_the_command_line(weights: Path, two_splits: Path) -> None:
    outcome = run_cli("evaluate", "knn", weights, two_splits, "--eval-size", "24", "--no-cache")
    assert outcome.status == 0, outcome.stderr
    assert "24 px" in outcome.stdout


def test_images_that_cannot_be_read_do_not_vote_for_their_neighbours(
    weights: Path, tmp_path: Path
) -> None:
    """Another image in its place would find itself: here, no other is of the own class."""
    images = make_images(tmp_path / "each-alone", each=1, classes=12)
    for number in (2, 5, 8):
        (images / f"class{number}" / "000.png").write_bytes(b"broken")
    heard = []
    for _ in range(2):  # the second time from the cache
        ear = Ear()
        (record,) = xmoco.evaluate_knn(
            weights, images, ks=(1,), options=EvalOptions(cache=tmp_path / "cache"), listener=ear
        )
        protocol = record.protocol
        assert record.value == 0
        assert (protocol["bank_images"], protocol["judged_images"]) == (9, 9)
        assert (protocol["voters"], protocol["unreadable"]) == (1, 3)
        heard.append(ear.heard)
    assert heard[0] == heard[1]
    assert sum("cannot be read" in said and "it is left out" in said for said in heard[0]) == 3


@pytest.mark.parametrize("function", [xmoco.evaluate_knn, xmoco.evaluate_finetune])
def test_no_test_image_is_judged_in_place_of_another(
    weights: Path, two_splits: Path, function: Callable
) -> None:
    (two_splits / "val" / "class1" / "003.png").write_bytes(b"broken")
    (two_splits / "train" / "class1" / "003.png").write_bytes(b"broken")
    course = {"ks": (1,)} if function is xmoco.evaluate_knn else {"epochs": 1}
    ear = Ear()
    record, *_ = function(weights, two_splits, listener=ear, **course)
    assert record.protocol["judged_images"] == 15
    in_training, in_test = (said for said in ear.heard if "cannot be read" in said)
    assert in_test.endswith("; it is left out.")
    if function is xmoco.evaluate_knn:
        assert in_training.endswith("; it is left out.")
        assert (record.protocol["bank_images"], record.protocol["unreadable"]) == (31, 2)
    else:
        assert in_training.endswith("; another image takes its place.")
        assert record.protocol["unreadable"] == 1


def test_one_k_needs_no_list(weights: Path, tmp_path: Path) -> None:
    images = make_images(tmp_path / "images", each=4)
    (one,), (listed,) = (xmoco.evaluate_knn(weights, images, ks=ks) for ks in (3, (3,)))
    assert (one.protocol["k"], one.value) == (3, listed.value)


def test_rare_classes_weigh_as_much_in_the_mean_per_class(weights: Path, tmp_path: Path) -> None:
    images = make_images(tmp_path / "uneven" / "train", each=8, classes=2).parent
    make_images(images / "val", each=8, classes=2)
    for number in range(1, 8):
        (images / "val" / "class1" / f"{number:03}.png").unlink()
    top1, _, per_class = xmoco.evaluate_finetune(weights, images, epochs=1, out="run")
    rights = [round(top1.value * 9 / 100 - rare) for rare in (0, 1)]  # of the other class's 8
    assert any(
        per_class.value == pytest.approx((100 * right / 8 + 100 * rare) / 2)
        for rare, right in enumerate(rights)
    )
    page = Path("run/report.html").read_text()
    assert f"{per_class.value:.1f} % in the mean of the classes" in page


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ("cover.png", "cover.png lies in no class folder"),
        ("class1/extra/1.png", "class1/extra/1.png lies deeper than its class folder"),
    ],
)
def test_a_misplaced_image_is_named(weights: Path, tmp_path: Path, place: str, words: str) -> None:
    images = make_images(tmp_path / "images", each=3)
    (images / place).parent.mkdir(exist_ok=True)
    shutil.copy(images / "class0" / "000.png", images / place)
    with pytest.raises(xmoco.UserError, match=f"folder images has no labels: {words}; put every"):
        xmoco.evaluate_knn(weights, images)


def test_a_tilde_is_the_home_folder(
    weights: Path, two_splits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    options = EvalOptions(cache="~/cache")
    xmoco.evaluate_knn("~/backbone.safetensors", two_splits, ks=1, options=options)
    xmoco.evaluate_finetune(weights, two_splits, epochs=1, out="~/tuned")
    assert any((tmp_path / "cache").iterdir())
    assert (tmp_path / "tuned" / FILE).is_file()
    assert xmoco.load_classifier("~/tuned").classes == ("class0", "class1", "class2", "class3")
    assert not Path("~").exists()
