"""The paper's ten sets, each as it lies on disk in miniature, and sets of one's own.

No image file is written unless a test reads it, which shows that opening a set decodes nothing.
"""

import hashlib
import io
import pickle
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from xmoco.data import ArrayImages, ImageSet
from xmoco.data.subset import held_out, joined, some_of_every_class
from xmoco.data.transfer_sets import (
    TRANSFER_SETS,
    VOC_CLASSES,
    TransferSet,
    open_transfer_set,
    open_transfer_sets,
)
from xmoco.errors import UserError


def write(root: Path, files: Mapping[str, str | bytes]) -> Path:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return root


def class_by_file(images: ImageSet) -> dict[str, Any]:
    """The class, or the set of classes, of each file, by its name."""
    assert images.labels is not None
    assert images.classes is not None
    names = [Path(images.where(index)).name for index in range(len(images))]
    assert len(set(names)) == len(names)
    if images.multi_label:
        positions = [row.nonzero()[:, 0].tolist() for row in images.labels]
        return {
            name: {images.classes[position] for position in shown}
            for name, shown in zip(names, positions, strict=True)
        }
    return {
        name: images.classes[label]
        for name, label in zip(names, images.labels.tolist(), strict=True)
    }


def lowest_ranks(name: str, members: list[str], count: int) -> set[str]:
    """The published rule, written anew: the i-th member of class c has the rank of BLAKE2b(c/i)."""
    ranks = {
        hashlib.blake2b(f"{name}/{i}".encode()).hexdigest(): member
        for i, member in enumerate(members)
    }
    return {ranks[rank] for rank in sorted(ranks)[:count]}


def assert_held_out(opened: TransferSet, training: dict[str, list[str]]) -> None:
    """Validation is a fifth of every class of ``training`` by the rule; training is the rest."""
    expected = {
        member: name
        for name, members in training.items()
        for member in lowest_ranks(name, members, round(len(members) / 5))
    }
    whole = {member: name for name, members in training.items() for member in members}
    assert class_by_file(opened.validation) == expected
    assert class_by_file(opened.train) == {m: whole[m] for m in whole if m not in expected}
    assert class_by_file(opened.train_and_validation) == whole


# The ten sets of the paper.


def test_the_names_of_the_paper_in_its_order() -> None:
    names = "Aircraft Caltech101 Cars CIFAR10 CIFAR100 DTD Flowers Pets SUN397 VOC2007"
    assert " ".join(TRANSFER_SETS) == names


def assert_official(opened: TransferSet, expected: dict[str, dict[str, Any]]) -> None:
    """The three parts are those of the lists; the first two together are one set, in order."""
    parts = {"train": opened.train, "val": opened.validation, "test": opened.test}
    for split, images in parts.items():
        assert class_by_file(images) == expected[split]
        assert images.classes == opened.train.classes
    both = opened.train_and_validation
    assert list(class_by_file(both)) == [*expected["train"], *expected["val"]]
    assert class_by_file(both) == expected["train"] | expected["val"]
    assert both.name == f"{opened.name} (training and validation)"


def test_aircraft(tmp_path: Path) -> None:
    variants = ["A300", "Boeing 737-200", "DH-82"]
    expected = {
        split: {f"{split}{number}.jpg": variants[number % 3] for number in range(5)}
        for split in ("train", "val", "test")
    }
    lists = {
        f"fgvc-aircraft-2013b/data/images_variant_{split}.txt": "".join(
            f"{image.removesuffix('.jpg')} {variant}\n" for image, variant in images.items()
        )
        for split, images in expected.items()
    }
    lists["fgvc-aircraft-2013b/data/variants.txt"] = "\n".join(variants) + "\n"
    write(tmp_path, lists)
    opened = open_transfer_set("aircraft", root=str(tmp_path))
    assert (opened.name, opened.metric) == ("Aircraft", "mean per class")
    assert opened.train.classes == tuple(variants)
    assert_official(opened, expected)


