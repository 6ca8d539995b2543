"""Images in Parquet files of Hugging Face's layout: a column of bytes and paths, perhaps a label.

A column is a row of pages, of about a megabyte each, and a page is compressed as a whole. Readers
such as pyarrow's give no less than a group of hundreds of rows. So pages are found by their
headers, once, when shards are indexed; to read an image takes its page and no more or, where the
file is not compressed, its own bytes and no more.
"""

import io
import json
import struct
from array import array
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from xmoco.data.tar_scanner import LARGEST, Labels, Scanned, numbered
from xmoco.errors import UserError

if TYPE_CHECKING:
    import pyarrow.parquet as pq

Read = Callable[[int, int], bytes]

HEADER = 2**14
"""Bytes in which nearly all page headers end."""
LONGEST_HEADER = 2**20
LARGEST_PAGE = 2**29
"""Bytes. Writers end a page after a megabyte, or after an image that is larger."""
ROWS_AT_ONCE = 64
"""Whose images are held in memory while it is found out whether all are there."""
CODECS = ("UNCOMPRESSED", "SNAPPY", "GZIP", "BROTLI", "ZSTD", "LZ4")
PLAIN, DICTIONARY = (0,), (2, 8)
"""Encodings of values, by Parquet's numbers: as they are; as places in a page of values."""
DATA_PAGE, DICTIONARY_PAGE, DATA_PAGE_2 = 0, 2, 3

# The part of an index that tells how a value is found in a page.
_VALUE_BITS, _CODEC_BITS = 24, 4
_WITH_LEVELS = 1 << (_VALUE_BITS + _CODEC_BITS)


class UnknownParquet(Exception):  # noqa: N818
    """The text says what cannot be read."""


def scan_parquet(read: Read, length: int) -> Scanned:
    """The images of a file, of which ``read`` gives some bytes by offset and count.

    Raises ``UnknownParquet`` or an ``OSError``.
    """
    arrow, pq = _libraries()
    try:
        file = pq.ParquetFile(arrow.PythonFile(_ReadAsFile(read, length), mode="r"))
        column = _image_column(file)
        leaf = file.schema.column(column)
        if leaf.max_repetition_level:
            raise UnknownParquet(f"its column {leaf.path} has several images in a row")
        offsets, lengths, parts = array("Q"), array("I"), array("I")
        for group in range(file.metadata.num_row_groups):
            chunk = file.metadata.row_group(group).column(column)
            if _has_gaps(file, group, chunk, leaf):
                raise UnknownParquet(f"its column {leaf.path} has rows without an image")
            for place in _values(read, chunk, levels=leaf.max_definition_level > 0):
                offsets.append(place.offset)
                lengths.append(min(place.length, LARGEST))
                parts.append(place.part)
        names, labels = _names(file, column, len(offsets)), _labels(file, len(offsets))
    except (arrow.ArrowException, struct.error, IndexError) as error:
        raise UnknownParquet(str(error).partition("\n")[0] or "it is damaged") from None
    return Scanned(offsets, lengths, parts, b"".join(names), array("I", map(len, names)), labels)


def value_of(content: bytes, part: int) -> bytes:
    """An image, of the page that holds it; ``part`` as an index has it. Raises an ``OSError``."""
    arrow, _ = _libraries()
    number = (part & ((1 << _VALUE_BITS) - 1)) - 1
    codec = CODECS[(part >> _VALUE_BITS) & ((1 << _CODEC_BITS) - 1)]
    try:
        header, begin = parse_page_header(content)
        values = _uncompressed(arrow, header, content[begin : begin + header.compressed], codec)
        at = _first_value(values, header, levels=bool(part & _WITH_LEVELS))
        for _ in range(number):
            at += 4 + struct.unpack_from("<I", values, at)[0]
        size = struct.unpack_from("<I", values, at)[0]
    except (arrow.ArrowException, struct.error, IndexError, UnknownParquet) as error:
        raise OSError(f"its page is damaged: {error}") from None
    return bytes(values[at + 4 : at + 4 + size])


