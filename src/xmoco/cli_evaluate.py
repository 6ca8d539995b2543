"""The commands ``xmoco evaluate …``: arguments in, records shown and kept; no logic."""

import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Column, Table

from xmoco.launchers import first_process
from xmoco.text import printable

if TYPE_CHECKING:
    from xmoco.evaluate.evaluation import EvalOptions, Listener
    from xmoco.records import Record

evaluate = typer.Typer(
    help="Judge a backbone. Every number is a record that names its protocol.", no_args_is_help=True
)


Weights = Annotated[
    str,
    typer.Argument(
        help="A run folder, a file of weights (ours or a public checkpoint), `torchvision:NAME` "
        "or `timm:NAME`."
    ),
]
LabelledData = Annotated[
    str,
    typer.Argument(
        help="Labelled images: a folder or archive with one subfolder per class, `patterns`, or "
        "`torchvision:NAME`. Of two splits, train/ is learned from and val/ (test/, where there is "
        "no val/) judged."
    ),
]
Device = Annotated[str, typer.Option(help="`auto`, `cpu`, `cuda` or `mps`.")]
Devices = Annotated[
    int,
    typer.Option(
        help="Processes, each with a device of its own, that share every batch. The result is that "
        "of one process up to rounding; but where the backbone is tuned, each process normalises "
        "by the batch statistics of its own share."
    ),
]
Nodes = Annotated[
    int, typer.Option(help="Machines with so many devices each; start the command on all of them.")
]
Precision = Annotated[str, typer.Option(help="`fp32` or `bf16`.")]
Size = Annotated[
    int | None,
    typer.Option(
        help="Side of the images, random crops and judged ones alike. Default: both as the weights "
        "have them."
    ),
]
EvalSize = Annotated[
    int | None,
    typer.Option(
        help="Side of the images judged only, which may do better if larger than the crops. "
        "Default: --size or, without it, the eval_size of the weights' recipe."
    ),
]


def _colour(text: str) -> tuple[float, ...]:
    """Three numbers between commas."""
    from xmoco.errors import UserError

    try:
        red, green, blue = map(float, text.split(","))
    except ValueError:
        raise UserError(f"{text!r} is not three numbers such as 0.485,0.456,0.406.") from None
    return red, green, blue


Mean = Annotated[
    Any,
    typer.Option(
        parser=_colour,
        metavar="R,G,B",
        help="What weights from elsewhere expect to be subtracted from the channels (0 to 1), e.g. "
        "`0.4914,0.4822,0.4465`. Default: a guess by their layout; our own files know it.",
    ),
]
Std = Annotated[
    Any,
    typer.Option(
        parser=_colour,
        metavar="R,G,B",
        help="What weights from elsewhere expect the channels to be divided by afterwards.",
    ),
]
Labelled = Annotated[
    bool | None,
    typer.Option(
        "--labelled/--unlabelled",
        help="Whether weights from elsewhere were trained with labels, which records and tables "
        "tell. Default: they were if the file holds a classifier.",
    ),
]
Out = Annotated[
    Path | None,
    typer.Option(
        help="The run folder, with checkpoints and metrics; the same command goes on where it "
        "stopped, and judges a finished classifier again without training it. Default: under "
        "`runs/evaluate`, one for each combination of weights, images and settings."
    ),
]
Root = Annotated[str, typer.Option(help="Where torchvision sets are kept.")]
Download = Annotated[bool, typer.Option("--download", help="Download a torchvision set.")]
Cache = Annotated[
    bool,
    typer.Option(
        "--cache/--no-cache",
        help="Keep features for the next time, in `~/.cache/xmoco/features`. They are found again "
        "by the content of weights and images.",
    ),
]
Seed = Annotated[int, typer.Option(help="Order of images, crops and first weights.")]


def _writable(file: Path | None) -> Path | None:
    """Found out before anything is measured."""
    from xmoco.errors import UserError

    if file is not None:
        there = next(path for path in (file, *file.absolute().parents) if path.exists())
        if file.is_dir() or not os.access(there, os.W_OK):
            raise UserError(f"records cannot be written to {file}.")
    return file


