"""A classifier that an evaluation trained is a file, which others and ``xmoco classify`` use."""

import csv
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchvision
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from torch.testing import assert_close

import xmoco
from helpers import assert_done, assert_refused, run_cli, two_splits
from xmoco.classifying import Classified
from xmoco.nn.backbone_files import BackboneCard, save_backbone
from xmoco.nn.backbones import build_backbone
from xmoco.nn.classifier_files import FILE, ClassifierCard, read_classifier, save_classifier
from xmoco.nn.weights import read_card
from xmoco.text import printable

GREY = {"mean": (0.4, 0.5, 0.6), "std": (0.2, 0.3, 0.2)}
CARD = BackboneCard("tiny", "cifar", 16, **GREY, method="xmoco", epochs=3, seed=7)
CLASSES = ("class0", "class1", "class2", "class3")


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return two_splits(tmp_path_factory.mktemp("data") / "gratings", each=24)


@pytest.fixture(scope="module")
def tuned(images: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, float]:
    """A run folder of ``evaluate finetune``, and its top-1 accuracy."""
    folder = tmp_path_factory.mktemp("runs")
    torch.manual_seed(0)
    save_backbone(build_backbone("tiny", "cifar"), CARD, folder / "backbone.safetensors")
    records = folder / "records.jsonl"
    outcome = run_cli(
        *("evaluate", "finetune", folder / "backbone.safetensors", images, "--epochs", "3"),
        *("--device", "cpu", "--out", folder / "tuned", "--records", records, "--eval-size", "20"),
    )
    assert_done(outcome)
    kept = folder / "tuned" / FILE
    assert f"the classifier is kept in {kept}; `xmoco classify` applies it." in outcome.stderr
    first = json.loads(records.read_text().splitlines()[0])
    return folder / "tuned", first["value"]


def rows(file: Path) -> list[dict[str, str]]:
    with file.open(newline="") as text:
        return list(csv.DictReader(text))


def test_pictures_are_classified_as_they_were_judged(
    images: Path, tuned: tuple[Path, float], tmp_path: Path
) -> None:
    run, accuracy = tuned
    out = tmp_path / "found.csv"
    outcome = run_cli("classify", run, images / "val", "--out", out, "--top", "2")
    assert_done(outcome)
    found = rows(out)
    assert [*found[0]] == ["image", "class", "probability", "class 2", "probability 2"]
    assert len(found) == 96
    right = sum(row["image"].startswith(row["class"]) for row in found)
    assert 100 * right / 96 == pytest.approx(accuracy)
    assert accuracy > 50, "or anything would be as right"
    for row in found:
        assert 1 >= float(row["probability"]) >= float(row["probability 2"]) >= 0
    counts = Counter(row["class"] for row in found)
    told = "; ".join(f"{name}: {count}" for name, count in counts.most_common())
    assert f"96 images ({told}), written to {out}" in outcome.stdout


def test_from_python_it_is_a_network_and_its_classes(
    images: Path, tuned: tuple[Path, float]
) -> None:
    run, _ = tuned
    classifier: Any = xmoco.load_classifier(run)
    transform = xmoco.load_transform(run)
    assert classifier.classes == CLASSES
    assert not classifier.training
    found = xmoco.classify(run / FILE, images / "val" / "class2", device="cpu")
    assert found.names == [f"{number:03}.png" for number in range(24)]
    shown = [transform(Image.open(images / "val" / "class2" / name)) for name in found.names]
    assert shown[0].shape == (3, 20, 20), "as it was judged"
    with torch.no_grad():
        expected = classifier(torch.stack(shown)).softmax(1)
    assert_close(torch.from_numpy(found.probabilities), expected, rtol=1e-3, atol=1e-3)
    single = xmoco.classify(run, images / "val" / "class2" / "003.png", device="cpu")
    assert_close(single.probabilities[0], found.probabilities[3], rtol=1e-3, atol=1e-4)


def test_the_tuned_backbone_is_weights_too_and_says_what_became_of_it(
    images: Path, tuned: tuple[Path, float]
) -> None:
    run, _ = tuned
    card, file = read_card(run)
    assert file == run / FILE
    assert (card.size, card.eval_size, card.mean) == (16, 20, GREY["mean"])
    assert card.method == "xmoco, fine-tune, 3 epochs on folder gratings (train)"
    whole = load_file(run / FILE)
    state = xmoco.load_backbone(run).state_dict()
    assert whole.keys() - state.keys() == {"fc.weight", "fc.bias"}
    assert all(torch.equal(value, whole[name]) for name, value in state.items())
    (record,) = xmoco.evaluate_knn(run, images, ks=(5,), options=xmoco.EvalOptions("cpu"))
    assert record.subject == card.method


