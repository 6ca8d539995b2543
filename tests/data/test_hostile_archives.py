"""Archives that were made to do harm: a sentence, in bounded time and memory."""

import bz2
import contextlib
import gzip
import io
import itertools
import lzma
import os
import tarfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xmoco.config import DataConfig
from xmoco.data import trees
from xmoco.data.sources import open_images
from xmoco.data.tar_members import BLOCK, DamagedArchive, Member, members
from xmoco.errors import UserError

END = bytes(2 * BLOCK)


def found(content: bytes) -> list[Member]:
    return list(members(lambda offset, size: content[offset : offset + size], len(content)))


def header(
    name: bytes = b"1.png",
    size: bytes = b"00000000003\0",
    kind: bytes = b"0",
    magic: bytes = b"ustar\x0000",
    checksum: bytes | None = None,
    prefix: bytes = b"",
) -> bytes:
    """Any fields at all, with the sum that belongs to them."""
    block = bytearray(BLOCK)
    for at, length, field in (
        (0, 100, name),
        (124, 12, size),
        (148, 8, b" " * 8),
        (156, 1, kind),
        (257, 8, magic),
        (345, 155, prefix),
    ):
        block[at : at + length] = field[:length].ljust(length, b"\0")
    block[148:156] = b"%06o\0 " % sum(block) if checksum is None else checksum
    return bytes(block)


def padded(content: bytes) -> bytes:
    return content + bytes(-len(content) % BLOCK)


names = st.text(st.characters(codec="utf-8", exclude_characters="\0/"), min_size=1, max_size=150)
paths = st.lists(names.filter(lambda name: name not in (".", "..")), min_size=1, max_size=3)


@settings(max_examples=40)
@given(
    st.lists(st.tuples(paths.map("/".join), st.binary(max_size=1200)), max_size=4),
    st.sampled_from([tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]),
)
def test_whole_archives_are_read_as_by_the_standard_library(
    files: list[tuple[str, bytes]], form: int
) -> None:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w", format=form) as archive:
        for number, (name, data) in enumerate(files):
            entry = tarfile.TarInfo(name)
            entry.size, entry.mtime = len(data), number + 0.5
            try:
                archive.addfile(entry, io.BytesIO(data))
            except ValueError:  # too long for ustar
                return
            folder = tarfile.TarInfo(f"{name} folder")
            folder.type = tarfile.DIRTYPE
            archive.addfile(folder)
    with tarfile.open(fileobj=io.BytesIO(content.getvalue())) as archive:
        expected = [
            Member(entry.name, entry.offset_data, entry.size) for entry in archive if entry.isreg()
        ]
    assert found(content.getvalue()) == expected
    assert [m.size for m in expected] == [len(data) for _, data in files]


def test_links_and_prefixes() -> None:
    content = header(b"b.png", prefix=b"a") + padded(b"abc")
    content += header(b"c.png", kind=b"1", size=b"77777777777\0") + header(b"folder/", kind=b"0")
    assert found(content + END)[0] == Member("a/b.png", BLOCK, 3)
    assert [m.name for m in found(content + END)] == ["a/b.png", "c.png"]


ODD_SIZES = [
    b"-0000000001\0",
    b"-512\0",
    b"+3\0",
    b"0o3\0",
    b"1_000\0",
    b"3x\0",
    b"9\0",
    b"\xff" * 12,  # a negative binary number
    b"\xff" * 4 + b"\xff\xff\xff\xff\xff\xff\xfe\x00",  # -512
    b"\x80" + b"\xff" * 11,  # beyond 64 bits
    b"\x80" + bytes(3) + b"\x7f" + b"\xff" * 7,
    b"77777777777\0",
    "٣\0".encode(),  # a digit, but none of tar's
]


@pytest.mark.parametrize("size", ODD_SIZES, ids=repr)
@pytest.mark.parametrize("kind", [b"0", b"x", b"g", b"L", b"K", b"S", b"V"])
def test_sizes_that_cannot_be(size: bytes, kind: bytes) -> None:
    content = header(size=size, kind=kind) + padded(b"abc") + header() + padded(b"abc") + END
    with pytest.raises(DamagedArchive):
        found(content)


@pytest.mark.parametrize(
    "notes",
    [
        b"20 size=99999999999\n",
        b"11 size=-5\n",
        b"13 size=-512\n",
        b"12 size=1e3\n",
        b"12 size=0x3\n",
        b"13 size= 300\n",
        b"11 size=\xff3\n",
        b"999 path=1.png\n",
        b"0 path=1.png\n",
        b"-1 path=1.png\n",
        b"5 path=1.png\n",
        b"path=1.png\n",
        b"15 path=1.png\nnot this",
        b"\xff\xff\xff",
        b"27 GNU.sparse.major=banana\n"[1:],
        b"22 GNU.sparse.major=1\n",
        b"26 GNU.sparse.map=0,1,,-3\n",
    ],
    ids=repr,
)
def test_pax_headers_that_cannot_be(notes: bytes) -> None:
    about = header(b"pax", size=b"%011o\0" % len(notes), kind=b"x") + padded(notes)
    with pytest.raises(DamagedArchive):
        found(about + header() + padded(b"abc") + END)


def test_what_a_pax_header_tells_of_another_header_is_not_believed() -> None:
    notes = b"10 size=3\n"
    about = header(b"pax", size=b"%011o\0" % len(notes), kind=b"x") + padded(notes)
    assert found(2 * about + header(size=b"0\0") + padded(b"abc") + END)[0].size == 3


