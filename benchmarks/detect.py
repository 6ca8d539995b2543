"""How good backbones are for detection: pre-trained here, from scratch, and by other methods.

    python benchmarks/detect.py pretrain --data photos/ --recipe imagenette --out runs/detect \\
        "xmoco:" "mocov2plus: method=mocov2plus" \\
        backbone=resnet50 epochs=200 weak_keys=false local_crops=0 knn_every=0
    python benchmarks/detect.py compare --coco coco.tar.xz --penn-fudan pennfudan.tar.xz \\
        runs/detect/xmoco runs/detect/mocov2plus scratch:resnet50
    python benchmarks/detect.py overfit --penn-fudan pennfudan.tar.xz

``pretrain`` trains a backbone for each entry, a name and changes to the recipe; changes without a
name, in one row with the entries, are for all. Those above make pre-training equal: the recipe's
weak keys and small views are XMoCo+, which may be a third entry, "xmoco+: weak_keys=true
local_crops=4". ``compare`` tunes detectors on each of the weights: Mask R-CNN FPN on Penn-Fudan
with several seeds, then Faster R-CNN FPN and C4 on the COCO subset; it prints a line for each, and
AP with its deviation over seeds, and how far every one is above scratch. ``overfit`` has every
model learn a handful of Penn-Fudan's images by heart.

What has its records already is not done again, what was interrupted goes on, and what fails does
not keep the rest from being done. Several calls may work on the same detectors: each leaves alone
what another one tunes, and says so.
"""

import argparse
import hashlib
import json
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from rich.console import Console
from rich.table import Table

from compare import Entry
from options import at_least
from pages.detection import cell, difference
from penn_fudan import write_penn_fudan
from recipe import RESULTS
from xmoco.data.fingerprint import tensors_digest
from xmoco.data.sources import existing_path, source_name
from xmoco.detect.courses import course_of
from xmoco.detect.evaluation import evaluate_detect
from xmoco.detect.metrics import TITLES
from xmoco.detect.models import DESIGNS
from xmoco.detect.sources import open_detection
from xmoco.errors import TRY_AGAIN, Interrupted, UserError
from xmoco.evaluate.evaluation import EvalOptions
from xmoco.nn.named_models import SCRATCH
from xmoco.nn.weights import load_weights
from xmoco.pretraining import pretrain
from xmoco.records import Measured, Record, append_records, read_records
from xmoco.report.circumstances import last_of_each
from xmoco.train.run_folder import RunFolder, plain

Kept = Measured[dict[str, Any]]
KINDS = ("box", "mask")

OPTIONS = {"mask-rcnn-fpn": "penn_fudan", "faster-rcnn-fpn": "fpn", "faster-rcnn-c4": "c4"}
"""How the options of every detector begin that is compared. The first carries the claim, and is the
one to have if time runs out."""


@dataclass(frozen=True)
class Job:
    """A detector to be tuned on each of the weights, with each of the seeds."""

    data: str
    model: str
    steps: int
    size: int
    seeds: Sequence[int]
    batch: int
    precision: str

    @property
    def title(self) -> str:
        return f"{DESIGNS[self.model].title} on {source_name(self.data)}"

    @property
    def schedule(self) -> str:
        return f"{self.steps}-steps"

    def facts(self) -> dict[str, Any]:
        """All that its records tell alike, whatever the detectors start from."""
        train, test = open_detection(self.data)
        learnt = train.to_learn_from()
        course = course_of(
            self.schedule, self.model, images=len(learnt), batch=self.batch, size=self.size
        )
        return plain(
            {
                "model": self.model,
                **course.protocol,
                "precision": self.precision,
                "data": learnt.images.name,
                "train_images": len(learnt),
                "judged": test.name,
                "judged_images": len(test),
            }
        )


