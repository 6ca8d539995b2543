"""Every mode, orientation and kind of damage, each against Pillow or against arithmetic by hand."""

import io
import struct
import zlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps
from torch import Tensor

from xmoco.data.decode import LONGEST_SHAPE, UnreadableImage, decode_rgb

# Pillow warns of broken metadata on its way to an image or an error.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:PIL")


def picture(width: int = 40, height: int = 30) -> Image.Image:
    """A smooth colour picture that looks different in every corner."""
    y, x = np.mgrid[0:height, 0:width]
    channels = 255 * x / width, 255 * y / height, 255 * (x + y) / (width + height)
    return Image.fromarray(np.stack(channels, -1).astype(np.uint8))


def encoded(image: Image.Image, kind: str, **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def tensor(image: Image.Image) -> Tensor:
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def on_white(image: Image.Image) -> Image.Image:
    rgba = np.asarray(image.convert("RGBA")).astype(np.float64)
    alpha = rgba[..., 3:] / 255
    return Image.fromarray(np.rint(rgba[..., :3] * alpha + 255 * (1 - alpha)).astype(np.uint8))


@pytest.mark.parametrize(
    ("kind", "mode", "options"),
    [
        ("JPEG", "RGB", {"quality": 90}),
        ("JPEG", "RGB", {"quality": 90, "progressive": True, "subsampling": 0}),
        ("JPEG", "L", {}),
        ("JPEG", "CMYK", {}),
        ("PNG", "RGB", {}),
        ("PNG", "L", {}),
        ("PNG", "1", {}),
        ("PNG", "P", {}),
        ("PNG", "P", {"bits": 4}),
        ("GIF", "P", {}),
        ("GIF", "L", {}),
        ("BMP", "RGB", {}),
        ("BMP", "1", {}),
        ("TIFF", "RGB", {}),
        ("TIFF", "L", {}),
        ("TIFF", "CMYK", {}),
        # Compressed, for Pillow before 13 cannot read uncompressed YCbCr, not even its own files.
        ("TIFF", "YCbCr", {"compression": "jpeg"}),
        ("TGA", "RGB", {}),
        ("PPM", "RGB", {}),
        ("PPM", "L", {}),
        ("PPM", "1", {}),
        ("WEBP", "RGB", {"lossless": True}),
        ("JPEG2000", "RGB", {}),
    ],
)
def test_opaque_modes_equal_pillow(kind: str, mode: str, options: dict[str, object]) -> None:
    data = encoded(picture().convert(mode), kind, **options)
    decoded = decode_rgb(data)
    assert decoded.dtype == torch.uint8
    assert decoded.is_contiguous()
    expected = tensor(Image.open(io.BytesIO(data)).convert("RGB"))
    assert expected.shape == (3, 30, 40)
    assert torch.equal(decoded, expected)


@pytest.mark.parametrize("kind", ["PNG", "TIFF", "WEBP", "TGA"])
@pytest.mark.parametrize("mode", ["RGBA", "LA"])
def test_transparency_becomes_white(kind: str, mode: str) -> None:
    image = picture().convert("RGBA")
    image.putalpha(Image.fromarray(np.tile(np.arange(40, dtype=np.uint8) * 6, (30, 1))))
    image = image.convert(mode)
    data = encoded(image, kind, **({"lossless": True, "exact": True} if kind == "WEBP" else {}))
    decoded = decode_rgb(data)
    difference = (decoded.int() - tensor(on_white(image)).int()).abs().max()
    assert difference <= 1  # rounding of the blend
    assert (decoded[:, :, 0] == 255).all()  # wholly transparent there


def test_black_drawing_on_transparent_ground_stays_visible() -> None:
    image = Image.new("RGBA", (8, 8), (0, 0, 0, 0))
    image.putpixel((3, 2), (0, 0, 0, 255))
    decoded = decode_rgb(encoded(image, "PNG"))
    assert (decoded[:, 2, 3] == 0).all()
    assert int((decoded == 0).sum()) == 3


@pytest.mark.parametrize("kind", ["PNG", "GIF"])
def test_palette_with_a_transparent_colour(kind: str) -> None:
    image = picture().quantize(16)
    transparent = image.getpixel((0, 0))
    decoded = decode_rgb(encoded(image, kind, transparency=transparent))
    hidden = torch.from_numpy(np.asarray(image) == transparent)
    expected = tensor(image.convert("RGB")).clone()
    expected[:, hidden] = 255
    assert torch.equal(decoded, expected)


@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_png_with_a_transparent_colour_but_no_alpha_channel(mode: str) -> None:
    image = picture().convert(mode)
    colour = image.getpixel((5, 5))
    decoded = decode_rgb(encoded(image, "PNG", transparency=colour))
    assert (decoded[:, 5, 5] == 255).all()
    assert torch.equal(decoded[:, 20:, 20:], tensor(image.convert("RGB"))[:, 20:, 20:])


def png(width: int, height: int, bits: int, kind: int, rows: bytes) -> bytes:
    """A PNG by hand, for what Pillow does not write."""

    def chunk(name: bytes, body: bytes) -> bytes:
        return (
            struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))
        )

    header = struct.pack(">IIBBBBB", width, height, bits, kind, 0, 0, 0)
    parts = chunk(b"IHDR", header), chunk(b"IDAT", zlib.compress(rows)), chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def test_16_bit_rgb_png_keeps_the_high_byte() -> None:
    values = np.arange(0, 2 * 3 * 3 * 3000, 3000, dtype=np.uint16)[: 2 * 3 * 3].reshape(2, 3, 3)
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in values)
    decoded = decode_rgb(png(3, 2, 16, 2, rows))
    expected = torch.from_numpy((values >> 8).astype(np.uint8)).permute(2, 0, 1)
    assert torch.equal(decoded, expected)


