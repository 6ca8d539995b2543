"""A part of an image set."""

import hashlib

import torch
from torch import Tensor

from xmoco.data.batches import epoch_order
from xmoco.data.sources import ArrayImages, ImageSet
from xmoco.errors import UserError


class Subset(ImageSet):
    """The images at some positions of another set, in that order."""

    def __init__(self, images: ImageSet, positions: Tensor) -> None:
        self.name = images.name
        self.labels = None if images.labels is None else images.labels[positions]
        self.classes = images.classes
        self._images = images
        self._positions = positions.tolist()

    def __len__(self) -> int:
        return len(self._positions)

    def read(self, index: int) -> Tensor:
        return self._images.read(self._positions[index])

    def where(self, index: int) -> str:
        return self._images.where(self._positions[index])


def at_most(images: ImageSet, count: int) -> ImageSet:
    """The set itself, or ``count`` images of it, always the same ones, chosen evenly at random."""
    if len(images) <= count:
        return images
    return taken(images, some_positions(len(images), count))


def some_positions(images: int, count: int) -> Tensor:
    """``count`` of the positions, or all there are: always the same, even at random, ascending."""
    return epoch_order(images, seed=0, epoch=0)[:count].sort().values


def labelled_share(images: ImageSet, fraction: float) -> ImageSet:
    """``fraction`` of every class, at least one image, always the same ones.

    The rule: the i-th image of class c (i from 0, in the set's order) has the rank of
    BLAKE2b("c/i"); the images of lowest rank are taken.
    """
    if images.labels is None or images.classes is None:
        raise UserError(f"{images.name} has no labels to take a share of.")
    if not 0 < fraction <= 1:
        raise UserError(f"a label fraction of {fraction:g} is not above 0 and at most 1.")
    chosen = []
    for label, name in enumerate(images.classes):
        members = (images.labels == label).nonzero()[:, 0].tolist()
        ranks = [hashlib.blake2b(f"{name}/{i}".encode()).digest() for i in range(len(members))]
        ranked = [member for _, member in sorted(zip(ranks, members, strict=True))]
        chosen += ranked[: max(1, round(fraction * len(members)))]
    return taken(images, torch.tensor(sorted(chosen)))


def taken(images: ImageSet, positions: Tensor) -> ImageSet:
    """The images at ``positions``, as a set of its own."""
    if isinstance(images, ArrayImages):
        pixels = images.pixels[positions.to(images.pixels.device)]
        labels = None if images.labels is None else images.labels[positions]
        return ArrayImages(images.name, pixels, labels, images.classes)
    return Subset(images, positions)
