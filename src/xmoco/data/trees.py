"""Folders and tar archives seen alike: a tree of files, most of them images, read by path.

An archive is never unpacked to disk. Of a plain ``.tar`` only the places of its files are kept; a
compressed one cannot be entered in the middle, so it is decompressed into memory, once.
"""

import bz2
import errno
import lzma
import os
import stat
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import BinaryIO, Protocol
from weakref import WeakValueDictionary, finalize

from xmoco.data.file_server import LARGEST_FILE, Place, read_file
from xmoco.data.listing import once_per_machine
from xmoco.data.names import IMAGE_EXTENSIONS, ends_in, is_visible
from xmoco.data.tar_members import DamagedArchive, visible_files
from xmoco.errors import UserError
from xmoco.text import printable

LARGEST_UNPACKED = 3 * 2**30
"""Bytes of a compressed archive when decompressed: two megabytes of .xz can hold more than any
memory does."""
LARGEST_WINDOW = 2**28
"""Bytes that .xz may want for decompressing; by its highest level it wants a quarter of that."""
MOST_LINKED_FOLDERS = 10_000
"""Folders entered beyond links. With folders that lead to each other, ways have no number."""
FED_AT_ONCE = 2**12
"""Bytes of a compressed archive. From so few, none of the formats makes more than 100 MB."""


class _Decompressor(Protocol):
    """What the three kinds have in common."""

    @property
    def eof(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...
    def decompress(self, data: bytes, /) -> bytes: ...


_COMPRESSED: dict[bytes, Callable[[], _Decompressor]] = {
    b"\x1f\x8b": lambda: zlib.decompressobj(wbits=31),
    b"\xfd7zXZ\0": lambda: lzma.LZMADecompressor(memlimit=LARGEST_WINDOW),
    b"BZh": bz2.BZ2Decompressor,
}
"""Who reads compressed files, by the bytes they begin with: names are not to be trusted."""


class Tree(ABC):
    """A folder or an archive. Reading is safe from many threads at once."""

    def images(self) -> list[str]:
        """The paths of all images, relative to the top, with ``/`` and sorted."""
        return self.files(IMAGE_EXTENSIONS)

    @abstractmethod
    def files(self, endings: Collection[str]) -> list[str]:
        """The same of all files whose names have one of these endings."""

    @abstractmethod
    def holds(self, path: str) -> bool:
        """Whether there is such a file, image or not."""

    @abstractmethod
    def read(self, path: str, largest: int = LARGEST_FILE) -> bytes:
        """All bytes of a file; an ``OSError`` if it has more than ``largest``."""

    def place(self, path: str) -> Place | None:  # noqa: ARG002
        """Where the file is on disk, if it can be read from there."""
        return None

    @abstractmethod
    def where(self, path: str) -> str:
        """How to find the file, for messages."""


class FolderTree(Tree):
    def __init__(self, root: Path) -> None:
        self._root = root

    def files(self, endings: Collection[str]) -> list[str]:
        try:
            return once_per_machine(lambda: sorted(_files_below(str(self._root), endings)))
        except OSError as error:
            raise UserError(
                f"cannot list {printable(error.filename)}: {error.strerror}."
            ) from error

    def holds(self, path: str) -> bool:
        return (self._root / path).is_file()

    def read(self, path: str, largest: int = LARGEST_FILE) -> bytes:
        return read_file(self._root / path, largest)

    def place(self, path: str) -> Place:
        return Place(str(self._root / path))

    def where(self, path: str) -> str:
        return printable(str(self._root / path))


class TarTree(Tree):
    """The files of an archive, held open (plain) or in memory (compressed)."""

    def __init__(self, path: Path) -> None:
        self._name = path.name
        self._plain: str | None = None
        """The archive's path, where files can be read from it as they are."""
        self._take: Callable[[int, int], bytes]
        """Bytes by offset and size."""
        try:
            with path.open("rb") as file:
                start = file.read(8)
                mark = next((mark for mark in _COMPRESSED if start.startswith(mark)), None)
                file.seek(0)
                if mark is None:
                    self._plain = str(path.resolve())
                    length = os.fstat(file.fileno()).st_size
                    descriptor = os.dup(file.fileno())
                    finalize(self, os.close, descriptor)
                    # Unlike seek and read, pread lets threads share the descriptor.
                    self._take = lambda offset, size: os.pread(descriptor, size, offset)
                else:
                    content = memoryview(_decompressed(file, mark))
                    length = len(content)
                    self._take = lambda offset, size: bytes(content[offset : offset + size])
            self._places = once_per_machine(lambda: _places(self._take, length))
        except (OSError, EOFError, lzma.LZMAError, zlib.error, DamagedArchive) as error:
            reason = printable(str(error).rstrip("."))
            raise UserError(
                f"{printable(str(path))} is neither a folder nor a whole tar archive "
                f"(.tar, .tar.gz, .tar.xz or .tar.bz2): {reason}."
            ) from error

    def files(self, endings: Collection[str]) -> list[str]:
        return sorted(path for path in self._places if ends_in(path, endings))

    def holds(self, path: str) -> bool:
        return path in self._places

    def read(self, path: str, largest: int = LARGEST_FILE) -> bytes:
        offset, size = self._places[path]
        if size > largest:
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), self.where(path))
        return self._take(offset, size)

    def place(self, path: str) -> Place | None:
        return None if self._plain is None else Place(self._plain, *self._places[path])

    def where(self, path: str) -> str:
        return printable(f"{self._name}: {path}")