@pytest.mark.parametrize("bits", [1, 2, 4])
def test_grey_png_of_few_bits_reaches_from_black_to_white(bits: int) -> None:
    top = 2**bits - 1
    row = 0b0 << (8 - bits) | top << (8 - 2 * bits)  # black, then white
    decoded = decode_rgb(png(2, 1, bits, 0, bytes([0, row])))
    assert decoded[:, 0].tolist() == [[0, 255]] * 3


@pytest.mark.parametrize("kind", ["PNG", "TIFF", "PPM"])
def test_16_bit_grey_is_scaled_not_clipped(kind: str) -> None:
    values = np.linspace(0, 65535, 30 * 40).astype(np.uint16).reshape(30, 40)
    decoded = decode_rgb(encoded(Image.fromarray(values), kind))
    expected = torch.from_numpy((values >> 8).astype(np.uint8)).expand(3, -1, -1)
    assert torch.equal(decoded, expected)


@pytest.mark.parametrize("dtype", [np.int32, np.float32])
def test_32_bit_grey_is_stretched(dtype: type) -> None:
    values = np.linspace(-1000, 3000, 30 * 40).reshape(30, 40).astype(dtype)
    decoded = decode_rgb(encoded(Image.fromarray(values), "TIFF"))
    expected = np.rint((values.astype(np.float64) + 1000) * 255 / 4000)
    assert torch.equal(decoded[1].double(), torch.from_numpy(expected))
    flat = Image.fromarray(np.full((4, 4), 7, dtype))
    assert (decode_rgb(encoded(flat, "TIFF")) == 0).all()


