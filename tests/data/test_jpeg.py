"""What the GPU is given to decode, and what becomes of it.

Without a GPU, torchvision's decoder for the CPU stands in for nvJPEG: it is called alike, and all
around it can be tested anywhere. What only a GPU can tell is tested where there is one.
"""

import io
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from listed import CPU
from photographs import after_start, damaged, encoded, photograph, plain, segment
from PIL import Image

from xmoco.data import jpeg as jpeg_module
from xmoco.data.decode import EncodedImage, UnreadableImage, decode_rgb
from xmoco.data.jpeg import LARGEST, MOST_SHRINKING, decode_jpegs, plain_jpeg

CUDA = torch.device("cuda")
pytestmark = [
    # Pillow warns of broken metadata on its way to an image or an error.
    pytest.mark.filterwarnings("ignore::UserWarning:PIL"),
    pytest.mark.filterwarnings("ignore:The image decoding:DeprecationWarning"),
]


def with_orientation(orientation: int, **options: Any) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return encoded(photograph(), exif=exif, **options)


@settings(deadline=None, max_examples=30)
@given(
    st.integers(1, 90),
    st.integers(1, 90),
    st.sampled_from(["RGB", "L"]),
    st.sampled_from([0, 1, 2]),
    st.booleans(),
)
def test_ordinary_files_are_plain(
    width: int, height: int, mode: str, subsampling: int, optimize: bool
) -> None:
    options = {"subsampling": subsampling} if mode == "RGB" else {}
    image = photograph(width, height).convert(mode)
    data = encoded(image, optimize=optimize, comment=b"\xff\xd9 no end", **options)
    found = plain(data, 64)
    assert (found.height, found.width, found.short_side) == (height, width, 64)
    assert found.orientation is None
    assert found.decoded_bytes == 3 * height * width
    assert bytes(found.file.numpy()) == data


@pytest.mark.parametrize("orientation", range(1, 9))
def test_orientation_is_read_from_exif_or_xmp(orientation: int) -> None:
    assert plain(with_orientation(orientation)).orientation == orientation
    xmp = f'http://ns.adobe.com/xap/1.0/\0<x tiff:Orientation="{orientation}"/>'.encode()
    data = after_start(encoded(photograph()), segment(0xE1, xmp))
    assert plain(data).orientation == orientation


def test_attachments_and_padding_do_not_matter() -> None:
    data = encoded(photograph())
    assert bytes(plain(data + b"\0" * 9 + b"a film").file.numpy()) == data
    assert plain(after_start(data, b"\xff\xff\xff")).width == 40
    phone = encoded(photograph(), "MPO", save_all=True, append_images=[photograph(20, 10)])
    assert Image.open(io.BytesIO(phone)).format == "MPO"
    assert (plain(phone).width, plain(phone).height) == (40, 30)


def test_a_broken_exif_block_does_not_matter() -> None:
    data = encoded(photograph(), exif=b"Exif\0\0MM\0*\0\0\0\xff" + bytes(range(40)))
    assert plain(data).orientation is None


def adobe(transform: int) -> bytes:
    return segment(0xEE, b"Adobe\0\x64\0\0\0\0" + bytes([transform]))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff",
        b"\xff\xd8",
        b"no image",
        encoded(photograph(), "PNG"),
        encoded(photograph(), "WEBP"),
        encoded(photograph(), progressive=True),
        encoded(photograph().convert("CMYK")),
        encoded(photograph(), keep_rgb=True),
        after_start(encoded(photograph()), adobe(0)),
        after_start(encoded(photograph()), b"no segment"),
        encoded(photograph()).replace(b"\xff\xc0", b"\xff\xc9"),  # arithmetic coding
        encoded(photograph()).replace(b"\xff\xc0\x00\x11\x08", b"\xff\xc0\x00\x11\x0c"),  # 12 bits
        encoded(photograph()).replace(b"\x03\x01\x22\x00", b"\x03\x01\x44\x00"),  # odd sampling
        encoded(photograph()).replace(b"\x11\x08\x00\x1e", b"\x11\x08\x00\x00"),  # no height
        encoded(photograph()).replace(b"\x11\x08\x00\x1e", b"\x11\x08\xff\xff")
        .replace(b"\x00\x28\x03\x01", b"\xff\xff\x03\x01"),  # a bomb
        encoded(photograph(), streamtype=2),  # without its tables
        encoded(photograph())[:-1],
        encoded(photograph())[:-100],
        encoded(photograph())[:100],
    ],
)  # fmt: skip
def test_everything_else_is_not(data: bytes) -> None:
    assert plain_jpeg(EncodedImage(data, None)) is None


