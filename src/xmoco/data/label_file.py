"""Labels of images that may show several things at once, from a file in the folder of each split.

The file is called ``labels.csv``, in UTF-8, and looks like this::

    image,labels
    2007_000027.jpg,person
    street/0012.jpg,car;person
    sky.jpg,

Images are named relative to the split's folder. Every image has a row; an image may be of no class
at all. The classes are the labels of the training split, in the order of their names.
"""

import csv
import io
from collections.abc import Mapping

import torch
from torch import Tensor

from xmoco.data.trees import Tree
from xmoco.errors import UserError, nearest
from xmoco.text import printable

LABEL_FILE = "labels.csv"
HEADER = ["image", "labels"]
SEPARATOR = ";"

LabelsByImage = Mapping[str, frozenset[str]]


def read_label_file(tree: Tree, folder: str) -> LabelsByImage | None:
    """The labels of each image that the file in ``folder`` names; none if there is no file."""
    path = folder + LABEL_FILE
    if not tree.holds(path):
        return None
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


def classes_in(labels: LabelsByImage, where: str) -> tuple[str, ...]:
    """All labels there are, in the order of their names."""
    classes = tuple(sorted(frozenset().union(*labels.values())))
    if not classes:
        raise UserError(f"{where} has no labels at all: no row has anything after the comma.")
    return classes


def label_matrix(
    labels: LabelsByImage, images: list[str], classes: tuple[str, ...], where: str
) -> Tensor:
    """bool (images, classes): which image is of which class. ``images`` are all those there are."""
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
