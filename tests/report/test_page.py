"""report.html is one honest, self-contained file, whatever strange names it has to show."""

import base64
import json
import os
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from safetensors.torch import save_file

from xmoco.errors import UserError
from xmoco.nn.backbone_files import BackboneCard, save_backbone
from xmoco.nn.backbones import build_backbone
from xmoco.report.history import read_history
from xmoco.report.page import write_report
from xmoco.report.panels import CLAIMS, LOOKS, panels

PNG = b"\x89PNG\r\n\x1a\nnot really"


KNOWN_TAGS = {
    *("html", "head", "meta", "title", "style", "body", "main", "h1", "h2", "p", "div", "span"),
    *("table", "tr", "th", "td", "img", "pre", "details", "summary"),
}


class Page(HTMLParser):
    """Tags, attributes and text of a page, and a check that every tag is closed."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}
        self.open: list[str] = []
        self.feed(file.read_text(encoding="utf-8"))
        assert not self.open

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))
        if tag not in ("meta", "img"):
            self.open.append(tag)
            self.texts.setdefault(tag, []).append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        for tag in self.open:
            self.texts[tag][-1] += data

    def text(self) -> str:
        return " ".join(self.texts["main"][0].split())


def knn(subject: str, epoch: int, value: float) -> dict[str, Any]:
    protocol = {"data": "patterns", "epoch": epoch, "k": 200}
    return {
        "measure": "knn_top1",
        "value": value,
        "unit": "%",
        "subject": subject,
        "protocol": protocol,
        "seed": 7,
    }


def config(
    source: str = "patterns", backbone: str = "tiny", stem: str = "cifar", method: str = "xmoco"
) -> dict[str, Any]:
    return {
        "data": {"source": source},
        "model": {"backbone": backbone, "stem": stem},
        "method": {"name": method, "bank_length": 64},
    }


def folder(path: Path, *lines: dict[str, Any], settings: dict[str, Any] | None = None) -> Path:
    path.mkdir(exist_ok=True)
    # JSON is YAML, and survives any string.
    (path / "config.yaml").write_text(json.dumps(settings or config()))
    (path / "environment.json").write_text('{"python": "3.11"}')
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def report(run: Path, **summary: str) -> Page:
    return Page(write_report(run, views_png=None, neighbours_png=None, summary=summary))


def training(**values: float) -> dict[str, Any]:
    return {"step": 10, "epoch": 1.0, "time": "2026-11-15T05:40:12Z", "values": values}


def test_results_are_a_sentence_a_table_and_a_protocol(tmp_path: Path) -> None:
    run = folder(
        tmp_path / "run",
        knn("raw pixels", 0, 25.0),
        knn("untrained", 0, 20.0),
        knn("xmoco", 1, 70.0),
        knn("xmoco", 2, 64.25),
    )
    page = report(run, time="3 min")
    text = page.text()
    assert page.texts["h1"] == ["xmoco on patterns, tiny"]
    assert "After 2 epochs" in text
    assert "64.2 % of the test images, against 25.0 % (raw pixels) and 20.0 % (untrained)." in text
    assert "The best was 70.0 % after epoch 1." in text
    assert "kNN top-1, taken from patterns, k = 200; seed 7." in text
    assert page.texts["th"] == ["xmoco", "raw pixels", "untrained", "time"]
    assert "3 min" in text


def test_nothing_is_called_as_in_files(tmp_path: Path) -> None:
    """Neither the method nor what is logged, nor the protocol."""
    own = knn("xmoco+", 1, 70.0)
    own["protocol"] |= {"features": "backbone", "size": 64, "voters": 120, "temperature": 0.1}
    own["protocol"] |= {"bank_images": 1200, "judged_images": 60, "split": "test", "odd_key": 1}
    logged = {"loss": 6.5, "loss/labels_source": 2.0, "fill/bank": 1.0, "feature_spread": 0.5}
    run = folder(tmp_path / "run", own, training(**logged))
    method = {"title": "XMoCo+", "subject": "xmoco+"}
    (run / "environment.json").write_text(json.dumps({"method": method}))
    page = report(run)
    assert page.texts["h1"] == ["XMoCo+ on patterns, tiny"]
    assert page.texts["th"] == ["XMoCo+"]
    assert (
        "kNN top-1, evaluated on 60 images, neighbours among 1,200 training images, taken from "
        "patterns, features from the backbone, images of 64 px, k = 200, of which 120 "
        "vote, temperature 0.1, odd key 1; seed 7."
    ) in page.text()
    told = " ".join(str(attributes.get("alt")) for _, attributes in page.tags)
    assert "Filling of the bank by epoch, %; at the end: 100" in told
    assert not re.findall(r"\w[_/]\w", told)


def test_only_baselines_measured(tmp_path: Path) -> None:
    text = report(folder(tmp_path / "run", knn("untrained", 0, 20.0))).text()
    assert "Before training, kNN accuracy is 20.0 % (untrained)." in text


def test_no_labels_no_curves_and_still_a_page(tmp_path: Path) -> None:
    text = report(folder(tmp_path / "run")).text()
    assert "No kNN accuracy was measured" in text
    assert "Nothing was logged yet." in text


@pytest.mark.parametrize(("every", "why"), [(0, "as knn_every is 0"), (1, "one known class")])
def test_why_no_knn_was_measured(tmp_path: Path, every: int, why: str) -> None:
    """Labelled images of several classes each are labelled, too."""
    run = folder(tmp_path / "run", settings=config() | {"monitor": {"knn_every": every}})
    assert why in report(run).text()


@pytest.mark.parametrize(
    ("method", "learns", "classes"),
    [
        ("xmoco", "random views of an image should be recognised as the same", "never saw"),
        ("supervised", "the class of an image should be recognised", "learnt"),
    ],
)
def test_what_is_told_of_classes_is_true_of_the_method(
    tmp_path: Path, method: str, learns: str, classes: str
) -> None:
    run = folder(tmp_path / "run", knn(method, 1, 50.0), settings=config(method=method))
    text = with_sheets(run).text()
    assert f"What the network learns from: {learns}" in text
    assert f"Training {classes} the classes." in text


def test_without_classes_nothing_is_told_of_frames(tmp_path: Path) -> None:
    settings = config() | {"monitor": {"knn_every": 1}}
    page = with_sheets(folder(tmp_path / "run", settings=settings))
    told = " ".join(text for text in page.texts["p"] if "query" in text)
    assert told.count("Each row shows a query") == 2
    for word in ("✓", "✗", "frame", "class"):
        assert word not in told


@pytest.mark.parametrize(
    ("measures", "words"),
    [
        (["similarity_evenness"], ["largest similarities"]),
        (["label_evenness", "any_of_own_class"], ["largest soft labels", "frame and ✓"]),
    ],
)
def test_the_negatives_are_explained_as_they_are_shown(
    tmp_path: Path, measures: list[str], words: list[str]
) -> None:
    settings = config() | {"monitor": {"knn_every": 1}}
    lines = [knn("xmoco", 1, 50.0) | {"measure": measure} for measure in measures]
    text = with_sheets(folder(tmp_path / "run", *lines, settings=settings)).text()
    for word in words:
        assert word in text
    assert ("✓" in text) == ("any_of_own_class" in measures)


def test_every_curve_is_explained(tmp_path: Path) -> None:
    """Below its picture; what no one knows here has no explanation."""
    values = {"loss": 6.5, "loss/consistency_source": 2.0, "fill/bank": 1.0, "odd_gauge": 1.0}
    values |= dict.fromkeys(LOOKS, 0.5)
    lines = [
        knn("xmoco", 1, 50.0) | {"measure": measure} for claim in CLAIMS for measure in claim.curves
    ]
    run = folder(tmp_path / "run", *lines, knn("xmoco", 1, 50.0), training(**values))
    page = report(run)
    found = panels(read_history(run))
    assert [panel.title for panel in found if not panel.meaning] == ["odd gauge"]
    explained = [text for text in page.texts["p"] if text in {panel.meaning for panel in found}]
    assert len(explained) == len({*explained}) == len(found) - 1
    assert "falling to 1 for good is collapse" in page.text()
    assert "Consistency cannot fall to 0" in page.text()


def with_sheets(run: Path) -> Page:
    sheets = dict.fromkeys(("views_png", "neighbours_png", "negatives_png"), PNG)
    return Page(write_report(run, **sheets, summary={}))


def test_speed_is_the_median_of_what_was_logged(tmp_path: Path) -> None:
    lines = [training(images_per_second=speed) for speed in (1400.0, 1500.0, 10.0)]
    for epoch, line in enumerate(lines):
        line["epoch"] = epoch
    assert "1,400 images/s" in report(folder(tmp_path / "run", *lines)).text()


def test_pictures_are_embedded_and_described(tmp_path: Path) -> None:
    run = folder(tmp_path / "run", training(loss=6.5))
    page = Page(write_report(run, views_png=PNG, neighbours_png=PNG, summary={}))
    images = [attributes for tag, attributes in page.tags if tag == "img"]
    uri = "data:image/png;base64," + base64.b64encode(PNG).decode()
    assert [image["src"] for image in images[1:]] == [uri, uri]
    assert images[0]["alt"] == "Loss by epoch, loss; at the end: 6.5"
    assert (images[0]["src"] or "").startswith("data:image/svg+xml;base64,")


def test_nothing_is_fetched_or_executed(tmp_path: Path) -> None:
    run = folder(tmp_path / "run", training(loss=6.5), knn("xmoco", 1, 50.0))
    file = write_report(run, views_png=PNG, neighbours_png=PNG, summary={})
    page = Page(file)
    assert "script" not in {tag for tag, _ in page.tags}
    for _, attributes in page.tags:
        for name in ("src", "srcset", "href"):
            assert (attributes.get(name) or "data:").startswith("data:")
    assert "url(" not in page.texts["style"][0]
    assert "default-src 'none'" in file.read_text(encoding="utf-8")


hostile = st.text(alphabet="$<>&\"'/;{}=!- aé✓\u2028", min_size=1, max_size=30)


@settings(
    max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(hostile, hostile, hostile, hostile)
def test_names_from_outside_stay_text(
    tmp_path: Path, source: str, method: str, subject: str, fact: str
) -> None:
    settings = config(source=source, method=method)
    run = folder(tmp_path / "run", knn(method, 1, 50.0), knn(subject, 0, 9.0), settings=settings)
    page = report(run, **{fact: fact})
    assert {tag for tag, _ in page.tags} == KNOWN_TAGS
    assert fact in page.texts["td"]
    assert subject in page.texts["th"]


def test_configuration_and_environment_are_shown_as_written(tmp_path: Path) -> None:
    run = folder(tmp_path / "run")
    text = '# by <b>hand</b> & "quoted"\nmethod: {name: xmoco}\n'
    (run / "config.yaml").write_text(text)
    page = report(run)
    assert text in page.texts["pre"]
    assert '{"python": "3.11"}' in page.texts["pre"]


@pytest.mark.parametrize("stem", ["imagenet", "cifar"])
def test_the_torchvision_snippet_runs_and_loads_the_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stem: str
) -> None:
    run = folder(tmp_path / "run", settings=config(backbone="resnet18", stem=stem))
    trained = torchvision.models.resnet18()
    if stem == "cifar":
        trained.conv1 = torch.nn.Conv2d(3, 64, 3, padding=1, bias=False)
    weights = {k: v for k, v in trained.state_dict().items() if not k.startswith("fc.")}
    save_file(weights, run / "backbone.safetensors")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(report(run).texts["pre"][1], names)  # the snippet, as a reader would paste it
    backbone = names["backbone"].eval()
    assert torch.equal(backbone.conv1.weight, trained.conv1.weight)
    assert backbone(torch.zeros(1, 3, 32, 32)).shape == (1, 512)


def test_a_backbone_torchvision_does_not_have_is_loaded_by_xmoco_only(tmp_path: Path) -> None:
    page = report(folder(tmp_path / "run"))
    assert "load_file" not in "".join(page.texts["pre"])
    assert "torchvision has no backbone of this shape" in page.text()


def test_weights_are_used_by_the_path_that_the_run_was_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So a snippet runs where the command did."""
    monkeypatch.chdir(tmp_path)
    Path("runs").mkdir()
    run = folder(Path("runs/o'clock"))
    grey = (0.5, 0.5, 0.5)
    card = BackboneCard("tiny", "imagenet", 64, grey, grey, "xmoco", 1, 0)
    save_backbone(build_backbone("tiny"), card, run / "backbone.safetensors")
    Image.new("RGB", (200, 150), "grey").save("cat.jpg")
    names: dict[str, Any] = {}
    exec(report(run).texts["pre"][0], names)
    assert names["features"].shape == (1, 128)


def test_a_failed_write_keeps_the_old_report_and_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = folder(tmp_path / "run")
    old = write_report(run, views_png=None, neighbours_png=None, summary={}).read_bytes()
    before = sorted(run.iterdir())

    def full_disk(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(UserError, match=r"report\.html: No space left"):
        write_report(run, views_png=None, neighbours_png=None, summary={"time": "later"})
    assert (run / "report.html").read_bytes() == old
    assert sorted(run.iterdir()) == before


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has no metrics\.jsonl"):
        write_report(tmp_path, views_png=None, neighbours_png=None, summary={})
    assert not list(tmp_path.iterdir())