def test_what_is_to_be_shrunk_very_much_is_left_to_the_host() -> None:
    data = encoded(photograph(400, 330))
    assert plain_jpeg(EncodedImage(data, 330 // MOST_SHRINKING + 1)) is not None
    assert plain_jpeg(EncodedImage(data, 330 // MOST_SHRINKING)) is None


def test_what_the_gpu_could_misread_is_what_was_meant() -> None:
    """The files above are what they are called: Pillow confirms it, or their bytes differ."""
    assert Image.open(io.BytesIO(encoded(photograph(), keep_rgb=True))).mode == "RGB"
    plain_data = encoded(photograph())
    for mark in (b"\xff\xc0\x00\x11\x08", b"\x03\x01\x22\x00", b"\x11\x08\x00\x1e\x00\x28\x03\x01"):
        assert plain_data.count(mark) == 1
    assert plain(after_start(plain_data, adobe(1))).width == 40
    grey = encoded(photograph().convert("L"))
    assert plain(after_start(grey, adobe(0))).width == 40  # has no colours to be misread
    assert LARGEST < 3 * 65535**2


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 10**9), st.binary(max_size=4))
def test_any_cut_or_damage_is_met_without_an_error(place: int, damage: bytes) -> None:
    data = with_orientation(6)
    place %= len(data)
    assert plain_jpeg(EncodedImage(data[:place], None)) is None
    plain_jpeg(EncodedImage(data[:place] + damage + data[place + len(damage) :], None))


def test_a_truncated_file_is_judged_by_pillow() -> None:
    for cut in (1, 2, 50, 300):
        data = encoded(photograph())[:-cut]
        assert plain_jpeg(EncodedImage(data, None)) is None
        with pytest.raises(UnreadableImage, match=r"(?i)truncated"):
            decode_rgb(data)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("short_side", [None, 15])
def test_orientation_and_shrinking_are_those_of_decode_rgb(
    stand_in: SimpleNamespace, orientation: int, short_side: int | None
) -> None:
    data = with_orientation(orientation, quality=95)
    (image,) = decode_jpegs([plain(data, short_side)], CPU)
    expected = decode_rgb(data, short_side)
    assert image is not None
    assert image.shape == expected.shape
    # torchvision brings a libjpeg of its own, and resizing rounds differently.
    assert (image.int() - expected.int()).abs().max() <= 3


def test_large_photographs_are_shrunk_without_aliasing(stand_in: SimpleNamespace) -> None:
    stripes = np.zeros((400, 600, 3), np.uint8)
    stripes[:, ::2] = 255
    (image,) = decode_jpegs([plain(encoded(Image.fromarray(stripes), quality=95), 50)], CPU)
    assert image is not None
    assert image.shape == (3, 50, 75)
    assert image[:, :, 5:-5].float().std() < 5


def test_panoramas_are_kept_short(stand_in: SimpleNamespace) -> None:
    data = encoded(photograph(900, 60))
    (image,) = decode_jpegs([plain(data, 50)], CPU)
    assert image is not None
    assert image.shape == decode_rgb(data, 50).shape == (3, 10, 150)


def test_grey_becomes_rgb(stand_in: SimpleNamespace) -> None:
    data = encoded(photograph().convert("L"))
    (image,) = decode_jpegs([plain(data)], CPU)
    assert image is not None
    assert image.shape == (3, 30, 40)
    assert (image[0] == image[1]).all()
    assert (image[0] == image[2]).all()


def test_decoding_goes_by_groups_of_bounded_size(
    stand_in: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jpeg_module, "AT_ONCE", 3 * 40 * 30 * 4)
    sizes = [(40, 30)] * 6 + [(400, 300)] + [(40, 30)] * 5 + [(10, 10)]
    jpegs = [plain(encoded(photograph(*size, seed))) for seed, size in enumerate(sizes)]
    images = decode_jpegs(jpegs, CPU)
    assert stand_in.calls == [4, 2, 1, 4, 2]
    assert [tuple(image.shape[:0:-1]) for image in images if image is not None] == sizes
    assert decode_jpegs([], CPU) == []


@settings(deadline=None, max_examples=20)
@given(st.sets(st.integers(0, 12)))
def test_files_refused_are_found_among_the_others(broken: set[int]) -> None:
    good, bad = plain(encoded(photograph())).file, plain(damaged()).file
    files = [bad if i in broken else good for i in range(13)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "synchronize", lambda _: None)
        images = jpeg_module._decoded(files, CPU)
    assert {i for i, image in enumerate(images) if image is None} == broken


def test_want_of_memory_is_no_damage(
    stand_in: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr("torchvision.io.decode_jpeg", fail)
    with pytest.raises(torch.OutOfMemoryError):
        decode_jpegs([plain(encoded(photograph()))], CPU)


@pytest.mark.gpu
@pytest.mark.parametrize("colour", ["4:4:4", "4:2:2", "4:2:0", None])
@pytest.mark.parametrize("orientation", [1, 6])
def test_nvjpeg_is_close_to_pillow(colour: str | None, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encoded(
        photograph(500, 375).convert("RGB" if colour else "L"),
        quality=85,
        exif=exif,
        **({"subsampling": colour} if colour else {}),
    )
    (decoded,) = decode_jpegs([plain(data)], CUDA)
    expected = decode_rgb(data)
    assert decoded is not None
    assert decoded.shape == expected.shape
    assert (decoded.cpu().float() - expected.float()).abs().mean() < 1.5


@pytest.mark.gpu
def test_nvjpeg_and_shrinking_are_close_to_pillow() -> None:
    data = encoded(photograph(3000, 2000), quality=90)
    (decoded,) = decode_jpegs([plain(data, 256)], CUDA)
    assert decoded is not None
    assert decoded.shape == (3, 256, 384)
    assert (decoded.cpu().float() - decode_rgb(data, 256).float()).abs().mean() < 1.5
