"""What a detector finds in images."""

from contextlib import closing
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from xmoco.data import Unreadable, in_order
from xmoco.data.batches import Progress
from xmoco.detect.masks import hotcoco
from xmoco.detect.metrics import Detections
from xmoco.detect.objects import DetectionSet, Integers

AT_ONCE = 8
MASK_THRESHOLD = 0.5


@torch.no_grad()
def predicted(
    detector: nn.Module,
    data: DetectionSet,
    device: torch.device,
    *,
    bf16: bool = False,
    readers: int = 8,
    unreadable: Unreadable | None = None,
    on_progress: Progress | None = None,
) -> Detections:
    """The detections in all images, each image once; in one that cannot be read, none."""
    was_training = detector.training
    detector.eval()
    parts: list[Detections] = []
    seen: set[int] = set()
    batches = in_order(data.images, AT_ONCE, device, readers=readers, unreadable=unreadable)
    done = 0
    with closing(batches):
        for batch in batches:
            pictures = [
                image[:, :high, :wide].float() / 255
                for image, (high, wide) in zip(batch.images, batch.sizes.tolist(), strict=True)
            ]
            with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
                outputs = detector(pictures)
            indices = batch.indices.tolist()
            for index, picture, output in zip(indices, pictures, outputs, strict=True):
                if index not in seen:  # another image stands where one cannot be read
                    seen.add(index)
                    shown = picture.shape[1:]
                    parts.append(_detections(index, output, shown, data.sizes[index]))
            done += len(pictures)
            if on_progress is not None:
                on_progress(done, len(data))
    detector.train(was_training)
    return _joined(parts)


def _detections(
    index: int, output: dict[str, Tensor], shown: torch.Size, size: Integers
) -> Detections:
    """Of one image that was ``shown`` in some size, in pixels of ``size``, as it was annotated."""
    things = output["labels"] > 0  # RetinaNet has scores of the background, too
    output = {name: values[things] for name, values in output.items()}
    high, wide = (int(side) for side in size)
    boxes = output["boxes"].double().cpu().numpy()
    boxes *= np.tile([wide / shown[1], high / shown[0]], 2)
    masks = output.get("masks")
    drawn: tuple[Any, ...] | None = None
    if masks is not None:
        if masks.shape[-2:] != (high, wide):  # it was shrunk when decoded
            masks = F.interpolate(masks.float(), (high, wide), mode="bilinear")
        bits = (masks[:, 0] > MASK_THRESHOLD).permute(1, 2, 0).cpu().numpy()
        drawn = tuple(hotcoco("hotcoco.mask").encode(bits)) if bits.shape[2] else ()
    return Detections(
        np.full(len(boxes), index),
        boxes,
        output["scores"].double().cpu().numpy(),
        output["labels"].cpu().numpy() - 1,
        drawn,
    )


def _joined(parts: list[Detections]) -> Detections:
    masks = [part.masks for part in parts if part.masks is not None]
    return Detections(
        np.concatenate([part.images for part in parts]),
        np.concatenate([part.boxes for part in parts]),
        np.concatenate([part.scores for part in parts]),
        np.concatenate([part.labels for part in parts]),
        tuple(mask for part in masks for mask in part) if len(masks) == len(parts) else None,
    )
