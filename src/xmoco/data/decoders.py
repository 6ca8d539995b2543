"""Images decoded by other processes (``processes``), many at a time."""

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from xmoco.data import decode_server
from xmoco.data.decode import EncodedImage, decode_if_readable, upright
from xmoco.data.decode_server import WHOLE
from xmoco.data.processes import Process, Processes
from xmoco.data.wire import packed, send, unpacked

LARGEST_REQUEST = 2**30
"""Bytes of all files of a request."""
WORTH_STARTING = 64
"""So many images are decoded here first: in the time that processes take to start, that is done."""


class Decoders(Processes):
    """What processes leave, and everything where one fails, is decoded here."""

    def __init__(self) -> None:
        super().__init__(decode_server, "decode images")
        self._met = 0

    def decode(self, files: Sequence[EncodedImage]) -> list[Tensor | None]:
        """Each image as by ``decode_rgb``, none where that finds it unreadable."""
        self._met += len(files)
        there = None
        if files and self._met > WORTH_STARTING:
            there = self.ask(partial(_decoded_there, files))
        if there is None:
            return [decode_if_readable(file) for file in files]
        return [
            decode_if_readable(file) if image is None else image
            for file, image in zip(files, there, strict=True)
        ]


def _decoded_there(files: Sequence[EncodedImage], process: Process) -> list[Tensor | None]:
    request = [len(files)]
    contents = []
    room = LARGEST_REQUEST
    for data, short_side in files:
        contents.append(data if len(data) <= room else b"")  # which is no image, so it is left
        request += len(contents[-1]), WHOLE if short_side is None else short_side
        room -= len(contents[-1])
    send(process.connection, [packed(request), *contents])
    told = unpacked(process.receive(24 * len(files)))
    heights, widths, orientations = told[::3], told[1::3], told[2::3]
    lengths = [3 * high * wide for high, wide in zip(heights, widths, strict=True)]
    pixels = np.empty(sum(lengths), np.uint8)
    process.receive_into(pixels.data)
    return [
        upright(part.view(3, high, wide), orientation).contiguous() if high else None
        for part, high, wide, orientation in zip(
            torch.from_numpy(pixels).split(lengths), heights, widths, orientations, strict=True
        )
    ]
