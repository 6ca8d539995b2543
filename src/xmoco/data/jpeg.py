"""JPEG files decoded by the GPU, many at a time.

nvJPEG (through torchvision) takes whole batches of files to CUDA's JPEG engines, which decode many
times faster than all cores of the host. It is given only what it surely knows: baseline JPEG in one
scan, grey or YCbCr, whole, and not enormous. ``plain_jpeg`` tells these by a glance at the header;
everything else is left to ``decode_rgb``, which stays the measure: orientation, grey and shrinking
come out alike. Pixels do not, to the bit: the two smooth colour differently where it was stored at
half resolution, and round differently, which makes less than 1.5 of 255 on average. A photograph
that is shrunk may also come out one pixel longer or shorter.

torchvision 0.29 calls its decoder deprecated in favour of torchcodec's: this is the only place that
would have to change.
"""

import functools
import io
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from xmoco.data.decode import EncodedImage, exif_orientation, open_image, shrunk, upright

AT_ONCE = 2**29
"""So many bytes of pixels are decoded together at most: photographs of 12 megapixels come in at 36
MB each, and memory must not depend on the size of a batch."""
LARGEST = 2**27
"""Images of more bytes are left to the host, which can decode them at a fraction of their size."""
MOST_BESIDES = 2**20
"""Bytes that a file may have beyond those of its pixels: it waits in memory until its batch is
complete."""
MOST_SHRINKING = 32
"""Images to be shrunk by more are left to the host too: PyTorch's resizing runs out of shared
memory for filters as wide as that."""

_BASELINE, _SCAN, _APP1, _APP14 = 0xC0, 0xDA, 0xE1, 0xEE
_TABLES = {0xC4, 0xDB}
_SKIPPED = {*_TABLES, 0xDD, 0xFE, *range(0xE0, 0xF0)}
"""Segments that say nothing of the kind of file: tables, comments, applications' own."""
_END = b"\xff\xd9"
_SAMPLINGS = {b"\x11", *(bytes([luma, 0x11, 0x11]) for luma in (0x11, 0x21, 0x12, 0x22, 0x41))}
"""Horizontal and vertical resolution of each channel: grey, 4:4:4, 4:2:2, 4:4:0, 4:2:0, 4:1:1."""


@dataclass(frozen=True)
class PlainJpeg:
    """A file that the GPU can decode, if it is not damaged."""

    file: Tensor
    """uint8 (bytes,) on the CPU."""
    height: int
    width: int
    orientation: int | None
    short_side: int | None

    @property
    def decoded_bytes(self) -> int:
        return 3 * self.height * self.width


def plain_jpeg(image: EncodedImage) -> PlainJpeg | None:
    """The image as one for the GPU; none if it is no JPEG, an unusual one or a truncated one."""
    data = image.data
    try:
        header = _read_header(data)
    except IndexError:  # the file ends in its header
        header = None
    if header is None or not 0 < 3 * header.height * header.width <= LARGEST:
        return None
    if len(data) > 3 * header.height * header.width + MOST_BESIDES:
        return None
    shorter = min(header.height, header.width)
    if image.short_side is not None and shorter > MOST_SHRINKING * image.short_side:
        return None
    # Pixels end with a mark that they cannot contain. Most files end there too, and need no search;
    # others have attachments.
    end = len(data) - len(_END) if data.endswith(_END) else data.find(_END, header.scan)
    if end < 0:
        return None
    orientation = None
    if header.has_metadata:
        try:
            with open_image(data) as opened:
                orientation = exif_orientation(opened)
        except Exception:  # whatever it is, decode_rgb is to meet it and to judge it
            return None
    file = torch.frombuffer(bytearray(memoryview(data)[: end + len(_END)]), dtype=torch.uint8)
    return PlainJpeg(file, header.height, header.width, orientation, image.short_side)


class _Header(NamedTuple):
    height: int
    width: int
    scan: int
    """Where the pixels begin."""
    has_metadata: bool
    """EXIF or XMP, which may tell the orientation."""