@dataclass(frozen=True)
class Start:
    """Weights as they were asked for, and what records say of them."""

    weights: str
    subject: str
    digest: str
    backbone: str

    @classmethod
    def of(cls, weights: str) -> "Start":
        folder = Path(weights)
        if (folder / "config.yaml").is_file() and not RunFolder(folder).weights.is_file():
            raise UserError(f"{weights} is not trained to its end: go on with `pretrain`.")
        loaded = load_weights(weights)
        digest = tensors_digest(loaded.backbone.state_dict())[:12]
        return cls(weights, loaded.card.method, digest, loaded.card.backbone)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, default=RESULTS)
    commands = parser.add_subparsers(required=True)
    first = commands.add_parser("pretrain")
    first.add_argument("entries", nargs="+", help="'name: key=value …'; those without colon: all's")
    first.add_argument("--data", required=True)
    first.add_argument("--recipe", default="imagenette")
    first.add_argument("--out", type=Path, default=Path("runs/detect"))
    first.set_defaults(run=pretrain_all)
    second = commands.add_parser("compare")
    second.add_argument("weights", nargs="+")
    second.add_argument("--coco", help="the COCO subset")
    second.add_argument("--penn-fudan", help="its archive or folder")
    second.add_argument("--models", nargs="+", choices=OPTIONS, help="some of the detectors")
    second.add_argument("--penn-fudan-size", type=int, default=400)
    second.add_argument("--coco-size", type=int, default=400)
    for name, steps, seeds in (
        ("penn-fudan", 400, [0, 1, 2]),
        ("fpn", 1000, [0]),
        ("c4", 600, [0]),
    ):
        second.add_argument(f"--{name}-steps", type=at_least(1), default=steps)
        second.add_argument(f"--{name}-seeds", type=at_least(0), nargs="+", default=seeds)
    second.add_argument("--batch", type=at_least(2), default=16)
    second.set_defaults(run=compare)
    third = commands.add_parser("overfit")
    third.add_argument("--penn-fudan", required=True)
    third.add_argument("--weights", default="scratch:resnet18")
    third.add_argument("--models", nargs="+", choices=DESIGNS, default=list(DESIGNS))
    third.add_argument("--images", type=at_least(2), default=4)
    third.add_argument("--steps", type=at_least(1), default=500)
    third.add_argument("--size", type=int, default=256)
    third.set_defaults(run=overfit)
    for command, precision, out in ((second, "bf16", "detect"), (third, "fp32", "overfit")):
        command.add_argument("--looks", type=at_least(0), default=0, help="at AP on the way")
        command.add_argument("--out", type=Path, default=Path("runs", out))
        command.add_argument("--device", default="auto")
        command.add_argument("--precision", default=precision)
    options = parser.parse_args()
    with ending_in_order():
        options.run(options)


@contextmanager
def ending_in_order() -> Iterator[None]:
    """Who is asked to stop says by the exit status that the same command goes on, also where
    nothing is trained; mistakes end in a sentence."""

    def stop(*_: Any) -> NoReturn:
        sys.exit(TRY_AGAIN)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    except Interrupted as interrupted:
        print(f"{interrupted}", file=sys.stderr)
        sys.exit(interrupted.status)
    except UserError as error:
        sys.exit(str(error))
    finally:
        signal.signal(signal.SIGTERM, before)


def pretrain_all(options: argparse.Namespace) -> None:
    shared = [text for text in options.entries if ":" not in text]
    failed = []
    for entry in map(Entry.parse, (text for text in options.entries if ":" in text)):
        run = RunFolder(options.out / entry.name)
        if run.weights.is_file():
            print(f"{run.path} is finished", flush=True)
            continue
        started = time.perf_counter()
        try:
            if (run.path / "config.yaml").is_file():
                pretrain(out=run.path, resume=True)
            else:
                changes = [*shared, *entry.changes.split()]
                pretrain(options.recipe, data=options.data, out=run.path, overrides=changes)
        except UserError as error:
            failed.append(f"{entry.name} failed: {error}")
            print(failed[-1], file=sys.stderr, flush=True)
        else:
            print(f"{run.path}: {time.perf_counter() - started:.0f} s", flush=True)
    if failed:
        sys.exit(f"not pre-trained, as told above: {len(failed)}.")


