"""What tests of batches share: images from a list, and batches to compare."""

import threading
import time
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from xmoco.data.batches import Batch, Batches
from xmoco.data.decode import UnreadableImage
from xmoco.data.imagesets import ImageSet

CPU = torch.device("cpu")


class Listed(ImageSet):
    """Images from a list; None is unreadable."""

    def __init__(self, pictures: list[Tensor | None], delay: float = 0.0) -> None:
        self.name = "listed"
        self.labels: Tensor = torch.arange(len(pictures))
        self.classes = None
        self.pictures = pictures
        self.delay = delay
        self.reads = 0

    def __len__(self) -> int:
        return len(self.pictures)

    def read(self, index: int) -> Tensor:
        self.reads += 1
        time.sleep(self.delay * (index % 3))  # some are slower than others
        picture = self.pictures[index]
        if picture is None:
            raise UnreadableImage("broken")
        return picture

    def where(self, index: int) -> str:
        return f"picture {index}"


def same_size(count: int) -> list[Tensor | None]:
    return [torch.full((3, 4, 5), index % 256, dtype=torch.uint8) for index in range(count)]


def many_sizes(count: int) -> list[Tensor | None]:
    generator = torch.Generator().manual_seed(0)
    sizes = torch.randint(2, 9, (count, 2), generator=generator).tolist()
    return [torch.randint(1, 256, (3, h, w), generator=generator).byte() for h, w in sizes]


def with_broken(count: int, broken: set[int]) -> list[Tensor | None]:
    return [None if i in broken else picture for i, picture in enumerate(same_size(count))]


def batches_of(images: ImageSet, batch: int = 4, **options: Any) -> Batches:
    return Batches(images, **({"batch": batch, "seed": 7, "device": CPU} | options))


def first(batches: Batches, count: int, step: int = 0) -> list[Batch]:
    return list(islice(batches.from_step(step), count))


def assert_same(some: list[Batch], others: list[Batch]) -> None:
    assert len(some) == len(others)
    for one, other in zip(some, others, strict=True):
        assert torch.equal(one.images, other.images)
        assert torch.equal(one.sizes, other.sizes)
        assert torch.equal(one.indices, other.indices)
        assert (one.labels is None) == (other.labels is None)
        if one.labels is not None and other.labels is not None:
            assert torch.equal(one.labels, other.labels)


def reading_threads() -> list[str]:
    """The threads that bring images."""
    return [t.name for t in threading.enumerate() if t.name.startswith("xmoco")]
