"""The masks of all objects, kept on the device as the ends of their runs, and looked up there.

A pixel is on if the run it falls into is an odd one, and runs are found by bisection. So masks cost
no more than their outlines, and nothing is ever drawn: what a mask shows inside a box is asked of a
few points in each cell.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from xmoco.detect.objects import Integers, Runs

POINTS = 2
"""In a cell, along each side, at which a mask is looked up."""


@dataclass
class RunLengths:
    ends: Tensor
    """int64: where runs end, counted over the pixels of all masks, one mask after another."""
    first_run: Tensor
    """int64 (t,): the number of a mask's first run."""
    first_pixel: Tensor
    """int64 (t,): the number of a mask's first pixel."""
    sizes: Tensor
    """int64 (t, 2): height and width of a mask."""

    @classmethod
    def of(cls, masks: Sequence[Runs], sizes: Integers) -> "RunLengths":
        counts = np.array([len(runs) for runs in masks], dtype=np.int64)
        pixels = sizes.prod(axis=1)
        return cls(
            torch.from_numpy(np.concatenate(masks).cumsum()),
            torch.from_numpy(counts.cumsum() - counts),
            torch.from_numpy(pixels.cumsum() - pixels),
            torch.from_numpy(sizes.astype(np.int64)),
        )

    def to(self, device: torch.device) -> "RunLengths":
        return RunLengths(
            *(part.to(device) for part in (self.ends, self.first_run, self.first_pixel, self.sizes))
        )

    def at(self, masks: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """Whether pixels are on: of each of ``masks`` (p,), points (p, k) in its coordinates."""
        height, width = self.sizes[masks].unbind(1)
        column = x.floor().long().clamp(min=0).minimum(width[:, None] - 1)
        row = y.floor().long().clamp(min=0).minimum(height[:, None] - 1)
        pixel = self.first_pixel[masks][:, None] + column * height[:, None] + row
        run = torch.searchsorted(self.ends, pixel, right=True)
        return (run - self.first_run[masks][:, None]) % 2 == 1

    def inside(self, masks: Tensor, boxes: Tensor, side: int) -> Tensor:
        """How much of each cell is on, where boxes (p, 4) are cut into side × side cells."""
        points = side * POINTS
        places = (torch.arange(points, device=boxes.device) + 0.5) / points
        left, top, right, bottom = boxes.unbind(1)
        x = left[:, None] + (right - left)[:, None] * places
        y = top[:, None] + (bottom - top)[:, None] * places
        grid = torch.broadcast_tensors(x[:, None, :], y[:, :, None])
        on = self.at(masks, grid[0].flatten(1), grid[1].flatten(1))
        cells = on.view(-1, side, POINTS, side, POINTS)
        return cells.float().mean((2, 4))
