"""How fast image files become batches on the device.

    python benchmarks/decode.py [--kind plain|progressive|png] [--size 128x128]

Photograph-like files, of 500×375 if not said otherwise, are written to a temporary folder and
brought to the device batch after batch, as training would have them: decoded by the host's threads
and, where there is a GPU, decoded there, with files read by threads or, as xmoco does it, by
processes. Files that are no plain JPEG are not for the GPU; where there is one, xmoco has them
decoded by processes. These ways take turns; the median round counts. Of xmoco's own way it is also
told what each stage takes alone; in the pipeline they overlap. The records go to
benchmarks/results.
"""

import argparse
import io
import re
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from PIL import Image
from rich.console import Console
from rich.table import Table
from torch import Tensor

from recipe import RESULTS
from xmoco.config import DataConfig
from xmoco.data import Batches, ImageSet, open_images
from xmoco.data.decode import EncodedImage, decode_rgb
from xmoco.data.decoders import WORTH_STARTING, Decoders
from xmoco.data.jpeg import PlainJpeg, decode_jpegs, plain_jpeg
from xmoco.data.streaming import on_one_canvas
from xmoco.records import Record, append_records

USUAL = (500, 375)
"""Width and height."""
QUALITY = 85
JPEG = {"format": "JPEG", "quality": QUALITY, "subsampling": "4:2:0"}
KINDS: dict[str, dict[str, Any]] = {
    "plain": JPEG,
    "progressive": JPEG | {"progressive": True},
    "png": {"format": "PNG", "compress_level": 6},
}
"""How Pillow writes files of each."""
DESCRIBED = {
    "plain": f"JPEG {{}}×{{}}, quality {QUALITY}, 4:2:0",
    "progressive": f"progressive JPEG {{}}×{{}}, quality {QUALITY}, 4:2:0",
    "png": "PNG {}×{}",
}
WARM_UP = 3
"""Batches that are not timed: the first ones are those read ahead."""


class DecodedByThreads(ImageSet):
    """A set that keeps its files to itself, so that the threads decode them."""

    def __init__(self, images: ImageSet) -> None:
        self.name, self.labels, self.classes = images.name, images.labels, images.classes
        self._images = images

    def __len__(self) -> int:
        return len(self._images)

    def read(self, index: int) -> Tensor:
        return self._images.read(index)

    def where(self, index: int) -> str:
        return self._images.where(index)


class ReadByThreads(DecodedByThreads):
    """A set that does not tell where its files are, so that the threads read them."""

    def encoded(self, index: int) -> EncodedImage | None:
        return self._images.encoded(index)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kind", choices=KINDS, default="plain")
    parser.add_argument("--size", type=width_and_height, default=USUAL, metavar="WIDTHxHEIGHT")
    parser.add_argument("--images", type=int, default=4096)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--readers", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with tempfile.TemporaryDirectory() as folder:
        write_photographs(Path(folder), options.images, options.kind, options.size)
        size = sum(path.stat().st_size for path in Path(folder).iterdir())
        images = open_images(DataConfig(source=folder), "train")
        assert images is not None
        ways: dict[str, ImageSet] = {"xmoco (threads decode)": DecodedByThreads(images)}
        if device.type == "cuda" and options.kind == "plain":
            ways |= {"xmoco (threads read)": ReadByThreads(images), "xmoco": images}
        elif device.type == "cuda":
            ways |= {"xmoco (processes decode)": images}
        measure = partial(images_per_second, options.batch, options.readers, device)
        rounds = [
            {subject: measure(images) for subject, images in ways.items()}
            for _ in range(options.rounds)
        ]
        if options.kind != "plain":
            stages = stages_on_host(images, options.batch)
        else:
            stages = stages_on_gpu(images, options.batch, device) if device.type == "cuda" else {}
    files = DESCRIBED[options.kind].format(*options.size)
    protocol = {
        "images": options.images,
        "batch": options.batch,
        "readers": options.readers,
        "rounds": options.rounds,
        "files": files,
        "bytes_per_file": round(size / options.images),
        "device": device.type,
    }
    records = []
    table = Table(title=f"{files} to batches of {options.batch} on {device.type}")
    for heading in ("subject", "images/s", "lowest", "highest"):
        table.add_column(heading, justify="left" if heading == "subject" else "right")
    for subject in ways:
        values = [round_[subject] for round_ in rounds]
        table.add_row(subject, *(f"{f(values):,.0f}" for f in (median, min, max)))
        told = protocol | {"values": [round(value) for value in values]}
        if stages and subject == [*ways][-1]:
            told["stage_seconds"] = stages
        records.append(record(subject, median(values), options, told))
    path = options.results / "decode.jsonl"
    append_records(path, records)
    console = Console()
    console.print(table)
    if stages:
        console.print(stage_table(stages, options.batch))
    console.print(f"records in {path}")


