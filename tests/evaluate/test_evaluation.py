"""What all evaluations share."""

from pathlib import Path

import pytest

from helpers import make_images, two_splits
from xmoco.data import trees
from xmoco.evaluate.evaluation import EvalOptions, Listener, labelled_splits


class Heard(Listener):
    def __init__(self) -> None:
        self.sentences: list[str] = []

    def say(self, sentence: str) -> None:
        self.sentences.append(sentence)


def test_what_is_passed_over_is_told(tmp_path: Path) -> None:
    for folder in ("train", "val", "masks"):
        make_images(tmp_path / folder, each=1)
    heard = Heard()
    train, _ = labelled_splits(tmp_path, EvalOptions(), heard)
    count = len(train)
    told = f"passed over beside train/ and val/: masks/ ({count} images)"
    assert heard.sentences == [f"{train.name}: {told}."]


def test_images_are_listed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[str] = []
    listed = trees._files_below
    monkeypatch.setattr(
        trees, "_files_below", lambda top, endings: looked.append(top) or listed(top, endings)
    )
    labelled_splits(two_splits(tmp_path, each=1), EvalOptions())
    assert looked == [str(tmp_path)]
