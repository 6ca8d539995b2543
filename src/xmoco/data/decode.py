"""Turns the bytes of an image file into an RGB tensor, as a viewer would show it.

``pillow`` has the rules and does the work; EXIF orientation is applied here. ``decoders`` has other
processes do the same, and ``jpeg`` has the GPU do it for plain JPEG files.
"""

from typing import NamedTuple

import torch
from PIL import Image
from torch import Tensor

from xmoco.data.file_server import Place
from xmoco.data.pillow import (
    LONGEST_SHAPE,
    UnreadableImage,
    decoded,
    exif_orientation,
    open_image,
    planes,
    shrunk,
    to_rgb,
)

__all__ = [
    "LONGEST_SHAPE",
    "EncodedImage",
    "ImageFile",
    "UnreadableImage",
    "decode_if_readable",
    "decode_rgb",
    "exif_orientation",
    "open_image",
    "rgb_pixels",
    "shrunk",
    "upright",
]

_UPRIGHT = {
    2: (False, (-1,)),
    3: (False, (-2, -1)),
    4: (False, (-2,)),
    5: (True, ()),
    6: (True, (-1,)),
    7: (True, (-2, -1)),
    8: (True, (-2,)),
}
"""What undoes each EXIF orientation: whether to swap rows and columns, then which dimensions to
flip. 1 is upright already."""


class EncodedImage(NamedTuple):
    """An image file in memory, and how ``decode_rgb`` is to shrink it."""

    data: bytes
    short_side: int | None


class ImageFile(NamedTuple):
    """Where an image's file is on disk, and how ``decode_rgb`` is to shrink the image."""

    place: Place
    short_side: int | None


def decode_rgb(data: bytes, short_side: int | None = None) -> Tensor:
    """The image in ``data`` as a contiguous uint8 tensor (3, height, width).

    With ``short_side``, a larger image is shrunk as by ``pillow.decoded``. Raises
    ``UnreadableImage``.
    """
    with decoded(data, short_side) as (rgb, orientation):
        return _pixels(rgb, orientation)


def decode_if_readable(file: EncodedImage) -> Tensor | None:
    try:
        return decode_rgb(*file)
    except UnreadableImage:
        return None


def rgb_pixels(image: Image.Image) -> Tensor:
    """As ``decode_rgb``, of an image that is open already."""
    return _pixels(to_rgb(image), exif_orientation(image))


def _pixels(rgb: Image.Image, orientation: int | None) -> Tensor:
    content = bytearray().join(planes(rgb))
    pixels = torch.frombuffer(content, dtype=torch.uint8).view(3, rgb.height, rgb.width)
    return upright(pixels, orientation).contiguous()


def upright(image: Tensor, orientation: int | None) -> Tensor:
    """An image (3, height, width) as a viewer shows it, perhaps a view of the one given."""
    if orientation not in _UPRIGHT:
        return image
    swap, flips = _UPRIGHT[orientation]
    return (image.mT if swap else image).flip(flips)
