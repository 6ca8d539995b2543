"""Processes that read files for this one.

Threads could do it, and do on systems that are not Unix. But a thread takes and gives up Python's
lock several times for every file, and training needs the lock to launch its kernels. A process has
a lock of its own. What it has read comes through a socket, many files at a time, outside the lock.
"""

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from queue import Empty, SimpleQueue

from xmoco.data import file_server
from xmoco.data.file_server import Place, packed, read_place, received, request_for, unpacked

POSSIBLE = os.name == "posix" and bool(sys.executable)

Content = bytes | OSError


class FileReaders:
    """As many reading processes as threads ask at the same time, started when they do.

    Where one fails, this process reads from then on.
    """

    def __init__(self) -> None:
        self._idle: SimpleQueue[_FileReader] = SimpleQueue()
        self._all: list[_FileReader] = []
        self._usable = True

    def close(self) -> None:
        """To be called when no thread reads any more."""
        for reader in self._all:
            reader.close()

    def read(self, places: Sequence[Place]) -> list[Content]:
        """The bytes of each file or part of one, or why it cannot be read."""
        if self._usable and places:
            try:
                reader = self._take()
                contents = reader.read(places)
            except OSError:  # none can be started, or it was killed: for want of memory, perhaps
                self._usable = False
            else:
                self._idle.put(reader)
                return contents
        return [_read_here(place) for place in places]

    def _take(self) -> "_FileReader":
        try:
            return self._idle.get_nowait()
        except Empty:
            reader = _FileReader()
            self._all.append(reader)
            return reader


class _FileReader:
    """One process. It ends when its connection is closed, so it never outlives this one."""

    def __init__(self) -> None:
        self._connection, its_end = socket.socketpair()
        with its_end:
            # Isolated: it imports nothing but the standard library. A group of its own: the
            # keyboard's interrupt is not for it.
            command = [sys.executable, "-I", "-S", str(Path(file_server.__file__))]
            self._process = subprocess.Popen(
                command, stdin=its_end.fileno(), start_new_session=True
            )

    def read(self, places: Sequence[Place]) -> list[Content]:
        """Raises an ``OSError`` if the process has ended."""
        request = request_for(places)
        self._connection.sendall(packed([len(request)]) + request)
        lengths = unpacked(self._receive(8 * len(places)))
        content = self._receive(sum(max(length, 0) for length in lengths))
        contents: list[Content] = []
        begin = 0
        for length in lengths:
            if length < 0:
                contents.append(OSError(-length, os.strerror(-length)))
            else:
                contents.append(bytes(memoryview(content)[begin : begin + length]))
                begin += length
        return contents

    def _receive(self, length: int) -> bytearray:
        content = received(self._connection, length)
        if len(content) < length:
            raise ConnectionResetError("the reading process has ended")
        return content

    def close(self) -> None:
        # A forked process may have a copy of the connection, for which closing it means nothing.
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()
        self._process.wait()


def _read_here(place: Place) -> Content:
    try:
        return read_place(place)
    except OSError as error:
        return error
