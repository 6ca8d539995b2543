"""Content that was good once, changed by chance: bytes, and what json and yaml hold."""

import copy
import random
import struct
from collections.abc import Sequence
from typing import Any

NUMBERS = (
    *(0, 1, -1, 2, 7, 255, 256, 2**15, 2**16, 2**31 - 1, 2**31, 2**32, 2**53 + 1, 2**63, -(2**63)),
    *(10**30, -0.0, 0.5, 1e-308, 1e38, 1e308, -1e308, float("inf"), float("-inf"), float("nan")),
)
TEXTS = (
    *("", " ", "\0", "a\0b", "..", "../../etc/passwd", "/dev/zero", "~nobody", "-1", "1e999"),
    *("\x1b[31mred\x1b]0;title\x07", "<script>alert(1)</script>", "[/bold]", "[red]", "{}", "%s%n"),
    *("\u202e\u2028", "\ud800", "é" * 30, "x" * 3000, "9" * 5000, "null", "true", "timm:", "a:b:c"),
)
ODD_BYTES = (b"\0", b"\xff", b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff", b"\x80", b"\n", b"%", b"-")


def any_value(rng: random.Random, depth: int = 0) -> Any:
    kind = rng.randrange(8 if depth < 2 else 5)
    if kind < 2:
        return rng.choice(NUMBERS)
    if kind < 4:
        return rng.choice(TEXTS)
    if kind == 4:
        return rng.choice((None, True, False))
    if kind == 5:
        return [any_value(rng, depth + 1) for _ in range(rng.randrange(4))]
    if kind == 6:
        return {rng.choice(TEXTS): any_value(rng, depth + 1) for _ in range(rng.randrange(4))}
    nested: Any = "bottom"
    for _ in range(rng.choice((3, 40, 400))):
        nested = [nested]
    return nested


def changed_bytes(rng: random.Random, content: bytes, others: Sequence[bytes] = (b"",)) -> bytes:
    """A few changes of the kinds that disks, networks and people make."""
    data = bytearray(content)
    for _ in range(rng.choice((1, 1, 1, 2, 3, 8, 30))):
        if not data:
            return bytes(data) + rng.choice(ODD_BYTES)
        # Half of the changes go where headers are.
        end = len(data) if rng.random() < 0.5 else min(len(data), rng.choice((16, 64, 512)))
        at = rng.randrange(end)
        length = rng.choice((1, 2, 4, 8, 64, 512))
        match rng.randrange(9):
            case 0:
                data[at] ^= 1 << rng.randrange(8)
            case 1:
                data[at] = rng.randrange(256)
            case 2:
                data[at : at + length] = rng.choice(ODD_BYTES)
            case 3:
                del data[at : at + length]
            case 4:
                data[at:at] = data[at : at + length]
            case 5:
                del data[rng.randrange(len(data)) :]
            case 6:
                number = rng.choice((0, 1, 2**7, 2**15, 2**16 - 1, 2**31, 2**32 - 1))
                form = rng.choice((">I", "<I"))
                data[at : at + 4] = struct.pack(form, number)
            case 7:
                other = rng.choice(others)
                start = rng.randrange(len(other) + 1)
                data[at : at + length] = other[start : start + length]
            case _:
                data[at:at] = rng.randbytes(length)
    return bytes(data)


def changed_value(rng: random.Random, content: Any) -> Any:
    """A copy of nested dictionaries and lists in which a few places are others."""
    content = copy.deepcopy(content)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        places = list(_places(content))
        if not places:
            return any_value(rng)
        place, key = rng.choice(places)
        match rng.randrange(5):
            case 0 | 1:
                place[key] = any_value(rng)
            case 2:
                del place[key]
            case 3 if isinstance(place, dict):
                place[rng.choice(TEXTS)] = place.pop(key)
            case 3:
                place.append(place[key])
            case _:
                _, other = rng.choice(places)
                if isinstance(place, dict):
                    place[other if isinstance(other, str) else key] = copy.deepcopy(place[key])
                else:
                    place[key] = [place[key]]
    return content


def _places(content: Any) -> Any:
    """Every place in nested content: its holder and its key."""
    waiting = [content]
    while waiting:
        holder = waiting.pop()
        keys = list(holder) if isinstance(holder, dict) else range(len(holder))
        for key in keys:
            yield holder, key
            if isinstance(holder[key], dict | list):
                waiting.append(holder[key])
