"""Images in shards: found, labelled, read and indexed; what is wrong with them is said."""

import asyncio
import os
import random
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from shard_files import picture, samples, tar_of, write_parquet, write_tars

from xmoco.config import DataConfig
from xmoco.data import (
    ImageSet,
    Unreadable,
    UnreadableImage,
    decode_rgb,
    in_order,
    open_images,
    processes,
    tar_scanner,
)
from xmoco.data import shards as shards_module
from xmoco.data.file_readers import FileReaders
from xmoco.data.layout import split_shards
from xmoco.data.parquet_pages import UnknownParquet, parse_page_header
from xmoco.data.shard_index import Shard
from xmoco.data.shards import ShardImages
from xmoco.data.sources import open_splits, set_name
from xmoco.data.stores import Disk, expanded
from xmoco.data.transfer_sets import open_transfer_set
from xmoco.errors import UserError

needs_obstore = pytest.mark.skipif(find_spec("obstore") is None, reason="needs obstore")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "xmoco" / "index"


def opened(source: Path | str, split: Any = "train", **settings: Any) -> ImageSet:
    images = open_images(DataConfig(source=str(source), **settings), split)
    assert images is not None
    return images


def refused(source: Path | str, **settings: Any) -> str:
    with pytest.raises(UserError) as error:
        opened(source, **settings)
    return str(error.value)


def assert_holds(images: ImageSet, numbers: list[int]) -> None:
    """The images of these numbers, read in whatever order."""
    assert len(images) == len(numbers)
    order = list(range(len(numbers)))
    random.Random(0).shuffle(order)
    for position in order:
        expected = picture(numbers[position])
        file = images.encoded(position)
        assert file is not None
        assert file.data == expected
        assert torch.equal(images.read(position), decode_rgb(expected))


def test_a_folder_of_tar_files(tmp_path: Path) -> None:
    folder = write_tars(tmp_path / "photos", "train", shards=3)
    write_tars(folder, "val", shards=2, first=100)
    train, test = opened(folder), opened(folder, "test")
    assert (train.name, test.name) == ("shards photos (train)", "shards photos (val)")
    assert_holds(train, list(range(15)))
    assert_holds(test, list(range(100, 110)))
    assert train.classes == test.classes == ("0", "1", "2")
    assert train.labels is not None
    assert train.labels.tolist() == [number % 3 for number in range(15)]
    assert test.labels is not None
    assert test.labels.tolist() == [number % 3 for number in range(100, 110)]
    assert train.where(7) == "train-001.tar: 000007.png"
    splits = open_splits(DataConfig(source=str(folder)))
    assert {name: len(images) for name, images in splits.items()} == {"train": 15, "val": 10}
    assert opened(folder, labels="none").classes is None


def test_shards_that_say_nothing_of_splits_are_for_training(tmp_path: Path) -> None:
    write_tars(tmp_path / "train" / "some", "part", shards=2)  # the folder of all is no word
    assert_holds(opened(tmp_path / "train" / "some"), list(range(10)))
    assert open_images(DataConfig(source=str(tmp_path / "train" / "some")), "test") is None
    write_tars(tmp_path / "a" / "train", "x", shards=1)
    write_tars(tmp_path / "a" / "test", "x", shards=1, first=5)
    assert_holds(opened(tmp_path / "a"), list(range(5)))
    assert_holds(opened(tmp_path / "a", "test"), list(range(5, 10)))


def test_shards_beside_those_of_splits_are_passed_over_and_told(tmp_path: Path) -> None:
    write_tars(tmp_path, "train", shards=1)
    write_tars(tmp_path, "unlabeled", shards=2, first=10)
    assert len(opened(tmp_path)) == 15  # nothing tells that there are splits
    write_tars(tmp_path, "val", shards=1, first=5)
    train, test = opened(tmp_path), opened(tmp_path, "test")
    assert_holds(train, list(range(5)))
    assert_holds(test, list(range(5, 10)))
    told = "passed over beside train and val: unlabeled-000.tar, unlabeled-001.tar"
    assert train.passed_over == test.passed_over == told


