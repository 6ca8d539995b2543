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
from xmoco.cli.options import Device, Mean, Pictures, Std, TakesSettings, Weights
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
    help="Pre-train vision backbones on unlabelled images, and evaluate them.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(evaluate, name="evaluate")
app.add_typer(tables, name="tables")


def _show_version(asked: bool) -> None:
    if asked:
        from xmoco import __version__

        print_plain(__version__)
        raise typer.Exit


@app.callback()
def everywhere(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    pass  # the help is the application's own


@app.command(
    cls=TakesSettings,
    epilog="Examples:\n\n"
    "`xmoco pretrain --data ~/photos --out runs/photos`\n\n"
    "`xmoco pretrain --data ~/photos --dry-run`\n\n"
    "`xmoco pretrain --recipe demo epochs=3`\n\n"
    "`xmoco pretrain --recipe cifar10 --data torchvision:CIFAR10 download=true`\n\n"
    "`xmoco pretrain --resume --out runs/photos`",
)
def pretrain(
    settings: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY=VALUE",
            help="Overrides of the recipe's settings, e.g. `epochs=100 batch=256`; `xmoco "
            "settings` lists all settings.",
        ),
    ] = None,
    recipe: Annotated[
        str | None,
        typer.Option(
            "--recipe",
            "-r",
            help="A predefined set of settings: `demo`, `cifar10`, `imagenette`, `imagenet` (the "
            "paper's), the name of another method (`byol`), or a YAML file. `auto` chooses "
            "settings that suit your images and the device, and prints the reasons. "
            "Default: `auto`.",
        ),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            help="Training images: a folder of any depth, a .tar, .tar.gz or .tar.xz, tar or "
            "Parquet shards (a folder, `'name-{000..127}.tar'`, `s3://…`), `torchvision:NAME`, or "
            "`patterns` (built-in synthetic images). Default: the recipe's; `auto` has none."
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="The run folder, which must not exist unless --resume is given. Default: a new "
            "one under `runs`."
        ),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Continue the interrupted run in --out where it stopped."),
    ] = False,
    weights: Annotated[
        Path | None,
        typer.Option(
            help="Initialise the backbone with these weights: a run folder, a file or a model by "
            "name (`torchvision:resnet50`). Without a recipe, backbone, stem, mean and std are "
            "theirs; a recipe's backbone must be the same."
        ),
    ] = None,
    skip_bad_steps: Annotated[
        bool,
        typer.Option(
            "--skip-bad-steps",
            help="Skip steps whose loss is NaN, infinite or far above its previous level, instead "
            "of stopping there; also with --resume.",
        ),
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Print the plan and the estimated training time, without training."
        ),
    ] = False,
) -> None:
    """Pre-train a backbone on images without labels.

    A recipe is a predefined set of settings, and KEY=VALUE overrides any of them. The run folder
    contains the configuration, metrics, checkpoints, `backbone.safetensors` and `report.html`.
    """
    from xmoco.asked import Asked
    from xmoco.errors import UserError

    if dry_run and (resume or out):
        raise UserError("--dry-run does nothing, so --out and --resume go without.")
    settings = [*(settings or []), *(["skip_bad_steps=true"] if skip_bad_steps else [])]
    if not resume:  # mistakes are told before the seconds that importing torch takes
        Asked(recipe, tuple(settings), {}).run_config()

    from xmoco.planning import show_plan
    from xmoco.pretraining import pretrain as run

    if dry_run:
        show_plan(recipe, data=data, weights=weights, overrides=settings)
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
        Path,
        typer.Argument(help="A run folder, or a file of weights (xmoco's or a public checkpoint)."),
    ],
    to: Annotated[
        str, typer.Option(help="The target: `torchvision`, `timm`, `detectron2` or `onnx`.")
    ],
    out: Annotated[
        Path | None, typer.Option(help="The file to write. Default: next to the weights.")
    ] = None,
    configs: Annotated[
        Path | None,
        typer.Option(
            help="With `--to detectron2`: a new folder for Detectron2 configuration files, one per "
            "model and schedule of `xmoco evaluate detect`."
        ),
    ] = None,
    backbone: Annotated[
        bool,
        typer.Option(
            "--backbone",
            help="Of a classifier (from `xmoco evaluate finetune` or `linear`), export the "
            "backbone alone. Detectron2 always gets the backbone.",
        ),
    ] = False,
) -> None:
    """Convert weights for another library: a backbone, or a classifier with its classes.

    The new file is read back and kept only if it gives the same features or scores.
    """
    from xmoco.export import export_weights, how_to_load

    path = export_weights(weights, to, out, configs, backbone_only=backbone)
    if configs is not None:
        print_plain(f"configs  {configs}")
    how = how_to_load(weights, to, path, backbone_only=backbone)
    print_plain(f"weights  {path}\n\n{how}")


