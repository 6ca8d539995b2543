"""How good backbones are: records of kNN, classifiers and transfer as tables in Markdown.

Each table answers one question; the words around it stand on the page. Below it stands how its
figures came about: first how many seeds and rounds they rest on, then what was done, by which
machine and commit. Where records differ in that, all is told. Of measurements that were repeated,
the last counts.
"""

import statistics
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import yaml

from pages.common import (
    Place,
    by_subject,
    by_work,
    data,
    image_size,
    name_of,
    percentage,
)
from xmoco.records import (
    ClassifierProtocol,
    KnnProtocol,
    Measured,
    TransferProtocol,
    read_records,
)
from xmoco.report.circumstances import (
    Record,
    circumstances,
    grouped,
    last_of_each,
    markdown_table,
    section,
)

Knn = Measured[KnnProtocol]
Judged = Measured[KnnProtocol] | Measured[ClassifierProtocol] | Measured[TransferProtocol]

JUDGED: Mapping[str, type[Record]] = {
    "knn_top1": Measured[KnnProtocol],
    "linear_top1": Measured[ClassifierProtocol],
    "finetune_top1": Measured[ClassifierProtocol],
    "transfer_frozen": Measured[TransferProtocol],
    "transfer_end_to_end": Measured[TransferProtocol],
}
"""The measures of backbones, in the order of their rows."""

UNTRAINED = "untrained"
SHOWN_LAST = ("supervised", UNTRAINED)
"""Backbones to compare with."""
NEIGHBOURS = (20, 200)
"""Of the numbers of neighbours that may vote, these are shown."""
QUARTERS = range(1, 5)
"""Of a training: what it had reached when each was over is shown."""

METHODS_SAY = (
    "All were trained on the embedded patterns for a few minutes each, to show that they learn: "
    "so short a training does not tell which of them is the best on photographs. Some have "
    "settings of their own for so few steps; those of ReSSL were changed after a first try that "
    "learned nothing. `supervised` was told the classes."
)


def learning_tables(place: Place, pattern: str) -> str:
    """kNN accuracy as training goes on."""
    return "\n\n".join(
        learning_table(place, file, same_work)
        for file in place.files(pattern)
        for same_work in grouped(read_records(file, Knn, {"knn_top1"}), by_work)
    )


def learning_table(place: Place, file: Path, records: Sequence[Knn]) -> str:
    records = last_of_each(records, lambda r: (r.subject, r.seed, r.protocol.epoch, r.protocol.k))
    last = max(record.protocol.epoch for record in records)
    one_size = len({record.protocol.size for record in records}) == 1
    rows = []
    for record in at_quarters(records, last):
        size = "" if one_size else f", {record.protocol.size} px"
        rows.append([f"{backbone_name(record)}{size}", percentage(record)])
    return section(
        markdown_table(["features of", "kNN top-1"], "lr", rows),
        times_told(records, last),
        circumstances(records, *NEIGHBOUR_FACTS),
        place.link(file),
    )


def at_quarters(records: Sequence[Knn], last: int) -> list[Knn]:
    """What every subject had reached when each quarter of ``last`` epochs was over."""
    chosen: list[Knn] = []
    for of_one in grouped(records, by_subject):
        epochs = [record.protocol.epoch for record in of_one]
        reached = [[e for e in epochs if e <= last * quarter / 4] for quarter in QUARTERS]
        wanted = {max(some) for some in reached if some}
        chosen += [record for record in of_one if record.protocol.epoch in wanted]
    return chosen


def times_told(records: Sequence[Knn], last: int) -> str:
    """How long the runs took, and how often they were interrupted for kNN."""
    took = {
        name_of(record): record.protocol.run_seconds
        for record in records
        if record.protocol.epoch == last and record.protocol.run_seconds is not None
    }
    if not took:
        return ""
    times = ", ".join(f"{name} {seconds:,.0f} s" for name, seconds in took.items())
    every = next(filter(None, map(kept_watch, records)), "")
    return f"Time of training: {times}{every}."


def kept_watch(record: Knn) -> str:
    settings = yaml.safe_load(record.protocol.settings) or {}
    every = settings.get("monitor", {}).get("knn_every")
    if every is None:
        return ""
    return f", with kNN every {'epoch' if every == 1 else f'{every} epochs'}"


def methods_table(place: Place) -> str:
    """kNN of several methods before and after training, the best first; nothing where they were not
    measured."""
    tables = []
    for file in place.files("methods.jsonl"):
        for same_work in grouped(read_records(file, Knn, {"knn_top1"}), by_work):
            pairs: dict[str, tuple[Knn, Knn]] = {}
            for before, after in pairwise(same_work):  # each after the backbone it began with
                if before.subject == UNTRAINED != after.subject:
                    pairs[after.subject] = before, after
            ranked = sorted(pairs.values(), key=lambda pair: -pair[1].value)
            rows = [[backbone_name(r), percentage(start), percentage(r)] for start, r in ranked]
            table = markdown_table(["method", "kNN before", "and after"], "lrr", rows)
            told = circumstances([r for pair in ranked for r in pair], *NEIGHBOUR_FACTS)
            tables.append(section(table, told, place.link(file)))
    return "\n\n".join(["## How do the methods compare?", METHODS_SAY, *tables] if tables else [])


def mean(records: Sequence[Record]) -> float:
    """Over seeds."""
    return statistics.fmean(record.value for record in records)


