"""Records as tables in Markdown, for README.md and docs/.

Each table answers one question; the words around it stand on the page. Below it stands how its
figures came about: first how many seeds and rounds they rest on, then what was done, by which
machine and commit. Where records differ in that, all is told. Of measurements that were repeated,
the last counts. ``plain_tables`` has the rest: files of other measures.
"""

import re
import statistics
from collections.abc import Mapping, Sequence, Set
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from told import (
    NOTHING,
    SUBJECTS,
    AnyRecord,
    Place,
    by_subject,
    by_work,
    data,
    device,
    name_of,
    percentage,
    setting,
)
from tune import digest
from xmoco.records import (
    ClassifierProtocol,
    KnnProtocol,
    Measured,
    SpeedProtocol,
    StageProtocol,
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
    seeds,
    sentence,
)
from xmoco.settings import load_config, recipe_names
from xmoco.tables.definition import read_table, table_names
from xmoco.tables.drawing import Filled, fill, groups_of, markdown, notes

Knn = Measured[KnnProtocol]
Speed = Measured[SpeedProtocol]
Stage = Measured[StageProtocol]
Judged = Measured[KnnProtocol] | Measured[ClassifierProtocol] | Measured[TransferProtocol]

JUDGED: Mapping[str, type[Record]] = {
    "knn_top1": Measured[KnnProtocol],
    "linear_top1": Measured[ClassifierProtocol],
    "finetune_top1": Measured[ClassifierProtocol],
    "transfer_frozen": Measured[TransferProtocol],
    "transfer_end_to_end": Measured[TransferProtocol],
}
"""The measures of backbones, in the order of their rows."""

BASELINES = ("lightly", "torchvision")
"""How the names of other libraries' participants begin."""
UNTRAINED = "untrained"
SHOWN_LAST = ("supervised", UNTRAINED)
"""Backbones to compare with."""
NEIGHBOURS = (20, 200)
"""Of the numbers of neighbours that may vote, these are shown."""
QUARTERS = range(1, 5)
"""Of a training: what it had reached when each was over is shown."""
WORKLOADS = {
    "speed-photographs-resnet50": "ResNet-50, JPEG files, 224 px",
    "speed-cifar10-resnet18": "ResNet-18, CIFAR-10, 32 px",
    "speed-demo-tiny": "The demo's network, on a CPU",
}
IN_BRIEF = {
    "kNN, k 200": "kNN",
    "linear (MoCo)": "linear classifier",
    "transfer to oxford-pets-128-q80, frozen, mean per class": "transfer to Oxford Pets",
}
"""The protocols of the front page, in its words."""
HEADLINE = "linear (MoCo)"

METHODS_SAY = (
    "All were trained on the embedded patterns for a few minutes each, to show that they learn: "
    "so short a training does not tell which of them is the best on photographs. Some have "
    "settings of their own for so few steps; those of ReSSL were changed after a first try that "
    "learned nothing. `supervised` was told the classes."
)

image_size = setting("size", "images of {} px")
WORK_FACTS = (data, setting("batch", "batch {}"), setting("bank_length", "K {:,}"), image_size)


# How good backbones are


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


# The front page


def headline(place: Place) -> str:
    """What runs of the recipes take, and what their weights are worth."""
    parts = photographs_headline(place), long_headline(place), small_images_headline(place)
    told = [*filter(None, parts)]
    lines = [f"- {line}" for line in told]
    link = f"[docs/results.md]({place.up}docs/results.md) has the rest."
    return "\n".join(
        ["**Measured**, on one GPU and without a label:", "", *lines, "", link] if lines else []
    )


RIVALS = ("mocov2plus", "mocov2plus+small views")
LONG = 800
"""Epochs for which others publish what they reach on the same photographs."""


def all_of_photographs(place: Place) -> list[AnyRecord]:
    files = place.files("compare-imagenette*.jsonl")
    return [record for file in files for record in read_records(file, AnyRecord)]


def of_photographs(place: Place, epochs: int) -> list[AnyRecord]:
    """What runs of so many epochs are worth on test images, judged by kNN (k 20) at the size that
    their own settings name; one for every run, its last."""
    found = []
    for run in grouped(all_of_photographs(place), the_run):
        knn = [
            record
            for record in run
            if (record.measure, record.protocol.get("k")) == ("knn_top1", 20)
            and (record.protocol["epochs"], record.protocol["split"]) == (epochs, "test")
            and record.protocol["size"] == size_of(run)
        ]
        found += knn[-1:]
    return found


