"""What all evaluations share."""

from pathlib import Path

from helpers import make_images
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