def test_dtd_takes_the_first_partition(tmp_path: Path) -> None:
    expected = {
        split: {f"{split}{n}.jpg": ("banded", "dotted")[n % 2] for n in range(4)}
        for split in ("train", "val", "test")
    }
    for split, images in expected.items():
        lines = "".join(f"{texture}/{image}\n" for image, texture in images.items())
        write(tmp_path / "dtd/dtd/labels", {f"{split}1.txt": lines, f"{split}2.txt": "x/y.jpg\n"})
    opened = open_transfer_set("dtd", root=str(tmp_path))
    assert (opened.name, opened.metric) == ("DTD", "top-1")
    assert_official(opened, expected)
    write(tmp_path / "dtd/dtd/labels", {"test1.txt": "banded/1.jpg\nwoven/2.jpg\n"})
    with pytest.raises(
        UserError, match=r"DTD \(train\) has images of class dotted, but .*\(test\)"
    ):
        open_transfer_set("dtd", root=str(tmp_path))


def test_flowers(tmp_path: Path, monkeypatch: Any) -> None:
    from scipy.io import savemat
    from torchvision.datasets import Flowers102, flowers102

    monkeypatch.setattr(flowers102, "check_integrity", lambda *_: True)
    folder = tmp_path / "flowers-102"
    (folder / "jpg").mkdir(parents=True)
    labels = np.arange(408) % 102 + 1
    ids = np.random.default_rng(0).permutation(102)
    splits = {"trnid": 1 + ids, "valid": 103 + ids, "tstid": 205 + np.arange(204)}
    savemat(folder / "imagelabels.mat", {"labels": labels[None]})
    savemat(folder / "setid.mat", {name: numbers[None] for name, numbers in splits.items()})
    expected = {
        split: {f"image_{i:05}.jpg": Flowers102.classes[labels[i - 1] - 1] for i in splits[name]}
        for split, name in {"train": "trnid", "val": "valid", "test": "tstid"}.items()
    }
    opened = open_transfer_set("flowers", root=str(tmp_path))
    assert (opened.name, opened.metric) == ("Flowers", "mean per class")
    assert_official(opened, expected)


def test_pets(tmp_path: Path) -> None:
    breeds = {"Abyssinian": 1, "american_bulldog": 2}
    training: dict[str, list[str]] = {"Abyssinian": [], "American Bulldog": []}
    lines, test_lines = [], []
    for number in range(21):
        breed = ("american_bulldog", "Abyssinian")[number % 2]
        lines.append(f"{breed}_{number} {breeds[breed]} 1 1\n")
        training["Abyssinian" if number % 2 else "American Bulldog"].append(f"{breed}_{number}.jpg")
        test_lines.append(f"{breed}_{100 + number} {breeds[breed]} 1 1\n")
    files = {
        "trainval.txt": "".join(lines),
        "test.txt": "".join(test_lines),
    }
    write(tmp_path / "oxford-iiit-pet/annotations", files)
    (tmp_path / "oxford-iiit-pet/images").mkdir()
    opened = open_transfer_set("Pets", root=str(tmp_path))
    assert (opened.name, opened.metric) == ("Pets", "mean per class")
    assert_held_out(opened, training)
    assert len(class_by_file(opened.test)) == 21
    assert class_by_file(opened.test)["Abyssinian_101.jpg"] == "Abyssinian"
    # By torchvision's name it is the same set, with the same protocol.
    again = open_transfer_set("torchvision:OxfordIIITPet", root=str(tmp_path))
    assert (again.name, again.metric) == (opened.name, opened.metric)
    assert class_by_file(again.train) == class_by_file(opened.train)


def write_cars(root: Path) -> dict[str, list[str]]:
    from scipy.io import savemat

    folder = root / "stanford_cars"
    for name in ("devkit", "cars_train", "cars_test"):
        (folder / name).mkdir(parents=True)
    makes = ["AM General Hummer SUV 2000", "Acura RL Sedan 2012"]
    savemat(folder / "devkit/cars_meta.mat", {"class_names": np.array(makes, dtype=object)})
    kind = [("fname", object), ("class", object)]
    for count, name in ((20, "devkit/cars_train_annos"), (6, "cars_test_annos_withlabels")):
        rows = [(f"{number:05}.jpg", np.uint8(number % 2 + 1)) for number in range(count)]
        savemat(folder / f"{name}.mat", {"annotations": np.array(rows, dtype=kind)})
    return {make: [f"{n:05}.jpg" for n in range(i, 20, 2)] for i, make in enumerate(makes)}


