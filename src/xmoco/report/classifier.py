"""``report.html`` of a classifier: how often it is right, class by class, and what it mistakes."""

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from torch import Tensor

from xmoco.config import InputConfig
from xmoco.data import ImageSet
from xmoco.evaluate.metrics import mean_per_class
from xmoco.files import write_whole
from xmoco.nn.classifier_files import FILE
from xmoco.report.history import read_history
from xmoco.report.page import curves, details, read_text, sheet, table, write_page
from xmoco.report.panels import panels
from xmoco.report.pictures import central_pictures
from xmoco.report.sheets import captioned_sheet

MISTAKES = 24
MISTAKES_FILE = "mistakes.csv"
COLUMNS = 8
WEAKEST = 20
"""Classes that are shown at once; all are, of a few more."""
CURVES = ("Loss", "Speed", "Time spent waiting for data")
"""Rates are of head and backbone, and what is logged is what both are multiplied with."""
NONE = "–"


@dataclass(frozen=True)
class Verdicts:
    """What a classifier says of labelled images."""

    scores: Tensor
    """(images, classes)"""
    labels: Tensor
    places: Tensor
    """Where in their set the images stand, some of which may have been unreadable."""
    classes: Sequence[str]

    @property
    def said(self) -> Tensor:
        return self.scores.argmax(dim=1)

    @property
    def confusion(self) -> Tensor:
        """How many images of each class (row) it takes for each (column)."""
        count = len(self.classes)
        places = self.labels * count + self.said
        return places.bincount(minlength=count**2).view(count, count)

    def mistakes(self) -> tuple[Tensor, Tensor]:
        """Images of which it is wrong, those first of which it is surest; and how sure."""
        sure = self.scores.softmax(dim=1).amax(dim=1)
        wrong = (self.said != self.labels).nonzero().flatten()
        order = sure[wrong].argsort(descending=True, stable=True)
        return wrong[order], sure[wrong[order]]


@dataclass(frozen=True)
class ClassRow:
    """How a class is recognised."""

    name: str
    images: int
    right: float  # percent
    taken_for: str | None
    """The class that it is taken for most often, and how often."""


def class_rows(verdicts: Verdicts) -> list[ClassRow]:
    """The classes of which there are images, the weakest first."""
    confusion = verdicts.confusion
    rows = []
    for place, name in enumerate(verdicts.classes):
        images, right = int(confusion[place].sum()), int(confusion[place, place])
        if not images:
            continue
        others = confusion[place].clone()
        others[place] = 0
        most = int(others.argmax())
        taken = f"{verdicts.classes[most]} ({int(others[most]):,})" if others[most] else None
        rows.append(ClassRow(name, images, 100 * right / images, taken))
    return sorted(rows, key=lambda row: row.right)


def write_classifier_report(
    run: Path,
    title: str,
    verdicts: Verdicts,
    images: ImageSet,
    input: InputConfig,
    facts: Mapping[str, str],
) -> Path:
    """``images`` are the set of the verdicts; ``facts`` tell how the classifier was made."""
    right = 100 * float((verdicts.said == verdicts.labels).double().mean())
    per_class = mean_per_class(verdicts.scores, verdicts.labels)
    _write_mistakes(verdicts, images, run / MISTAKES_FILE)
    sections = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="soft">run {escape(run.resolve().name)}</p>',
        f'<p class="lead">Right for {right:.1f} % of {len(verdicts.labels):,} images that training '
        f"did not see, and for {per_class:.1f} % in the mean of the classes.</p>",
        f"<h2>The classifier</h2>{table(facts.items())}",
        _by_class(class_rows(verdicts)),
        _mistakes(verdicts, images, input),
        curves(panel for panel in panels(read_history(run)) if panel.title in CURVES),
        _how_to_load(run),
        details("Configuration", read_text(run / "config.yaml")),
        details("Environment", read_text(run / "environment.json")),
    ]
    return write_page(run, title, sections)


def _by_class(rows: Sequence[ClassRow]) -> str:
    first = rows if len(rows) <= WEAKEST + 5 else rows[:WEAKEST]
    rest = rows[len(first) :]
    more = (
        f"<details><summary>the other {len(rest):,} classes</summary>{_class_table(rest)}</details>"
        if rest
        else ""
    )
    about = "Share of each class's images that are recognised, the weakest class first."
    return f"<h2>Class by class</h2><p>{about}</p>{_class_table(first)}{more}"


def _class_table(rows: Sequence[ClassRow]) -> str:
    body = "".join(
        f"<tr><td>{escape(row.name)}</td>"
        f'<td class="number">{row.images:,}</td>'
        f'<td class="number">{row.right:.1f} %</td>'
        f'<td class="bar"><div><span style="width: {row.right:.1f}%"></span></div></td>'
        f"<td>{escape(row.taken_for or NONE)}</td></tr>"
        for row in rows
    )
    head = (
        '<th>class</th><th class="number">images</th><th class="number">right</th><th></th>'
        "<th>most often taken for</th>"
    )
    return f'<table class="classes"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'


def _mistakes(verdicts: Verdicts, images: ImageSet, input: InputConfig) -> str:
    rows, sure = (found[:MISTAKES] for found in verdicts.mistakes())
    if not len(rows):
        return "<h2>Surest mistakes</h2><p>There are none: all images were recognised.</p>"
    captions = [
        [f"{100 * share:.0f} % {verdicts.classes[said]}", f"is {verdicts.classes[label]}"]
        for said, share, label in zip(
            verdicts.said[rows].tolist(),
            sure.tolist(),
            verdicts.labels[rows].tolist(),
            strict=True,
        )
    ]
    places = verdicts.places[rows]
    paths = ["/".join(images.where(place).split("/")[-2:]) for place in places.tolist()]
    pictures, _ = central_pictures(images, places, input)
    about = (
        "The images of which the classifier was surest and wrong: the probability that it gave to "
        "which class, the class by the label, and the file. Wrong labels are often among them. All "
        f"mistakes are listed in {MISTAKES_FILE}."
    )
    return sheet("Surest mistakes", about, captioned_sheet([*pictures], captions, paths, COLUMNS))


def _write_mistakes(verdicts: Verdicts, images: ImageSet, path: Path) -> None:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["image", "label", "said", "probability"])
    rows, sure = verdicts.mistakes()
    found = (of[rows].tolist() for of in (verdicts.places, verdicts.labels, verdicts.said))
    for place, label, said, share in zip(*found, sure.tolist(), strict=True):
        names = (verdicts.classes[label], verdicts.classes[said])
        writer.writerow([images.where(place), *names, f"{share:.4f}"])
    write_whole(path, text.getvalue().encode(errors="surrogateescape"))  # as on the disk


def _how_to_load(run: Path) -> str:
    if not (run / FILE).is_file():  # not every backbone can be kept
        return ""
    folder = str(run)
    code = f"""import torch
import xmoco
from PIL import Image

classifier = xmoco.load_classifier({folder!r})
transform = xmoco.load_transform({folder!r})  # resize, centre crop and normalise
with torch.no_grad():
    probabilities = classifier(transform(Image.open("cat.jpg"))[None]).softmax(1)[0]
print(classifier.classes[probabilities.argmax()])"""
    return f"<h2>Using the classifier</h2><pre>{escape(code)}</pre>"
