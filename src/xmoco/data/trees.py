"""Folders and tar archives seen alike: a tree of files, most of them images, read by path.

An archive is never unpacked to disk. Of a plain ``.tar`` only the places of its files are kept; a
compressed one cannot be entered in the middle, so it is decompressed into memory, once.
"""

import bz2
import gzip
import io
import lzma
import os
import tarfile
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import IO
from weakref import WeakValueDictionary, finalize

from xmoco.data.file_server import read_file
from xmoco.errors import UserError

IMAGE_EXTENSIONS = (
    *("jpg", "jpeg", "jpe", "jfif", "png", "webp", "gif", "bmp", "tif", "tiff"),
    *("avif", "jp2", "tga", "ppm", "pgm", "pbm", "pnm"),
)

_NOT_DATA = "__MACOSX"
"""Where macOS keeps resource forks in archives, under the names of the images they belong to."""

_COMPRESSED: dict[bytes, Callable[[Path], io.BufferedIOBase]] = {
    b"\x1f\x8b": gzip.GzipFile,
    b"\xfd7zXZ": lzma.LZMAFile,
    b"BZh": bz2.BZ2File,
}
"""How to read compressed files, by the bytes they begin with: names are not to be trusted."""


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
    def read(self, path: str) -> bytes: ...

    def file(self, path: str) -> str | None:  # noqa: ARG002
        """Where the file is on disk, if it is one of its own."""
        return None

    @abstractmethod
    def where(self, path: str) -> str:
        """How to find the file, for messages."""


class FolderTree(Tree):
    def __init__(self, root: Path) -> None:
        self._root = root

    def files(self, endings: Collection[str]) -> list[str]:
        try:
            return sorted(_files_below(str(self._root), "", endings))
        except OSError as error:
            raise UserError(
                f"cannot list {printable(error.filename)}: {error.strerror}."
            ) from error

    def holds(self, path: str) -> bool:
        return (self._root / path).is_file()

    def read(self, path: str) -> bytes:
        return read_file(self._root / path)

    def file(self, path: str) -> str:
        return str(self._root / path)

    def where(self, path: str) -> str:
        return printable(str(self._root / path))


class TarTree(Tree):
    """The files of an archive, held open (plain) or in memory (compressed)."""

    def __init__(self, path: Path) -> None:
        self._name = path.name
        self._take: Callable[[int, int], bytes]
        """Bytes by offset and size."""
        try:
            with path.open("rb") as file:
                start = file.read(8)
                opener = next(
                    (o for mark, o in _COMPRESSED.items() if start.startswith(mark)), None
                )
                if opener is None:
                    file.seek(0)
                    self._places = _places(file)
                    descriptor = os.dup(file.fileno())
                    finalize(self, os.close, descriptor)
                    # Unlike seek and read, pread lets threads share the descriptor.
                    self._take = lambda offset, size: os.pread(descriptor, size, offset)
                    return
            with opener(path) as stream:
                content = stream.read()
            self._places = _places(io.BytesIO(content))
            self._take = lambda offset, size: content[offset : offset + size]
        except (OSError, EOFError, lzma.LZMAError, zlib.error, tarfile.TarError) as error:
            raise UserError(
                f"{printable(str(path))} is neither a folder nor a whole tar archive "
                f"(.tar, .tar.gz, .tar.xz or .tar.bz2): {str(error).rstrip('.')}."
            ) from error

    def files(self, endings: Collection[str]) -> list[str]:
        return sorted(path for path in self._places if _ends_in(path, endings))

    def holds(self, path: str) -> bool:
        return path in self._places

    def read(self, path: str) -> bytes:
        return self._take(*self._places[path])

    def where(self, path: str) -> str:
        return printable(f"{self._name}: {path}")


_open_archives: WeakValueDictionary[tuple[Path, int, int], TarTree] = WeakValueDictionary()


def open_tar(path: Path) -> TarTree:
    """The archive; the one already open if there is one, so that two splits share one copy."""
    status = path.stat()
    key = path.resolve(), status.st_mtime_ns, status.st_size
    tree = _open_archives.get(key)
    if tree is None:
        tree = _open_archives[key] = TarTree(path)
    return tree


def _files_below(folder: str, inside: str, endings: Collection[str]) -> Iterator[str]:
    """Paths below ``folder``, each with ``inside`` in front."""
    with os.scandir(folder) as entries:
        for entry in entries:  # the kind of an entry comes with its name: no file is looked at
            if not _is_visible(entry.name):
                continue
            if entry.is_dir():
                if not (entry.is_symlink() and _contains(entry.path, folder)):
                    yield from _files_below(entry.path, f"{inside}{entry.name}/", endings)
            elif _ends_in(entry.name, endings):
                yield inside + entry.name


def _contains(link: str, folder: str) -> bool:
    """Whether following ``link`` out of ``folder`` would lead round in a circle."""
    return Path(os.path.realpath(folder)).is_relative_to(os.path.realpath(link))


def _places(file: IO[bytes]) -> dict[str, tuple[int, int]]:
    """Where the files of an uncompressed tar archive lie: offset and size by path."""
    places: dict[str, tuple[int, int]] = {}
    names: dict[str, tuple[int, int]] = {}
    with tarfile.open(fileobj=file, mode="r:") as archive:
        for member in archive:
            if member.isreg():
                names[member.name] = member.offset_data, member.size
            elif member.islnk() and member.linkname in names:  # a second name for an earlier file
                names[member.name] = names[member.linkname]
            else:
                continue
            parts = [part for part in member.name.split("/") if part not in ("", ".")]
            if parts and all(map(_is_visible, parts)):
                places["/".join(parts)] = names[member.name]
        # tarfile takes a broken header for the end of the archive; a real end is a block of zeros.
        file.seek(archive.offset)
        if file.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
            raise tarfile.ReadError("it is damaged or ends too early")
    return places


def _is_visible(name: str) -> bool:
    return not name.startswith(".") and name != _NOT_DATA


def _ends_in(path: str, endings: Collection[str]) -> bool:
    return path.rpartition(".")[2].lower() in endings


def printable(text: str) -> str:
    """``text`` for messages and records: what cannot be printed, such as a line's end, is escaped.

    A file name may hold anything, even bytes that are no text.
    """
    return "".join(char if char.isprintable() else _escaped(char) for char in text)


def _escaped(char: str) -> str:
    if "\udc80" <= char <= "\udcff":  # how Python keeps a byte of a file name that is no text
        return f"\\x{ord(char) - 0xDC00:x}"
    return char.encode("unicode_escape").decode()
