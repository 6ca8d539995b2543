"""PASCAL VOC: a folder for every year, with lists of images and an XML file for each of them."""

import xml.etree.ElementTree as ET  # of entities it knows none but XML's own
from collections.abc import Iterator, Mapping, Sequence
from posixpath import dirname, join

import numpy as np

from xmoco.data.imagesets import EncodedImages
from xmoco.data.trees import Tree
from xmoco.detect.objects import Annotation, DetectionSet, checked_side, collected, some_of
from xmoco.errors import UserError, nearest
from xmoco.text import printable

LISTS = "ImageSets/Main"


def voc_years(tree: Tree) -> list[str]:
    """The folders of VOC's layout: one, or VOC2007 and VOC2012 in a devkit."""
    lists = [path for path in tree.files(("txt",)) if dirname(path).endswith(LISTS)]
    return sorted({dirname(path).removesuffix(LISTS).rstrip("/") for path in lists})


def read_voc(
    tree: Tree, years: Sequence[str], name: str, short_side: int | None
) -> tuple[DetectionSet, DetectionSet]:
    """Every year's trainval, and the tests there are; without a test, train and val."""
    lists = ("trainval", "test")
    if not any(tree.holds(join(year, LISTS, "test.txt")) for year in years):
        lists = ("train", "val")
    train = _Part.listed(tree, years, lists[0])
    categories = tuple(sorted({object_name for one in train.files for object_name in one.names}))
    if not categories:
        raise UserError(f"the {lists[0]} images of {name} have no objects.")
    test = _Part.listed(tree, years, lists[1])
    return (
        train.opened(tree, f"{name} ({lists[0]})", categories, short_side),
        test.opened(tree, f"{name} ({lists[1]})", categories, short_side),
    )


class _File:
    """What an XML file tells of its image."""

    def __init__(self, tree: Tree, year: str, stem: str) -> None:
        path = join(year, "Annotations", f"{stem}.xml")
        self.where = tree.where(path)
        if not tree.holds(path):
            raise UserError(f"{self.where} is not there, though a list names its image.")
        try:
            self.root = ET.fromstring(tree.read(path))
        except ET.ParseError as error:
            raise UserError(f"{self.where} is not XML ({error}).") from None
        self.image = join(year, "JPEGImages", self.root.findtext("filename") or f"{stem}.jpg")
        self.size = [
            checked_side(self._number(self.root, f"size/{side}"), f"the {side} in {self.where}")
            for side in ("height", "width")
        ]
        self.objects = self.root.findall("object")
        self.names = [printable((one.findtext("name") or "").strip()) for one in self.objects]

    def annotations(self, image: int, label: Mapping[str, int]) -> Iterator[Annotation]:
        for number, (one, name) in enumerate(zip(self.objects, self.names, strict=True), start=1):
            this = f"object {number} of {self.where}"
            if name not in label:
                raise UserError(
                    f"{this} is a {name!r}{nearest(name, label)}, which no training image shows."
                )
            left, top, right, bottom = (
                self._number(one, f"bndbox/{side}") for side in ("xmin", "ymin", "xmax", "ymax")
            )
            # VOC counts pixels from 1 and includes the last; here boxes end where the next begins.
            box = (left - 1, top - 1, right, bottom)
            difficult = (one.findtext("difficult") or "0").strip() == "1"
            yield Annotation(this, image, box, label[name], ignored=difficult)

    def _number(self, element: ET.Element, key: str) -> float:
        text = element.findtext(key)
        try:
            return float(text or "")
        except ValueError:
            raise UserError(f"{self.where}: {key} must be a number, and is {text!r}.") from None


class _Part:
    """The images of one list, over all years that have it."""

    def __init__(self, files: list[_File]) -> None:
        self.files = files

    @classmethod
    def listed(cls, tree: Tree, years: Sequence[str], part: str) -> "_Part":
        files = []
        for year in years:
            path = join(year, LISTS, f"{part}.txt")
            if tree.holds(path):
                lines = tree.read(path).decode(errors="replace").split("\n")
                stems = [line.split()[0] for line in lines if line.strip()]
                files += [_File(tree, year, stem) for stem in stems]
        if not files:
            raise UserError(f"there are no {part} images: {LISTS}/{part}.txt is empty or missing.")
        return cls(files)

    def opened(
        self, tree: Tree, name: str, categories: tuple[str, ...], short_side: int | None
    ) -> DetectionSet:
        missing = [printable(file.image) for file in self.files if not tree.holds(file.image)]
        if missing:
            raise UserError(
                f"{len(missing)} of {len(self.files)} images of {name} are not there: "
                f"{some_of(missing)}."
            )
        label = {category: place for place, category in enumerate(categories)}
        sizes = np.array([file.size for file in self.files])
        annotations = (
            annotation
            for image, file in enumerate(self.files)
            for annotation in file.annotations(image, label)
        )
        objects, dropped = collected(annotations, sizes)
        paths = [file.image for file in self.files]
        images = EncodedImages(name, tree, paths, None, None, short_side)
        return DetectionSet(images, sizes, objects, categories, "voc", dropped)
