"""Trials of all programs that train: where their records are, and which runs overlapped in time."""

from collections.abc import Set
from datetime import datetime
from typing import Any

from pages.common import AnyRecord, Place
from xmoco.records import read_records
from xmoco.report.circumstances import grouped
from xmoco.tables.trials import with_facts

FILES = ("compare-*.jsonl", "trials-*.jsonl", "tables*.jsonl")
TOLERANCE = 2.0
"""Seconds: times of records are whole ones."""


def all_trials(place: Place, *patterns: str) -> list[AnyRecord]:
    """With what tells trials apart, which old records told in part."""
    files = [file for pattern in patterns or FILES for file in place.files(pattern)]
    return [record for file in files for record in with_facts(read_records(file, AnyRecord))]


def the_run(record: AnyRecord) -> tuple[Any, ...]:
    """What the records of one training have in common."""
    told = ("split", "held_out_share", "recipe_digest")
    changes = tuple(sorted(record.protocol.get("changes", "").split()))
    return record.subject, record.work, record.seed, changes, *map(record.protocol.get, told)


def overlapping(place: Place) -> Set[tuple[Any, ...]]:
    """The runs that trained while another did on such a machine, by the time of their first record
    and the seconds of training before it: these are no measure of speed."""
    files = [file for pattern in FILES for file in place.files(pattern)]
    records = [record for file in files for record in read_records(file, AnyRecord)]
    spans = []
    for run in grouped(records, the_run):
        ends = [
            record
            for record in run
            if record.time
            and "train_seconds" in record.protocol
            and "trained_by" not in record.protocol
        ]
        if ends:
            first = min(ends, key=lambda record: record.time)
            end = datetime.fromisoformat(first.time).timestamp()
            machine = str(sorted(first.machine.items()))
            spans.append((machine, end - first.protocol["train_seconds"], end, the_run(first)))
    spans.sort(key=lambda span: span[:2])
    found = set()
    for place_in_time, (machine, _, end, run_key) in enumerate(spans):
        for other, begun, _, other_key in spans[place_in_time + 1 :]:
            if other != machine or begun > end - TOLERANCE:
                break
            found |= {run_key, other_key}
    return found
