"""``xmoco classify``: pictures in; of which class each is, by a classifier trained here, out."""

import csv
import io
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from xmoco.errors import UserError
from xmoco.evaluate.evaluation import Listener, check_device
from xmoco.files import write_whole
from xmoco.nn.classifier_files import read_classifier
from xmoco.pictures import show_pictures
from xmoco.train.engine import choose_device

COLUMNS = "class", "probability"
MOST_TOLD = 10
"""Classes whose pictures are counted on the screen."""


@dataclass(frozen=True)
class Classified:
    """Pictures and the probabilities of their classes."""

    names: list[str]
    """Paths in the folder or the archive."""
    classes: tuple[str, ...]
    probabilities: NDArray[np.float32]
    """(pictures, classes)"""

    def best(self, top: int = 1) -> Iterator[list[tuple[str, float]]]:
        """Of every picture the most likely classes, the first one first."""
        check_top(top)
        order = np.argsort(-self.probabilities, axis=1, kind="stable")[:, :top]
        for row, places in zip(self.probabilities, order, strict=True):
            yield [(self.classes[place], float(row[place])) for place in places]

    def counted(self) -> str:
        """How many pictures are of which class, in words."""
        counts = Counter(best[0][0] for best in self.best()).most_common()
        told = [f"{name}: {count:,}" for name, count in counts[:MOST_TOLD]]
        more = [f"{len(counts) - MOST_TOLD} more classes"] if len(counts) > MOST_TOLD else []
        return "; ".join([*told, *more])

    def save(self, path: str | Path, top: int = 1) -> None:
        """As a table with a line for every picture."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        ranks = ["", *(f" {rank}" for rank in range(2, min(top, len(self.classes)) + 1))]
        writer.writerow(["image", *(f"{what}{r}" for r in ranks for what in COLUMNS)])
        for name, best in zip(self.names, self.best(top), strict=True):
            cells = (cell for kind, share in best for cell in (kind, f"{share:.4f}"))
            writer.writerow([name, *cells])
        write_whole(Path(path), text.getvalue().encode(errors="surrogateescape"))  # as on the disk


def classify(
    weights: str | Path,
    images: str | Path,
    *,
    device: str = "auto",
    readers: int = 8,
    listener: Listener | None = None,
) -> Classified:
    """The class of a picture, or of all in a folder of any depth or an archive.

    ``weights`` are what ``load_classifier`` takes. A picture that cannot be read is left out, and
    the listener told.
    """
    check_device(device)
    classifier, card, backbone = read_classifier(weights)
    chosen = torch.device(choose_device(device))
    names, scores = show_pictures(
        classifier.to(chosen), images, backbone.input(), chosen, readers=readers, listener=listener
    )
    return Classified(names, card.classes, scores.softmax(1).numpy())


def check_top(top: int) -> None:
    if top < 1:
        raise UserError(f"{top} classes are too few: give at least 1.")