def size_of(run: Sequence[AnyRecord]) -> int:
    """At which it is to be judged; records of former days do not tell, and have one size only."""
    for record in run:
        if "settings" in record.protocol:
            input = record.protocol["settings"]["input"]
            return int(input["eval_size"] or input["size"])
    return int(run[0].protocol["size"])


def the_run(record: AnyRecord) -> tuple[object, ...]:
    return (*the_entry(record), record.seed)


def the_entry(record: AnyRecord) -> tuple[object, ...]:
    return *in_one_table(record), record.subject, record.protocol["changes"]


def photographs_headline(place: Place) -> str:
    """The methods side by side on photographs, over the same seeds, the best first."""
    groups = [
        group
        for group in grouped(of_photographs(place, 200), compared_with)
        if any(record.subject in RIVALS for record in group)
    ]
    newest = max(groups, key=lambda group: max(record.time for record in group), default=[])
    first: dict[str, list[AnyRecord]] = {}  # of a method's entries; others are variants of it
    for entry in grouped(newest, the_entry):
        first.setdefault(entry[0].subject, entry)
    met = {record.seed for rival in RIVALS for record in first.get(rival, [])}
    entries = [entry for entry in first.values() if {record.seed for record in entry} == met]
    if len(entries) < 2:  # nobody to compare with
        return ""
    entries.sort(key=mean, reverse=True)
    told = [f"with {name_of(entry[0])} {over_seeds(entry)}" for entry in entries]
    facts = entries[0][0].protocol
    shown = {the_entry(entry[0]) for entry in entries}
    weak = all(s["method"].get("weak_keys") for s in settings_of(place, shown))
    keys = f"; all with keys of [weak views]({place.up}docs/methods.md)" if weak else ""
    trials = [
        r for f in place.files("trials-imagenette*.jsonl") for r in read_records(f, AnyRecord)
    ]
    tried = {entry[0].subject for entry in entries} <= {r.subject for r in trials}
    found = "; each with settings of its own, found on images held out of the training set"
    recipe = facts["recipe"]
    same = recipe in recipe_names() and digest(load_config(recipe)) == facts["recipe_digest"]
    return (
        f"{'The' if same else 'An earlier'} recipe `{recipe}`: after {facts['epochs']} epochs of "
        f"photographs, a vote of the {facts['k']} nearest neighbours names "
        f"{', '.join(told)} of the test images rightly ({seeds(entries[0])}; images "
        f"{recoded(entries[0][0].work)}shown at {facts['size']} px{found if tried else ''}{keys})."
    )


def settings_of(place: Place, entries: Set[tuple[object, ...]]) -> list[dict[str, Any]]:
    named = [r for r in all_of_photographs(place) if "settings" in r.protocol]
    return [record.protocol["settings"] for record in named if the_entry(record) in entries]


def long_headline(place: Place) -> str:
    """What our newest long run on photographs is worth, and what it took."""
    ours = [r for r in of_photographs(place, LONG) if r.subject.startswith("xmoco")]
    newest = max(
        grouped(ours, lambda r: (*the_entry(r), r.protocol["size"])),
        key=lambda entry: max(record.time for record in entry),
        default=[],
    )
    if not newest:
        return ""
    facts = newest[0].protocol
    return (
        f"After {LONG} epochs of photographs, trained in {training_time(newest)}, a vote of the "
        f"{facts['k']} nearest neighbours names {over_seeds(newest)} rightly with "
        f"{name_of(newest[0])} ({seeds(newest)}; images {recoded(newest[0].work)}shown at "
        f"{facts['size']} px)."
    )