def test_cars(tmp_path: Path) -> None:
    training = write_cars(tmp_path)
    opened = open_transfer_set("cars", root=str(tmp_path))
    assert (opened.name, opened.metric) == ("Cars", "top-1")
    assert_held_out(opened, training)
    assert list(class_by_file(opened.test).values()) == 3 * list(training)
    assert "cars_test" in opened.test.where(0)


def test_cars_cannot_be_downloaded(tmp_path: Path) -> None:
    for download in (False, True):
        with pytest.raises(UserError, match=r"into .*/stanford_cars, as .*downloaded\.$"):
            open_transfer_set("cars", root=str(tmp_path), download=download)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["cifar10", "CIFAR100"])
def test_cifar(tmp_path: Path, monkeypatch: Any, name: str) -> None:
    from torchvision.datasets import cifar

    monkeypatch.setattr(cifar, "check_integrity", lambda *_: True)
    ten = name == "cifar10"
    folder = tmp_path / ("cifar-10-batches-py" if ten else "cifar-100-python")
    batches = [f"data_batch_{n}" for n in range(1, 6)] if ten else ["train"]
    each = 40 // len(batches)
    # The first pixel of an image is its number, and its class is that modulo 2.
    content: dict[str, Any] = {
        batch: range(first * each, (first + 1) * each) for first, batch in enumerate(batches)
    }
    content["test_batch" if ten else "test"] = range(100, 106)
    folder.mkdir()
    for batch, numbers in content.items():
        pixels = np.zeros((len(numbers), 3072), np.uint8)
        pixels[:, 0] = numbers
        labels = {"labels" if ten else "fine_labels": [number % 2 for number in numbers]}
        (folder / batch).write_bytes(pickle.dumps({"data": pixels, **labels}))
    meta = {"label_names" if ten else "fine_label_names": ["cat", "dog"]}
    (folder / ("batches.meta" if ten else "meta")).write_bytes(pickle.dumps(meta))

    opened = open_transfer_set(name, root=str(tmp_path))
    assert (opened.name, opened.metric) == (name.upper(), "top-1")
    numbers = {str(n): n for n in range(40)}
    expected = set()
    for label, kind in enumerate(("cat", "dog")):
        members = [key for key, n in numbers.items() if n % 2 == label]
        expected |= {numbers[key] for key in lowest_ranks(kind, members, 4)}

    def shown(images: ImageSet) -> list[int]:
        assert isinstance(images, ArrayImages)
        assert images.labels is not None
        found = images.pixels[:, 0, 0, 0].tolist()
        assert images.labels.tolist() == [number % 2 for number in found]
        return found

    assert shown(opened.validation) == sorted(expected)
    assert shown(opened.train) == [n for n in range(40) if n not in expected]
    assert shown(opened.train_and_validation) == shown(opened.train) + shown(opened.validation)
    assert shown(opened.test) == list(range(100, 106))


def test_caltech101_keeps_its_background(tmp_path: Path) -> None:
    counts = {"BACKGROUND_Google": 40, "accordion": 31, "Faces_easy": 55}
    files: dict[str, list[str]] = {
        name: [f"{name}_{number:04}.jpg" for number in range(count)]
        for name, count in counts.items()
    }
    folder = tmp_path / "caltech101/101_ObjectCategories"
    write(folder, {f"{name}/{file}": b"" for name in files for file in files[name]})
    write(folder, {"BACKGROUND_Google/tmp": b"not an image"})
    opened = open_transfer_set("caltech101", root=str(tmp_path))
    assert (opened.name, opened.metric) == ("Caltech101", "mean per class")
    assert opened.train.classes == ("BACKGROUND_Google", "Faces_easy", "accordion")
    training = {name: lowest_ranks(name, files[name], 30) for name in files}
    assert_held_out(opened, {name: sorted(training[name]) for name in files})
    assert len(opened.validation) == 3 * 6
    assert class_by_file(opened.test) == {
        file: name for name in files for file in files[name] if file not in training[name]
    }
    write(folder, {f"small/{number}.jpg": b"" for number in range(30)})
    with pytest.raises(UserError, match=r"small, but Caltech101 \(test\) has none"):
        open_transfer_set("caltech101", root=str(tmp_path))