def width_and_height(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form 128x96")
    return int(found[1]), int(found[2])


def record(
    subject: str, value: float, options: argparse.Namespace, protocol: dict[str, Any]
) -> Record:
    kind = "" if options.kind == "plain" else f"-{options.kind}"
    work = f"decode-{'x'.join(map(str, options.size))}{kind}"
    return Record("decode_images_per_second", value, "images/s", subject, work, protocol, seed=0)


def write_photographs(
    folder: Path, count: int, kind: str = "plain", size: tuple[int, int] = USUAL
) -> None:
    """Soft shapes and colours with fine grain: files as large as photographs of that size."""
    width, height = size
    grain = np.random.default_rng(0).normal(0, 9, (2 * height, 2 * width, 1)).astype(np.float32)

    def write(number: int) -> None:
        rng = np.random.default_rng(number)
        coarse = Image.fromarray(rng.integers(30, 226, (10, 14, 3), dtype=np.uint8))
        soft = np.asarray(coarse.resize(size, Image.Resampling.BICUBIC))
        top, left = rng.integers(0, height), rng.integers(0, width)
        pixels = soft + grain[top : top + height, left : left + width]
        file = io.BytesIO()
        image = Image.fromarray(pixels.clip(0, 255).astype(np.uint8))
        image.save(file, **KINDS[kind])
        (folder / f"{number:05}.{KINDS[kind]['format'].lower()}").write_bytes(file.getvalue())

    with ThreadPoolExecutor() as pool:
        list(pool.map(write, range(count)))


def images_per_second(batch: int, readers: int, device: torch.device, images: ImageSet) -> float:
    """Over two epochs, the files in the system's cache."""
    batches = Batches(images, batch=batch, seed=0, device=device, readers=readers, preload_gib=0.0)
    steps = 2 * batches.steps_per_epoch
    with closing(batches.from_step(0)) as stream:
        for _ in islice(stream, WARM_UP):
            pass
        settle(device)
        started = time.perf_counter()
        for _ in islice(stream, steps):
            pass
        settle(device)
        return steps * batch / (time.perf_counter() - started)


def stages_on_gpu(images: ImageSet, batch: int, device: torch.device) -> dict[str, float]:
    """What one batch takes in each stage, on one thread where threads do it."""

    def read() -> list[PlainJpeg]:
        files = [images.encoded(index) for index in range(batch)]
        found = [plain_jpeg(file) for file in files if file is not None]
        return [jpeg for jpeg in found if jpeg is not None]

    jpegs = read()
    pixels = [image for image in decode_jpegs(jpegs, device) if image is not None]
    assert len(pixels) == batch
    stages: dict[str, Callable[[], Any]] = {
        "read (one thread)": read,
        "decode": lambda: decode_jpegs(jpegs, device),
        "canvas": lambda: on_one_canvas([pixels[0][:, 1:], *pixels[1:]]),  # not all of one size
    }
    return {name: seconds(stage, device) for name, stage in stages.items()}


def stages_on_host(images: ImageSet, batch: int) -> dict[str, float]:
    """What one batch takes where one thread does all of it, or has it done."""

    def read() -> list[EncodedImage]:
        return [file for index in range(batch) if (file := images.encoded(index)) is not None]

    files, decoders = read(), Decoders()
    with closing(decoders):
        decoders.decode(files * (1 + WORTH_STARTING // batch))  # and now one has started
        stages: dict[str, Callable[[], Any]] = {
            "read (one thread)": read,
            "decode (one thread)": lambda: [decode_rgb(*file) for file in files],
            "decode (one process)": lambda: decoders.decode(files),
        }
        return {name: seconds(stage, torch.device("cpu")) for name, stage in stages.items()}


def seconds(work: Callable[[], Any], device: torch.device, rounds: int = 7) -> float:
    times = []
    for _ in range(rounds):
        settle(device)
        started = time.perf_counter()
        work()
        settle(device)
        times.append(time.perf_counter() - started)
    return round(median(times), 5)


def stage_table(stages: dict[str, float], batch: int) -> Table:
    table = Table(title=f"Stages of one batch of {batch}, each alone")
    for heading in ("stage", "ms"):
        table.add_column(heading, justify="left" if heading == "stage" else "right")
    for name, value in stages.items():
        table.add_row(name, f"{1000 * value:.1f}")
    return table


def settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    main()
