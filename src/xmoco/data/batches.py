"""Brings images to the device, batch after batch, in an order that is a function of seed and epoch.

Small sets are decoded once and stay on the device (``preload``); larger ones are read and decoded
ahead of the consumer (``streaming``). Each way, on one kind of device, the batches are the same bit
for bit, for any number of threads, and any step can be the first: a resumed run needs to know
nothing but the step it had reached. On a CPU both ways give the same; on CUDA they differ by
rounding, as small JPEG files are decoded by the CPU when preloaded, and by the GPU when streamed.

Images of different sizes share a batch by sitting top-left in a canvas as large as the largest.
"""

import hashlib
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing, contextmanager
from itertools import count

import numpy as np
import torch
from torch import Tensor

from xmoco.data.imagesets import ArrayImages, ImageSet, RaggedImages
from xmoco.data.preload import Progress, held, preload
from xmoco.data.streaming import Batch, streamed
from xmoco.data.unreadable import Unreadable, counted
from xmoco.errors import UserError

__all__ = [
    "Batch",
    "Batches",
    "Progress",
    "Unreadable",
    "at_positions",
    "batches_per_epoch",
    "epoch_order",
    "equal_share",
    "in_order",
    "preload",
]


Order = Callable[[int, int, int], Tensor]
"""The order of an epoch: a permutation, from the number of images, the seed and the epoch."""


def epoch_order(images: int, seed: int, epoch: int) -> Tensor:
    """The order in which an epoch visits the images: a permutation, int64 (images,)."""
    # Hashing makes neighbouring seeds and epochs unrelated.
    digest = hashlib.blake2b(f"order {seed} {epoch}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "big"))
    return torch.randperm(images, generator=generator)


def equal_share(batch: int, processes: int, parts: int = 1) -> int:
    """Images of a batch that each process has in each part of a step."""
    shares = processes * parts
    if batch % shares:
        among = f"{processes} processes" if processes > 1 else ""
        cut = f"{parts} parts" if parts > 1 else ""
        raise UserError(
            f"a batch of {batch} images cannot be shared equally by "
            f"{' and '.join(filter(None, (among, cut)))}; {batch - batch % shares or shares} can."
        )
    return batch // shares


def batches_per_epoch(images: ImageSet, batch: int, processes: int, parts: int = 1) -> int:
    """How many batches the images make; those left over make none."""
    equal_share(batch, processes, parts)
    shares = processes * parts
    if len(images) < batch:
        largest, least = len(images) - len(images) % shares, max(2, shares)
        way_out = (
            f"the largest batch possible is {largest}"
            if largest >= least
            else f"at least {least} are needed"
        )
        raise UserError(
            f"{images.name} has {counted(len(images))}, too few for a batch of {batch}; {way_out}."
        )
    return len(images) // batch


class Batches:
    """The endless sequence of one process's batches.

    Step ``s`` belongs to epoch ``s // steps_per_epoch``. Its global batch of ``batch`` images is
    cut into ``parts`` (whose gradients add up to those of the step), and each part into equal,
    contiguous slices, one for each process. Images left over at the end of an epoch are dropped;
    the next epoch's order is another one.
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
        parts: int = 1,
        readers: int = 8,
        preload_gib: float = 4.0,
        order: Order = epoch_order,
        known_unreadable: Iterable[tuple[str, str]] = (),
        on_progress: Progress | None = None,
    ) -> None:
        self.steps_per_epoch = batches_per_epoch(images, batch, processes, parts)
        self.unreadable = Unreadable(len(images), known_unreadable)
        self._waiting = Waiting(device)
        self.images = preload(
            images,
            device,
            gib=preload_gib,
            readers=readers,
            unreadable=self.unreadable,
            on_progress=on_progress,
        )
        """The set that batches are taken from: the given one, or its decoded copy on the device."""
        self._batch = batch
        self._seed = seed
        self._device = device
        self._readers = readers
        self._order = order
        rows = np.arange(batch).reshape(parts, processes, -1)[:, rank]
        self.rows = rows.ravel()
        """Which of the global batch's images are this process's."""

    def from_step(self, step: int) -> Generator[Batch]:
        """This process's batches from ``step`` on, without end; close it to stop its threads."""
        positions = self._positions(step)
        with closing(
            _batches(self.images, positions, self._device, self._readers, self.unreadable)
        ) as batches:
            while True:
                with self._waiting.measured():
                    batch = next(batches)
                yield batch

    @property
    def waited(self) -> float:
        """Seconds that the consumer has waited for images so far, as ``Waiting`` counts them."""
        return self._waiting.seconds()

    def _positions(self, step: int) -> Iterator[Tensor]:
        """The positions in the set of this process's images, step by step."""
        first_epoch, first_batch = divmod(step, self.steps_per_epoch)
        rows = torch.from_numpy(self.rows)
        for epoch in count(first_epoch):
            order = self._order(len(self.images), self._seed, epoch)
            for batch in range(first_batch, self.steps_per_epoch):
                yield order[batch * self._batch + rows]
            first_batch = 0


def in_order(
    images: ImageSet,
    batch: int,
    device: torch.device,
    *,
    part: range | None = None,
    readers: int = 8,
    unreadable: Unreadable | None = None,
) -> Generator[Batch]:
    """All images of a set, or a part of it, once, first to last; the last batch may be smaller."""
    if unreadable is None:
        unreadable = Unreadable(len(images))
    chosen = torch.arange(len(images)) if part is None else torch.arange(part.start, part.stop)
    return _batches(images, iter(torch.split(chosen, batch)), device, readers, unreadable)


def at_positions(images: ImageSet, positions: Tensor, device: torch.device) -> Batch:
    """The images at some positions, replaced where unreadable as everywhere else."""
    with closing(
        _batches(images, iter([positions]), device, readers=8, unreadable=Unreadable(len(images)))
    ) as batches:
        return next(batches)


def _batches(
    images: ImageSet,
    positions: Iterator[Tensor],
    device: torch.device,
    readers: int,
    unreadable: Unreadable,
) -> Generator[Batch]:
    if isinstance(images, ArrayImages | RaggedImages):
        return held(images, positions, device)
    return streamed(images, positions, device, readers, unreadable)


class Waiting:
    """Adds up how long images were waited for.

    On CUDA the device's time counts: the host runs ahead, and may wait for the next batch while the
    device has work enough. So two events are recorded in the consumer's stream, one before and one
    after the host gets its batch. What lies between them is how long the device stood idle for want
    of images, plus the moment it takes to gather a preloaded batch. Events are looked at once they
    have passed, so that nobody waits for them. Elsewhere the host's time counts.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._seconds = 0.0
        self._ahead: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()

    @contextmanager
    def measured(self) -> Iterator[None]:
        if self._device.type != "cuda":
            started = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - started
            return
        stream = torch.cuda.current_stream(self._device)
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record(stream)
        yield
        after.record(stream)
        self._ahead.append((before, after))
        self.seconds()  # lest events pile up

    def seconds(self) -> float:
        while self._ahead and self._ahead[0][1].query():
            before, after = self._ahead.popleft()
            self._seconds += before.elapsed_time(after) / 1000
        return self._seconds