def test_sun397_follows_its_first_lists(tmp_path: Path) -> None:
    places = {"abbey": "a/abbey", "apartment_building/outdoor": "a/apartment_building/outdoor"}
    training = {name: [f"sun_{name[:2]}{number}.jpg" for number in range(10)] for name in places}
    lines = [f"/{places[name]}/{file}" for name in places for file in training[name]]
    (tmp_path / "SUN397").mkdir()
    with pytest.raises(UserError, match=r"Training_01\.txt .* put both into .*SUN397\.$"):
        open_transfer_set("sun397", root=str(tmp_path))
    write(tmp_path / "SUN397", {"Training_01.txt": "\r\n".join(lines)})
    with pytest.raises(UserError, match=r"Testing_01\.txt.* put both into .*SUN397\.$"):
        open_transfer_set("sun397", root=str(tmp_path))
    tested = {"sun_t1.jpg": "apartment_building/outdoor", "sun_t2.jpg": "abbey"}
    test_lines = [f"/{places[name]}/{file}\n" for file, name in tested.items()]
    write(tmp_path / "SUN397", {"Testing_01.txt": "".join(test_lines)})
    opened = open_transfer_set("SUN397", root=str(tmp_path))
    assert (opened.name, opened.metric) == ("SUN397", "top-1")
    assert opened.train.classes == tuple(places)
    assert_held_out(opened, training)
    assert class_by_file(opened.test) == tested
    assert opened.test.where(0) == f"{tmp_path}/SUN397/a/apartment_building/outdoor/sun_t1.jpg"


def annotation(*objects: tuple[str, int]) -> str:
    parts = "".join(
        f"<object><name>{name}</name><difficult>{difficult}</difficult>"
        "<part><name>head</name></part></object>"
        for name, difficult in objects
    )
    return f"<annotation><filename>x.jpg</filename>{parts}</annotation>"


def write_voc(root: Path) -> dict[str, dict[str, set[str]]]:
    """Two images of every class in every split, and one where difficult objects are."""
    folder = root / "VOCdevkit/VOC2007"
    expected: dict[str, dict[str, set[str]]] = {}
    for split in ("train", "val", "test"):
        shown = {}
        for number, name in enumerate(VOC_CLASSES):
            other = VOC_CLASSES[(number + 1) % 20]
            shown[f"{split}{number:02}"] = [(name, 0), (other, 0), (name, 1)]
        shown[f"{split}99"] = [("cat", 1), ("dog", 1), ("dog", 0)]
        shown[f"{split}98"] = [("person", 1)]
        names = "\n".join(shown) + "\n"
        files = {f"Annotations/{name}.xml": annotation(*shown[name]) for name in shown}
        write(folder, {f"ImageSets/Main/{split}.txt": names, **files})
        expected[split] = {
            f"{image}.jpg": {name for name, difficult in objects if not difficult}
            for image, objects in shown.items()
        }
    return expected


def test_voc2007_is_multi_label(tmp_path: Path) -> None:
    expected = write_voc(tmp_path)
    opened = open_transfer_set("voc2007", root=str(tmp_path))
    assert (opened.name, opened.metric) == ("VOC2007", "11-point mAP")
    assert opened.train.multi_label
    assert opened.train.classes == VOC_CLASSES
    assert list(VOC_CLASSES) == sorted(set(VOC_CLASSES))
    assert len(VOC_CLASSES) == 20
    assert expected["val"]["val99.jpg"] == {"dog"}
    assert expected["val"]["val98.jpg"] == set()
    assert_official(opened, expected)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("<annotation><object>", "cannot be read: "),
        (None, "cannot be read: .*No such file"),
        (annotation(("unicorn", 0)), "'unicorn'"),
    ],
)
def test_damaged_annotations(tmp_path: Path, content: str | None, message: str) -> None:
    write_voc(tmp_path)
    place = tmp_path / "VOCdevkit/VOC2007/Annotations/val07.xml"
    if content is None:
        place.unlink()
    else:
        place.write_text(content)
    with pytest.raises(UserError, match=rf"val07\.xml .*{message}.*\.$"):
        open_transfer_set("voc2007", root=str(tmp_path))


@pytest.mark.parametrize("name", TRANSFER_SETS)
def test_sets_that_are_not_there(tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError, match=r"is not in .*[^.]\.$"):
        open_transfer_set(name.lower(), root=str(tmp_path))
    assert not any(tmp_path.iterdir())  # looking leaves nothing behind


