"""What the paths of images say: which are for training, which for testing, and their classes.

- Folders that merely wrap the others are passed through. Beneath them, a folder ``train`` (or
  ``training``) makes the training split, and the first there is of ``val``, ``valid``,
  ``validation`` and ``test`` (or ``testing``) the test split, in small letters or capitals. Without
  ``train``, everything is for training; so it is where ``train`` has any other folder of images
  beside it, as a class of vehicles may be called ``train``, or another of the same meaning.
- If all images lie directly in two or more subfolders of the split, these are the classes. (Or a
  file tells the labels: see ``label_file``.)

Paths are relative, with ``/``; folders end in ``/``.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from posixpath import commonpath, dirname
from typing import Literal

import torch
from torch import Tensor

from xmoco.errors import UserError, nearest
from xmoco.text import printable

TRAIN_FOLDER = "train"
TEST_FOLDERS = ("val", "valid", "validation", "test")
SAME_MEANING = {"training": "train", "testing": "test"}

LabelRule = Literal["auto", "folders", "none"]


class UnknownClass(UserError):  # noqa: N818
    """A class that is not among those of the training images."""

    def __str__(self) -> str:
        return f"{self.args[0]} (data.labels=none pre-trains without labels)."


def unknown_class(split: str, name: str, known: Iterable[str]) -> UnknownClass:
    return UnknownClass(
        f"the {split} images have a class {name}{nearest(name, known)} that the training images do "
        "not have; rename it or remove it"
    )


@contextmanager
def labels_needed() -> Iterator[None]:
    """Where to do without labels is no way out."""
    try:
        yield
    except UnknownClass as error:
        raise UserError(f"{error.args[0]}.") from None


def split_folders(paths: list[str], *, pass_over_others: bool = False) -> tuple[str, list[str]]:
    """The folder of the training split, and those beside it of ``TEST_FOLDERS``, in that order.

    ``pass_over_others`` is for those who know that there are splits: then ``train`` is one,
    whatever else lies beside it (masks, say).
    """
    # What the first and the last path in the order of names share, all in between share too.
    top = f"{commonpath([dirname(min(paths)), dirname(max(paths))])}/".lstrip("/")
    before, train, _ = f"/{top}".partition(f"/{TRAIN_FOLDER}/")
    if train:  # there is nothing but training images
        return f"{before}{train}".removeprefix("/"), []
    inside = {path[len(top) :].partition("/")[0] for path in paths if "/" in path[len(top) :]}
    # Where several mean the same, that which is called as here comes last, and stays.
    in_order = sorted(inside, key=lambda name: (name == split_of(name), name))
    folders = {split: name for name in in_order if (split := split_of(name))}
    known = pass_over_others or len(folders) == len(inside)
    if TRAIN_FOLDER in folders and known:
        beside = [f"{top}{folders[name]}/" for name in TEST_FOLDERS if name in folders]
        return f"{top}{folders[TRAIN_FOLDER]}/", beside
    if any("/" not in path[len(top) :] for path in paths):  # no mere wrapper: it may be a class
        top = top[: top.rstrip("/").rfind("/") + 1]
    return top, []


def split_of(word: str) -> str | None:
    """The split that a folder of this name holds: ``train`` or one of ``TEST_FOLDERS``."""
    name = SAME_MEANING.get(word.lower(), word.lower())
    return name if name in (TRAIN_FOLDER, *TEST_FOLDERS) else None


def train_classes(paths: list[str], rule: LabelRule) -> tuple[str, ...] | None:
    """The classes of the training split, whose images have ``paths`` inside it."""
    folders = _folder_of_each(paths, rule)
    if folders is None:
        return None
    classes = tuple(sorted(set(folders)))
    return None if rule == "auto" and len(classes) < 2 else classes


def labels_of(
    paths: list[str], classes: tuple[str, ...] | None, rule: LabelRule, split: str
) -> Tensor | None:
    """Each image's position in ``classes``; none if the folders of this split are no classes."""
    folders = _folder_of_each(paths, rule)
    if classes is None or folders is None:
        return None
    number = {name: position for position, name in enumerate(classes)}
    unknown = sorted(set(folders) - set(number))
    if unknown:
        name = printable(unknown[0])
        raise unknown_class(split, name, map(printable, classes))
    return torch.tensor([number[name] for name in folders], dtype=torch.int64)


def _folder_of_each(paths: list[str], rule: LabelRule) -> list[str] | None:
    """The first folder of every path, where the rule takes folders for classes."""
    if rule == "none" or (rule == "auto" and any(path.count("/") != 1 for path in paths)):
        return None
    at_top = next((path for path in paths if "/" not in path), None)
    if at_top is not None:
        raise UserError(
            f"with data.labels=folders every image must lie in the folder of its class, "
            f"but {printable(at_top)} does not; move it, or set data.labels=none."
        )
    return [path.partition("/")[0] for path in paths]
