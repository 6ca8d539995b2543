"""Files read by other processes (``processes``), many at a time."""

import os
from collections.abc import Sequence
from functools import partial

from xmoco.data import file_server
from xmoco.data.file_server import Place, read_place, request_for
from xmoco.data.processes import Process, Processes
from xmoco.data.wire import packed, send, unpacked

Content = bytes | OSError


class FileReaders(Processes):
    """Where a process fails, this one reads from then on."""

    def __init__(self) -> None:
        super().__init__(file_server, "read files")

    def read(self, places: Sequence[Place]) -> list[Content]:
        """The bytes of each file or part of one, or why it cannot be read."""
        if not places:
            return []
        contents = self.ask(partial(_read_there, places))
        return [_read_here(place) for place in places] if contents is None else contents


def _read_there(places: Sequence[Place], process: Process) -> list[Content]:
    request = request_for(places)
    send(process.connection, [packed([len(request)]), request])
    lengths = unpacked(process.receive(8 * len(places)))
    content = process.receive(sum(max(length, 0) for length in lengths))
    contents: list[Content] = []
    begin = 0
    for length in lengths:
        if length < 0:
            contents.append(OSError(-length, os.strerror(-length)))
        else:
            contents.append(bytes(memoryview(content)[begin : begin + length]))
            begin += length
    return contents


def _read_here(place: Place) -> Content:
    try:
        return read_place(place)
    except OSError as error:
        return error
