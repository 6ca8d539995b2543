"""From an image to what a backbone is to see, for programs of one's own."""

from dataclasses import dataclass
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

from xmoco.config import InputConfig
from xmoco.data.decode import rgb_pixels
from xmoco.data.views import central
from xmoco.nn.backbone_files import Rgb
from xmoco.nn.weights import load_weights


@dataclass(frozen=True)
class CentralView:
    """Resizes, crops and normalises a single image exactly as every evaluation does.

    It takes a PIL image of any kind or a uint8 tensor (3, height, width), and gives a float tensor
    (3, size, size). Images of data sets come as PIL images, so it serves as their ``transform``.
    """

    input: InputConfig

    def __call__(self, image: Image.Image | Tensor) -> Tensor:
        pixels = image if isinstance(image, Tensor) else rgb_pixels(image)
        if pixels.dtype != torch.uint8 or pixels.ndim != 3 or len(pixels) != 3:
            raise ValueError(
                "an image is a PIL image or a uint8 tensor (3, height, width), not "
                f"{str(pixels.dtype).removeprefix('torch.')} {tuple(pixels.shape)}."
            )
        sizes = torch.tensor([pixels.shape[1:]])
        return central(pixels[None], sizes, self.input.central_size, self.input)[0].contiguous()


def load_transform(
    weights: str | Path, *, mean: Rgb | None = None, std: Rgb | None = None
) -> CentralView:
    """What the images of a backbone go through before it sees them; weights as in
    ``load_backbone``, ``mean`` and ``std`` if you know them better than their card."""
    return CentralView(load_weights(weights, mean=mean, std=std).card.input())
