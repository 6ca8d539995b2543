"""A part of an image set."""

from torch import Tensor

from xmoco.data.batches import epoch_order
from xmoco.data.sources import ArrayImages, ImageSet


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
    positions = epoch_order(len(images), seed=0, epoch=0)[:count].sort().values
    if isinstance(images, ArrayImages):
        pixels = images.pixels[positions.to(images.pixels.device)]
        labels = None if images.labels is None else images.labels[positions]
        return ArrayImages(images.name, pixels, labels, images.classes, images.shown[positions])
    return Subset(images, positions)
