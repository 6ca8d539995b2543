"""What tests of JPEG files share: photographs, plain and otherwise."""

import io
from typing import Any

import numpy as np
from PIL import Image

from xmoco.data.decode import EncodedImage
from xmoco.data.jpeg import PlainJpeg, plain_jpeg


def photograph(width: int = 40, height: int = 30, seed: int = 0) -> Image.Image:
    """Soft shapes and colours with some fine grain, which is how photographs look to a codec."""
    rng = np.random.default_rng(seed)
    coarse = rng.uniform(40, 215, (2 + height // 40, 2 + width // 40, 3)).astype(np.uint8)
    soft = np.asarray(Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC))
    grain = rng.normal(0, 4, (height, width, 1))
    return Image.fromarray((soft + grain).clip(0, 255).astype(np.uint8))


def encoded(image: Image.Image, kind: str = "JPEG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def plain(data: bytes, short_side: int | None = None) -> PlainJpeg:
    jpeg = plain_jpeg(EncodedImage(data, short_side))
    assert jpeg is not None
    return jpeg


def segment(marker: int, body: bytes) -> bytes:
    return bytes([0xFF, marker]) + (len(body) + 2).to_bytes(2) + body


def after_start(data: bytes, inserted: bytes) -> bytes:
    return data[:2] + inserted + data[2:]


def damaged() -> bytes:
    """Plain to look at, yet nobody can decode it: it has a table of a kind that there is not."""
    return after_start(encoded(photograph()), segment(0xDB, b"\x0f" + bytes(64)))
