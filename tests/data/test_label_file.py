"""Images of several classes: what a label file says, and every mistake in one."""

import csv
import io
import tarfile
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from xmoco.config import DataConfig
from xmoco.data import ImageSet, open_images
from xmoco.data.label_file import LabelFile, classes_in, label_matrix, read_label_file
from xmoco.data.subset import labelled_share
from xmoco.data.transfer_sets import open_transfer_set
from xmoco.data.trees import FolderTree, Tree
from xmoco.errors import UserError

TRAIN = "image,labels\n1.png,cat;dog\nstreet/2.png,\n3.png, dog ;;\n"
VAL = "\ufeffimage,labels\r\n4.png,cat\r\n5.png,dog;cat;dog\r\n"


def files(**changes: str | bytes | None) -> dict[str, bytes]:
    """Two splits with label files, ``train`` and ``val``, which may be changed or left out."""
    images = ["train/1.png", "train/street/2.png", "train/3.png", "val/4.png", "val/5.png"]
    found = dict.fromkeys(images, b"never decoded")
    for split, text in {"train": TRAIN, "val": VAL, **changes}.items():
        if text is not None:
            found[f"{split}/labels.csv"] = text if isinstance(text, bytes) else text.encode()
    return found


def written(root: Path, content: dict[str, bytes], kind: str = "folder") -> Path:
    if kind == "folder":
        for name, data in content.items():
            path = root / "set" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        return root / "set"
    path = root / f"set.{kind}"
    with tarfile.open(path, "w" if kind == "tar" else "w:gz") as archive:
        for name, data in content.items():
            member = tarfile.TarInfo(f"./wrapped/{name}")
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return path


def opened(source: Path, split: Any = "train", **settings: Any) -> ImageSet:
    images = open_images(DataConfig(source=str(source), **settings), split)
    assert images is not None
    return images


@pytest.mark.parametrize("kind", ["folder", "tar", "tar.gz"])
def test_labels_of_folders_and_archives(tmp_path: Path, kind: str) -> None:
    source = written(tmp_path, files(), kind)
    train, val = opened(source), opened(source, "test")
    assert train.classes == val.classes == ("cat", "dog")
    assert train.multi_label
    assert train.labels is not None
    assert val.labels is not None
    assert train.labels.dtype == torch.bool
    assert [Path(train.where(i)).name for i in range(3)] == ["1.png", "3.png", "2.png"]
    assert train.labels.int().tolist() == [[1, 1], [0, 1], [0, 0]]
    assert val.labels.int().tolist() == [[1, 0], [1, 1]]


def test_other_label_rules_do_not_look_at_the_file(tmp_path: Path) -> None:
    content = {"a/1.png": b"", "b/2.png": b"", "labels.csv": b"id,breed\n1,pug\n"}
    source = written(tmp_path, content)
    by_folders = opened(source, labels="folders")
    assert by_folders.classes == ("a", "b")
    assert not by_folders.multi_label
    assert opened(source, labels="none").labels is None
    with pytest.raises(UserError, match=r"labels\.csv must begin"):
        opened(source)


def test_a_split_without_the_file_has_no_labels(tmp_path: Path) -> None:
    source = written(tmp_path, files(val=None))
    assert opened(source, "test").labels is None
    with pytest.raises(UserError, match=r"\(val\) has no labels: .*labels\.csv.*\.$"):
        open_transfer_set(str(source))


ONE_FOR_ALL = "image,labels\ntrain/1.png,cat\ntrain/street/2.png,dog;cat\ntrain/3.png,\n"


def test_a_file_around_the_splits_tells_the_labels_of_all(tmp_path: Path) -> None:
    text = f"{ONE_FOR_ALL}val/4.png,dog\nval/5.png,\nmasks/1.png,sky\n".encode()
    source = written(tmp_path, files(train=None, val=None) | {"labels.csv": text})
    train, val = opened(source), opened(source, "test")
    assert train.classes == val.classes == ("cat", "dog")
    assert train.labels is not None
    assert val.labels is not None
    assert train.labels.int().tolist() == [[1, 0], [0, 0], [1, 1]]
    assert val.labels.int().tolist() == [[0, 1], [0, 0]]
    (source / "labels.csv").write_text(ONE_FOR_ALL)
    with pytest.raises(UserError, match=r"set/labels\.csv has no row for val/4\.png; "):
        opened(source, "test")
    (source / "labels.csv").write_text(f"{ONE_FOR_ALL}train/l.png,\n")
    with pytest.raises(UserError, match=r"set/labels\.csv names an image train/l\.png that is not"):
        opened(source)


