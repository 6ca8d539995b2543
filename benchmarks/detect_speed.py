"""How fast xmoco trains a detector, beside torchvision's own loop, and whether AP is the same.

    python benchmarks/detect_speed.py --data pennfudan.tar.xz --ap-steps 0
    python benchmarks/detect_speed.py --data pennfudan.tar.xz --rounds 0 \\
        --weights runs/detect/xmoco --seeds 0 1 2 --ap-size 400

All train the same detector from the same weights on the same images in the same order; see
torchvision_detection.py for the baselines, of which one has gradients scaled in half precision (the
``--amp`` of torchvision's program) and one has not. They take turns, a few steps each; the median
of ``--rounds`` counts. Then, for each seed, everybody trains anew for ``--ap-steps`` steps, and is
judged on the validation images, all after precise batch norm: speed is worth something at equal AP
only, which one seed, or a start from scratch, hardly shows. AP that has its records is not measured
again. ``--stages`` tells where the time of our step goes. Penn-Fudan's own layout is known, too.
"""

import argparse
import copy
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from detect import Kept, Start, ending_in_order
from options import at_least
from pages.detection import cell, difference
from penn_fudan import write_penn_fudan
from recipe import RESULTS
from torchvision_detection import Usual
from xmoco.config import InputConfig
from xmoco.data import Batches
from xmoco.data.imagesets import ArrayImages, RaggedImages
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
from xmoco.fabric import Fabric
from xmoco.nn.weights import load_weights
from xmoco.records import Record, append_records, read_records
from xmoco.report.circumstances import last_of_each
from xmoco.train.engine import choose_device
from xmoco.train.loop import Training
from xmoco.train.run_folder import RunFolder, plain

GIB = 2**30
PARTICIPANTS = ("xmoco", "torchvision", "torchvision, amp")


class Ours:
    """A participant: steps of xmoco's loop."""

    def __init__(self, work: "Work", course: Course, seed: int) -> None:
        self.detector = work.detector(course, seed)
        self.course = course
        batches = Batches(
            work.train.images,
            batch=course.batch,
            seed=seed,
            device=work.device,
            order=batches_of_one_shape(work.train, course.batch),
        )
        task = DetectorTask("detector", self.detector, work.train, course.sizes, work.masks)
        run = RunFolder(Path(tempfile.mkdtemp(dir=work.folder)))
        self.training = Training(course.plan(seed), work.fabric, task, batches, run, {})
        task.train()
        self.stream = batches.from_step(0)

    @property
    def waited(self) -> float:
        return self.training.batches.waited

    @property
    def images(self) -> str:
        """In which form the images wait for their turn."""
        held = isinstance(self.training.batches.images, ArrayImages | RaggedImages)
        return f"decoded, on {self.training.fabric.device.type}" if held else "files"

    def steps(self, number: int) -> None:
        for _ in range(number):
            self.training.advance(self.stream)

    def make_batch_norms_precise(self, batches: int) -> None:
        make_batch_norms_precise(self.training, batches)


