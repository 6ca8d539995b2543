"""Tables of steps in several processes, and of images in shards."""

from collections.abc import Sequence

from pages.common import NOTHING, AnyRecord, Place
from pages.plain import source
from xmoco.records import read_records
from xmoco.report.circumstances import grouped, last_of_each, markdown_table, section

PREDICTED = "predicted_step_ms"
FILES = "files"
KEPT_IN = {FILES: "files", "tar": "tar", "parquet": "Parquet, uncompressed"}


def scaling_tables(place: Place) -> str:
    """Measured steps beside their predictions, and predictions for clusters."""
    parts = []
    for file in place.files("scaling.jsonl"):
        records = last_of_each(
            read_records(file, AnyRecord), lambda r: (r.work, r.subject, r.protocol["batch"])
        )
        measured = [record for record in records if record.measure != PREDICTED]
        clusters = [record for record in records if record.measure == PREDICTED]
        if measured:
            table = markdown_table(
                ["", "scaling", "batch", "step time", "predicted", "sent per step and process"],
                "llrrrr",
                [measured_row(record) for record in measured],
            )
            parts.append(section(table, source(place, file, measured)))
        if clusters:
            table = markdown_table(
                ["prediction", "scaling", "batch", "step time", "efficiency", "images/s", "sent"],
                "llrrrrr",
                [predicted_row(own) for own in sorted(of_one_size(clusters), key=number_of_gpus)],
            )
            parts.append(section(table, source(place, file, clusters)))
    return "\n\n".join(parts)


def kind(record: AnyRecord) -> str:
    return "strong" if "strong" in record.work else "weak"


def measured_row(record: AnyRecord) -> list[str]:
    protocol = record.protocol
    return [
        record.subject,
        kind(record),
        f"{protocol['batch']:,}",
        f"{record.value:,.0f} ms",
        f"{protocol['predicted_ms']:,.0f} ms",
        f"{protocol['sent_mb']:,.2f} MB",
    ]


def of_one_size(records: Sequence[AnyRecord]) -> list[list[AnyRecord]]:
    """Strong and weak scaling meet where as many GPUs share the same batch."""
    return grouped(records, lambda r: (r.subject, r.protocol["batch"], r.value))


def number_of_gpus(records: Sequence[AnyRecord]) -> tuple[int, int]:
    return int(records[0].subject.split()[0]), records[0].protocol["batch"]


def predicted_row(records: Sequence[AnyRecord]) -> list[str]:
    record = records[-1]
    protocol = record.protocol
    return [
        record.subject,
        " and ".join(dict.fromkeys(map(kind, records))),
        f"{protocol['batch']:,}",
        f"{record.value:,.1f} ms",
        f"{protocol['of_ideal']:.0f} %",
        f"{protocol['images_per_second']:,}",
        f"{protocol['sent_mb']:,.0f} MB",
    ]


def shards_table(place: Place) -> str:
    """What an index takes, and how fast images are read from shards and from files."""
    parts = []
    for file in place.files("shards.jsonl"):
        records = last_of_each(
            read_records(file, AnyRecord), lambda r: (r.work, r.measure, r.subject)
        )
        rows = grouped(records, lambda r: (r.protocol["images"], r.subject))
        rows.sort(key=lambda own: (own[0].protocol["images"], own[0].subject != FILES))
        table = markdown_table(
            ["images", "storage", "index build time", "index memory", "throughput", "vs files"],
            "rlrrrr",
            [shards_row(own) for own in rows],
        )
        parts.append(section(table, source(place, file, records)))
    return "\n\n".join(parts)


def shards_row(records: Sequence[AnyRecord]) -> list[str]:
    values = {record.measure: record.value for record in records}

    def told(measure: str, form: str) -> str:
        return form.format(values[measure]) if measure in values else NOTHING

    return [
        f"{records[0].protocol['images']:,}",
        KEPT_IN[records[0].subject],
        told("index_seconds", "{:.1f} s"),
        told("index_memory", "{:.0f} MB"),
        told("read_per_second", "{:,.0f} images/s"),
        told("read_beside_files", "{:.0f} %"),
    ]
