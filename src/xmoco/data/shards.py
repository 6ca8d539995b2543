"""Images in shards: tar files of WebDataset's layout, or Parquet files of Hugging Face's.

They are read in place and in any order, by an index of our own (``shard_index``): nothing is
unpacked, no buffer shuffles, and any step can be the first. A source is a folder of shards, a
pattern as ``train-{000..127}.tar``, or a URL of either. Which shards are for training and which for
testing is told by their names, what images show by files or columns beside them.
"""

import hashlib
import os
import tempfile
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from functools import partial
from itertools import accumulate
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from xmoco.data import tar_scanner
from xmoco.data.decode import EncodedImage, ImageFile, UnreadableImage, decode_rgb
from xmoco.data.imagesets import ImageSet
from xmoco.data.layout import (
    TRAIN_FOLDER,
    LabelRule,
    passed_over,
    split_shards,
    unknown_class,
)
from xmoco.data.parquet_pages import UnknownParquet, scan_parquet, value_of
from xmoco.data.processes import Process, Processes
from xmoco.data.shard_index import ShardIndex, build_index, index_of, locked
from xmoco.data.stores import ENDINGS, Disk, Distant, Store, read_ahead
from xmoco.data.tar_members import DamagedArchive
from xmoco.data.tar_scanner import Scanned, of_pieces, scan_tar, scan_tar_file
from xmoco.data.wire import packed, send, unpacked
from xmoco.distributed import first_on_machine
from xmoco.errors import UserError
from xmoco.text import printable

SCANNED_AT_ONCE = 16
"""Distant shards, whose network is to be kept busy."""


class ShardImages(ImageSet):
    """Some of the images in shards, one after the other."""

    def __init__(
        self,
        name: str,
        store: Store,
        index: ShardIndex,
        images: Sequence[range],
        labels: Tensor | None,
        classes: tuple[str, ...] | None,
        short_side: int,
    ) -> None:
        """``images`` are those of the index, in stretches."""
        self.name = name
        self.labels = labels
        self.classes = classes
        self._store = store
        self._index = index
        self._stretches = [stretch for stretch in images if stretch]
        self._ends = list(accumulate(len(stretch) for stretch in self._stretches))
        self._short_side = short_side

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def _number(self, position: int) -> int:
        """In the index."""
        stretch = bisect_right(self._ends, position)
        before = self._ends[stretch - 1] if stretch else 0
        return self._stretches[stretch][position - before]

    def read(self, index: int) -> Tensor:
        return decode_rgb(*self.encoded(index))

    def encoded(self, index: int) -> EncodedImage:
        (image,) = self._files([index])
        if isinstance(image, UnreadableImage):
            raise image
        return image

    def encoded_all(self, indices: Sequence[int]) -> list[EncodedImage | UnreadableImage] | None:
        return self._files(indices) if isinstance(self._store, Distant) else None

    def _files(self, indices: Sequence[int]) -> list[EncodedImage | UnreadableImage]:
        entries = [self._index.entry(self._number(index)) for index in indices]
        contents = self._store.read_all([entry[:3] for entry in entries])
        return [
            self._image(content, entry.part)
            for content, entry in zip(contents, entries, strict=True)
        ]

    def _image(self, content: bytes | OSError, part: int) -> EncodedImage | UnreadableImage:
        try:
            if isinstance(content, OSError):
                raise content
            return EncodedImage(value_of(content, part) if part else content, self._short_side)
        except OSError as error:
            return UnreadableImage(error.strerror or str(error))

    def file(self, index: int) -> ImageFile | None:
        entry = self._index.entry(self._number(index))
        place = None if entry.part else self._store.place(*entry[:3])
        return None if place is None else ImageFile(place, self._short_side)

    def where(self, index: int) -> str:
        number = self._number(index)
        shard = self._store.where(self._index.entry(number).shard)
        return printable(f"{shard}: {self._index.name(number)}")


