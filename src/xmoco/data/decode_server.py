"""Decodes images for another process: a program of its own, and small enough to start at once.

A request is a number of files, for each its length and how it is to be shrunk, and then all files
one after the other. The answer is for each image its height, width and EXIF orientation, and then
the pixels of all, (3, height, width) each. Height 0 is for files that are left to who has asked:
they are too large, or unreadable, and it is not for this program to say why.
"""

import contextlib
import socket

from xmoco.data.pillow import UnreadableImage, decoded, planes
from xmoco.data.wire import packed, received, send, unpacked

WHOLE = -1
"""In a request, for an image that is not to be shrunk."""
MOST_PIXELS = 2**23
"""Of an image, a JPEG perhaps at a fraction of its size. There are many such processes, and they do
not know of each other what they hold."""
LARGEST_ANSWER = 2**30
"""Bytes of all pixels of an answer."""


def serve(connection: socket.socket) -> None:
    while len(count := received(connection, 8)) == 8:
        asked = unpacked(received(connection, 16 * unpacked(count)[0]))
        lengths, short_sides = asked[::2], asked[1::2]
        files = memoryview(received(connection, sum(lengths)))
        told: list[int] = []
        pixels: list[bytes] = []
        room, begin = LARGEST_ANSWER, 0
        for length, side in zip(lengths, short_sides, strict=True):
            file = files[begin : begin + length]
            begin += length
            try:
                short_side = None if side == WHOLE else side
                with decoded(file, short_side, min(MOST_PIXELS, room // 3)) as (rgb, orientation):
                    channels = planes(rgb)
            except UnreadableImage:
                told += 0, 0, 0
            else:
                told += rgb.height, rgb.width, orientation or 0
                pixels += channels
                room -= sum(map(len, channels))
        send(connection, [packed(told), *pixels])


def main() -> None:
    with contextlib.suppress(OSError):  # the other side is gone
        serve(socket.socket(fileno=0))
