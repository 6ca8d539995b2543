"""Images to try a backbone on: the paper's ten data sets, or one's own.

The protocol is that of Ericsson et al., "How well do self-supervised models transfer?" (CVPR 2021):
what is to be chosen is chosen on validation images, then training and validation images together
make the model that the test images judge once. So every set has three parts:

- Aircraft, DTD (its first partition), Flowers and VOC2007 come with all three.
- Of Cars, CIFAR10, CIFAR100, Pets and SUN397 (its first pair of lists), 20 % of the training images
  of every class are held out for validation.
- Of Caltech101, 30 images of every class are for training, 20 % of them held out, and the rest are
  for testing. Its background counts as a class.

Which images are chosen is a fixed rule, told in ``subset.labelled_share``. The ten sets lie on disk
as torchvision leaves them.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from posixpath import dirname
from typing import Any, Literal, cast, get_args
from xml.etree import ElementTree

import torch

from xmoco.config import DataConfig
from xmoco.data.imagesets import ImageSet
from xmoco.data.label_file import LABEL_FILE
from xmoco.data.layout import TRAIN_FOLDER, labels_needed
from xmoco.data.sources import (
    TORCHVISION,
    existing_path,
    is_path,
    names_shards,
    open_images,
    open_splits,
    set_name,
)
from xmoco.data.subset import held_out, joined, some_of_every_class
from xmoco.data.torchvision_sets import find, find_folder, images_at, images_of
from xmoco.errors import UserError, nearest

Metric = Literal["top-1", "mean per class", "11-point mAP"]

HELD_OUT_PERCENT = 20
"""How many of the training images validate, where a set does not come with its own."""

CALTECH_TRAINING = 30
"""Caltech101 has no official split; this many training images of every class are the custom."""


@dataclass(frozen=True)
class TransferSet:
    """Labelled images in three parts, and how to judge what predicts their labels."""

    name: str
    """As it heads the column of a table: ``Caltech101``."""
    train: ImageSet
    validation: ImageSet
    test: ImageSet
    metric: Metric

    @property
    def train_and_validation(self) -> ImageSet:
        """First all training images, then all validation images, as one set."""
        both = joined(self.train, self.validation)
        both.name = f"{self.name} (training and validation)"
        return both


Splits = list[ImageSet]
"""As a set comes: for training, for validation if it has such, and for testing."""


def open_transfer_set(
    source: str, *, root: str = "data", download: bool = False, metric: str | None = None
) -> TransferSet:
    """One of the paper's sets by name, kept in ``root``, or a labelled set of one's own.

    One's own is a folder, an archive or shards with ``train``, ``test`` and, if it has its own
    validation images, ``val``; or ``patterns``, or ``torchvision:NAME``. Names in ``TRANSFER_SETS``
    may be written in small letters; a folder of such a name is meant by ``./NAME``.

    ``metric`` replaces the one that the paper reports; for sets of one's own that is top-1 or,
    where an image may be of several classes, 11-point mAP. No image is decoded.
    """
    if metric == "mean-per-class":  # which a shell takes without quotes
        metric = "mean per class"
    if metric is not None and metric not in get_args(Metric):
        raise UserError(
            f"unknown metric {metric!r}{nearest(metric, get_args(Metric))}; there are "
            f"{', '.join(get_args(Metric))}."
        )
    paper_set = _paper_set(source)
    usual: Metric = "top-1"
    if paper_set is not None:
        name, usual = paper_set.name, paper_set.metric
        splits = _open_paper_set(paper_set, source, root, download)
    elif not is_path(source):
        name = set_name(source)
        splits = _train_and_test(_data(source, root, download))
    else:
        if not names_shards(source):
            existing_path(source, map(str.lower, TRANSFER_SETS))
        name = set_name(source)
        if name.lower() in map(str.lower, TRANSFER_SETS):  # whose column it must not get into
            name += " (own)"
        splits = _folders(_data(source, root, download))
    check_classes(splits)
    chosen_metric = _chosen_metric(cast(Metric | None, metric), usual, splits[0])
    if len(splits) == 2:
        splits = _with_validation(*splits)
        check_classes(splits)  # by labels of which an image may have several, a class may be lost
    train, validation, test = splits
    return TransferSet(name, train, validation, test, chosen_metric)


def open_transfer_sets(
    sources: Iterable[str], *, root: str = "data", download: bool = False, metric: str | None = None
) -> list[TransferSet]:
    """Each as by ``open_transfer_set``; all that cannot be opened are named at once."""
    opened, refused = [], []
    for source in sources:
        try:
            opened.append(open_transfer_set(source, root=root, download=download, metric=metric))
        except UserError as error:
            refused.append((source, error))
    if refused:
        (_, reason), *others = refused
        nor = f" Nor can {', '.join(source for source, _ in others)} be opened." if others else ""
        raise UserError(f"{reason}{nor}")
    return opened


def _data(source: str, root: str, download: bool) -> DataConfig:
    # Of STL10, whose training images are mostly unlabelled, this rule asks for the labelled ones.
    rule = "folders" if source.startswith(TORCHVISION) else "auto"
    # Not checked as a setting, which is text: a path may hold bytes that are not.
    settings = {"source": source, "root": root, "download": download, "labels": rule}
    return DataConfig().model_copy(update=settings)


def _chosen_metric(metric: Metric | None, usual: Metric, images: ImageSet) -> Metric:
    if images.multi_label:
        if metric not in (None, "11-point mAP"):
            raise UserError(
                f"{metric} cannot judge {images.name}, where an image may be of several classes: "
                "use 11-point mAP."
            )
        return "11-point mAP"
    if metric == "11-point mAP":
        raise UserError(
            f"11-point mAP cannot judge {images.name}, where every image is of one class: use "
            "top-1 or mean per class."
        )
    return metric or usual


def check_classes(splits: Splits) -> None:
    """Every class must be in every split.

    A class that was never learned cannot be recognised, and one that is never asked for would drop
    out of a mean over classes without a word.
    """
    train, *others = splits
    for images in others:
        for having, lacking in ((train, images), (images, train)):
            missing = sorted(_classes_shown(having) - _classes_shown(lacking))
            if missing:
                raise UserError(
                    f"{having.name} has images of class {missing[0]}, but {lacking.name} has none; "
                    "every class must be in every split: add some, or remove the class."
                )


def _classes_shown(images: ImageSet) -> set[str]:
    """The classes that at least one image is of."""
    if images.labels is None or images.classes is None:
        raise UserError(
            f"{images.name} has no labels: put the images into one subfolder per class, or list "
            f"them in {LABEL_FILE} with the labels of each."
        )
    shown = images.labels.any(0).nonzero() if images.multi_label else images.labels.unique()
    return {images.classes[label] for label in shown.flatten()}


def _with_validation(train: ImageSet, test: ImageSet) -> Splits:
    """Validation images held out from the training images."""
    kept, validation = held_out(train, HELD_OUT_PERCENT / 100)
    kept.name = f"{train.name}, {100 - HELD_OUT_PERCENT} % kept"
    validation.name = f"{train.name}, {HELD_OUT_PERCENT} % held out"
    return [kept, validation, test]


def _train_and_test(data: DataConfig) -> Splits:
    """The embedded patterns, or a torchvision set: both always have the two splits."""
    train, test = open_images(data, "train"), open_images(data, "test")
    assert train is not None
    assert test is not None
    return [train, test]


def _folders(data: DataConfig) -> Splits:
    """The splits of a folder or an archive of one's own."""
    with labels_needed():
        splits = open_splits(data)
    train = splits.pop(TRAIN_FOLDER)
    match list(splits):
        case [_] | [_, "test"]:
            return [train, *splits.values()]
        case []:
            raise UserError(
                f"{train.name} has no second split: put images into train/ and test/, and into "
                f"val/ too unless {HELD_OUT_PERCENT} % of train/ may be held out for validation."
            )
        case others:
            names = " and ".join(f"{name}/" for name in others)
            raise UserError(
                f"{train.name} has {names} beside it: keep one of them for validation (val/) and "
                "call the one for testing test/."
            )


