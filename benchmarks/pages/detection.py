"""Tables of what detectors reached on several backbones: the mean over seeds, and its deviation;
of those that overfit a few images; of how fast they are trained, and whether to equal AP; and of
how long it takes to evaluate what they found.
"""

import statistics
from collections.abc import Sequence
from pathlib import Path

from pydantic import BaseModel, Field

from pages.common import (
    NOTHING,
    SUBJECTS,
    AnyRecord,
    Place,
    by_subject,
    by_work,
    data,
    name_of,
    setting,
)
from pages.speed import number_of_rounds
from xmoco.detect.models import DESIGNS
from xmoco.nn.named_models import SCRATCH
from xmoco.records import (
    STRICT,
    DetectionProtocol,
    Measured,
    Name,
    SpeedProtocol,
    read_records,
)
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
batch = setting("batch", "batch {}")
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
    return (*told, protocol.batch, protocol.train_images, record.work)


def title(record: Detected) -> str:
    protocol = record.protocol
    return f"**{DESIGNS[protocol.model].title}, {record.work}, {protocol.schedule}**"


def table(place: Place, file: Path, records: Sequence[Detected]) -> str:
    """A row for every backbone, a column for every measure."""

    def row(record: Detected) -> tuple[str, ...]:
        return record.subject, record.protocol.digest, record.protocol.model

    last = last_of_each(records, lambda r: (*row(r), r.measure, r.seed))
    scratch = [r.value for r in last if (r.subject, r.measure) == (SCRATCH, "box_ap")]
    rows = []
    for own in grouped(last, row):
        cells = [cell([r.value for r in own if r.measure == measure]) for measure in COLUMNS]
        least = [] if own[0].subject == SCRATCH else scratch
        above = difference([r.value for r in own if r.measure == "box_ap"], least)
        rows.append([backbone(own[0]), *cells, above])
    there = {record.measure for record in last}
    kept = [0, *(n for n, measure in enumerate(COLUMNS, start=1) if measure in there)]
    headings = ["backbone", *COLUMNS.values()]
    if any(row[-1] for row in rows):
        headings.append("box AP above scratch")
        kept.append(len(headings) - 1)
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


def difference(values: Sequence[float], others: Sequence[float]) -> str:
    """By how much the mean of some is above that of others, and how many deviations of a single
    value that is."""
    if not values or not others:
        return ""
    above = statistics.fmean(values) - statistics.fmean(others)
    if len(values) < 2 or len(others) < 2:
        return f"{above:+.1f}"
    deviation = (statistics.variance(values) / 2 + statistics.variance(others) / 2) ** 0.5
    if deviation == 0:  # after few steps nobody finds anything, whatever the seed
        return f"{above:+.1f}"
    return f"{above:+.1f} ({above / deviation:.1f} deviations)"


class TrainingSpeed(SpeedProtocol):
    """How fast a detector is trained."""

    model: Name
    images: Name = Field(description="In which form they wait for their turn.")


class ShortTraining(BaseModel):
    """What was trained by one program or the other, to compare the AP it reached."""

    model_config = STRICT

    data: Name
    model: Name
    weights: Name = Field(description="Who made the backbone.")
    digest: Name
    backbone: Name
    batch: int = Field(ge=1)
    size: int = Field(ge=1)
    steps: int = Field(ge=1)
    metric: Name
    judged_images: int = Field(ge=1)


TRAINERS = {
    "xmoco": "xmoco",
    "torchvision": "torchvision's reference loop",
    "torchvision, amp": "torchvision's reference loop, mixed precision",
}
"""By the subjects of records."""
SPEED_HEADING = "## Training speed"
SPEED_SAYS = (
    "One detector is trained on the same images in the same order by xmoco and by the loop of "
    "torchvision's reference program, in alternating rounds on one GPU. AP after short training "
    "shows whether they learn equally well: all start from the same weights, and before testing "
    "batch statistics are re-estimated on the same number of images."
)


def training_tables(place: Place, pattern: str = "detect-speed.jsonl") -> str:
    """How fast xmoco and others train a detector, and what AP it reaches."""
    tables = []
    for file in place.files(pattern):
        speeds = read_records(file, Measured[TrainingSpeed], ["detect_images_per_second"])
        for alike in grouped(speeds, by_work):
            tables += [f"**{trained(alike[0])}**", speed_table(place, file, alike)]
        for alike in grouped(read_records(file, Measured[ShortTraining], COLUMNS), trained_alike):
            lead = f"**AP of {trained(alike[0])}, after {alike[0].protocol.steps:,} steps**"
            tables += [lead, equality_table(place, file, alike)]
    return "\n\n".join([SPEED_HEADING, SPEED_SAYS, *tables] if tables else [])


def trained(record: Measured[TrainingSpeed] | Measured[ShortTraining]) -> str:
    return f"{DESIGNS[record.protocol.model].title}, {data(record)}, {record.protocol.size} px"


def trained_alike(record: Measured[ShortTraining]) -> tuple[object, ...]:
    protocol = record.protocol
    return record.work, protocol.data, protocol.steps, protocol.digest, protocol.metric


def speed_table(place: Place, file: Path, records: Sequence[Measured[TrainingSpeed]]) -> str:
    last = last_of_each(records, by_subject)
    rows = []
    for record in last:
        told = record.protocol
        ratio, gib = told.times_baseline, told.gpu_memory_gib
        rows.append(
            [
                TRAINERS.get(record.subject, record.subject),
                told.precision,
                told.images,
                f"{record.value:.1f}",
                "" if ratio is None else f"{ratio:.2f}",
                "" if gib is None else f"{gib:.1f} GiB",
                f"{100 * told.waiting:.1f} %",
            ]
        )
    headings = ["program", "precision", "images", "images/s", "× best baseline", "GPU memory"]
    table = markdown_table([*headings, "waiting"], "lllrrrr", rows)
    return section(table, circumstances(last, number_of_rounds, batch), place.link(file))


def equality_table(place: Place, file: Path, records: Sequence[Measured[ShortTraining]]) -> str:
    """A row for every program, and how far xmoco is above it."""
    last = last_of_each(records, lambda r: (r.subject, r.measure, r.seed))
    values: dict[tuple[str, str], list[float]] = {}
    for record in last:
        values.setdefault((record.subject, record.measure), []).append(record.value)
    ours = values.get(("xmoco", "box_ap"), [])
    rows = [
        [
            TRAINERS.get(name, name),
            *(cell(own) if (own := values.get((name, measure))) else "" for measure in COLUMNS),
            "" if name == "xmoco" else difference(ours, values.get((name, "box_ap"), [])),
        ]
        for name in dict.fromkeys(record.subject for record in last)
    ]
    headings = ["program", *COLUMNS.values(), "box AP of xmoco above it"]
    table = markdown_table(headings, "l" + "r" * (len(headings) - 1), rows)
    facts: Sequence[Fact] = (
        lambda r: (
            f"weights: {SUBJECTS.get(r.protocol.weights, r.protocol.weights)}, "
            f"{r.protocol.backbone}"
        ),
        lambda r: f"{r.protocol.judged_images:,} evaluated",
        lambda r: f"metric {r.protocol.metric}",
    )
    return section(table, circumstances(last, *facts, batch), place.link(file))


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
