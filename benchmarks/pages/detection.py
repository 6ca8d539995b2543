"""Tables of what detectors reached on several backbones: the mean over seeds, and its deviation;
of what they learn by heart; and of how long it takes to judge what they found.
"""

import statistics
from collections.abc import Sequence
from pathlib import Path

from pages.common import NOTHING, AnyRecord, Place, name_of
from xmoco.detect.models import DESIGNS
from xmoco.records import DetectionProtocol, Measured, read_records
from xmoco.report.circumstances import (
    Fact,
    circumstances,
    grouped,
    last_of_each,
    markdown_table,
    section,
)

Detected = Measured[DetectionProtocol]
COLUMNS = {
    f"{kind}_{measure}": f"{name}, {what}"
    for kind, what in (("box", "boxes"), ("mask", "masks"))
    for measure, name in (("ap", "AP"), ("ap50", "AP50"), ("ap75", "AP75"))
}
JUDGES = {"xmoco": "xmoco, by hotcoco", "pycocotools": "pycocotools"}
"""By the subjects of records."""


def detection_tables(place: Place, pattern: str = "detect.jsonl") -> str:
    """One for every detector and set; rows by who made the backbone."""
    tables = []
    for file in place.files(pattern):
        records = read_records(file, Detected, COLUMNS)
        for alike in grouped(records, compared_with):
            tables += [title(alike[0]), table(place, file, alike, "backbone", backbone)]
    return "\n\n".join(tables)


def overfit_tables(place: Place, pattern: str = "detect-overfit.jsonl") -> str:
    """What detectors know by heart: one for those of boxes, one for those of masks as well, which
    have more columns; rows by detector."""
    tables = []
    for file in place.files(pattern):
        records = read_records(file, Detected, COLUMNS)
        for alike in grouped(records, learnt_with):
            first = alike[0]
            lead = f"**The same images learnt and judged: {first.work}, {first.protocol.schedule}**"
            tables += [lead, table(place, file, alike, "detector", detector)]
    return "\n\n".join(tables)


def learnt_with(record: Detected) -> tuple[object, ...]:
    protocol = record.protocol
    told = (protocol.data, protocol.steps, protocol.size, protocol.batch, protocol.metric)
    return (DESIGNS[protocol.model].masks, record.subject, record.work, *told)


def detector(record: Detected) -> str:
    return DESIGNS[record.protocol.model].title


def compared_with(record: Detected) -> tuple[object, ...]:
    protocol = record.protocol
    told = (protocol.model, protocol.data, protocol.steps, protocol.size, protocol.metric)
    return (*told, record.work)


def title(record: Detected) -> str:
    protocol = record.protocol
    return f"**{DESIGNS[protocol.model].title}, {record.work}, {protocol.schedule}**"


def table(place: Place, file: Path, records: Sequence[Detected], heading: str, name: Fact) -> str:
    """``name`` is of a row, and ``heading`` stands above it."""

    def row(record: Detected) -> tuple[str, ...]:
        return record.subject, record.protocol.digest, record.protocol.model

    last = last_of_each(records, lambda r: (*row(r), r.measure, r.seed))
    rows = []
    for own in grouped(last, row):
        cells = [cell([r.value for r in own if r.measure == measure]) for measure in COLUMNS]
        rows.append([name(own[0]) or "", *cells])
    there = {record.measure for record in last}
    kept = [0, *(n for n, measure in enumerate(COLUMNS, start=1) if measure in there)]
    headings = [heading, *COLUMNS.values()]
    return section(
        markdown_table(
            [headings[n] for n in kept],
            "l" + "r" * (len(kept) - 1),
            [[row[n] for n in kept] for row in rows],
        ),
        circumstances(
            last,
            lambda r: f"{r.protocol.train_images:,} training images",
            lambda r: f"{r.protocol.judged_images:,} judged, shorter side {r.protocol.size} px",
            lambda r: f"batch {r.protocol.batch}",
            lambda r: f"metric {r.protocol.metric}",
        ),
        place.link(file),
    )


def backbone(record: Detected) -> str:
    epochs = record.protocol.epoch
    return name_of(record) + (f", {epochs} epochs" if epochs else "")


def cell(values: Sequence[float]) -> str:
    if not values:
        return NOTHING
    mean = f"{statistics.fmean(values):.1f}"
    return mean if len(values) == 1 else f"{mean} ± {statistics.stdev(values):.1f}"


def judging_tables(place: Place, pattern: str = "detect-metrics.jsonl") -> str:
    """One for every number of images and detections; rows by who judged."""
    tables = []
    for file in place.files(pattern):
        records = read_records(file, AnyRecord, ["judge_seconds"])
        for alike in grouped(map(of_the_host, records), judged):
            last = last_of_each(alike, lambda r: r.subject)
            rows = [
                [JUDGES[r.subject], f"{r.value:#.3g} {r.unit}", str(r.protocol["rounds"])]
                for r in last
            ]
            text = markdown_table(["judged by", "median time", "rounds"], "lrr", rows)
            tables += [
                f"**{judged(last[0])}**",
                section(text, circumstances(last), place.link(file)),
            ]
    return "\n\n".join(tables)


def judged(record: AnyRecord) -> str:
    return ", ".join(
        f"{record.protocol[what]:,} {what}"
        for what in ("images", "objects", "detections", "categories")
    )


def of_the_host(record: AnyRecord) -> AnyRecord:
    """Without the GPUs of the machine, which have no part in judging."""
    host = {key: fact for key, fact in record.machine.items() if key != "gpus"}
    return record.model_copy(update={"machine": host})
