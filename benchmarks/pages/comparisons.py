"""Entries × seeds side by side, and the paper's tables: means over seeds with their deviation."""

import math
import re
import statistics
from collections.abc import Sequence, Set
from pathlib import Path
from typing import Any, NamedTuple

from pages.common import (
    NOTHING,
    AnyRecord,
    Place,
    common_overrides,
    name_of,
)
from pages.trials import FILES, all_trials, overlapping, the_run
from xmoco.data.subset import HELD_OUT
from xmoco.records import (
    read_records,
)
from xmoco.report.circumstances import (
    circumstances,
    grouped,
    last_of_each,
    markdown_table,
    mean_and_deviation,
    section,
    sentence,
)
from xmoco.tables.definition import Table, read_table, table_names
from xmoco.tables.drawing import markdown, notes
from xmoco.tables.filling import Filled, fill_all
from xmoco.tables.trials import DIVERGED, divergences
from xmoco.tables.tuning import OWN, trial_table

COMPARED_SAY = (
    "Each row is a recipe with the given overrides; ± is the standard deviation over seeds. Rows "
    "with a single seed are not conclusive. Overrides are quoted as they were given: in runs "
    "recorded until 2026-11-18, `method=` kept all settings of the recipe that the other method "
    "has too, `weak_keys` among them, which has to be asked for today."
)
TRIED_SAY = (
    "The same on images held out of the training set, by which settings are chosen; no test image "
    "was used."
)


def comparison_tables(place: Place) -> str:
    """Entries of benchmarks/compare.py: on test images, and on ones held out."""
    parts = []
    for heading, says, pattern in (
        ("## Comparisons on test images", COMPARED_SAY, "compare-*.jsonl"),
        ("## Tuning trials on held-out images", TRIED_SAY, "trials-*.jsonl"),
    ):
        tables = [table for file in place.files(pattern) for table in tables_of(place, file)]
        parts += [heading, says, *tables] if tables else []
    return "\n\n".join(parts)


def tables_of(place: Place, file: Path) -> list[str]:
    """Each with a line above it."""
    tables = []
    records = [r for r in read_records(file, AnyRecord) if is_shown(r)]
    for alike in grouped(records, in_one_table):
        work, split, recipe = in_one_table(alike[0])
        sizes = {record.protocol["size"] for record in alike if record.measure != DIVERGED}
        size = f"at {sizes.pop()} px " if len(sizes) == 1 else ""
        judged = JUDGED_ON.get(split, "images " + split)
        lead = f"**{work_named(work)}, evaluated {size}on {judged}; recipe {recipe}**"
        tables += [lead, comparison_table(place, alike, file)]
    return tables


def is_shown(record: AnyRecord) -> bool:
    """Accuracies, and that there is none; what else training tells is for other tables."""
    accuracy = record.measure.endswith("_top1") and not chosen_by_test_images(record)
    return accuracy or record.measure == DIVERGED


def work_named(work: str) -> str:
    """``pets-resnet18-9ep`` in words."""
    parts = re.fullmatch(r"(.+)-(resnet\d+|tiny)-(\d+)ep", work)
    if parts is None:
        return work
    data, backbone, epochs = parts.groups()
    return f"`{data}`, {backbone.replace('resnet', 'ResNet-')}, {epochs} epochs"


PAPER_TABLES_SAY = (
    "The paper's tables at the scale of one GPU, made with [`xmoco tables`](tables.md). Images and "
    "backbones differ from the paper's: compare rankings and trends, not absolute values."
)


SOME = 12
"""More missing rows than these are counted."""


def paper_tables(place: Place) -> str:
    """The paper's tables, as far as ``xmoco tables run`` or a comparison has measured them."""
    ours = all_trials(place, "tables*.jsonl")
    parts, shown = [], set()
    for _, filled in measured_tables(place):
        shown |= {record_key(record) for record in filled.records}
        parts += paper_table(place, filled)
    former = [r for r in ours if record_key(r) not in shown and is_shown(r)]
    for alike in grouped(former, lambda r: (r.work, r.protocol["split"], r.protocol.get("size"))):
        parts.append(f"**With earlier settings: {alike[0].work}**")
        parts.append(comparison_table(place, alike, *place.files("tables*.jsonl")))
    heading = "## The paper's tables at small scale"
    return "\n\n".join([heading, PAPER_TABLES_SAY, *parts] if parts else [])


def record_key(record: AnyRecord) -> str:
    return record.model_dump_json()


