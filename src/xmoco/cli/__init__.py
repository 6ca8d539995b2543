"""The command line: one verb per command, no logic. Heavy imports wait until a command runs."""

import os
import re
import signal
import sys
import warnings
from pathlib import Path
from typing import Annotated, NoReturn

# torch's CPU threads spin while they wait; on a busy machine that makes every operation a hundred
# times slower. A short spin costs little when the machine is free: see ``nn/two_threads.py``.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from xmoco.cli.evaluate import evaluate
from xmoco.cli.output import print_plain, progress_bars
from xmoco.cli.tables import tables
from xmoco.launchers import PREEMPTING, first_process
from xmoco.text import printable

LONGEST_SENTENCE = 4000
"""Letters: beyond that nobody reads, and what was wrong scrolls away."""
STOPPED = (
    "stopped; a pre-training that has begun goes on with --resume, an evaluation or a table with "
    "the same command."
)

app = typer.Typer(
    help="Turn unlabelled images into a strong vision backbone, and measure how strong it is.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(evaluate, name="evaluate")
app.add_typer(tables, name="tables")


@app.command(
    epilog="Examples:\n\n"
    "`xmoco pretrain --data ~/photos --out runs/photos`\n\n"
    "`xmoco pretrain --data ~/photos --dry-run`\n\n"
    "`xmoco pretrain --recipe demo epochs=3`\n\n"
    "`xmoco pretrain --recipe cifar10 --data torchvision:CIFAR10 download=true`\n\n"
    "`xmoco pretrain --resume --out runs/photos`"
)
def pretrain(
    settings: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY=VALUE",
            help="Changes to the recipe, e.g. `epochs=100 batch=256`; `xmoco settings` lists them.",
        ),
    ] = None,
    recipe: Annotated[
        str | None,
        typer.Option(
            "--recipe",
            "-r",
            help="`auto` looks at your images and the device, chooses, and says why; or `demo`, "
            "`cifar10`, `imagenette`, `imagenet` (the paper's settings), a method's name for its "
            "published settings (`byol`), or a yaml file. Default: `auto`.",
        ),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            help="Images: a folder of any depth, a .tar, .tar.gz or .tar.xz, tar or Parquet shards "
            "(a folder, `'name-{000..127}.tar'`, `s3://…`), `patterns` (embedded), or "
            "`torchvision:NAME`. Default: the recipe's; `auto` has none."
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
    skip_bad_steps: Annotated[
        bool,
        typer.Option(
            "--skip-bad-steps",
            help="Leave out steps whose loss is no number or out of all proportion, instead of "
            "ending there; also with --resume.",
        ),
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Say what would be done and how long it would take, and do nothing."
        ),
    ] = False,
) -> None:
    """Train a backbone on images, without labels, and leave weights and a report.

    Everything a run depends on is a setting with a name; a recipe is a set of them. The run folder
    holds the configuration, metrics, checkpoints, `backbone.safetensors` and `report.html`.
    """
    from xmoco.asked import Asked
    from xmoco.errors import UserError

    if dry_run and (resume or weights or out):
        raise UserError("--dry-run does nothing, so --out, --resume and --weights go without.")
    settings = [*(settings or []), *(["skip_bad_steps=true"] if skip_bad_steps else [])]
    if not resume:  # mistakes are told before the seconds that importing torch takes
        Asked(recipe, tuple(settings), {}).run_config()

    from xmoco.planning import show_plan
    from xmoco.pretraining import pretrain as run

    if dry_run:
        show_plan(recipe, data=data, overrides=settings)
        return
    result = run(
        recipe,
        data=data,
        out=out,
        resume=resume,
        weights=weights,
        overrides=settings,
    )
    if first_process():
        print_plain(f"\nweights  {result.weights}\nreport   {result.report}")


@app.command(
    epilog="Examples:\n\n"
    "`xmoco export runs/photos --to timm`\n\n"
    "`xmoco export backbone.safetensors --to onnx --out photos.onnx`"
)
def export(
    weights: Annotated[
        Path, typer.Argument(help="A run folder, or a file of weights (ours or a checkpoint).")
    ],
    to: Annotated[str, typer.Option(help="`torchvision`, `timm`, `detectron2` or `onnx`.")],
    out: Annotated[
        Path | None, typer.Option(help="The new file. Default: beside the weights.")
    ] = None,
    configs: Annotated[
        Path | None,
        typer.Option(
            help="For Detectron2: a new folder for configuration files, one for every detector and "
            "schedule of `xmoco evaluate detect`."
        ),
    ] = None,
) -> None:
    """Write the weights for another program.

    The file is read back as that program does, and kept only if it gives the same features.
    """
    from xmoco.export import export as write_export
    from xmoco.export import how_to_load

    path = write_export(weights, to, out, configs)
    if configs is not None:
        print_plain(f"configs  {configs}")
    print_plain(f"weights  {path}\n\n{how_to_load(weights, to, path)}")


