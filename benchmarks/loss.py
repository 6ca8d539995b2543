"""Time and memory of the losses alone: MoCo v2+, XMoCo, and XMoCo computed plainly.

    python benchmarks/loss.py                  on the GPU, where there is one
    python benchmarks/loss.py --launch graph   replayed as a CUDA graph, free of Python's own time
    python benchmarks/loss.py --device cpu --batch 64 --lengths 512 1024

A trial is a forward and a backward pass for given features, with full banks and a full history.
Memory is the peak above what there was before the loss was made. The table also says how far
XMoCo's loss and gradients are from the plain ones; records go to benchmarks/results/loss.jsonl.
"""

import argparse
import os
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import torch
import torch.nn.functional as F
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor

from cuda_graph import recorded
from recipe import RESULTS
from xmoco.losses import MoCoLoss, XMoCoLoss
from xmoco.records import Record, append_records

PLAIN = "xmoco (plain)"
SUBJECTS = ("mocov2plus", "xmoco", PLAIN)
SEED = 0


@dataclass(frozen=True)
class Work:
    batch: int
    bank_length: int
    feature_size: int
    device: torch.device

    @property
    def size(self) -> str:
        return f"{self.batch}x{self.bank_length}x{self.feature_size}"

    @property
    def fits_plainly(self) -> bool:
        """Whether some eight matrices of the history's size can be in memory at once."""
        needed = 8 * 4 * self.bank_length * (self.bank_length + self.batch)
        if self.device.type == "cuda":
            return needed < torch.cuda.mem_get_info(self.device)[0]
        return needed < os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def main() -> None:
    gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", type=torch.device, default="cuda" if gpu else "cpu")
    parser.add_argument("--batch", type=int, default=512 if gpu else 64)
    parser.add_argument("--features", type=int, default=128)
    parser.add_argument(
        "--lengths", type=int, nargs="+", default=[4096, 16384, 65536] if gpu else [512, 1024]
    )
    parser.add_argument("--launch", choices=["eager", "graph"], default="eager")
    parser.add_argument("--trials", type=int, default=30)
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    # Like a network's activations, this makes the C library keep what is freed from now on:
    # otherwise a CPU would spend most of the time on fresh pages.
    torch.zeros(2**22)

    title = f"Losses, forward and backward, {options.launch}, {options.device}: N×K×d"
    table = Table(title=title, box=box.SIMPLE)
    for heading in ("work", "subject", "time", "GPU memory", "loss, gradient off plain"):
        left = heading in ("work", "subject")
        table.add_column(heading, justify="left" if left else "right", no_wrap=left)
    records = []
    for length in options.lengths:
        work = Work(options.batch, length, options.features, options.device)
        for subject in SUBJECTS:
            if subject == PLAIN and not work.fits_plainly:
                table.add_row(work.size, subject, "does not fit")
                continue
            found = measure(subject, work, options.launch, options.trials)
            time, *memory = (f"{record.value:,.2f} {record.unit}" for record in found)
            off = deviations(work) if subject == "xmoco" and work.fits_plainly else ()
            off_plain = ", ".join(f"{value:.1e}" for value in off)
            table.add_row(work.size, subject, time, "".join(memory), off_plain)
            records += found
    Console().print(table)
    path = options.results / "loss.jsonl"
    append_records(path, records)
    print(f"records in {path}")


def measure(subject: str, work: Work, launch: str, trials: int) -> list[Record]:
    on_gpu = work.device.type == "cuda"
    features = random_features(work)
    if on_gpu:
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
    trial = as_trial(build(subject, work), features)
    if launch == "graph":
        trial = recorded(trial)
    values = {"loss_ms": (median_milliseconds(trial, trials, on_gpu), "ms")}
    if on_gpu:
        peak = torch.cuda.max_memory_allocated() - before
        values["loss_gpu_memory"] = (peak / 2**20, "MiB")
    protocol = {
        "batch": work.batch,
        "bank_length": work.bank_length,
        "feature_size": work.feature_size,
        "history": "queries",
        "device": work.device.type,
        "launch": launch,
        "median_of": trials,
    }
    return [
        Record(measure, value, unit, subject, f"loss-{work.size}", protocol, SEED)
        for measure, (value, unit) in values.items()
    ]


def build(subject: str, work: Work) -> XMoCoLoss:
    """A loss as it is in the midst of training: every slot of its memory is taken."""
    torch.manual_seed(SEED)
    kind = MoCoLoss if subject == "mocov2plus" else XMoCoLoss
    criterion = kind(work.feature_size, work.bank_length).to(work.device)
    criterion.plain = subject == PLAIN
    criterion.banks.enqueue(*unit_rows(2, work.bank_length, work))
    if criterion.soft_labels is not None:
        assert criterion.soft_labels.history is not None
        criterion.soft_labels.history.enqueue(*unit_rows(2, work.bank_length, work))
    return criterion


def unit_rows(kinds: int, rows: int, work: Work) -> Tensor:
    return F.normalize(torch.randn(kinds, rows, work.feature_size), dim=2).to(work.device)


def random_features(work: Work) -> list[Tensor]:
    """q_s, q_t, k_s, k_t of images whose views are alike; the queries want gradients."""
    torch.manual_seed(SEED + 1)
    image, noise = unit_rows(1, work.batch, work), unit_rows(4, work.batch, work)
    q_s, q_t, k_s, k_t = F.normalize(image + noise, dim=2)
    return [q_s.requires_grad_(), q_t.requires_grad_(), k_s, k_t]


def as_trial(criterion: XMoCoLoss, features: list[Tensor]) -> Callable[[], None]:
    def trial() -> None:
        for query in features[:2]:
            query.grad = None
        loss, _ = criterion(*features)
        loss.backward()

    return trial


def median_milliseconds(trial: Callable[[], None], trials: int, on_gpu: bool) -> float:
    for _ in range(5):  # kernels are compiled, memory is found
        trial()
    times: list[float] = []
    for _ in range(trials):
        if on_gpu:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            start.record()
            trial()
            end.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end))
        else:
            started = perf_counter()
            trial()
            times.append(1000 * (perf_counter() - started))
    return statistics.median(times)


def deviations(work: Work) -> tuple[float, float]:
    """Of XMoCo's loss from the plain one, and of any gradient, relative to the largest."""
    losses, gradients = [], []
    for subject in ("xmoco", PLAIN):
        features = random_features(work)
        loss, _ = build(subject, work)(*features)
        losses.append(loss)
        gradients.append(torch.stack(torch.autograd.grad(loss, features[:2])))
    (fast, plain), (fast_gradient, plain_gradient) = losses, gradients
    off = (fast_gradient - plain_gradient).abs().max() / plain_gradient.abs().max()
    return abs(fast.item() - plain.item()), off.item()


if __name__ == "__main__":
    main()