@pytest.mark.parametrize("name", ["Caltech101", "SUN397", "DTD"])
def test_torchvision_downloads(tmp_path: Path, monkeypatch: Any, name: str) -> None:
    from torchvision import datasets

    asked = []

    def fails(root: str, download: bool = False, **arguments: Any) -> None:
        asked.append(download)
        raise OSError("no network.")

    monkeypatch.setattr(datasets, name, fails)
    with pytest.raises(UserError, match=rf"{name} cannot be downloaded: no network\.$"):
        open_transfer_set(name, root=str(tmp_path), download=True)
    assert asked[-1] is True


def test_damaged_lists(tmp_path: Path) -> None:
    files = {"variants.txt": "A\n", "images_variant_train.txt": "1\n"}
    write(tmp_path / "fgvc-aircraft-2013b/data", files)
    with pytest.raises(UserError, match=r"FGVCAircraft is not in .* or not whole"):
        open_transfer_set("aircraft", root=str(tmp_path))


def test_a_folder_that_is_called_like_a_set(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "pets", own_files(train=5, test=2))
    with pytest.raises(UserError, match=r"not in data, .*; your own .* meant by \./pets\.$"):
        open_transfer_set("pets")
    assert open_transfer_set("./pets").name == "pets (own)"


# One's own sets.


def own_files(**each: int) -> dict[str, str | bytes]:
    """So many images of two classes in each split."""
    return {
        f"{split}/{name}/{split}-{name}-{number}.png": b"never decoded"
        for split, count in each.items()
        for name in ("cat", "dog")
        for number in range(count)
    }


def names_in(images: ImageSet) -> list[str]:
    return [Path(images.where(index)).name for index in range(len(images))]


@pytest.mark.parametrize("validation", ["val", "valid", "validation"])
def test_three_splits_of_a_folder(tmp_path: Path, validation: str) -> None:
    write(tmp_path / "photos", own_files(**{"train": 4, validation: 1, "test": 2}))
    opened = open_transfer_set(str(tmp_path / "photos"))
    assert (opened.name, opened.metric) == ("photos", "top-1")
    assert {name.split("-")[0] for name in names_in(opened.train)} == {"train"}
    assert len(opened.train) == 8
    assert names_in(opened.validation) == [f"{validation}-cat-0.png", f"{validation}-dog-0.png"]
    assert {name.split("-")[0] for name in names_in(opened.test)} == {"test"}
    assert len(opened.train_and_validation) == 10


@pytest.mark.parametrize("test", ["val", "validation", "test"])
def test_two_splits_of_a_folder(tmp_path: Path, test: str) -> None:
    write(tmp_path, own_files(**{"train": 12, test: 2}))
    opened = open_transfer_set(str(tmp_path))
    training = {
        name: sorted(f"train-{name}-{number}.png" for number in range(12))
        for name in ("cat", "dog")
    }
    assert_held_out(opened, training)
    assert len(opened.validation) == 4
    assert {name.split("-")[0] for name in names_in(opened.test)} == {test}


def test_an_archive_with_masks_beside_its_splits(tmp_path: Path) -> None:
    pixels = io.BytesIO()
    Image.new("RGB", (4, 4), (7, 0, 0)).save(pixels, "PNG")
    with tarfile.open(tmp_path / "birds.v2.tar.xz", "w:xz") as archive:
        for name in [*own_files(train=5, val=2), "masks/1.png", "README.txt"]:
            member = tarfile.TarInfo(f"birds/{name}")
            member.size = len(pixels.getvalue())
            archive.addfile(member, io.BytesIO(pixels.getvalue()))
    opened = open_transfer_set(str(tmp_path / "birds.v2.tar.xz"))
    assert opened.name == "birds.v2"
    assert [len(part) for part in (opened.train, opened.validation, opened.test)] == [8, 2, 4]
    assert opened.train_and_validation.read(9)[0, 0, 0] == 7