def _official(data: DataConfig, **arguments: Any) -> Splits:
    """A torchvision set that comes with all three parts."""
    name = data.source.removeprefix(TORCHVISION)
    return [
        images_of(
            find(data, name, {"split": split, **arguments}), data, f"torchvision {name} ({split})"
        )
        for split in ("train", "val", "test")
    ]


def _caltech101(data: DataConfig) -> Splits:
    # torchvision leaves the background class out, so its folders are read as anyone's.
    folder = find_folder(data, "Caltech101", "caltech101/101_ObjectCategories")
    images = open_images(data.model_copy(update={"source": str(folder)}), "train")
    assert images is not None
    train, test = some_of_every_class(images, CALTECH_TRAINING)
    train.name, test.name = "Caltech101 (train)", "Caltech101 (test)"
    return [train, test]


def _sun397(data: DataConfig) -> Splits:
    folder = find_folder(data, "SUN397", "SUN397")
    train_list, test_list = "Training_01.txt", "Testing_01.txt"
    try:
        train, test = (
            [line.strip("/") for line in (folder / name).read_text().split()]
            for name in (train_list, test_list)
        )
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"SUN397 needs its first lists, {train_list} and {test_list}, which torchvision does "
            f"not download: put both into {folder}."
        ) from error
    # /a/apartment_building/outdoor/sun_a.jpg is of the class apartment_building/outdoor.
    class_of = {path: dirname(path).partition("/")[2] for path in train + test}
    classes = tuple(sorted(set(class_of.values())))
    number = {name: position for position, name in enumerate(classes)}
    splits = []
    for split, paths in (("train", train), ("test", test)):
        labels = torch.tensor([number[class_of[path]] for path in paths], dtype=torch.int64)
        files = [folder / path for path in paths]
        splits.append(images_at(files, data, f"SUN397 ({split})", labels, classes))
    return splits


