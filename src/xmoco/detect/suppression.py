"""Of boxes that overlap much, only the best stay: non-maximum suppression, for whole batches."""

import torch
from torch import Tensor
from torchvision.ops import nms


def suppressed(boxes: list[Tensor], kept: list[Tensor], threshold: float) -> list[Tensor]:
    """Which boxes stay, bool (n, k) for each group of boxes (n, k, 4), best first.

    Groups, and images, know nothing of each other. ``kept`` are those that take part at all.
    """
    return [
        _by_torchvision(group, there, threshold) for group, there in zip(boxes, kept, strict=True)
    ]


def _by_torchvision(boxes: Tensor, kept: Tensor, threshold: float) -> Tensor:
    images, count = kept.shape
    rank = torch.arange(count, 0, -1, device=boxes.device, dtype=boxes.dtype)
    stay = torch.zeros_like(kept)
    for image in range(images):
        rows = kept[image].nonzero()[:, 0]
        best = nms(boxes[image, rows], rank[rows], threshold)
        stay[image, rows[best]] = True
    return stay
