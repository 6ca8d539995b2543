"""What the front page says in brief."""

import json
import re
from collections.abc import Sequence

from pages.accuracy import Knn, ProtocolGrid, judged_records, mean, protocol_name
from pages.common import (
    AnyRecord,
    Place,
    by_work,
    common_overrides,
    data,
    device,
    name_of,
)
from pages.comparisons import compared_with, in_one_table, over_seeds, training_time
from pages.effort import method_of, trials
from pages.speed import BASELINES, WORKLOADS, number_of_rounds, place_of, speeds_in
from pages.trials import all_trials, overlapping
from xmoco.config import InputConfig
from xmoco.records import (
    read_records,
)
from xmoco.report.circumstances import (
    grouped,
    markdown_table,
    section,
    seeds,
    sentence,
)
from xmoco.settings import load_config, recipe_names
from xmoco.tables.trials import recipe_digest

IN_BRIEF = {
    "kNN (k = 200)": "kNN top-1 (k = 200)",
    "linear (MoCo)": "linear top-1 (MoCo's protocol)",
    "transfer to oxford-pets-128-q80, frozen, mean per class": "Oxford Pets 128 px, mean per class",
}
"""The protocols of the front page, in its words."""
HEADLINE = "linear (MoCo)"


def headline(place: Place) -> str:
    """What runs of the recipes take, and what their weights are worth."""
    parts = photographs_headline(place), long_headline(place), small_images_headline(place)
    told = [*filter(None, parts)]
    lines = [f"- {line}" for line in told]
    link = f"All results are in [docs/results.md]({place.up}docs/results.md)."
    return "\n".join(
        ["**Results** on one GPU, trained without labels:", "", *lines, "", link] if lines else []
    )


RIVAL = "mocov2plus"
"""With whatever is added to it."""
LONG = 800
"""Epochs for which others publish what they reach on the same photographs."""


def all_of_photographs(place: Place) -> list[AnyRecord]:
    of_tables = all_trials(place, "tables*.jsonl")
    own = [record for record in of_tables if record.work.startswith("imagenette")]
    return [*all_trials(place, "compare-imagenette*.jsonl"), *own]


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
            input = InputConfig().model_dump() | record.protocol["settings"].get("input", {})
            return int(input["eval_size"] or input["size"])
    return int(next(r.protocol["size"] for r in run if "size" in r.protocol))


def the_run(record: AnyRecord) -> tuple[object, ...]:
    return (*the_entry(record), record.seed)


def the_entry(record: AnyRecord) -> tuple[object, ...]:
    """By its settings, however they were asked for."""
    facts = record.protocol
    own = json.dumps(facts["settings"], sort_keys=True) if "source" in facts else facts["changes"]
    return *in_one_table(record), record.subject, own


def photographs_headline(place: Place) -> str:
    """All entries side by side on photographs, the best first: of a method's several, the better
    one may not be the first."""
    groups = [
        group
        for group in grouped(of_photographs(place, 200), compared_with)
        if any(record.subject.startswith(RIVAL) for record in group)
    ]
    newest = max(groups, key=lambda group: max(record.time for record in group), default=[])
    entries = sorted(entries_of(newest), key=mean, reverse=True)
    if len({entry[0].subject for entry in entries}) < 2:  # nobody to compare with
        return ""
    most = max(entries, key=lambda entry: len({record.seed for record in entry}))
    told = []
    for entry, name in zip(entries, names_of(entries), strict=True):
        others = "" if seeds(entry) == seeds(most) else f" ({seeds(entry)})"
        told.append(f"{over_seeds(entry)} with {name}{others}")
    facts = entries[0][0].protocol
    names = dict.fromkeys(method_of(entry[0]) for entry in entries)
    tried = [trial.method for trial in trials(place) if trial.recipe == facts["recipe"]]
    effort = ", ".join(f"{tried.count(name)} of {name}" for name in names) if tried else ""
    found = f"; trials of settings on held-out images: {effort}" if effort else ""
    recipe = facts["recipe"]
    known = recipe in recipe_names()
    same = known and recipe_digest(load_config(recipe)) == facts["recipe_digest"]
    return (
        f"Imagenette, {facts['epochs']} epochs of {'the' if same else 'an earlier'} recipe "
        f"`{recipe}`: kNN top-1 (k = {facts['k']}) of {', '.join(told)} ({seeds(most)}; "
        f"{recoded(entries[0][0].work)}evaluated at {facts['size']} px{found})."
    )


def entries_of(records: Sequence[AnyRecord]) -> list[list[AnyRecord]]:
    """Over seeds: of the same changes to a recipe, which settings that do nothing may have joined
    between two runs, or of the same settings, however these were asked for."""
    entries: list[list[AnyRecord]] = []
    for own in grouped(records, lambda r: (r.subject, *sorted(r.protocol["changes"].split()))):
        settings = set(map(the_entry, own))
        alike = next((entry for entry in entries if settings & set(map(the_entry, entry))), None)
        if alike is None:
            entries.append(own)
        else:
            alike += own
    return entries


def names_of(entries: Sequence[Sequence[AnyRecord]]) -> list[str]:
    """The methods, and where one has several entries, in which settings these differ."""
    names = []
    for entry in entries:
        alike = [one[0] for one in entries if one[0].subject == entry[0].subject]
        _, own = common_overrides([record.protocol["changes"] for record in alike])
        changes = own[entry[0].protocol["changes"]]
        names.append(f"{name_of(entry[0])} {changes}".strip())
    return names


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
    facts, time = newest[0].protocol, training_time(newest, overlapping(place))
    took = "" if time is None else f"; training time {time}"
    return (
        f"Imagenette, {LONG} epochs: kNN top-1 (k = {facts['k']}) of {over_seeds(newest)} with "
        f"{name_of(newest[0])} ({seeds(newest)}; {recoded(newest[0].work)}evaluated at "
        f"{facts['size']} px{took})."
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
        "CIFAR-10: the recipe `cifar10` trains a ResNet-18 in "
        f"{(runs[-1].protocol.run_seconds or 0) / 60:.0f} minutes on one "
        f"{runs[-1].machine['gpus'][0]}; linear top-1 (MoCo's protocol) is {first.value:.1f} % "
        f"({seeds(ours)}; {recoded(data(first))}evaluated at {size} px{beside})."
    )


def recoded(name: str) -> str:
    """Whether images were not the original ones: archives such as pets-q80.tar say so."""
    if name.startswith("imagenette-resnet"):  # the archive's former name: docs/results.md
        name = "imagenette-128-q75"
    quality = re.search(r"-q(\d+)\b", name)
    return f"images re-encoded as JPEG of quality {quality[1]}; " if quality else ""


def results_in_brief(place: Place) -> str:
    tables = []
    for file in place.files("protocols-cifar10*.jsonl"):
        records = [r for r in judged_records(file) if protocol_name(r) in IN_BRIEF]
        table = ProtocolGrid(records).transposed("backbone", IN_BRIEF)
        tables.append(section(table, sentence(f"all figures are from {seeds(records)}")))
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
                    f"{WORKLOADS.get(best.work, best.work)}, K = {ours[0].protocol.bank_length:,}",
                    device(best),
                    f"{ours[0].value:,.0f}",
                    f"{best.value:,.0f} ({name_of(best)})",
                    f"{ours[0].protocol.times_baseline:.2f}×",
                    number_of_rounds(ours[0]),
                ]
            )
    headings = [
        *("workload", "device", "xmoco, images/s", "best baseline, images/s"),
        *("speed-up", "measurement"),
    ]
    return markdown_table(headings, "llrrrl", rows) if rows else ""
