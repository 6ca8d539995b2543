"""Shards for tests: tar files of WebDataset's layout, Parquet files of Hugging Face's."""

import io
import json
import tarfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

Sample = tuple[str, bytes]


def picture(number: int, side: int = 8) -> bytes:
    """A small PNG file, another for every number."""
    pixels = np.random.default_rng(number).integers(0, 256, (side, side, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "png")
    return file.getvalue()


def samples(numbers: Iterable[int], labelled: bool = True) -> list[Sample]:
    """Images and, in files beside them, their classes: 0, 1, 2, 0 …"""
    found = []
    for number in numbers:
        found.append((f"{number:06}.png", picture(number)))
        if labelled:
            found.append((f"{number:06}.cls", f"{number % 3}\n".encode()))
    return found


def tar_of(members: Sequence[Sample]) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        for name, content in members:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return file.getvalue()


def write_tars(folder: Path, split: str, shards: int, each: int = 5, first: int = 0) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for shard in range(shards):
        numbers = range(first + shard * each, first + (shard + 1) * each)
        (folder / f"{split}-{shard:03}.tar").write_bytes(tar_of(samples(numbers)))
    return folder


def write_parquet(
    path: Path,
    images: Sequence[bytes],
    labels: Sequence[Any] | None = None,
    names: Sequence[str] = (),
    **options: Any,
) -> Path:
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [{"bytes": image, "path": f"{number}.png"} for number, image in enumerate(images)]
    columns: dict[str, Any] = {"image": pa.array(rows)}
    if labels is not None:
        columns["label"] = pa.array(labels)
    table = pa.table(columns)
    if names:
        features = {"info": {"features": {"label": {"names": list(names)}}}}
        table = table.replace_schema_metadata({"huggingface": json.dumps(features)})
    pq.write_table(table, path, **options)
    return path