RecordsFile = Annotated[
    Path | None,
    typer.Option("--records", callback=_writable, help="Append the records to this .jsonl file."),
]


@evaluate.command(
    epilog="Examples:\n\n"
    "`xmoco evaluate knn runs/demo/xmoco patterns`\n\n"
    "`xmoco evaluate knn backbone.safetensors photos/ --k 20`"
)
def knn(
    weights: Weights,
    data: LabelledData,
    k: Annotated[
        list[int] | None,
        typer.Option(
            "--k",
            help="Neighbours that vote; may be given repeatedly. Default: 10, 20, 100 and 200.",
        ),
    ] = None,
    temperature: Annotated[float, typer.Option(help="Votes weigh exp(similarity / this).")] = 0.1,
    size: Size = None,
    eval_size: EvalSize = None,
    mean: Mean = None,
    std: Std = None,
    labelled: Labelled = None,
    device: Device = "auto",
    root: Root = "data",
    download: Download = False,
    cache: Cache = True,
    records: RecordsFile = None,
) -> None:
    """Weighted k-nearest-neighbour accuracy of frozen features.

    Test images are judged by training images; with one split only, each image by all the others.
    """
    from xmoco.evaluate.classification import evaluate_knn

    with progress_bars() as listener:
        found = evaluate_knn(
            weights,
            data,
            ks=k or (10, 20, 100, 200),
            temperature=temperature,
            options=_eval_options(
                cache,
                device=device,
                root=root,
                download=download,
                size=size,
                eval_size=eval_size,
                mean=mean,
                std=std,
                labelled=labelled,
            ),
            listener=listener,
        )
    rows = [(f"top-1, k = {record.protocol['k']}", record) for record in found]
    _show_records(f"kNN on {found[0].protocol['data']}", rows, records)


@evaluate.command(
    epilog="Examples:\n\n"
    "`xmoco evaluate linear runs/cifar10 torchvision:CIFAR10 --preset moco`\n\n"
    "`xmoco evaluate linear moco_v2_800ep.pth.tar imagenet/ --devices 8 --precision bf16`"
)
def linear(
    weights: Weights,
    data: LabelledData,
    preset: Annotated[
        str, typer.Option(help="`paper` (batch 512, rate 60) or `moco` (batch 256, rate 30).")
    ] = "paper",
    epochs: Annotated[
        int | None, typer.Option(help="Fewer than the protocol's 100, named in the record.")
    ] = None,
    seed: Seed = 0,
    out: Out = None,
    size: Size = None,
    eval_size: EvalSize = None,
    mean: Mean = None,
    std: Std = None,
    labelled: Labelled = None,
    device: Device = "auto",
    devices: Devices = 1,
    nodes: Nodes = 1,
    precision: Precision = "fp32",
    root: Root = "data",
    download: Download = False,
    records: RecordsFile = None,
) -> None:
    """Accuracy of a linear classifier on the frozen backbone (random crops and flips)."""
    from xmoco.evaluate.classification import evaluate_linear

    options = _eval_options(
        device=device,
        devices=devices,
        nodes=nodes,
        precision=precision,
        root=root,
        download=download,
        size=size,
        eval_size=eval_size,
        mean=mean,
        std=std,
        labelled=labelled,
    )
    with progress_bars() as listener:
        found = evaluate_linear(
            weights,
            data,
            preset=preset,
            epochs=epochs,
            seed=seed,
            out=out,
            options=options,
            listener=listener,
        )
    _show_classification(found, records)


