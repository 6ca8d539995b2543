"""What is where in images: boxes, categories and masks, however a file tells of them."""

import hashlib
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from xmoco.data.imagesets import ImageSet
from xmoco.data.subset import taken
from xmoco.errors import UserError

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
Runs = npt.NDArray[np.int64]
"""A mask, column by column: how many pixels are off, then on, then off …, as in COCO's RLE."""

LONGEST_SIDE = 65_535  # pixels, as much as JPEG has
NAMED = 3  # of many things that are wrong, so many are named


@dataclass(frozen=True)
class Objects:
    """The objects of a set of images, one a row, in the order of their images."""

    images: Integers
    """(t,): positions in the set."""
    boxes: Floats
    """(t, 4): left, top, right and bottom in pixels of the image as it was annotated."""
    labels: Integers
    """(t,): positions in the set's categories."""
    ignored: Flags
    """(t,): crowds and, of PASCAL VOC, what is difficult: neither right nor wrong to find."""
    areas: Floats
    """(t,): by which COCO calls an object small, medium or large."""
    masks: tuple[Runs, ...] | None
    """Where every object has one."""

    def __len__(self) -> int:
        return len(self.images)

    def chosen(self, rows: Integers | Flags) -> "Objects":
        positions = np.arange(len(self))[rows]
        return Objects(
            self.images[rows],
            self.boxes[rows],
            self.labels[rows],
            self.ignored[rows],
            self.areas[rows],
            None if self.masks is None else tuple(self.masks[row] for row in positions),
        )


@dataclass(frozen=True)
class DetectionSet:
    """Images and what is in them."""

    images: ImageSet
    sizes: Integers
    """(n, 2): height and width of each image as it was annotated."""
    objects: Objects
    categories: tuple[str, ...]
    rules: Literal["coco", "voc"]
    """Whose evaluation is the official one."""
    dropped: tuple[str, ...] = ()
    """Objects that were left out, since their boxes have no area inside the image."""

    @property
    def name(self) -> str:
        return self.images.name

    def __len__(self) -> int:
        return len(self.images)

    def at(self, positions: Integers) -> "DetectionSet":
        """Some of the images, which are given in ascending order."""
        place = np.full(len(self), -1)
        place[positions] = np.arange(len(positions))
        objects = self.objects.chosen(place[self.objects.images] >= 0)
        return replace(
            self,
            images=taken(self.images, torch.from_numpy(positions)),
            sizes=self.sizes[positions],
            objects=replace(objects, images=place[objects.images]),
        )

    def to_learn_from(self) -> "DetectionSet":
        """What a detector is trained on: no crowds, and no image without an object.

        Difficult objects of VOC are learnt from: only their evaluation passes them over.
        """
        objects = self.objects
        if self.rules == "coco":
            objects = objects.chosen(~objects.ignored)
        return replace(self, objects=objects).at(np.unique(objects.images))

    def digest(self) -> str:
        """Changes with any object, and with the categories."""
        objects = self.objects
        whole = hashlib.blake2b(repr((self.categories, self.rules)).encode(), digest_size=8)
        arrays = (objects.images, objects.boxes, objects.labels, objects.ignored, self.sizes)
        for array in (*arrays, *(objects.masks or ())):
            whole.update(np.ascontiguousarray(array).tobytes())
        return whole.hexdigest()


class Annotation(NamedTuple):
    """An object as a file tells of it; ``where`` it stands there."""

    where: str
    image: int
    box: tuple[float, float, float, float]
    label: int
    ignored: bool = False
    area: float | None = None
    mask: Runs | None = None


def collected(
    annotations: Iterable[Annotation], sizes: Integers
) -> tuple[Objects, tuple[str, ...]]:
    """The objects, and where those stand that were left out."""
    kept: list[Annotation] = []
    dropped: list[Annotation] = []
    for annotation in annotations:
        left, top, right, bottom = annotation.box
        if not all(map(math.isfinite, annotation.box)):
            raise UserError(f"the box of {annotation.where} is not four numbers.")
        height, width = sizes[annotation.image]
        wide = min(right, width) - max(left, 0)
        high = min(bottom, height) - max(top, 0)
        (kept if wide > 0 and high > 0 else dropped).append(annotation)
    kept.sort(key=lambda annotation: annotation.image)  # stable: else in the file's order
    boxes = np.array([a.box for a in kept], dtype=np.float64).reshape(-1, 4)
    of_boxes = (boxes[:, 2:] - boxes[:, :2]).prod(axis=1)
    told = [own if a.area is None else a.area for a, own in zip(kept, of_boxes, strict=True)]
    masks = tuple(a.mask for a in kept if a.mask is not None)
    objects = Objects(
        images=np.array([a.image for a in kept], dtype=np.int64),
        boxes=boxes,
        labels=np.array([a.label for a in kept], dtype=np.int64),
        ignored=np.array([a.ignored for a in kept], dtype=np.bool_),
        areas=np.array(told, dtype=np.float64),
        masks=masks if kept and len(masks) == len(kept) else None,
    )
    return objects, tuple(annotation.where for annotation in dropped)


def checked_side(side: float, where: str) -> int:
    """The length of an image's side, if an image can have it."""
    if side not in range(1, LONGEST_SIDE + 1):
        raise UserError(f"{where} cannot be {side:g} pixels: an image has 1 to {LONGEST_SIDE:,}.")
    return int(side)


def some_of(names: Iterable[str]) -> str:
    """``a, b, c and 2 more``."""
    first = list(names)
    more = f" and {len(first) - NAMED} more" if len(first) > NAMED else ""
    return ", ".join(first[:NAMED]) + more
