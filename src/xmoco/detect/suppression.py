"""Of boxes that overlap much, only the best stay: non-maximum suppression, for whole batches."""

import torch
import torch.nn.functional as F
from torch import Tensor
from torchvision.ops import nms

from xmoco.triton_here import HAS_TRITON


def suppressed(boxes: list[Tensor], kept: list[Tensor], threshold: float) -> list[Tensor]:
    """Which boxes stay, bool (n, k) for each group of boxes (n, k, 4), best first.

    Groups, and images, know nothing of each other. ``kept`` are those that take part at all.
    """
    by_kernels = boxes[0].is_cuda and HAS_TRITON
    return (_by_kernels if by_kernels else _by_torchvision)(boxes, kept, threshold)


def _by_torchvision(boxes: list[Tensor], kept: list[Tensor], threshold: float) -> list[Tensor]:
    """One image of one group after another; says what is right."""
    found = []
    for group, there in zip(boxes, kept, strict=True):
        rank = torch.arange(there.shape[1], 0, -1, device=group.device, dtype=group.dtype)
        stay = torch.zeros_like(there)
        for image, own in enumerate(there):
            rows = own.nonzero()[:, 0]
            stay[image, rows[nms(group[image, rows], rank[rows], threshold)]] = True
        found.append(stay)
    return found


def _by_kernels(boxes: list[Tensor], kept: list[Tensor], threshold: float) -> list[Tensor]:
    """All at once, where smaller groups are filled up."""
    from xmoco.detect.suppression_kernel import suppressed_in_groups  # Triton is not everywhere

    counts = [there.shape[1] for there in kept]
    most = max(counts)
    filled = torch.cat([F.pad(b, (0, 0, 0, most - n)) for b, n in zip(boxes, counts, strict=True)])
    there = torch.cat([F.pad(k, (0, most - n)) for k, n in zip(kept, counts, strict=True)])
    stay = suppressed_in_groups(filled, there, threshold).chunk(len(counts))
    return [own[:, :count] for own, count in zip(stay, counts, strict=True)]
