"""The commands ``xmoco evaluate …``: arguments in, records shown and kept; no logic."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from xmoco.cli.options import (
    PIXELS,
    PROCESSES,
    SETS,
    Batch,
    Cache,
    Device,
    HeadRate,
    Labelled,
    LabelledData,
    Mean,
    Out,
    RecordsFile,
    Seed,
    Std,
    Weights,
    takes_eval_options,
)
from xmoco.cli.output import progress_bars, show_classification, show_detection, show_records

if TYPE_CHECKING:
    from xmoco.evaluate.evaluation import EvalOptions

HeldOut = Annotated[
    float | None,
    typer.Option(
        "--held-out",
        metavar="SHARE",
        help="For images without a test split: the share of every class, e.g. 0.2, that is not "
        "trained on but evaluated on. The selection is deterministic: see docs/evaluation.md.",
    ),
]

END_TO_END = PROCESSES | {
    "devices": Annotated[
        int,
        typer.Option(
            help="Number of processes, one device each, among which every batch is split; "
            "end-to-end only. Each uses the batch statistics of its own part."
        ),
    ],
    "precision": Annotated[
        str,
        typer.Option(help="`fp32` or `bf16`, end-to-end only; frozen features always use `fp32`."),
    ],
}
DETECTION = PROCESSES | {
    "devices": Annotated[
        int,
        typer.Option(
            help="Number of processes, one device each, among which every batch is split. On CUDA, "
            "batch statistics are synchronised."
        ),
    ]
}

evaluate = typer.Typer(
    help="Evaluate a backbone by kNN, linear classification, fine-tuning, transfer or detection.",
    no_args_is_help=True,
)


@evaluate.command(
    epilog="Examples:\n\n"
    "`xmoco evaluate knn runs/demo/xmoco patterns`\n\n"
    "`xmoco evaluate knn backbone.safetensors photos/ --k 20`"
)
@takes_eval_options(**PIXELS, device=Device, **SETS, cache=Cache)
def knn(
    weights: Weights,
    data: LabelledData,
    k: Annotated[
        list[int] | None,
        typer.Option(
            "--k",
            help="Number of neighbours; can be given several times. Default: 10, 20, 100 and 200.",
        ),
    ] = None,
    temperature: Annotated[
        float,
        typer.Option(
            help="A neighbour's vote has the weight exp(cosine similarity / temperature)."
        ),
    ] = 0.1,
    *,
    options: "EvalOptions",
    records: RecordsFile = None,
) -> None:
    """Weighted k-nearest-neighbour accuracy on frozen features.

    Neighbours of test images are searched among the training images; with a single split, among
    all other images (leave-one-out).
    """
    from xmoco.evaluate.classification import evaluate_knn

    with progress_bars() as listener:
        found = evaluate_knn(
            weights,
            data,
            ks=k or (10, 20, 100, 200),
            temperature=temperature,
            options=options,
            listener=listener,
        )
    rows = [(f"top-1, k = {record.protocol['k']}", record) for record in found]
    show_records(f"kNN on {found[0].protocol['data']}", rows, records)


@evaluate.command(
    epilog="Examples:\n\n"
    "`xmoco evaluate linear runs/cifar10 torchvision:CIFAR10 --preset moco`\n\n"
    "`xmoco evaluate linear moco_v2_800ep.pth.tar imagenet/ --devices 8 --precision bf16`"
)
@takes_eval_options(**PIXELS, device=Device, **PROCESSES, **SETS)
def linear(
    weights: Weights,
    data: LabelledData,
    preset: Annotated[
        str,
        typer.Option(
            help="Hyperparameters: `paper` (batch 512, learning rate 60, weight decay 1e-4) or "
            "`moco` (batch 256, learning rate 30, no weight decay)."
        ),
    ] = "paper",
    epochs: Annotated[
        int | None,
        typer.Option(
            help="Training epochs. Default: 100, as in the protocol; recorded if changed."
        ),
    ] = None,
    batch: Batch = None,
    head_rate: HeadRate = None,
    held_out: HeldOut = None,
    seed: Seed = 0,
    out: Out = None,
    *,
    options: "EvalOptions",
    records: RecordsFile = None,
) -> None:
    """Accuracy of a linear classifier on the frozen backbone.

    It is trained with random crops and flips, and evaluated on centre crops of the test split.
    """
    from xmoco.evaluate.classification import evaluate_linear

    with progress_bars() as listener:
        found = evaluate_linear(
            weights,
            data,
            preset=preset,
            epochs=epochs,
            batch=batch,
            head_rate=head_rate,
            held_out=held_out,
            seed=seed,
            out=out,
            options=options,
            listener=listener,
        )
    show_classification(found, records)


@evaluate.command(
    epilog="Example: `xmoco evaluate finetune runs/cifar10 torchvision:CIFAR10 --fraction 0.1`"
)
@takes_eval_options(**PIXELS, device=Device, **PROCESSES, **SETS)
def finetune(
    weights: Weights,
    data: LabelledData,
    fraction: Annotated[
        float,
        typer.Option(
            help="Fraction of the labelled images of every class to train on, e.g. 0.01. The "
            "selection is deterministic: see docs/evaluation.md."
        ),
    ] = 1.0,
    epochs: Annotated[
        int | None,
        typer.Option(help="Training epochs. Default: 20, as in the protocol; recorded if changed."),
    ] = None,
    batch: Batch = None,
    head_rate: HeadRate = None,
    backbone_rate: Annotated[
        float | None,
        typer.Option(
            help="Learning rate of the backbone, whatever the batch. Default: 0.01, as in the "
            "protocol; recorded if changed."
        ),
    ] = None,
    held_out: HeldOut = None,
    seed: Seed = 0,
    out: Out = None,
    *,
    options: "EvalOptions",
    records: RecordsFile = None,
) -> None:
    """Accuracy after fine-tuning the whole network on all labels or a fraction of them."""
    from xmoco.evaluate.classification import evaluate_finetune

    with progress_bars() as listener:
        found = evaluate_finetune(
            weights,
            data,
            fraction=fraction,
            epochs=epochs,
            batch=batch,
            head_rate=head_rate,
            backbone_rate=backbone_rate,
            held_out=held_out,
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
@takes_eval_options(**PIXELS, device=Device, **END_TO_END, **SETS, cache=Cache)
def transfer(
    context: typer.Context,
    weights: Weights,
    data: Annotated[
        list[str],
        typer.Argument(
            metavar="SET",
            help="One or more of the paper's data sets: `aircraft`, `caltech101`, `cars`, "
            "`cifar10`, `cifar100`, `dtd`, `flowers`, `pets`, `sun397`, `voc2007`, or `all` ten; "
            "or your own labelled images (a folder or archive with train/, test/ and optionally "
            "val/).",
        ),
    ],
    mode: Annotated[
        str,
        typer.Option(
            help="`frozen` (logistic regression on frozen features) or `end-to-end` (the backbone "
            "is fine-tuned)."
        ),
    ] = "frozen",
    grid: Annotated[
        str,
        typer.Option(
            help="Learning rates and weight decays to search, end-to-end only: `paper` (110 points "
            "of 5,000 steps) or `small` (6 of 1,000)."
        ),
    ] = "paper",
    metric: Annotated[
        str | None,
        typer.Option(
            help="Metric for your own images: `top-1` or `mean per class`. Default: `top-1`."
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder for finished grid points and checkpoints, end-to-end only, with a "
            "subfolder per data set. The same command resumes an interrupted search. "
            "Default: under `runs/transfer`."
        ),
    ] = None,
    seed: Annotated[
        int,
        typer.Option(
            help="Random seed of image order, crops and initial weights, end-to-end only."
        ),
    ] = 0,
    *,
    options: "EvalOptions",
    records: RecordsFile = None,
) -> None:
    """Accuracy on other data sets: the paper's ten, or your own images.

    Hyperparameters are selected on validation images; the classifier is then retrained with these
    included and evaluated once on the test images.
    """
    from xmoco.data.transfer_sets import TRANSFER_SETS, open_transfer_sets
    from xmoco.evaluate.transfer import evaluate_transfer

    if mode == "frozen":
        _refuse_options_of_training(context)
    names = [name for given in data for name in (TRANSFER_SETS if given == "all" else [given])]
    # All are opened first: a mistake in the last should not come out hours later.
    for images in open_transfer_sets(
        names, root=options.root, download=options.download, metric=metric
    ):
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
@takes_eval_options(mean=Mean, std=Std, labelled=Labelled, device=Device, **DETECTION)
def detect(
    weights: Annotated[
        str,
        typer.Argument(
            help="A run folder, a file of weights, `torchvision:NAME` (pre-trained with labels), "
            "or `scratch:NAME` (randomly initialised)."
        ),
    ],
    data: Annotated[
        str,
        typer.Argument(
            help="Images with bounding boxes, in two splits: a folder or archive with COCO "
            "annotations (instances_train.json, instances_val.json) or in PASCAL VOC's layout, or "
            "a YOLO YAML file."
        ),
    ],
    model: Annotated[
        str,
        typer.Option(
            help="The detector: `faster-rcnn-c4`, `faster-rcnn-fpn`, `mask-rcnn-c4`, "
            "`mask-rcnn-fpn` or `retinanet-fpn`."
        ),
    ] = "faster-rcnn-fpn",
    schedule: Annotated[
        str,
        typer.Option(
            help="Training length: `1x` (COCO's 90,000 steps), `2x`, `3x`, `voc-12k`, `voc-24k`, "
            "or a number of steps such as `2000-steps`."
        ),
    ] = "1x",
    batch: Annotated[
        int, typer.Option(help="Images per step; the learning rate is scaled in proportion.")
    ] = 16,
    size: Annotated[
        int | None,
        typer.Option(
            help="Shorter side of the images in testing, in pixels; in training it varies below "
            "this, as the schedule says. Default: 800."
        ),
    ] = None,
    looks: Annotated[
        int,
        typer.Option(
            help="About how often AP is measured during training, on up to 500 validation images, "
            "for the report's curve; 0: never, which is faster."
        ),
    ] = 10,
    seed: Annotated[
        int,
        typer.Option(
            help="Random seed of image order, sizes, flips and the initial weights of new layers."
        ),
    ] = 0,
    seeds: Annotated[
        int,
        typer.Option(
            help="Number of detectors to train, with consecutive seeds from --seed on; the mean "
            "and standard deviation are printed."
        ),
    ] = 1,
    out: Annotated[
        Path | None,
        typer.Option(
            help="The run folder, with checkpoints, metrics, report and detector; with --seeds, it "
            "has a subfolder for each, `seed-0`, `seed-1` … The same command resumes an "
            "interrupted run. Default: under `runs/detect`, one for each combination of weights, "
            "images and settings."
        ),
    ] = None,
    *,
    options: "EvalOptions",
    records: RecordsFile = None,
) -> None:
    """Average precision of an object detector that is fine-tuned on the backbone.

    Boxes, and masks if the model predicts them, are evaluated with COCO's metrics or, for data in
    PASCAL VOC's layout, with VOC's.
    """
    from xmoco.detect.evaluation import evaluate_detect, summary

    with progress_bars() as listener:
        found = evaluate_detect(
            weights,
            data,
            model=model,
            schedule=schedule,
            seeds=range(seed, seed + seeds),
            batch=batch,
            looks=looks,
            out=out,
            options=replace(options, size=size),
            listener=listener,
        )
    show_detection(found, summary(found), records)


def _refuse_options_of_training(context: typer.Context) -> None:
    """Options of ``transfer`` that have no effect on frozen features, which train no backbone."""
    from xmoco.errors import UserError

    for name in ("grid", "out", "seed", "precision"):
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            raise UserError(
                f"--{name} is for end-to-end transfer only: leave it out, or give "
                "--mode end-to-end."
            )
