"""Arguments and options that several commands have."""

import functools
import inspect
import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, cast

import typer
import typer.core


class TakesSettings(typer.core.TyperCommand):
    """Settings are arguments of it: who gives one as an option is told how it is given."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        given = list(args)
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            # By name, as typer's releases have the class in different places.
            if type(error).__name__ == "NoSuchOption":
                _tell_how_settings_are_given(str(getattr(error, "option_name", "")), given)
            raise


def _tell_how_settings_are_given(option: str, given: list[str]) -> None:
    from xmoco.errors import UserError
    from xmoco.settings import OTHER_NAMES, find_field

    key = option.lstrip("-").replace("-", "_")
    key = OTHER_NAMES.get(key, key)
    if find_field(key) is None:
        return
    value = "VALUE"
    for word, after in zip(given, [*given[1:], "-"], strict=True):
        if word.startswith(f"{option}="):
            value = word.partition("=")[2]
        elif word == option and not after.startswith("-"):
            value = after
    raise UserError(f"there is no option {option}: settings are given as {key}={value}.")


Weights = Annotated[
    str,
    typer.Argument(
        help="A run folder, a file of weights (xmoco's or a public checkpoint), "
        "`torchvision:NAME`, `timm:NAME`, or `scratch:NAME` (randomly initialised)."
    ),
]
LabelledData = Annotated[
    str,
    typer.Argument(
        help="Labelled images: a folder or archive with one subfolder per class, `patterns`, or "
        "`torchvision:NAME`. If there are two splits, train/ is the training set and val/ the test "
        "set, or test/ if there is no val/."
    ),
]
Pictures = Annotated[str, typer.Argument(help="An image, a folder of any depth, or an archive.")]
Device = Annotated[str, typer.Option(help="Where to compute: `auto`, `cpu`, `cuda` or `mps`.")]
Devices = Annotated[
    int,
    typer.Option(
        help="Number of processes, one device each, among which every batch is split. Results "
        "equal those of one process up to rounding, except that in fine-tuning each process uses "
        "the batch statistics of its own part."
    ),
]
Nodes = Annotated[
    int,
    typer.Option(help="Number of machines, with --devices each; run the command on every machine."),
]
Precision = Annotated[str, typer.Option(help="Floating-point precision: `fp32` or `bf16`.")]
Size = Annotated[
    int | None,
    typer.Option(
        help="Side length in pixels of random crops and of evaluation images. Default: as stored "
        "with the weights."
    ),
]
EvalSize = Annotated[
    int | None,
    typer.Option(
        help="Side length of evaluation images only; larger images than the crops may give better "
        "results. Default: --size or, without it, the eval_size of the weights' recipe."
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
        help="Channel means for normalisation (pixel values from 0 to 1) of weights trained "
        "elsewhere, e.g. `0.4914,0.4822,0.4465`. Default: guessed from their architecture; "
        "xmoco's own files contain them.",
    ),
]
Std = Annotated[
    Any,
    typer.Option(
        parser=_colour,
        metavar="R,G,B",
        help="Channel standard deviations for normalisation of weights trained elsewhere.",
    ),
]
Labelled = Annotated[
    bool | None,
    typer.Option(
        "--labelled/--unlabelled",
        help="Whether weights trained elsewhere were trained with labels, which is recorded. "
        "Default: yes if the file contains a classifier.",
    ),
]
Out = Annotated[
    Path | None,
    typer.Option(
        help="The run folder, with checkpoints, metrics and the classifier or detector, which "
        "`xmoco classify` or `xmoco detect` applies. The same command resumes an "
        "interrupted run, and evaluates a finished classifier without training it again. Default: "
        "under `runs/evaluate`, one for each combination of weights, images and settings."
    ),
]
Batch = Annotated[
    int | None,
    typer.Option(help="Images per step. Default: as in the protocol; recorded if changed."),
]
HeadRate = Annotated[
    float | None,
    typer.Option(
        help="Learning rate of the classifier, whatever the batch. Default: as in the protocol; "
        "recorded if changed."
    ),
]
Root = Annotated[str, typer.Option(help="Folder with torchvision data sets.")]
Download = Annotated[
    bool, typer.Option("--download", help="Download the torchvision data set if missing.")
]
Cache = Annotated[
    bool,
    typer.Option(
        "--cache/--no-cache",
        help="Cache features in `~/.cache/xmoco/features`, keyed by the content of weights and "
        "images.",
    ),
]
Seed = Annotated[int, typer.Option(help="Random seed of image order, crops and initial weights.")]


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
    typer.Option(
        "--records",
        callback=_writable,
        help="Append the results, with their protocol, to this .jsonl file.",
    ),
]

# Groups of options, by the names that ``EvalOptions`` has for them.
PIXELS = {"size": Size, "eval_size": EvalSize, "mean": Mean, "std": Std, "labelled": Labelled}
PROCESSES = {"devices": Devices, "nodes": Nodes, "precision": Precision}
SETS = {"root": Root, "download": Download}
# Those of ``EvalOptions``, whose module loads torch, for which the help should not wait.
DEFAULTS: dict[str, Any] = {
    "device": "auto",
    "devices": 1,
    "nodes": 1,
    "precision": "fp32",
    "root": "data",
    "download": False,
    "cache": True,
}


def takes_eval_options(**options: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """The command line has these options in place of the parameter ``options`` of a command, which
    gets an ``EvalOptions`` made of them."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        def run(**given: Any) -> None:
            from xmoco.evaluate.cache import default_cache
            from xmoco.evaluate.evaluation import EvalOptions

            chosen = {name: given.pop(name) for name in options}
            if "cache" in chosen:
                chosen["cache"] = default_cache() if chosen["cache"] else None
            called = shlex.join(["xmoco", *sys.argv[1:]])
            command(**given, options=EvalOptions(**chosen, command=called))

        parameters: list[inspect.Parameter] = []
        for parameter in inspect.signature(command).parameters.values():
            if parameter.name == "options":
                parameters += [
                    parameter.replace(name=name, annotation=kind, default=DEFAULTS.get(name))
                    for name, kind in options.items()
                ]
            else:
                parameters.append(parameter)
        shown: Any = functools.update_wrapper(run, command)
        # Typer reads both.
        shown.__signature__ = inspect.Signature(parameters)
        shown.__annotations__ = {each.name: each.annotation for each in parameters}
        return cast(Callable[..., None], shown)

    return decorate
