"""Where every image of a set of shards lies: an index of our own, for random access.

It is built once, by all cores, and kept in a file that is mapped into memory: processes share it,
and of ten million images only what is looked at takes memory. It knows the size and the age of
every shard, and is built anew when one has changed. A damaged one is built anew, too.
"""

import hashlib
import json
import os
import shutil
import tempfile
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt

from xmoco.data.tar_scanner import Labels, Scanned
from xmoco.errors import UserError
from xmoco.files import write_whole

if os.name == "posix":
    import fcntl

FORMAT = "xmoco index 1"
BLOCK = 2**20
COLUMNS = {"offset": "<u8", "length": "<u4", "part": "<u4", "name_end": "<u8", "label": "<i4"}
"""Numbers that are kept of every image; ``Scanned`` tells what they mean."""
LABEL_KINDS = ("cls", "folder")
"""What may tell an image's class, the best first: files that belong to it, or its folder."""
NO_LABEL = -1


class Shard(NamedTuple):
    """A file of many images."""

    name: str
    """Its full path or, on another machine, its URL: no other shard anywhere has it."""
    size: int
    mark: str
    """Changes with its content: when it was written, or what the other machine says of it."""


class Entry(NamedTuple):
    """Where an image is: so many bytes of a shard; ``part`` as ``Scanned`` has it."""

    shard: int
    offset: int
    length: int
    part: int


class ShardIndex:
    """An index, mapped into memory. Images are numbered shard after shard, in the shards' order."""

    def __init__(self, path: Path) -> None:
        """Raises a ``ValueError`` or an ``OSError`` where that is no whole index."""
        with path.open("rb") as file:
            header, self._data = _read_header(file)
            _check(file, header)
        self.shards = [Shard(*shard) for shard in header["shards"]]
        self.first_images: list[int] = header["first_images"]
        """The number of the first image of every shard, and how many there are in all."""
        self.classes: list[str] | None = header["classes"]
        self._path = path
        self._columns = {name: self._mapped(header, name, kind) for name, kind in COLUMNS.items()}
        self._names = self._mapped(header, "names", "u1")

    def _mapped(self, header: dict[str, Any], name: str, kind: str) -> npt.NDArray[Any]:
        start, length = header["columns"][name]
        count = length // np.dtype(kind).itemsize
        if count == 0:  # which cannot be mapped
            return np.zeros(0, kind)
        return np.asarray(np.memmap(self._path, kind, "r", self._data + start, (count,)))

    def __len__(self) -> int:
        return self.first_images[-1]

    def entry(self, image: int) -> Entry:
        # Asked for every image that is read: plain numbers are found faster than numpy's.
        shard = bisect_right(self.first_images, image) - 1
        at = self._columns
        return Entry(
            shard, at["offset"].item(image), at["length"].item(image), at["part"].item(image)
        )

    def name(self, image: int) -> str:
        begin = int(self._columns["name_end"][image - 1]) if image else 0
        end = int(self._columns["name_end"][image])
        return self._names[begin:end].tobytes().decode("utf-8", "surrogateescape")

    def labels(self, images: range) -> npt.NDArray[np.int64]:
        """Positions in ``classes``."""
        part: npt.NDArray[np.int64] = self._columns["label"][images.start : images.stop].astype(
            "i8"
        )
        return part


def index_of(path: Path, shards: Sequence[Shard]) -> ShardIndex | None:
    """The index at ``path``, if it is whole and these shards are still what they were."""
    try:
        status = path.stat()
        key = path, status.st_ino, status.st_mtime_ns
        index = _open_indexes.get(key)
        if index is None:
            index = _open_indexes[key] = ShardIndex(path)
    except (OSError, ValueError, LookupError, TypeError):
        return None
    return index if index.shards == list(shards) else None


_open_indexes: WeakValueDictionary[tuple[Path, int, int], ShardIndex] = WeakValueDictionary()
"""So that two splits share one, and it is not looked through again."""


def build_index(path: Path, shards: Sequence[Shard], scanned: Iterable[Scanned]) -> None:
    """Write the index of shards, whose content is given in the same order, to ``path``."""
    try:
        with tempfile.TemporaryDirectory(prefix=".xmoco-", dir=path.parent) as folder:
            columns = _Columns(Path(folder))
            for shard in scanned:
                columns.add(shard)
            facts = {"shards": shards, **columns.finish()}
            write_whole(path, lambda file: columns.write(file, facts))
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}.") from None


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """While it lasts, no other process of this machine is inside for the same path."""
    if os.name != "posix":
        yield
        return
    with path.with_suffix(".lock").open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