def test_a_resnet_of_torchvision_takes_it_as_it_is(images: Path, tmp_path: Path) -> None:
    """And a linear classifier leaves the backbone what it was."""
    torch.manual_seed(0)
    card = BackboneCard("resnet18", "imagenet", 32, **GREY, method="xmoco", epochs=1, seed=0)
    weights, run = tmp_path / "backbone.safetensors", tmp_path / "linear"
    save_backbone(build_backbone("resnet18"), card, weights)
    options = xmoco.EvalOptions("cpu")
    xmoco.evaluate_linear(weights, images, epochs=1, out=run, options=options)
    before = (run / FILE).read_bytes()
    xmoco.evaluate_linear(weights, images, epochs=1, out=run, options=options)  # is found again
    assert (run / FILE).read_bytes() == before
    model = torchvision.models.resnet18(num_classes=4)
    model.load_state_dict(load_file(run / FILE))
    ours = xmoco.load_classifier(run)
    assert type(ours) is type(model)
    views = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(ours(views), model.eval()(views))
    assert read_card(run)[0].method == "xmoco"
    kept = xmoco.load_backbone(weights).state_dict()
    state = xmoco.load_backbone(run).state_dict()
    assert all(torch.equal(value, kept[name]) for name, value in state.items())


def test_on_a_model_of_timm(tmp_path: Path) -> None:
    pytest.importorskip("timm")
    name = "timm:test_vit"
    card = BackboneCard(name, "imagenet", 32, **GREY, method="xmoco", epochs=1, seed=0)
    backbone = build_backbone(name, size=32).eval()
    head = nn.Linear(backbone.num_features, 2)
    own = ClassifierCard(classes=("cat", "dog"), protocol="fine-tune", data="pictures", seed=0)
    save_classifier(backbone, head, own, card, tmp_path / FILE)
    views = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        expected = head(backbone(views))
        assert_close(xmoco.load_classifier(tmp_path)(views), expected)
        assert_close(xmoco.load_backbone(tmp_path)(views), backbone(views))
    assert read_classifier(tmp_path)[1:] == (own, card)


def test_a_transformer_judged_at_another_size_is_kept_at_its_own(
    images: Path, tmp_path: Path
) -> None:
    pytest.importorskip("timm")
    name = "timm:test_vit"
    card = BackboneCard(name, "imagenet", 160, **GREY, method="xmoco", epochs=1, seed=0)
    save_backbone(build_backbone(name, size=160), card, tmp_path / "backbone.safetensors")
    records = xmoco.evaluate_linear(
        tmp_path / "backbone.safetensors",
        images,
        epochs=1,
        out=tmp_path / "run",
        options=xmoco.EvalOptions("cpu", size=32),
    )
    found = xmoco.classify(tmp_path / "run", images / "val", device="cpu")
    classes = [best[0][0] for best in found.best()]
    right = [name.startswith(own) for name, own in zip(found.names, classes, strict=True)]
    assert 100 * sum(right) / len(right) == pytest.approx(records[0].value)
    kept = read_card(tmp_path / "run")[0]
    assert (kept.size, kept.input().central_size) == (160, 32)


def test_a_backbone_that_no_card_tells_is_judged_but_not_kept(images: Path, tmp_path: Path) -> None:
    """solo-learn pads small images by another pixel."""
    model = torchvision.models.resnet18()
    model.conv1 = nn.Conv2d(3, 64, 3, padding=2, bias=False)
    state = {f"backbone.{k}": v for k, v in model.state_dict().items() if not k.startswith("fc.")}
    state |= {"classifier.weight": torch.zeros(10, 512), "classifier.bias": torch.zeros(10)}
    torch.save({"state_dict": state}, tmp_path / "theirs.ckpt")
    outcome = run_cli(
        *("evaluate", "linear", tmp_path / "theirs.ckpt", images, "--epochs", "1", "--size", "16"),
        *("--device", "cpu", "--out", tmp_path / "run"),
    )
    assert_done(outcome)
    sentence = "the classifier cannot be kept as a file: its backbone is no ordinary resnet18."
    assert sentence in outcome.stderr
    assert not (tmp_path / "run" / FILE).exists()
    assert_refused(run_cli("classify", tmp_path / "run", images), f"has no {FILE}: give the run")


