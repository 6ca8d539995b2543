"""Entries × seeds side by side, and the paper's tables: means over seeds with their deviation."""

import statistics
from collections.abc import Sequence
from pathlib import Path

from pages.common import (
    NOTHING,
    AnyRecord,
    Place,
    name_of,
)
from xmoco.records import (
    read_records,
)
from xmoco.report.circumstances import (
    circumstances,
    grouped,
    last_of_each,
    markdown_table,
    section,
    sentence,
)
from xmoco.tables.definition import read_table, table_names
from xmoco.tables.drawing import Filled, fill, groups_of, markdown, notes

COMPARED_SAY = (
    "Each entry is a recipe with changes, trained with as many seeds as its row says; ± is the "
    "standard deviation over them. A single seed tells little."
)


def comparison_tables(place: Place) -> str:
    """Entries of benchmarks/compare.py, on test images or on ones held out."""
    tables = []
    for file in [*place.files("compare-*.jsonl"), *place.files("trials-*.jsonl")]:
        records = [r for r in read_records(file, AnyRecord) if not chosen_by_test_images(r)]
        for alike in grouped(records, in_one_table):
            work, split, recipe = in_one_table(alike[0])
            sizes = {record.protocol["size"] for record in alike}
            size = f"at {sizes.pop()} px " if len(sizes) == 1 else ""
            judged = JUDGED_ON.get(split, "images " + split)
            lead = f"**{work}, judged {size}on {judged}; recipe {recipe}**"
            tables += [lead, comparison_table(place, file, alike)]
    heading = "## How do settings compare, over seeds?"
    return "\n\n".join([heading, COMPARED_SAY, *tables] if tables else [])


PAPER_TABLES_SAY = (
    "The paper's tables at a scale that one GPU allows, by [`xmoco tables`](tables.md). Images and "
    "backbones are others than the paper's, so that orders and trends compare, not values."
)


def paper_tables(place: Place) -> str:
    """What ``xmoco tables run`` measured, beside the paper's figures."""
    parts: list[str] = []
    for file in place.files("tables*.jsonl"):
        records, shown = read_records(file, AnyRecord), set()
        for name in table_names():
            table = read_table(name)
            for group in groups_of(table, records):
                filled = fill(table, records, group)
                if sum(bool(line.cells) for line in filled.lines) > 1:  # tables share runs
                    shown |= {id(record) for record in filled.records}
                    parts += paper_table(place, file, filled)
        former = [r for r in records if id(r) not in shown and r.measure.endswith("_top1")]
        for alike in grouped(former, lambda r: (r.work, r.protocol["split"], r.protocol["size"])):
            parts.append(f"**With settings of former days: {alike[0].work}**")
            parts.append(comparison_table(place, file, alike))
    heading = "## What becomes of the paper's tables?"
    return "\n\n".join([heading, PAPER_TABLES_SAY, *parts] if parts else [])


def paper_table(place: Place, file: Path, filled: Filled) -> list[str]:
    missing = [ln.row.name for ln in filled.lines if not ln.cells and not ln.row.paper_only]
    gap = f"Not measured yet: {', '.join(missing)}." if missing else ""
    return [
        f"### {filled.table.title}",
        sentence(str(filled.group)),
        section(markdown(filled.measured_only()), gap, *notes(filled), place.link(file)),
    ]


JUDGED_ON = {
    "test": "test images",
    "validation, held out of the training images": "images held out of the training set",
}


def in_one_table(record: AnyRecord) -> tuple[str, str, str]:
    """What records must share to stand in one table: changes are told from one recipe."""
    return record.work, record.protocol["split"], record.protocol["recipe_digest"]


def compared_with(record: AnyRecord) -> tuple[str, str, str, int]:
    """What figures must share to be compared."""
    return *in_one_table(record), record.protocol["size"]


def comparison_table(place: Place, file: Path, records: Sequence[AnyRecord]) -> str:
    """A row for every entry and size of images, with the changes that not all have; a column for
    every measure."""
    several_sizes = len({record.protocol["size"] for record in records}) > 1
    changes = [record.protocol["changes"].split() for record in records]
    shared = [change for change in changes[0] if all(change in others for others in changes)]
    columns = dict.fromkeys(map(measured_by, records))
    rows = []
    entries = grouped(records, lambda r: (r.subject, r.protocol["changes"], r.protocol["size"]))
    for entry in entries:
        facts = entry[0].protocol
        own = [change for change in facts["changes"].split() if change not in shared]
        size = f"{facts['size']} px" if several_sizes else ""
        seeds_of = {record.seed for record in entry}
        cells = [
            of_so_many([record for record in entry if measured_by(record) == column], len(seeds_of))
            for column in columns
        ]
        changed = f"`{' '.join(own)}`" if own else ""
        time = training_time(entry)
        rows.append([name_of(entry[0]), changed, time, size, *cells, str(len(seeds_of))])
    headings = ["entry", "changes", "training", "judged at", *columns, "seeds"]
    table = markdown_table(headings, "llrr" + "r" * (len(columns) + 1), rows)
    common = f"All have `{' '.join(shared)}`." if shared else ""
    return section(table, common, circumstances(records), place.link(file))


def training_time(records: Sequence[AnyRecord]) -> str:
    """In minutes, of runs that had the GPU to themselves, if any; of others it is said that they
    shared it, or were judged on the way."""
    runs = [r for r in last_of_each(records, lambda r: r.seed) if "train_seconds" in r.protocol]
    if not runs:
        return ""
    alone = [record for record in runs if "runs_at_once" not in record.protocol]
    minutes = [record.protocol["train_seconds"] / 60 for record in alone or runs]
    together = max(record.protocol.get("runs_at_once", 1) for record in runs)
    shared = "" if alone else f", {together} at once"
    watched = ", watched" if any("watched_every" in record.protocol for record in runs) else ""
    return f"{statistics.fmean(minutes):.1f} min{shared}{watched}"


def chosen_by_test_images(record: AnyRecord) -> bool:
    """Logistic regressions of former days, of several penalties that which suited these best."""
    on_test = record.measure == "logistic_top1" and record.protocol["split"] == "test"
    return on_test and "strength_chosen_on" not in record.protocol


def measured_by(record: AnyRecord) -> str:
    words = {"knn_top1": "kNN", "logistic_top1": "logistic", "linear_top1": "linear"}
    name, k = words.get(record.measure, record.measure), record.protocol.get("k")
    if record.measure == "logistic_top1" and "strength_chosen_on" not in record.protocol:
        return f"{name}, best of {len(record.protocol['strengths'])} penalties"
    return name + (f", k {k}" if k else "")


def over_seeds(records: Sequence[AnyRecord]) -> str:
    """The mean, with the deviation of several seeds."""
    values = [record.value for record in last_of_each(records, lambda r: r.seed)]
    if not values:
        return NOTHING
    deviation = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.1f}{deviation} %"


def of_so_many(records: Sequence[AnyRecord], seeds: int) -> str:
    """As ``over_seeds``; of fewer seeds than others, it says so."""
    own = len({record.seed for record in records})
    few = f" ({own} seed{'s' * (own > 1)})" if 0 < own < seeds else ""
    return over_seeds(records) + few
