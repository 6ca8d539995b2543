"""Images decoded by other processes: the same to the bit, and processes that come and go."""

import os
import socket
import subprocess
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from photographs import encoded, photograph
from PIL import Image
from torch import Tensor

from xmoco.data import decode_server, decoders
from xmoco.data.decode import EncodedImage, decode_if_readable
from xmoco.data.decoders import Decoders, _decoded_there
from xmoco.data.processes import Process, command

# Pillow warns of broken metadata on its way to an image or an error.
pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning:PIL"),
    pytest.mark.skipif(os.name != "posix", reason="threads decode there"),
]


def pool() -> Iterator[Decoders]:
    """Processes that start with the first image."""
    with closing(Decoders()) as found:
        found._met = decoders.WORTH_STARTING
        yield found


shared = pytest.fixture(scope="module", name="shared")(pool)  # where none comes to harm
own = pytest.fixture(name="own")(pool)


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """What this process decodes itself."""
    counted = Mock(side_effect=decode_if_readable)
    monkeypatch.setattr(decoders, "decode_if_readable", counted)
    return counted


def assert_as_here(images: list[Tensor | None], files: list[EncodedImage]) -> None:
    for image, file in zip(images, files, strict=True):
        expected = decode_if_readable(file)
        assert (image is None) == (expected is None)
        if image is not None and expected is not None:
            assert image.is_contiguous()
            assert image.dtype == torch.uint8
            assert torch.equal(image, expected)


def some(count: int) -> list[EncodedImage]:
    return [
        EncodedImage(encoded(photograph(20 + n % 3, 16, seed=n), "PNG"), None) for n in range(count)
    ]


def deep(kind: type, low: int = 0) -> Image.Image:
    return Image.fromarray(np.linspace(low, 60_000, 30 * 40).reshape(30, 40).astype(kind))


def turned(orientation: int, **options: Any) -> dict[str, Any]:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return {"exif": exif, **options}


KINDS: list[tuple[str, Callable[[Image.Image], Image.Image] | str, dict[str, Any]]] = [
    ("JPEG", "RGB", {"progressive": True}),
    ("JPEG", "L", {"progressive": True}),
    ("JPEG", "CMYK", {}),
    ("JPEG", "RGB", {"exif": b"Exif\0\0MM\0*\0\0\0\xff" + bytes(range(40))}),
    *(("PNG", mode, {}) for mode in ("RGB", "L", "1", "P", "RGBA", "LA")),
    ("PNG", "P", {"transparency": 3}),
    ("PNG", "RGB", {"transparency": (90, 90, 90)}),
    ("PNG", lambda _: deep(np.uint16), {}),
    ("GIF", "P", {"transparency": 1}),
    ("BMP", "RGB", {}),
    ("TIFF", "RGB", {"compression": "tiff_lzw"}),
    ("TIFF", lambda _: deep(np.float32, -40), {}),
    ("TIFF", lambda _: deep(np.int32, -40), {}),
    ("TIFF", lambda _: Image.fromarray(np.array([[0.0, np.nan]], np.float32)), {}),
    ("TGA", "RGBA", {}),
    ("PPM", "RGB", {}),
    ("PPM", lambda _: deep(np.uint16), {}),
    ("WEBP", "RGBA", {"lossless": True}),
    ("JPEG2000", "RGB", {}),
    ("MPO", "RGB", {"save_all": True, "append_images": [photograph(20, 10)]}),
    *(("JPEG", "RGB", turned(turn, progressive=True)) for turn in range(10)),
    *((kind, "RGB", turned(turn)) for kind in ("PNG", "TIFF", "WEBP") for turn in (3, 6, 7)),
]


def test_every_kind_is_decoded_as_here(shared: Decoders, here: Mock) -> None:
    """All in one request, whole and shrunk; what is unreadable among them is left to this process,
    and nothing else."""
    files = [
        EncodedImage(data, short_side)
        for number, (kind, mode, options) in enumerate(KINDS)
        for image in [photograph(40, 30, seed=number)]
        for changed in [image.convert(mode) if isinstance(mode, str) else mode(image)]
        for data in [encoded(changed, kind, **options)]
        for short_side in (None, 9)
    ]
    broken = [EncodedImage(data, 9) for data in (b"", b"no image", files[0].data[:-90], bytes(99))]
    mixed = [*files[:9], *broken, *files[9:]]
    images = shared.decode(mixed)
    assert_as_here(images, mixed)
    unreadable = [call.args[0] for call in here.call_args_list]
    assert unreadable[:4] == broken
    assert len(unreadable) == 4 + 2  # those that are not finite
    assert len(mixed) - sum(image is None for image in images) == 2 * len(KINDS) - 2


@settings(deadline=None, max_examples=25, derandomize=True)
@given(st.data())
def test_damage_is_met_alike(shared: Decoders, data: st.DataObject) -> None:
    files = []
    for kind in ("JPEG", "PNG", "GIF", "BMP", "TIFF", "WEBP"):
        damaged = bytearray(encoded(photograph(16, 12), kind))
        for place in data.draw(st.lists(st.integers(0, len(damaged) - 1), max_size=4)):
            damaged[place] = data.draw(st.integers(0, 255))
        files.append(EncodedImage(bytes(damaged), data.draw(st.sampled_from([None, 7]))))
    assert_as_here(shared.decode(files), files)


