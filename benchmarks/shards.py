"""Shards beside plain files: how long an index takes, what it needs, and how fast images are read.

    python benchmarks/shards.py                        # 10 thousand and a million images
    python benchmarks/shards.py --images 10000

Synthetic images of a few kilobytes are written to a temporary folder: as files, a thousand to a
folder; as tar shards of WebDataset's layout, each image with a file for its class; and as Parquet
files of Hugging Face's, without compression. Shards are indexed in a process of its own, which
tells how much its memory grows. Then images are read in random order, from all in turns, by the
processes that read for a GPU. What counts is the median round, and the median of the rounds' ratios
to plain files: other work on the machine slows neighbours alike. All is in the system's cache as
far as that goes. The records go to benchmarks/results.
"""

import argparse
import os
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from resource import RUSAGE_CHILDREN, getrusage
from statistics import median
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from rich.console import Console
from rich.table import Table

from recipe import RESULTS
from xmoco.config import DataConfig
from xmoco.data import ImageSet, open_images
from xmoco.data.file_readers import FileReaders
from xmoco.data.file_server import Place
from xmoco.records import Record, append_records

BYTES = 3000
PER_SHARD = 10_000
PER_FOLDER = 1000
READERS = 2
ASKED_AT_ONCE = 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--images", type=int, nargs="+", default=[10_000, 1_000_000])
    parser.add_argument("--reads", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--folder", type=Path, help="where there is room; default: temporary")
    options = parser.parse_args()
    console, records = Console(), []
    table = Table(title="Shards beside files")
    for heading in ("images", "what", ""):
        table.add_column(heading, justify="left" if heading == "what" else "right")
    for count in options.images:
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            found = measure(Path(folder), count, options.reads, options.rounds)
        for record in found:
            records.append(record)
            table.add_row(f"{count:,}", f"{record.subject}: {record.measure}", told(record))
    path = options.results / "shards.jsonl"
    append_records(path, records)
    console.print(table)
    console.print(f"records in {path}")


def told(record: Record) -> str:
    return f"{record.value:,.1f} {record.unit}"


def measure(folder: Path, count: int, reads: int, rounds: int) -> list[Record]:
    for name, write in WRITTEN.items():
        write(folder / name, count)
    protocol: dict[str, Any] = {"images": count, "bytes_per_image": BYTES, "cores": os.cpu_count()}
    records = []
    for name in SHARDS:
        found = index(folder / name, folder / "cache")
        assert found["images"] == count
        facts = protocol | {
            "shards": len(list((folder / name).iterdir())),
            "cpu_seconds": found["cpu_seconds"],
        }
        for what, value, unit in (
            ("index_seconds", found["seconds"], "s"),
            ("index_memory", found["memory_mb"], "MB"),
        ):
            records.append(Record(what, value, unit, name, f"index-{count}", facts, 0))
    os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
    rates = reading_rates({name: opened(folder / name) for name in WRITTEN}, reads, rounds)
    for name, values in rates.items():
        told = protocol | {
            "reads": reads,
            "rounds": rounds,
            "readers": READERS,
            "values": [round(value) for value in values],
        }
        beside = 100 * median(own / plain for own, plain in zip(values, rates[FILES], strict=True))
        for what, value, unit in (
            ("read_per_second", median(values), "images/s"),
            ("read_beside_files", beside, "%"),
        ):
            records.append(Record(what, value, unit, name, f"read-{count}", told, 0))
    return records


def reading_rates(sets: Mapping[str, ImageSet], reads: int, rounds: int) -> dict[str, list[float]]:
    """Images per second in every round but the first, which is for the cache."""
    count = len(sets[FILES])
    order = np.random.default_rng(0).permutation(count)
    rates: dict[str, list[float]] = {name: [] for name in sets}
    for turn in range(rounds + 1):
        chosen = order[np.arange(turn * reads, (turn + 1) * reads) % count].tolist()
        names = list(sets) if turn % 2 else list(sets)[::-1]
        for name in names:
            rates[name].append(images_per_second(sets[name], chosen))
    return {name: values[1:] for name, values in rates.items()}


def opened(source: Path) -> ImageSet:
    images = open_images(DataConfig(source=str(source)), "train")
    assert images is not None
    return images


def content(number: int) -> bytes:
    """Bytes that no two images share."""
    return number.to_bytes(8, "little") * (BYTES // 8)


def write_files(folder: Path, count: int) -> None:
    def write(first: int) -> None:
        inside = folder / f"{first // PER_FOLDER:05}"
        inside.mkdir(parents=True)
        for number in range(first, min(first + PER_FOLDER, count)):
            (inside / f"{number:08}.jpg").write_bytes(content(number))

    in_threads(write, range(0, count, PER_FOLDER))


def write_tars(folder: Path, count: int) -> None:
    folder.mkdir()

    def write(first: int) -> None:
        with (folder / f"{first // PER_SHARD:05}.tar").open("wb") as file:
            for number in range(first, min(first + PER_SHARD, count)):
                for piece in sample(number):
                    file.write(piece)
            file.write(bytes(2 * tarfile.BLOCKSIZE))

    in_threads(write, range(0, count, PER_SHARD))


def write_parquets(folder: Path, count: int) -> None:
    folder.mkdir()
    for first in range(0, count, PER_SHARD):
        numbers = range(first, min(first + PER_SHARD, count))
        images = [{"bytes": content(n), "path": f"{n:08}.jpg"} for n in numbers]
        table = pa.table({"image": pa.array(images), "label": pa.array(n % 1000 for n in numbers)})
        pq.write_table(table, folder / f"{first // PER_SHARD:05}.parquet", compression="none")


def sample(number: int) -> Iterator[bytes]:
    for ending, data in (("jpg", content(number)), ("cls", str(number % 1000).encode())):
        member = tarfile.TarInfo(f"{number:08}.{ending}")
        member.size = len(data)
        yield member.tobuf(tarfile.USTAR_FORMAT)
        yield data + bytes(-len(data) % tarfile.BLOCKSIZE)


FILES, SHARDS = "files", ("tar", "parquet")
WRITTEN = {FILES: write_files, "tar": write_tars, "parquet": write_parquets}


def in_threads(work: Callable[[int], None], items: range) -> None:
    with ThreadPoolExecutor() as pool:
        list(pool.map(work, items))


def index(shards: Path, cache: Path) -> dict[str, float]:
    """Build the index in a fresh process."""
    with ProcessPoolExecutor(1, get_context("spawn")) as process:
        return process.submit(build_index, shards, cache).result()


def build_index(shards: Path, cache: Path) -> dict[str, float]:
    os.environ["XDG_CACHE_HOME"] = str(cache)
    before, started, busy = memory("VmRSS"), time.perf_counter(), time.process_time()
    images = opened(shards)
    seconds = time.perf_counter() - started
    scanners = getrusage(RUSAGE_CHILDREN)
    return {
        "images": len(images),
        "seconds": seconds,
        "cpu_seconds": time.process_time() - busy + scanners.ru_utime + scanners.ru_stime,
        "memory_mb": (memory("VmHWM") - before) / 1000,
    }


def memory(kind: str) -> int:
    """Of this process, in kilobytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(kind))


def images_per_second(images: ImageSet, chosen: list[int]) -> float:
    readers = FileReaders()

    def read(first: int) -> int:
        files = [images.file(position) for position in chosen[first : first + ASKED_AT_ONCE]]
        places: list[Place] = [file.place for file in files if file is not None]
        return sum(len(found) for found in readers.read(places) if isinstance(found, bytes))

    with ThreadPoolExecutor(READERS) as pool:
        read(0)  # the processes are there
        started = time.perf_counter()
        total = sum(pool.map(read, range(0, len(chosen), ASKED_AT_ONCE)))
        seconds = time.perf_counter() - started
    readers.close()
    assert total == len(content(0)) * len(chosen), "some could not be read"
    return len(chosen) / seconds


if __name__ == "__main__":
    main()