def measured_tables(place: Place) -> list[tuple[str, Filled]]:
    """By name, the trials of a table before it; in every group of figures with at least one row."""
    records = all_trials(place)
    ours = {record_key(record) for record in all_trials(place, "tables*.jsonl")}
    tables = {name: read_table(name) for name in table_names()}
    tried = {name: trials_of(table, records) for name, table in tables.items()}
    as_trials = {id(r) for found in tried.values() for one in found for r in one.records}
    measured = []
    for name, table in tables.items():
        for filled in (*tried[name], *fill_all(table, records)):
            if filled.group.split == HELD_OUT:
                # Rows may be nothing but trials of this or another table, or of a comparison.
                again = filled not in tried[name] and ids_in(filled) <= as_trials
                if again or not any(record_key(r) in ours for r in filled.records):
                    continue
            if filled.records:
                measured.append((name, filled))
    return without_repeated(measured)


def without_repeated(measured: Sequence[tuple[str, Filled]]) -> list[tuple[str, Filled]]:
    """A single row is no table where it is one of another's, which all have the recipe's own
    settings among their rows; nor is it one after other epochs than the table's."""
    kept, shown = [], set[int]()
    for one in sorted(measured, key=lambda one: -rows_in(one[1])):
        filled = one[1]
        own = filled.group.epochs == filled.table.epochs and not ids_in(filled) <= shown
        if rows_in(filled) > 1 or own:
            kept.append(one)
            shown |= ids_in(filled)
    return [one for one in measured if one in kept]


def rows_in(filled: Filled) -> int:
    return sum(bool(line.cells) for line in filled.lines)


def ids_in(filled: Filled) -> set[int]:
    return {id(record) for record in filled.records}


def trials_of(table: Table, records: Sequence[AnyRecord]) -> list[Filled]:
    """The settings that were tried for a table, if any but the rows' own were."""
    tuning = table.tuning
    if tuning is None:
        return []
    return [
        one
        for one in fill_all(trial_table(table, table.epochs), records)
        if (one.group.split, one.group.held_out_share) == (HELD_OUT, tuning.share)
        and one.group.epochs <= tuning.epochs
        and any(line.cells for line in one.lines if not line.row.name.endswith(f", {OWN}"))
    ]


def paper_table(place: Place, filled: Filled) -> list[str]:
    rows = [line for line in filled.lines if not line.row.paper_only]
    missing = [line.row.name for line in rows if not line.cells]
    gap = f"Not measured yet: {', '.join(missing)}." if missing else ""
    if len(missing) > SOME:
        gap = f"Not measured yet: {len(missing)} of {len(rows)} rows."
    keys = {record_key(record) for record in filled.records}
    files = [
        file
        for pattern in FILES
        for file in place.files(pattern)
        if keys & set(map(record_key, all_trials(place, file.name)))
    ]
    return [
        f"### {filled.table.title}",
        sentence(str(filled.group)),
        section(markdown(filled.measured_only()), gap, *notes(filled), *map(place.link, files)),
    ]


JUDGED_ON = {
    "test": "test images",
    "validation, held out of the training images": "held-out training images",
}


def in_one_table(record: AnyRecord) -> tuple[str, str, str]:
    """What records must share to stand in one table: changes are told from one recipe."""
    return record.work, record.protocol["split"], record.protocol["recipe_digest"]


def compared_with(record: AnyRecord) -> tuple[str, str, str, int]:
    """What figures must share to be compared."""
    return *in_one_table(record), record.protocol["size"]


def comparison_table(place: Place, records: Sequence[AnyRecord], *files: Path) -> str:
    """A row for every entry and size of images, with the changes that not all have; a column for
    every measure."""
    common, own = common_overrides([record.protocol["changes"] for record in records])
    diverged = [
        f"{name_of(run[0])}{quoted(run[0].protocol['changes'])}, seed {run[0].seed}{end}"
        for run in grouped(records, lambda r: (r.subject, r.protocol["changes"], r.seed))
        for end in divergences(run).values()
    ]
    everything, records = records, [r for r in records if r.measure != DIVERGED]
    several_seeds = len({record.seed for record in records}) > 1
    several_sizes = len({record.protocol["size"] for record in records}) > 1
    columns = dict.fromkeys(map(measured_by, records))
    rows = []
    entries = grouped(records, lambda r: (r.subject, r.protocol["changes"], r.protocol["size"]))
    if not several_sizes:
        entries.sort(key=lambda entry: mean_of(entry, next(iter(columns))), reverse=True)
    overlaps = overlapping(place)
    times = [t for entry in entries if (t := training_time(entry, overlaps)) is not None]
    for entry in entries:
        facts = entry[0].protocol
        size = f"{facts['size']} px" if several_sizes else ""
        seeds_of = {record.seed for record in entry}
        cells = [
            of_so_many([record for record in entry if measured_by(record) == column], len(seeds_of))
            for column in columns
        ]
        time = training_time(entry, overlaps)
        seeds = str(len(seeds_of)) if several_seeds else ""
        marked = "" if time is None else time.marked
        rows.append([name_of(entry[0]), own[facts["changes"]], marked, size, *cells, seeds])
    headings = ["method", "overrides", "training time", "evaluated at", *columns, "seeds"]
    table = markdown_table(headings, "llrr" + "r" * (len(columns) + 1), rows)
    ends = f"Training diverged: {'; '.join(diverged)}." if diverged else ""
    told = (marks_told(times), common, ends, circumstances(everything), *map(place.link, files))
    return section(table if rows else "", *told).strip()


