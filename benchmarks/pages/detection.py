"""Tables of what detectors reached on several backbones: the mean over seeds, and its deviation;
of those that overfit a few images; and of how long it takes to evaluate what they found.
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
    f"{kind}_{measure}": f"{kind} {name}"
    for kind in ("box", "mask")
    for measure, name in (("ap", "AP"), ("ap50", "AP50"), ("ap75", "AP75"))
}
FACTS: Sequence[Fact] = (
    lambda r: f"{r.protocol.train_images:,} training images",
    lambda r: f"{r.protocol.judged_images:,} evaluated, shorter side {r.protocol.size} px",
    lambda r: f"batch {r.protocol.batch}",
    lambda r: f"metric {r.protocol.metric}",
)
JUDGES = {"xmoco": "xmoco, by hotcoco", "pycocotools": "pycocotools"}
"""By the subjects of records."""


DETECTED_HEADING = "## Results"
NOTHING_DETECTED = (
    "Average precision on COCO or PASCAL VOC has not been measured yet, nor has any backbone been "
    "compared with another by detection."
)


def detection_tables(place: Place, pattern: str = "detect.jsonl") -> str:
    """One for every detector and set; rows by who made the backbone. Where there are none, that is
    said."""
    tables = []
    for file in place.files(pattern):
        records = read_records(file, Detected, COLUMNS)
        for alike in grouped(records, compared_with):
            tables += [title(alike[0]), table(place, file, alike)]
    return "\n\n".join([DETECTED_HEADING, *(tables or [NOTHING_DETECTED])])


OVERFIT_HEADING = "## Sanity check: overfitting a few images"
OVERFIT_SAYS = (
    "Every detector is trained from scratch on a few images of Penn-Fudan and evaluated on the "
    "same images, so its AP should approach 100. This checks the implementation; it says nothing "
    "about the quality of a backbone."
)


def overfit_tables(place: Place, pattern: str = "detect-overfit.jsonl") -> str:
    """A row for every measure, a column for every detector: those of boxes have no masks."""
    tables = []
    for file in place.files(pattern):
        for alike in grouped(read_records(file, Detected, COLUMNS), learnt_with):
            protocol = alike[0].protocol
            lead = f"**{protocol.train_images} images, {protocol.schedule}**"
            tables += [lead, by_detector(place, file, alike)]
    return "\n\n".join([OVERFIT_HEADING, OVERFIT_SAYS, *tables] if tables else [])


def learnt_with(record: Detected) -> tuple[object, ...]:
    protocol = record.protocol
    told = (protocol.data, protocol.steps, protocol.size, protocol.batch, protocol.metric)
    return (record.subject, record.work, protocol.train_images, *told)


def by_detector(place: Place, file: Path, records: Sequence[Detected]) -> str:
    last = last_of_each(records, lambda r: (r.protocol.model, r.measure, r.seed))
    models = [own[0].protocol.model for own in grouped(last, lambda r: r.protocol.model)]
    models.sort(key=lambda model: DESIGNS[model].masks)
    values = {key(own[0]): [r.value for r in own] for own in grouped(last, key)}
    rows = [
        [name, *(cell(values.get((measure, model), [])) for model in models)]
        for measure, name in COLUMNS.items()
        if any((measure, model) in values for model in models)
    ]
    headings = ["", *(DESIGNS[model].title for model in models)]
    table = markdown_table(headings, "l" + "r" * len(models), rows)
    return section(table, circumstances(last, *FACTS), place.link(file))


def key(record: Detected) -> tuple[str, str]:
    return record.measure, record.protocol.model


def compared_with(record: Detected) -> tuple[object, ...]:
    protocol = record.protocol
    told = (protocol.model, protocol.data, protocol.steps, protocol.size, protocol.metric)
    return (*told, record.work)


def title(record: Detected) -> str:
    protocol = record.protocol
    return f"**{DESIGNS[protocol.model].title}, {record.work}, {protocol.schedule}**"


def table(place: Place, file: Path, records: Sequence[Detected]) -> str:
    """A row for every backbone, a column for every measure."""

    def row(record: Detected) -> tuple[str, ...]:
        return record.subject, record.protocol.digest, record.protocol.model

    last = last_of_each(records, lambda r: (*row(r), r.measure, r.seed))
    rows = []
    for own in grouped(last, row):
        cells = [cell([r.value for r in own if r.measure == measure]) for measure in COLUMNS]
        rows.append([backbone(own[0]), *cells])
    there = {record.measure for record in last}
    kept = [0, *(n for n, measure in enumerate(COLUMNS, start=1) if measure in there)]
    headings = ["backbone", *COLUMNS.values()]
    return section(
        markdown_table(
            [headings[n] for n in kept],
            "l" + "r" * (len(kept) - 1),
            [[row[n] for n in kept] for row in rows],
        ),
        circumstances(last, *FACTS),
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
            text = markdown_table(["evaluated by", "median time", "rounds"], "lrr", rows)
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
