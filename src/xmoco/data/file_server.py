"""Reads files for another process: a program of its own, and small enough to start at once.

It is run with a socket as its standard input. A request is a length and so many bytes: paths,
separated by zero bytes. The answer is a number for each path, the length of its content or, below
zero, the system's error, and then all contents one after the other. It ends with the connection.
"""

import contextlib
import errno
import os
import socket
import struct

READ_AT_ONCE = 2**18
"""Most images are smaller, and read in one call of the system."""


def read_file(path: str | bytes | os.PathLike[str]) -> bytes:
    """All bytes of a file, in four calls of the system for most.

    ``Path.read_bytes`` makes nearly twice as many. Each gives up Python's lock for a moment, and
    where many threads read, getting it back takes longer than the call.
    """
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))  # not text
    try:
        return b"".join(iter(lambda: os.read(descriptor, READ_AT_ONCE), b""))
    finally:
        os.close(descriptor)


def packed(numbers: list[int]) -> bytes:
    return struct.pack(f"={len(numbers)}q", *numbers)


def unpacked(content: bytes | bytearray) -> tuple[int, ...]:
    return struct.unpack(f"={len(content) // 8}q", content)


def received(connection: socket.socket, length: int) -> bytearray:
    """So many bytes, waited for outside Python's lock; fewer where the other side has gone."""
    content = bytearray(length)
    view, done = memoryview(content), 0
    # The system may return before all is there, if it has to fetch more than it can hold.
    while done < length:
        count = connection.recv_into(view[done:], length - done, socket.MSG_WAITALL)
        if count == 0:
            break
        done += count
    view.release()
    del content[done:]
    return content


def serve(connection: socket.socket) -> None:
    while len(length := received(connection, 8)) == 8:
        paths = bytes(received(connection, *unpacked(length))).split(b"\0")
        lengths, contents = [], []
        for path in paths:
            try:
                contents.append(read_file(path))
                lengths.append(len(contents[-1]))
            except OSError as error:
                lengths.append(-(error.errno or errno.EIO))
        connection.sendall(b"".join([packed(lengths), *contents]))


if __name__ == "__main__":
    with contextlib.suppress(OSError):  # the other side is gone
        serve(socket.socket(fileno=0))