@app.command(
    epilog="Examples:\n\n"
    "`xmoco detect runs/street photo.jpg`\n\n"
    "`xmoco detect runs/street photos/ --out found --threshold 0.7`"
)
def detect(
    weights: Annotated[
        Path,
        typer.Argument(help="A folder of `xmoco evaluate detect`, or its detector.safetensors."),
    ],
    images: Annotated[str, typer.Argument(help="A picture, a folder of any depth, or an archive.")],
    out: Annotated[
        Path, typer.Option(help="The new folder, for detections.json and the drawn pictures.")
    ] = Path("detections"),
    threshold: Annotated[
        float, typer.Option(help="The score from which something counts as found, 0 to 1.")
    ] = 0.5,
    device: Annotated[str, typer.Option(help="`auto`, `cpu`, `cuda` or `mps`.")] = "auto",
) -> None:
    """Find things in pictures with a detector that was tuned before."""
    from xmoco.detect.finding import detect as find

    with progress_bars() as listener:
        found = find(
            weights,
            images,
            out=out,
            threshold=threshold,
            device=device,
            on_progress=lambda done, total: listener.progress("pictures", done, total),
            say=listener.say,
        )
    objects = "1 object" if found.objects == 1 else f"{found.objects:,} objects"
    pictures = "1 picture" if found.images == 1 else f"{found.images:,} pictures"
    print_plain(f"{objects} in {pictures}: {found.json}")


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
    from xmoco.settings import load_config, setting_descriptions

    config = load_config(recipe or "imagenet")
    for section, fields in setting_descriptions(config).items():
        table = Table(title=section, title_justify="left", box=None, padding=(0, 2))
        for name in ("key", "value", "meaning"):
            table.add_column(name, overflow="fold")
        for row in fields:
            table.add_row(*(Text(printable(cell)) for cell in row))  # no markup, whatever it holds
        Console().print(table, "")


def main() -> None:
    """Run a command; a user's mistake is one sentence and exit status 2."""
    from xmoco.errors import TRY_AGAIN, Interrupted, UserError

    # Of an odd image Pillow says something before it is read or refused, which we tell ourselves.
    warnings.filterwarnings("ignore", module=r"PIL\b")
    # While a run trains, it handles these itself and saves; this is for before and after.
    for number in PREEMPTING:
        signal.signal(number, lambda *_: _fail(STOPPED, status=TRY_AGAIN))
    try:
        app()
    except SystemExit as end:
        if end.code == 130:  # typer's answer to Ctrl-C
            _fail(STOPPED, status=130)
        raise
    except UserError as error:
        _fail(str(error), status=error.status, alone=error.alone)
    except Interrupted as stop:
        _fail(str(stop), status=stop.status if first_process() else 0)
    except OSError as error:
        if error.errno is None:
            raise
        where = f": {error.filename}" if error.filename else ""
        _fail(f"{error.strerror}{where}.", status=2)
    except Exception as error:
        memory = _short_of_memory(error)
        if memory is not None:
            _fail(memory, status=2, alone=True)
        if not _lost_partner(error):
            raise
        _fail("another process of this run has ended; it says why.", status=1)


def _lost_partner(error: Exception) -> bool:
    """Whether a collective operation failed because another process is gone."""
    torch = sys.modules.get("torch")
    several = torch is not None and torch.distributed.is_initialized()
    return bool(several and isinstance(error, RuntimeError))


def _short_of_memory(error: Exception) -> str | None:
    """What to do, where the device or the host had too little memory."""
    torch = sys.modules.get("torch")
    on_device = torch is not None and isinstance(error, torch.OutOfMemoryError)
    reason = str(error).partition(". ")[0]
    if not on_device and not isinstance(error, MemoryError):
        found = re.search(r"tried to allocate (\d+) bytes", str(error))
        if found is None:
            return None
        reason = f"{int(found[1]) / 2**30:.1f} GiB more were wanted"
    what = "the device" if on_device else "the machine"
    return (
        f"{what} ran out of memory ({reason or 'more was wanted'}): lower batch, size or "
        "preload_gib, or raise accumulate."
    )


def _fail(sentence: str, status: int, alone: bool = False) -> NoReturn:
    """Say why and end. Of several processes the first speaks, unless only this one knows."""
    if alone or first_process():
        if len(sentence) > LONGEST_SENTENCE:
            sentence = f"{sentence[:LONGEST_SENTENCE]} …"
        print(f"xmoco: {printable(sentence)}", file=sys.stderr)
    sys.exit(status)
