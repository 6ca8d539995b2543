"""Time what encoders do by means of our own against plain torch, in bf16 on CUDA.

    python benchmarks/encoders.py

The stem's convolution and pooling, forward and backward, by torch and by our kernels; and the
encoding of queries and keys, with the way back of queries, on one stream and on two. Each is
captured into a CUDA graph, so that launching from Python does not count. Rounds take turns; shown
is the median. Records go to benchmarks/results.
"""

import argparse
import statistics
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor

from cuda_graph import recorded
from recipe import RESULTS
from xmoco.config import ModelConfig
from xmoco.nn.encoder import build_encoder, momentum_copy
from xmoco.nn.encoding import EncoderRunner
from xmoco.nn.fused_stem import max_pool, stem_convolution
from xmoco.records import Record, append_records

ROUNDS, REPEATS = 5, 10
STEMS = [(256, 128), (256, 224), (512, 224)]
"""Images, those of all views, and pixels of a side."""
ENCODERS = [("resnet18", 64, 128), ("resnet18", 128, 128), ("resnet50", 128, 224)]
"""With images a view."""

Ways = Mapping[str, Callable[[], object]]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("benchmarks/encoders.py needs CUDA.")
    torch.backends.cudnn.benchmark = True
    torch.manual_seed(0)
    records = []
    for images, size in STEMS:
        shape = f"{images} × {size} px"
        records += timed("convolution of the stem", shape, convolutions(images, size))
        records += timed("pooling", shape, poolings(images, size))
    for backbone, images, size in ENCODERS:
        shape = f"{backbone}, 2 × {images} × {size} px"
        records += timed("queries and keys", shape, encoders(backbone, images, size))
    path = options.results / "encoders.jsonl"
    append_records(path, records)
    table = Table(title="forward + backward, bf16")
    for heading in ("", "images", "beside"):
        table.add_column(heading)
    for heading in ("ms", "xmoco, ms", "times"):
        table.add_column(heading, justify="right")
    for theirs, ours in zip(records[::2], records[1::2], strict=True):
        protocol = theirs.protocol
        table.add_row(
            protocol["operation"], protocol["shape"], theirs.subject, f"{theirs.value:.3f}",
            f"{ours.value:.3f}", f"{theirs.value / ours.value:.2f}",
        )  # fmt: skip
    Console().print(table)
    print(f"records in {path}")


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    values = torch.randn(shape, device="cuda", dtype=dtype)
    return values.contiguous(memory_format=torch.channels_last)


def convolutions(images: int, size: int) -> Ways:
    x, weight = normal(images, 3, size, size), normal(64, 3, 7, 7, dtype=torch.float32)
    weight.requires_grad_()
    gradient = normal(images, 64, size // 2, size // 2)

    def both_passes(convolution: Callable[[], Tensor]) -> Callable[[], object]:
        return lambda: torch.autograd.grad(convolution(), weight, gradient)

    return {
        "torch": both_passes(lambda: F.conv2d(x, weight.bfloat16(), stride=2, padding=3)),
        "xmoco": both_passes(lambda: stem_convolution(x, weight, torch.bfloat16)),
    }


def poolings(images: int, size: int) -> Ways:
    x = normal(images, 64, size // 2, size // 2).requires_grad_()
    gradient = normal(images, 64, size // 4, size // 4)
    return {
        "torch": lambda: torch.autograd.grad(F.max_pool2d(x, 3, 2, 1), x, gradient),
        "xmoco": lambda: torch.autograd.grad(max_pool(x), x, gradient),
    }


def encoders(backbone: str, images: int, size: int) -> Ways:
    """Both with all kernels of our own: what differs are the streams."""
    model = ModelConfig.model_validate({"backbone": backbone, "batch_norm": "split"})
    model = model.model_copy(update={"batch_norm_groups": 2})
    runner, encoder = EncoderRunner(model), build_encoder(model)
    runner.prepare(encoder)
    encoder.to("cuda").to(memory_format=torch.channels_last)
    follower = momentum_copy(encoder)
    runner.optimize_for(torch.device("cuda"), encoder, follower)
    views = [normal(images, 3, size, size) for _ in range(2)]

    def one_stream() -> tuple[list[Tensor], list[Tensor]]:
        return runner.encode(encoder, views), runner.encode_keys(follower, views)

    def two_streams() -> tuple[list[Tensor], list[Tensor]]:
        return runner.queries_and_keys(encoder, follower, views, views)

    def both_passes(encode: Callable[[], tuple[list[Tensor], list[Tensor]]]) -> object:
        with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
            queries, keys = encode()
            loss = sum((q * k).sum() for q, k in zip(queries, keys, strict=True))
        assert isinstance(loss, Tensor)
        return torch.autograd.grad(loss, list(encoder.parameters()))

    return {
        "xmoco (one stream)": lambda: both_passes(one_stream),
        "xmoco": lambda: both_passes(two_streams),
    }


def timed(operation: str, shape: str, ways: Ways) -> list[Record]:
    replays = {subject: recorded(work) for subject, work in ways.items()}
    times: dict[str, list[float]] = {subject: [] for subject in ways}
    for _ in range(ROUNDS):
        for subject, replay in replays.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            replay()
            start.record()
            for _ in range(REPEATS):
                replay()
            end.record()
            end.synchronize()
            times[subject].append(start.elapsed_time(end) / REPEATS)
    protocol = {
        "operation": operation,
        "shape": shape,
        "dtype": "bfloat16",
        "median_of": ROUNDS,
        "repeats": REPEATS,
    }
    work = f"encoders: {operation}, {shape}"
    return [
        Record(
            "encoders_ms", statistics.median(values), "ms", subject, work, dict(protocol), seed=0
        )
        for subject, values in times.items()
    ]


if __name__ == "__main__":
    main()
