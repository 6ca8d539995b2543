"""Where shards lie, and how their bytes are read: on disk, or on S3, GCS, Azure or a web server.

Files on disk are opened for every image and closed again, which takes no longer than reading a file
of its own; so no number of shards exhausts the files that a process may have open. What lies
elsewhere is read by obstore, an extra: many ranges at a time, and again and again where the network
fails for a while.
"""

import asyncio
import itertools
import math
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xmoco.data.file_server import LARGEST_FILE, Place, read_place
from xmoco.data.shard_index import Shard
from xmoco.errors import UserError
from xmoco.text import printable, shortened

if TYPE_CHECKING:
    from obstore.store import ObjectStore

ENDINGS = ("tar", "parquet")
MOST_SHARDS = 1_000_000
LOOKED_UP_AT_ONCE = 64
"""Distant shards that are named one by one: each is asked for, over the network."""
READ_AT_ONCE = 2**22
"""Bytes of a distant shard, while its index is built."""
PATIENCE_AT_FIRST, PATIENCE = timedelta(seconds=20), timedelta(minutes=10)
"""With a network that fails, when shards are found and when a run is under way. Pauses between
attempts double, from a tenth of a second."""

_BRACES = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(\d+)\.\.(\d+)")


class Store(ABC):
    """Some shards, read by number. Reading is safe from many threads at once."""

    shards: list[Shard]

    @cached_property
    def _top(self) -> str:
        """The folders that all shards have in common."""
        # Not commonpath, which would make one slash of the two in a URL.
        shared = os.path.commonprefix([shard.name for shard in self.shards])  # noqa: RUF071
        return shared[: shared.rfind("/") + 1]

    @abstractmethod
    def read(self, shard: int, offset: int, length: int) -> bytes:
        """Raises an ``OSError`` where the bytes are not there any more."""

    def read_all(self, places: Sequence[tuple[int, int, int]]) -> list[bytes | OSError]:
        """Of many places, what ``read`` gives or raises."""
        return [_given_or_raised(self, place) for place in places]

    def place(self, shard: int, offset: int, length: int) -> Place | None:  # noqa: ARG002
        """Where the bytes are on disk, if they are."""
        return None

    def where(self, shard: int) -> str:
        """A shard's path below the folders that all have in common, which tells it from others."""
        return self.shards[shard].name.removeprefix(self._top)


def _given_or_raised(store: Store, place: tuple[int, int, int]) -> bytes | OSError:
    try:
        return store.read(*place)
    except OSError as error:
        return error


class Disk(Store):
    def __init__(self, paths: Sequence[str]) -> None:
        self.shards = []
        for path in paths:
            try:
                status = Path(path).stat()
            except OSError as error:
                raise UserError(f"cannot read {printable(path)}: {error.strerror}.") from None
            name = os.path.abspath(path)  # noqa: PTH100
            self.shards.append(Shard(name, status.st_size, str(status.st_mtime_ns)))

    def read(self, shard: int, offset: int, length: int) -> bytes:
        return read_place(Place(self.shards[shard].name, offset, length))

    def place(self, shard: int, offset: int, length: int) -> Place:
        return Place(self.shards[shard].name, offset, length)