@evaluate.command(
    epilog="Example: `xmoco evaluate finetune runs/cifar10 torchvision:CIFAR10 --fraction 0.1`"
)
def finetune(
    weights: Weights,
    data: LabelledData,
    fraction: Annotated[
        float,
        typer.Option(
            help="Share of the labels of every class, e.g. 0.01; always the same images, by the "
            "rule in docs/evaluation.md."
        ),
    ] = 1.0,
    epochs: Annotated[
        int | None, typer.Option(help="Fewer than the protocol's 20, named in the record.")
    ] = None,
    seed: Seed = 0,
    out: Out = None,
    size: Size = None,
    eval_size: EvalSize = None,
    mean: Mean = None,
    std: Std = None,
    labelled: Labelled = None,
    device: Device = "auto",
    devices: Devices = 1,
    nodes: Nodes = 1,
    precision: Precision = "fp32",
    root: Root = "data",
    download: Download = False,
    records: RecordsFile = None,
) -> None:
    """Accuracy after fine-tuning the backbone end to end, on all labels or a share of them."""
    from xmoco.evaluate.classification import evaluate_finetune

    options = _eval_options(
        device=device,
        devices=devices,
        nodes=nodes,
        precision=precision,
        root=root,
        download=download,
        size=size,
        eval_size=eval_size,
        mean=mean,
        std=std,
        labelled=labelled,
    )
    with progress_bars() as listener:
        found = evaluate_finetune(
            weights,
            data,
            fraction=fraction,
            epochs=epochs,
            seed=seed,
            out=out,
            options=options,
            listener=listener,
        )
    _show_classification(found, records)


@evaluate.command(
    epilog="Examples:\n\n"
    "`xmoco evaluate transfer runs/imagenet pets flowers --records transfer.jsonl`\n\n"
    "`xmoco evaluate transfer runs/imagenet photos/ --mode end-to-end --grid small`"
)
def transfer(
    weights: Weights,
    data: Annotated[
        list[str],
        typer.Argument(
            metavar="SET",
            help="Of the paper's sets: `aircraft`, `caltech101`, `cars`, `cifar10`, `cifar100`, "
            "`dtd`, `flowers`, `pets`, `sun397`, `voc2007`, or `all` ten; or labelled images of "
            "your own (a folder or archive with train/, test/ and perhaps val/).",
        ),
    ],
    mode: Annotated[
        str,
        typer.Option(
            help="`frozen` (logistic regression on features) or `end-to-end` (the backbone is "
            "tuned too)."
        ),
    ] = "frozen",
    grid: Annotated[
        str,
        typer.Option(
            help="End to end: `paper` (110 points of 5,000 steps) or `small` (6 of 1,000)."
        ),
    ] = "paper",
    metric: Annotated[
        str | None,
        typer.Option(help="For your own images: `top-1` or `mean per class`. Default: `top-1`."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="End to end: where finished grid points are kept, and checkpoints of the one in "
            "training, in a folder for each set; the same command goes on where it stopped. "
            "Default: under `runs/transfer`."
        ),
    ] = None,
    seed: Annotated[
        int, typer.Option(help="End to end: order of images, crops and first weights.")
    ] = 0,
    size: Size = None,
    eval_size: EvalSize = None,
    mean: Mean = None,
    std: Std = None,
    labelled: Labelled = None,
    device: Device = "auto",
    devices: Annotated[
        int,
        typer.Option(
            help="End to end: processes, each with a device of its own, that share every batch. "
            "Each normalises by the batch statistics of its own share."
        ),
    ] = 1,
    nodes: Nodes = 1,
    precision: Annotated[
        str, typer.Option(help="End to end: `fp32` or `bf16`; features are always `fp32`.")
    ] = "fp32",
    root: Root = "data",
    download: Download = False,
    cache: Cache = True,
    records: RecordsFile = None,
) -> None:
    """How well the backbone serves for other images: the paper's ten sets, or your own.

    What is chosen (a strength, a rate, a weight decay) is chosen on validation images, trained
    again with them, and judged on the test images once.
    """
    from xmoco.data.transfer_sets import TRANSFER_SETS, open_transfer_sets
    from xmoco.evaluate.transfer import evaluate_transfer

    options = _eval_options(
        cache,
        device=device,
        devices=devices,
        nodes=nodes,
        precision=precision,
        root=root,
        download=download,
        size=size,
        eval_size=eval_size,
        mean=mean,
        std=std,
        labelled=labelled,
    )
    names = [name for given in data for name in (TRANSFER_SETS if given == "all" else [given])]
    # All are opened first: a mistake in the last should not come out hours later.
    for images in open_transfer_sets(names, root=root, download=download, metric=metric):
        with progress_bars() as listener:
            record = evaluate_transfer(
                weights,
                images,
                mode=mode,
                grid=grid,
                seed=seed,
                out=out,
                options=options,
                listener=listener,
            )
        protocol = record.protocol
        _show_records(
            f"{protocol['name']}, to {protocol['set']}", [(protocol["metric"], record)], records
        )


