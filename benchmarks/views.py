"""Time the random views: the kernels, the plain version, torchvision image by image.

    python benchmarks/views.py

A GPU makes 512 views of 32 px (of images of 32 px, no blur) and 512 of 224 px (of images of
375×500, half of them blurred); without one, fewer views show that all runs. Two times are taken,
medians over many batches with their own random numbers: how long the device works, and how long the
host is busy drawing numbers and sending work. On a CPU both are one. torchvision's transforms, in
the usual order, run on one CPU thread; a sample of images is timed and scaled to the whole batch.

Every time becomes a record in benchmarks/results/views.jsonl. The largest difference between the
kernels' views and the plain ones is printed, as a share of the range from black to white.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn import functional as F
from torchvision.transforms import v2

from recipe import RESULTS
from xmoco.config import AugmentationConfig, InputConfig
from xmoco.data.views import ViewGroup, ViewParameters, blur_side, draw, render_fused, render_plain
from xmoco.records import Record, append_records
from xmoco.triton_here import HAS_TRITON

WARM_UP = 3  # batches before those that are timed
SAMPLE = 32  # images torchvision gets
Render = Callable[[Tensor, Tensor, ViewParameters, ViewGroup], Tensor]


@dataclass(frozen=True)
class Case:
    views: ViewGroup
    images: Tensor
    sizes: Tensor

    @property
    def work(self) -> str:
        return f"views-{len(self.images)}x{self.views.input.size}"


@dataclass(frozen=True)
class Times:
    """Milliseconds for one batch of views."""

    device: float
    host: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--steps", type=int, default=30, help="timed batches")
    options = parser.parse_args()
    cuda = torch.cuda.is_available()
    count = 512 if cuda else 16
    cases = [
        make_case(32, 0.0, count, 32, 32, cuda),
        make_case(224, 0.5, count, 375, 500, cuda),
    ]
    subjects: dict[str, Render] = {"xmoco (plain)": render_plain}
    if cuda and HAS_TRITON:
        subjects = {"xmoco": render_fused} | subjects

    table = Table(title="milliseconds per batch of views")
    for heading in ("work", "subject", "device", "host"):
        table.add_column(heading, justify="left" if heading in ("work", "subject") else "right")
    records = []
    for case in cases:
        times = {name: time_views(case, render, options.steps) for name, render in subjects.items()}
        times["torchvision"] = time_torchvision(case)
        for subject, took in times.items():
            table.add_row(case.work, subject, f"{took.device:.3f}", f"{took.host:.3f}")
            records += as_records(case, subject, took, options.steps)
        if len(subjects) > 1:
            print(f"{case.work}: largest difference {deviation(case):.1e} of the range")
    Console().print(table)
    path = options.results / "views.jsonl"
    append_records(path, records)
    print(f"records in {path}")


def make_case(size: int, blur: float, count: int, height: int, width: int, cuda: bool) -> Case:
    """Images with smooth colours and some noise."""
    torch.manual_seed(0)
    device = "cuda" if cuda else "cpu"
    images = torch.empty((count, 3, height, width), dtype=torch.uint8, device=device)
    for image in images:  # one at a time, to spare memory
        smooth = F.interpolate(
            torch.rand(1, 3, 5, 5, device=device), (height, width), mode="bicubic"
        )
        noise = torch.randn(1, 3, height, width, device=device)
        image[:] = (255 * (smooth + 0.05 * noise)).clamp(0, 255)[0]
    views = ViewGroup(("view",), AugmentationConfig(blur=blur), InputConfig(size=size))
    return Case(views, images, torch.tensor((height, width)).expand(count, 2))


def time_views(case: Case, render: Render, steps: int) -> Times:
    timed = _time_on_cuda if case.images.is_cuda else _time_on_cpu

    def make(step: int) -> None:
        parameters = draw(case.views.augmentation, len(case.images), seed=0, step=step, view=0)
        render(case.images, case.sizes, parameters, case.views)

    for step in range(WARM_UP):
        make(step)
    times = [timed(partial(make, WARM_UP + step)) for step in range(steps)]
    return Times(*(statistics.median(column) for column in zip(*times, strict=True)))


def _time_on_cuda(work: Callable[[], None]) -> tuple[float, float]:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    # While the device is held up, the host sends all its work, so that no gap is timed.
    torch.cuda._sleep(50_000_000)
    begin.record()
    host = _seconds(work)
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end), 1e3 * host


def _time_on_cpu(work: Callable[[], None]) -> tuple[float, float]:
    took = 1e3 * _seconds(work)
    return took, took


def _seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def time_torchvision(case: Case) -> Times:
    views, shown = case.views.augmentation, case.views.input
    jitter = v2.ColorJitter(views.brightness, views.contrast, views.saturation, views.hue)
    blur = v2.GaussianBlur(blur_side(case.views), views.blur_sigma)
    transform = v2.Compose(
        [
            v2.RandomResizedCrop(shown.size, views.crop_scale, views.crop_ratio, antialias=True),
            v2.RandomHorizontalFlip(views.flip),
            v2.RandomApply([jitter], views.jitter),
            v2.RandomGrayscale(views.grey),
            v2.RandomApply([blur], views.blur),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(list(shown.mean), list(shown.std)),
        ]
    )
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    sample = list(case.images[:SAMPLE].cpu())
    transform(sample[0])
    took = 1e3 * _seconds(lambda: [transform(image) for image in sample]) / len(sample)
    torch.set_num_threads(threads)
    took *= len(case.images)
    return Times(took, took)


def deviation(case: Case) -> float:
    shown = InputConfig(size=case.views.input.size, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))
    raw = replace(case.views, input=shown)
    parameters = draw(raw.augmentation, len(case.images), 0, 0, 0)
    fused, plain = (
        render(case.images, case.sizes, parameters, raw) for render in (render_fused, render_plain)
    )
    return float((fused - plain).abs().max())


def as_records(case: Case, subject: str, took: Times, steps: int) -> list[Record]:
    height, width = case.images.shape[2:]
    protocol = {
        "views": len(case.images),
        "size": case.views.input.size,
        "images": f"{height}x{width}",
        "blur": case.views.augmentation.blur,
        "statistic": f"median of {steps} batches",
    }
    if subject == "torchvision":
        protocol["statistic"] = f"one CPU thread, {min(SAMPLE, len(case.images))} images, scaled"
    return [
        Record(measure, value, "ms", subject, case.work, protocol, seed=0)
        for measure, value in (("views_ms", took.device), ("views_host_ms", took.host))
    ]


if __name__ == "__main__":
    main()