@pytest.mark.parametrize("folder", ["images/", "images/all/", "Train/", "training/"])
def test_a_file_around_folders_that_wrap_all_images_is_not_passed_by(
    tmp_path: Path, folder: str
) -> None:
    images = {f"{folder}a/1.png": b"", f"{folder}b/2.png": b""}
    for around in ("", folder):
        inside = folder.removeprefix(around)
        text = f"image,labels\n{inside}a/1.png,cat;dog\n{inside}b/2.png,cat\n".encode()
        source = written(tmp_path / (around or "top"), images | {f"{around}labels.csv": text})
        found = opened(source)
        assert found.classes == ("cat", "dog")
        assert found.labels is not None
        assert found.labels.int().tolist() == [[1, 1], [1, 0]]


MISTAKES: dict[str, tuple[str | bytes, str]] = {
    "a name that is not there": ("image,labels\n1.png,cat\nl.png,dog\n", "an image l.png that is"),
    "an image without a row": ("image,labels\n1.png,cat\n3.png,dog\n", "no row for street/2.png"),
    "another header": (TRAIN.replace("image,", "file,"), r"'image,labels', .* 'file,labels'"),
    "nothing": ("", "'image,labels', but begins with nothing"),
    "two rows": (TRAIN + "3.png,cat\n", "two rows for 3.png"),
    "no labels": ("image,labels\n1.png,\nstreet/2.png,;\n3.png,\n", "no labels at all"),
    "no rows": ("image,labels\n", "no labels at all"),
    "a comma too many": (TRAIN + "4.png,cat,dog\n", "'4.png,cat,dog' must have"),
    "a comma too few": (TRAIN + "4.png\n", "'4.png' must have"),
    "an open quote": (TRAIN + '4.png,"cat\n', "comma-separated"),
    "Latin-1": (TRAIN.replace("dog", "chêne").encode("latin-1"), "not UTF-8"),
    "UTF-16": (TRAIN.encode("utf-16"), "not UTF-8"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.parametrize("kind", ["folder", "tar"])
def test_mistakes(tmp_path: Path, mistake: str, kind: str) -> None:
    text, message = MISTAKES[mistake]
    source = written(tmp_path, files(train=text), kind)
    with pytest.raises(UserError, match=rf"^[^\n]*train/labels\.csv[^\n]*{message}[^\n]*\.$"):
        opened(source)


def test_a_label_that_training_does_not_have_names_the_nearest(tmp_path: Path) -> None:
    source = written(tmp_path, files(val=VAL.replace("dog", "dgo")))
    assert len(opened(source)) == 3
    with pytest.raises(UserError, match=r"val/labels\.csv .* dgo \(did you mean dog\?\) .*\.$"):
        opened(source, "test")


def test_a_file_that_cannot_be_read(tmp_path: Path, monkeypatch: Any) -> None:
    source = written(tmp_path, files())

    def refused(self: FolderTree, path: str) -> bytes:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(FolderTree, "read", refused)
    with pytest.raises(UserError, match=r"cannot read .*labels\.csv: Permission denied\.$"):
        opened(source)


def test_no_share_of_several_labels(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"several classes.*\.$"):
        labelled_share(opened(written(tmp_path, files())), 0.5)


class OneFile(Tree):
    """A tree of nothing but a label file."""

    def __init__(self, content: bytes) -> None:
        self._content = content

    def files(self, endings: Collection[str]) -> list[str]:  # noqa: ARG002
        return []

    def holds(self, path: str) -> bool:
        return path == "labels.csv"

    def read(self, path: str, largest: int = 2**20) -> bytes:  # noqa: ARG002
        assert self.holds(path)
        return self._content

    def where(self, path: str) -> str:
        return path


# What may be in a name, commas, quotes and line ends included; labels have no spaces at their ends.
text = st.text(st.characters(exclude_characters="\0", codec="utf-8"), min_size=1, max_size=8)
label = text.map(lambda name: name.replace(";", "").strip()).filter(bool)


@given(st.dictionaries(text, st.frozensets(label, max_size=4), min_size=1))
def test_what_is_written_is_read(labels: dict[str, frozenset[str]]) -> None:
    file = io.StringIO()
    csv.writer(file).writerows(
        [("image", "labels"), *((image, ";".join(names)) for image, names in labels.items())]
    )
    tree = OneFile(file.getvalue().encode())
    found = read_label_file(tree, "")
    assert found == LabelFile("labels.csv", "", labels)
    if not any(labels.values()):
        return
    classes = classes_in(found)
    matrix = label_matrix(found, list(labels), classes)
    assert [
        frozenset(name for name, true in zip(classes, row, strict=True) if true) for row in matrix
    ] == list(labels.values())
