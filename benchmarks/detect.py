"""How good backbones are for detection: pre-trained here, from scratch, and by other methods.

    python benchmarks/detect.py pretrain --data photos/ --recipe imagenette --out runs/detect \\
        "xmoco:" "mocov2plus: method=mocov2plus" backbone=resnet50 epochs=200
    python benchmarks/detect.py compare --coco coco.tar.xz --penn-fudan pennfudan.tar.xz \\
        runs/detect/xmoco runs/detect/mocov2plus scratch:resnet50
    python benchmarks/detect.py overfit --penn-fudan pennfudan.tar.xz

``pretrain`` trains a backbone for each entry, a name and changes to the recipe; changes without a
name, in one row with the entries, are for all. ``compare`` tunes detectors on each of the weights:
Faster R-CNN C4 and FPN on the COCO subset, Mask R-CNN FPN on Penn-Fudan, the latter with several
seeds; it prints AP with its deviation over seeds, and how far every one is above scratch.
``overfit`` has every model learn a handful of Penn-Fudan's images by heart. What has its records
already is not done again, and what was interrupted goes on.
"""

import argparse
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from compare import Entry
from penn_fudan import write_penn_fudan
from recipe import RESULTS
from xmoco.data.fingerprint import tensors_digest
from xmoco.data.sources import existing_path, source_name
from xmoco.detect.evaluation import evaluate_detect
from xmoco.detect.models import DESIGNS
from xmoco.evaluate.evaluation import EvalOptions
from xmoco.nn.weights import load_weights
from xmoco.pretraining import pretrain
from xmoco.records import Measured, Record, append_records, read_records

Kept = Measured[dict[str, Any]]


@dataclass(frozen=True)
class Job:
    """A detector to be tuned on each of the weights."""

    title: str
    data: str
    model: str
    steps: int
    size: int
    seeds: tuple[int, ...]
    batch: int = 16


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
    second.add_argument("--coco-steps", type=int, default=3000)
    second.add_argument("--coco-size", type=int, default=400)
    second.add_argument("--penn-fudan-steps", type=int, default=500)
    second.add_argument("--penn-fudan-size", type=int, default=400)
    second.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="on Penn-Fudan")
    second.add_argument("--coco-seeds", type=int, nargs="+", default=[0])
    second.add_argument("--out", type=Path, default=Path("runs/detect"))
    second.add_argument("--device", default="auto")
    second.add_argument("--precision", default="bf16")
    second.set_defaults(run=compare)
    third = commands.add_parser("overfit")
    third.add_argument("--penn-fudan", required=True)
    third.add_argument("--weights", default="scratch:resnet18")
    third.add_argument("--models", nargs="+", default=list(DESIGNS))
    third.add_argument("--images", type=int, default=4)
    third.add_argument("--steps", type=int, default=500)
    third.add_argument("--size", type=int, default=256)
    third.add_argument("--out", type=Path, default=Path("runs/overfit"))
    third.add_argument("--device", default="auto")
    third.add_argument("--precision", default="fp32")
    third.set_defaults(run=overfit)
    options = parser.parse_args()
    options.run(options)


def pretrain_all(options: argparse.Namespace) -> None:
    shared = [text for text in options.entries if ":" not in text]
    for entry in map(Entry.parse, (text for text in options.entries if ":" in text)):
        folder = options.out / entry.name
        if (folder / "backbone.safetensors").is_file():
            print(f"{folder} is finished")
            continue
        begun = (folder / "config.yaml").is_file()
        if begun:
            pretrain(out=folder, resume=True)
        else:
            changes = [*shared, *entry.changes.split()]
            pretrain(options.recipe, data=options.data, out=folder, overrides=changes)