class _Place(NamedTuple):
    offset: int
    length: int
    part: int = 0


class PageHeader(NamedTuple):
    kind: int
    uncompressed: int
    compressed: int
    values: int
    encoding: int
    levels: int
    """Bytes before the values that are never compressed (pages of version 2)."""
    is_compressed: bool


def _has_gaps(file: "pq.ParquetFile", group: int, chunk: Any, leaf: Any) -> bool:
    """Whether a row of the group has no image."""
    if chunk.num_values == 0 or leaf.max_definition_level == 0:
        return False
    if chunk.statistics is not None and chunk.statistics.has_null_count:
        return bool(chunk.statistics.null_count)
    # Where no statistics tell, every page is looked through, some rows at a time.
    arrow, _ = _libraries()
    batches = file.iter_batches(ROWS_AT_ONCE, row_groups=[group], columns=[leaf.path])
    tables = (arrow.Table.from_batches([batch]).flatten() for batch in batches)
    return any(table.column(0).null_count for table in tables)


def _values(read: Read, chunk: Any, levels: bool) -> Iterator[_Place]:
    """Where the values of a column chunk lie; ``levels``: whether some might not be there."""
    if chunk.physical_type != "BYTE_ARRAY":
        raise UnknownParquet(f"its column {chunk.path_in_schema} holds no bytes")
    if chunk.compression not in CODECS:
        raise UnknownParquet(f"it is compressed by {chunk.compression}")
    codec = CODECS.index(chunk.compression)
    at = chunk.dictionary_page_offset if chunk.has_dictionary_page else chunk.data_page_offset
    end, found = at + chunk.total_compressed_size, 0
    dictionary: list[_Place] = []
    while at < end and found < chunk.num_values:
        header, begin = _page_header(read, at)
        whole = _Place(at, begin + header.compressed)
        if header.kind == DICTIONARY_PAGE:
            dictionary = list(_plain(read, whole, header, begin, codec, levels=False))
        elif header.kind in (DATA_PAGE, DATA_PAGE_2):
            if header.encoding in DICTIONARY:
                content = read(whole.offset, whole.length)
                indices = _indices(content, header, begin, codec, levels)
                yield from (dictionary[number] for number in indices)
            elif header.encoding in PLAIN:
                yield from _plain(read, whole, header, begin, codec, levels)
            else:
                raise UnknownParquet("it has an encoding other than plain and dictionary")
            found += header.values
        at += whole.length
    if found != chunk.num_values:
        raise UnknownParquet("it ends too early")


def _plain(
    read: Read, page: _Place, header: PageHeader, begin: int, codec: int, levels: bool
) -> Iterator[_Place]:
    """The values of a page: each by itself or, if that is compressed, as a part of it."""
    if header.values >= 1 << _VALUE_BITS:
        raise UnknownParquet("it has too many values in a page")
    if codec:
        flags = codec << _VALUE_BITS | (_WITH_LEVELS if levels else 0)
        yield from (_Place(*page[:2], flags | number + 1) for number in range(header.values))
        return
    content = read(page.offset, page.length)
    at = begin + _first_value(memoryview(content)[begin:], header, levels)
    for _ in range(header.values):
        size = struct.unpack_from("<I", content, at)[0]
        yield _Place(page.offset + at + 4, size)
        at += 4 + size


def _first_value(values: Any, header: PageHeader, levels: bool) -> int:
    """Where the values of a page begin: before them it may tell which are there (all are)."""
    if header.kind == DATA_PAGE_2:
        return header.levels
    return 4 + int(struct.unpack_from("<I", values, 0)[0]) if levels else 0