@evaluate.command(
    epilog="Examples:\n\n"
    "`xmoco evaluate detect runs/photos street/ --model faster-rcnn-fpn --schedule 2000-steps`\n\n"
    "`xmoco evaluate detect runs/imagenet VOCdevkit/ --model faster-rcnn-c4 --schedule voc-24k "
    "--seeds 5`"
)
def detect(
    weights: Annotated[
        str,
        typer.Argument(
            help="A run folder, a file of weights, `torchvision:NAME` (trained with labels), or "
            "`scratch:NAME`: a backbone without any training."
        ),
    ],
    data: Annotated[
        str,
        typer.Argument(
            help="Images with boxes, for training and validation: a folder or archive with COCO's "
            "json (instances_train.json, instances_val.json), PASCAL VOC's folders, or a yaml file "
            "of YOLO."
        ),
    ],
    model: Annotated[
        str,
        typer.Option(
            help="`faster-rcnn-c4`, `faster-rcnn-fpn`, `mask-rcnn-c4`, `mask-rcnn-fpn` or "
            "`retinanet-fpn`."
        ),
    ] = "faster-rcnn-fpn",
    schedule: Annotated[
        str,
        typer.Option(
            help="`1x`, `2x`, `3x` (COCO: 90,000 steps and multiples), `voc-12k`, `voc-24k`, or a "
            "number such as `2000-steps`."
        ),
    ] = "1x",
    batch: Annotated[
        int, typer.Option(help="Images a step; the rate is in proportion to it.")
    ] = 16,
    size: Annotated[
        int | None,
        typer.Option(
            help="Length of an image's shorter side in testing; in training it varies below, in "
            "the schedule's proportions. Default: 800."
        ),
    ] = None,
    seed: Annotated[
        int, typer.Option(help="Order of images, sizes, mirrors, and the new layers' weights.")
    ] = 0,
    seeds: Annotated[
        int, typer.Option(help="So many detectors, with this seed and the following.")
    ] = 1,
    out: Annotated[
        Path | None,
        typer.Option(
            help="The run folder, with checkpoints, metrics, report and detector; of several seeds "
            "each has one inside. The same command goes on where it stopped. Default: under "
            "`runs/detect`, one for each combination of weights, images and settings."
        ),
    ] = None,
    mean: Mean = None,
    std: Std = None,
    labelled: Labelled = None,
    device: Device = "auto",
    devices: Annotated[
        int,
        typer.Option(
            help="Processes, each with a device of its own, that share every batch. On CUDA they "
            "share batch statistics too."
        ),
    ] = 1,
    nodes: Nodes = 1,
    precision: Precision = "fp32",
    records: RecordsFile = None,
) -> None:
    """Average precision of a detector on the backbone, with all its layers tuned.

    Boxes, and masks where the model draws them, are judged as COCO or, for its sets, PASCAL VOC
    does it.
    """
    from xmoco.detect.evaluation import evaluate_detect, summary

    options = _eval_options(
        device=device,
        devices=devices,
        nodes=nodes,
        precision=precision,
        size=size,
        mean=mean,
        std=std,
        labelled=labelled,
    )
    with progress_bars() as listener:
        found = evaluate_detect(
            weights,
            data,
            model=model,
            schedule=schedule,
            seeds=range(seed, seed + seeds),
            batch=batch,
            out=out,
            options=options,
            listener=listener,
        )
    _show_detection(found, summary(found), records)


