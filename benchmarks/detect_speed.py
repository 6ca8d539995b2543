"""How fast xmoco trains a detector, beside torchvision's own loop, and whether AP is the same.

    python benchmarks/detect_speed.py --data pennfudan.tar.xz
    python benchmarks/detect_speed.py --data coco/ --model faster-rcnn-fpn --ap-steps 0

All train the same detector from the same weights on the same images in the same order; see
torchvision_detection.py for the baselines, of which one has gradients scaled in half precision (the
``--amp`` of torchvision's program) and one has not. They take turns, a few steps each; the median
round counts. Then each trains anew for ``--ap-steps`` steps, and is judged on the validation
images. ``--stages`` tells where the time of our step goes. Penn-Fudan's own layout is known, too.
"""

import argparse
import copy
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from penn_fudan import write_penn_fudan
from recipe import RESULTS
from torchvision_detection import Usual
from xmoco.data import Batches
from xmoco.data.sources import existing_path, source_name
from xmoco.detect.courses import Course, course_of
from xmoco.detect.evaluation import verdicts
from xmoco.detect.models import DESIGNS, build_detector
from xmoco.detect.objects import DetectionSet
from xmoco.detect.prediction import predicted
from xmoco.detect.sources import open_detection
from xmoco.detect.task import DetectorTask
from xmoco.detect.training import batches_of_one_shape, make_batch_norms_precise
from xmoco.errors import UserError
from xmoco.evaluate.evaluation import EvalOptions
from xmoco.nn.weights import load_weights
from xmoco.records import Record, append_records
from xmoco.train.loop import Training
from xmoco.train.run_folder import RunFolder

GIB = 2**30
SEED = 0


class Ours:
    """A participant: steps of xmoco's loop."""

    def __init__(self, work: "Work", detector: nn.Module) -> None:
        torch.backends.cudnn.benchmark = False
        self.fabric = EvalOptions(device=work.device.type, precision=work.precision).fabric()
        torch.backends.cudnn.benchmark = False
        task = DetectorTask("detector", detector, work.train, work.course.sizes, work.masks)
        batches = Batches(
            work.train.images,
            batch=work.course.batch,
            seed=SEED,
            device=self.fabric.device,
            order=batches_of_one_shape(work.train, work.course.batch),
        )
        run = RunFolder(Path(tempfile.mkdtemp(dir=work.folder)))
        self.training = Training(work.course.plan(SEED), self.fabric, task, batches, run, {})
        self.detector = detector
        task.train()
        self.stream = batches.from_step(0)

    @contextmanager
    def turn(self) -> Iterator[None]:
        yield

    @property
    def waited(self) -> float:
        return self.training.batches.waited

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.training.advance(self.stream)


@dataclass(frozen=True)
class Work:
    """What everybody has to do."""

    model: str
    backbone: nn.Module
    train: DetectionSet
    test: DetectionSet
    course: Course
    device: torch.device
    precision: str
    workers: int
    folder: Path

    @property
    def masks(self) -> bool:
        return DESIGNS[self.model].masks

    def detector(self) -> nn.Module:
        torch.manual_seed(SEED)
        return build_detector(
            self.model,
            copy.deepcopy(self.backbone).requires_grad_(True),
            len(self.train.categories),
            size=self.course.test_size,
            mean=(0.485, 0.456, 0.406),
            std=(0.229, 0.224, 0.225),
        ).to(self.device)

    def usual(self, amp: bool) -> Usual:
        return Usual(
            self.detector(), self.train, self.course, self.device,
            masks=self.masks, amp=amp, workers=self.workers, seed=SEED,
        )  # fmt: skip

    def participants(self) -> Mapping[str, Callable[[], Any]]:
        found: dict[str, Callable[[], Any]] = {
            "xmoco": lambda: Ours(self, self.detector()),
            "torchvision": lambda: self.usual(amp=False),
        }
        if self.device.type == "cuda":
            found["torchvision, amp"] = lambda: self.usual(amp=True)
        return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", required=True, help="images with boxes (and masks)")
    parser.add_argument("--model", choices=DESIGNS, default="mask-rcnn-fpn")
    parser.add_argument("--weights", default="scratch:resnet50", help="of the backbone")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--size", type=int, default=800, help="of the shorter side, for all")
    parser.add_argument("--workers", type=int, default=4, help="of the baselines' DataLoader")
    parser.add_argument("--steps", type=int, default=20, help="of a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ap-steps", type=int, default=500, help="before AP is judged; 0: never")
    parser.add_argument("--only", nargs="*", help="some of the participants")
    parser.add_argument("--stages", action="store_true", help="where the time of our step goes")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        benchmark(options, Path(folder))


def benchmark(options: argparse.Namespace, folder: Path) -> None:
    work = prepared(options, folder)
    makers = work.participants()
    makers = {name: makers[name] for name in options.only or makers}
    records: list[Record] = []
    for found in measured(makers, work, options):
        append_records(options.results / "detect-speed.jsonl", found)  # whatever comes of the rest
        records += found
    show(records, options)
    if options.stages:
        show_stages(makers["xmoco"](), work)


def measured(
    makers: Mapping[str, Callable[[], Any]], work: Work, options: argparse.Namespace
) -> Iterator[list[Record]]:
    yield speeds(makers, work, options)
    if options.ap_steps:
        for name in makers:
            yield precision_of(name, work, options)


