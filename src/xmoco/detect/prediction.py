"""What a detector finds in images."""

from collections.abc import Iterator
from contextlib import ExitStack, closing
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from xmoco.data import ImageSet, Unreadable, in_order
from xmoco.data.batches import Progress
from xmoco.detect.masks import hotcoco
from xmoco.detect.metrics import Detections
from xmoco.detect.objects import DetectionSet, Integers

AT_ONCE = 8
MASK_THRESHOLD = 0.5


class Sight(NamedTuple):
    """An image and what a detector says of it."""

    place: int
    picture: Tensor
    """uint8 (3, height, width), on the device."""
    output: dict[str, Tensor]
    """``boxes``, ``labels``, ``scores`` and perhaps ``masks``, of things only, on the device."""


@torch.no_grad()
def looked_at(
    detector: nn.Module,
    images: ImageSet,
    device: torch.device,
    *,
    readers: int = 8,
    unreadable: Unreadable | None = None,
    on_progress: Progress | None = None,
) -> Iterator[Sight]:
    """Every image once but those that cannot be read. The detector is in eval mode meanwhile.

    In float32, however it was trained: bfloat16 knows coordinates beyond 256 to 2 pixels and more.
    """
    was_training = detector.training
    detector.eval()
    seen: set[int] = set()
    batches = in_order(images, AT_ONCE, device, readers=readers, unreadable=unreadable)
    done = 0
    with ExitStack() as stack:
        stack.callback(detector.train, was_training)
        stack.enter_context(closing(batches))
        for batch in batches:
            pictures = [
                image[:, :high, :wide]
                for image, (high, wide) in zip(batch.images, batch.sizes.tolist(), strict=True)
            ]
            outputs = detector([picture.float() / 255 for picture in pictures])
            indices = batch.indices.tolist()
            if unreadable is not None and unreadable.left_out:  # in their places is no image
                broken = {where for where, _ in unreadable}
                seen.update(index for index in indices if images.where(index) in broken)
            for index, picture, output in zip(indices, pictures, outputs, strict=True):
                if index not in seen:  # another image stands where one cannot be read
                    seen.add(index)
                    things = output["labels"] > 0  # RetinaNet has scores of the background, too
                    found = {name: values[things] for name, values in output.items()}
                    yield Sight(index, picture, found)
            done += len(pictures)
            if on_progress is not None:
                on_progress(done, len(images))


def predicted(
    detector: nn.Module, data: DetectionSet, device: torch.device, **options: Any
) -> Detections:
    """The detections in all images; ``options`` are those of ``looked_at``."""
    sights = looked_at(detector, data.images, device, **options)
    return joined([detections_of(sight, data.sizes[sight.place]) for sight in sights])


def detections_of(sight: Sight, size: Integers) -> Detections:
    """In pixels of ``size``, that of the image as it was annotated."""
    output = sight.output
    high, wide = (int(side) for side in size)
    boxes = output["boxes"].double().cpu().numpy()
    boxes *= np.tile([wide / sight.picture.shape[2], high / sight.picture.shape[1]], 2)
    masks = output.get("masks")
    drawn: tuple[Any, ...] | None = None
    if masks is not None:
        if masks.shape[-2:] != (high, wide):  # it was shrunk when decoded
            masks = F.interpolate(masks.float(), (high, wide), mode="bilinear")
        bits = (masks[:, 0] > MASK_THRESHOLD).permute(1, 2, 0).cpu().numpy()
        drawn = tuple(hotcoco("hotcoco.mask").encode(bits)) if bits.shape[2] else ()
    return Detections(
        np.full(len(boxes), sight.place),
        boxes,
        output["scores"].double().cpu().numpy(),
        output["labels"].cpu().numpy() - 1,
        drawn,
    )


def joined(parts: list[Detections]) -> Detections:
    masks = [part.masks for part in parts if part.masks is not None]
    return Detections(
        np.concatenate([part.images for part in parts]),
        np.concatenate([part.boxes for part in parts]),
        np.concatenate([part.scores for part in parts]),
        np.concatenate([part.labels for part in parts]),
        tuple(mask for part in masks for mask in part) if len(masks) == len(parts) else None,
    )
