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
from xmoco.nn.backbones import build_backbone
from xmoco.nn.classifiers import FILE, ClassifierCard, read_classifier, save_classifier
from xmoco.nn.weights import BackboneCard, read_card, save_backbone

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
    told = ", ".join(f"{name} {count}" for name, count in counts.most_common())
    assert f"96 pictures ({told}): {out}" in outcome.stdout


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
    own = ClassifierCard(("cat", "dog"), "fine-tune", "pictures", 0)
    save_classifier(backbone, head, own, card, tmp_path / FILE)
    views = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        expected = head(backbone(views))
        assert_close(xmoco.load_classifier(tmp_path)(views), expected)
        assert_close(xmoco.load_backbone(tmp_path)(views), backbone(views))
    assert read_classifier(tmp_path)[1:] == (own, card)


def test_what_cannot_be_read_is_left_out(tuned: tuple[Path, float], tmp_path: Path) -> None:
    folder = tmp_path / "many"
    folder.mkdir()
    for number in range(110):
        Image.new("RGB", (20, 20), (number, 0, 255 - number)).save(folder / f"{number:03}.png")
    (folder / "050.png").write_bytes(b"no image")
    outcome = run_cli("classify", tuned[0], folder, "--out", tmp_path / "found.csv")
    assert_done(outcome)
    assert "050.png cannot be read" in outcome.stderr
    names = [row["image"] for row in rows(tmp_path / "found.csv")]
    assert names == [f"{number:03}.png" for number in range(110) if number != 50]


def test_a_table_of_likely_classes(tmp_path: Path) -> None:
    shares = np.array([[0.2, 0.5, 0.3], [0.4, 0.2, 0.4]], dtype=np.float32)
    found = Classified(["a,b.png", 'c"\n.png'], ("x", "y", "z"), shares)
    assert [[kind for kind, _ in best] for best in found.best(2)] == [["y", "z"], ["x", "z"]]
    assert found.counts() == {"y": 1, "x": 1}
    found.save(tmp_path / "all.csv", top=9)  # there are three
    table = rows(tmp_path / "all.csv")
    assert [row["image"] for row in table] == ["a,b.png", 'c"\\n.png']
    assert [row["class 3"] for row in table] == ["x", "y"]
    assert table[0]["probability"] == "0.5000"


def test_mistakes(images: Path, tuned: tuple[Path, float], tmp_path: Path) -> None:
    run, weights = tuned[0], tuned[0].parent / "backbone.safetensors"
    out = tmp_path / "found.csv"
    sentence = "no classifier at scratch:tiny: give the folder of `xmoco evaluate finetune`"
    assert_refused(run_cli("classify", "scratch:tiny", images, "--out", out), sentence)
    outcome = run_cli("classify", weights, images, "--out", out)
    assert_refused(outcome, "holds no classifier of xmoco: `xmoco evaluate finetune` makes one")
    assert_refused(run_cli("classify", run, images, "--out", out, "--top", "0"), "--top 0 is too")
    assert_refused(run_cli("classify", run, tmp_path / "gone", "--out", out), "there is no folder")
    outcome = run_cli("classify", run, images, "--out", tmp_path / "found.txt")
    assert_refused(outcome, "found.txt must end in .csv")
    out.touch()
    assert_refused(run_cli("classify", run, images, "--out", out), "found.csv already exists")


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"classifier": {"classes": []}}, "a header that cannot be: classes is wrong"),
        ({"classifier": 3}, "a header that cannot be: classifier is wrong"),
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
