"""The commands ``xmoco tables …``: arguments in, tables out; no logic."""

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from xmoco.cli.output import print_plain

tables = typer.Typer(
    help="Reproduce the paper's tables on your images, and show them next to the paper's results.",
    epilog="Without a command, lists the tables.",
)


@tables.callback(invoke_without_command=True)
def list_tables(context: typer.Context) -> None:
    if context.invoked_subcommand is not None:
        return
    from xmoco.tables.definition import read_table, table_names

    listed = Table(box=None, padding=(0, 2), show_header=False)
    listed.add_column(no_wrap=True)
    listed.add_column()
    for name in table_names():
        listed.add_row(name, read_table(name).about)
    Console().print(listed)
    print_plain("\nxmoco tables run NAME --data IMAGES runs one.")


def _seeds(text: str) -> tuple[int, ...]:
    """Whole numbers between commas."""
    from xmoco.errors import UserError

    parts = text.split(",")
    if not all(part.strip().isdecimal() for part in parts):
        raise UserError(f"--seeds {text} are not whole numbers with commas between, as in 0,1,2.")
    return tuple(map(int, parts))


@tables.command(
    "run",
    epilog="Examples:\n\n"
    "`xmoco tables run xi --data imagenette.tar --out tables`\n\n"
    "`xmoco tables run xi --data imagenette.tar --out tables --epochs 60 --seeds 0,1,2`\n\n"
    "`xmoco tables run main --data imagenette.tar --out tables --devices 4`",
)
def run(
    name: Annotated[str, typer.Argument(help="A table listed by `xmoco tables`, or a YAML file.")],
    settings: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="Overrides in every row, e.g. `batch=64`."),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            help="Labelled images with a test split (not needed with --held-out): a folder, an "
            "archive or `torchvision:NAME`. Default: those of the table's recipe."
        ),
    ] = None,
    out: Annotated[
        Path,
        typer.Option(
            help="Folder for tables, records and runs. Tables in the same folder share the runs "
            "that they have in common."
        ),
    ] = Path("tables"),
    records: Annotated[
        list[Path] | None,
        typer.Option(
            help="File of records. Given several times, new records go into the first file, and "
            "runs found in any of them are not repeated. Default: `records.jsonl` in --out."
        ),
    ] = None,
    epochs: Annotated[
        int | None,
        typer.Option(
            help="Training epochs of every row; trials take no more than this. Default: the "
            "table's."
        ),
    ] = None,
    seeds: Annotated[
        str | None,
        typer.Option(
            help="Comma-separated seeds, e.g. `0,1,2`. Default: the table's. Trials use the "
            "table's first seed."
        ),
    ] = None,
    row: Annotated[
        list[str] | None,
        typer.Option(help="Run only this row; can be given several times. Default: all rows."),
    ] = None,
    held_out: Annotated[
        bool,
        typer.Option(
            "--held-out",
            help="Evaluate on held-out training images instead of the test images.",
        ),
    ] = False,
    share: Annotated[
        float, typer.Option(help="Fraction of every class to hold out with --held-out.")
    ] = 0.2,
    devices: Annotated[
        int, typer.Option(help="Number of runs in parallel, each on its own device.")
    ] = 1,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Only list the missing runs and draw the results so far."),
    ] = False,
) -> None:
    """Run the missing rows of a table, and write it as Markdown, CSV and a figure.

    Some tables, `main` among them, first try several settings for every row on held-out training
    images. Results become records when a run is finished, and finished runs are not
    repeated. After an interruption the same command continues, also in the middle of a run.
    Several processes can work on one table; each takes runs that no other is working on.
    """
    from xmoco.errors import UserError
    from xmoco.tables.plan import Asked
    from xmoco.tables.running import Job, run_table

    if devices < 1:
        raise UserError(f"--devices {devices} is too few: give at least 1.")
    if not 0 < share < 1:
        raise UserError(f"--share {share:g} is not between 0 and 1.")
    asked = Asked(
        data=data,
        epochs=epochs,
        seeds=None if seeds is None else _seeds(seeds),
        rows=tuple(row) if row else None,
        held_out=share if held_out else None,
        overrides=tuple(settings or ()),
    )
    command = shlex.join(["xmoco", *sys.argv[1:]])
    job = Job.of(name, asked, out, records or (), command)
    outcome = run_table(job, devices=devices, dry_run=dry_run)
    for path in outcome.files:
        print_plain(f"table    {path}")
    if outcome.problem is not None:
        raise UserError(outcome.problem)


@tables.command(
    "transfer", epilog="Example: `xmoco tables transfer transfer.jsonl --out docs/tables`"
)
def transfer_tables(
    records: Annotated[
        list[Path], typer.Argument(help="Files written by `xmoco evaluate transfer --records`.")
    ],
    out: Annotated[Path, typer.Option(help="Folder for the tables.")] = Path("tables"),
) -> None:
    """Add your transfer records to the paper's tables, frozen and end-to-end.

    Each table is written as Markdown and as an image; the best of comparable rows is bold, the
    second best underlined.
    """
    from xmoco.report.tables import draw_transfer

    for path in draw_transfer(records, out):
        print_plain(f"table    {path}")


@tables.command(
    "detection", epilog="Example: `xmoco tables detection detect.jsonl --out docs/tables`"
)
def detection_tables(
    records: Annotated[
        list[Path], typer.Argument(help="Files written by `xmoco evaluate detect --records`.")
    ],
    out: Annotated[Path, typer.Option(help="Folder for the tables.")] = Path("tables"),
) -> None:
    """Add your detection records to the paper's tables of detection and segmentation.

    There is one table per kind of detector, written as Markdown and as an image.
    """
    from xmoco.detect.tables import draw_detection

    for path in draw_detection(records, out):
        print_plain(f"table    {path}")