class Distant(Store):
    """Shards below a URL, by obstore. Keys and the like are found where its documents say: in the
    environment, or in the machine's own identity."""

    def __init__(self, url: str, names: Sequence[str] | None) -> None:
        """``names`` are relative to ``url``; without them, all shards below it are listed."""
        self.url = url.rstrip("/")
        self._store = _open_store(self.url, PATIENCE_AT_FIRST)
        found = self._listed() if names is None else self._looked_up(names)
        self.shards = [
            Shard(
                self._address(one["path"]), one["size"], str(one["e_tag"] or one["last_modified"])
            )
            for one in found
        ]
        self._store = _open_store(self.url, PATIENCE)

    def _listed(self) -> list[Any]:
        import obstore

        try:
            found = [one for page in obstore.list(self._store) for one in page]
        except (obstore.exceptions.BaseError, OSError) as error:
            raise UserError(
                f"cannot list what is below {self.url} ({_reason(error)}); where there is no list, "
                "name shards by a pattern, as in train-{000..127}.tar."
            ) from None
        shards = [one for one in found if one["path"].rpartition(".")[2].lower() in ENDINGS]
        return sorted(shards, key=lambda one: one["path"])

    def _looked_up(self, names: Sequence[str]) -> list[Any]:
        import obstore

        def look_up(name: str) -> Any:
            try:
                return obstore.head(self._store, name) | {"path": name}
            except (obstore.exceptions.BaseError, OSError) as error:
                raise UserError(f"cannot read {self._address(name)}: {_reason(error)}.") from None

        with ThreadPoolExecutor(LOOKED_UP_AT_ONCE, "xmoco-look-up") as pool:
            return list(pool.map(look_up, names))

    def _address(self, path: str) -> str:
        return f"{self.url}/{path}"

    def read(self, shard: int, offset: int, length: int) -> bytes:
        (content,) = self.read_all([(shard, offset, length)])
        if isinstance(content, OSError):
            raise content
        return content

    def read_all(self, places: Sequence[tuple[int, int, int]]) -> list[bytes | OSError]:
        """All at the same time."""
        # By a thread of its own: in this one an event loop may be running, as in notebooks.
        with ThreadPoolExecutor(1, "xmoco-fetch") as thread:
            return thread.submit(asyncio.run, self._read_all(places)).result()

    async def _read_all(self, places: Sequence[tuple[int, int, int]]) -> list[bytes | OSError]:
        return list(await asyncio.gather(*(self._read(*place) for place in places)))

    async def _read(self, shard: int, offset: int, length: int) -> bytes | OSError:
        import obstore

        address = self.shards[shard].name
        if length > LARGEST_FILE:
            return OSError(f"{self.where(shard)} holds a file that is too large")
        try:
            content = await obstore.get_range_async(
                self._store, address.removeprefix(f"{self.url}/"), start=offset, length=length
            )
        except FileNotFoundError as error:
            return OSError(f"{self.where(shard)} is not there any more: {_reason(error)}")
        except (obstore.exceptions.BaseError, OSError) as error:
            # Not one image that is bad, but all: others in its place would hide it.
            raise UserError(f"cannot read {address}: {_reason(error)}.") from None
        if len(content) < length:
            return OSError(f"{self.where(shard)} is shorter than it was")
        return content.to_bytes()


def is_distant(source: str) -> bool:
    return "://" in source


def has_pattern(source: str) -> bool:
    return _BRACES.search(source) is not None


def open_distant(source: str) -> Distant:
    """The shards that a URL names, by a pattern or one by one, or that lie below it."""
    if source.rpartition(".")[2].lower() not in ENDINGS:
        return Distant(source, None)
    prefix = _BRACES.split(source, maxsplit=1)[0].rpartition("/")[0]
    names = [name.removeprefix(f"{prefix}/") for name in expanded(source)]
    return Distant(prefix, names)


def expanded(pattern: str) -> list[str]:
    """What a pattern stands for: ``a-{00..12}.tar`` for 13 names, ``{a,b}.tar`` for two."""
    pieces = _BRACES.split(pattern)  # text, inside of braces, text …
    choices = [_choices(piece) if number % 2 else [piece] for number, piece in enumerate(pieces)]
    if math.prod(map(len, choices)) > MOST_SHARDS:
        raise UserError(f"{shortened(pattern)} stands for more than {MOST_SHARDS:,} shards.")
    return ["".join(map(str, words)) for words in itertools.product(*choices)]


def _choices(inside: str) -> list[str] | range:
    numbers = _RANGE.fullmatch(inside)
    if numbers is None:
        return inside.split(",")
    first, last = numbers.groups()
    if int(last) - int(first) >= MOST_SHARDS:
        return range(MOST_SHARDS + 1)
    width = len(first) if len(first) == len(last) or first.startswith("0") else 0
    return [f"{number:0{width}}" for number in range(int(first), int(last) + 1)]


def _open_store(url: str, patience: timedelta) -> "ObjectStore":
    try:
        import obstore.store
    except ImportError:
        raise UserError(f"reading {url} needs obstore: pip install 'xmoco[remote]'.") from None
    try:
        return obstore.store.from_url(
            url,
            client_options={"allow_http": True} if url.startswith("http://") else None,
            retry_config={
                "max_retries": 100,
                "retry_timeout": patience,
                "backoff": {
                    "init_backoff": timedelta(milliseconds=100),
                    "max_backoff": timedelta(seconds=30),
                    "base": 2,
                },
            },
        )
    except (obstore.exceptions.BaseError, ValueError) as error:
        raise UserError(f"cannot open {url}: {_reason(error)}.") from None


def _reason(error: Exception) -> str:
    return printable(str(error).strip().partition("\n")[0].rstrip(".:"))


def read_ahead(store: Store, shard: int) -> Callable[[int, int], bytes]:
    """Reads a shard, mostly from the front to the back, in large blocks."""
    size, begin, block = store.shards[shard].size, 0, b""

    def read(offset: int, count: int) -> bytes:
        nonlocal begin, block
        count = max(0, min(count, size - offset))
        if not begin <= offset <= offset + count <= begin + len(block):
            begin = offset
            block = store.read(shard, offset, min(max(count, READ_AT_ONCE), size - offset))
        return block[offset - begin : offset - begin + count]

    return read
