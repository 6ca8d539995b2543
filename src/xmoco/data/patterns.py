"""`patterns`: a small labelled set of images that needs no download, drawn by formula.

Ten families of ornament (stripes, checks, dots …) are the classes. Colour, phase, scale, tilt,
bend, perspective, light, sharpness and noise differ from image to image and say nothing about the
class. So neither raw pixels nor an untrained network tell the families apart, while learning does.

An image is drawn in three steps:

1. `_plane` lays a tilted, scaled, slightly bent coordinate system over the pixels;
2. the family's formula gives every point a height, and `_rank` replaces heights by their rank. Now
   all images hold the same 1024 values and only the *arrangement* belongs to the family: no mean,
   no contrast, no histogram can give the class away;
3. `_paint` turns ranks into ink on paper, and adds light and noise.

The arithmetic is in float64 and ends in whole numbers, so that the last bit of a sine, which
differs between processors, hardly ever reaches the image.
"""

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

SIDE = 32
PER_CLASS = {"train": 600, "test": 150}
SEEDS = {"train": 1, "test": 2}

TURN = 2 * math.pi


def _stripes(u: Tensor, _v: Tensor) -> Tensor:
    return torch.sin(TURN * u)


def _zigzag(u: Tensor, v: Tensor) -> Tensor:
    return torch.sin(TURN * (u + 1.6 * _to_nearest(v / 2.2)))


def _checks(u: Tensor, v: Tensor) -> Tensor:
    return _chequered(u, v)


def _dartboards(u: Tensor, v: Tensor) -> Tensor:
    return _chequered(torch.hypot(u, v), 8 * torch.atan2(v, u) / TURN)


def _dots(u: Tensor, v: Tensor) -> Tensor:
    # Three waves 120° apart meet in a triangular lattice.
    half, rise = u / 2, v * math.sqrt(3) / 2
    return torch.cos(TURN * u) + torch.cos(TURN * (rise - half)) + torch.cos(TURN * (rise + half))


def _rings(u: Tensor, v: Tensor) -> Tensor:
    return torch.sin(TURN * torch.hypot(u, v))


def _swirls(u: Tensor, v: Tensor) -> Tensor:
    radius = torch.hypot(u, v)
    arms = torch.sin(12 * torch.atan2(v, u) + TURN * 0.6 * radius)
    return arms * radius.clamp(max=1)  # fades at the centre, where the arms are finer than pixels


def _bricks(u: Tensor, v: Tensor) -> Tensor:
    course = torch.floor(v)
    return torch.minimum(2 * _to_nearest((u + course) / 2), _to_nearest(v))


def _scales(u: Tensor, v: Tensor) -> Tensor:
    # Ringed discs of radius 1/2 in rows 1/4 apart, each row laid over the one before it.
    radius = torch.zeros_like(u)
    for step in (-1, 0, 1, 2):
        row = torch.floor(4 * v) + step
        distance = torch.hypot(_to_nearest(u + row / 2), v - row / 4)
        radius = torch.where(distance < 0.5, distance, radius)
    return torch.cos(TURN * 3 * radius)


def _parquet(u: Tensor, v: Tensor) -> Tensor:
    upright = (torch.floor(u / 2) + torch.floor(v / 2)) % 2 == 0
    return torch.sin(TURN * torch.where(upright, u, v))


def _to_nearest(x: Tensor) -> Tensor:
    """Distance to the nearest whole number: a triangular wave from 0 to 1/2."""
    return (x - torch.round(x)).abs()


def _chequered(a: Tensor, b: Tensor) -> Tensor:
    """Fields of half a unit, in turn above and below zero, which is the height of their edges."""
    wave_a, wave_b = torch.sin(TURN * a), torch.sin(TURN * b)
    return torch.sign(wave_a * wave_b) * torch.minimum(wave_a.abs(), wave_b.abs())


# Each family's formula, and the size of its unit, chosen so that all families have about as many
# edges: otherwise coarseness would give the class away.
FAMILIES: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], float]] = {
    "stripes": (_stripes, 0.9),
    "zigzag": (_zigzag, 1.1),
    "checks": (_checks, 1.4),
    "dartboards": (_dartboards, 1.5),
    "dots": (_dots, 1.0),
    "rings": (_rings, 0.9),
    "swirls": (_swirls, 1.4),
    "bricks": (_bricks, 1.0),
    "scales": (_scales, 3.2),
    "parquet": (_parquet, 0.95),
}