def test_multi_label_sets(tmp_path: Path) -> None:
    for split, count in (("train", 50), ("val", 4), ("test", 6)):
        rows = [f"{n}.png,{'cat;dog' if n % 2 else 'dog'}" for n in range(count)]
        files: dict[str, str | bytes] = {f"{n}.png": b"" for n in range(count)}
        write(tmp_path / split, files | {"labels.csv": "image,labels\n" + "\n".join(rows)})
    opened = open_transfer_set(str(tmp_path))
    assert opened.metric == "11-point mAP"
    assert class_by_file(opened.validation)["3.png"] == {"cat", "dog"}
    assert len(opened.train_and_validation) == 54
    for path in (tmp_path / "val").iterdir():
        path.unlink()
    # Without a split of their own, validation images are a fifth of all, by the rule.
    opened = open_transfer_set(str(tmp_path))
    order = sorted(f"{n}.png" for n in range(50))
    assert set(names_in(opened.validation)) == lowest_ranks("", order, 10)
    assert set(names_in(opened.train)) == set(order) - lowest_ranks("", order, 10)


def test_other_named_sets(tmp_path: Path, monkeypatch: Any) -> None:
    patterns = open_transfer_set("patterns")
    assert (patterns.name, patterns.metric) == ("patterns", "top-1")
    assert len(patterns.train) == 4 * len(patterns.validation)

    from torchvision import datasets

    class SmallSTL10(datasets.STL10):
        def __init__(self, _: str, split: str) -> None:
            assert split in ("train", "test")  # not train+unlabeled
            self.data = np.zeros((10, 3, 8, 8), np.uint8)
            self.labels = np.arange(10) % 2
            self.classes = ["airplane", "bird"]

    monkeypatch.setattr(datasets, "STL10", SmallSTL10)
    stl = open_transfer_set("torchvision:STL10", root=str(tmp_path))
    assert (stl.name, len(stl.train), len(stl.validation), len(stl.test)) == ("STL10", 8, 2, 10)


# Mistakes.


def refused(source: Path | str, message: str, **settings: Any) -> None:
    with pytest.raises(UserError, match=rf"^[^\n]*{message}[^\n]*\.$"):
        open_transfer_set(str(source), **settings)


def test_one_split_is_not_enough(tmp_path: Path) -> None:
    write(tmp_path / "a", own_files(train=5))
    refused(tmp_path / "a", r"\(train\) has no second split: put images into train/ and test/")
    write(tmp_path / "b", {"cat/1.png": b"", "dog/2.png": b""})
    refused(tmp_path / "b", "no second split")


def test_splits_of_doubtful_meaning(tmp_path: Path) -> None:
    write(tmp_path / "a", own_files(train=5, val=1, valid=1))
    refused(tmp_path / "a", r"val/ and valid/ beside it: .* test/")
    write(tmp_path / "b", own_files(train=5, val=1, validation=1, test=1))
    refused(tmp_path / "b", r"val/ and validation/ and test/")


@pytest.mark.parametrize("split", ["val", "test"])
def test_classes_that_differ_between_splits(tmp_path: Path, split: str) -> None:
    write(tmp_path, own_files(train=5, val=2, test=2))
    write(tmp_path, {"train/horse/1.png": b""})
    for other in {"val", "test"} - {split}:
        write(tmp_path, {f"{other}/horse/2.png": b""})
    refused(tmp_path, rf"\(train\) has images of class horse, but .*\({split}\) has none; every")
    (tmp_path / "train/horse/1.png").unlink()
    refused(tmp_path, r"class horse that the training images do not have")


def test_a_class_of_one_image_cannot_be_held_out(tmp_path: Path) -> None:
    write(tmp_path, own_files(train=5, test=2))
    write(tmp_path, {"train/horse/1.png": b"", "test/horse/2.png": b""})
    refused(tmp_path, r"a single image of class horse, .*held out")
    write(tmp_path, own_files(val=1) | {"val/horse/3.png": b""})
    assert len(open_transfer_set(str(tmp_path)).train) == 11  # nothing is held out of it


@pytest.mark.parametrize("split", ["train", "val", "test"])
def test_missing_labels(tmp_path: Path, split: str) -> None:
    write(tmp_path, own_files(train=5, val=2, test=2))
    write(tmp_path, {f"{split}/stray.png": b""})
    refused(tmp_path, rf"\({split}\) has no labels: put the images into one subfolder per class")


def test_missing_labels_where_validation_must_be_held_out(tmp_path: Path) -> None:
    write(tmp_path, {"train/1.png": b"", "train/2.png": b"", "test/3.png": b""})
    refused(tmp_path, r"\(train\) has no labels: put the images into one subfolder per class")