def test_large_images_are_left_to_this_process(shared: Decoders, here: Mock) -> None:
    """As they are decoded: a JPEG file perhaps at a fraction of its size."""
    side = 2**12
    allowed, above = (
        EncodedImage(encoded(Image.new("1", (side, high)), "PNG"), 8)
        for high in (decode_server.MOST_PIXELS // side, decode_server.MOST_PIXELS // side + 1)
    )
    shrunk = EncodedImage(encoded(Image.new("L", (side, side)), progressive=True), 8)
    images = shared.decode([allowed, above, shrunk])
    assert [call.args[0] for call in here.call_args_list] == [above]
    assert [None if image is None else image.shape[1] for image in images] == [8, 8, 8]


def test_an_answer_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """What does not fit is left, and what fits in its place is not."""
    sizes = [(10, 10), (10, 9), (9, 10), (5, 2), (1, 1)]
    files = [EncodedImage(encoded(photograph(*size), "PNG"), None) for size in sizes]
    monkeypatch.setattr(decode_server, "LARGEST_ANSWER", 3 * (10 * 10 + 5 * 2))
    ours, theirs = socket.socketpair()
    process = Process.__new__(Process)
    process.connection = ours
    thread = threading.Thread(target=decode_server.serve, args=(theirs,))
    thread.start()
    with ours, theirs:
        answers = [_decoded_there(files, process) for _ in range(2)]
        ours.shutdown(socket.SHUT_RDWR)
        thread.join()
    for images in answers:
        assert [image is None for image in images] == [False, True, True, False, True]
        assert_as_here([images[0], images[3]], [files[0], files[3]])


def test_a_request_is_bounded(
    shared: Decoders, here: Mock, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = some(4)
    monkeypatch.setattr(decoders, "LARGEST_REQUEST", sum(len(f.data) for f in files) - 1)
    assert_as_here(shared.decode(files), files)
    assert [call.args[0] for call in here.call_args_list] == files[3:]


def test_more_files_than_are_sent_at_once(shared: Decoders, here: Mock) -> None:
    files = some(3) * 700
    images = shared.decode(files)
    assert here.call_count == 0
    assert_as_here(images[-3:], files[-3:])
    assert len(images) == 2100


def test_threads_do_not_get_each_others_images(own: Decoders) -> None:
    files = some(24)
    with ThreadPoolExecutor(3) as pool:
        for part, images in pool.map(lambda part: (part, own.decode(part)), batches(files * 3)):
            assert_as_here(images, part)
    assert 1 <= len(own._all) <= 3


def batches(files: list[EncodedImage]) -> list[list[EncodedImage]]:
    return [files[begin : begin + 4] for begin in range(0, len(files), 4)]


def test_where_a_process_is_killed_this_one_decodes(own: Decoders, here: Mock) -> None:
    files = some(3)
    own.decode(files)
    assert here.call_count == 0
    (process,) = own._all
    process._process.kill()
    process._process.wait()
    with pytest.warns(RuntimeWarning, match="a process that was to decode images failed"):
        found = own.decode(files)
    assert_as_here(found, files)
    assert here.call_count == 3
    with warnings.catch_warnings(action="error"):  # it is told once
        found = own.decode(files)
    assert_as_here(found, files)
    assert here.call_count == 6
    assert len(own._all) == 1


@pytest.mark.filterwarnings("ignore:a process that was to decode images failed")
@pytest.mark.parametrize("program", ["/there/is/no/python", "/bin/true"])
def test_where_none_can_be_started_this_one_decodes(
    own: Decoders, monkeypatch: pytest.MonkeyPatch, program: str
) -> None:
    monkeypatch.setattr("sys.executable", program)
    files = some(3)
    for _ in range(2):
        assert_as_here(own.decode(files), files)
    assert len(own._all) <= 1


def test_for_few_images_none_is_started() -> None:
    pool = Decoders()
    (file,) = some(1)
    assert pool.decode([]) == []
    assert_as_here(pool.decode([file] * decoders.WORTH_STARTING), [file] * decoders.WORTH_STARTING)
    assert not pool._all
    assert_as_here(pool.decode([file]), [file])
    assert len(pool._all) == 1
    pool.close()


def test_processes_end_when_closed_and_are_not_interrupted_by_the_keyboard() -> None:
    pool = Decoders()
    pool._met = decoders.WORTH_STARTING
    pool.decode(some(1))
    (process,) = pool._all
    assert process._process.poll() is None
    assert os.getpgid(process._process.pid) != os.getpgrp()
    pool.close()
    assert process._process.returncode == 0


def test_processes_print_nothing(own: Decoders, capfd: pytest.CaptureFixture[str]) -> None:
    """Of warnings there are many: this one is of a TIFF file whose tags are missing."""
    data = bytearray(encoded(photograph(), "TIFF"))
    data[4:8] = len(data).to_bytes(4, "little")
    own.decode([EncodedImage(bytes(data), None)])
    assert len(own._all) == 1
    assert capfd.readouterr() == ("", "")


def test_processes_start_fast() -> None:
    """Not because of a clock, but because of what they do not import."""
    *start, code = command(decode_server)
    told = "import sys; print([name in sys.modules for name in ('torch', 'numpy', 'PIL.Image')])"
    ended = subprocess.run(
        [*start, code.replace("main()", told)], capture_output=True, text=True, check=True
    )
    assert ended.stdout == "[False, False, True]\n"