def _voc2007(data: DataConfig) -> Splits:
    return [
        _voc_split(find(data, "VOCDetection", {"year": "2007", "image_set": split}), data, split)
        for split in ("train", "val", "test")
    ]


def _voc_split(found: Any, data: DataConfig, split: str) -> ImageSet:
    labels = torch.zeros(len(found.annotations), len(VOC_CLASSES), dtype=torch.bool)
    for row, annotation in enumerate(found.annotations):
        for name in _voc_objects(annotation):
            labels[row, VOC_CLASSES.index(name)] = True
    return images_at(found.images, data, f"VOC2007 ({split})", labels, VOC_CLASSES)


def _voc_objects(annotation: str) -> set[str]:
    """What an image shows, without what is marked as difficult to recognise."""
    try:
        objects = ElementTree.parse(annotation).findall("object")
    except (OSError, ElementTree.ParseError) as error:
        raise UserError(f"the annotation {annotation} cannot be read: {error}.") from error
    names = {thing.findtext("name", "") for thing in objects if thing.findtext("difficult") != "1"}
    unknown = sorted(names.difference(VOC_CLASSES))
    if unknown:
        raise UserError(
            f"the annotation {annotation} has an object {unknown[0]!r}, which is no class of VOC."
        )
    return names


VOC_CLASSES = (
    *("aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow"),
    *("diningtable", "dog", "horse", "motorbike", "person", "pottedplant", "sheep", "sofa"),
    *("train", "tvmonitor"),
)


@dataclass(frozen=True)
class _PaperSet:
    name: str
    torchvision_name: str
    metric: Metric
    open: Callable[[DataConfig], Splits]


_PAPER_SETS = (
    _PaperSet("Aircraft", "FGVCAircraft", "mean per class", _official),
    _PaperSet("Caltech101", "Caltech101", "mean per class", _caltech101),
    _PaperSet("Cars", "StanfordCars", "top-1", _train_and_test),
    _PaperSet("CIFAR10", "CIFAR10", "top-1", _train_and_test),
    _PaperSet("CIFAR100", "CIFAR100", "top-1", _train_and_test),
    _PaperSet("DTD", "DTD", "top-1", partial(_official, partition=1)),
    _PaperSet("Flowers", "Flowers102", "mean per class", _official),
    _PaperSet("Pets", "OxfordIIITPet", "mean per class", _train_and_test),
    _PaperSet("SUN397", "SUN397", "top-1", _sun397),
    _PaperSet("VOC2007", "VOCDetection", "11-point mAP", _voc2007),
)

TRANSFER_SETS = tuple(known.name for known in _PAPER_SETS)
"""The sets of the paper, in the order of its tables."""


def _paper_set(source: str) -> _PaperSet | None:
    """The set of the paper that is meant by its own name or by torchvision's."""
    for known in _PAPER_SETS:
        if source.lower() == known.name.lower() or source == TORCHVISION + known.torchvision_name:
            return known
    return None


def _open_paper_set(known: _PaperSet, source: str, root: str, download: bool) -> Splits:
    try:
        return known.open(_data(TORCHVISION + known.torchvision_name, root, download))
    except UserError as error:
        if not Path(source).exists():
            raise
        reason = str(error).removesuffix(".")
        raise UserError(
            f"{reason}; your own images in {source} are meant by ./{source}."
        ) from error