def small_images_headline(place: Place) -> str:
    """One measured number: what a run of the recipe takes, and what its weights are worth."""
    runs = [r for file in place.files("recipe-cifar10*.jsonl") for r in read_records(file, Knn)]
    judged = [r for file in place.files("protocols-cifar10*.jsonl") for r in judged_records(file)]
    ours = [r for r in judged if r.subject == "xmoco" and protocol_name(r) == HEADLINE]
    if not (runs and ours):
        return ""
    by_size = {record.protocol.size: record for record in ours}
    (size, first), *others = sorted(by_size.items(), reverse=True)
    beside = "".join(f", {record.value:.1f} % at {side} px" for side, record in others)
    return (
        "The recipe `cifar10` trains a ResNet-18 in "
        f"{(runs[-1].protocol.run_seconds or 0) / 60:.0f} minutes on one "
        f"{runs[-1].machine['gpus'][0]}. A linear classifier on top of it names "
        f"{first.value:.1f} % of CIFAR-10's test images rightly ({seeds(ours)}; images "
        f"{recoded(data(first))}shown at {size} px{beside})."
    )


def recoded(name: str) -> str:
    """Whether images were not the original ones: archives such as pets-q80.tar say so."""
    quality = re.search(r"-q(\d+)\b", name)
    return f"re-encoded as JPEG of quality {quality[1]} and " if quality else ""


def results_in_brief(place: Place) -> str:
    tables = []
    for file in place.files("protocols-cifar10*.jsonl"):
        records = [r for r in judged_records(file) if protocol_name(r) in IN_BRIEF]
        table = ProtocolGrid(records).table("judged by", IN_BRIEF)
        tables.append(section(table, sentence(f"each figure is of {seeds(records)}")))
    return "\n\n".join(tables)


def speed_in_brief(place: Place) -> str:
    """xmoco beside the best baseline, a row for every workload."""
    rows = []
    for file in place.files("speed.jsonl"):
        for records in sorted(grouped(speeds_in(file), by_work), key=lambda own: place_of(own[0])):
            ours = [r for r in records if r.subject == "xmoco"]
            others = [r for r in records if r.subject.startswith(BASELINES)]
            if not (ours and others and ours[0].protocol.times_baseline):
                continue
            best = max(others, key=lambda record: record.value)
            rows.append(
                [
                    WORKLOADS.get(best.work, best.work),
                    device(best),
                    f"{ours[0].value:,.0f}",
                    f"{best.value:,.0f} ({name_of(best)})",
                    f"{ours[0].protocol.times_baseline:.2f}",
                    number_of_rounds(ours[0]),
                ]
            )
    headings = ["training", "on", "xmoco, images/s", "best baseline, images/s", "times", "rests on"]
    return markdown_table(headings, "llrrrl", rows) if rows else ""


# How fast training is


def speed_tables(place: Place) -> str:
    """How fast training is, for every workload, and where its time goes."""
    tables = []
    for file in place.files("speed.jsonl"):
        speeds, stages = speeds_in(file), read_records(file, Stage, {"stage_ms"})
        firsts = last_of_each([*speeds, *stages], by_work)
        for first in sorted(firsts, key=place_of):
            tables.append(f"### {WORKLOADS.get(first.work, first.work)}")
            if own := [record for record in speeds if record.work == first.work]:
                tables.append(speed_table(place, file, own))
            if timed := [record for record in stages if record.work == first.work]:
                tables.append(stages_table(place, file, timed))
    return "\n\n".join(tables)


def speed_bounds(place: Place) -> str:
    """xmoco beside the encoder alone where both took turns last, a row for every workload."""
    rows, shown = [], []
    for file in place.files("speed.jsonl"):
        records = read_records(file, Speed, {"images_per_second"})
        turns = grouped(records, lambda record: (record.work, record.commit))
        last = {own[0].work: both for own in turns if (both := with_bound(own)) is not None}
        for work in sorted(last, key=lambda work: place_of(last[work][0])):
            ours, bound = last[work]
            share = f"{100 * ours.value / bound.value:.1f} %"
            speeds = [f"{record.value:,.0f}" for record in (ours, bound)]
            rows.append([WORKLOADS.get(work, work), *speeds, share, number_of_rounds(ours)])
            shown += [ours, bound]
    if not rows:
        return ""
    headings = ["training", "xmoco, images/s", "the encoder alone, images/s", "share", "rests on"]
    return section(markdown_table(headings, "lrrrl", rows), circumstances(shown, *WORK_FACTS))


def with_bound(records: Sequence[Speed]) -> tuple[Speed, Speed] | None:
    """xmoco and the encoder alone, where that is a bound."""
    by_name = {record.subject: record for record in records}
    ours, bound = by_name.get("xmoco"), by_name.get("encoder only")
    if ours is None or bound is None or not (bound.protocol.graph or bound.value > ours.value):
        return None
    return ours, bound


