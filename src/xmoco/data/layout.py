"""What the paths of images say: which are for training, which for testing, and their classes.

- Folders that merely wrap the others are passed through. Beneath them, a folder ``train`` (or
  ``training``) makes the training split, and the first there is of ``val``, ``valid``,
  ``validation`` and ``test`` (or ``testing``) the test split, in small letters or capitals. What
  else lies beside these, masks perhaps, is passed over.
- Without a test split, ``train`` is a split only where nothing but images lies beside it: a class
  of vehicles may be called so. Without ``train``, everything is for training.
- If all images lie directly in two or more subfolders of the split, these are the classes. (Or a
  file tells the labels: see ``label_file``.)

Paths are relative, with ``/``; folders end in ``/``.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from posixpath import commonpath, dirname
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from xmoco.errors import UserError, nearest
from xmoco.text import printable

TRAIN_FOLDER = "train"
TEST_FOLDERS = ("val", "valid", "validation", "test")
SAME_MEANING = {"training": "train", "testing": "test"}

MOST_NAMED = 3
"""Things that are passed over."""

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


class SplitFolders(NamedTuple):
    """Which folders are splits."""

    train: str
    beside: list[str]
    """Those of ``TEST_FOLDERS``, in that order."""

    def passed_over(self, paths: list[str]) -> str | None:
        """What lies in none of them, for a person; none if nothing does."""
        splits = self.train, *self.beside
        top = self.train[: self.train.rstrip("/").rfind("/") + 1]
        others = Counter(_part_of(path, top) for path in paths if not path.startswith(splits))
        return passed_over(others, [split.removeprefix(top) for split in splits])


def split_folders(paths: list[str]) -> SplitFolders:
    # What the first and the last path in the order of names share, all in between share too.
    top = f"{commonpath([dirname(min(paths)), dirname(max(paths))])}/".lstrip("/")
    splits = _train_and_tests(paths, top)
    if splits is not None:
        return splits
    parts = top.split("/")[:-1]
    trains = [number for number, part in enumerate(parts) if split_of(part) == TRAIN_FOLDER]
    if trains:  # there is nothing but training images
        return SplitFolders("/".join(parts[: trains[0] + 1]) + "/", [])
    folders = [*_folders_in(paths, top)]
    if list(map(split_of, folders)) == [TRAIN_FOLDER]:
        return SplitFolders(f"{top}{folders[0]}/", [])
    if any("/" not in path[len(top) :] for path in paths):  # no mere wrapper: it may be a class
        top = top[: top.rstrip("/").rfind("/") + 1]
    return SplitFolders(top, [])


def _train_and_tests(paths: list[str], top: str) -> SplitFolders | None:
    """Where both lie beside each other: in ``top``, or in a folder that has only images beside it,
    such as a cover."""
    while True:
        inside = _folders_in(paths, top)
        # Where several mean the same, that which is called as here comes last, and stays.
        in_order = sorted(inside, key=lambda name: (name == split_of(name), name))
        folders = {split: f"{top}{name}/" for name in in_order if (split := split_of(name))}
        if TRAIN_FOLDER in folders and len(folders) > 1:
            beside = [folders[split] for split in TEST_FOLDERS if split in folders]
            return SplitFolders(folders[TRAIN_FOLDER], beside)
        if len(inside) != 1:
            return None
        top += f"{inside.pop()}/"
        paths = [path for path in paths if path.startswith(top)]


def _folders_in(paths: list[str], top: str) -> set[str]:
    """The names of folders in ``top``, where all of ``paths`` lie."""
    return {path[len(top) :].partition("/")[0] for path in paths if "/" in path[len(top) :]}


def _part_of(path: str, top: str) -> str:
    """What lies in ``top``, or above it, and is or holds the image."""
    if not path.startswith(top):
        return path
    name, slash, _ = path[len(top) :].partition("/")
    return name + slash


def split_shards(names: list[str]) -> tuple[dict[str, list[int]], list[int]]:
    """Positions of shards by split, ``train`` first and then ``TEST_FOLDERS``, told by words in
    their names; and of those that are passed over. Without ``train`` and another split, all are
    for training."""
    splits: dict[str, list[int]] = {split: [] for split in (TRAIN_FOLDER, *TEST_FOLDERS)}
    others: list[int] = []
    for number, name in enumerate(names):
        words = set(map(split_of, re.split(r"[^a-z]+", name.lower())))
        found = next((positions for split, positions in splits.items() if split in words), others)
        found.append(number)
    splits = {split: positions for split, positions in splits.items() if positions}
    if TRAIN_FOLDER not in splits or len(splits) == 1:
        return {TRAIN_FOLDER: list(range(len(names)))}, []
    return splits, others


def passed_over(others: Counter[str], splits: Iterable[str]) -> str | None:
    """For a person: what lies beside splits, and how many images each holds that is a folder."""
    if not others:
        return None
    named = [
        f"{printable(name)} ({count:,} image{'s' * (count > 1)})"
        if name.endswith("/")
        else printable(name)
        for name, count in sorted(others.items())[:MOST_NAMED]
    ]
    more = f" and {len(others) - MOST_NAMED:,} more" if len(others) > MOST_NAMED else ""
    return f"passed over beside {' and '.join(splits)}: {', '.join(named)}{more}"


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


def misplaced(paths: list[str]) -> str | None:
    """Which image keeps the folders of a split from being classes, for a person; none if the
    folders do not look like classes anyway."""
    placed = [path for path in paths if path.count("/") == 1]
    others = [path for path in paths if path.count("/") != 1]
    classes = {path.partition("/")[0] for path in placed}
    if not others or len(classes) < 2 or len(others) >= len(placed):
        return None
    first = min(others)
    reason = "lies deeper than its class folder" if "/" in first else "lies in no class folder"
    more = f" (as do {len(others) - 1:,} more images out of place)" if len(others) > 1 else ""
    return f"{printable(first)} {reason}{more}"


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
