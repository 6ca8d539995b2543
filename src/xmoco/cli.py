"""The command line: one verb per command, no logic. Heavy imports wait until a command runs."""

import os
import shlex
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

# torch's CPU threads spin while they wait; on a busy machine that makes every operation a hundred
# times slower. A short spin costs little when the machine is free: see ``nn/two_threads.py``.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

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

if TYPE_CHECKING:
    from xmoco.evaluate.evaluation import EvalOptions, Listener
    from xmoco.records import Record

STOPPED = (
    "stopped; a pre-training that has begun goes on with --resume, an evaluation with the same "
    "command."
)

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
tables = typer.Typer(help="Draw the paper's tables from records.", no_args_is_help=True)
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
            "`cifar10`, `simclr`, `byol`, `swav`, `imagenette`, `imagenet` (the paper's settings), "
            "or a yaml file. Default: `auto`.",
        ),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            help="Images: a folder of any depth, a .tar, .tar.gz or .tar.xz, `patterns` "
            "(embedded), or `torchvision:NAME`. Default: the recipe's; `auto` has none."
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
    from xmoco.errors import UserError
    from xmoco.planning import show_plan
    from xmoco.pretraining import pretrain as run

    if dry_run:
        if resume or weights or out:
            raise UserError("--dry-run does nothing, so --out, --resume and --weights go without.")
        show_plan(recipe, data=data, overrides=settings or [])
        return
    result = run(
        recipe,
        data=data,
        out=out,
        resume=resume,
        weights=weights,
        overrides=settings or [],
    )
    if _first_process():
        _print(f"\nweights  {result.weights}\nreport   {result.report}")


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

    with _bars() as listener:
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
    with _bars() as listener:
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
    with _bars() as listener:
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
        with _bars() as listener:
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


@tables.command(
    "transfer", epilog="Example: `xmoco tables transfer transfer.jsonl --out docs/tables`"
)
def transfer_tables(
    records: Annotated[
        list[Path], typer.Argument(help="Files of records by `xmoco evaluate transfer`.")
    ],
    out: Annotated[Path, typer.Option(help="The folder the tables go into.")] = Path("tables"),
) -> None:
    """The paper's tables of transfer, frozen and end to end, with your records beneath.

    Each is written as Markdown and as a picture; the best is bold, the second underlined.
    """
    from xmoco.report.tables import draw_transfer

    for path in draw_transfer(records, out):
        _print(f"table    {path}")


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
    from xmoco.settings import load_config, setting_descriptions

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

    # While a run trains, it handles these itself and saves; this is for before and after.
    signal.signal(signal.SIGTERM, lambda *_: _fail(STOPPED, status=143))
    try:
        app()
    except SystemExit as end:
        if end.code == 130:  # typer's answer to Ctrl-C
            _fail(STOPPED, status=130)
        raise
    except UserError as error:
        _fail(str(error), status=2, alone=error.alone)
    except Interrupted as stop:
        _fail(str(stop), status=128 + stop.signal_number if _first_process() else 0)
    except OSError as error:
        if error.errno is None:
            raise
        where = f": {error.filename}" if error.filename else ""
        _fail(f"{error.strerror}{where}.", status=2)
    except Exception as error:
        if not _lost_partner(error):
            raise
        _fail("another process of this run has ended; it says why.", status=1)


def _lost_partner(error: Exception) -> bool:
    """Whether a collective operation failed because another process is gone."""
    torch = sys.modules.get("torch")
    several = torch is not None and torch.distributed.is_initialized()
    return bool(several and isinstance(error, RuntimeError))


def _fail(sentence: str, status: int, alone: bool = False) -> NoReturn:
    """Say why and end. Of several processes the first speaks, unless only this one knows."""
    if alone or _first_process():
        print(f"xmoco: {sentence}", file=sys.stderr)
    sys.exit(status)


def _print(text: str) -> None:
    Console().print(text, markup=False, highlight=False, soft_wrap=True)


def _eval_options(cache: bool = False, **given: Any) -> "EvalOptions":
    from xmoco.evaluate.cache import default_cache
    from xmoco.evaluate.evaluation import EvalOptions

    return EvalOptions(
        cache=default_cache() if cache else None,
        command=shlex.join(["xmoco", *sys.argv[1:]]),
        **given,
    )


@contextmanager
def _bars() -> "Iterator[Listener]":
    """A progress bar for every stage, with the time left and a note such as the loss."""
    from xmoco.evaluate.evaluation import Listener

    if not _first_process():
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
            print(f"xmoco: {sentence}", file=sys.stderr)

    stages: dict[str, TaskID] = {}
    # Where there is little room, the bar and the note give way: counts and times do not.
    columns = (
        TextColumn("{task.description}"),
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

    if not _first_process():
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
    _print(title)
    Console().print(table)
    _print("; ".join(filter(None, facts)))


def _first_process() -> bool:
    return all(os.environ.get(name, "0") == "0" for name in ("LOCAL_RANK", "NODE_RANK", "RANK"))