def test_held_out_labels_without_one_of_the_classes(tmp_path: Path) -> None:
    rows = [f"{n}.png,{'rare;dog' if n == 7 else 'dog'}" for n in range(10)]
    table = "image,labels\n" + "\n".join(rows)
    for split in ("train", "test"):
        files: dict[str, str | bytes] = {f"{n}.png": b"" for n in range(10)}
        write(tmp_path / split, files | {"labels.csv": table})
    refused(tmp_path, "images of class rare, but .* has none")


def test_metrics(tmp_path: Path) -> None:
    write(tmp_path, own_files(train=5, test=2))
    source = str(tmp_path)
    assert open_transfer_set(source, metric="mean per class").metric == "mean per class"
    assert open_transfer_set(source, metric="mean-per-class").metric == "mean per class"
    assert open_transfer_set("patterns", metric="top-1").metric == "top-1"
    refused(source, "11-point mAP cannot judge .* of one class: use top-1", metric="11-point mAP")
    refused(source, r"unknown metric 'top1' \(did you mean top-1\?\); there are", metric="top1")
    write_voc(tmp_path)
    assert open_transfer_set("voc2007", root=source, metric="11-point mAP")
    refused("voc2007", "top-1 cannot judge VOC2007", root=source, metric="top-1")


def test_names_that_nothing_has(tmp_path: Path) -> None:
    refused(tmp_path / "pets", "no folder or archive")
    refused("pest", r"did you mean pets\?")
    refused("torchvision:STL", r"did you mean STL10\?")


# The rules.


def numbered(labels: list[int], classes: int = 3) -> ArrayImages:
    """Images whose first pixel is their number."""
    pixels = torch.zeros(len(labels), 3, 1, 1, dtype=torch.uint8)
    pixels[:, 0, 0, 0] = torch.arange(len(labels))
    names = tuple("abcdefgh"[:classes])
    return ArrayImages("set", pixels, torch.tensor(labels), names)


def numbers(images: ImageSet) -> list[int]:
    return [int(images.read(index)[0, 0, 0]) for index in range(len(images))]


@given(st.lists(st.integers(0, 2), max_size=200))
def test_holding_out_parts_every_class(labels: list[int]) -> None:
    labels += [0, 0, 1, 1, 2, 2]
    images = numbered(labels)
    kept, validation = held_out(images, 0.2)
    assert sorted(numbers(kept) + numbers(validation)) == list(range(len(labels)))
    assert numbers(kept) == sorted(numbers(kept))
    for label in range(3):
        members = labels.count(label)
        held = [labels[number] for number in numbers(validation)].count(label)
        assert held == max(1, round(members / 5))
    assert sorted(numbers(joined(kept, validation))) == list(range(len(labels)))


@given(st.lists(st.integers(0, 2), max_size=100), st.integers(1, 20))
def test_some_of_every_class(labels: list[int], count: int) -> None:
    chosen, rest = some_of_every_class(numbered(labels), count)
    assert sorted(numbers(chosen) + numbers(rest)) == list(range(len(labels)))
    for label in range(3):
        found = [labels[number] for number in numbers(chosen)].count(label)
        assert found == min(count, labels.count(label))


def test_the_rule_never_changes() -> None:
    """Published results depend on it."""
    images = numbered([number * 7 % 5 % 3 for number in range(250)])
    chosen, _ = some_of_every_class(images, 30)
    _, validation = held_out(chosen, 0.2)
    digest = hashlib.sha256(bytes(numbers(chosen)) + b"/" + bytes(numbers(validation)))
    assert digest.hexdigest()[:16] == "d4ceb2fa695b5842"


def test_all_sets_that_cannot_be_opened_are_named(tmp_path: Path) -> None:
    root = str(tmp_path / "nothing")
    (patterns,) = open_transfer_sets(["patterns"], root=root)
    assert patterns.name == "patterns"
    with pytest.raises(UserError) as alone:
        open_transfer_sets(["patterns", "DTD"], root=root)
    with pytest.raises(UserError) as several:
        open_transfer_sets(["DTD", "patterns", "Pets", "./absent"], root=root)
    assert "torchvision:DTD is not in" in str(alone.value)
    assert str(several.value) == f"{alone.value} Nor can Pets, ./absent be opened."