def test_it_is_shown_images_as_it_was_judged_last(
    images: Path, tuned: tuple[Path, float], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    weights = tuned[0].parent / "backbone.safetensors"
    for size in (20, 24):
        options = xmoco.EvalOptions("cpu", eval_size=size)
        xmoco.evaluate_linear(weights, images, epochs=1, out=run, options=options)
        assert read_card(run)[0].eval_size == size


@pytest.mark.parametrize("classes", [("", "a" * 1500), ("ü", "a\nb")])
def test_any_names_can_be_classes(classes: tuple[str, ...], tmp_path: Path) -> None:
    own = ClassifierCard(classes=classes, protocol="fine-tune", data="pictures", seed=0)
    backbone = build_backbone("tiny", "cifar")
    save_classifier(backbone, nn.Linear(128, 2), own, CARD, tmp_path / FILE)
    found = xmoco.load_classifier(tmp_path)
    assert found.classes == own.classes == tuple(map(printable, classes))


def test_what_cannot_be_read_is_left_out(tuned: tuple[Path, float], tmp_path: Path) -> None:
    folder = tmp_path / "many"
    folder.mkdir()
    for number in range(11):
        Image.new("RGB", (20, 20), (number, 0, 255 - number)).save(folder / f"{number:03}.png")
    (folder / "005.png").write_bytes(b"no image")
    outcome = run_cli("classify", tuned[0], folder, "--out", tmp_path / "found.csv")
    assert_done(outcome)
    assert "005.png cannot be read" in outcome.stderr
    names = [row["image"] for row in rows(tmp_path / "found.csv")]
    assert names == [f"{number:03}.png" for number in range(11) if number != 5]


def test_files_are_named_by_the_bytes_they_have(tmp_path: Path) -> None:
    shares = np.ones((1, 1), dtype=np.float32)
    Classified(["caf\udce9.png"], ("x",), shares).save(tmp_path / "all.csv")
    assert (tmp_path / "all.csv").read_bytes().splitlines()[1] == b"caf\xe9.png,x,1.0000"


def test_a_table_of_likely_classes(tmp_path: Path) -> None:
    shares = np.array([[0.2, 0.5, 0.3], [0.4, 0.2, 0.4]], dtype=np.float32)
    found = Classified(["a,b.png", 'c"\n.png'], ("x", "y", "z"), shares)
    assert [[kind for kind, _ in best] for best in found.best(2)] == [["y", "z"], ["x", "z"]]
    assert found.counted() == "y: 1; x: 1"
    many = Classified([""] * 13, tuple("abcdefghijklm"), np.eye(13, dtype=np.float32))
    assert many.counted().endswith("; j: 1; 3 more classes")
    found.save(tmp_path / "all.csv", top=9)  # there are three
    table = rows(tmp_path / "all.csv")
    assert [row["image"] for row in table] == found.names
    assert [row["class 3"] for row in table] == ["x", "y"]
    assert table[0]["probability"] == "0.5000"
    for top in (0, -1):
        with pytest.raises(xmoco.UserError, match=f"{top} classes are too few"):
            found.save(tmp_path / "none.csv", top=top)


def test_mistakes(images: Path, tuned: tuple[Path, float], tmp_path: Path) -> None:
    run, weights = tuned[0], tuned[0].parent / "backbone.safetensors"
    out = tmp_path / "found.csv"
    sentence = "no classifier at scratch:tiny: give the folder of `xmoco evaluate finetune`"
    assert_refused(run_cli("classify", "scratch:tiny", images, "--out", out), sentence)
    outcome = run_cli("classify", weights, images, "--out", out)
    assert_refused(outcome, "holds no classifier of xmoco: `xmoco evaluate finetune` makes one")
    assert_refused(
        run_cli("classify", run, images, "--out", out, "--top", "0"), "0 classes are too few"
    )
    assert_refused(run_cli("classify", run, tmp_path / "gone", "--out", out), "there is no folder")
    outcome = run_cli("classify", run, images, "--out", tmp_path / "found.txt")
    assert_refused(outcome, "found.txt must end in .csv")
    out.touch()
    assert_refused(run_cli("classify", run, images, "--out", out), "found.csv already exists")
    outcome = run_cli("classify", run, "patterns", "--out", tmp_path / "a.csv")
    assert_refused(outcome, "patterns is no image, folder or archive: sets known by name, shards")


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"classifier": {"classes": []}}, "has an invalid header: classes"),
        ({"classifier": 3}, "has an invalid header: classifier"),
        ({"classifier": {"classes": ["a"] * 3}}, "does not fit the 3 classes it says it has"),
        ({"backbone": "resnet50"}, "does not fit the resnet50 it says it holds"),
        ({"seed": -1}, "has a header that cannot be: seed"),
        ({"layers": 2}, "was written by a newer xmoco"),
    ],
)
def test_files_that_do_not_hold_what_they_say(
    wrong: dict[str, Any], sentence: str, tuned: tuple[Path, float], tmp_path: Path
) -> None:
    with safe_open(tuned[0] / FILE, framework="pt") as file:
        header = json.loads(file.metadata()["xmoco"])
    for key, value in wrong.items():
        header[key] = header[key] | value if isinstance(value, dict) else value
    file = tmp_path / "classifier.safetensors"
    save_file(load_file(tuned[0] / FILE), file, metadata={"xmoco": json.dumps(header)})
    with pytest.raises(xmoco.UserError, match=rf"{sentence}.*\.$"):
        xmoco.load_classifier(file)
