"""Colour changes of a batch in which every sample has its own strength, kind and order.

Brightness, saturation, grey, inversion and normalisation map a colour to a matrix times it plus an
offset; contrast does too once the image's mean is known. So one batched product changes every
sample in its own way. Only a turn of the hue is different.
"""

import numpy as np
import torch
from torch import Tensor

BRIGHTNESS, CONTRAST, SATURATION, HUE = range(4)
LUMA = np.array((0.2989, 0.587, 0.114))  # of red, green and blue, with torchvision's digits


def mix(images: Tensor, matrices: Tensor, offsets: Tensor) -> Tensor:
    """Each pixel's colour times its sample's 3×3 matrix, plus its offset: (n, 3) or (n, 1)."""
    mixed = torch.bmm(matrices, images.flatten(2)).add_(offsets[:, :, None])
    return mixed.view_as(images)


def turn_hue(images: Tensor, turns: Tensor) -> Tensor:
    """Turn the hue of float images (n, 3, H, W) by ``turns`` (n,), where 1 is a full circle.

    Brightness and saturation in the sense of HSV stay. Instead of torchvision's six cases this uses
    HSV's closed form: channel = max − (max − min) · clamp(2 − |6k − 2|, 0, 1), where k is the hue
    plus 5/6, 3/6 and 1/6 of the circle for red, green and blue, less whole circles.
    """
    red, green, blue = images.unbind(1)
    highest = torch.maximum(torch.maximum(red, green), blue)
    spread = highest - torch.minimum(torch.minimum(red, green), blue)
    sixths = torch.where(
        highest == red,
        green - blue,
        torch.where(
            highest == green,
            (blue - red).add_(spread, alpha=2),
            (red - green).add_(spread, alpha=4),
        ),
    )
    # Greys have no hue: the tiny floor turns their 0 / 0 into 0.
    hues = sixths.div_(spread.clamp(min=1e-12).mul_(6)).add_(turns[:, None, None])
    # One circle more keeps the sum positive: there `frac` is modulo 1, and faster than `remainder`.
    starts = torch.arange(5 + 6, 6, -2, device=images.device)[:, None, None] / 6
    places = (hues[:, None] + starts).frac_().mul_(6)
    shares = places.sub_(2).abs_().neg_().add_(2).clamp_(0, 1)
    return torch.addcmul(highest[:, None], shares, spread[:, None], value=-1)
