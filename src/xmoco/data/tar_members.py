"""Where the files in a tar archive lie, found by a reader that believes nothing it is told.

An archive may come from anyone. Every field of a header is checked before it is used: numbers are
not negative and not beyond the archive's end, names are not longer than any system's, and each step
leads forward, so that any content is gone through in a time that its length bounds. Nothing is
unpacked, so a path can lead nowhere: it is only a name by which content is found.

The formats of POSIX (ustar, pax) and GNU are read. Sparse files, whose content is not that which
lies in the archive, are refused.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

from xmoco.data.names import visible_path

BLOCK = 512
LONGEST_NAME = 2**15
"""Bytes. Linux's longest path has 4,096."""
LONGEST_NOTES = 2**20
"""Bytes of a pax header: names, times and attributes of one file."""

_REGULAR, _HARD_LINK = b"0\0" + b"7", b"1"
_WITHOUT_CONTENT = b"123456"
"""Links, devices, folders and pipes, whatever size their headers tell."""
_GNU_NAME, _GNU_LINK, _PAX, _PAX_FOR_ALL, _SPARSE = b"L", b"K", b"x", b"g", b"S"
_ABOUT_THE_NEXT = b"LKxg"


class DamagedArchive(Exception):  # noqa: N818
    """The text says what is wrong with an archive."""


class Member(NamedTuple):
    """A regular file in an archive, or another name for an earlier one."""

    name: str
    offset: int
    size: int
    link: str | None = None
    """The name of the earlier file, whose content this is."""


def visible_files(read: Callable[[int, int], bytes], length: int) -> Iterator[tuple[str, int, int]]:
    """Path, offset and size of every file that is not hidden; a link is the file it leads to."""
    places: dict[str, tuple[int, int]] = {}
    for name, offset, size, link in members(read, length):
        if link is None:
            places[name] = offset, size
        elif link in places:
            places[name] = places[link]
        else:
            continue
        path = visible_path(name)
        if path is not None:
            yield path, *places[name]


def members(read: Callable[[int, int], bytes], length: int) -> Iterator[Member]:
    """The files in an archive of so many bytes; ``read`` gives some of them by offset and count."""
    for_all: dict[str, str] = {}
    told: dict[str, str] = {}
    at = 0
    while True:
        header = read(at, BLOCK)
        if len(header) < BLOCK:
            raise DamagedArchive("it ends too early")
        if not any(header):  # the end
            return
        if not _checks(header):
            raise DamagedArchive(f"its header at byte {at:,} is damaged")
        kind = header[156:157]
        size = _size(header[124:136])
        if "size" in told and kind not in _ABOUT_THE_NEXT:
            size = _number(told["size"])
        begin = at + BLOCK
        at = begin + (0 if kind in _WITHOUT_CONTENT else -(-size // BLOCK) * BLOCK)
        if at > begin and begin + size > length:
            raise DamagedArchive("it ends too early")
        if kind in (_GNU_NAME, _GNU_LINK):
            if size > LONGEST_NAME:
                raise DamagedArchive("it holds a name that is too long")
            name = _text(read(begin, size))
            told["path" if kind == _GNU_NAME else "linkpath"] = name
        elif kind in (_PAX, _PAX_FOR_ALL):
            if size > LONGEST_NOTES:
                raise DamagedArchive("it holds a pax header that is too long")
            (told if kind == _PAX else for_all).update(_pax(read(begin, size)))
        else:
            notes = for_all | told if for_all else told
            name = notes.get("path") or _name(header)
            if kind == _SPARSE or any(key.startswith("GNU.sparse") for key in notes):
                raise DamagedArchive(f"it holds a sparse file, {name!r}: pack it without --sparse")
            if kind in _REGULAR and not name.endswith("/"):  # as old programs write folders
                yield Member(name, begin, size)
            elif kind == _HARD_LINK:
                yield Member(name, 0, 0, notes.get("linkpath") or _text(header[157:257]))
            told = {}


def _checks(header: bytes) -> bool:
    """Whether the sum of its bytes is that which the header tells; old programs sum signed ones."""
    try:
        told = int(header[148:156].split(b"\0")[0].strip() or b"0", 8)
    except ValueError:
        return False
    rest = header[:148] + header[156:]
    plain = sum(rest) + 8 * ord(" ")
    return told == plain or told == plain - 256 * sum(byte > 127 for byte in rest)


def _size(field: bytes) -> int:
    """Octal digits or, after a mark, a binary number."""
    if field[0] == 0x80:
        return int.from_bytes(field[1:], "big")
    return _number(_text(field).strip(" ") or "0", base=8)


def _number(text: str, base: int = 10) -> int:
    """Digits and nothing else: no sign, no underscore, no space."""
    digits = "01234567" if base == 8 else "0123456789"
    if not 0 < len(text) <= 20 or text.strip(digits):
        raise DamagedArchive("it tells a size that is no number")
    return int(text, base)


def _name(header: bytes) -> str:
    name = _text(header[:100])
    prefix = _text(header[345:500]) if header[257:263] == b"ustar\0" else ""
    return f"{prefix}/{name}" if prefix else name


def _text(field: bytes) -> str:
    """Up to the first zero; bytes that are no text are kept as Python keeps them in file names."""
    return field.split(b"\0", 1)[0].decode("utf-8", "surrogateescape")


def _pax(content: bytes) -> dict[str, str]:
    """What matters here of the lines ``length key=value``."""
    notes: dict[str, str] = {}
    at = 0
    while at < len(content) and content[at]:
        digits, space, _ = content[at : at + 8].partition(b" ")
        length = int(digits) if space and digits.isdigit() else 0
        line = content[at + len(digits) + 1 : at + length]
        key, equals, value = line.removesuffix(b"\n").partition(b"=")
        if not equals or not line.endswith(b"\n") or at + length > len(content):
            raise DamagedArchive("it holds a damaged pax header")
        name = _text(key)
        if name in ("path", "linkpath", "size") or name.startswith("GNU.sparse"):
            if len(value) > LONGEST_NAME:
                raise DamagedArchive("it holds a name that is too long")
            notes[name] = _text(value)
        at += length
    return notes