@dataclass(frozen=True)
class Work:
    """What everybody has to do."""

    model: str
    start: Start
    backbone: nn.Module
    input: InputConfig
    train: DetectionSet
    test: DetectionSet
    name: str  # of the images
    batch: int
    fabric: Fabric
    precision: str
    workers: int
    folder: Path

    @property
    def masks(self) -> bool:
        return DESIGNS[self.model].masks

    @property
    def device(self) -> torch.device:
        return self.fabric.device

    def course(self, schedule: str, size: int) -> Course:
        """With one size for all: torchvision draws one for each image, and pads a batch to the
        largest."""
        images = len(self.train)
        found = course_of(schedule, self.model, images=images, batch=self.batch, size=size)
        return replace(found, sizes=(size,))

    def detector(self, course: Course, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return build_detector(
            self.model,
            copy.deepcopy(self.backbone).requires_grad_(True),
            len(self.train.categories),
            size=course.test_size,
            mean=self.input.mean,
            std=self.input.std,
        ).to(self.device)

    def participant(self, name: str, course: Course, seed: int) -> Ours | Usual:
        if name == "xmoco":
            return Ours(self, course, seed)
        return Usual(
            self.detector(course, seed), self.train, course, self.device,
            masks=self.masks, amp=name == "torchvision, amp", workers=self.workers, seed=seed,
        )  # fmt: skip

    def precision_of(self, name: str) -> str:
        return {"xmoco": self.precision, "torchvision, amp": "fp16, scaled"}.get(name, "fp32")

    def facts(self, name: str, course: Course) -> dict[str, Any]:
        """What the records of a participant tell of its work."""
        return plain(
            {
                "data": self.train.name,
                "model": self.model,
                "weights": self.start.subject,
                "digest": self.start.digest,
                "backbone": self.start.backbone,
                "batch": course.batch,
                "size": course.test_size,
                "train_images": len(self.train),
                "workers": self.workers,
                "device": self.device.type,
                "precision": self.precision_of(name),
                "norm_weight_decay": course.protocol["norm_weight_decay"],
            }
        )

    def work(self, course: Course) -> str:
        """As records name it."""
        return f"{self.model}-{self.name}-{course.test_size}px-batch{course.batch}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", required=True, help="images with boxes (and masks)")
    parser.add_argument("--model", choices=DESIGNS, default="mask-rcnn-fpn")
    parser.add_argument("--weights", default="scratch:resnet50", help="of the backbone")
    parser.add_argument("--batch", type=at_least(2), default=16)
    parser.add_argument("--size", type=int, default=800, help="of the shorter side, for all")
    parser.add_argument("--workers", type=at_least(0), default=4, help="of the baselines' loader")
    parser.add_argument("--steps", type=at_least(1), default=20, help="of a round")
    parser.add_argument("--rounds", type=at_least(0), default=5, help="0: no speeds")
    parser.add_argument("--ap-steps", type=at_least(0), default=500, help="0: no AP")
    parser.add_argument("--ap-size", type=int, default=400, help="of the shorter side, for AP")
    parser.add_argument("--seeds", type=at_least(0), nargs="+", default=[0], help="for AP")
    parser.add_argument("--only", nargs="+", choices=PARTICIPANTS, help="some of the participants")
    parser.add_argument("--stages", action="store_true", help="where the time of our step goes")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    with ending_in_order(), tempfile.TemporaryDirectory() as folder:
        benchmark(options, Path(folder))


def benchmark(options: argparse.Namespace, folder: Path) -> None:
    work = prepared(options, folder)
    there = PARTICIPANTS if work.device.type == "cuda" else PARTICIPANTS[:2]
    names = [name for name in there if name in (options.only or there)]
    file = options.results / "detect-speed.jsonl"
    append_records(file, ())  # who cannot write there learns it before the training
    if options.rounds:
        found = speeds(names, work, options)
        append_records(file, found)  # whatever comes of the rest
        for record in found:
            print(f"{record.subject}: {record.value:.2f} images/s, the median")
    if options.ap_steps:
        course = work.course(f"{options.ap_steps}-steps", options.ap_size)
        try:
            for seed in options.seeds:
                for name in names:
                    judge(name, work, course, seed, file)
        finally:
            show(names, work, course, options.seeds, file)
    if options.stages:
        show_stages(work, work.course("1x", options.size))


def prepared(options: argparse.Namespace, folder: Path) -> Work:
    start = Start.of(options.weights)
    loaded = load_weights(options.weights)
    precision = "bf16" if choose_device(options.device) == "cuda" else "fp32"
    fabric = EvalOptions(device=options.device, precision=precision).fabric()
    train, test = opened(options.data, folder)
    # The number of regions changes with every step: cuDNN would never be done with trying, for
    # nobody.
    torch.backends.cudnn.benchmark = False
    return Work(
        model=options.model,
        start=start,
        backbone=loaded.backbone,
        input=loaded.card.input(),
        train=train.to_learn_from(),
        test=test,
        name=source_name(options.data),
        batch=options.batch,
        fabric=fabric,
        precision=precision,
        workers=options.workers,
        folder=folder,
    )


def opened(data: str, folder: Path) -> tuple[DetectionSet, DetectionSet]:
    try:
        return open_detection(data)
    except UserError:
        return open_detection(write_penn_fudan(existing_path(data), folder / source_name(data)))