def compare(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        images = {}
        if options.penn_fudan:
            source = existing_path(options.penn_fudan)
            images["mask-rcnn-fpn"] = str(write_penn_fudan(source, Path(folder) / "penn-fudan"))
        if options.coco:
            images |= dict.fromkeys(("faster-rcnn-fpn", "faster-rcnn-c4"), options.coco)
        wanted = [model for model in OPTIONS if model in (options.models or images)]
        if not wanted or (lacking := [model for model in wanted if model not in images]):
            needed = ", ".join(lacking) if wanted else "every detector"
            sys.exit(f"there are no images for {needed}: give --penn-fudan (masks) or --coco.")
        jobs = [
            Job(
                data=images[model],
                model=model,
                steps=getattr(options, f"{OPTIONS[model]}_steps"),
                size=options.penn_fudan_size if DESIGNS[model].masks else options.coco_size,
                seeds=getattr(options, f"{OPTIONS[model]}_seeds"),
                batch=options.batch,
                precision=options.precision,
            )
            for model in wanted
        ]
        tune_all(jobs, options.weights, options.results / "detect.jsonl", options)


def overfit(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        source = existing_path(options.penn_fudan)
        data = write_penn_fudan(source, Path(folder) / "penn-fudan-by-heart", only=options.images)
        jobs = [
            Job(
                data=str(data),
                model=model,
                steps=options.steps,
                size=options.size,
                seeds=(0,),
                batch=options.images,
                precision=options.precision,
            )
            for model in options.models
        ]
        tune_all(jobs, [options.weights], options.results / "detect-overfit.jsonl", options)


def tune_all(
    jobs: Sequence[Job], weights: Sequence[str], file: Path, options: argparse.Namespace
) -> None:
    """What is missing, and tables of what there is, however it ends."""
    append_records(file, ())  # who cannot write there learns it before the training
    starts = [Start.of(one) for one in weights]
    facts = [job.facts() for job in jobs]
    left = 0
    try:
        for job, own in zip(jobs, facts, strict=True):
            for seed in job.seeds:
                for start in starts:
                    try:
                        left += not tune(job, own, start, seed, file, options)
                    except (UserError, torch.OutOfMemoryError) as error:
                        left += 1
                        reason = str(error).partition("\n")[0]
                        failure = f"{label(job, start, seed)} failed: {reason}"
                        print(failure, file=sys.stderr, flush=True)
    finally:
        for job, own in zip(jobs, facts, strict=True):
            show(job, starts, kept(file, own))
    if left:
        sys.exit(f"not measured here, as told above: {left}.")


def label(job: Job, start: Start, seed: int) -> str:
    return f"{job.title}, {start.weights}, seed {seed}"


def tune(
    job: Job,
    facts: Mapping[str, Any],
    start: Start,
    seed: int,
    file: Path,
    options: argparse.Namespace,
) -> bool:
    """One detector, unless it has its records. False if another process is at it."""

    def recorded() -> bool:
        return any(
            r.protocol["digest"] == start.digest and r.seed == seed for r in kept(file, facts)
        )

    if recorded():
        return True
    settings = plain({**facts, "digest": start.digest, "seed": seed})
    told = json.dumps(settings, sort_keys=True).encode()
    name = f"{start.subject}-{start.backbone}-{job.model}-seed{seed}"
    folder = options.out / f"{name}-{hashlib.blake2b(told, digest_size=5).hexdigest()}"
    with claimed(folder, settings) as ours:
        if not ours:
            print(f"{label(job, start, seed)}: another process is at it", flush=True)
            return False
        if recorded():
            return True  # another process was faster
        started = time.perf_counter()
        run = folder / "detector"
        records = evaluate_detect(
            start.weights,
            job.data,
            model=job.model,
            schedule=job.schedule,
            seeds=(seed,),
            batch=job.batch,
            looks=options.looks,
            out=run,
            options=EvalOptions(options.device, precision=job.precision, size=job.size),
        )
        append_records(file, records)
        shutil.rmtree(RunFolder(run).checkpoints.folder, ignore_errors=True)
        seconds = time.perf_counter() - started
    print(f"{label(job, start, seed)}: {in_brief(records, seconds)}", flush=True)
    return True


@contextmanager
def claimed(folder: Path, settings: Mapping[str, Any]) -> Iterator[bool]:
    """Whether nobody else is at work in the folder; if so, nobody will be meanwhile."""
    try:
        claim = RunFolder.begun(folder, settings)
    except UserError:  # another process has just made it; anything else is told now
        claim = RunFolder.begun(folder, settings)
    try:
        claim.lock()
    except UserError:
        yield False
        return
    try:
        yield True
    finally:
        claim.unlock()


def in_brief(records: Sequence[Record], seconds: float) -> str:
    values = {record.measure: record.value for record in records}
    told = [f"{kind} AP {values[f'{kind}_ap']:.1f}" for kind in KINDS if f"{kind}_ap" in values]
    protocol = records[0].protocol
    trained, judged = protocol["training_seconds"], protocol["judging_seconds"]
    spent = f"{seconds:.0f} s, of which {trained:.0f} of training and {judged:.0f} of judging"
    return f"{', '.join(told)}; {spent}"


def kept(file: Path, facts: Mapping[str, Any]) -> list[Kept]:
    """Records of a job, whatever was tuned."""
    return [r for r in read_records(file, Kept) if facts.items() <= r.protocol.items()]


def show(job: Job, starts: Sequence[Start], records: Sequence[Kept]) -> None:
    """A row for each of the weights: means over the seeds asked for, of the last records."""
    last = last_of_each(records, lambda r: (r.protocol["digest"], r.measure, r.seed))

    def values(start: Start | None, measure: str) -> list[float]:
        return [
            record.value
            for record in last
            if start is not None
            and record.protocol["digest"] == start.digest
            and record.measure == measure
            and record.seed in job.seeds
        ]

    scratch = {start.backbone: start for start in starts if start.subject == SCRATCH}
    kinds = KINDS if DESIGNS[job.model].masks else KINDS[:1]
    measures = [f"{kind}_{measure}" for kind in kinds for measure in ("ap", "ap50", "ap75")]
    table = Table(title=f"{job.title}: {job.steps:,} steps, {job.size} px")
    table.add_column("weights")
    for measure in measures:
        kind, _, name = measure.partition("_")
        table.add_column(f"{kind} {TITLES[name]}", justify="right")
    table.add_column("box AP above scratch", justify="right")
    for start in starts:
        cells = [cell(values(start, measure)) for measure in measures]
        least = values(scratch.get(start.backbone), "box_ap")
        above = "" if start.subject == SCRATCH else difference(values(start, "box_ap"), least)
        table.add_row(start.weights, *cells, above)
    Console(width=160).print(table)


if __name__ == "__main__":
    main()
