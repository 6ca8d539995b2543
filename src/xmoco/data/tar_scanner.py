"""Finds the images in tar shards: a program of its own, and small, for as many cores as there are.

Names follow WebDataset's layout: ``a/0012.jpg`` may have its class in ``a/0012.cls``. A request is
a path after its length; an answer is pieces, after how many they are and how long each is. Nothing
but the standard library is imported.
"""

import contextlib
import json
import os
import socket
from array import array
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

from xmoco.data.names import IMAGE_EXTENSIONS, LABEL_ENDING, ends_in, sample_of
from xmoco.data.tar_members import DamagedArchive, visible_files
from xmoco.data.wire import packed, received, send, unpacked

Numbers: TypeAlias = "array[int]"
Labels: TypeAlias = tuple[list[str], Numbers]
"""Each different label once, and which each image has."""

LONGEST_LABEL = 256
LARGEST = 2**32 - 1
"""A length that no reader accepts, for files of that many bytes and more."""


class Scanned(NamedTuple):
    """The images of a shard, in its order, as columns; ``Q`` and ``I`` are unsigned numbers."""

    offsets: Numbers
    lengths: Numbers
    parts: Numbers
    """0 where the bytes are the image; else they are a page of Parquet, and n the n-th value."""
    names: bytes
    """One after the other."""
    name_lengths: Numbers
    labels: dict[str, Labels]
    """By their kind: ``cls``, ``folder``."""


def scan_tar(read: Callable[[int, int], bytes], length: int) -> Scanned:
    """Raises ``DamagedArchive`` or an ``OSError``."""
    images: dict[str, tuple[int, int]] = {}
    told: dict[str, str] = {}
    for path, offset, size in visible_files(read, length):
        if ends_in(path, IMAGE_EXTENSIONS):
            images[path] = offset, size
        elif ends_in(path, (LABEL_ENDING,)) and size <= LONGEST_LABEL:
            text = read(offset, size).decode("utf-8", "replace").strip()
            if text:
                told[sample_of(path)] = text
    encoded = [path.encode("utf-8", "surrogateescape") for path in images]
    labels = {}
    if told and all(sample_of(path) in told for path in images):
        labels["cls"] = numbered([told[sample_of(path)] for path in images])
    if images and all(path.count("/") == 1 for path in images):
        labels["folder"] = numbered([path.partition("/")[0] for path in images])
    return Scanned(
        array("Q", (offset for offset, _ in images.values())),
        array("I", (min(size, LARGEST) for _, size in images.values())),
        array("I", bytes(4 * len(images))),
        b"".join(encoded),
        array("I", map(len, encoded)),
        labels,
    )


def numbered(labels: list[str]) -> Labels:
    numbers: dict[str, int] = {}
    which = array("I", (numbers.setdefault(label, len(numbers)) for label in labels))
    return list(numbers), which


def scan_tar_file(path: str) -> Scanned:
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
    try:
        length = os.fstat(descriptor).st_size
        return scan_tar(lambda offset, count: os.pread(descriptor, count, offset), length)
    finally:
        os.close(descriptor)


def in_pieces(scanned: Scanned) -> list[bytes]:
    kinds = {kind: classes for kind, (classes, _) in scanned.labels.items()}
    return [
        json.dumps(kinds).encode(),
        *(scanned.offsets.tobytes(), scanned.lengths.tobytes(), scanned.parts.tobytes()),
        *(scanned.names, scanned.name_lengths.tobytes()),
        *(which.tobytes() for _, which in scanned.labels.values()),
    ]


def of_pieces(pieces: Sequence[bytes]) -> Scanned:
    """Raises what the scanner met: a ``DamagedArchive``."""
    header, *columns = pieces
    kinds = json.loads(header)
    if "damaged" in kinds:
        raise DamagedArchive(kinds["damaged"])
    offsets, lengths, parts, names, name_lengths, *labels = columns
    return Scanned(
        array("Q", offsets),
        array("I", lengths),
        array("I", parts),
        names,
        array("I", name_lengths),
        {
            kind: (classes, array("I", which))
            for (kind, classes), which in zip(kinds.items(), labels, strict=True)
        },
    )


def serve(connection: socket.socket) -> None:
    while len(length := received(connection, 8)) == 8:
        path = os.fsdecode(bytes(received(connection, *unpacked(length))))
        try:
            pieces = in_pieces(scan_tar_file(path))
        except (OSError, DamagedArchive) as error:
            pieces = [json.dumps({"damaged": str(error)}).encode()]
        send(connection, [packed([len(pieces), *map(len, pieces)]), *pieces])


def main() -> None:
    with contextlib.suppress(OSError):  # the other side is gone
        serve(socket.socket(fileno=0))