def compare(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        jobs = []
        if options.coco:
            shared = (options.coco_steps, options.coco_size, tuple(options.coco_seeds))
            jobs += [
                Job(f"{DESIGNS[model].title} on the COCO subset", options.coco, model, *shared)
                for model in ("faster-rcnn-c4", "faster-rcnn-fpn")
            ]
        if options.penn_fudan:
            data = write_penn_fudan(existing_path(options.penn_fudan), Path(folder) / "penn-fudan")
            jobs.append(
                Job(
                    "Mask R-CNN FPN on Penn-Fudan",
                    str(data),
                    "mask-rcnn-fpn",
                    options.penn_fudan_steps,
                    options.penn_fudan_size,
                    tuple(options.seeds),
                )
            )
        file = options.results / "detect.jsonl"
        for job in jobs:
            for weights in options.weights:
                for seed in job.seeds:
                    done(job, weights, seed, file, options)
            show(job, file)


def overfit(options: argparse.Namespace) -> None:
    file = options.results / "detect-overfit.jsonl"
    with tempfile.TemporaryDirectory() as folder:
        source = existing_path(options.penn_fudan)
        data = write_penn_fudan(source, Path(folder) / "penn-fudan-by-heart", only=options.images)
        for model in options.models:
            job = Job(
                f"{DESIGNS[model].title}, by heart",
                str(data),
                model,
                options.steps,
                options.size,
                (0,),
                batch=options.images,
            )
            done(job, options.weights, 0, file, options)
            show(job, file)


def done(
    job: Job, weights: str, seed: int, file: Path, options: argparse.Namespace
) -> Sequence[Record | Kept]:
    """The records of a detector: those there are, or new ones."""
    loaded = load_weights(weights)
    who, digest = loaded.card.method, tensors_digest(loaded.backbone.state_dict())[:12]
    known = [r for r in kept(file, job) if r.protocol["digest"] == digest and r.seed == seed]
    if known:
        return known
    records = evaluate_detect(
        weights,
        job.data,
        model=job.model,
        schedule=f"{job.steps}-steps",
        seeds=(seed,),
        batch=job.batch,
        out=options.out / f"{who}-{digest}-{source_name(job.data)}-{job.model}-{job.steps}-{seed}",
        options=EvalOptions(options.device, precision=options.precision, size=job.size),
    )
    append_records(file, records)
    return records


def kept(file: Path, job: Job) -> list[Kept]:
    """Records of this job, whoever was measured."""
    if not file.exists():
        return []
    wanted = {"model": job.model, "steps": job.steps, "size": job.size}
    name = Path(job.data).name
    return [
        record
        for record in read_records(file, Kept)
        if wanted.items() <= record.protocol.items() and name in record.protocol["data"]
    ]


def show(job: Job, file: Path) -> None:
    values: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for record in kept(file, job):
        values[record.subject][record.measure].append(record.value)
    measures = [
        f"{kind}_{measure}"
        for kind in (("box", "mask") if DESIGNS[job.model].masks else ("box",))
        for measure in ("ap", "ap50", "ap75")
    ]
    table = Table(title=f"{job.title}: {job.steps:,} steps, {job.size} px")
    table.add_column("backbone")
    for measure in measures:
        table.add_column(measure, justify="right")
    table.add_column("box_ap above scratch", justify="right")
    for subject, found in values.items():
        cells = [_cell(found[measure]) for measure in measures]
        table.add_row(subject, *cells, _above(found["box_ap"], values["scratch"]["box_ap"]))
    Console(width=160).print(table)


def _cell(values: list[float]) -> str:
    if len(values) < 2:
        return f"{values[0]:.1f}" if values else ""
    return f"{statistics.fmean(values):.1f} ± {statistics.stdev(values):.1f}"


def _above(values: list[float], scratch: list[float]) -> str:
    """By how much, and how many deviations of the two that is."""
    if not values or not scratch or values == scratch:
        return ""
    difference = statistics.fmean(values) - statistics.fmean(scratch)
    if len(values) < 2 or len(scratch) < 2:
        return f"{difference:+.1f}"
    deviation = (statistics.variance(values) / 2 + statistics.variance(scratch) / 2) ** 0.5
    if deviation == 0:  # after few steps nobody finds anything, whatever the seed
        return f"{difference:+.1f}"
    return f"{difference:+.1f} ({difference / deviation:.1f} deviations)"


if __name__ == "__main__":
    main()
