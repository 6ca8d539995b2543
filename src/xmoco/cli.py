"""The command line: one verb per command, no logic. Heavy imports wait until a command runs."""

import os
import sys
from pathlib import Path
from typing import Annotated

# torch's CPU threads spin while they wait; on a busy machine that makes every operation a hundred
# times slower. A short spin costs nothing when the machine is free.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

import typer
from rich.console import Console
from rich.table import Table

app = typer.Typer(
    help="Turn unlabelled images into a strong vision backbone, and measure how strong it is.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)
evaluate = typer.Typer(
    help="Judge a backbone. Every number is a record that names its protocol.", no_args_is_help=True
)
app.add_typer(evaluate, name="evaluate")


@app.command(
    epilog="Examples: `xmoco pretrain --recipe demo epochs=3` · "
    "`xmoco pretrain --recipe cifar10 --data torchvision:CIFAR10 download=true` · "
    "`xmoco pretrain --recipe imagenette --data ~/photos --out runs/photos batch=256` · "
    "`xmoco pretrain --resume --out runs/photos`"
)
def pretrain(
    settings: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]...",
            help="Changes to the recipe, e.g. `epochs=100 batch=256`; `xmoco settings` lists them.",
        ),
    ] = None,
    recipe: Annotated[
        str | None,
        typer.Option(
            "--recipe",
            "-r",
            help="`demo`, `cifar10`, `imagenette`, `imagenet` (the paper's settings), or a yaml "
            "file. Default: `imagenet`.",
        ),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            help="Images: a folder of any depth, a .tar, .tar.gz or .tar.xz, `patterns` "
            "(embedded), or `torchvision:NAME`. Default: the recipe's."
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="The run folder; must be new unless resumed. Default: under `runs`."),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the interrupted run in --out, exactly.")
    ] = False,
    weights: Annotated[
        Path | None,
        typer.Option(help="Start a new run from the backbone of another run (folder or file)."),
    ] = None,
) -> None:
    """Train a backbone on images, without labels, and leave weights and a report.

    Everything a run depends on is a setting with a name; a recipe is a set of them. The run folder
    holds the configuration, metrics, checkpoints, `backbone.safetensors` and `report.html`.
    """
    from xmoco.pretraining import pretrain as run

    result = run(
        recipe or (None if resume else "imagenet"),
        data=data,
        out=out,
        resume=resume,
        weights=weights,
        overrides=settings or [],
    )
    if _first_process():
        _print(f"\nweights  {result.weights}\nreport   {result.report}")


@evaluate.command(
    epilog="Example: `xmoco evaluate knn runs/demo/xmoco patterns` · "
    "`xmoco evaluate knn backbone.safetensors photos/ --k 20`"
)
def knn(
    weights: Annotated[Path, typer.Argument(help="A run folder or a backbone.safetensors.")],
    data: Annotated[
        str,
        typer.Argument(
            help="Labelled images: a folder or archive with one subfolder per class (in train/ and "
            "val/, if there are two splits), `patterns`, or `torchvision:NAME`."
        ),
    ],
    k: Annotated[
        list[int] | None, typer.Option("--k", help="Neighbours that vote; may be given repeatedly.")
    ] = None,
    temperature: Annotated[float, typer.Option(help="Votes weigh exp(similarity / this).")] = 0.1,
    device: Annotated[str, typer.Option(help="`auto`, `cpu`, `cuda` or `mps`.")] = "auto",
    records: Annotated[
        Path | None, typer.Option(help="Append the records to this .jsonl file.")
    ] = None,
) -> None:
    """Weighted k-nearest-neighbour accuracy of frozen features.

    Test images are judged by training images; with one split only, each image by all the others.
    """
    from xmoco.evaluate.judge import evaluate_knn
    from xmoco.records import append_records

    found = evaluate_knn(
        weights, data, ks=k or (10, 20, 100, 200), temperature=temperature, device=device
    )
    protocol = found[0].protocol
    table = Table(title=f"kNN on {protocol['data']}, {protocol['split']}", title_justify="left")
    table.add_column("k", justify="right")
    table.add_column("top-1", justify="right")
    for record in found:
        table.add_row(str(record.protocol["k"]), f"{record.value:.2f} %")
    Console().print(table)
    if records is not None:
        append_records(records, found)


@app.command(
    epilog="Examples: `xmoco export runs/photos --to timm` · "
    "`xmoco export backbone.safetensors --to onnx --out photos.onnx`"
)
def export(
    weights: Annotated[Path, typer.Argument(help="A run folder or a backbone.safetensors.")],
    to: Annotated[str, typer.Option(help="`torchvision`, `timm`, `detectron2` or `onnx`.")],
    out: Annotated[
        Path | None, typer.Option(help="The new file. Default: beside the weights.")
    ] = None,
) -> None:
    """Write the weights for another program.

    The file is read back as that program does, and kept only if it gives the same features.
    """
    from xmoco.export import export as write_export
    from xmoco.export import how_to_load

    path = write_export(weights, to, out)
    _print(f"weights  {path}\n\n{how_to_load(weights, to, path)}")


@app.command()
def demo(
    out: Annotated[
        Path | None, typer.Option(help="Where the two runs go. Default: a new `runs/demo`.")
    ] = None,
) -> None:
    """Train XMoCo and MoCo v2+ on the embedded patterns and compare them; minutes on a CPU."""
    from xmoco.demo import run_demo

    run_demo(out)


@app.command()
def settings(
    recipe: Annotated[
        str | None, typer.Option("--recipe", "-r", help="Show the values of this recipe.")
    ] = None,
) -> None:
    """List every setting with its value in a recipe (default: `imagenet`) and its meaning."""
    from xmoco.config import load_config, setting_descriptions

    config = load_config(recipe or "imagenet")
    for section, fields in setting_descriptions(config).items():
        table = Table(title=section, title_justify="left", box=None, padding=(0, 2))
        for name in ("key", "value", "meaning"):
            table.add_column(name, overflow="fold")
        for key, value, meaning in fields:
            table.add_row(key, value, meaning)
        Console().print(table, "")


def main() -> None:
    """Run a command; a user's mistake is one sentence and exit status 2."""
    from xmoco.errors import Interrupted, UserError

    try:
        app()
    except UserError as error:
        _fail(str(error), status=2)
    except Interrupted as stop:
        if not _first_process():
            sys.exit(0)
        _fail(str(stop), status=128 + stop.signal_number)
    except KeyboardInterrupt:
        _fail("stopped.", status=130)
    except OSError as error:
        if error.filename is None and error.errno is None:
            raise
        where = f": {error.filename}" if error.filename else ""
        _fail(f"{error.strerror or error}{where}.", status=2)


def _fail(sentence: str, status: int) -> None:
    if _first_process():
        print(f"xmoco: {sentence}", file=sys.stderr)
    sys.exit(status)


def _print(text: str) -> None:
    Console().print(text, markup=False, highlight=False, soft_wrap=True)


def _first_process() -> bool:
    return all(os.environ.get(name, "0") == "0" for name in ("LOCAL_RANK", "NODE_RANK", "RANK"))
