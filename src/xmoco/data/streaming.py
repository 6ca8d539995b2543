"""Reads and decodes images ahead of the consumer, batch after batch.

Many threads read; one more puts the images of a batch together. Where they are decoded depends on
the device:

- Away from CUDA the reading threads decode; the consumer takes the finished batch to the device.
- On CUDA the threads only have files read (``file_readers``), tell plain JPEG files from others by
  their headers, and have the others decoded (``decoders``), each by a process. The GPU decodes the
  JPEG files of a batch together, on a stream of its own while training goes on. The consumer gets a
  batch that lies ready on the device.

The consumer gets batches in order, whichever thread is first, and the next image in place of an
unreadable one, or ``GREY`` where those are to be left out. At most ``READ_AHEAD`` batches are under
way, so memory does not grow with the set.
"""

import math
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import islice
from typing import TypeVar

import torch
from torch import Tensor

from xmoco.data import processes
from xmoco.data.decode import EncodedImage, UnreadableImage, decode_if_readable, decode_rgb
from xmoco.data.decoders import Decoders
from xmoco.data.file_readers import FileReaders
from xmoco.data.imagesets import ImageSet
from xmoco.data.jpeg import PlainJpeg, decode_jpegs, nvjpeg_works, plain_jpeg
from xmoco.data.unreadable import Unreadable

T = TypeVar("T")
R = TypeVar("R")

READ_AHEAD = 3
"""Batches under way: one being put together, one or two being read."""
GREY = torch.full((3, 8, 8), 128, dtype=torch.uint8)
"""Stands where an unreadable image will be left out: any image does, and this one is there."""


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
    """On the CPU: the labels of the images shown, which are others than those asked for where
    unreadable images were replaced. int64 (n,) or, with several per image, bool (n, classes)."""


def sent(numbers: Tensor, device: torch.device) -> Tensor:
    """Numbers of the host on the device, without waiting for them."""
    if device.type == "cuda":  # only from pinned memory does a copy run beside the host
        return numbers.pin_memory().to(device, non_blocking=True)
    return numbers.to(device)