@pytest.mark.parametrize("kind", [b"L", b"x"])
def test_names_without_end(kind: bytes) -> None:
    long = b"x" * 2**16
    notes = b"%d path=%s\n" % (len(long) + 12, long) if kind == b"x" else long
    about = header(b"long", size=b"%011o\0" % len(notes), kind=kind) + padded(notes)
    with pytest.raises(DamagedArchive, match="name that is too long"):
        found(about + header() + padded(b"abc") + END)


def test_sparse_files_are_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "a.tar").write_bytes(header(b"holes.png", kind=b"S") + padded(b"abc") + END)
    with pytest.raises(UserError, match=r"a sparse file, 'holes.png': pack it without --sparse\.$"):
        open_images(DataConfig(source=str(tmp_path / "a.tar")), "train")


@given(st.integers(0, BLOCK - 1), st.integers(0, 255))
def test_no_byte_of_a_header_does_harm(place: int, value: int) -> None:
    """With the sum put right again, so that the field is looked at."""
    block = bytearray(header())
    block[place] = value
    if not 148 <= place < 156:
        block[148:156] = b" " * 8
        block[148:156] = b"%06o\0 " % sum(block)
    content = bytes(block) + padded(b"abc") + END
    with contextlib.suppress(DamagedArchive):
        for member in found(content):
            assert 0 <= member.offset <= member.offset + member.size <= len(content)


@given(st.lists(st.sampled_from(b"0\0" + b"1257gxLKSV"), max_size=6), st.binary(max_size=700))
def test_every_step_leads_forward(kinds: list[int], content: bytes) -> None:
    """Headers of any kinds in any order, each with the same content."""
    size = b"%011o\0" % len(content)
    one = [header(size=size, kind=bytes([kind])) + padded(content) for kind in kinds]
    reads = itertools.count()

    def read(offset: int, count: int) -> bytes:
        next(reads)
        return (b"".join(one) + END)[offset : offset + count]

    with contextlib.suppress(DamagedArchive):
        list(members(read, len(b"".join(one) + END)))
    assert next(reads) <= 2 * sum(map(len, one)) // BLOCK + 2


def test_old_programs_sum_signed_bytes() -> None:
    block = bytearray(header("é.png".encode()))
    signed = sum(byte - 256 if byte > 127 else byte for byte in block[:148] + block[156:])
    block[148:156] = b"%06o\0 " % (signed + 8 * 32)
    assert found(bytes(block) + padded(b"abc") + END)[0].name == "é.png"


def test_paths_lead_nowhere(tmp_path: Path) -> None:
    (tmp_path / "secret.png").write_bytes(b"secret")
    wicked = [b"../secret.png", bytes(tmp_path / "secret.png"), b"a/../../secret.png", b"./ok.png"]
    content = b"".join(header(name) + padded(b"abc") for name in wicked)
    link = bytearray(header(b"link.png", kind=b"2"))
    link[157:257] = bytes(tmp_path / "secret.png").ljust(100, b"\0")[:100]
    link[148:156] = b" " * 8
    link[148:156] = b"%06o\0 " % sum(link)
    folder = tmp_path / "set"
    folder.mkdir()
    (folder / "a.tar").write_bytes(content + bytes(link) + END)
    tree = trees.open_tar(folder / "a.tar")
    absolute = str(tmp_path / "secret.png").lstrip("/")
    assert tree.images() == sorted(["ok.png", absolute])
    assert {tree.read(path) for path in tree.images()} == {b"abc"}  # what the archive holds
    assert [path.name for path in folder.iterdir()] == ["a.tar"]


PACKED = {"a.tar.gz": gzip.compress, "a.tar.xz": lzma.compress, "a.tar.bz2": bz2.compress}


@pytest.mark.parametrize("name", PACKED)
def test_compressed_archives_without_end(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trees, "LARGEST_UNPACKED", 2**20)
    content = header(b"1.png", b"%011o\0" % 2**22) + bytes(2**22) + END
    (tmp_path / name).write_bytes(PACKED[name](content))
    with pytest.raises(UserError, match=r"more than 0 GiB.*: a plain \.tar is read in place\.$"):
        open_images(DataConfig(source=str(tmp_path / name)), "train")


@pytest.mark.parametrize("name", PACKED)
def test_several_compressed_files_end_to_end(tmp_path: Path, name: str) -> None:
    content = header() + padded(b"abc") + END
    parts = [PACKED[name](content[:700]), PACKED[name](content[700:]), bytes(8)]
    (tmp_path / name).write_bytes(b"".join(parts))
    tree = trees.TarTree(tmp_path / name)
    assert tree.read("1.png") == b"abc"


def test_a_window_larger_than_memory(tmp_path: Path) -> None:
    filters = [{"id": lzma.FILTER_LZMA2, "dict_size": 2**29}]
    packed = lzma.LZMACompressor(filters=filters)
    try:
        content = packed.compress(header() + padded(b"abc") + END) + packed.flush()
    except MemoryError:
        pytest.skip("too little memory to make one")
    (tmp_path / "a.tar.xz").write_bytes(content)
    with pytest.raises(UserError, match=r"[Mm]emory.*\.$"):
        trees.TarTree(tmp_path / "a.tar.xz")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes there")
def test_a_pipe_is_no_archive(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.tar")
    with pytest.raises(UserError, match=r"neither a folder nor a file\.$"):
        open_images(DataConfig(source=str(tmp_path / "a.tar")), "train")
