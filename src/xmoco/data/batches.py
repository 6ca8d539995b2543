"""Brings images to the device, batch after batch, in an order that is a function of seed and epoch.

Small sets of equally sized images are decoded once and stay on the device; a batch is then one
``index_select``. Larger ones are streamed: threads read and decode ahead of the consumer. Either
way the batches are the same bit for bit, for any number of threads, and any step can be the first:
a resumed run needs to know nothing but the step it had reached.

Images of different sizes share a batch by sitting top-left in a canvas as large as the largest.
"""

import hashlib
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import count, islice

import torch
from torch import Tensor

from xmoco.data.decode import UnreadableImage
from xmoco.data.sources import ArrayImages, ImageSet
from xmoco.errors import UserError

READ_AHEAD = 3
"""Batches in flight: one being assembled, one or two being decoded."""

Progress = Callable[[int, int], None]
"""Called with the number of images done and their total."""


@dataclass(frozen=True)
class Batch:
    """Some images of a set."""

    images: Tensor
    """uint8 (n, 3, H, W) on the device; beyond an image's own size there are zeros."""
    sizes: Tensor
    """int64 (n, 2) on the CPU: each image's own height and width."""
    indices: Tensor
    """int64 (n,) on the CPU: positions in the set of the images shown."""
    labels: Tensor | None
    """int64 (n,) on the CPU: the labels of the images shown, which are others than those asked for
    where unreadable images were replaced."""


class Unreadable:
    """The images that could not be read, in the order they were met; too many of them is an error.

    ``known`` are those of an earlier part of the same run.
    """

    def __init__(self, images: int, known: Iterable[tuple[str, str]] = ()) -> None:
        self.images = images
        self.limit = images // 100
        self._why = dict(known)

    def add(self, where: str, why: str) -> None:
        self._why.setdefault(where, why)
        if len(self) > self.limit:
            examples = ", ".join(f"{where} ({why})" for where, why in islice(self, 3))
            more = f" and {len(self) - 3} more" if len(self) > 3 else ""
            raise UserError(
                f"{len(self)} of {_images(self.images)} cannot be read, which is more than 1 %: "
                f"{examples}{more}."
            )

    def __len__(self) -> int:
        return len(self._why)

    def __iter__(self) -> Iterator[tuple[str, str]]:
        """Pairs of where and why."""
        return iter(self._why.items())


