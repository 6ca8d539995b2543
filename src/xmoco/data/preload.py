"""Keeps small sets decoded on the device, so that a batch costs no more than its own copy.

Images of one size lie in one tensor, and a batch is one ``index_select``. Images of different sizes
lie end to end, and those of a batch are copied onto its canvas. Either way a batch is that which
streaming would have given, but for what two decoders of JPEG files make of the same file.
"""

import math
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, suppress
from statistics import median

import torch
from torch import Tensor

from xmoco.data.decode import UnreadableImage
from xmoco.data.imagesets import ArrayImages, ImageSet, RaggedImages
from xmoco.data.streaming import Batch, on_one_canvas, streamed
from xmoco.data.unreadable import Unreadable

LOOKED_AT = 8
"""So many images tell the size to expect, so that a huge set is not decoded in vain."""
DECODED_AT_ONCE = 256
SMALL = 2**13
"""Bytes of files, as of photographs of 160 px, that threads decode sooner than a GPU does: there,
each is a task of its own, however small. Nothing trains yet that would need Python's lock."""

Progress = Callable[[int, int], None]
"""Called with the number of images done and their total."""


def preload(
    images: ImageSet,
    device: torch.device,
    *,
    gib: float = 4.0,
    readers: int = 8,
    unreadable: Unreadable | None = None,
    on_progress: Progress | None = None,
) -> ImageSet:
    """A decoded copy of the set on ``device``, or the set itself if that does not fit ``gib``."""
    limit = int(gib * 2**30)
    if limit == 0 or isinstance(images, RaggedImages):
        return images
    if isinstance(images, ArrayImages):
        if images.pixels.numel() > limit:
            return images
        pixels = images.pixels.to(device)
        return ArrayImages(images.name, pixels, images.labels, images.classes, images.shown)
    sizes = _some_sizes(images, readers)
    if 3 * float(sizes.prod(1).double().mean()) * len(images) > limit:
        return images
    decoder = torch.device("cpu") if _small_files(images) else device
    if unreadable is None:
        unreadable = Unreadable(len(images))
    kept: ImageSet | None = None
    if (sizes == sizes[0]).all():
        with closing(_everything(images, decoder, readers, unreadable, on_progress)) as batches:
            kept = _array(images, sizes[0], device, batches)
    if kept is None:
        with closing(_everything(images, decoder, readers, unreadable, on_progress)) as batches:
            kept = _ragged(images, limit, device, batches)
    return images if kept is None else kept


def held(
    images: ArrayImages | RaggedImages, positions: Iterator[Tensor], device: torch.device
) -> Generator[Batch]:
    """Batches of a set that is decoded already."""
    for chosen in positions:
        if isinstance(images, ArrayImages):
            places = _sent(chosen, images.pixels.device)
            pixels = images.pixels.index_select(0, places)
            sizes = torch.tensor(pixels.shape[2:]).expand(len(chosen), 2)
        else:
            pixels, sizes = on_one_canvas([images.pictures[place] for place in chosen.tolist()])
        yield Batch(
            images=_sent(pixels, device),
            sizes=sizes,
            indices=images.shown[chosen],
            labels=None if images.labels is None else images.labels[chosen],
        )


def _sent(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on the device, for whose work so far nobody waits."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()  # only from there can the copy go on by itself
    return tensor.to(device, non_blocking=True)


def _places(images: ImageSet) -> list[int]:
    """Here and there."""
    return sorted({place * len(images) // LOOKED_AT for place in range(LOOKED_AT)})


def _small_files(images: ImageSet) -> bool:
    """By the files, as images may be kept smaller than they are."""
    lengths = []
    for place in _places(images):
        with suppress(UnreadableImage):  # met again in its turn
            file = images.encoded(place)
            lengths.append(math.inf if file is None else len(file.data))
    return bool(lengths) and median(lengths) <= SMALL


def _some_sizes(images: ImageSet, readers: int) -> Tensor:
    """Sizes of images here and there."""
    places = torch.tensor(_places(images))
    # What turns out unreadable here is met again in its turn, and noted then.
    broken = Unreadable(len(images))
    cpu = torch.device("cpu")
    with closing(streamed(images, iter([places]), cpu, readers, broken)) as looks:
        return next(looks).sizes


def _everything(
    images: ImageSet,
    device: torch.device,
    readers: int,
    unreadable: Unreadable,
    on_progress: Progress | None,
) -> Generator[Batch]:
    positions = iter(torch.split(torch.arange(len(images)), DECODED_AT_ONCE))
    done = 0
    with closing(streamed(images, positions, device, readers, unreadable)) as batches:
        for batch in batches:
            yield batch
            done += len(batch.indices)
            if on_progress is not None:
                on_progress(done, len(images))


def _array(
    images: ImageSet, size: Tensor, device: torch.device, batches: Iterator[Batch]
) -> ArrayImages | None:
    """The images in one tensor; none as soon as one is not of that size."""
    pixels = torch.empty((len(images), 3, *size.tolist()), dtype=torch.uint8, device=device)
    shown = torch.empty(len(images), dtype=torch.int64)
    done = 0
    for batch in batches:
        if (batch.sizes != size).any():
            return None
        here = slice(done, done + len(batch.indices))
        pixels[here], shown[here] = batch.images, batch.indices
        done = here.stop
    return ArrayImages(images.name, pixels, _labels(images, shown), images.classes, shown)


def _ragged(
    images: ImageSet, limit: int, device: torch.device, batches: Iterator[Batch]
) -> RaggedImages | None:
    """The images end to end; none as soon as they do not fit into ``limit`` bytes."""
    pictures: list[Tensor] = []
    shown = []
    total = 0
    for batch in batches:
        sizes = batch.sizes.tolist()
        end_to_end = torch.cat(
            [
                image[:, :high, :wide].flatten()
                for image, (high, wide) in zip(batch.images, sizes, strict=True)
            ]
        ).to(device)
        total += len(end_to_end)
        if total > limit:
            return None
        parts = end_to_end.split([3 * high * wide for high, wide in sizes])
        pictures += [part.view(3, *size) for part, size in zip(parts, sizes, strict=True)]
        shown.append(batch.indices)
    positions = torch.cat(shown)
    return RaggedImages(
        images.name, pictures, _labels(images, positions), images.classes, positions
    )


def _labels(images: ImageSet, shown: Tensor) -> Tensor | None:
    return None if images.labels is None else images.labels[shown]