def test_shards_of_one_name_in_several_folders_are_told_apart(tmp_path: Path) -> None:
    for folder in "ab":
        write_tars(tmp_path / folder, "train", shards=1)
    images = opened(tmp_path)
    assert images.where(0) == "a/train-000.tar: 000000.png"
    assert images.where(5) == "b/train-000.tar: 000000.png"


def test_splits_of_many_shards_are_found_at_once() -> None:
    store = Disk([])
    names = [f"/shards/{'train' if n % 9 else 'val'}-{n:06}.tar" for n in range(20_000)]
    store.shards = [Shard(name, 0, "") for name in names]
    began = time.process_time()
    splits, others = split_shards([store.where(number) for number in range(20_000)])
    assert time.process_time() - began < 2  # 3 minutes when every shard looked at all
    assert (len(splits["val"]), len(splits["train"]), others) == (2223, 17777, [])


def test_a_single_shard_by_its_name_keeps_its_labels(tmp_path: Path) -> None:
    write_tars(tmp_path, "train", shards=1)
    images = opened(tmp_path / "train-000.tar")
    assert_holds(images, list(range(5)))
    assert images.name == "shards train-000"
    assert images.classes == ("0", "1", "2")
    assert images.labels is not None
    assert images.labels.tolist() == [0, 1, 2, 0, 1]
    some = [*samples(range(4)), ("cat/4.png", picture(4))]  # one without a label: any archive
    (tmp_path / "photos.tar").write_bytes(tar_of(some))
    assert opened(tmp_path / "photos.tar").name == "archive photos.tar"
    splits = [
        (f"{split}/{name}", content) for split in ("train", "val") for name, content in some[:8]
    ]
    (tmp_path / "splits.tar").write_bytes(tar_of(splits))
    assert opened(tmp_path / "splits.tar", "test").name == "archive splits.tar (val)"


def test_by_a_pattern(tmp_path: Path) -> None:
    write_tars(tmp_path, "train", shards=11)
    images = opened(tmp_path / "train-{001..009}.tar")
    assert_holds(images, list(range(5, 50)))
    assert images.name == "shards train"
    assert "cannot read" in (said := refused(tmp_path / "train-{009..012}.tar"))
    assert "train-011.tar" in said


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("a-{0..2}", ["a-0", "a-1", "a-2"]),
        ("{08..11}", ["08", "09", "10", "11"]),
        ("{8..11}", ["8", "9", "10", "11"]),
        ("{a,b}{0..1}", ["a0", "a1", "b0", "b1"]),
        ("plain", ["plain"]),
    ],
)
def test_patterns(pattern: str, expected: list[str]) -> None:
    assert expanded(pattern) == expected


def test_a_pattern_without_end_is_refused() -> None:
    with pytest.raises(UserError, match="for more than 1,000,000 shards"):
        expanded("{0..999}{0..999}{0..999}")
    with pytest.raises(UserError, match="for more than 1,000,000 shards"):
        expanded("{0..99999999999999999999}")


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("s3://bucket/Photos/train-{000..127}.tar", "train"),
        ("s3://bucket/Photos/", "Photos"),
        ("shards/imagenet1k-train-{0..9}.tar", "imagenet1k-train"),
        ("{a,b}.tar", "images"),
        ("https://host/data.parquet", "data"),
    ],
)
def test_what_shards_are_called(source: str, name: str) -> None:
    assert set_name(source) == name


def test_a_folder_whose_name_looks_like_a_pattern(tmp_path: Path) -> None:
    folder = write_tars(tmp_path / "set{1}", "train", shards=1)
    assert set_name(folder) == "set{1}"
    assert opened(folder).name == "shards set{1}"


@pytest.mark.parametrize("scheme", ["", pytest.param("file://", marks=needs_obstore)])
def test_transfer_takes_shards_by_a_pattern_or_a_url(tmp_path: Path, scheme: str) -> None:
    for first, split in enumerate(("train", "val", "test")):
        write_tars(tmp_path / "birds", split, shards=1, first=5 * first)
    pattern = f"{scheme}{tmp_path}/birds/{{train,val,test}}-000.tar"
    found = open_transfer_set(pattern)
    assert found.name == "images"
    for first, images in enumerate((found.train, found.validation, found.test)):
        assert_holds(images, list(range(5 * first, 5 * first + 5)))
    whole = open_transfer_set(f"{scheme}{tmp_path}/birds")
    assert whole.name == "birds"
    for first, images in enumerate((whole.train, whole.validation, whole.test)):
        assert_holds(images, list(range(5 * first, 5 * first + 5)))


