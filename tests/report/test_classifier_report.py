"""The page of a classifier: right and wrong, class by class, and its surest mistakes."""

import re
from html import unescape
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.metrics import confusion_matrix
from torch import Tensor

from xmoco.config import InputConfig
from xmoco.data.imagesets import ArrayImages
from xmoco.report import classifier
from xmoco.report.classifier import ClassRow, Verdicts, class_rows, write_classifier_report

CLASSES = ("cat", "<dog>", "fox")


def verdicts(said: list[int], labels: list[int], sure: list[float] | None = None) -> Verdicts:
    """With so much of the score, before softmax, on what is said."""
    scores = torch.zeros(len(said), len(CLASSES))
    scores[torch.arange(len(said)), said] = torch.tensor(sure or [1.0] * len(said))
    return Verdicts(scores, torch.tensor(labels), torch.arange(len(labels)), CLASSES)


def images(count: int) -> ArrayImages:
    pixels = torch.arange(count, dtype=torch.uint8)[:, None, None, None].expand(-1, 3, 8, 8)
    return ArrayImages("drawn", pixels.contiguous(), torch.zeros(count, dtype=torch.int64), CLASSES)


def test_confusion_is_that_of_scikit_learn() -> None:
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(3, (200,), generator=generator)
    scores = torch.randn(200, 3, generator=generator)
    found = Verdicts(scores, labels, torch.arange(200), CLASSES)
    expected = confusion_matrix(labels, found.said, labels=[0, 1, 2])
    np.testing.assert_array_equal(found.confusion, expected)


def test_classes_stand_with_the_weakest_first_and_what_they_are_taken_for() -> None:
    rows = class_rows(verdicts(said=[0, 0, 1, 2, 0, 0], labels=[0, 0, 0, 0, 1, 1]))
    assert rows == [
        ClassRow("<dog>", 2, 0.0, "cat (2)"),
        ClassRow("cat", 4, 50.0, "<dog> (1)"),  # of equals the first; of foxes there are none
    ]


def test_surest_mistakes_come_first() -> None:
    found = verdicts(said=[0, 1, 2, 0], labels=[1, 1, 0, 2], sure=[1.0, 9.0, 3.0, 2.0])
    rows, sure = found.mistakes()
    assert rows.tolist() == [2, 3, 0]
    expected = found.scores.double().softmax(1).amax(1)[[2, 3, 0]]
    torch.testing.assert_close(sure.double(), expected, rtol=1e-6, atol=0)


def page(
    tmp_path: Path, found: Verdicts, monkeypatch: pytest.MonkeyPatch
) -> tuple[str, list[tuple[int, list[str]]]]:
    """Its text, and of every mistake shown the grey level, which is its number, and the caption."""
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 1, "epoch": 1.0, "values": {"loss": 2.0, "learning_rate": 1.0}}\n'
        '{"step": 2, "epoch": 2.0, "values": {"loss": 1.0, "learning_rate": 0.1}}\n'
    )
    shown = list[tuple[int, list[str]]]()

    def sheet(
        pictures: list[Tensor], captions: list[list[str]], paths: list[str], columns: int
    ) -> bytes:
        lines = [[*caption, path] for caption, path in zip(captions, paths, strict=True)]
        shown.extend(zip([int(one[0, 0, 0]) for one in pictures], lines, strict=True))
        return b"sheet"

    monkeypatch.setattr(classifier, "captioned_sheet", sheet)
    report = write_classifier_report(
        tmp_path,
        "fine-tune on drawn",
        found,
        images(len(found.labels)),
        InputConfig(size=8),
        {"Backbone": "xmoco, tiny"},
    )
    return report.read_text(encoding="utf-8"), shown


def test_the_page_tells_all_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = verdicts(said=[0, 1, 0, 2], labels=[0, 1, 1, 0], sure=[9.0, 9.0, 2.0, 4.0])
    text, shown = page(tmp_path, found, monkeypatch)
    assert "Right for 50.0 % of 4 images" in text
    assert "xmoco, tiny" in text
    names = re.findall(r"<tr><td>([^<]*)</td>", text)
    assert names == ["cat", "&lt;dog&gt;"]
    assert "<dog>" not in text  # names come from anywhere
    assert "and for 50.0 % in the mean of the classes" in text
    assert shown == [
        (3, ["96 % fox", "is cat", "drawn: image 3"]),
        (2, ["79 % cat", "is <dog>", "drawn: image 2"]),
    ]
    assert (tmp_path / "mistakes.csv").read_text().splitlines() == [
        "image,label,said,probability",
        "drawn: image 3,cat,fox,0.9647",
        "drawn: image 2,<dog>,cat,0.7870",
    ]
    assert "mistakes.csv" in text
    assert text.count("<img") == 2, "the loss and the mistakes; rates are multiples here"
    assert 'alt="Loss by epoch' in text
    assert "load_classifier" not in text, "none was kept"
    (tmp_path / "classifier.safetensors").touch()
    text, _ = page(tmp_path, found, monkeypatch)
    assert f"load_classifier({str(tmp_path)!r})" in unescape(text)


def test_where_nothing_is_mistaken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text, shown = page(tmp_path, verdicts(said=[0, 1], labels=[0, 1]), monkeypatch)
    assert "There are none" in text
    assert shown == []


def test_of_many_classes_the_weakest_are_shown_and_the_others_folded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = tuple(f"class {number}" for number in range(40))
    labels = torch.arange(40)
    scores = torch.eye(40)
    scores[39] = scores[0]  # the last one is mistaken, and so the first to be shown
    text, _ = page(tmp_path, Verdicts(scores, labels, labels, names), monkeypatch)
    before, _, folded = text.partition("<summary>the other 20 classes</summary>")
    assert before.count("<tr><td>") == folded.count("<tr><td>") == 20
    assert re.findall(r"<tr><td>([^<]*)</td>", before)[0] == "class 39"
