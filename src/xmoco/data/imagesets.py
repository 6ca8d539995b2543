"""What every source of images becomes: an ``ImageSet``, read by position."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from xmoco.data.decode import EncodedImage, ImageFile, UnreadableImage, decode_rgb
from xmoco.data.trees import Tree


class ImageSet(ABC):
    """Images by position. Reading is safe from many threads at once."""

    name: str
    """Shown to users and kept in records: ``folder photos (train)``."""
    labels: Tensor | None
    """On the CPU. int64 (n,): each image's position in ``classes``; or, where an image may be of
    several classes or of none, bool (n, classes)."""
    classes: tuple[str, ...] | None
    passed_over: str | None = None
    """What was found beside these images and is not used, for a person."""
    misplaced: str | None = None
    """Which image keeps folders from being classes, for a person."""

    @property
    def multi_label(self) -> bool:
        """Whether an image may be of several classes."""
        return self.labels is not None and self.labels.ndim == 2

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def read(self, index: int) -> Tensor:
        """The image as uint8 (3, height, width) on the CPU; raises ``UnreadableImage``."""

    @abstractmethod
    def where(self, index: int) -> str:
        """How to find the image, for messages."""

    def encoded(self, index: int) -> EncodedImage | None:  # noqa: ARG002
        """The image's file, for who decodes it elsewhere, if there is one. Raises as ``read``."""
        return None

    def encoded_all(
        self,
        indices: Sequence[int],  # noqa: ARG002
    ) -> list[EncodedImage | UnreadableImage] | None:
        """The files of several images, where it is better to ask for them together."""
        return None

    def file(self, index: int) -> ImageFile | None:  # noqa: ARG002
        """Where that file is, for who also reads it elsewhere, if it is one on disk."""
        return None


class ArrayImages(ImageSet):
    """Equally sized images that are decoded already: uint8 (n, 3, height, width), on any device.

    ``labels`` belong to the pictures as they stand here. ``shown`` gives the position in the
    original set of the picture at each place: other than 0, 1, 2 … where unreadable images were
    replaced.
    """

    def __init__(
        self,
        name: str,
        pixels: Tensor,
        labels: Tensor | None = None,
        classes: tuple[str, ...] | None = None,
        shown: Tensor | None = None,
    ) -> None:
        self.name = name
        self.pixels = pixels
        self.labels = labels
        self.classes = classes
        self.shown = torch.arange(len(pixels)) if shown is None else shown

    def __len__(self) -> int:
        return len(self.pixels)

    def read(self, index: int) -> Tensor:
        return self.pixels[index].cpu()

    def where(self, index: int) -> str:
        return f"{self.name}: image {index}"


class RaggedImages(ImageSet):
    """Decoded images of different sizes: each uint8 (3, height, width), all on one device.

    ``labels`` and ``shown`` are as those of ``ArrayImages``.
    """

    def __init__(
        self,
        name: str,
        pictures: list[Tensor],
        labels: Tensor | None = None,
        classes: tuple[str, ...] | None = None,
        shown: Tensor | None = None,
    ) -> None:
        self.name = name
        self.pictures = pictures
        self.labels = labels
        self.classes = classes
        self.shown = torch.arange(len(pictures)) if shown is None else shown

    def __len__(self) -> int:
        return len(self.pictures)

    def read(self, index: int) -> Tensor:
        return self.pictures[index].cpu()

    def where(self, index: int) -> str:
        return f"{self.name}: image {index}"


class EncodedImages(ImageSet):
    """Image files in a folder or an archive, read and decoded when asked for."""

    def __init__(
        self,
        name: str,
        tree: Tree,
        paths: list[str],
        labels: Tensor | None,
        classes: tuple[str, ...] | None,
        short_side: int | None,
    ) -> None:
        self.name = name
        self.labels = labels
        self.classes = classes
        self._tree = tree
        self._paths = paths
        self._short_side = short_side

    def __len__(self) -> int:
        return len(self._paths)

    def read(self, index: int) -> Tensor:
        return decode_rgb(*self.encoded(index))

    def encoded(self, index: int) -> EncodedImage:
        try:
            return EncodedImage(self._tree.read(self._paths[index]), self._short_side)
        except OSError as error:
            raise UnreadableImage(error.strerror or str(error)) from error

    def file(self, index: int) -> ImageFile | None:
        place = self._tree.place(self._paths[index])
        return None if place is None else ImageFile(place, self._short_side)

    def where(self, index: int) -> str:
        return self._tree.where(self._paths[index])