def _uncompressed(arrow: Any, header: PageHeader, body: bytes, codec: str) -> Any:
    if codec == "UNCOMPRESSED" or not header.is_compressed:
        return body
    if header.uncompressed > LARGEST_PAGE:
        raise UnknownParquet("it has a page without end")
    name = "lz4_raw" if codec == "LZ4" else codec.lower()
    levels, packed = body[: header.levels], body[header.levels :]
    size = header.uncompressed - header.levels
    return levels + arrow.decompress(packed, size, codec=name, asbytes=True)


def _indices(content: bytes, header: PageHeader, begin: int, codec: int, levels: bool) -> list[int]:
    """Of a page whose values are places in the dictionary."""
    arrow, _ = _libraries()
    body = content[begin : begin + header.compressed]
    values = _uncompressed(arrow, header, body, CODECS[codec])
    at = _first_value(values, header, levels)
    width = values[at]
    return _unpacked_hybrid(values[at + 1 :], width, header.values)


def _unpacked_hybrid(content: bytes, width: int, count: int) -> list[int]:
    """Parquet's mixture of runs of one number and of packed bits."""
    numbers: list[int] = []
    stream, size = io.BytesIO(content), (width + 7) // 8
    while len(numbers) < count:
        head = _varint(stream)
        if head & 1:
            bits = int.from_bytes(stream.read((head >> 1) * width), "little")
            mask = (1 << width) - 1
            numbers += [bits >> (width * n) & mask for n in range(8 * (head >> 1))]
        else:
            if head == 0:
                raise UnknownParquet("it is damaged")
            run = min(head >> 1, count)
            numbers += [int.from_bytes(stream.read(size), "little")] * run
    return numbers[:count]


def _image_column(file: "pq.ParquetFile") -> int:
    """The leaf column of the images' bytes: one called bytes beside paths, or the only bytes."""
    paths = [file.schema.column(number).path for number in range(len(file.schema))]
    nested = [number for number, path in enumerate(paths) if path.endswith(".bytes")]
    plain = [
        number
        for number, path in enumerate(paths)
        if "." not in path
        and file.schema.column(number).physical_type == "BYTE_ARRAY"
        and file.schema.column(number).logical_type.type == "NONE"
    ]
    if len(nested or plain) != 1:
        count = "no column" if not nested and not plain else "several columns"
        raise UnknownParquet(f"it has {count} of image bytes: {', '.join(paths)}")
    return (nested or plain)[0]


def _names(file: "pq.ParquetFile", column: int, rows: int) -> list[bytes]:
    """What images are called, if they are called anything."""
    path = file.schema.column(column).path.removesuffix("bytes") + "path"
    if any(file.schema.column(number).path == path for number in range(len(file.schema))):
        table = file.read(columns=[path]).flatten()
        names = table.column(0).to_pylist() if table.num_columns else []
        if len(names) == rows:
            return [(n or f"row {row}").encode() for row, n in enumerate(names)]
    return [f"row {row}".encode() for row in range(rows)]


def _labels(file: "pq.ParquetFile", rows: int) -> dict[str, Labels]:
    """A column ``label``: numbers, whose names the file may tell, or words."""
    if "label" not in file.schema_arrow.names:
        return {}
    labels = file.read(columns=["label"]).column(0).to_pylist()
    known = _class_names(file.schema_arrow.metadata or {})
    words = [
        known[label] if isinstance(label, int) and 0 <= label < len(known) else label
        for label in labels
    ]
    unlabelled = any(
        word is None or isinstance(word, float) or (isinstance(word, int) and word < 0)
        for word in words
    )
    if len(words) != rows or unlabelled:
        return {}
    return {"cls": numbered([str(word) for word in words])}


def _class_names(metadata: dict[bytes, bytes]) -> list[str]:
    try:
        told = json.loads(metadata[b"huggingface"])["info"]["features"]["label"]["names"]
        return [str(name) for name in told]
    except (KeyError, TypeError, ValueError):
        return []


