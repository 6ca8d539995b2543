"""The commands ``xmoco evaluate …``: arguments in, records shown and kept; no logic."""

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from xmoco.cli.options import (
    Cache,
    Device,
    Devices,
    Download,
    EvalSize,
    Labelled,
    LabelledData,
    Mean,
    Nodes,
    Out,
    Precision,
    RecordsFile,
    Root,
    Seed,
    Size,
    Std,
    Weights,
)
from xmoco.cli.output import progress_bars, show_classification, show_detection, show_records

if TYPE_CHECKING:
    from xmoco.evaluate.evaluation import EvalOptions

evaluate = typer.Typer(
    help="Judge a backbone. Every number is a record that names its protocol.", no_args_is_help=True
)


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
    show_records(f"kNN on {found[0].protocol['data']}", rows, records)


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
    show_classification(found, records)


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
    show_classification(found, records)


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
        show_records(
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
    show_detection(found, summary(found), records)


def _eval_options(cache: bool = False, **given: Any) -> "EvalOptions":
    from xmoco.evaluate.cache import default_cache
    from xmoco.evaluate.evaluation import EvalOptions

    return EvalOptions(
        cache=default_cache() if cache else None,
        command=shlex.join(["xmoco", *sys.argv[1:]]),
        **given,
    )