def test_folders_inside_are_classes_where_nothing_else_is(tmp_path: Path) -> None:
    for shard, animals in enumerate((("cat", "dog"), ("dog", "ape"))):
        members = [(f"{animal}/{shard}.png", picture(shard)) for animal in animals]
        (tmp_path / f"{shard}.tar").write_bytes(tar_of(members))
    images = opened(tmp_path)
    assert images.classes == ("ape", "cat", "dog")
    assert images.labels is not None
    assert images.labels.tolist() == [1, 2, 2, 0]
    # An image without a class of its own: there are no labels at all.
    (tmp_path / "2.tar").write_bytes(tar_of([("x.png", picture(0))]))
    assert opened(tmp_path).labels is None


def test_a_class_that_training_has_not(tmp_path: Path) -> None:
    write_tars(tmp_path, "train", shards=1)
    (tmp_path / "val-0.tar").write_bytes(tar_of([("1.png", picture(1)), ("1.cls", b"7")]))
    with pytest.raises(UserError, match="the val images have a class 7 "):
        opened(tmp_path, "test")
    assert opened(tmp_path, "test", labels="none").labels is None


def test_what_is_in_a_shard_is_what_tar_finds(tmp_path: Path) -> None:
    """Long names, links, folders, hidden files, doubles: as Python's own reader sees them."""
    long = "d" * 150 + "/" + "n" * 120 + ".png"
    members = [("a/1.png", picture(1)), (long, picture(2)), ("._a.png", b""), ("../x.png", b"x")]
    (tmp_path / "0.tar").write_bytes(tar_of([*members, ("a/1.png", picture(3)), ("b.txt", b"-")]))
    with tarfile.open(tmp_path / "1.tar", "w") as archive:
        (tmp_path / "f.jpg").write_bytes(picture(4))
        (tmp_path / "g.jpg").hardlink_to(tmp_path / "f.jpg")
        archive.add(tmp_path / "f.jpg", "f.jpg")
        archive.add(tmp_path / "g.jpg", "g.jpg")
    for name in ("f.jpg", "g.jpg"):
        (tmp_path / name).unlink()
    assert_holds(opened(tmp_path), [3, 2, 4, 4])


def test_fast_readers_read_parts_of_shards(tmp_path: Path) -> None:
    write_tars(tmp_path, "train", shards=2)
    images, readers = opened(tmp_path), FileReaders()
    try:
        files = [images.file(position) for position in (7, 2, 9)]
        found = readers.read([file.place for file in files if file is not None])
        assert found == [picture(number) for number in (7, 2, 9)]
    finally:
        readers.close()


def test_a_single_plain_archive_goes_through_them_too(tmp_path: Path) -> None:
    (tmp_path / "photos.tar").write_bytes(tar_of(samples(range(4))))
    images, readers = opened(tmp_path / "photos.tar"), FileReaders()
    try:
        files = [images.file(position) for position in range(4)]
        found = readers.read([file.place for file in files if file is not None])
        assert found == [picture(number) for number in range(4)]
    finally:
        readers.close()


# The index