def _libraries() -> tuple[Any, Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise UserError("reading Parquet needs pyarrow: pip install 'xmoco[parquet]'.") from None
    return pyarrow, pyarrow.parquet


class _ReadAsFile(io.RawIOBase):
    """Bytes by offset and count, as pyarrow wants them."""

    def __init__(self, read: Read, length: int) -> None:
        self._read, self._length, self._at = read, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        begin = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        self._at = max(0, begin + offset)
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, size: int = -1) -> bytes:
        left = max(0, self._length - self._at)
        content = self._read(self._at, left if size < 0 else min(size, left))
        self._at += len(content)
        return content


# Page headers, in Thrift's compact protocol.


def _page_header(read: Read, at: int) -> tuple[PageHeader, int]:
    size = HEADER
    while True:
        content = read(at, size)
        try:
            return parse_page_header(content)
        except IndexError:  # it is longer
            if len(content) < size or size >= LONGEST_HEADER:
                raise UnknownParquet("it ends too early") from None
            size *= 8


def parse_page_header(content: bytes) -> tuple[PageHeader, int]:
    """A header, and where it ends; an ``IndexError`` if that is not in ``content``."""
    stream = io.BytesIO(content)
    fields = _struct(stream, depth=0)
    kind = _count(fields, 1)
    inner = fields.get({DATA_PAGE: 5, DICTIONARY_PAGE: 7, DATA_PAGE_2: 8}.get(kind, 0), {})
    if not isinstance(inner, dict):
        raise UnknownParquet("a page header is damaged")
    version_2 = kind == DATA_PAGE_2
    header = PageHeader(
        kind,
        _count(fields, 2),
        _count(fields, 3),
        _count(inner, 1, 0),
        _count(inner, 4 if version_2 else 2, 0),
        _count(inner, 5, 0) + _count(inner, 6, 0) if version_2 else 0,
        bool(inner.get(7, True)) if version_2 else True,
    )
    return header, stream.tell()


def _count(fields: dict[int, Any], field: int, usual: int | None = None) -> int:
    count = fields.get(field, usual)
    if type(count) is not int or count < 0:
        raise UnknownParquet("a page header is damaged")
    return count


def _struct(stream: io.BytesIO, depth: int) -> dict[int, Any]:
    fields: dict[int, Any] = {}
    number = 0
    while (head := _byte(stream)) != 0:
        number = number + (head >> 4) if head >> 4 else _zigzag(stream)
        fields[number] = _value(stream, head & 15, depth)
    return fields


def _value(stream: io.BytesIO, kind: int, depth: int) -> Any:
    if depth > 8:
        raise UnknownParquet("a page header is damaged")
    if kind in (1, 2):  # true and false are their own values
        return kind == 1
    if kind == 3:
        return _byte(stream)
    if kind in (4, 5, 6):
        return _zigzag(stream)
    if kind in (7, 8):
        length = 8 if kind == 7 else _varint(stream)
        content = stream.read(length)
        if len(content) < length:
            raise IndexError
        return content
    if kind in (9, 10):
        head = _byte(stream)
        count = head >> 4 if head >> 4 < 15 else _varint(stream)
        kind = 3 if head & 15 in (1, 2) else head & 15  # in lists, true and false are bytes
        return [_value(stream, kind, depth + 1) for _ in range(count)]
    if kind == 12:
        return _struct(stream, depth + 1)
    raise UnknownParquet("a page header is damaged")


def _byte(stream: io.BytesIO) -> int:
    return stream.read(1)[0]


def _varint(stream: io.BytesIO) -> int:
    number, shift = 0, 0
    while True:
        byte = _byte(stream)
        number |= (byte & 127) << shift
        if byte < 128:
            return number
        shift += 7
        if shift > 63:
            raise UnknownParquet("it is damaged")


def _zigzag(stream: io.BytesIO) -> int:
    number = _varint(stream)
    return (number >> 1) ^ -(number & 1)
