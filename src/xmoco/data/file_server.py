"""Reads files for another process: a program of its own, and small enough to start at once.

A request is a length and so many bytes: places, separated by zero bytes, each an offset, a length
and a path. The answer is a number for each place, the length of its content or, below zero, the
system's error, and then all contents one after the other.
"""

import contextlib
import errno
import os
import socket
import stat
from collections.abc import Sequence
from typing import NamedTuple

from xmoco.data.wire import packed, received, unpacked

WHOLE = -1
LARGEST_FILE = 2**28
"""Bytes. What is larger is refused: nobody's image, or more than is to be held in memory."""
LARGEST_ANSWER = 2**30
"""Bytes of all files of an answer. What would not fit is refused here, to be asked for alone."""


class Place(NamedTuple):
    """A file on disk, or a part of one: of an archive, say."""

    path: str
    offset: int = 0
    length: int = WHOLE


# Not text; and a pipe that has taken an image's place is not waited for.
_FLAGS = os.O_RDONLY | getattr(os, "O_BINARY", 0) | getattr(os, "O_NONBLOCK", 0)


def read_file(path: str | bytes | os.PathLike[str], largest: int = LARGEST_FILE) -> bytes:
    """All bytes of a regular file, in four calls of the system.

    ``Path.read_bytes`` makes nearly twice as many. Each gives up Python's lock for a moment, and
    where many threads read, getting it back takes longer than the call. Never more than the file's
    length is read: some files of the system never end.
    """
    descriptor = os.open(path, _FLAGS)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            folder = stat.S_ISDIR(status.st_mode)
            raise _error(errno.EISDIR if folder else errno.EOPNOTSUPP, path)
        if status.st_size > largest:
            raise _error(errno.EFBIG, path)
        content = os.read(descriptor, status.st_size)
        while len(content) < status.st_size and (more := os.read(descriptor, status.st_size)):
            content += more
        return content
    finally:
        os.close(descriptor)


def read_place(place: Place, largest: int = LARGEST_FILE) -> bytes:
    """The bytes of a file, or of a part of one, by three calls of the system."""
    if place.length == WHOLE:
        return read_file(place.path, largest)
    descriptor = os.open(place.path, _FLAGS)
    try:
        return _read_part(descriptor, place, largest)
    finally:
        os.close(descriptor)


def _read_part(descriptor: int, place: Place, largest: int) -> bytes:
    path, offset, length = place
    if length > largest:
        raise _error(errno.EFBIG, path)
    content = os.pread(descriptor, length, offset)
    while len(content) < length:
        more = os.pread(descriptor, length - len(content), offset + len(content))
        if not more:  # the file is shorter than it was
            raise _error(errno.ENODATA, path)
        content += more
    return content


class OpenShards:
    """Files of which parts are read stay open, the last ones: others of their parts will be."""

    def __init__(self, most: int = 64) -> None:
        self._most = most
        self._descriptors: dict[str, int] = {}

    def read(self, place: Place, largest: int = LARGEST_FILE) -> bytes:
        if place.length == WHOLE:
            return read_file(place.path, largest)
        descriptor = self._descriptors.pop(place.path, None)
        if descriptor is None:
            if len(self._descriptors) == self._most:
                os.close(self._descriptors.pop(next(iter(self._descriptors))))
            descriptor = os.open(place.path, _FLAGS)
        self._descriptors[place.path] = descriptor  # the last to be closed
        return _read_part(descriptor, place, largest)


def _error(number: int, path: str | bytes | os.PathLike[str]) -> OSError:
    return OSError(number, os.strerror(number), os.fsdecode(path))


def request_for(places: Sequence[Place]) -> bytes:
    return b"\0".join(
        b"%d %d %s" % (offset, length, os.fsencode(path)) for path, offset, length in places
    )


def _parsed(place: bytes) -> Place:
    offset, length, path = place.split(b" ", 2)
    return Place(os.fsdecode(path), int(offset), int(length))


def serve(connection: socket.socket) -> None:
    shards = OpenShards()
    while len(length := received(connection, 8)) == 8:
        places = bytes(received(connection, *unpacked(length))).split(b"\0")
        lengths, contents, room = [], [], LARGEST_ANSWER
        for place in places:
            try:
                contents.append(shards.read(_parsed(place), min(LARGEST_FILE, room)))
                lengths.append(len(contents[-1]))
                room -= lengths[-1]
            except OSError as error:
                lengths.append(-(error.errno or errno.EIO))
        connection.sendall(b"".join([packed(lengths), *contents]))


def main() -> None:
    with contextlib.suppress(OSError):  # the other side is gone
        serve(socket.socket(fileno=0))