def test_the_index_is_built_once_and_again_when_a_shard_changes(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_tars(tmp_path / "photos", "train", shards=2)
    scans = []
    scan = shards_module.scanned
    monkeypatch.setattr(
        shards_module, "scanned", lambda *given: scans.append(given) or scan(*given)
    )
    for _ in range(3):
        assert len(opened(folder)) == 10
    assert len(scans) == 1
    (index,) = cache.glob("*.index")
    (folder / "train-001.tar").write_bytes(tar_of(samples(range(20, 26))))
    assert_holds(opened(folder), [*range(5), *range(20, 26)])
    assert len(scans) == 2
    assert list(cache.glob("*.index")) == [index]
    for damage in (b"", index.read_bytes()[:-10], b"\0" * 100, index.read_bytes()[::-1]):
        index.write_bytes(damage)
        assert_holds(opened(folder), [*range(5), *range(20, 26)])
    flipped = bytearray(index.read_bytes())
    flipped[-70] ^= 1  # somewhere in the names
    index.write_bytes(flipped)
    assert opened(folder).where(0) == "train-000.tar: 000000.png"
    assert len(scans) == 7


def test_where_nothing_can_be_kept_it_works_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_tars(tmp_path / "photos", "train", shards=1)
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert_holds(opened(folder), list(range(5)))


def test_scanners_are_small_and_no_more_than_there_are_shards(tmp_path: Path) -> None:
    """They import nothing but the standard library, so they start at once."""
    scanners = shards_module._TarScanners()
    try:
        write_tars(tmp_path, "train", shards=1)
        for _ in range(3):
            found = scanners.scan(str(tmp_path / "train-000.tar"))
            assert list(found.name_lengths) == [len("000000.png")] * 5
        (process,) = scanners._all
        told = Path(f"/proc/{process._process.pid}/status")
        if told.exists():
            peaks = [line for line in told.read_text().splitlines() if "VmHWM" in line]
            assert int(peaks[0].split()[1]) < 40_000  # kB
        assert os.getsid(process._process.pid) != os.getsid(0)  # Ctrl-C is not for it
    finally:
        scanners.close()


def test_where_a_scanner_fails_shards_are_scanned_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tars(tmp_path, "train", shards=3)

    def cannot(*_: Any) -> None:
        raise OSError("no process for you")

    monkeypatch.setattr(processes, "Process", cannot)
    with pytest.warns(RuntimeWarning, match=r"to index shards failed \(no process for you\)"):
        assert_holds(opened(tmp_path), list(range(15)))


@settings(
    max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None
)
@given(sizes=st.lists(st.integers(0, 4), min_size=1, max_size=6))
def test_any_position_of_any_split_is_the_right_image(tmp_path: Path, sizes: list[int]) -> None:
    folder = Path(tempfile.mkdtemp(dir=tmp_path))
    expected: dict[str, list[int]] = {"train": [], "test": []}
    for shard, size in enumerate(sizes):
        split = "train" if shard % 2 == 0 else "test"
        numbers = range(10 * shard, 10 * shard + size)
        images = [(f"{number}.png", picture(number)) for number in numbers]
        (folder / f"{shard}-{split}.tar").write_bytes(tar_of(images))
        expected[split] += numbers
    for split, numbers_of in expected.items():
        if numbers_of and expected["train"]:
            assert_holds(opened(folder, split), numbers_of)


def test_shards_that_are_damaged_or_mixed_are_told_of(tmp_path: Path) -> None:
    folder = write_tars(tmp_path / "a", "train", shards=2)
    content = (folder / "train-001.tar").read_bytes()
    (folder / "train-001.tar").write_bytes(content[:700])
    assert "train-001.tar is no whole tar archive: it ends too early." in refused(folder)
    (folder / "train-001.tar").write_bytes(content)
    (folder / "x.parquet").write_bytes(b"PAR1")
    assert "end in parquet, tar: all must end in .tar or all in .parquet." in refused(folder)
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "0.tar").write_bytes(tar_of([("a.txt", b"")]))
    assert refused(tmp_path / "b") == "there are no images in shards b."


def test_a_shard_that_shrinks_or_goes_gives_unreadable_images(tmp_path: Path) -> None:
    folder = write_tars(tmp_path / "a", "train", shards=2)
    images = opened(folder)
    os.truncate(folder / "train-001.tar", 1000)
    (folder / "train-000.tar").unlink()
    for position, reason in ((0, "No such file"), (9, "No data available")):
        with pytest.raises(UnreadableImage, match=reason):
            images.encoded(position)
    broken = Unreadable(800)
    with pytest.raises(UserError, match="9 of 800 images cannot be read"):
        list(in_order(images, 5, torch.device("cpu"), unreadable=broken))


# Parquet


