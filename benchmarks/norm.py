"""Time batch norm + addition + ReLU, forward and backward, in bf16 on CUDA.

    python benchmarks/norm.py

Three ways: torch's own (cuDNN, one group), statistics in groups by torch (split), and the fused
operation with the same groups. Each is captured into a CUDA graph, so that launching from Python
does not count, and replayed with a cold cache. Records go to benchmarks/results.

GB/s counts what no way of two visits can avoid: 11 times the activation. Forward reads the input
twice and the residual, and writes the result; backward reads three tensors and writes the
residual's gradient, reads two and writes the input's.
"""

import argparse
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from cuda_graph import recorded
from recipe import RESULTS
from xmoco.nn.batchnorm import split_statistics
from xmoco.nn.blocks import FusedBatchNorm1d, FusedBatchNorm2d, fuse_layers
from xmoco.records import Record, append_records

GROUPS = 8
VISITS = 11
REPEATS = 30
SHAPES = [
    *((samples, *layer) for samples in (512, 1024) for layer in
      [(64, 32, 32), (128, 16, 16), (256, 8, 8), (512, 4, 4), (2048,)]),
    *((512, *layer) for layer in
      [(64, 112, 112), (64, 56, 56), (256, 56, 56), (128, 28, 28), (512, 28, 28),
       (256, 14, 14), (1024, 14, 14), (512, 7, 7), (2048, 7, 7)]),
]  # fmt: skip

Norm = Callable[[Tensor, Tensor], Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("benchmarks/norm.py needs CUDA.")
    records = [record for shape in SHAPES for record in measure(shape)]
    path = options.results / "norm.jsonl"
    append_records(path, records)
    table = Table(title=f"batch norm + add + ReLU, forward + backward, bf16, {GROUPS} groups: µs")
    subjects = list(dict.fromkeys(record.subject for record in records))
    for heading in ("activation", *subjects, "fused GB/s"):
        table.add_column(heading, justify="left" if heading == "activation" else "right")
    for row in zip(*[iter(records)] * len(subjects), strict=True):
        times = [f"{record.value:.1f}" for record in row]
        table.add_row(
            str(row[0].protocol["shape"]), *times, f"{row[-1].protocol['gigabytes_per_second']:.0f}"
        )
    Console().print(table)
    print(f"records in {path}")


def measure(shape: tuple[int, ...]) -> list[Record]:
    torch.manual_seed(0)
    records = []
    for subject, norm in ways(shape).items():
        microseconds = time_both_passes(norm, shape)
        size = 2 * torch.Size(shape).numel()
        protocol = {
            "operation": "batch norm + add + ReLU, forward + backward",
            "shape": list(shape),
            "dtype": "bfloat16",
            "groups": 1 if subject == "cudnn" else GROUPS,
            "median_of": REPEATS,
            "cache": "flushed",
            "gigabytes_per_second": round(VISITS * size / microseconds / 1e3),
        }
        work = f"norm-{'x'.join(map(str, shape))}-g{GROUPS}"
        records.append(Record("norm_us", microseconds, "µs", subject, work, protocol, seed=0))
    return records


def ways(shape: tuple[int, ...]) -> dict[str, Norm]:
    """How to normalise, by name: each takes input and residual."""
    kind = nn.BatchNorm2d if len(shape) == 4 else nn.BatchNorm1d
    plain = kind(shape[1]).cuda()
    (split,) = split_statistics(nn.Sequential(kind(shape[1])), GROUPS).cuda()
    layers = split_statistics(nn.Sequential(kind(shape[1]), nn.ReLU()), GROUPS).cuda()
    fuse_layers(layers)
    (fused, _) = layers
    assert isinstance(fused, FusedBatchNorm1d | FusedBatchNorm2d)
    return {
        "cudnn": lambda x, residual: F.relu_(plain(x).add_(residual)),
        "split": lambda x, residual: F.relu_(split(x).add_(residual)),
        "fused": fused,
    }


def time_both_passes(norm: Norm, shape: tuple[int, ...]) -> float:
    """Median time of a replay in µs."""
    x, residual, gradient = (activation(shape) for _ in range(3))
    inputs = (x.requires_grad_(), residual.requires_grad_())

    def both_passes() -> None:
        torch.autograd.grad(norm(*inputs), inputs, gradient)

    replay = recorded(both_passes)
    flood = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    times = []
    for _ in range(REPEATS):
        flood.zero_()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        replay()
        end.record()
        end.synchronize()
        times.append(1e3 * start.elapsed_time(end))
    return statistics.median(times)


def activation(shape: tuple[int, ...]) -> Tensor:
    values = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    return values.contiguous(memory_format=torch.channels_last) if values.dim() == 4 else values


if __name__ == "__main__":
    main()