_open_archives: WeakValueDictionary[tuple[Path, int, int], TarTree] = WeakValueDictionary()


def open_tar(path: Path) -> TarTree:
    """The archive; the one already open if there is one, so that two splits share one copy."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):  # a pipe would be waited for
        raise UserError(f"{printable(str(path))} is neither a folder nor a file.")
    key = path.resolve(), status.st_mtime_ns, status.st_size
    tree = _open_archives.get(key)
    if tree is None:
        tree = _open_archives[key] = TarTree(path)
    return tree


def _files_below(top: str, endings: Collection[str]) -> Iterator[str]:
    """The paths of files with these endings, relative to ``top``.

    Links to folders are followed, but in no circles: beyond a link, no folder is entered twice.
    """
    # Folder, its path inside, and the folders entered since a link was followed.
    waiting: list[tuple[str, str, set[tuple[int, int]] | None]] = [(top, "", None)]
    linked = 0
    while waiting:
        folder, inside, entered = waiting.pop()
        with os.scandir(folder) as entries:
            # The kind of an entry comes with its name: only links are looked at.
            visible = sorted(filter(_is_entry_visible, entries), key=lambda entry: entry.name)
        for entry in visible:
            # To nothing, or to itself: somebody will want to be told of such an image.
            leads_nowhere = entry.is_symlink() and not os.path.exists(entry.path)  # noqa: PTH110
            if not leads_nowhere and entry.is_dir():
                seen = entered
                if entry.is_symlink():
                    if _contains(entry.path, folder):
                        continue
                    seen = set() if entered is None else entered
                if seen is not None:
                    status = entry.stat()
                    place = status.st_dev, status.st_ino
                    if place in seen:
                        continue
                    seen.add(place)
                    linked += 1
                    if linked > MOST_LINKED_FOLDERS:
                        raise UserError(
                            f"links in {printable(top)} lead to more than {MOST_LINKED_FOLDERS:,} "
                            "folders, many of them perhaps again and again: remove such links."
                        )
                waiting.append((entry.path, f"{inside}{entry.name}/", seen))
            # No pipe and no device: who reads them may wait, or read, for ever.
            elif ends_in(entry.name, endings) and (leads_nowhere or entry.is_file()):
                yield inside + entry.name


def _contains(link: str, folder: str) -> bool:
    """Whether following ``link`` out of ``folder`` would lead round in a circle."""
    return Path(os.path.realpath(folder)).is_relative_to(os.path.realpath(link))


def _decompressed(file: BinaryIO, mark: bytes) -> bytearray:
    """The content of a compressed file, which may be several ones end to end."""
    content = bytearray()
    data = file.read(FED_AT_ONCE)
    while data.startswith(mark):
        decompressor = _COMPRESSED[mark]()
        while not decompressor.eof:
            if not data:
                raise EOFError("it ends too early")
            content += decompressor.decompress(data)
            if len(content) > LARGEST_UNPACKED:
                raise DamagedArchive(
                    f"decompressed it has more than {LARGEST_UNPACKED // 2**30} GiB, and would be "
                    "held in memory; decompress it yourself: a plain .tar is read in place"
                )
            data = file.read(FED_AT_ONCE)
        data = (decompressor.unused_data + data).lstrip(b"\0")  # padding
        data += file.read(len(mark)) if len(data) < len(mark) else b""
    return content


def _places(take: Callable[[int, int], bytes], length: int) -> dict[str, tuple[int, int]]:
    """Where the visible files of an uncompressed archive lie: offset and size by path."""
    return {path: (offset, size) for path, offset, size in visible_files(take, length)}


def _is_entry_visible(entry: os.DirEntry[str]) -> bool:
    return is_visible(entry.name)