class ShardSource:
    """All shards of a source, and what is in them."""

    def __init__(self, name: str, store: Store) -> None:
        self.name = f"shards {printable(name)}"
        self.store = store
        kinds = {shard.name.rpartition(".")[2].lower() for shard in store.shards}
        if not kinds:
            raise UserError(f"there are no shards ({', '.join(ENDINGS)}) in {printable(name)}.")
        if len(kinds) > 1 or not kinds <= {*ENDINGS}:
            raise UserError(
                f"the shards of {printable(name)} end in {', '.join(sorted(kinds))}: all must end "
                f"in .{' or all in .'.join(ENDINGS)}."
            )
        self.index = _open_index(store, kinds.pop())
        if not len(self.index):
            raise UserError(f"there are no images in {self.name}.")
        self.splits, others = split_shards([store.where(n) for n in range(len(store.shards))])
        """Numbers of shards by split, ``train`` first."""
        self._passed_over = passed_over(Counter(map(store.where, others)), self.splits)

    def images(self, split: str, rule: LabelRule, short_side: int) -> ShardImages | None:
        if split not in self.splits:
            return None
        name = f"{self.name} ({split})" if len(self.splits) > 1 else self.name
        chosen = self._stretches(self.splits[split])
        labels, classes = None, None
        if self.index.classes is not None and rule != "none":
            train = self._stretches(self.splits[TRAIN_FOLDER])
            classes, labels = self._labels(chosen, train, split)
        images = ShardImages(name, self.store, self.index, chosen, labels, classes, short_side)
        images.passed_over = self._passed_over
        return images

    def _stretches(self, shards: list[int]) -> list[range]:
        """The images of some shards; neighbours are one stretch."""
        stretches: list[range] = []
        for shard in shards:
            first, after = self.index.first_images[shard : shard + 2]
            if stretches and stretches[-1].stop == first:
                first = stretches.pop().start
            stretches.append(range(first, after))
        return stretches

    def _labels(
        self, images: list[range], train: list[range], split: str
    ) -> tuple[tuple[str, ...] | None, Tensor | None]:
        """The classes are those of the training split."""
        assert self.index.classes is not None
        known = np.zeros(len(self.index.classes), bool)
        for stretch in train:
            known[self.index.labels(stretch)] = True
        if known.sum() < 2:
            return None, None
        labels = np.concatenate([self.index.labels(stretch) for stretch in images])
        unknown = np.flatnonzero(~known[labels])
        classes = tuple(printable(self.index.classes[number]) for number in np.flatnonzero(known))
        if len(unknown):
            name = printable(self.index.classes[labels[unknown[0]]])
            raise unknown_class(split, name, classes)
        return classes, torch.from_numpy((known.cumsum() - 1)[labels])


def local_shards(folder: Path, names: list[str]) -> ShardSource:
    return ShardSource(folder.resolve().name, Disk([str(folder / name) for name in names]))


def _open_index(store: Store, kind: str) -> ShardIndex:
    """The index of a store's shards, built first if need be, by one process of this machine."""
    path = Path(first_on_machine(lambda: str(_build_if_needed(store, kind))))
    index = index_of(path, store.shards)
    if index is None:
        raise UserError(f"{path} was removed or damaged while it was read: start again.")
    return index


def _build_if_needed(store: Store, kind: str) -> Path:
    names = "\n".join(shard.name for shard in store.shards)
    key = hashlib.blake2b(names.encode(errors="surrogateescape"), digest_size=16).hexdigest()
    path = _folder() / f"{key}.index"
    with locked(path):
        if index_of(path, store.shards) is None:
            build_index(path, store.shards, scanned(store, kind))
    return path


def _folder() -> Path:
    """Where indexes are kept; the folder may be deleted at any time."""
    caches = os.environ.get("XDG_CACHE_HOME")
    try:
        folder = (Path(caches) if caches else Path.home() / ".cache") / "xmoco" / "index"
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
    except (OSError, RuntimeError):  # RuntimeError: nothing tells where this user is at home
        pass
    other = Path(tempfile.gettempdir()) / f"xmoco-index-{os.getuid() if os.name == 'posix' else ''}"
    other.mkdir(mode=0o700, exist_ok=True)
    return other


def scanned(store: Store, kind: str) -> Iterator[Scanned]:
    """What is in every shard, in their order, found by as many cores as there are."""
    # What a thread holds is some ten megabytes: on a disk, more threads than cores only cost these.
    at_once = SCANNED_AT_ONCE if isinstance(store, Distant) else os.cpu_count() or 1
    if kind == "tar" and isinstance(store, Disk):
        with closing(_TarScanners()) as scanners:
            yield from _each(store, lambda n: scanners.scan(store.shards[n].name), at_once)
        return
    scan = scan_tar if kind == "tar" else scan_parquet
    yield from _each(store, lambda n: scan(read_ahead(store, n), store.shards[n].size), at_once)


def _each(store: Store, scan: Callable[[int], Scanned], at_once: int) -> Iterator[Scanned]:
    """Results in order, of which a few wait at most."""
    with ThreadPoolExecutor(at_once, "xmoco-scan") as pool:
        ahead: deque[tuple[int, Future[Scanned]]] = deque()
        try:
            for number in range(len(store.shards)):
                ahead.append((number, pool.submit(scan, number)))
                if len(ahead) > at_once:
                    yield _result(store, *ahead.popleft())
            while ahead:
                yield _result(store, *ahead.popleft())
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _result(store: Store, number: int, scan: Future[Scanned]) -> Scanned:
    try:
        return scan.result()
    except (OSError, DamagedArchive, UnknownParquet) as error:
        shard = store.shards[number].name
        kind = "tar archive" if shard.lower().endswith("tar") else "Parquet file of images"
        reason = printable(str(error).rstrip("."))
        raise UserError(f"{printable(shard)} is no whole {kind}: {reason}.") from None


class _TarScanners(Processes):
    """Small processes that scan tar files. Where one fails, this one scans from then on."""

    def __init__(self) -> None:
        super().__init__(tar_scanner, "index shards")

    def scan(self, path: str) -> Scanned:
        pieces = self.ask(partial(_scanned_there, path))
        return scan_tar_file(path) if pieces is None else of_pieces(pieces)


def _scanned_there(path: str, process: Process) -> list[bytes]:
    name = os.fsencode(path)
    send(process.connection, [packed([len(name)]), name])
    (count,) = unpacked(process.receive(8))
    lengths = unpacked(process.receive(8 * count))
    return [bytes(process.receive(length)) for length in lengths]