def quoted(changes: str) -> str:
    return f" `{changes}`" if changes else ""


class TrainingTime(NamedTuple):
    minutes: float
    sharing: int | None
    """How many runs shared the GPU, if it had to be shared; 0 if nobody counted them."""
    watched: bool
    """Whether the time includes evaluations."""

    def __str__(self) -> str:
        how_many = f"{self.sharing} runs" if self.sharing else "other runs"
        shared = "" if self.sharing is None else f" with {how_many} sharing the GPU"
        return f"{self.minutes:.1f} min{shared}{' including evaluations' * self.watched}"

    @property
    def marked(self) -> str:
        """For a column, which has no room for the words: they stand below the table."""
        return f"{self.minutes:.1f} min{'†' * (self.sharing is not None)}{'‡' * self.watched}"


def training_time(
    records: Sequence[AnyRecord], overlaps: Set[tuple[Any, ...]]
) -> TrainingTime | None:
    """The mean over runs that had the machine to themselves, if any, or else over those that shared
    it: those say so, or overlapped with others in time."""
    runs = [r for r in last_of_each(records, lambda r: r.seed) if "train_seconds" in r.protocol]
    if not runs:
        return None
    alone = [r for r in runs if "runs_at_once" not in r.protocol and the_run(r) not in overlaps]
    minutes = [train_seconds(record) / 60 for record in alone or runs]
    together = max(record.protocol.get("runs_at_once", 0) for record in runs)
    # Epochs are timed without the evaluations between them.
    watched = any("watched_every" in r.protocol and "epoch_seconds" not in r.protocol for r in runs)
    return TrainingTime(statistics.fmean(minutes), None if alone else together, watched)


def train_seconds(record: AnyRecord) -> float:
    """Without compiling, where epochs were timed."""
    facts = record.protocol
    whole: float = facts["train_seconds"]
    return facts["epoch_seconds"] * facts["epochs"] if "epoch_seconds" in facts else whole


def marks_told(times: Sequence[TrainingTime]) -> str:
    counted = " / ".join(str(n) for n in dict.fromkeys(time.sharing for time in times) if n)
    uncounted = any(time.sharing == 0 for time in times)
    sharing = f"{counted} runs shared the GPU" if counted else ""
    if uncounted:
        sharing += ", or others" if counted else "Other runs"
        sharing += " trained on the same machine meanwhile, by the times of their records"
    return " ".join(
        filter(
            None,
            (
                f"† {sharing}." if sharing else "",
                "‡ Including evaluations during training." if any(t.watched for t in times) else "",
            ),
        )
    )


def mean_of(entry: Sequence[AnyRecord], column: str) -> float:
    found = [record for record in entry if measured_by(record) == column]
    values = [record.value for record in last_of_each(found, lambda r: r.seed)]
    return statistics.fmean(values) if values else -math.inf


def chosen_by_test_images(record: AnyRecord) -> bool:
    """Logistic regressions of former days, of several penalties that which suited these best."""
    on_test = record.measure == "logistic_top1" and record.protocol["split"] == "test"
    return on_test and "strength_chosen_on" not in record.protocol


def measured_by(record: AnyRecord) -> str:
    words = {"knn_top1": "kNN", "logistic_top1": "logistic regr.", "linear_top1": "linear"}
    name, k = words.get(record.measure, record.measure), record.protocol.get("k")
    if record.measure == "logistic_top1" and "strength_chosen_on" not in record.protocol:
        return f"{name}, best of {len(record.protocol['strengths'])} strengths on these images"
    return name + (f" (k = {k})" if k else "")


def over_seeds(records: Sequence[AnyRecord]) -> str:
    """The mean, with the deviation of several seeds."""
    values = [record.value for record in last_of_each(records, lambda r: r.seed)]
    return f"{mean_and_deviation(values)} %" if values else NOTHING


def of_so_many(records: Sequence[AnyRecord], seeds: int) -> str:
    """As ``over_seeds``; of fewer seeds than others, it says so."""
    own = len({record.seed for record in records})
    few = f" ({own} seed{'s' * (own > 1)})" if 0 < own < seeds else ""
    return over_seeds(records) + few
