"""Turns the bytes of an image file into an RGB tensor, whatever the file's colour mode.

Pillow does the work, outside Python's lock, so threads decode side by side. (torchvision's decoder
is a little faster, but damaged PNG files make it crash the whole process, and it is deprecated.)
``jpeg`` has the GPU do the same for plain JPEG files. What images are turned into:

- EXIF orientation is applied: the image comes out as a viewer shows it.
- Transparent parts become white, again as most viewers show them; the colour stored beneath them is
  arbitrary, often black, and would drown a black drawing.
- 16-bit channels keep their high byte. 32-bit grey and floating-point images have no agreed white,
  so their own darkest and lightest values become 0 and 255.
- Of an animation, the first frame.
"""

import io
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from PIL import ExifTags, Image, UnidentifiedImageError
from torch import Tensor

LONGEST_SHAPE = 3
"""With ``short_side`` given, the longer side is also kept within this many times ``short_side``:
images of a batch share one canvas, and a single panorama must not blow it up."""

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


class UnreadableImage(Exception):  # noqa: N818
    """An image that is broken, truncated or of a kind no decoder knows. The text says why."""


class EncodedImage(NamedTuple):
    """An image file in memory, and how ``decode_rgb`` is to shrink it."""

    data: bytes
    short_side: int | None


class ImageFile(NamedTuple):
    """Where an image's file is on disk, and how ``decode_rgb`` is to shrink the image."""

    path: str
    short_side: int | None


def decode_rgb(data: bytes, short_side: int | None = None) -> Tensor:
    """The image in ``data`` as a contiguous uint8 tensor (3, height, width).

    With ``short_side``, a larger image is shrunk (antialiased, keeping its shape) until its shorter
    side is at most that long, and its longer side at most ``LONGEST_SHAPE`` times that.
    """
    try:
        with Image.open(io.BytesIO(data)) as image:
            if short_side is not None:
                # A JPEG can be decoded at 1/2, 1/4 or 1/8 of its size. Staying twice above the size
                # wanted leaves the last step to a better filter. Other formats take no notice.
                width, height = shrunk(image.size, short_side)
                image.draft(None, (2 * width, 2 * height))
            rgb = _to_rgb(image)
            turned = exif_orientation(image)  # after decoding: TIFF files are then upright already
        if short_side is not None:
            rgb = rgb.resize(shrunk(rgb.size, short_side), Image.Resampling.BILINEAR)
        return _pixels(rgb, turned)
    except UnreadableImage:
        raise
    except UnidentifiedImageError as error:
        raise UnreadableImage("it is no image, or of a format that is not known") from error
    except Exception as error:  # decoders raise anything on broken data, from OSError to IndexError
        reason = str(error).strip() or type(error).__name__
        raise UnreadableImage(reason.splitlines()[0]) from error


def rgb_pixels(image: Image.Image) -> Tensor:
    """As ``decode_rgb``, of an image that is open already."""
    return _pixels(_to_rgb(image), exif_orientation(image))


def _pixels(rgb: Image.Image, orientation: int | None) -> Tensor:
    pixels = torch.from_numpy(np.array(np.asarray(rgb).transpose(2, 0, 1), order="C"))
    return upright(pixels, orientation).contiguous()


def shrunk(size: tuple[int, int], short_side: int) -> tuple[int, int]:
    """``size``, in either order, after shrinking to ``short_side``."""
    scale = min(1.0, short_side / min(size), LONGEST_SHAPE * short_side / max(size))
    return max(1, round(size[0] * scale)), max(1, round(size[1] * scale))


def upright(image: Tensor, orientation: int | None) -> Tensor:
    """An image (3, height, width) as a viewer shows it, perhaps a view of the one given."""
    if orientation not in _UPRIGHT:
        return image
    swap, flips = _UPRIGHT[orientation]
    return (image.mT if swap else image).flip(flips)


def exif_orientation(image: Image.Image) -> int | None:
    """The EXIF orientation; none if there is none, or if the EXIF block is broken."""
    try:
        value = image.getexif().get(ExifTags.Base.Orientation)
    except Exception:  # as for broken images: anything may be raised
        return None
    return value if isinstance(value, int) else None


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I") or image.mode == "F":
        return Image.fromarray(_eight_bits(image)).convert("RGB")
    if image.has_transparency_data:
        colour = image.convert("RGBA")
        white = Image.new("RGBA", colour.size, "white")
        return Image.alpha_composite(white, colour).convert("RGB")
    image.load()
    return image if image.mode == "RGB" else image.convert("RGB")


def _eight_bits(image: Image.Image) -> npt.NDArray[np.uint8]:
    """Deep grey as 8 bits; Pillow's own conversion would clip everything above 255 to white."""
    values = np.asarray(image)
    # Pillow gives 16-bit PGM, and in old versions 16-bit PNG, as 32-bit integers up to 65535.
    if image.mode.startswith("I;16") or image.format in ("PNG", "PPM"):
        return (values >> 8).astype(np.uint8)
    dark, light = float(values.min()), float(values.max())
    if not np.isfinite([dark, light]).all():
        raise UnreadableImage("it holds values that are not finite")
    stretch = 255 / (light - dark) if light > dark else 0.0
    return np.rint((values.astype(np.float64) - dark) * stretch).astype(np.uint8)