def on_one_canvas(images: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Images (3, height, width) top left in one tensor as large as the largest, and their sizes."""
    sizes = torch.tensor([image.shape[1:] for image in images])
    if (sizes == sizes[0]).all():
        return torch.stack(images), sizes
    height, width = sizes.amax(0).tolist()
    canvas = images[0].new_zeros((len(images), 3, height, width))
    places = [
        place[:, :high, :wide] for place, (high, wide) in zip(canvas, sizes.tolist(), strict=True)
    ]
    torch._foreach_copy_(places, images)
    return canvas, sizes


def streamed(
    images: ImageSet,
    positions: Iterator[Tensor],
    device: torch.device,
    readers: int,
    unreadable: Unreadable,
) -> Generator[Batch]:
    """The batches at ``positions``; close it to stop its threads."""
    decoding = _decoding(images, device, unreadable)
    reader = ThreadPoolExecutor(readers, "xmoco-read")
    assembler = ThreadPoolExecutor(1, "xmoco-assemble")

    def read(chosen: list[int]) -> list[_Reading]:
        return [
            _read_or_next(images, index, unreadable, decoding.read)
            if image is None
            else _Reading(image, index, [])
            for index, image in zip(chosen, decoding.read_all(chosen), strict=True)
        ]

    def assemble(parts: list[Future[list[_Reading]]]) -> _Assembled:
        return decoding.assemble([reading for part in parts for reading in part.result()])

    def begin(chosen: Tensor) -> Future[_Assembled]:
        task = max(1, math.ceil(len(chosen) / (decoding.tasks_per_reader * readers)))
        parts = [reader.submit(read, part.tolist()) for part in torch.split(chosen, task)]
        return assembler.submit(assemble, parts)

    try:
        ahead = deque(begin(chosen) for chosen in islice(positions, READ_AHEAD))
        while ahead:
            assembled = ahead.popleft().result()
            # Noted here, not by the threads, so that order and moment do not depend on timing.
            unreadable.add_all((images.where(index), why) for index, why in assembled.failures)
            assert assembled.batch is not None, "it is missing only past the limit, which raises"
            ahead.extend(begin(chosen) for chosen in islice(positions, 1))
            yield decoding.hand_over(assembled.batch)
    finally:
        reader.shutdown(wait=False, cancel_futures=True)
        assembler.shutdown(wait=True, cancel_futures=True)
        reader.shutdown(wait=True)
        decoding.close()


@dataclass(frozen=True)
class _Reading:
    """An image, or none after too many failures; its position; what could not be read before it."""

    image: Tensor | PlainJpeg | None
    index: int
    failures: list[tuple[int, str]]


@dataclass(frozen=True)
class _Assembled:
    """A batch, or none if an image is missing; what could not be read for it."""

    batch: Batch | None
    failures: list[tuple[int, str]]


class _ByThreads:
    """The reading threads decode; the batch is put together in host memory."""

    tasks_per_reader = 4
    """Into which the images of a batch are cut: a few, lest one thread be late."""

    def __init__(self, images: ImageSet, device: torch.device) -> None:
        self.images = images
        self.device = device

    def read(self, index: int) -> Tensor | PlainJpeg:
        """For the reading threads."""
        return self.images.read(index)

    def read_all(self, indices: list[int]) -> list[Tensor | PlainJpeg | None]:
        """For the reading threads: several images, none where one is unreadable."""
        files = self.images.encoded_all(indices)
        if files is None:
            return [_readable(self.read, index) for index in indices]
        return [
            None if isinstance(file, UnreadableImage) else decode_if_readable(file)
            for file in files
        ]

    def close(self) -> None:
        """When all threads have ended."""

    def assemble(self, readings: list[_Reading]) -> _Assembled:
        """For the assembling thread."""
        failures = [failure for reading in readings for failure in reading.failures]
        pictures = [r.image for r in readings if isinstance(r.image, Tensor)]
        if len(pictures) < len(readings):
            return _Assembled(None, failures)
        canvas, sizes = on_one_canvas(pictures)
        indices = torch.tensor([reading.index for reading in readings])
        labels = None if self.images.labels is None else self.images.labels[indices]
        return _Assembled(Batch(canvas, sizes, indices, labels), failures)

    def hand_over(self, batch: Batch) -> Batch:
        """For the consumer."""
        return replace(batch, images=batch.images.to(self.device))


class _ByGpu(_ByThreads):
    """The GPU decodes plain JPEG files, processes the others; batches are put together on the GPU.

    All that happens on a stream of its own, and the assembling thread waits for it. A batch handed
    over is therefore complete: the consumer's stream need not wait for another, and a late batch
    shows as a consumer who waits.
    """

    # Every hand-over takes Python's lock from the thread that trains.
    tasks_per_reader = 1

    def __init__(self, images: ImageSet, device: torch.device, unreadable: Unreadable) -> None:
        super().__init__(images, device)
        self.unreadable = unreadable
        self.takes_jpeg = nvjpeg_works(device)
        self.files = FileReaders()
        self.decoders = Decoders()
        # Before the kernels of training, which are many and long, these few must not queue.
        self.stream = torch.cuda.Stream(device, priority=-1)

    def read(self, index: int) -> Tensor | PlainJpeg:
        image = self._met(index)
        return decode_rgb(*image) if isinstance(image, EncodedImage) else image

    def read_all(self, indices: list[int]) -> list[Tensor | PlainJpeg | None]:
        images = self._all_met(indices)
        decoded = iter(self.decoders.decode([i for i in images if isinstance(i, EncodedImage)]))
        return [next(decoded) if isinstance(image, EncodedImage) else image for image in images]

    def _all_met(self, indices: list[int]) -> list[Tensor | PlainJpeg | EncodedImage | None]:
        files = [file for index in indices if (file := self.images.file(index)) is not None]
        if processes.POSSIBLE and len(files) == len(indices):
            contents = self.files.read([file.place for file in files])
            return [
                None
                if isinstance(content, OSError)
                else self._looked_at(EncodedImage(content, file.short_side))
                for content, file in zip(contents, files, strict=True)
            ]
        encoded = self.images.encoded_all(indices)
        if encoded is None:
            return [_readable(self._met, index) for index in indices]
        return [
            None if isinstance(file, UnreadableImage) else self._looked_at(file) for file in encoded
        ]

    def _met(self, index: int) -> Tensor | PlainJpeg | EncodedImage:
        file = self.images.encoded(index)
        return self.images.read(index) if file is None else self._looked_at(file)

    def _looked_at(self, file: EncodedImage) -> PlainJpeg | EncodedImage:
        """Plain JPEG files are left to the GPU."""
        jpeg = plain_jpeg(file) if self.takes_jpeg else None
        return file if jpeg is None else jpeg

    def close(self) -> None:
        self.files.close()
        self.decoders.close()

    def assemble(self, readings: list[_Reading]) -> _Assembled:
        with torch.cuda.stream(self.stream):
            assembled = super().assemble(self._on_device(readings))
        self.stream.synchronize()
        return assembled

    def hand_over(self, batch: Batch) -> Batch:
        # The batch's memory belongs to the other stream, which is to know who else uses it.
        batch.images.record_stream(torch.cuda.current_stream(self.device))
        return batch

    def _on_device(self, readings: list[_Reading]) -> list[_Reading]:
        jpegs = [r.image for r in readings if isinstance(r.image, PlainJpeg)]
        decoded = iter(decode_jpegs(jpegs, self.device))
        done = []
        for reading in readings:
            if isinstance(reading.image, PlainJpeg):
                image = next(decoded)
                if image is None:  # it is damaged, or else Pillow knows better
                    again = _read_or_next(
                        self.images, reading.index, self.unreadable, self.images.read
                    )
                    reading = replace(again, failures=reading.failures + again.failures)
                else:
                    reading = replace(reading, image=image)
            done.append(reading)
        on_host = {
            place: reading.image
            for place, reading in enumerate(done)
            if isinstance(reading.image, Tensor) and reading.image.is_cpu
        }
        sent = _sent_together([*on_host.values()], self.device)
        for place, image in zip(on_host, sent, strict=True):
            done[place] = replace(done[place], image=image)
        return done


def _sent_together(images: list[Tensor], device: torch.device) -> list[Tensor]:
    """Images (3, height, width) of the host on the device, by a single copy, not waited for.

    The memory that is copied from is kept by PyTorch until that is done.
    """
    if not images:
        return []
    pixels = torch.empty(
        sum(image.numel() for image in images),
        dtype=torch.uint8,
        pin_memory=device.type == "cuda",  # only from there does a copy run beside the host
    )
    torch.cat([image.flatten() for image in images], out=pixels)
    parts = pixels.to(device, non_blocking=True).split([image.numel() for image in images])
    return [part.view(image.shape) for part, image in zip(parts, images, strict=True)]


def _decoding(images: ImageSet, device: torch.device, unreadable: Unreadable) -> _ByThreads:
    if device.type == "cuda":
        return _ByGpu(images, device, unreadable)
    return _ByThreads(images, device)


def _readable(read: Callable[[T], R], what: T) -> R | None:
    try:
        return read(what)
    except UnreadableImage:
        return None


def _read_or_next(
    images: ImageSet,
    index: int,
    unreadable: Unreadable,
    read: Callable[[int], Tensor | PlainJpeg],
) -> _Reading:
    """The image at ``index`` or, where that is unreadable, the next readable one or ``GREY``."""
    failures: list[tuple[int, str]] = []
    while len(failures) <= unreadable.limit:
        try:
            return _Reading(read(index), index, failures)
        except UnreadableImage as error:
            failures.append((index, str(error)))
            if unreadable.left_out:
                return _Reading(GREY, index, failures)
            index = (index + 1) % len(images)
    return _Reading(None, index, failures)