def epoch_order(images: int, seed: int, epoch: int) -> Tensor:
    """The order in which an epoch visits the images: a permutation, int64 (images,)."""
    # Hashing makes neighbouring seeds and epochs unrelated.
    digest = hashlib.blake2b(f"order {seed} {epoch}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "big"))
    return torch.randperm(images, generator=generator)


class Batches:
    """The endless sequence of one process's batches.

    Step ``s`` belongs to epoch ``s // steps_per_epoch``. Its global batch of ``batch`` images is
    cut into equal, contiguous slices, one for each process. Images left over at the end of an epoch
    are dropped; the next epoch's order is another one.
    """

    def __init__(
        self,
        images: ImageSet,
        *,
        batch: int,
        seed: int,
        device: torch.device,
        rank: int = 0,
        processes: int = 1,
        readers: int = 8,
        resident_gib: float = 4.0,
        known_unreadable: Iterable[tuple[str, str]] = (),
        on_progress: Progress | None = None,
    ) -> None:
        if batch % processes:
            raise UserError(
                f"a batch of {batch} images cannot be shared equally by {processes} processes; "
                f"{batch - batch % processes or processes} can."
            )
        if len(images) < batch:
            largest, least = len(images) - len(images) % processes, max(2, processes)
            way_out = (
                f"the largest batch possible is {largest}"
                if largest >= least
                else f"at least {least} are needed"
            )
            raise UserError(
                f"{images.name} has {_images(len(images))}, too few for a batch of {batch}; "
                f"{way_out}."
            )
        self.steps_per_epoch = len(images) // batch
        self.unreadable = Unreadable(len(images), known_unreadable)
        self.waited = 0.0
        """Seconds that the consumer has spent waiting for images."""
        self.images = resident(
            images,
            device,
            gib=resident_gib,
            readers=readers,
            unreadable=self.unreadable,
            on_progress=on_progress,
        )
        """The set that batches are taken from: the given one, or its decoded copy on the device."""
        self._batch = batch
        self._seed = seed
        self._device = device
        self._rank = rank
        self._share = batch // processes
        self._readers = readers

    def from_step(self, step: int) -> Generator[Batch]:
        """This process's batches from ``step`` on, without end; close it to stop its threads."""
        positions = self._positions(step)
        with closing(
            _batches(self.images, positions, self._device, self._readers, self.unreadable)
        ) as batches:
            while True:
                started = time.perf_counter()
                batch = next(batches)
                self.waited += time.perf_counter() - started
                yield batch

    def _positions(self, step: int) -> Iterator[Tensor]:
        """The positions in the set of this process's images, step by step."""
        first_epoch, first_batch = divmod(step, self.steps_per_epoch)
        for epoch in count(first_epoch):
            order = epoch_order(len(self.images), self._seed, epoch)
            for batch in range(first_batch, self.steps_per_epoch):
                start = batch * self._batch + self._rank * self._share
                yield order[start : start + self._share]
            first_batch = 0


def in_order(
    images: ImageSet,
    batch: int,
    device: torch.device,
    *,
    readers: int = 8,
    unreadable: Unreadable | None = None,
) -> Generator[Batch]:
    """All images of a set once, first to last; the last batch may be smaller."""
    if unreadable is None:
        unreadable = Unreadable(len(images))
    positions = iter(torch.split(torch.arange(len(images)), batch))
    return _batches(images, positions, device, readers, unreadable)


def at_positions(images: ImageSet, positions: Tensor, device: torch.device) -> Batch:
    """The images at some positions, replaced where unreadable as everywhere else."""
    with closing(
        _batches(images, iter([positions]), device, readers=8, unreadable=Unreadable(len(images)))
    ) as batches:
        return next(batches)


def resident(
    images: ImageSet,
    device: torch.device,
    *,
    gib: float = 4.0,
    readers: int = 8,
    unreadable: Unreadable | None = None,
    on_progress: Progress | None = None,
) -> ImageSet:
    """A decoded copy of the set on ``device``, or the set itself if that does not fit into ``gib``.

    A set whose images differ in size is returned as it is, as soon as a second size turns up.
    """
    limit = int(gib * 2**30)
    labels = images.labels
    if isinstance(images, ArrayImages):
        pixels, shown = images.pixels, images.shown
        if pixels.numel() > limit:
            return images
    else:
        if unreadable is None:
            unreadable = Unreadable(len(images))
        decoded = _decode_all(images, limit, readers, unreadable, on_progress)
        if decoded is None:
            return images
        pixels, shown = decoded
        labels = None if labels is None else labels[shown]
    return ArrayImages(images.name, pixels.to(device), labels, images.classes, shown)


def _decode_all(
    images: ImageSet, limit: int, readers: int, unreadable: Unreadable, on_progress: Progress | None
) -> tuple[Tensor, Tensor] | None:
    """All images and their positions, if they share one size and fit into ``limit`` bytes."""
    # The first image tells the size to expect, so that a huge set is not decoded in vain.
    first = _read_or_next(images, 0, unreadable.limit)
    if first.image is None:
        _note_failures(images, first, unreadable)
    assert first.image is not None, "an image is missing only past the limit, which raises"
    if first.image.numel() * len(images) > limit:
        return None
    pixels = torch.empty((len(images), *first.image.shape), dtype=torch.uint8)
    size = torch.tensor(first.image.shape[1:])
    shown = torch.empty(len(images), dtype=torch.int64)
    done = 0
    with closing(
        in_order(images, 256, torch.device("cpu"), readers=readers, unreadable=unreadable)
    ) as batches:
        for batch in batches:
            if (batch.sizes != size).any():
                return None
            here = slice(done, done + len(batch.indices))
            pixels[here], shown[here] = batch.images, batch.indices
            done = here.stop
            if on_progress is not None:
                on_progress(done, len(images))
    return pixels, shown


def _batches(
    images: ImageSet,
    positions: Iterator[Tensor],
    device: torch.device,
    readers: int,
    unreadable: Unreadable,
) -> Generator[Batch]:
    if isinstance(images, ArrayImages):
        yield from _taken(images, positions, device)
    else:
        yield from _streamed(images, positions, device, readers, unreadable)


def _taken(
    images: ArrayImages, positions: Iterator[Tensor], device: torch.device
) -> Generator[Batch]:
    """Batches of a set that is decoded already."""
    size = torch.tensor(images.pixels.shape[2:])
    for chosen in positions:
        pixels = images.pixels.index_select(0, chosen.to(images.pixels.device, non_blocking=True))
        yield Batch(
            images=pixels.to(device, non_blocking=True),
            sizes=size.expand(len(chosen), 2),
            indices=images.shown[chosen],
            labels=None if images.labels is None else images.labels[chosen],
        )


@dataclass(frozen=True)
class _Reading:
    """An image, or none after too many failures; its position; what could not be read before it."""

    image: Tensor | None
    index: int
    failures: list[tuple[int, str]]


def _read_or_next(images: ImageSet, index: int, failures_allowed: int) -> _Reading:
    """The image at ``index`` or, where that is unreadable, the next readable one."""
    failures: list[tuple[int, str]] = []
    while len(failures) <= failures_allowed:
        try:
            return _Reading(images.read(index), index, failures)
        except UnreadableImage as error:
            failures.append((index, str(error)))
            index = (index + 1) % len(images)
    return _Reading(None, index, failures)


def _note_failures(images: ImageSet, reading: _Reading, unreadable: Unreadable) -> None:
    for index, why in reading.failures:
        unreadable.add(images.where(index), why)


def _streamed(
    images: ImageSet,
    positions: Iterator[Tensor],
    device: torch.device,
    readers: int,
    unreadable: Unreadable,
) -> Generator[Batch]:
    """Batches read ahead of the consumer, who gets them in order, whichever thread is first.

    Many threads read and decode; one more puts decoded images together, so that the consumer's own
    thread has nothing left to do but to hand the batch to the device.
    """
    reader = ThreadPoolExecutor(readers, "xmoco-read")
    assembler = ThreadPoolExecutor(1, "xmoco-assemble")
    pin = device.type == "cuda"

    def read(chosen: list[int]) -> list[_Reading]:
        return [_read_or_next(images, index, unreadable.limit) for index in chosen]

    def assemble(parts: list[Future[list[_Reading]]]) -> tuple[list[_Reading], Batch | None]:
        readings = [reading for part in parts for reading in part.result()]
        return readings, _assembled(readings, images.labels, pin)

    def begin(chosen: Tensor) -> Future[tuple[list[_Reading], Batch | None]]:
        # A few images per task keep all threads busy at little cost in hand-overs.
        task = max(1, len(chosen) // (4 * readers))
        parts = [reader.submit(read, part.tolist()) for part in torch.split(chosen, task)]
        return assembler.submit(assemble, parts)

    try:
        ahead = deque(begin(chosen) for chosen in islice(positions, READ_AHEAD))
        while ahead:
            readings, batch = ahead.popleft().result()
            # Noted here, not by the threads, so that order and moment do not depend on timing.
            for reading in readings:
                _note_failures(images, reading, unreadable)
            assert batch is not None, "a batch is missing only past the limit, which raises"
            ahead.extend(begin(chosen) for chosen in islice(positions, 1))
            yield replace(batch, images=batch.images.to(device, non_blocking=pin))
    finally:
        reader.shutdown(wait=False, cancel_futures=True)
        assembler.shutdown(wait=True, cancel_futures=True)
        reader.shutdown(wait=True)


def _assembled(readings: list[_Reading], labels: Tensor | None, pin: bool) -> Batch | None:
    """One canvas for all images; none if one of them is missing."""
    images = [reading.image for reading in readings if reading.image is not None]
    if len(images) < len(readings):
        return None
    sizes = torch.tensor([image.shape[1:] for image in images])
    height, width = sizes.amax(0).tolist()
    new = torch.empty if (sizes == sizes[0]).all() else torch.zeros
    canvas = new((len(images), 3, height, width), dtype=torch.uint8, pin_memory=pin)
    for place, image, (high, wide) in zip(canvas, images, sizes.tolist(), strict=True):
        place[:, :high, :wide] = image
    indices = torch.tensor([reading.index for reading in readings])
    return Batch(canvas, sizes, indices, None if labels is None else labels[indices])


def _images(count: int) -> str:
    return "1 image" if count == 1 else f"{count} images"
