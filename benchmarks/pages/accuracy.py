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
    NOTHING,
    AnyRecord,
    Place,
    by_subject,
    by_work,
    common_overrides,
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
    sentence,
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
    "Every method was trained on the built-in patterns for a few minutes, to check that it learns. "
    "Runs this short do not show how methods rank on photographs. Some have settings adapted to so "
    "few steps; those of ReSSL were changed after a first run failed to learn. `supervised` was "
    "trained with the class labels."
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
        markdown_table(["features", "kNN top-1"], "lr", rows),
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
    return f"Training time: {times}{every}."


def kept_watch(record: Knn) -> str:
    settings = yaml.safe_load(record.protocol.settings) or {}
    every = settings.get("monitor", {}).get("knn_every")
    if every is None:
        return ""
    return f", including kNN every {'epoch' if every == 1 else f'{every} epochs'}"


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
            alike = len({r.protocol.epoch for _, r in ranked}) == 1
            rows = [[(name_of if alike else backbone_name)(r), percentage(r)] for _, r in ranked]
            trained = f", {epochs_of(ranked[0][1])}" if alike and ranked else ""
            starts = " or ".join(sorted({percentage(start) for start, _ in ranked}))
            told = circumstances([r for pair in ranked for r in pair], *NEIGHBOUR_FACTS)
            table = markdown_table(["method", f"kNN top-1{trained}"], "lr", rows)
            tables.append(section(table, f"Untrained: {starts}.", told, place.link(file)))
    return "\n\n".join(["## Sanity check of all methods", METHODS_SAY, *tables] if tables else [])


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

    def transposed(self, heading: str, words: Mapping[str, str]) -> str:
        """A row for every backbone, a column for every protocol: where these are few."""
        rows = dict.fromkeys(map(self.column, sorted(self.shown, key=place_of_backbone)))
        columns = dict.fromkeys(map(self.row, sorted(self.shown, key=place_of_protocol)))
        lines = [
            [name, *(percentage(self.cells.get((column, name))) for column in columns)]
            for name in rows
        ]
        headings = [heading, *(words[column] for column in columns)]
        return markdown_table(headings, "l" + "r" * len(columns), lines)


def protocol_name(record: Judged) -> str:
    """As it stands in the table; nothing if it does not."""
    match record.measure, record.protocol:
        case _, KnnProtocol(k=k):
            return f"kNN (k = {k})" if k in NEIGHBOURS else ""
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


CHOSEN_BY = {"knn_top1": "kNN (k = {knn_k})", "logistic_top1": "logistic regression"}
"""The measures by which settings were chosen, on held-out images."""
WEIGHTS = {"9f8cd0": "rate 0.12", "ca4950": "rate 0.06"}
"""By their digests: the two runs of 200 epochs among the trials, as kNN at the size of their crops
shows, which is the same."""


def eval_size_table(place: Place) -> str:
    """A row for every size of images, a column for every measure and weights; the best are bold."""
    tables = []
    for file in place.files("eval-size.jsonl"):
        records = last_of_each(
            read_records(file, AnyRecord, {"knn_top1", "logistic_top1"}),
            lambda r: (r.measure, weights_of(r), r.protocol["size"]),
        )
        sizes = sorted({record.protocol["size"] for record in records})
        order = {name: number for number, name in enumerate(WEIGHTS.values())}
        records.sort(key=lambda r: (r.measure, order.get(weights_of(r), len(order))))
        columns = grouped(records, lambda r: (r.measure, weights_of(r)))
        lines = [[f"{size} px", *(best_bold(own, size) for own in columns)] for size in sizes]
        headings = [
            f"{CHOSEN_BY[own[0].measure]}, {weights_of(own[0])}".format(**own[0].protocol)
            for own in columns
        ]
        table = markdown_table(["evaluated at", *headings], "r" * (1 + len(headings)), lines)
        told = circumstances(
            records,
            lambda r: f"{r.protocol['data']}: {r.protocol['split']}",
            lambda r: f"{r.protocol['backbone']}, {r.protocol['epoch']} epochs",
            lambda r: f"trained on crops of {r.protocol['trained_size']} px",
        )
        tables.append(section(table, told, place.link(file)))
    return "\n\n".join(tables)


def weights_of(record: AnyRecord) -> str:
    digest = str(record.protocol["digest"])[:6]
    return WEIGHTS.get(digest, f"weights {digest}")


def best_bold(records: Sequence[AnyRecord], size: int) -> str:
    """What was reached at this size, bold if it is the best of all sizes."""
    best = max(percentage(record) for record in records)
    for record in records:
        if record.protocol["size"] == size:
            return f"**{best}**" if percentage(record) == best else percentage(record)
    return NOTHING


def tuning_tables(place: Place) -> str:
    """Trials of settings: the best last measure first, without the overrides that all have."""
    tables = []
    for file in place.files("tuning.jsonl"):
        records = read_records(file, AnyRecord, {"knn_top1", "logistic_top1"})
        for alike in grouped(
            records, lambda r: tuple(map(r.protocol.get, ("epochs", "recipe", "data")))
        ):
            facts = alike[0].protocol
            lead = f"**{facts['epochs']} epochs; recipe {facts['recipe']}; {facts['data']}**"
            tables += [lead, tuning_table(place, file, alike)]
    return "\n\n".join(tables)


def tuning_table(place: Place, file: Path, records: Sequence[AnyRecord]) -> str:
    cells = {(r.protocol["changes"], r.measure): r for r in records}
    trials = list(dict.fromkeys(changes for changes, _ in cells))
    shared, own = common_overrides(trials)
    rows = [
        [own[trial] or NOTHING, *(percentage(cells.get((trial, name))) for name in CHOSEN_BY)]
        for trial in trials
    ]
    rows.sort(key=lambda row: row[-1], reverse=True)
    headings = [words.format(**records[0].protocol) for words in CHOSEN_BY.values()]
    return section(
        markdown_table(["overrides", *headings], "lrr", rows),
        shared,
        sentence(f"all trials are of {', '.join(dict.fromkeys(map(name_of, records)))}"),
        circumstances(records, lambda r: r.protocol["split"]),
        place.link(file),
    )


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
        return f"leave-one-out on {protocol.judged_images:,} images"
    return (
        f"{protocol.judged_images:,} {protocol.split} images, kNN among "
        f"{protocol.bank_images:,} training images"
    )


def judged_on(record: Judged) -> str:
    return f"{data(record)}, {record.protocol.judged_images:,} test images"


def votes(record: Knn) -> str:
    return f"k = {record.protocol.k}, temperature {record.protocol.temperature}"


NEIGHBOUR_FACTS = (data, judged_by_neighbours, votes, image_size)
