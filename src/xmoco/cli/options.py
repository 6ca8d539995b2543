"""Arguments and options that several commands have."""

import os
from pathlib import Path
from typing import Annotated, Any

import typer

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
