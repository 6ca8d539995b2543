"""Folders, archives, torchvision sets and the mistakes a user can make with each."""

import gc
import io
import json
import os
import struct
import tarfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from xmoco import pretraining
from xmoco.config import DataConfig
from xmoco.data import trees
from xmoco.data.decode import UnreadableImage
from xmoco.data.layout import labels_of, split_folders, train_classes
from xmoco.data.sources import (
    ArrayImages,
    ImageSet,
    open_images,
    open_splits,
    opened_once,
    set_name,
    source_name,
)
from xmoco.data.torchvision_sets import SPLIT_ARGUMENTS
from xmoco.errors import UserError
from xmoco.evaluate import classification
from xmoco.pretraining import work_name
from xmoco.settings import load_config


def png(colour: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (4, 3), (colour, 0, 255 - colour)).save(file, "PNG")
    return file.getvalue()


def write_folder(root: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return root


def write_tar(path: Path, files: dict[str, bytes], mode: str = "w") -> Path:
    with tarfile.open(path, mode) as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path


def opened(source: Path | str, split: Any = "train", **settings: Any) -> ImageSet:
    # Not checked as a setting, which is text: a path may hold bytes that are not.
    data = DataConfig(**settings).model_copy(update={"source": str(source)})
    images = open_images(data, split)
    assert images is not None
    return images


def colours(images: ImageSet) -> list[int]:
    """The red value each image was written with."""
    return [int(images.read(index)[0, 0, 0]) for index in range(len(images))]


WITH_SPLITS = {
    "train/dog/1.png": png(1),
    "train/cat/2.png": png(2),
    "train/cat/10.PNG": png(3),
    "val/cat/9.png": png(4),
    "val/dog/8.png": png(5),
    "README.md": b"read me",
    "train/cat/notes.txt": b"text",
    "train/cat/.hidden.png": png(9),
    "train/.git/1.png": png(9),
    "__MACOSX/train/cat/._2.png": b"resource fork",
    "train/cat/._2.png": b"resource fork",
}

COMPRESSIONS = {
    "a.tar": "w",
    "a.tar.gz": "w:gz",
    "a.tgz": "w:gz",
    "a.tar.xz": "w:xz",
    "a.tar.bz2": "w:bz2",
}


@pytest.fixture(params=["folder", "wrapped folder", *COMPRESSIONS, "wrapped.tar.xz"])
def with_splits(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    if request.param.endswith("folder"):
        top = tmp_path / "photos" / ("inner/most" if request.param.startswith("wrapped") else "")
        write_folder(top, WITH_SPLITS)
        return tmp_path / "photos"
    if request.param.startswith("wrapped"):
        files = {f"./photos-1.0/{name}": content for name, content in WITH_SPLITS.items()}
        return write_tar(tmp_path / request.param, files, "w:xz")
    return write_tar(tmp_path / request.param, WITH_SPLITS, COMPRESSIONS[request.param])


def test_splits_and_classes_of_folders_and_archives(with_splits: Path) -> None:
    train, test = opened(with_splits), opened(with_splits, "test")
    assert train.classes == test.classes == ("cat", "dog")
    assert colours(train) == [3, 2, 1]  # sorted by path: cat/10.PNG, cat/2.png, dog/1.png
    assert colours(test) == [4, 5]
    assert train.labels is not None
    assert test.labels is not None
    assert train.labels.tolist() == [0, 0, 1]
    assert test.labels.tolist() == [0, 1]
    assert train.labels.dtype == torch.int64
    assert train.read(0).shape == (3, 3, 4)
    kind = "folder" if with_splits.is_dir() else "archive"
    assert train.name == f"{kind} {with_splits.name} (train)"
    assert train.where(2).endswith("train/dog/1.png")
    assert test.where(0).startswith(str(with_splits) if kind == "folder" else with_splits.name)


def test_a_class_may_be_called_train(tmp_path: Path) -> None:
    files = {f"{name}/1.png": png(1) for name in ("bus", "plane", "train")}
    images = opened(write_folder(tmp_path, files))
    assert images.classes == ("bus", "plane", "train")
    assert images.labels is not None
    assert images.labels.tolist() == [0, 1, 2]
    assert open_images(DataConfig(source=str(tmp_path)), "test") is None


def test_labels_can_be_refused(with_splits: Path) -> None:
    images = opened(with_splits, labels="none")
    assert images.labels is None
    assert images.classes is None
    assert len(images) == 3


@pytest.mark.parametrize(
    ("paths", "train", "beside"),
    [
        (["train/1.png", "val/1.png", "test/1.png"], "train/", ["val/", "test/"]),
        (["train/1.png", "test/1.png"], "train/", ["test/"]),
        (["train/1.png", "valid/x/1.png", "validation/1.png"], "train/", ["valid/", "validation/"]),
        (["train/1.png"], "train/", []),
        (["a/train/1.png", "a/test/1.png"], "a/train/", ["a/test/"]),
        (["a/b/train/1.png", "a/b/z.png"], "a/b/train/", []),
        (["a/train/cat/1.png", "a/train/cat/2.png"], "a/train/", []),
        (["a/b/1.png", "a/b/2.png"], "a/", []),
        (["a/retrain/1.png", "a/retrain/x/2.png"], "a/", []),
        (["test/1.png"], "", []),
        (["cat/1.png"], "", []),
        (["cat/1.png", "dog/1.png"], "", []),
        (["a/cat/1.png", "a/dog/1.png"], "a/", []),
        (["1.png", "a/train/1.png"], "", []),
        (["trainer/1.png", "val/1.png"], "", []),
        (["bus/1.png", "plane/1.png", "train/1.png"], "", []),
        (["a/bus/1.png", "a/test/1.png", "a/train/1.png"], "a/train/", ["a/test/"]),
        (["test/1.png", "train/1.png", "unlabeled/1.png"], "train/", ["test/"]),
        (["1.png", "a/train/1.png", "a/val/1.png"], "a/train/", ["a/val/"]),
        (["train/1.png", "unlabeled/1.png"], "", []),
        (["training/1.png"], "training/", []),
        (["Train/1.png", "Train/2.png"], "Train/", []),
        (["train/train/1.png", "train/val/1.png"], "train/train/", ["train/val/"]),
        (["Train/a/1.png", "VALIDATION/a/1.png"], "Train/", ["VALIDATION/"]),
        (["Testing/1.png", "Training/1.png", "Val/1.png"], "Training/", ["Val/", "Testing/"]),
        (["TRAIN/a/1.png", "TRAIN/b/1.png"], "TRAIN/", []),
        (["Train/1.png", "train/1.png", "val/1.png"], "train/", ["val/"]),
        (["train/1.png", "training/1.png", "val/1.png"], "train/", ["val/"]),
        (["test/1.png", "testing/1.png", "train/1.png"], "train/", ["test/"]),
        (["Train/1.png", "train/1.png"], "", []),
    ],
)
def test_split_folders(paths: list[str], train: str, beside: list[str]) -> None:
    assert split_folders(paths) == (train, beside)


@pytest.mark.parametrize(
    ("beside", "told"),
    [
        ([], None),
        (["masks/1.png", "masks/a/2.png"], "passed over beside train/ and val/: masks/ (2 images)"),
        (["cover.png"], "passed over beside train/ and val/: cover.png"),
        (
            ["d/1.png", "c/1.png", "b.png", "a/1.png", "e.png"],
            "passed over beside train/ and val/: a/ (1 image), b.png, c/ (1 image) and 2 more",
        ),
    ],
)
@pytest.mark.parametrize("wrapper", ["", "photos/"])
def test_what_lies_beside_the_splits_is_passed_over_and_told(
    tmp_path: Path, wrapper: str, beside: list[str], told: str | None
) -> None:
    splits = ("train/cat/1.png", "train/dog/2.png", "val/cat/3.png")
    write_folder(tmp_path, {f"{wrapper}{path}": png(1) for path in (*splits, *beside)})
    train, test = opened(tmp_path), opened(tmp_path, "test")
    assert (len(train), len(test), train.classes) == (2, 1, ("cat", "dog"))
    assert train.passed_over == test.passed_over == told


def test_a_cover_above_the_folder_of_splits_is_passed_over_and_told(tmp_path: Path) -> None:
    paths = ("cover.png", "photos/train/1.png", "photos/val/2.png")
    train = opened(write_folder(tmp_path, dict.fromkeys(paths, png(1))))
    assert len(train) == 1
    assert train.passed_over == "passed over beside train/ and val/: cover.png"


def test_splits_in_capitals(tmp_path: Path) -> None:
    splits = ("Training", "Testing", "VALIDATION")
    write_folder(tmp_path, {f"{s}/{c}/1.png": png(1) for s in splits for c in "ab"})
    test = opened(tmp_path, "test")
    assert (test.name, test.classes) == (f"folder {tmp_path.name} (VALIDATION)", ("a", "b"))
    splits = open_splits(DataConfig(source=str(tmp_path)))
    assert list(splits) == ["train", "validation", "test"]
    assert all(len(images) == 2 for images in splits.values())


@pytest.mark.parametrize(
    ("paths", "rule", "classes"),
    [
        (["a/1.png", "b/1.png"], "auto", ("a", "b")),
        (["b/1.png", "a/1.png", "a/2.png"], "auto", ("a", "b")),
        (["a/1.png", "a/2.png"], "auto", None),
        (["1.png", "a/1.png", "b/1.png"], "auto", None),
        (["a/1.png", "b/c/1.png"], "auto", None),
        (["a/1.png", "b/c/1.png"], "folders", ("a", "b")),
        (["a/1.png"], "folders", ("a",)),
        (["a/1.png", "b/1.png"], "none", None),
    ],
)
def test_classes(paths: list[str], rule: Any, classes: tuple[str, ...] | None) -> None:
    assert train_classes(paths, rule) == classes


names = st.text("abc", min_size=1, max_size=3)


@given(st.lists(st.builds("{}/{}.png".format, names, names), min_size=1, unique=True))
def test_labels_name_the_first_folder(paths: list[str]) -> None:
    classes = train_classes(paths, "folders")
    labels = labels_of(paths, classes, "folders", "training")
    assert classes is not None
    assert labels is not None
    assert [classes[label] for label in labels] == [path.split("/")[0] for path in paths]
    assert list(classes) == sorted({path.split("/")[0] for path in paths})


def test_a_test_split_without_class_folders_has_no_labels(tmp_path: Path) -> None:
    files = {"train/a/1.png": png(1), "train/b/2.png": png(2), "test/3.png": png(3)}
    assert opened(write_folder(tmp_path, files), "test").labels is None


def test_a_test_class_that_training_does_not_have(tmp_path: Path) -> None:
    files = {"train/a/1.png": png(1), "train/zebra/2.png": png(2), "val/zebras/3.png": png(3)}
    with pytest.raises(
        UserError, match=r"^the val .* zebras \(did you mean zebra\?\) .*\.$"
    ) as error:
        opened(write_folder(tmp_path, files), "test")
    assert "data.labels=none" in str(error.value)


def test_folders_as_classes_refuse_an_image_at_the_top(tmp_path: Path) -> None:
    files = {"a/1.png": png(1), "b/2.png": png(2), "stray.png": png(3)}
    write_folder(tmp_path, files)
    assert opened(tmp_path).labels is None
    with pytest.raises(UserError, match=r"stray\.png .*\.$"):
        opened(tmp_path, labels="folders")


def test_no_test_split(tmp_path: Path) -> None:
    write_folder(tmp_path, {"a/1.png": png(1), "b/deep/er/2.png": png(2)})
    assert opened(tmp_path).name == f"folder {tmp_path.name}"
    assert len(opened(tmp_path)) == 2
    assert open_images(DataConfig(source=str(tmp_path)), "test") is None


def test_links_are_followed_but_not_in_circles(tmp_path: Path) -> None:
    write_folder(tmp_path / "elsewhere", {"1.png": png(1)})
    write_folder(tmp_path / "set", {"a/2.png": png(2)})
    (tmp_path / "set" / "b").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "set" / "a" / "round").symlink_to(tmp_path / "set")
    assert colours(opened(tmp_path / "set")) == [2, 1]


def test_a_link_to_itself_leads_nowhere(tmp_path: Path) -> None:
    write_folder(tmp_path, {"1.png": png(1)})
    for name in ("2.png", "round"):
        (tmp_path / name).symlink_to(name)
    images = opened(tmp_path)
    assert len(images) == 2
    with pytest.raises(UnreadableImage, match="Too many levels of symbolic links"):
        images.read(1)


def test_a_single_image_is_no_source(tmp_path: Path) -> None:
    file = write_folder(tmp_path, {"a.JPG": png(1)}) / "a.JPG"
    with pytest.raises(UserError, match=r"a\.JPG is a single image: give a folder or an archive"):
        opened(file)


def test_broken_files_are_unreadable_not_fatal(tmp_path: Path) -> None:
    write_folder(tmp_path, {"1.png": b"nothing", "3.png": png(3)})
    (tmp_path / "2.png").symlink_to(tmp_path / "gone")
    images = opened(tmp_path)
    assert len(images) == 3
    with pytest.raises(UnreadableImage, match="no image"):
        images.read(0)
    with pytest.raises(UnreadableImage, match="No such file"):
        images.read(1)


ODD_NAMES = {
    b"caf\xe9": r"caf\xe9",
    b"\xff": r"\xff",
    b"two\nlines\ttab": r"two\nlines\ttab",
    b"\x1b[31m": r"\x1b[31m",
    "a\u2028b\x85".encode(): r"a\u2028b\x85",
    "Фото 写真 📷".encode(): "Фото 写真 📷",
}


@pytest.mark.parametrize("odd", ODD_NAMES)
@pytest.mark.parametrize("archived", [False, True])
def test_odd_names_are_read_and_told(tmp_path: Path, odd: bytes, archived: bool) -> None:
    name, shown = os.fsdecode(odd), ODD_NAMES[odd]
    files = {f"{name}/{name}.png": png(1), "zebra/2.png": png(2)}
    if archived:
        images = opened(write_tar(tmp_path / "a.tar", files))
    else:
        images = opened(write_folder(tmp_path / "set", files))
    assert sorted(colours(images)) == [1, 2]
    assert images.classes is not None
    assert sorted(images.classes) == sorted((shown, "zebra"))
    place = images.classes.index(shown)
    assert images.where(place).endswith(f"{shown}/{shown}.png")


@pytest.mark.parametrize("odd", ODD_NAMES)
def test_odd_names_of_whole_sets(tmp_path: Path, odd: bytes) -> None:
    folder = tmp_path / os.fsdecode(odd)
    folder.mkdir()
    with pytest.raises(UserError, match=r"no images in [^\n\x1b]*; looked for .*\.$"):
        opened(folder)
    write_folder(folder, {"1.png": png(1)})
    assert opened(folder).name == f"folder {ODD_NAMES[odd]}"
    (tmp_path / "no" / folder.name).parent.mkdir()
    (tmp_path / "no" / folder.name).write_bytes(b"no archive")
    with pytest.raises(UserError, match=r"^[^\n\x1b]*\.$"):
        opened(tmp_path / "no" / folder.name)


def test_short_side_reaches_the_decoder(tmp_path: Path) -> None:
    Image.new("RGB", (200, 100)).save(tmp_path / "1.png")
    assert opened(tmp_path, short_side=50).read(0).shape == (3, 50, 100)


def test_a_missing_path_names_the_nearest(tmp_path: Path) -> None:
    write_folder(tmp_path / "photos", {"1.png": png(1)})
    with pytest.raises(UserError, match=r"did you mean .*photos\?\)\.$"):
        opened(tmp_path / "fotos")
    with pytest.raises(UserError, match=r"did you mean patterns\?"):
        opened("pattern")
    with pytest.raises(UserError, match="did you mean torchvision:CIFAR10"):
        opened("torchvison:CIFAR10")
    with pytest.raises(UserError, match=r"no folder or archive ''.*\.$"):
        opened("")
    with pytest.raises(UserError, match="no folder or archive"):
        opened("x" * 5000)


def test_what_is_hidden_or_no_neighbour_is_not_offered(tmp_path: Path) -> None:
    (tmp_path / ".photos").mkdir()
    for path in (tmp_path / "photos", tmp_path / "patterns"):
        with pytest.raises(UserError, match=r"no folder or archive [^(]*$"):
            opened(path)


def test_nothing_to_see(tmp_path: Path) -> None:
    write_folder(tmp_path / "set", {"notes.txt": b"text"})
    with pytest.raises(UserError, match=r"no images .*jpg.*png"):
        opened(tmp_path / "set")
    archive = write_tar(tmp_path / "a.tar.gz", {"notes.txt": b"text"}, "w:gz")
    with pytest.raises(UserError, match=r"no images .*jpg.*png"):
        opened(archive)


@pytest.mark.parametrize("name", ["a.txt", "a.zip", "a.tar", "a.tar.gz", "empty.tar"])
def test_files_that_are_no_archive(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"" if name.startswith("empty") else b"PK nonsense " * 100)
    with pytest.raises(UserError, match=r"neither a folder nor a whole tar archive .*[^.]\.$"):
        opened(tmp_path / name)


NOISE = {f"{i}.png": os.urandom(700) for i in range(20)}


@pytest.mark.parametrize("name", COMPRESSIONS)
@pytest.mark.parametrize("share", [0.05, 0.3, 0.7])
def test_archives_that_end_too_early(tmp_path: Path, name: str, share: float) -> None:
    whole = write_tar(tmp_path / name, NOISE, COMPRESSIONS[name]).read_bytes()
    (tmp_path / name).write_bytes(whole[: int(len(whole) * share)])
    with pytest.raises(UserError, match="whole tar archive"):
        opened(tmp_path / name)


def test_archives_cut_between_two_files_or_damaged_inside(tmp_path: Path) -> None:
    whole = write_tar(tmp_path / "a.tar", NOISE).read_bytes()
    (tmp_path / "a.tar").write_bytes(whole[: 3 * (512 + 1024)])
    with pytest.raises(UserError, match="ends too early"):
        opened(tmp_path / "a.tar")
    start = 3 * (512 + 1024)
    (tmp_path / "a.tar").write_bytes(whole[:start] + b"x" * 512 + whole[start + 512 :])
    with pytest.raises(UserError, match="damaged"):
        opened(tmp_path / "a.tar")


@pytest.mark.parametrize("name", ["a.tar.gz", "a.tar.xz", "a.tar.bz2"])
def test_compressed_archives_damaged_inside(tmp_path: Path, name: str) -> None:
    damaged = bytearray(write_tar(tmp_path / name, NOISE, COMPRESSIONS[name]).read_bytes())
    damaged[len(damaged) // 2] ^= 255
    (tmp_path / name).write_bytes(damaged)
    with pytest.raises(UserError, match="whole tar archive"):
        opened(tmp_path / name)


def test_hard_links_and_second_versions_inside_an_archive(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        for name, content in (("1.png", png(1)), ("2.png", png(2)), ("1.png", png(7))):
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
        link = tarfile.TarInfo("3.png")
        link.type, link.linkname = tarfile.LNKTYPE, "2.png"
        archive.addfile(link)
    assert colours(opened(tmp_path / "a.tar")) == [7, 2, 2]


def test_two_splits_share_one_decompression(tmp_path: Path, monkeypatch: Any) -> None:
    archive = write_tar(tmp_path / "a.tar.xz", WITH_SPLITS, "w:xz")
    decompressions: list[Path] = []
    real = trees.TarTree.__init__

    def counted(self: trees.TarTree, path: Path) -> None:
        decompressions.append(path)
        real(self, path)

    monkeypatch.setattr(trees.TarTree, "__init__", counted)
    train, test = opened(archive), opened(archive, "test")
    assert len(decompressions) == 1
    write_tar(archive, {"1.png": png(1)}, "w:xz")
    assert len(opened(archive)) == 1  # a changed file is read anew
    del train, test
    gc.collect()
    assert not trees._open_archives  # and nothing stays in memory for ever


def test_a_plain_tar_closes_its_descriptor(tmp_path: Path, monkeypatch: Any) -> None:
    archive = write_tar(tmp_path / "a.tar", WITH_SPLITS)
    closed: list[int] = []
    real_close = os.close
    monkeypatch.setattr(os, "close", lambda descriptor: closed.append(descriptor))
    images = opened(archive)
    assert colours(images) == [3, 2, 1]
    del images
    gc.collect()
    assert len(closed) == 1
    real_close(closed[0])


def test_many_threads_read_one_archive(tmp_path: Path) -> None:
    images = opened(write_tar(tmp_path / "a.tar", {f"{i:03}.png": png(i) for i in range(200)}))
    barrier = threading.Barrier(8)

    def read_all(first: int) -> list[int]:
        barrier.wait()
        return [int(images.read((first + i) % 200)[0, 0, 0]) for i in range(200)]

    with ThreadPoolExecutor(8) as pool:
        for first, seen in enumerate(pool.map(read_all, range(8))):
            assert seen == [(first + i) % 200 for i in range(200)]


def test_patterns_are_the_default() -> None:
    images = open_images(DataConfig(), "test")
    assert isinstance(images, ArrayImages)
    assert images.pixels.shape[1:] == (3, 32, 32)
    assert images.labels is not None
    assert torch.equal(images.read(5), images.pixels[5])
    assert opened("patterns", labels="none").labels is None


def test_array_images_tell_where() -> None:
    images = ArrayImages("some", torch.zeros(3, 3, 2, 2, dtype=torch.uint8))
    assert images.where(2) == "some: image 2"
    assert images.shown.tolist() == [0, 1, 2]


# torchvision sets, each as it lies on disk, in miniature.


def write_idx(path: Path, values: np.ndarray[Any, Any]) -> None:
    header = struct.pack(">BBBB", 0, 0, 8, values.ndim) + struct.pack(
        f">{values.ndim}I", *values.shape
    )
    path.write_bytes(header + values.astype(np.uint8).tobytes())


def test_grey_arrays_become_rgb(tmp_path: Path) -> None:
    raw = tmp_path / "FashionMNIST" / "raw"
    raw.mkdir(parents=True)
    digits = np.arange(3 * 28 * 28).reshape(3, 28, 28) % 256
    for part, count in (("train", 3), ("t10k", 2)):
        write_idx(raw / f"{part}-images-idx3-ubyte", digits[:count])
        write_idx(raw / f"{part}-labels-idx1-ubyte", np.array([7, 0, 9])[:count])
    train = opened("torchvision:FashionMNIST", root=str(tmp_path))
    assert isinstance(train, ArrayImages)
    assert torch.equal(train.pixels, torch.from_numpy(digits).byte()[:, None].expand(-1, 3, -1, -1))
    assert train.labels is not None
    assert train.labels.tolist() == [7, 0, 9]
    assert train.classes is not None
    assert train.classes[7] == "Sneaker"
    assert train.name == "torchvision FashionMNIST (train)"
    assert len(opened("torchvision:FashionMNIST", "test", root=str(tmp_path))) == 2
    assert opened("torchvision:FashionMNIST", root=str(tmp_path), labels="none").labels is None


def test_cifar_keeps_its_pixels(tmp_path: Path, monkeypatch: Any) -> None:
    from torchvision import datasets

    values = np.random.default_rng(0).integers(0, 256, (4, 3, 32, 32), np.uint8)

    class SmallCIFAR10(datasets.CIFAR10):
        def __init__(self, *_: Any, **__: Any) -> None:
            self.data = values.transpose(0, 2, 3, 1)
            self.targets = [1, 0, 1, 1]
            self.classes = ["plane", "car"]

    monkeypatch.setattr(datasets, "CIFAR10", SmallCIFAR10)
    images = opened("torchvision:CIFAR10", root=str(tmp_path))
    assert isinstance(images, ArrayImages)
    assert torch.equal(images.pixels, torch.from_numpy(values))
    assert images.classes == ("plane", "car")


def write_stl10(root: Path, monkeypatch: Any) -> np.ndarray[Any, Any]:
    from torchvision import datasets

    monkeypatch.setattr(datasets.STL10, "_check_integrity", lambda _: True)
    pixels = np.random.default_rng(0).integers(0, 256, (5, 3, 96, 96), np.uint8)
    folder = root / "stl10_binary"
    folder.mkdir()
    (folder / "class_names.txt").write_text("airplane\nbird\n")
    for name, part in (("train", pixels[:2]), ("unlabeled", pixels[2:]), ("test", pixels[:1])):
        (folder / f"{name}_X.bin").write_bytes(part.transpose(0, 1, 3, 2).tobytes())
        (folder / f"{name}_y.bin").write_bytes(bytes([1, 2][: len(part)]))
    return pixels


def test_stl10_trains_on_all_images_or_on_the_labelled(tmp_path: Path, monkeypatch: Any) -> None:
    pixels = write_stl10(tmp_path, monkeypatch)
    everything = opened("torchvision:STL10", root=str(tmp_path))
    assert isinstance(everything, ArrayImages)
    assert torch.equal(everything.pixels, torch.from_numpy(pixels))
    assert everything.labels is None
    assert everything.classes is None
    labelled = opened("torchvision:STL10", root=str(tmp_path), labels="folders")
    assert labelled.labels is not None
    assert labelled.labels.tolist() == [0, 1]
    assert opened("torchvision:STL10", "test", root=str(tmp_path)).classes == ("airplane", "bird")


def test_sets_of_files(tmp_path: Path) -> None:
    """Food101, DTD, FGVCAircraft, OxfordIIITPet and Imagenette, two images each."""
    write_folder(
        tmp_path,
        {
            "food-101/meta/train.json": json.dumps({"b": ["b/1"], "a": ["a/2"]}).encode(),
            "food-101/images/b/1.jpg": png(1),
            "food-101/images/a/2.jpg": png(2),
            "dtd/dtd/labels/train1.txt": b"b/1.jpg\na/2.jpg\n",
            "dtd/dtd/images/b/1.jpg": png(1),
            "dtd/dtd/images/a/2.jpg": png(2),
            "fgvc-aircraft-2013b/data/variants.txt": b"a\nb\n",
            "fgvc-aircraft-2013b/data/images_variant_trainval.txt": b"1 b\n2 a\n",
            "fgvc-aircraft-2013b/data/images/1.jpg": png(1),
            "fgvc-aircraft-2013b/data/images/2.jpg": png(2),
            "oxford-iiit-pet/annotations/trainval.txt": b"b_1 2 1 1\na_2 1 1 1\n",
            "oxford-iiit-pet/images/b_1.jpg": png(1),
            "oxford-iiit-pet/images/a_2.jpg": png(2),
            "imagenette2/train/n01440764/1.JPEG": png(1),
            "imagenette2/train/n02102040/2.JPEG": png(2),
        },
    )
    for wnid in (tmp_path / "imagenette2/train").iterdir():
        (tmp_path / "imagenette2/val" / wnid.name).mkdir(parents=True)
    for name in ("Food101", "DTD", "FGVCAircraft", "OxfordIIITPet", "Imagenette"):
        images = opened(f"torchvision:{name}", root=str(tmp_path))
        assert sorted(colours(images)) == [1, 2], name
        assert images.labels is not None
        assert images.classes is not None
        named = {images.classes[label] for label in images.labels}
        assert len(named) == 2, name
        for index, label in enumerate(images.labels):
            folder = Path(images.where(index))
            if name in ("Food101", "DTD"):
                assert images.classes[label] == folder.parent.name
            assert folder.is_file()


def test_every_set_has_both_splits_in_torchvision() -> None:
    import inspect

    from torchvision import datasets

    for name, splits in SPLIT_ARGUMENTS.items():
        known = inspect.signature(getattr(datasets, name)).parameters
        for arguments in splits.values():
            assert set(arguments) <= set(known), name


def test_missing_torchvision_sets_ask_for_a_download(tmp_path: Path) -> None:
    for name in SPLIT_ARGUMENTS:
        remedy = "can no longer be downloaded" if name == "StanfordCars" else r"download=true"
        with pytest.raises(UserError, match=rf"{remedy}.*\.$"):
            opened(f"torchvision:{name}", root=str(tmp_path))
    assert not any(tmp_path.iterdir())  # looking leaves nothing behind


def test_downloads_only_when_asked_and_tells_when_they_fail(
    tmp_path: Path, monkeypatch: Any
) -> None:
    from torchvision import datasets

    def fails(self: Any) -> None:
        raise OSError("no network")

    monkeypatch.setattr(datasets.CIFAR10, "download", fails)
    with pytest.raises(UserError, match=r"cannot be downloaded: no network\.$"):
        opened("torchvision:CIFAR10", root=str(tmp_path), download=True)


def test_sets_that_need_another_package_say_so(tmp_path: Path, monkeypatch: Any) -> None:
    from torchvision import datasets

    def needs_scipy(root: str, **arguments: Any) -> None:
        raise ModuleNotFoundError("No module named 'scipy'", name="scipy")

    def says_it_otherwise(root: str, **arguments: Any) -> None:
        try:
            needs_scipy(root)
        except ImportError:
            raise RuntimeError("Scipy is not found.")  # noqa: B904 - as torchvision does

    monkeypatch.setattr(datasets, "SVHN", needs_scipy)
    monkeypatch.setattr(datasets, "StanfordCars", says_it_otherwise)
    for name in ("SVHN", "StanfordCars"):
        with pytest.raises(UserError, match=r"pip install scipy\.$"):
            opened(f"torchvision:{name}", root=str(tmp_path))


def test_unknown_torchvision_sets_name_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"did you mean CIFAR10\?"):
        opened("torchvision:CIFAR", root=str(tmp_path))
    with pytest.raises(UserError, match=r"known are CIFAR10, .*\.$"):
        opened("torchvision:xyz", root=str(tmp_path))


# Names


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("my.photos.tar", "my.photos"),
        ("My.Photos.TAR.XZ", "my.photos"),
        ("cifar10-q92.tar.xz", "cifar10-q92"),
        ("pets.tar.gz", "pets"),
        ("pets.tgz", "pets"),
        ("pets.tbz2", "pets"),
        ("v1.2", "v1.2"),
        ("tar", "tar"),
    ],
)
def test_archives_are_called_without_their_ending(file: str, name: str, tmp_path: Path) -> None:
    assert source_name(tmp_path / file) == name  # whether or not it is there
    (tmp_path / file).touch()
    assert source_name(str(tmp_path / file)) == name


