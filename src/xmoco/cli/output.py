"""What commands show: progress, records, lines of text."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

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

from xmoco.launchers import first_process
from xmoco.text import printable

if TYPE_CHECKING:
    from xmoco.evaluate.evaluation import Listener
    from xmoco.records import Record


@contextmanager
def progress_bars() -> "Iterator[Listener]":
    """A progress bar for every stage, with the time left and a note such as the loss."""
    from xmoco.evaluate.evaluation import Listener

    if not first_process():
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
            print(f"xmoco: {printable(sentence)}", file=sys.stderr)

    stages: dict[str, TaskID] = {}
    # Where there is little room, the bar and the note give way: counts and times do not.
    columns = (
        TextColumn("{task.description}", markup=False),
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


def show_classification(found: list["Record"], file: Path | None) -> None:
    protocol = found[0].protocol
    rows = [(_name_of(record.measure), record) for record in found]
    # Of five classes or fewer, the right one is always among the best five.
    shown = [row for row in rows if row[0] != "top-5" or row[1].value < 100]
    show_records(f"{protocol['name']} on {protocol['data']}", rows, file, shown)


def _name_of(measure: str) -> str:
    """As the metrics of transfer are called: ``top-1``, ``mean per class``."""
    return measure.partition("_")[2].replace("top", "top-").replace("_", " ")


def show_records(
    title: str,
    rows: list[tuple[str, "Record"]],
    file: Path | None,
    shown: list[tuple[str, "Record"]] | None = None,
) -> None:
    """All rows are kept, and ``shown``, where not all are."""
    from xmoco.records import append_records

    if not first_process():
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
    for name, record in shown or rows:
        table.add_row(name, f"{record.value:.2f} %")
    print_plain(title)
    Console().print(table)
    print_plain("; ".join(filter(None, facts)))


def show_detection(
    found: list["Record"], rows: "list[tuple[str, str, float, float | None]]", file: Path | None
) -> None:
    from xmoco.records import append_records

    if not first_process():
        return
    if file is not None:
        append_records(file, found)
    protocol = found[0].protocol
    table = Table()
    for heading in ("judged", "measure"):
        table.add_column(heading)
    several = len({record.seed for record in found})
    table.add_column(
        f"mean ± deviation of {several} seeds" if several > 1 else "%", justify="right"
    )
    for kind, measure, mean, deviation in rows:
        spread = "" if deviation is None else f" ± {deviation:.2f}"
        table.add_row(kind, measure, f"{mean:.2f}{spread}")
    print_plain(f"{protocol['name']}, {protocol['schedule']}, on {protocol['data']}")
    Console().print(table)
    images = f"{protocol['judged_images']:,} images of {protocol['judged']}"
    facts = [f"judged: {images}, shorter side {protocol['size']} px", protocol.get("weights")]
    print_plain("; ".join(filter(None, facts)))


def print_plain(text: str) -> None:
    lines = "\n".join(map(printable, text.split("\n")))
    Console().print(lines, markup=False, highlight=False, soft_wrap=True)