def prepared(options: argparse.Namespace, folder: Path) -> Work:
    fabric = EvalOptions(device=options.device).fabric()
    train, test = opened(options.data, folder)
    learnt = train.to_learn_from()
    # One size for all: torchvision draws one for each image, and pads a batch to the largest.
    course = course_of(
        "1x", options.model, images=len(learnt), batch=options.batch, size=options.size
    )
    return Work(
        model=options.model,
        backbone=load_weights(options.weights).backbone,
        train=learnt,
        test=test,
        course=replace(course, sizes=(options.size,)),
        device=fabric.device,
        precision="bf16" if fabric.device.type == "cuda" else "fp32",
        workers=options.workers,
        folder=folder,
    )


def opened(data: str, folder: Path) -> tuple[DetectionSet, DetectionSet]:
    try:
        return open_detection(data)
    except UserError:
        return open_detection(write_penn_fudan(existing_path(data), folder / source_name(data)))


def speeds(
    makers: Mapping[str, Callable[[], Any]], work: Work, options: argparse.Namespace
) -> list[Record]:
    """Images per second of everybody: rounds in turn, after one that does not count."""
    participants, memory = {}, {}
    for name, make in makers.items():
        if work.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            held = torch.cuda.memory_allocated()
        participants[name] = make()
        participants[name].steps(options.steps)
        if work.device.type == "cuda":
            torch.cuda.synchronize()
            memory[name] = (torch.cuda.max_memory_allocated() - held) / GIB
    rounds: dict[str, list[float]] = {name: [] for name in participants}
    waited = {name: -participant.waited for name, participant in participants.items()}
    spent = dict.fromkeys(participants, 0.0)
    for number in range(options.rounds):
        for name, participant in participants.items():
            started = time.perf_counter()
            participant.steps(options.steps)
            if work.device.type == "cuda":
                torch.cuda.synchronize()
            seconds = time.perf_counter() - started
            spent[name] += seconds
            rounds[name].append(options.steps * work.course.batch / seconds)
            print(f"round {number + 1}, {name}: {rounds[name][-1]:.2f} images/s", flush=True)
    medians = {name: statistics.median(values) for name, values in rounds.items()}
    best = max((m for name, m in medians.items() if name != "xmoco"), default=None)
    return [
        Record(
            "detect_images_per_second",
            median,
            "images/s",
            name,
            work_name(work, options),
            {
                **protocol(work),
                "precision": _precision(name, work),
                "rounds": rounds[name],
                "waiting": (waited[name] + participants[name].waited) / spent[name],
                **({"gpu_memory_gib": round(memory[name], 2)} if memory else {}),
                **(
                    {"times_baseline": round(median / best, 3)}
                    if name == "xmoco" and best is not None
                    else {}
                ),
            },
            SEED,
        )
        for name, median in medians.items()
    ]


def _precision(name: str, work: Work) -> str:
    return {"xmoco": work.precision, "torchvision, amp": "fp16, scaled"}.get(name, "fp32")


def work_name(work: Work, options: argparse.Namespace) -> str:
    return f"{work.model}-{source_name(options.data)}-{options.size}px-batch{work.course.batch}"


def protocol(work: Work) -> dict[str, Any]:
    return {
        "data": work.train.name,
        "model": work.model,
        "batch": work.course.batch,
        "size": work.course.test_size,
        "train_images": len(work.train),
        "workers": work.workers,
        "device": work.device.type,
    }


def precision_of(name: str, work: Work, options: argparse.Namespace) -> list[Record]:
    """AP after a short course of its own; only xmoco makes its batch norms precise, as it does."""
    steps = options.ap_steps
    course = course_of(
        f"{steps}-steps", work.model, images=len(work.train), batch=options.batch, size=options.size
    )
    short = replace(work, course=replace(course, sizes=work.course.sizes))
    participant = short.participants()[name]()
    participant.steps(steps)
    if isinstance(participant, Ours):
        make_batch_norms_precise(participant.training, course.precise)
    found = predicted(participant.detector, work.test, work.device)
    return [
        Record(
            f"{verdict.kind}_{measure.lower()}",
            value,
            "%",
            name,
            work_name(work, options),
            {
                **protocol(work),
                "precision": _precision(name, work),
                "steps": steps,
                "metric": verdict.metric,
                "judged_images": len(work.test),
            },
            SEED,
        )
        for verdict in verdicts(work.test, found, work.masks)
        for measure, value in verdict.judged.values.items()
        if measure in ("AP", "AP50", "AP75")
    ]


def show(records: list[Record], options: argparse.Namespace) -> None:
    names = list(dict.fromkeys(record.subject for record in records))
    table = Table(title=records[0].work)
    table.add_column("measure")
    for name in names:
        table.add_column(name, justify="right")
    values: dict[str, dict[str, float]] = {}
    for record in records:
        values.setdefault(record.measure, {})[record.subject] = record.value
    for measure, by_name in values.items():
        table.add_row(measure, *(f"{by_name[n]:.2f}" if n in by_name else "" for n in names))
    Console().print(table)
    print(f"records in {options.results / 'detect-speed.jsonl'}")


def show_stages(ours: Ours, work: Work) -> None:
    """Kernels by their time, of a few steps."""
    ours.steps(5)
    activities = [torch.profiler.ProfilerActivity.CPU]
    by = "self_cpu_time_total"
    if work.device.type == "cuda":
        torch.cuda.synchronize()
        activities.append(torch.profiler.ProfilerActivity.CUDA)
        by = "self_cuda_time_total"
    with torch.profiler.profile(activities=activities) as profile:
        ours.steps(3)
    print(profile.key_averages().table(sort_by=by, row_limit=40, max_name_column_width=70))


if __name__ == "__main__":
    main()