def test_floats_that_are_not_finite_are_refused() -> None:
    values = np.array([[0.0, np.nan]], np.float32)
    with pytest.raises(UnreadableImage, match="not finite"):
        decode_rgb(encoded(Image.fromarray(values), "TIFF"))


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG"])
def test_an_animation_gives_its_first_frame(kind: str) -> None:
    frames = [Image.new("RGB", (8, 6), colour) for colour in ("red", "lime", "blue")]
    data = encoded(frames[0], kind, save_all=True, append_images=frames[1:], duration=50)
    red, green, blue = decode_rgb(data).float().mean((1, 2)).tolist()
    assert red > 245
    assert max(green, blue) < 10


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize("short_side", [None, 15])
def test_exif_orientation_is_applied(orientation: int, kind: str, short_side: int | None) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    options = {"quality": 95, "subsampling": 0} if kind == "JPEG" else {}
    if kind == "WEBP":
        options = {"lossless": True}
    data = encoded(picture(), kind, exif=exif, **options)
    upright = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    if short_side is not None:
        upright = upright.resize(
            (upright.width // 2, upright.height // 2), Image.Resampling.BILINEAR
        )
    decoded = decode_rgb(data, short_side)
    assert (upright.width > upright.height) == (orientation < 5)
    assert decoded.shape == (3, upright.height, upright.width)
    # Resizing before or after turning may round differently.
    allowed = 0 if short_side is None else 1
    assert (decoded.int() - tensor(upright.convert("RGB")).int()).abs().max() <= allowed


def test_a_broken_exif_block_does_not_break_the_image() -> None:
    data = encoded(picture(), "JPEG", exif=b"Exif\0\0MM\0*\0\0\0\xff" + bytes(range(40)))
    assert decode_rgb(data).shape == (3, 30, 40)
    assert decode_rgb(data, 15).shape == (3, 15, 20)


def test_phone_photographs_with_attachments() -> None:
    data = encoded(picture(), "MPO", save_all=True, append_images=[picture(20, 10)], quality=90)
    assert Image.open(io.BytesIO(data)).format == "MPO"
    assert torch.equal(decode_rgb(data), tensor(Image.open(io.BytesIO(data)).convert("RGB")))


@settings(deadline=None, max_examples=40)
@given(
    st.integers(1, 200), st.integers(1, 200), st.integers(8, 64), st.sampled_from(["PNG", "JPEG"])
)
def test_shrinking_keeps_shape_and_bounds(width: int, height: int, short: int, kind: str) -> None:
    decoded = decode_rgb(encoded(picture(width, height), kind), short)
    _, high, wide = decoded.shape
    assert min(high, wide) <= short
    assert max(high, wide) <= LONGEST_SHAPE * short
    if min(width, height) <= short and max(width, height) <= LONGEST_SHAPE * short:
        assert (high, wide) == (height, width)
    else:
        scale = min(short / min(width, height), LONGEST_SHAPE * short / max(width, height))
        assert abs(high - max(1, height * scale)) <= 1
        assert abs(wide - max(1, width * scale)) <= 1


@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
def test_shrinking_is_antialiased(kind: str) -> None:
    """Fine black and white stripes must become grey, not a coarser stripe pattern."""
    stripes = np.zeros((400, 400, 3), np.uint8)
    stripes[:, ::2] = 255
    decoded = decode_rgb(encoded(Image.fromarray(stripes), kind, quality=95), 50).float()
    assert decoded.shape == (3, 50, 50)
    assert decoded[:, :, 5:-5].std() < 5
    assert abs(decoded.mean() - 127.5) < 3


def test_a_large_jpeg_shrinks_to_what_full_decoding_would_give() -> None:
    image = picture(800, 600)
    data = encoded(image, "JPEG", quality=95)
    expected = tensor(Image.open(io.BytesIO(data)).resize((80, 60), Image.Resampling.BILINEAR))
    assert (decode_rgb(data, 60).int() - expected.int()).abs().max() <= 3


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "GIF", "WEBP", "TIFF", "BMP", "PPM"])
@pytest.mark.parametrize("share", [0.0, 0.02, 0.3, 0.7])
def test_truncated_files_are_refused(kind: str, share: float) -> None:
    data = encoded(picture(), kind)
    with pytest.raises(UnreadableImage, match=r"\w"):
        decode_rgb(data[: int(len(data) * share)])
    if share > 0.1:
        with pytest.raises(UnreadableImage):
            decode_rgb(data[: int(len(data) * share)], 15)


@pytest.mark.parametrize("data", [b"", b"no image", b"<html>404</html>", bytes(2000)])
def test_other_files_are_refused(data: bytes) -> None:
    with pytest.raises(UnreadableImage) as caught:
        decode_rgb(data)
    assert "\n" not in str(caught.value)
    assert " at 0x" not in str(caught.value)


@pytest.mark.parametrize("data", [b"P6 0 5 255\n", png(0, 3, 8, 2, b"\0\0\0")])
def test_images_without_pixels_are_refused(data: bytes) -> None:
    with pytest.raises(UnreadableImage):
        decode_rgb(data)


@settings(deadline=None, max_examples=150)
@given(st.sampled_from(["JPEG", "PNG", "GIF", "BMP", "TIFF"]), st.data())
def test_damage_never_raises_anything_else(kind: str, data: st.DataObject) -> None:
    damaged = bytearray(encoded(picture(16, 12), kind))
    for place in data.draw(st.lists(st.integers(0, len(damaged) - 1), min_size=1, max_size=8)):
        damaged[place] = data.draw(st.integers(0, 255))
    try:
        decoded = decode_rgb(bytes(damaged), 64)
    except UnreadableImage:
        return
    assert decoded.shape[0] == 3
    assert decoded.dtype == torch.uint8
