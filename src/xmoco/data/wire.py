"""How this process and those that work for it talk: numbers and bytes through a socket.

Both sides import it, so it imports nothing but the standard library.
"""

import socket
import struct
from collections.abc import Sequence

AT_ONCE = 512
"""Pieces that are sent together; systems take about a thousand."""


def packed(numbers: Sequence[int]) -> bytes:
    return struct.pack(f"={len(numbers)}q", *numbers)


def unpacked(content: bytes | bytearray) -> tuple[int, ...]:
    return struct.unpack(f"={len(content) // 8}q", content)


def send(connection: socket.socket, pieces: Sequence[bytes]) -> None:
    """All pieces, one after the other, without a copy of them."""
    for begin in range(0, len(pieces), AT_ONCE):
        some = pieces[begin : begin + AT_ONCE]
        sent = connection.sendmsg(some)
        if sent < sum(map(len, some)):  # interrupted by a signal
            connection.sendall(b"".join(some)[sent:])


def received(connection: socket.socket, length: int) -> bytearray:
    """So many bytes; fewer where the other side has gone."""
    content = bytearray(length)
    with memoryview(content) as view:
        done = receive_into(connection, view)
    del content[done:]
    return content


def receive_into(connection: socket.socket, view: memoryview) -> int:
    """Fills ``view``, waiting outside Python's lock; less of it where the other side has gone."""
    done = 0
    # The system may return before all is there, if it has to fetch more than it can hold.
    while done < len(view):
        count = connection.recv_into(view[done:], len(view) - done, socket.MSG_WAITALL)
        if count == 0:
            break
        done += count
    return done
