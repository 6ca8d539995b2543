"""Boxes of whole batches, as left, top, right and bottom in the last dimension."""

import math

import torch
from torch import Tensor

LARGEST_GROWTH = math.log(1000 / 16)
"""Of a side, as a logarithm; what would be more is cut off, as torchvision does."""

Weights = tuple[float, float, float, float]


def overlaps(some: Tensor, others: Tensor) -> Tensor:
    """Intersection over union: (…, m, 4) and (…, k, 4) → (…, m, k)."""
    ours, theirs = some[..., :, None, :], others[..., None, :, :]

    def along(axis: int) -> Tensor:
        end = torch.minimum(ours[..., axis + 2], theirs[..., axis + 2])
        return end.sub_(torch.maximum(ours[..., axis], theirs[..., axis])).clamp_(min=0)

    # In place: with all anchors of a batch these are gigabytes.
    shared = along(0).mul_(along(1))
    union = (areas(some)[..., :, None] + areas(others)[..., None, :]).sub_(shared)
    return shared.div_(union)


def areas(boxes: Tensor) -> Tensor:
    return (boxes[..., 2:] - boxes[..., :2]).prod(-1)


def encode(boxes: Tensor, reference: Tensor, weights: Weights = (1, 1, 1, 1)) -> Tensor:
    """What leads from ``reference`` to ``boxes``: shifts of the centre and logarithms of growth."""
    start, size = _centre_and_size(reference)
    end, wanted = _centre_and_size(boxes)
    wx, wy, ww, wh = weights
    shift, growth = (end - start) / size, (wanted / size).log()
    return torch.stack(
        [wx * shift[..., 0], wy * shift[..., 1], ww * growth[..., 0], wh * growth[..., 1]], dim=-1
    )


def decode(codes: Tensor, reference: Tensor) -> Tensor:
    """The inverse of ``encode`` without weights."""
    start, size = _centre_and_size(reference)
    centre = start + codes[..., :2] * size
    half = codes[..., 2:].clamp(max=LARGEST_GROWTH).exp() * size / 2
    return torch.cat([centre - half, centre + half], dim=-1)


def _centre_and_size(boxes: Tensor) -> tuple[Tensor, Tensor]:
    size = boxes[..., 2:] - boxes[..., :2]
    return boxes[..., :2] + size / 2, size


def clipped(boxes: Tensor, sizes: Tensor) -> Tensor:
    """``boxes`` (n, k, 4) inside images of ``sizes`` (n, 2), which are heights and widths."""
    ends = sizes.flip(-1).repeat(1, 2)[:, None]
    return torch.minimum(boxes.clamp(min=0), ends)