@pytest.mark.parametrize("compression", ["none", "snappy", "gzip", "zstd", "lz4", "brotli"])
@pytest.mark.parametrize("version", ["1.0", "2.0"])
@pytest.mark.parametrize("dictionary", [False, True])
def test_parquet_however_it_is_written(
    tmp_path: Path, compression: str, version: str, dictionary: bool
) -> None:
    """Several groups of rows, several pages in each, some in a dictionary, doubles among them."""
    images = [random.Random(n % 90).randbytes(1 + n % 90 * 17) for n in range(120)]
    path = write_parquet(
        tmp_path / "a.parquet",
        images,
        compression=compression,
        use_dictionary=dictionary,
        data_page_version=version,
        row_group_size=50,
        data_page_size=4000,
        dictionary_pagesize_limit=9000,
    )
    found = opened(path)
    assert [found.encoded(n).data for n in range(120)] == images  # type: ignore[union-attr]
    assert found.where(3) == "a.parquet: 3.png"
    places = [found.file(n) for n in range(120)]
    assert all(place is None for place in places) == (compression != "none")


def test_parquet_with_labels_and_splits(tmp_path: Path) -> None:
    names = ("cat", "dog", "ape")
    for split, first in (("Training", 0), ("validation", 50)):
        for shard in range(2):
            numbers = range(first + 4 * shard, first + 4 * shard + 4)
            write_parquet(
                tmp_path / f"{split}-0000{shard}-of-00002.parquet",
                [picture(number) for number in numbers],
                [number % 3 for number in numbers],
                names,
            )
    train, test = opened(tmp_path), opened(tmp_path, "test")
    assert_holds(train, list(range(8)))
    assert_holds(test, list(range(50, 58)))
    assert train.classes == ("ape", "cat", "dog")
    assert train.labels is not None
    assert train.classes is not None
    shown = [train.classes[label] for label in train.labels]
    assert shown == [names[number % 3] for number in range(8)]


def test_parquet_without_labels_or_with_plain_bytes(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    images = [picture(number) for number in range(3)]
    write_parquet(tmp_path / "a.parquet", images, [0, -1, -1])
    assert opened(tmp_path / "a.parquet").labels is None
    schema = pa.schema([pa.field("picture", pa.binary(), nullable=False)])
    pq.write_table(pa.table({"picture": images}, schema=schema), tmp_path / "b.parquet")
    assert_holds(opened(tmp_path / "b.parquet"), [0, 1, 2])
    assert opened(tmp_path / "b.parquet").where(1) == "b.parquet: row 1"


@pytest.mark.parametrize("version", ["1.0", "2.0"])
def test_parquet_without_statistics(tmp_path: Path, version: str) -> None:
    images = [picture(number) for number in range(200)]
    options = {"write_statistics": False, "data_page_version": version, "row_group_size": 70}
    write_parquet(tmp_path / "a.parquet", images, **options)
    assert_holds(opened(tmp_path / "a.parquet"), list(range(200)))
    images[190] = None  # type: ignore[call-overload]
    write_parquet(tmp_path / "b.parquet", images, **options)
    assert "image.bytes has rows without an image" in refused(tmp_path / "b.parquet")


def test_parquet_without_rows(tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    write_parquet(tmp_path / "1.parquet", [picture(0)], ["cat"])
    write_parquet(tmp_path / "3.parquet", [picture(1)], ["dog"])
    none = pq.read_table(tmp_path / "1.parquet").slice(0, 0)
    pq.write_table(none, tmp_path / "2.parquet")
    images = opened(tmp_path)
    assert_holds(images, [0, 1])
    assert images.classes == ("cat", "dog")
    assert refused(tmp_path / "2.parquet") == "there are no images in shards 2."


def test_parquet_that_holds_no_images_is_told_of(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"text": ["a"], "number": [1]}), tmp_path / "a.parquet")
    assert "it has no column of image bytes: text, number" in refused(tmp_path / "a.parquet")
    write_parquet(tmp_path / "b.parquet", [b"x", None])  # type: ignore[list-item]
    assert "image.bytes has rows without an image" in refused(tmp_path / "b.parquet")
    (tmp_path / "c.parquet").write_bytes(b"PAR1 and so on PAR1")
    assert "c.parquet is no whole Parquet file of images" in refused(tmp_path / "c.parquet")


HEADER = b"\x15\x00\x15\x02\x15\x02"  # a page of data, 1 byte, 1 byte compressed
MANY = b"\xff\xff\x3f"  # 2^20 - 1


