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
    with closing(_everything(images, decoder, readers, unreadable, on_progress)) as batches:
        return _kept(images, sizes, limit, device, batches) or images


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


def _kept(
    images: ImageSet, expected: Tensor, limit: int, device: torch.device, batches: Iterator[Batch]
) -> ArrayImages | RaggedImages | None:
    """The images end to end; none as soon as they do not fit into ``limit`` bytes.

    Where one size is to be expected, they get the memory for a single tensor. Should one be of
    another size after all, it and those after it take what is left of that, and more.
    """
    one_size = bool((expected == expected[0]).all())
    room = _bytes_of(expected[:1]) * len(images) if one_size else 0
    whole = left = torch.empty(room, dtype=torch.uint8, device=device)
    parts, sizes, shown = [], [], []
    total = 0
    for batch in batches:
        part = _end_to_end(batch)
        total += len(part)
        if total > limit:
            return None
        if len(part) <= len(left):
            here, left = left[: len(part)], left[len(part) :]
            parts.append(here.copy_(part))
        else:
            parts.append(part.to(device))
        sizes.append(batch.sizes)
        shown.append(batch.indices)
    places = torch.cat(shown)
    facts = _labels(images, places), images.classes, places
    if one_size and (torch.cat(sizes) == expected[0]).all():
        pixels = whole.view(len(images), 3, *expected[0].tolist())
        return ArrayImages(images.name, pixels, *facts)
    pictures = [
        picture.view(3, *size)
        for part, its_sizes in zip(parts, sizes, strict=True)
        for picture, size in zip(
            part.split((3 * its_sizes.prod(1)).tolist()), its_sizes.tolist(), strict=True
        )
    ]
    return RaggedImages(images.name, pictures, *facts)


def _end_to_end(batch: Batch) -> Tensor:
    """The pixels of a batch without what its images leave of their canvas."""
    if (batch.sizes == torch.tensor(batch.images.shape[2:])).all():
        return batch.images.flatten()
    sizes = batch.sizes.tolist()
    return torch.cat(
        [
            image[:, :high, :wide].flatten()
            for image, (high, wide) in zip(batch.images, sizes, strict=True)
        ]
    )


def _bytes_of(sizes: Tensor) -> int:
    """Of all images of these sizes."""
    return int(3 * sizes.prod(1).sum())


def _labels(images: ImageSet, shown: Tensor) -> Tensor | None:
    return None if images.labels is None else images.labels[shown]