def place_of(record: Record) -> int:
    return list(WORKLOADS).index(record.work) if record.work in WORKLOADS else len(WORKLOADS)


def speeds_in(file: Path) -> list[Speed]:
    """Of every participant the last record, if possible one that was measured beside a baseline.

    Other checkouts of xmoco are no participants that a reader could choose.
    """
    records = read_records(file, Speed, {"images_per_second"})
    records = [record for record in records if not record.subject.startswith("xmoco (")]
    order = list(dict.fromkeys(map(by_subject, records)))
    beside = [record for record in records if record.protocol.times_baseline is not None]
    alone = [record for record in records if record.protocol.times_baseline is None]
    return [
        record
        for same_work in grouped([*alone, *beside], by_work)
        for record in without_loose_bound(
            sorted(last_of_each(same_work, by_subject), key=lambda r: order.index(r.subject))
        )
    ]


def without_loose_bound(records: list[Speed]) -> list[Speed]:
    """The encoder alone is a bound, unless it was launched kernel by kernel and so was slower."""
    ours = max((record.value for record in records if record.subject == "xmoco"), default=0)
    return [
        record
        for record in records
        if record.subject != "encoder only" or record.protocol.graph or record.value > ours
    ]


def number_of_rounds(record: Speed) -> str:
    rounds = len(record.protocol.rounds)
    return "one round" if rounds == 1 else f"the median of {rounds} rounds"


def speed_table(place: Place, file: Path, records: Sequence[Speed]) -> str:
    """Participants beside each other."""
    rows = []
    for record in records:
        told = record.protocol
        ratio, gib = told.times_baseline, told.gpu_memory_gib
        rows.append(
            [
                name_of(record),
                told.precision,
                f"{record.value:,.0f}",
                "" if ratio is None else f"{ratio:.2f}",
                "" if gib is None else f"{gib:.1f} GiB",
                f"{100 * told.waiting:.1f} %",
            ]
        )
    headings = ["", "precision", "images/s", "× best baseline", "GPU memory", "waiting"]
    table = markdown_table(headings, "llrrrr", rows)
    return section(table, circumstances(records, number_of_rounds, *WORK_FACTS), place.link(file))


def stages_table(place: Place, file: Path, records: Sequence[Stage]) -> str:
    """Where the time of a step goes, when that was measured last; a column for every method."""
    columns = {own[0].subject: last_stages(own) for own in grouped(records, by_subject)}
    totals = {name: sum(r.value for r in own.values()) for name, own in columns.items()}

    def cell(name: str, stage: str) -> str:
        if stage not in columns[name]:
            return NOTHING
        value = columns[name][stage].value
        return f"{value:.2f} ms, {100 * value / totals[name]:.0f} %"

    stages = dict.fromkeys(stage for own in columns.values() for stage in own)
    rows = [[stage, *(cell(name, stage) for name in columns)] for stage in stages]
    shown = [record for own in columns.values() for record in own.values()]
    headings = ["stage of a step", *(SUBJECTS.get(name, name) for name in columns)]
    return section(
        markdown_table(headings, "l" + "r" * len(columns), rows),
        "Each stage alone and without a CUDA graph; in training they overlap.",
        circumstances(shown, *WORK_FACTS),
        place.link(file),
    )


def last_stages(records: Sequence[Stage]) -> dict[str, Stage]:
    stages: dict[str, Stage] = {}
    for record in records:
        if record.protocol.stage in stages:  # it was measured again, and so were the others
            stages = {}
        stages[record.protocol.stage] = record
    return stages


# Tests


def gpu_tests(place: Place) -> str:
    """When the tests that need a GPU passed last, and where."""
    found = [r for file in place.files("gpu-tests.jsonl") for r in read_records(file, AnyRecord)]
    if not found:
        return ""
    passed, facts = f"{found[-1].value:g} tests", found[-1].protocol
    skipped = f", {facts['skipped']} skipped" if facts.get("skipped") else ""
    commit = f"; commit {found[-1].commit}" if found[-1].commit else ""
    told = f"{device(found[-1])}{commit}; {found[-1].time[:10]}"
    link = place.link(place.results / "gpu-tests.jsonl")
    return f"Last pass: {passed}{skipped}, in {facts['seconds']:.0f} s; {told}. {link}"


# What is told of backbones


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
