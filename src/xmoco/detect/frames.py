"""Images of a batch are flipped and brought to a size on the device, and their boxes with them."""

from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from xmoco.data import Batch
from xmoco.task import Moment

STRIDE = 32
"""Canvases are whole multiples of the coarsest stage's stride."""


class Draw(NamedTuple):
    """What chance decides of a step: a function of seed and step."""

    size: int
    """To which the shorter side of its images is brought. It is one for all: then none is mostly
    padding, and over the steps every image still has every size."""
    flips: Tensor
    """bool (n,): which images are mirrored."""


def drawn(moment: Moment, sizes: tuple[int, ...]) -> Draw:
    rng = np.random.default_rng((moment.seed, moment.step))
    size = sizes[rng.integers(len(sizes))]
    return Draw(size, torch.from_numpy(rng.random(moment.batch)[moment.rows] < 0.5))


class Frames(NamedTuple):
    """Images as the network sees them, and how they came about."""

    images: Tensor
    """float (n, 3, H, W): normalised, top left on one canvas, zeros beyond."""
    sizes: Tensor
    """int64 (n, 2) on the CPU: height and width of each there."""
    flips: Tensor
    """bool (n,) on the CPU."""


def scaled(sizes: Tensor, short: int, longest: int) -> Tensor:
    """Heights and widths (n, 2) after scaling, as torchvision's detectors do it."""
    sides = sizes.double()
    factor = torch.minimum(short / sides.amin(1), longest / sides.amax(1))
    return (sides * factor[:, None]).floor().long().clamp(min=1)


def framed(
    batch: Batch, draw: Draw, longest: int, mean: tuple[float, ...], std: tuple[float, ...]
) -> Frames:
    sizes = scaled(batch.sizes, draw.size, longest)
    height, width = (-(-int(side) // STRIDE) * STRIDE for side in sizes.amax(0))
    device = batch.images.device
    canvas = torch.empty(
        (len(sizes), 3, height, width), device=device, memory_format=torch.channels_last
    ).zero_()
    # Images of one size go together; most sets have few.
    kinds = torch.cat([batch.sizes, draw.flips[:, None].long()], 1)
    for kind in kinds.unique(dim=0):
        rows = (kinds == kind).all(1).nonzero()[:, 0]
        high, wide, flip = kind.tolist()
        new = sizes[rows[0]].tolist()
        whole = len(rows) == len(sizes)
        images = batch.images if whole else batch.images[sent(rows, device)]
        pixels = _normalised(images[:, :, :high, :wide], mean, std)
        if flip:
            pixels = pixels.flip(-1)
        pixels = F.interpolate(pixels, new, mode="bilinear", align_corners=False)
        if whole:
            canvas[:, :, : new[0], : new[1]] = pixels
        else:
            canvas[sent(rows, device), :, : new[0], : new[1]] = pixels
    return Frames(canvas, sizes, draw.flips)


def _normalised(images: Tensor, mean: tuple[float, ...], std: tuple[float, ...]) -> Tensor:
    """One fused operation for each channel; no constants travel to the device."""
    pixels = torch.empty(images.shape, device=images.device, memory_format=torch.channels_last)
    for channel, (middle, spread) in enumerate(zip(mean, std, strict=True)):
        pixels[:, channel] = images[:, channel]
        pixels[:, channel].mul_(1 / (255 * spread)).sub_(middle / spread)
    return pixels


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on the device, for whose work so far nobody waits."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
