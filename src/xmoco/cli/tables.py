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
    help="The paper's tables: run what is missing, and draw them beside the paper's figures.",
    epilog="Without a command: lists the tables.",
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
    name: Annotated[str, typer.Argument(help="A table that `xmoco tables` lists, or a yaml file.")],
    settings: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="Changes to every row, e.g. `batch=64`."),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            help="Labelled images with a test split (or --held-out): a folder, an archive, "
            "`torchvision:NAME`. Default: those of the table's recipe."
        ),
    ] = None,
    out: Annotated[
        Path,
        typer.Option(
            help="The folder for tables, records and runs. Tables that share it share the runs "
            "they have in common."
        ),
    ] = Path("tables"),
    records: Annotated[
        Path | None,
        typer.Option(help="The file of records. Default: `records.jsonl` in --out."),
    ] = None,
    epochs: Annotated[int | None, typer.Option(help="Default: the table's.")] = None,
    seeds: Annotated[
        str | None, typer.Option(help="With commas between: `0,1,2`. Default: the table's.")
    ] = None,
    row: Annotated[
        list[str] | None,
        typer.Option(help="Train this row only; may be given several times. Default: all."),
    ] = None,
    held_out: Annotated[
        bool,
        typer.Option(
            "--held-out",
            help="Do not look at the test images: hold out training images and judge by these.",
        ),
    ] = False,
    share: Annotated[float, typer.Option(help="Of every class that --held-out takes.")] = 0.2,
    devices: Annotated[
        int, typer.Option(help="So many rows are trained at once, each on a device of its own.")
    ] = 1,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Train nothing: say what is missing, draw what is there."),
    ] = False,
) -> None:
    """Run what is missing of a table, and draw it as Markdown, CSV and a picture.

    Every number becomes a record when its run is done, and no run is repeated whose records are
    there. After an interruption the same command goes on, also in the middle of a run. Several
    processes may work on one table: each takes runs that no other works on.
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
    job = Job.of(name, asked, out, records, command)
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
        list[Path], typer.Argument(help="Files of records by `xmoco evaluate transfer`.")
    ],
    out: Annotated[Path, typer.Option(help="The folder the tables go into.")] = Path("tables"),
) -> None:
    """The paper's tables of transfer, frozen and end to end, with your records beneath.

    Each is written as Markdown and as a picture; the best is bold, the second underlined.
    """
    from xmoco.report.tables import draw_transfer

    for path in draw_transfer(records, out):
        print_plain(f"table    {path}")


@tables.command(
    "detection", epilog="Example: `xmoco tables detection detect.jsonl --out docs/tables`"
)
def detection_tables(
    records: Annotated[
        list[Path], typer.Argument(help="Files of records by `xmoco evaluate detect`.")
    ],
    out: Annotated[Path, typer.Option(help="The folder the tables go into.")] = Path("tables"),
) -> None:
    """The paper's tables of detection and segmentation, with your records beneath.

    One for each kind of detector, written as Markdown and as a picture.
    """
    from xmoco.detect.tables import draw_detection

    for path in draw_detection(records, out):
        print_plain(f"table    {path}")
