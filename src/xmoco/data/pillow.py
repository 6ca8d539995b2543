"""Turns the bytes of an image file into an RGB image, whatever the file's colour mode.

``decode`` makes tensors of these, in this process; ``decode_server`` is a program that decodes for
it. That one has to start at once, so nothing but Pillow is imported here.

Pillow decodes outside Python's lock. (torchvision's decoder is a little faster, but damaged PNG
files make it crash the whole process, and it is deprecated.) What images are turned into:

- Transparent parts become white, as most viewers show them; the colour stored beneath them is
  arbitrary, often black, and would drown a black drawing.
- 16-bit channels keep their high byte. 32-bit grey and floating-point images have no agreed white,
  so their own darkest and lightest values become 0 and 255.
- Of an animation, the first frame.

Files may come from anyone. Only the formats named here are opened: Pillow knows others, of which
EPS starts another program. And an image of a few kilobytes can hold pixels without end, so there
is a limit for one, and for all that are decoded at the same time.
"""

import functools
import io
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from PIL import ExifTags, Image, UnidentifiedImageError

from xmoco.text import printable

LONGEST_SHAPE = 3
"""With ``short_side`` given, the longer side is also kept within this many times ``short_side``:
images of a batch share one canvas, and a single panorama must not blow it up."""

FORMATS = (
    *("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF"),
    *("AVIF", "JPEG2000", "TGA", "PPM"),
)
"""By Pillow's names; all that may stand behind ``names.IMAGE_EXTENSIONS``."""

MOST_PIXELS = 2**27
"""Of an image as it is decoded, a JPEG perhaps at a fraction of its size; and of all images that
are decoded at the same time. Decoding takes up to 20 bytes for each."""
STRIP = 2**22
"""Pixels that are converted at a time, where that takes many bytes for each."""


class UnreadableImage(Exception):  # noqa: N818
    """An image that is broken, truncated or of a kind no decoder knows. The text says why."""


@functools.cache
def _known_formats() -> tuple[str, ...]:
    """Those of the formats that this Pillow was built with."""
    Image.init()
    return tuple(name for name in FORMATS if name in Image.OPEN)


def open_image(data: bytes | memoryview) -> Image.Image:
    """The image in ``data``, if it is of one of the formats; not yet decoded."""
    return Image.open(io.BytesIO(data), formats=_known_formats())


class _Room:
    """What may be under way at the same time, in pixels; whoever finds too little left waits."""

    def __init__(self, pixels: int) -> None:
        self._free = pixels
        self._changed = threading.Condition()

    @contextmanager
    def taken(self, pixels: int) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: pixels <= self._free)
            self._free -= pixels
        try:
            yield
        finally:
            with self._changed:
                self._free += pixels
                self._changed.notify_all()


_room = _Room(MOST_PIXELS)


@contextmanager
def decoded(
    data: bytes | memoryview, short_side: int | None, most_pixels: int = MOST_PIXELS
) -> Iterator[tuple[Image.Image, int | None]]:
    """The image in ``data`` as one of mode RGB, and its EXIF orientation, still to be undone.

    It counts as one that is decoded until the context ends. All that goes wrong is raised as
    ``UnreadableImage``.

    With ``short_side``, a larger image is shrunk (antialiased, keeping its shape) until its shorter
    side is at most that long, and its longer side at most ``LONGEST_SHAPE`` times that.
    """
    try:
        with open_image(data) as image:
            if short_side is not None:
                # A JPEG can be decoded at 1/2, 1/4 or 1/8 of its size. Staying twice above the size
                # wanted leaves the last step to a better filter. Other formats take no notice.
                width, height = shrunk(image.size, short_side)
                image.draft(None, (2 * width, 2 * height))
            pixels = image.width * image.height
            if pixels > most_pixels:
                raise UnreadableImage(_too_large(pixels, most_pixels))
            with _room.taken(pixels):
                rgb = to_rgb(image)
                turned = exif_orientation(image)  # once decoded: TIFF files are then upright
                if short_side is not None and rgb.size != (size := shrunk(rgb.size, short_side)):
                    rgb = rgb.resize(size, Image.Resampling.BILINEAR)
                yield rgb, turned
    except UnreadableImage:
        raise
    except UnidentifiedImageError as error:
        raise UnreadableImage("it is no image, or of a format that is not known") from error
    except Image.DecompressionBombError as error:  # Pillow's own limit, before a JPEG is shrunk
        raise UnreadableImage(_too_large(2 * (Image.MAX_IMAGE_PIXELS or 0), most_pixels)) from error
    except Exception as error:  # decoders raise anything on broken data, from OSError to IndexError
        reason = str(error).strip() or type(error).__name__
        raise UnreadableImage(printable(reason.splitlines()[0])) from error


def _too_large(pixels: int, most_pixels: int) -> str:
    there, allowed = (f"{count / 1e6:.0f}" for count in (pixels, most_pixels))
    return f"it has {there} megapixels or more, and at most {allowed} are decoded"


def shrunk(size: tuple[int, int], short_side: int) -> tuple[int, int]:
    """``size``, in either order, after shrinking to ``short_side``."""
    scale = min(1.0, short_side / min(size), LONGEST_SHAPE * short_side / max(size))
    return max(1, round(size[0] * scale)), max(1, round(size[1] * scale))


def exif_orientation(image: Image.Image) -> int | None:
    """The EXIF orientation, 1 to 8; none if there is none, or if the EXIF block is broken."""
    try:
        value = image.getexif().get(ExifTags.Base.Orientation)
    except Exception:  # as for broken images: anything may be raised
        return None
    return value if isinstance(value, int) and 1 <= value <= 8 else None


def to_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I") or image.mode == "F":
        return _eight_bits(image).convert("RGB")
    if image.has_transparency_data:
        return _on_white(image)
    image.load()
    return image if image.mode == "RGB" else image.convert("RGB")


def planes(rgb: Image.Image) -> list[bytes]:
    """All its red, all its green and all its blue: Pillow parts them faster than numpy does."""
    return [rgb.tobytes("raw", channel) for channel in "RGB"]


def _on_white(image: Image.Image) -> Image.Image:
    if image.width * image.height <= STRIP:
        colour = image.convert("RGBA")
        white = Image.new("RGBA", colour.size, "white")
        return Image.alpha_composite(white, colour).convert("RGB")
    result = Image.new("RGB", image.size)
    high = max(1, STRIP // image.width)
    for top in range(0, image.height, high):
        bottom = min(top + high, image.height)
        result.paste(_on_white(image.crop((0, top, image.width, bottom))), (0, top))
    return result


def _eight_bits(image: Image.Image) -> Image.Image:
    """Deep grey as 8 bits; Pillow's own conversion would clip everything above 255 to white."""
    # Imported here because starting a process would take twice as long; few images need it.
    import numpy as np

    values = np.asarray(image)
    result = np.empty(values.shape, np.uint8)
    high = max(1, STRIP // image.width)
    strips = [slice(top, top + high) for top in range(0, image.height, high)]
    # Pillow gives 16-bit PGM, and in old versions 16-bit PNG, as 32-bit integers up to 65535.
    if image.mode.startswith("I;16") or image.format in ("PNG", "PPM"):
        for rows in strips:
            result[rows] = values[rows] >> 8
        return Image.fromarray(result)
    dark, light = float(values.min()), float(values.max())
    if not np.isfinite([dark, light]).all():
        raise UnreadableImage("it holds values that are not finite")
    stretch = 255 / (light - dark) if light > dark else 0.0
    for rows in strips:
        result[rows] = np.rint((values[rows].astype(np.float64) - dark) * stretch)
    return Image.fromarray(result)