@lru_cache
def patterns(split: Literal["train", "test"]) -> tuple[Tensor, Tensor, tuple[str, ...]]:
    """Images (n, 3, 32, 32) uint8, labels (n,) int64 and the classes' names.

    Drawn once per process and shared by all callers, who must not write to them.
    """
    dice = torch.Generator().manual_seed(SEEDS[split])
    count = PER_CLASS[split]
    images = torch.cat(
        [
            _paint(_rank(height(*_plane(unit, count, dice))), dice)
            for height, unit in FAMILIES.values()
        ]
    )
    labels = torch.arange(len(FAMILIES)).repeat_interleave(count)
    order = torch.randperm(len(labels), generator=dice)
    return images[order], labels[order], tuple(FAMILIES)


def _plane(unit: float, count: int, dice: torch.Generator) -> tuple[Tensor, Tensor]:
    """Where each pixel lies in the pattern's own plane: u and v, each (count, 1, SIDE, SIDE)."""
    x, y = _pixels()
    bend_x, bend_y = (_uniform(-1, 1, count, dice) for _ in "xy")
    phase_x, phase_y = (_uniform(0, TURN, count, dice) for _ in "xy")
    x, y = x + bend_x * torch.sin(y / 5 + phase_x), y + bend_y * torch.sin(x / 5 + phase_y)

    # The origin is the phase of a periodic family, and the centre of rings and swirls.
    origin_x, origin_y = (_uniform(-11, 11, count, dice) for _ in "xy")
    x, y = x - origin_x, y - origin_y

    period = unit * _uniform(5.5, 8.5, count, dice)
    lean_x, lean_y = (_uniform(-0.012, 0.012, count, dice) for _ in "xy")
    scale = 1 / (period * (1 + lean_x * x + lean_y * y))
    mirror = torch.sign(_uniform(-1, 1, count, dice))
    tilt = _uniform(0, TURN, count, dice)
    u = scale * (torch.cos(tilt) * x + torch.sin(tilt) * y)
    v = scale * (torch.cos(tilt) * y - torch.sin(tilt) * x) * mirror
    return u, v


def _rank(heights: Tensor) -> Tensor:
    """Each image's values replaced by 0 … 1 in equal steps, in the same order."""
    flat = heights.flatten(1)
    steps = torch.linspace(0, 1, flat.shape[1], dtype=flat.dtype).expand_as(flat)
    order = flat.argsort(dim=1, stable=True)
    return torch.empty_like(flat).scatter_(1, order, steps).view_as(heights)


def _paint(ranks: Tensor, dice: torch.Generator) -> Tensor:
    """Ink on paper, lit from one side, seen by a noisy camera: (count, 3, SIDE, SIDE) uint8."""
    count = len(ranks)
    threshold = _uniform(0.42, 0.58, count, dice)
    softness = _uniform(0.2, 0.6, count, dice)
    cover = ((ranks - threshold) / softness + 0.5).clamp(0, 1)

    dark = _uniform(0, 0.5, count, dice, channels=3)
    bright = _uniform(0.5, 1, count, dice, channels=3)
    dark_ink = _uniform(0, 1, count, dice) < 0.5
    ink, paper = torch.where(dark_ink, dark, bright), torch.where(dark_ink, bright, dark)

    x, y = _pixels()
    light_x, light_y = (_uniform(-0.02, 0.02, count, dice) for _ in "xy")
    light = 1 + light_x * x + light_y * y

    grain = _uniform(0, 0.06, count, dice)
    noise = 2 * torch.rand(count, 3, SIDE, SIDE, generator=dice, dtype=torch.float64) - 1
    image = (paper + (ink - paper) * cover) * light + grain * noise
    return (image.clamp(0, 1) * 255).round().to(torch.uint8)


def _pixels() -> tuple[Tensor, Tensor]:
    """Pixel centres measured from the middle of the image: x as (1, SIDE), y as (SIDE, 1)."""
    centres = torch.arange(SIDE, dtype=torch.float64) - (SIDE - 1) / 2
    return centres.unsqueeze(0), centres.unsqueeze(1)


def _uniform(
    low: float, high: float, count: int, dice: torch.Generator, channels: int = 1
) -> Tensor:
    """One number per image and channel, in the shape (count, channels, 1, 1)."""
    return low + (high - low) * torch.rand(
        count, channels, 1, 1, generator=dice, dtype=torch.float64
    )