@settings(max_examples=100)
@given(content=st.binary(max_size=60))
@example(content=HEADER + b"\x21\x00")  # true, where values of the page should be told
@example(content=HEADER + b"\x29" + b"\x19" * 10_000)  # lists in lists
@example(content=HEADER + b"\x29\xf9" + MANY + (b"\xf1" + MANY) * 1000)  # 10^9 truths in lists
@example(content=b"\x19\x13\x00" + HEADER[2:] + b"\x00")  # a list of kinds
@example(content=HEADER + b"\x2c\x15\x02\x18\x01a\x00\x00")  # an encoding that is text
def test_headers_of_pages_may_hold_anything(content: bytes) -> None:
    """Nothing is raised but what is expected, and nothing is believed that cannot be."""
    try:
        header, end = parse_page_header(content)
    except (IndexError, UnknownParquet):
        return
    assert header.compressed >= 0
    assert header.encoding >= 0
    assert end <= len(content)


@pytest.mark.parametrize(
    ("missing", "source", "words"),
    [
        ("obstore", "s3://bucket/photos", "pip install 'xmoco[remote]'"),
        ("pyarrow", "a.parquet", "pip install 'xmoco[parquet]'"),
    ],
)
def test_what_is_not_installed_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str, source: str, words: str
) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    monkeypatch.chdir(tmp_path)
    for name in [name for name in sys.modules if name.partition(".")[0] == missing]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)
    assert words in refused(source)


def test_subsets_of_shards_are_read_as_fast(tmp_path: Path) -> None:
    write_tars(tmp_path, "train", shards=2)
    images = opened(tmp_path)
    assert isinstance(images, ShardImages)
    assert images.encoded_all([1, 2]) is None  # on disk, one by one is as good


def test_nothing_but_the_standard_library_is_imported_to_scan() -> None:
    program = processes.command(tar_scanner)
    program[-1] = program[-1].replace(
        "main()", "print('torch' in sys.modules or 'numpy' in sys.modules)"
    )
    done = subprocess.run(program, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@needs_obstore
def test_shards_of_one_name_at_several_addresses_have_an_index_each(
    tmp_path: Path, cache: Path
) -> None:
    for first, folder in enumerate("ab"):
        write_tars(tmp_path / folder, "train", shards=1, first=5 * first)
    for first, folder in enumerate("ab"):
        images = opened(f"file://{tmp_path}/{folder}/train-{{000..000}}.tar")
        assert_holds(images, list(range(5 * first, 5 * first + 5)))
        assert images.where(0).startswith("train-000.tar: ")
    assert len(list(cache.glob("*.index"))) == 2


def test_shards_named_from_several_folders_have_an_index_each(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for first, folder in enumerate("ab"):
        write_tars(tmp_path / folder / "shards", "train", shards=1, first=5 * first)
        monkeypatch.chdir(tmp_path / folder)
        assert_holds(opened("shards"), list(range(5 * first, 5 * first + 5)))
    assert len(list(cache.glob("*.index"))) == 2


@needs_obstore
def test_distant_shards_that_are_named_are_asked_for_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import obstore

    write_tars(tmp_path, "train", shards=4)
    together, head = threading.Barrier(4), obstore.head

    def asked(store: Any, name: str) -> Any:
        together.wait(timeout=10)
        return head(store, name)

    monkeypatch.setattr(obstore, "head", asked)
    assert_holds(opened(f"file://{tmp_path}/train-{{000..003}}.tar"), list(range(20)))
    monkeypatch.setattr(obstore, "head", head)
    assert "train-004.tar" in refused(f"file://{tmp_path}/train-{{003..009}}.tar")


@needs_obstore
def test_distant_shards_are_read_where_an_event_loop_runs(tmp_path: Path) -> None:
    write_tars(tmp_path, "train", shards=1)

    async def as_in_a_notebook() -> None:
        assert_holds(opened(f"file://{tmp_path}"), list(range(5)))

    asyncio.run(as_in_a_notebook())


def test_who_is_at_home_nowhere_keeps_indexes_among_temporary_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nowhere() -> Path:
        raise RuntimeError("Could not determine home directory.")

    write_tars(tmp_path / "shards", "train", shards=1)
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", nowhere)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert_holds(opened(tmp_path / "shards"), list(range(5)))
    assert list(tmp_path.glob("xmoco-index-*/*.index"))
