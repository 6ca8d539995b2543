"""Folders that hold what is no file, lead in circles or have no bottom; images without end."""

import io
import os
import socket
import struct
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import chdir
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import EpsImagePlugin, Image

from xmoco.data import file_server, pillow, trees
from xmoco.data.decode import EncodedImage, UnreadableImage, decode_rgb, rgb_pixels
from xmoco.data.file_readers import FileReaders
from xmoco.data.file_server import Place, read_file
from xmoco.data.jpeg import plain_jpeg
from xmoco.data.names import IMAGE_EXTENSIONS
from xmoco.data.trees import FolderTree
from xmoco.data.wire import packed, received, unpacked
from xmoco.errors import UserError

needs_pipes = pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes there")


def picture(folder: Path, name: str = "1.png") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (4, 3)).save(folder / name)


@needs_pipes
def test_only_regular_files_are_images(tmp_path: Path) -> None:
    picture(tmp_path)
    os.mkfifo(tmp_path / "pipe.png")
    (tmp_path / "zero.png").symlink_to("/dev/zero")
    (tmp_path / "tty.png").symlink_to("/dev/tty")
    (tmp_path / "gone.png").symlink_to("/gone")
    with socket.socket(socket.AF_UNIX) as server, chdir(tmp_path):
        server.bind("socket.png")
        assert FolderTree(tmp_path).images() == ["1.png", "gone.png"]


@needs_pipes
def test_what_takes_a_files_place_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(OSError, match="not supported"):
            read_file(path)
    readers = FileReaders()
    pipe, content = readers.read([Place(str(tmp_path / "pipe")), Place(__file__)])
    readers.close()
    assert isinstance(pipe, OSError)
    assert content == Path(__file__).read_bytes()


@pytest.mark.skipif(not Path("/proc/self/pagemap").exists(), reason="not Linux")
def test_files_of_the_system_that_never_end(tmp_path: Path) -> None:
    """They are regular files by their own account, of no length at all."""
    (tmp_path / "map.png").symlink_to("/proc/self/pagemap")
    tree = FolderTree(tmp_path)
    assert tree.read("map.png") == b""


def test_files_too_large_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "large").touch()
    os.truncate(tmp_path / "large", file_server.LARGEST_FILE + 1)
    with pytest.raises(OSError, match="too large"):
        read_file(tmp_path / "large")


def test_an_answer_is_bounded_and_the_rest_can_be_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_server, "LARGEST_ANSWER", 10)
    paths = [tmp_path / name for name in "abc"]
    for path in paths:
        path.write_bytes(b"content")
    ours, theirs = socket.socketpair()
    thread = threading.Thread(target=file_server.serve, args=(theirs,))
    thread.start()
    with ours:
        request = file_server.request_for([Place(str(path)) for path in paths])
        ours.sendall(packed([len(request)]) + request)
        lengths = unpacked(received(ours, 24))
        assert received(ours, 7) == b"content"
        ours.shutdown(socket.SHUT_RDWR)
    thread.join()
    theirs.close()
    assert lengths[0] == 7
    assert all(length < 0 for length in lengths[1:])


def test_a_tree_of_a_thousand_folders(tmp_path: Path) -> None:
    with chdir(tmp_path):
        for _ in range(1000):
            os.mkdir("d")  # noqa: PTH102
            os.chdir("d")
        Image.new("RGB", (4, 3)).save("1.png")
    try:
        assert FolderTree(tmp_path).images() == ["d/" * 1000 + "1.png"]
    finally:
        with chdir(tmp_path):  # pytest's own way out has no bottom either
            subprocess.run(["rm", "-r", "d"], check=True)


def test_links_to_each_other_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Followed freely, ways through folders that lead to each other have no number."""
    folders = [tmp_path / "set" / f"f{number}" for number in range(4)]
    for folder in folders:
        picture(folder)
    for folder in folders:
        for other in folders:
            (folder / f"to-{other.name}").symlink_to(other)
    images = FolderTree(tmp_path / "set").images()
    assert {f"f{number}/1.png" for number in range(4)} <= set(images)
    assert len(images) == 4 + 12 * 4  # through every link to each of them, once
    assert images == FolderTree(tmp_path / "set").images()
    monkeypatch.setattr(trees, "MOST_LINKED_FOLDERS", 47)
    with pytest.raises(UserError, match=r"more than 47 folders.*remove such links\.$"):
        FolderTree(tmp_path / "set").images()


def test_a_folder_may_be_linked_twice(tmp_path: Path) -> None:
    picture(tmp_path / "elsewhere")
    (tmp_path / "set").mkdir()
    for name in ("train", "val"):
        (tmp_path / "set" / name).symlink_to(tmp_path / "elsewhere")
    assert FolderTree(tmp_path / "set").images() == ["train/1.png", "val/1.png"]


EPS = b"""%!PS-Adobe-3.0 EPSF-3.0
%%BoundingBox: 0 0 10 10
%%EndComments
(%pipe%touch harm) (w) file
showpage
%%EOF
"""


def test_no_program_is_started_for_an_image(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pillow would have Ghostscript draw what is called .jpg and is EPS."""
    started: list[object] = []
    monkeypatch.setattr(EpsImagePlugin, "gs_binary", sys.executable)
    monkeypatch.setattr(EpsImagePlugin, "has_ghostscript", lambda: True)
    monkeypatch.setattr(subprocess, "check_call", lambda *_, **__: started.append(_))
    with Image.open(io.BytesIO(EPS)) as image:
        assert image.format == "EPS"  # so Pillow knows it, and is only kept from it
    with pytest.raises(UnreadableImage, match="format that is not known"):
        decode_rgb(EPS)
    assert not started


