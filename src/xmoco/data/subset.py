"""Parts of image sets by fixed rules, and sets joined to one."""

import hashlib
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from xmoco.data.batches import epoch_order
from xmoco.data.decode import EncodedImage, ImageFile, UnreadableImage
from xmoco.data.imagesets import ArrayImages, ImageSet, RaggedImages
from xmoco.errors import UserError

HELD_OUT = "validation, held out of the training images"
"""The split, as records tell it."""
MOST_HELD_OUT = 0.5
"""Of more, a class of two images would have none to learn from."""


class Subset(ImageSet):
    """The images at some positions of another set, in that order."""

    def __init__(self, images: ImageSet, positions: Tensor) -> None:
        self.name = images.name
        self.labels = None if images.labels is None else images.labels[positions]
        self.classes = images.classes
        self.passed_over = images.passed_over
        self._images = images
        self._positions = positions.tolist()

    def __len__(self) -> int:
        return len(self._positions)

    def read(self, index: int) -> Tensor:
        return self._images.read(self._positions[index])

    def encoded(self, index: int) -> EncodedImage | None:
        return self._images.encoded(self._positions[index])

    def encoded_all(self, indices: Sequence[int]) -> list[EncodedImage | UnreadableImage] | None:
        return self._images.encoded_all([self._positions[index] for index in indices])

    def file(self, index: int) -> ImageFile | None:
        return self._images.file(self._positions[index])

    def where(self, index: int) -> str:
        return self._images.where(self._positions[index])


class Joined(ImageSet):
    """The images of one set and then those of another, which has the same classes."""

    def __init__(self, first: ImageSet, second: ImageSet) -> None:
        self.name = f"{first.name} + {second.name}"
        self.labels = _labels_of_both(first, second)
        self.classes = first.classes
        self._first = first
        self._second = second

    def __len__(self) -> int:
        return len(self._first) + len(self._second)

    def read(self, index: int) -> Tensor:
        images, position = self._place(index)
        return images.read(position)

    def encoded(self, index: int) -> EncodedImage | None:
        images, position = self._place(index)
        return images.encoded(position)

    def encoded_all(self, indices: Sequence[int]) -> list[EncodedImage | UnreadableImage] | None:
        border = len(self._first)
        first = self._first.encoded_all([index for index in indices if index < border])
        second = self._second.encoded_all([index - border for index in indices if index >= border])
        if first is None or second is None:
            return None
        left = iter(first), iter(second)
        return [next(left[index >= border]) for index in indices]

    def file(self, index: int) -> ImageFile | None:
        images, position = self._place(index)
        return images.file(position)

    def where(self, index: int) -> str:
        images, position = self._place(index)
        return images.where(position)

    def _place(self, index: int) -> tuple[ImageSet, int]:
        if index < len(self._first):
            return self._first, index
        return self._second, index - len(self._first)


def joined(first: ImageSet, second: ImageSet) -> ImageSet:
    """The images of ``first`` and then those of ``second``, as one set."""
    both = Joined(first, second)
    if isinstance(first, ArrayImages) and isinstance(second, ArrayImages):
        pixels = torch.cat([first.pixels, second.pixels])
        return ArrayImages(both.name, pixels, both.labels, both.classes)
    return both


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
    if images.multi_label:
        raise UserError(
            f"an image of {images.name} may be of several classes, so there is no share of every "
            "class to take: use all labels."
        )
    if not 0 < fraction <= 1:
        raise UserError(f"a label fraction of {fraction:g} is not above 0 and at most 1.")
    chosen, _ = _parted_by_rank(images, lambda members: max(1, round(fraction * members)))
    return taken(images, chosen)


def some_of_every_class(images: ImageSet, count: int) -> tuple[ImageSet, ImageSet]:
    """``count`` images of every class, and the rest; the rule is that of ``labelled_share``."""
    chosen, others = _parted_by_rank(images, lambda _: count)
    return taken(images, chosen), taken(images, others)


def held_out(images: ImageSet, share: float) -> tuple[ImageSet, ImageSet]:
    """The images without a share of every class, at least one image, and that share.

    The rule is that of ``labelled_share``: the images of lowest rank are held out. Where an image
    may be of several classes, the whole set counts as one class, whose name is empty.
    """
    for name, members in _classes(images):
        if len(members) == 1 and not images.multi_label:
            raise UserError(
                f"{images.name} has a single image of class {name}, which cannot be both trained "
                "on and held out for validation; add images of it, or remove the class."
            )
    kept, chosen = held_out_positions(images, share)
    return taken(images, kept), taken(images, chosen)


def held_out_to_judge(images: ImageSet, share: float) -> tuple[ImageSet, ImageSet]:
    """The same for images that have no test split, with names that tell it."""
    if not 0 < share <= MOST_HELD_OUT:
        raise UserError(
            f"a share of {share:g} cannot be held out: give one above 0 and at most "
            f"{MOST_HELD_OUT:g}, such as 0.2."
        )
    kept, chosen = held_out(images, share)
    kept.name = f"{images.name}, {100 - 100 * share:g} % kept"
    chosen.name = f"{images.name}, {100 * share:g} % held out"
    return kept, chosen


def held_out_positions(images: ImageSet, share: float) -> tuple[Tensor, Tensor]:
    """The positions of the images that ``held_out`` keeps, and of those it holds out."""
    chosen, others = _parted_by_rank(images, lambda members: max(1, round(share * members)))
    return others, chosen


def taken(images: ImageSet, positions: Tensor) -> ImageSet:
    """The images at ``positions``, as a set of its own."""
    labels = None if images.labels is None else images.labels[positions]
    if isinstance(images, ArrayImages):
        pixels = images.pixels[positions.to(images.pixels.device)]
        return ArrayImages(images.name, pixels, labels, images.classes, _same(images, positions))
    if isinstance(images, RaggedImages):
        pictures = [images.pictures[position] for position in positions.tolist()]
        return RaggedImages(images.name, pictures, labels, images.classes, _same(images, positions))
    return Subset(images, positions)


def _same(images: ArrayImages | RaggedImages, positions: Tensor) -> Tensor:
    """The first of the places taken at which the same image stands: see ``ArrayImages.shown``."""
    first: dict[int, int] = {}
    shown = enumerate(images.shown[positions].tolist())
    return torch.tensor([first.setdefault(image, place) for place, image in shown])


def _parted_by_rank(images: ImageSet, count: Callable[[int], int]) -> tuple[Tensor, Tensor]:
    """Positions of the ``count(members)`` images of lowest rank in every class, and of the rest."""
    chosen = torch.zeros(len(images), dtype=torch.bool)
    for name, members in _classes(images):
        ranks = [hashlib.blake2b(f"{name}/{i}".encode()).digest() for i in range(len(members))]
        by_rank = sorted(range(len(members)), key=ranks.__getitem__)
        chosen[members[by_rank[: count(len(members))]]] = True
    return chosen.nonzero()[:, 0], (~chosen).nonzero()[:, 0]


def _classes(images: ImageSet) -> list[tuple[str, Tensor]]:
    """The name of every class and the positions of its images."""
    if images.labels is None or images.classes is None:
        raise UserError(f"{images.name} has no labels to take a share of.")
    if images.multi_label:
        return [("", torch.arange(len(images)))]
    return [
        (name, (images.labels == label).nonzero()[:, 0])
        for label, name in enumerate(images.classes)
    ]


def _labels_of_both(first: ImageSet, second: ImageSet) -> Tensor | None:
    if first.labels is None or second.labels is None:
        return None
    return torch.cat([first.labels, second.labels])