def _read_header(data: bytes) -> _Header | None:
    """None if the GPU may not know such files; an ``IndexError`` if the header is truncated."""
    frame, is_rgb = None, False
    seen = set()
    for marker, body in _segments(data):
        seen.add(marker)
        if marker == _BASELINE:
            frame = body
        elif marker == _SCAN and frame is not None:
            components = data[frame + 5]
            names_and_samplings = data[frame + 6 : frame + 6 + 3 * components]
            is_rgb |= names_and_samplings[::3] == b"RGB"
            usual = (
                data[frame] == 8  # bits
                and names_and_samplings[1::3] in _SAMPLINGS
                and data[body] == components  # all in one scan
                and seen >= _TABLES  # and not those of another file
                and not (is_rgb and components == 3)
            )
            height, width = (int.from_bytes(data[at : at + 2]) for at in (frame + 1, frame + 3))
            return _Header(height, width, body, _APP1 in seen) if usual else None
        elif marker == _APP14:
            is_rgb |= data[body : body + 5] == b"Adobe" and data[body + 11] != 1
        elif marker not in _SKIPPED:
            return None
    return None


def _segments(data: bytes) -> Iterator[tuple[int, int]]:
    """Marker and start of the body of each segment of the header."""
    at = 2 if data.startswith(b"\xff\xd8") else len(data)
    while data[at] == 0xFF:
        if data[at + 1] == 0xFF:  # padding
            at += 1
        else:
            yield data[at + 1], at + 4
            at += 2 + int.from_bytes(data[at + 2 : at + 4])


def decode_jpegs(jpegs: list[PlainJpeg], device: torch.device) -> list[Tensor | None]:
    """The images on a CUDA device, uint8 (3, height, width); none for those nvJPEG refuses.

    Returns when the files are decoded, though not necessarily turned and shrunk: that is work of
    the current stream.
    """
    images: list[Tensor | None] = []
    for group in _groups(jpegs):
        # torchvision decodes on a stream of its own, which does not wait for the current one, into
        # memory that the current one may have freed but not yet finished with.
        torch.cuda.current_stream(device).synchronize()
        decoded = _decoded([jpeg.file for jpeg in group], device)
        images += [
            None if pixels is None else _finished(pixels, jpeg)
            for pixels, jpeg in zip(decoded, group, strict=True)
        ]
    return images


@functools.cache
def nvjpeg_works(device: torch.device) -> bool:
    """Whether files can be decoded there: torchvision may have been built without nvJPEG."""
    file = io.BytesIO()
    Image.new("RGB", (64, 64)).save(file, "JPEG")
    jpeg = plain_jpeg(EncodedImage(file.getvalue(), None))
    assert jpeg is not None, "this is as plain as can be"
    return decode_jpegs([jpeg], device)[0] is not None


def _groups(jpegs: list[PlainJpeg]) -> Iterator[list[PlainJpeg]]:
    """Neighbours whose pixels are at most ``AT_ONCE`` bytes together."""
    group: list[PlainJpeg] = []
    room = AT_ONCE
    for jpeg in jpegs:
        if group and jpeg.decoded_bytes > room:
            yield group
            group, room = [], AT_ONCE
        group.append(jpeg)
        room -= jpeg.decoded_bytes
    if group:
        yield group


def _decoded(files: list[Tensor], device: torch.device) -> list[Tensor | None]:
    # Imported here because it takes seconds, which other devices need not wait for.
    from torchvision.io import ImageReadMode, decode_jpeg

    try:
        return [*decode_jpeg(files, mode=ImageReadMode.RGB, device=device)]
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:  # one damaged file spoils the lot, so they are searched by halves
        torch.cuda.synchronize(device)  # what was begun may still be writing; or the device failed
        if len(files) == 1:
            return [None]
        half = len(files) // 2
        return _decoded(files[:half], device) + _decoded(files[half:], device)


def _finished(pixels: Tensor, jpeg: PlainJpeg) -> Tensor:
    """Shrunk and turned as by ``decode_rgb``."""
    size = jpeg.height, jpeg.width
    if jpeg.short_side is not None and shrunk(size, jpeg.short_side) != size:
        size = shrunk(size, jpeg.short_side)
        soft = F.interpolate(pixels[None].float(), size, mode="bilinear", antialias=True)
        pixels = soft[0].round_().to(torch.uint8)
    return upright(pixels, jpeg.orientation)