def protocols_tables(place: Place) -> str:
    """What every protocol says of some backbones."""
    tables = []
    for file in place.files("protocols-*.jsonl"):
        grid = ProtocolGrid(judged_records(file))
        told = circumstances(grid.shown, judged_on, image_size, crop_size)
        tables.append(section(grid.table("protocol"), told, place.link(file)))
    return "\n\n".join(tables)


def judged_records(file: Path) -> list[Judged]:
    """Of every measure that tells how good a backbone is."""
    return [
        record
        for measure, kind in JUDGED.items()
        for record in read_records(file, kind, {measure})
        if protocol_name(record)
    ]


class ProtocolGrid:
    """A row for every protocol; a column for every backbone and, if there are several, size of the
    images it was judged by."""

    def __init__(self, records: Sequence[Judged]) -> None:
        self.one_size = len({record.protocol.size for record in records}) == 1
        self.one_crop = len(set(filter(None, map(crop_size, records)))) <= 1
        digests = {(backbone_name(r), r.protocol.digest) for r in records if r.protocol.digest}
        self.names = [name for name, _ in digests]
        self.cells = {(self.row(record), self.column(record)): record for record in records}
        self.shown = list(self.cells.values())

    def row(self, record: Judged) -> str:
        crops = None if self.one_crop else crop_size(record)
        return ", ".join(filter(None, [protocol_name(record), crops]))

    def column(self, record: Judged) -> str:
        """Different weights of one name have columns of their own."""
        name = backbone_name(record)
        size = "" if self.one_size else f", {record.protocol.size} px"
        digest = f" ({record.protocol.digest[:6] or '?'})" if self.names.count(name) > 1 else ""
        return f"{name}{size}{digest}"

    def table(self, heading: str, words: Mapping[str, str] | None = None) -> str:
        rows = dict.fromkeys(map(self.row, sorted(self.shown, key=place_of_protocol)))
        columns = dict.fromkeys(map(self.column, sorted(self.shown, key=place_of_backbone)))
        lines = [
            [
                row if words is None else words[row],
                *(percentage(self.cells.get((row, column))) for column in columns),
            ]
            for row in rows
        ]
        return markdown_table([heading, *columns], "l" + "r" * len(columns), lines)


def protocol_name(record: Judged) -> str:
    """As it stands in the table; nothing if it does not."""
    match record.measure, record.protocol:
        case _, KnnProtocol(k=k):
            return f"kNN, k {k}" if k in NEIGHBOURS else ""
        case "finetune_top1", ClassifierProtocol(name=name, label_fraction=fraction):
            return f"{name}, {100 * fraction:g} % of the labels"
        case _, TransferProtocol(set=images, metric=metric, name=name):
            how = name.removeprefix("transfer, ")
            return f"transfer to {images}, {how}{'' if metric == 'top-1' else f', {metric}'}"
    return record.protocol.name


def place_of_protocol(record: Judged) -> tuple[int, float]:
    """By kind; then by neighbours or labels, from few to many."""
    match record.protocol:
        case KnnProtocol(k=amount) | ClassifierProtocol(label_fraction=amount):
            return list(JUDGED).index(record.measure), amount
    return list(JUDGED).index(record.measure), 0


def place_of_backbone(record: Judged) -> tuple[int, int]:
    """Those to compare with come last; larger images after smaller ones."""
    last = 1 + SHOWN_LAST.index(record.subject) if record.subject in SHOWN_LAST else 0
    return last, record.protocol.size


def changed_recipes_table(place: Place) -> str:
    """What recipes that were changed had reached, by the protocols that all were judged by."""
    tables = []
    for file in place.files("changed-recipes.jsonl"):
        records = [r for r in judged_records(file) if r.protocol.epoch and r.protocol.changes]
        cells = {(r.protocol.changes, protocol_name(r)): r for r in records}
        changes = dict.fromkeys(change for change, _ in cells)
        columns = [
            name
            for name in dict.fromkeys(name for _, name in cells)
            if all((change, name) in cells for change in changes)
        ]
        rows = [
            [f"`{change}`", *(percentage(cells[change, name]) for name in columns)]
            for change in changes
        ]
        shown = [cells[change, name] for change in changes for name in columns]
        table = markdown_table(["changes", *columns], "l" + "r" * len(columns), rows)
        tables.append(section(table, circumstances(shown, judged_on), place.link(file)))
    return "\n\n".join(tables)


def backbone_name(record: Judged) -> str:
    return f"{name_of(record)}, {epochs_of(record)}" if record.protocol.epoch else name_of(record)


def epochs_of(record: Judged) -> str:
    """Of training without labels, or with them, that the backbone has seen."""
    return "1 epoch" if record.protocol.epoch == 1 else f"{record.protocol.epoch} epochs"


def crop_size(record: Judged) -> str | None:
    """Of the random crops that a protocol learns from, if it does."""
    protocol = record.protocol
    if isinstance(protocol, KnnProtocol) or record.measure == "transfer_frozen":
        return None
    return f"crops of {protocol.crop_size or protocol.size} px"


def judged_by_neighbours(record: Knn) -> str:
    protocol = record.protocol
    if protocol.split == "leave one out":
        return f"each of {protocol.judged_images:,} images judged by all others"
    return (
        f"{protocol.judged_images:,} {protocol.split} images judged by "
        f"{protocol.bank_images:,} training images"
    )


def judged_on(record: Judged) -> str:
    return f"{data(record)}, {record.protocol.judged_images:,} test images"


def votes(record: Knn) -> str:
    return f"k {record.protocol.k}, temperature {record.protocol.temperature}"


NEIGHBOUR_FACTS = (data, judged_by_neighbours, votes, image_size)