def speeds(names: Sequence[str], work: Work, options: argparse.Namespace) -> list[Record]:
    """Images per second of everybody: rounds in turn, after one that does not count."""
    course = work.course("1x", options.size)
    participants, memory = {}, {}
    for name in names:
        if work.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            held = torch.cuda.memory_allocated()
        participants[name] = work.participant(name, course, seed=0)
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
            rounds[name].append(options.steps * course.batch / seconds)
            print(f"round {number + 1}, {name}: {rounds[name][-1]:.2f} images/s", flush=True)
    medians = {name: statistics.median(values) for name, values in rounds.items()}
    best = max((m for name, m in medians.items() if name != "xmoco"), default=None)
    return [
        Record(
            "detect_images_per_second",
            median,
            "images/s",
            name,
            work.work(course),
            {
                **work.facts(name, course),
                "images": participants[name].images,
                "rounds": rounds[name],
                "waiting": (waited[name] + participants[name].waited) / spent[name],
                **({"gpu_memory_gib": round(memory[name], 2)} if memory else {}),
                **(
                    {"times_baseline": round(median / best, 3)}
                    if name == "xmoco" and best is not None
                    else {}
                ),
            },
            0,
        )
        for name, median in medians.items()
    ]


def judge(name: str, work: Work, course: Course, seed: int, file: Path) -> None:
    """AP after a course of its own, unless it has its records."""
    if any(record.seed == seed for record in judged(name, work, course, file)):
        return
    started = time.perf_counter()
    participant = work.participant(name, course, seed)
    participant.steps(course.steps)
    participant.make_batch_norms_precise(course.precise)
    seconds = time.perf_counter() - started
    found = predicted(participant.detector, work.test, work.device)
    records = [
        Record(
            f"{verdict.kind}_{measure.lower()}",
            value,
            "%",
            name,
            work.work(course),
            {**ap_facts(name, work, course), "metric": verdict.metric, "training_seconds": seconds},
            seed,
        )
        for verdict in verdicts(work.test, found, work.masks)
        for measure, value in verdict.judged.values.items()
        if measure in ("AP", "AP50", "AP75")
    ]
    append_records(file, records)
    ap = records[0].value
    print(f"{name}, seed {seed}: box AP {ap:.1f}; {seconds:.0f} s of training", flush=True)


def ap_facts(name: str, work: Work, course: Course) -> dict[str, Any]:
    return {
        **work.facts(name, course),
        "steps": course.steps,
        "precise_batches": course.precise,
        "judged_images": len(work.test),
    }


def judged(name: str, work: Work, course: Course, file: Path) -> list[Kept]:
    """What records there are of somebody's AP."""
    facts = ap_facts(name, work, course)
    return [
        record
        for record in read_records(file, Kept)
        if record.subject == name and facts.items() <= record.protocol.items()
    ]


def show(
    names: Sequence[str], work: Work, course: Course, seeds: Sequence[int], file: Path
) -> None:
    """Means over the seeds asked for, and how far xmoco is above each."""
    values: dict[str, Mapping[str, list[float]]] = {}
    for name in names:
        last = last_of_each(judged(name, work, course, file), lambda r: (r.measure, r.seed))
        measures = dict.fromkeys(record.measure for record in last)
        values[name] = {
            measure: [r.value for r in last if r.measure == measure and r.seed in seeds]
            for measure in measures
        }
    table = Table(title=f"{work.work(course)}: AP after {course.steps:,} steps")
    columns = list(dict.fromkeys(measure for own in values.values() for measure in own))
    for heading in ("", *columns, "box_ap of xmoco above it"):
        table.add_column(heading, justify="right" if heading else "left")
    ours = values.get("xmoco", {}).get("box_ap", [])
    for name, own in values.items():
        beyond = "" if name == "xmoco" else difference(ours, own.get("box_ap", []))
        table.add_row(name, *(cell(own.get(measure, [])) for measure in columns), beyond)
    Console(width=160).print(table)
    print(f"records in {file}")


def show_stages(work: Work, course: Course) -> None:
    """Kernels by their time, of a few steps."""
    ours = Ours(work, course, seed=0)
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