@pytest.mark.parametrize("name", ["Set.v2", "photos.tar", "two words"])
def test_folders_are_called_as_they_are(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / name).mkdir()
    assert set_name(tmp_path / name) == set_name(f"{tmp_path / name}/") == name
    monkeypatch.chdir(tmp_path / name)
    assert source_name(".") == name.lower()
    monkeypatch.setenv("HOME", str(tmp_path / name))
    assert source_name("~") == name.lower()


def test_sets_known_by_name_keep_it() -> None:
    assert source_name("torchvision:CIFAR10") == "cifar10"
    assert set_name("torchvision:CIFAR10") == "CIFAR10"
    assert source_name("patterns") == "patterns"
    assert source_name("/") == "images"


def test_what_cannot_be_printed_is_escaped_in_a_name(tmp_path: Path) -> None:
    assert source_name(tmp_path / "two\nlines.tar") == r"two\nlines"


def test_training_and_evaluation_name_a_source_alike(tmp_path: Path) -> None:
    archive = str(tmp_path / "My.photos.tar")
    config = load_config("demo", settings={"source": archive})
    assert work_name(config) == "my.photos-tiny-6ep"
    for program in (pretraining, classification):
        assert vars(program)["source_name"] is source_name


def test_a_source_is_opened_once_while_that_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_folder(tmp_path / "set", {"train/1.png": png(1), "val/2.png": png(2)})
    archive = write_tar(
        tmp_path / "set.tar.xz", {"train/1.png": png(1), "val/2.png": png(2)}, "w:xz"
    )
    looked: list[str] = []

    def watched(name: str) -> None:
        original = getattr(trees, name)
        monkeypatch.setattr(trees, name, lambda *given: looked.append(name) or original(*given))

    watched("_files_below")
    watched("_decompressed")
    with opened_once(), opened_once():
        for source in (folder, archive):
            for _ in range(2):
                assert colours(opened(source)) == [1]
                assert colours(opened(source, "test")) == [2]
    assert looked == ["_files_below", "_decompressed"]
    write_folder(folder, {"train/3.png": png(3)})
    assert len(opened(folder)) == 2
    assert len(looked) == 3