@app.command(
    epilog="Examples:\n\n"
    "`xmoco embed runs/photos ~/photos`\n\n"
    "`xmoco embed torchvision:resnet50 photos.tar --out photos.npz`"
)
def embed(
    weights: Weights,
    images: Pictures,
    out: Annotated[Path, typer.Option(help="The file to write, which NumPy can load.")] = Path(
        "features.npz"
    ),
    size: Annotated[
        int | None,
        typer.Option(
            help="Side length in pixels at which images are shown. Default: as in evaluations of "
            "these weights."
        ),
    ] = None,
    mean: Mean = None,
    std: Std = None,
    device: Device = "auto",
) -> None:
    """Write the feature vector of every image to a file, for search, clustering or a classifier.

    Images are resized, cropped and normalised as in evaluation. The file has `names`, relative to
    the folder or archive, and `features`, whose vectors are not of unit length.
    """
    from xmoco.embedding import embed as embedded
    from xmoco.embedding import how_to_load
    from xmoco.evaluate.evaluation import EvalOptions
    from xmoco.files import expect_free

    options = EvalOptions(device, size=size, mean=mean, std=std)
    expect_free(out, ".npz", "a file of NumPy")
    with progress_bars() as listener:
        found = embedded(weights, images, options=options, listener=listener)
    found.save(out)
    count, length = found.features.shape
    vectors = "1 vector" if count == 1 else f"{count:,} vectors"
    print_plain(f"{vectors} of {length:,} numbers: {out}\n\n{how_to_load(out)}")


@app.command(
    epilog="Examples:\n\n"
    "`xmoco classify runs/cats photo.jpg`\n\n"
    "`xmoco classify runs/cats ~/photos --out photos.csv --top 3`"
)
def classify(
    classifier: Annotated[
        Path,
        typer.Argument(
            help="A run folder of `xmoco evaluate finetune` or `linear`, or its "
            "classifier.safetensors."
        ),
    ],
    images: Pictures,
    out: Annotated[
        Path, typer.Option(help="The CSV file to write, with a line for every image.")
    ] = Path("classes.csv"),
    top: Annotated[
        int, typer.Option(help="How many classes to give for every image, most likely first.")
    ] = 1,
    device: Device = "auto",
) -> None:
    """Classify images with a classifier trained by `xmoco evaluate finetune` or `linear`."""
    from xmoco.classifying import check_top
    from xmoco.classifying import classify as classified
    from xmoco.files import expect_free

    check_top(top)
    expect_free(out, ".csv", "a table of comma-separated values")
    with progress_bars() as listener:
        found = classified(classifier, images, device=device, listener=listener)
    found.save(out, top)
    counted = "1 image" if len(found.names) == 1 else f"{len(found.names):,} images"
    print_plain(f"{counted} ({found.counted()}), written to {out}")


@app.command(
    epilog="Examples:\n\n"
    "`xmoco detect runs/street photo.jpg`\n\n"
    "`xmoco detect runs/street photos/ --out found --threshold 0.7`"
)
def detect(
    weights: Annotated[
        Path,
        typer.Argument(
            help="A run folder of `xmoco evaluate detect`, or its detector.safetensors."
        ),
    ],
    images: Pictures,
    out: Annotated[
        Path, typer.Option(help="A new folder for detections.json and the annotated images.")
    ] = Path("detections"),
    threshold: Annotated[
        float, typer.Option(help="Lowest score, from 0 to 1, of the detections to keep.")
    ] = 0.5,
    device: Device = "auto",
) -> None:
    """Detect objects in images with a detector trained by `xmoco evaluate detect`."""
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
    pictures = "1 image" if found.images == 1 else f"{found.images:,} images"
    print_plain(f"{objects} in {pictures}: {found.json}")


@app.command()
def demo(
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder for the two runs: a new one, or that of an interrupted demo, which is "
            "continued. Default: `runs/demo`."
        ),
    ] = None,
) -> None:
    """Compare XMoCo and MoCo v2+ on synthetic images; takes a few minutes on a CPU."""
    from xmoco.demo import run_demo

    run_demo(out)


@app.command()
def settings(
    recipe: Annotated[
        str | None,
        typer.Option(
            "--recipe", "-r", help="The recipe whose values to show. Default: `imagenet`."
        ),
    ] = None,
) -> None:
    """List every setting with its value in a recipe and its meaning."""
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
        options = getattr(error, "with_options", None) if sys.argv[1:2] == ["evaluate"] else None
        _fail(options or str(error), status=error.status, only_here=error.only_here)
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
            _fail(memory, status=2, only_here=True)
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


def _fail(sentence: str, status: int, only_here: bool = False) -> NoReturn:
    """Say why and end. Of several processes the first speaks, unless only this one knows."""
    if only_here or first_process():
        if len(sentence) > LONGEST_SENTENCE:
            sentence = f"{sentence[:LONGEST_SENTENCE]} …"
        print(f"xmoco: {printable(sentence)}", file=sys.stderr)
    sys.exit(status)
