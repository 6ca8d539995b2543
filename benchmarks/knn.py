"""Measure how the time and memory of kNN grow with the bank.

    python benchmarks/knn.py                                    # up to ImageNet's 1,281,167 images
    python benchmarks/knn.py --banks 10000 --queries 1000 --device cpu

Banks of random features lie in host memory, as the features of large sets do, and pass over the
device. Seconds and, on a GPU, the most memory that was in use become records in
benchmarks/results/knn.jsonl; a table is printed at the end. Making the features takes up to a
minute and does not count.
"""

import argparse
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor

from recipe import RESULTS
from xmoco.evaluate.knn import knn_accuracy
from xmoco.records import Record, append_records
from xmoco.train.engine import choose_device

BLOCK = 65_536
CLASSES = 1000
KS = (10, 20, 100, 200)
TEMPERATURE = 0.1
SEED = 0
GIB = 2**30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--banks", type=int, nargs="+", default=[10_000, 100_000, 1_281_167])
    parser.add_argument("--queries", type=int, default=50_000)
    parser.add_argument("--dims", type=int, default=2048)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    device = torch.device(choose_device(options.device))
    table = Table(title=f"kNN of {options.queries:,} queries, {options.dims} dimensions, {device}")
    for heading in ("bank", "seconds", "queries/s", "GPU memory"):
        table.add_column(heading, justify="right")
    queries = features(options.queries, options.dims, SEED)
    everything = features(max(options.banks), options.dims, SEED + 1)
    path = options.results / "knn.jsonl"
    judge(everything[:1000], queries[:1000], device)  # lets libraries set themselves up
    for images in options.banks:
        records = measure(everything[:images], queries, device)
        append_records(path, records)
        seconds, *memory = (record.value for record in records)
        table.add_row(
            f"{images:,}",
            f"{seconds:.2f}",
            f"{options.queries / seconds:,.0f}",
            f"{memory[0]:.2f} GiB" if memory else "",
        )
    Console().print(table)
    print(f"records in {path}")


def features(count: int, dims: int, seed: int) -> Tensor:
    """Random vectors of unit length in host memory."""
    generator = torch.Generator().manual_seed(seed)
    made = torch.empty(count, dims)
    for block in made.split(BLOCK):
        F.normalize(block.normal_(generator=generator), dim=1, out=block)
    return made


def measure(bank: Tensor, queries: Tensor, device: torch.device) -> list[Record]:
    """Records of the seconds and, on a GPU, of the memory."""
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    started = time.perf_counter()
    judge(bank, queries, device)
    seconds = time.perf_counter() - started
    protocol: dict[str, Any] = {
        "features": "random, float32, in host memory",
        "queries": len(queries),
        "bank_images": len(bank),
        "dimensions": bank.shape[1],
        "k": list(KS),
        "temperature": TEMPERATURE,
        "classes": CLASSES,
        "device": device.type,
    }
    work = f"knn-{len(queries)}x{len(bank)}x{bank.shape[1]}"
    records = [Record("knn_seconds", seconds, "s", "xmoco", work, protocol, SEED)]
    if on_gpu:
        used = torch.cuda.max_memory_allocated(device) / GIB
        reserved = torch.cuda.max_memory_reserved(device) / GIB
        protocol = protocol | {"reserved_gib": round(reserved, 3)}
        records.append(Record("knn_gpu_memory", used, "GiB", "xmoco", work, protocol, SEED))
    return records


def judge(bank: Tensor, queries: Tensor, device: torch.device) -> None:
    """All of a real evaluation but for its accuracy, which says nothing of random features."""
    generator = torch.Generator().manual_seed(SEED)
    bank_labels, labels = (
        torch.randint(CLASSES, (len(vectors),), generator=generator) for vectors in (bank, queries)
    )
    with Progress(transient=True) as progress:
        task = progress.add_task(f"bank of {len(bank):,}", total=None)
        knn_accuracy(
            bank, bank_labels, queries, labels, ks=KS, temperature=TEMPERATURE, device=device,
            on_progress=lambda done, total: progress.update(task, completed=done, total=total),
        )  # fmt: skip


if __name__ == "__main__":
    main()