def test_the_formats_are_those_of_the_endings() -> None:
    Image.init()
    by_ending = {Image.EXTENSION.get(f".{ending}") for ending in IMAGE_EXTENSIONS}
    assert by_ending - {None, "JPEG", "MPO"} <= set(pillow.FORMATS)
    assert set(pillow._known_formats()) <= set(pillow.FORMATS)
    assert "PNG" in pillow._known_formats()


def blank_png(width: int, height: int, bits: int = 8, kind: int = 0) -> bytes:
    """A picture without content, of any size in a few bytes."""

    def chunk(name: bytes, body: bytes) -> bytes:
        return (
            struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))
        )

    header = struct.pack(">IIBBBBB", width, height, bits, kind, 0, 0, 0)
    body = zlib.compress(b"\0" * 1000)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", body) + chunk(b"IEND", b"")
    )


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize(("side", "told"), [(13_000, "169"), (40_000, "179"), (2**31 - 1, "179")])
def test_giant_images_are_refused(side: int, told: str) -> None:
    with pytest.raises(UnreadableImage, match=f"{told} megapixels or more, and at most 134"):
        decode_rgb(blank_png(side, side), short_side=512)


def test_giant_jpegs_are_decoded_at_a_fraction() -> None:
    file = io.BytesIO()
    Image.new("RGB", (800, 600)).save(file, "JPEG")
    with pillow.decoded(file.getvalue(), 32, most_pixels=20_000) as (image, _):
        assert image.size == (43, 32)
    with (
        pytest.raises(UnreadableImage, match="megapixels"),
        pillow.decoded(file.getvalue(), None, most_pixels=20_000),
    ):
        pass


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P", "I", "F", "I;16", "RGB", "L"])
def test_large_images_are_converted_alike_in_strips(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(0)
    if mode in ("I", "F", "I;16"):
        kind = {"I": np.int32, "F": np.float32, "I;16": np.uint16}[mode]
        image = Image.fromarray(rng.integers(0, 60_000, (37, 23)).astype(kind))
        assert image.mode == mode
    else:
        image = Image.fromarray(rng.integers(0, 255, (37, 23, 4), dtype=np.uint8)).convert(mode)
        if mode == "P":
            image.info["transparency"] = 3
    whole = rgb_pixels(image)
    monkeypatch.setattr(pillow, "STRIP", 50)
    assert torch.equal(rgb_pixels(image), whole)


def test_what_is_decoded_at_once_is_bounded_by_pixels() -> None:
    room = pillow._Room(100)
    most = under_way = 0
    lock = threading.Lock()

    def work(pixels: int) -> None:
        nonlocal most, under_way
        with room.taken(pixels):
            with lock:
                under_way += pixels
                most = max(most, under_way)
            time.sleep(0.001)
            with lock:
                under_way -= pixels

    threads = [threading.Thread(target=work, args=(n % 7 * 10 + 40,)) for n in range(40)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    assert 40 <= most <= 100


def test_decoding_takes_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    real = pillow._Room.taken

    def counted(self: pillow._Room, pixels: int) -> Iterator[None]:
        taken.append(pixels)
        return real(self, pixels)

    monkeypatch.setattr(pillow._Room, "taken", counted)
    file = io.BytesIO()
    Image.new("RGB", (20, 10)).save(file, "PNG")
    decode_rgb(file.getvalue(), short_side=32)
    assert taken == [200]


def test_a_small_jpeg_with_a_large_attachment_is_left_to_the_host() -> None:
    file = io.BytesIO()
    Image.new("RGB", (64, 64)).save(file, "JPEG")
    plain = file.getvalue()
    assert plain_jpeg(EncodedImage(plain, 32)) is not None
    assert plain_jpeg(EncodedImage(plain + bytes(2**21), 32)) is None