def _eval_options(cache: bool = False, **given: Any) -> "EvalOptions":
    from xmoco.evaluate.cache import default_cache
    from xmoco.evaluate.evaluation import EvalOptions

    return EvalOptions(
        cache=default_cache() if cache else None,
        command=shlex.join(["xmoco", *sys.argv[1:]]),
        **given,
    )


@contextmanager
def progress_bars() -> "Iterator[Listener]":
    """A progress bar for every stage, with the time left and a note such as the loss."""
    from xmoco.evaluate.evaluation import Listener

    if not first_process():
        yield Listener()
        return

    class Bars(Listener):
        def progress(self, stage: str, done: int, total: int, note: str = "") -> None:
            if stage not in stages:
                stages[stage] = bars.add_task(stage, total=total, note="")
            elif done < bars.tasks[stages[stage]].completed:
                bars.reset(stages[stage])  # it begins again, of other images: so does its clock
            bars.update(stages[stage], completed=done, total=total, note=note)

        def say(self, sentence: str) -> None:
            print(f"xmoco: {printable(sentence)}", file=sys.stderr)

    stages: dict[str, TaskID] = {}
    # Where there is little room, the bar and the note give way: counts and times do not.
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(table_column=Column(no_wrap=True)),
        TimeElapsedColumn(table_column=Column(no_wrap=True)),
        TextColumn("elapsed"),
        TimeRemainingColumn(table_column=Column(no_wrap=True)),
        TextColumn("left"),
        TextColumn("{task.fields[note]}", table_column=Column()),
    )
    with Progress(*columns) as bars:
        yield Bars()


def _show_classification(found: list["Record"], file: Path | None) -> None:
    protocol = found[0].protocol
    rows = [(record.measure.rpartition("_")[2].replace("top", "top-"), record) for record in found]
    _show_records(f"{protocol['name']} on {protocol['data']}", rows, file)


def _show_records(title: str, rows: list[tuple[str, "Record"]], file: Path | None) -> None:
    from xmoco.records import append_records

    if not first_process():
        return
    records = [record for _, record in rows]
    if file is not None:  # first of all: what was measured must not be lost
        append_records(file, records)
    protocol = records[0].protocol
    images = f"{protocol['judged_images']:,} images of {protocol['judged']}"
    judged = f"judged: {images}, {protocol['size']} px"
    if protocol.get("crop_size", protocol["size"]) != protocol["size"]:
        judged += f" (random crops: {protocol['crop_size']} px)"
    if protocol["split"] == "leave one out":
        judged += ", each by all the others"
    facts = [judged, protocol.get("weights")]
    table = Table()
    table.add_column("measure")
    table.add_column("accuracy", justify="right")
    for name, record in rows:
        table.add_row(name, f"{record.value:.2f} %")
    print_plain(title)
    Console().print(table)
    print_plain("; ".join(filter(None, facts)))


def _show_detection(
    found: list["Record"], rows: "list[tuple[str, str, float, float | None]]", file: Path | None
) -> None:
    from xmoco.records import append_records

    if not first_process():
        return
    if file is not None:
        append_records(file, found)
    protocol = found[0].protocol
    table = Table()
    for heading in ("judged", "measure"):
        table.add_column(heading)
    several = len({record.seed for record in found})
    table.add_column(
        f"mean ± deviation of {several} seeds" if several > 1 else "%", justify="right"
    )
    for kind, measure, mean, deviation in rows:
        spread = "" if deviation is None else f" ± {deviation:.2f}"
        table.add_row(kind, measure, f"{mean:.2f}{spread}")
    print_plain(f"{protocol['name']}, {protocol['schedule']}, on {protocol['data']}")
    Console().print(table)
    images = f"{protocol['judged_images']:,} images of {protocol['judged']}"
    facts = [f"judged: {images}, shorter side {protocol['size']} px", protocol.get("weights")]
    print_plain("; ".join(filter(None, facts)))


def print_plain(text: str) -> None:
    lines = "\n".join(map(printable, text.split("\n")))
    Console().print(lines, markup=False, highlight=False, soft_wrap=True)
