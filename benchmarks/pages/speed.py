"""How fast training is, and where its time goes."""

from collections.abc import Sequence
from pathlib import Path

from pages.common import (
    NOTHING,
    SUBJECTS,
    WORK_FACTS,
    Place,
    by_subject,
    by_work,
    name_of,
)
from xmoco.records import (
    Measured,
    SpeedProtocol,
    StageProtocol,
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

Speed = Measured[SpeedProtocol]
Stage = Measured[StageProtocol]

BASELINES = ("lightly", "torchvision")
"""How the names of other libraries' participants begin."""
WORKLOADS = {
    "speed-photographs-resnet50": "ResNet-50, JPEG files, 224 px",
    "speed-cifar10-resnet18": "ResNet-18, CIFAR-10, 32 px",
    "speed-demo-tiny": "The demo's network, on a CPU",
}


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
    headings = ["workload", "xmoco, images/s", "encoder only, images/s", "share", "measurement"]
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
    headings = ["program", "precision", "images/s", "× best baseline", "GPU memory", "waiting"]
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
    headings = ["stage", *(SUBJECTS.get(name, name) for name in columns)]
    return section(
        markdown_table(headings, "l" + "r" * len(columns), rows),
        "Each stage was timed separately and without a CUDA graph; in training, stages overlap.",
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
