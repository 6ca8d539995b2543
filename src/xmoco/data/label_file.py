"""Labels of images that may show several things at once, from a file in the folder of each split,
or from one for all of them in a folder around these.

The file is called ``labels.csv``, in UTF-8, and looks like this::

    image,labels
    2007_000027.jpg,person
    street/0012.jpg,car;person
    sky.jpg,

Images are named relative to the file's own folder. Every image has a row; an image may be of no
class at all. The classes are the labels of the training split, in the order of their names.
"""

import csv
import io
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from xmoco.data.trees import Tree
from xmoco.errors import UserError, nearest
from xmoco.text import printable

LABEL_FILE = "labels.csv"
HEADER = ["image", "labels"]
SEPARATOR = ";"

LabelsByImage = Mapping[str, frozenset[str]]


class LabelFile(NamedTuple):
    """What a file tells of the images in a folder."""

    where: str
    """The file, for messages."""
    folder: str
    """As the names of its images begin: empty where the file lies in the folder itself."""
    labels: LabelsByImage
    """Of those images only."""


def read_label_file(tree: Tree, folder: str) -> LabelFile | None:
    """The file in ``folder`` or else the nearest around it; none if there is none."""
    around = folder
    while not tree.holds(around + LABEL_FILE):
        if not around:
            return None
        around = around[: around.rstrip("/").rfind("/") + 1]
    inside = folder.removeprefix(around)
    labels = _read(tree, around + LABEL_FILE)
    own = {image: names for image, names in labels.items() if image.startswith(inside)}
    return LabelFile(tree.where(around + LABEL_FILE), inside, own)


def _read(tree: Tree, path: str) -> LabelsByImage:
    where = tree.where(path)
    try:
        text = tree.read(path).decode("utf-8-sig")  # spreadsheets begin with a mark of byte order
        rows = [row for row in csv.reader(io.StringIO(text, newline=""), strict=True) if row]
    except OSError as error:
        raise UserError(f"cannot read {where}: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{where} is not UTF-8 text ({error.reason}); save it as UTF-8.") from error
    except csv.Error as error:
        raise UserError(f"{where} is no table of comma-separated values: {error}.") from error
    if not rows or rows[0] != HEADER:
        found = f"{printable(','.join(rows[0]))!r}" if rows else "nothing"
        raise UserError(
            f"{where} must begin with the line {','.join(HEADER)!r}, but begins with {found}; "
            "change it, or pre-train with data.labels=none."
        )
    labels: dict[str, frozenset[str]] = {}
    for row in rows[1:]:
        if len(row) != len(HEADER):
            raise UserError(
                f"{where}: the row {printable(','.join(row))!r} must have an image and its labels, "
                f"separated by {SEPARATOR!r}."
            )
        image, names = row
        if image in labels:
            raise UserError(f"{where} has two rows for {printable(image)}; keep one.")
        labels[image] = frozenset(filter(None, map(str.strip, names.split(SEPARATOR))))
    return labels


def classes_in(file: LabelFile) -> tuple[str, ...]:
    """All labels there are, in the order of their names."""
    classes = tuple(sorted(frozenset().union(*file.labels.values())))
    if not classes:
        raise UserError(f"{file.where} has no labels at all: no row has anything after the comma.")
    return classes


def label_matrix(file: LabelFile, paths: list[str], classes: tuple[str, ...]) -> Tensor:
    """bool (images, classes): which image is of which class. ``paths`` are all that there are in
    the folder that the file was read for."""
    where, labels = file.where, file.labels
    images = [file.folder + path for path in paths]
    known = set(images)
    absent = next((image for image in labels if image not in known), None)
    if absent is not None:
        raise UserError(
            f"{where} names an image {printable(absent)} that is not there; names are relative to "
            "the folder of this file."
        )
    number = {name: position for position, name in enumerate(classes)}
    rows, columns = [], []
    for row, image in enumerate(images):
        if image not in labels:
            raise UserError(
                f"{where} has no row for {printable(image)}; give it one, with nothing after the "
                "comma if it is of no class."
            )
        for label in labels[image]:
            if label not in number:
                name = printable(label)
                raise UserError(
                    f"{where} has a label {name}{nearest(name, map(printable, classes))} that the "
                    "training images do not have."
                )
            rows.append(row)
            columns.append(number[label])
    matrix = torch.zeros(len(images), len(classes), dtype=torch.bool)
    matrix[rows, columns] = True
    return matrix