class _Columns:
    """Columns that grow in files, so that nothing is held in memory but one shard."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.kinds = {kind: _Labels() for kind in LABEL_KINDS}
        names = [name for name in COLUMNS if name != "label"]
        self.files = {
            name: self._path(name).open("w+b") for name in (*names, "names", *LABEL_KINDS)
        }
        self.first_images = [0]
        self.name_end = 0

    def _path(self, name: str) -> Path:
        return self.folder / name

    def add(self, shard: Scanned) -> None:
        count = len(shard.offsets)
        ends = np.array(shard.name_lengths, dtype="u8").cumsum() + self.name_end
        self.name_end += len(shard.names)
        self.files["offset"].write(shard.offsets.tobytes())
        self.files["length"].write(shard.lengths.tobytes())
        self.files["part"].write(shard.parts.tobytes())
        self.files["name_end"].write(ends.astype("<u8").tobytes())
        self.files["names"].write(shard.names)
        for kind, labels in self.kinds.items():
            self.files[kind].write(labels.of(count, shard.labels.get(kind)))
        self.first_images.append(self.first_images[-1] + count)

    def finish(self) -> dict[str, Any]:
        """What is known of all shards, now that all are there."""
        kind = next((kind for kind in LABEL_KINDS if self.kinds[kind].for_all), None)
        for file in self.files.values():
            file.close()
        if kind is None:
            np.full(self.first_images[-1], NO_LABEL, "<i4").tofile(self._path("label"))
        else:
            self._number(self._path(kind), self.kinds[kind].order())
        return {
            "first_images": self.first_images,
            "classes": None if kind is None else self.kinds[kind].in_order(),
        }

    def _number(self, path: Path, order: npt.NDArray[np.int32]) -> None:
        """From the order in which classes were met to that in which they are counted."""
        with path.open("rb") as met, self._path("label").open("wb") as numbered:
            while block := met.read(BLOCK):
                numbered.write(order[np.frombuffer(block, "<u4")].astype("<i4").tobytes())

    def write(self, file: BinaryIO, facts: dict[str, Any]) -> None:
        columns, digest, end = {}, hashlib.blake2b(digest_size=16), 0
        for name in (*COLUMNS, "names"):
            size = self._path(name).stat().st_size
            columns[name] = end, size
            end += size + -size % 64
            for block in _blocks(self._path(name)):
                digest.update(block)
            digest.update(bytes(-size % 64))
        header = {"format": FORMAT, **facts, "columns": columns, "digest": digest.hexdigest()}
        text = json.dumps(header).encode()
        text += b" " * (-(len(text) + 8) % 64)
        file.write(len(text).to_bytes(8, "little") + text)
        for name, (_, size) in columns.items():
            with self._path(name).open("rb") as column:
                shutil.copyfileobj(column, file, BLOCK)
            file.write(bytes(-size % 64))


class _Labels:
    """Labels of one kind, as classes are met."""

    def __init__(self) -> None:
        self.for_all = True
        self.numbers: dict[str, int] = {}

    def of(self, count: int, labels: Labels | None) -> bytes:
        if labels is None:
            self.for_all = self.for_all and count == 0
            return bytes(4 * count)
        classes, which = labels
        numbers = [self.numbers.setdefault(name, len(self.numbers)) for name in classes]
        return np.array(numbers, "<u4")[np.array(which, dtype=np.intp)].tobytes()

    def in_order(self) -> list[str]:
        """Numbers by their size, all else by the alphabet."""
        if all(name.isdecimal() for name in self.numbers):
            return sorted(self.numbers, key=lambda name: (int(name), name))
        return sorted(self.numbers)

    def order(self) -> npt.NDArray[np.int32]:
        places = {name: place for place, name in enumerate(self.in_order())}
        return np.array([places[name] for name in self.numbers], np.int32)


def _blocks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            yield block


def _read_header(file: BinaryIO) -> tuple[dict[str, Any], int]:
    """The header, and where the columns begin."""
    length = int.from_bytes(file.read(8), "little")
    if length > os.fstat(file.fileno()).st_size:
        raise ValueError("no index")
    header = json.loads(file.read(length))
    if header["format"] != FORMAT:
        raise ValueError("another format")
    return header, 8 + length


def _check(file: BinaryIO, header: dict[str, Any]) -> None:
    """That what follows the header is what was written there."""
    digest = hashlib.blake2b(digest_size=16)
    while block := file.read(BLOCK):
        digest.update(block)
    if digest.hexdigest() != header["digest"]:
        raise ValueError("damaged")
