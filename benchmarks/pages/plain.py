"""Tables of any records, whatever they measure: who was measured, and what tells the rows apart."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pages.common import NOTHING, AnyRecord, Place, by_measure, by_subject, by_work, name_of
from xmoco.records import read_records
from xmoco.report.circumstances import Fact, circumstances, grouped, markdown_table

SETTINGS = (
    *("data", "digest", "size", "crop_size", "epoch", "epochs", "batch", "k"),
    *("name", "label_fraction", "set"),
    *("device", "precision", "launch", "stage", "recipe", "changes", "strengths"),
)
"""Of a protocol: records that differ in one of these measure different things."""
LONGEST_FACT = 200


@dataclass(frozen=True)
class Question:
    """What a file of records is asked."""

    file: str
    rows: Mapping[str, str] = field(default_factory=dict)
    """What tells rows apart: keys of the protocol, each with its heading."""
    words: Mapping[str, str] = field(default_factory=dict)
    """For measures and subjects whose names do not say it well."""
    apart: Mapping[str, str] = field(default_factory=dict)
    """Keys of the protocol whose values have tables of their own, each with the words above it."""
    ordered: bool = False
    """Whether rows stand in the order of their values, not of their measurement."""
    lead: str = ""
    """Stands above the tables, if there are any."""


QUESTIONS = {
    "decode": Question(
        "decode.jsonl",
        words={
            "decode_images_per_second": "throughput",
            "xmoco": "reading in processes, decoding on the GPU (xmoco)",
            "xmoco (threads read)": "reading in threads, decoding on the GPU",
            "xmoco (threads decode)": "reading and decoding in threads",
            "xmoco (processes decode)": "reading and decoding in processes (xmoco)",
        },
        apart={"files": "{}"},
    ),
    "views": Question(
        "views.jsonl",
        {"views": "views", "size": "px"},
        {"views_ms": "Device time", "views_host_ms": "Host time"},
    ),
    "norm": Question(
        "norm.jsonl",
        {"shape": "shape"},
        {"cudnn": "plain (cuDNN)", "split": "split (PyTorch)", "fused": "split, fused (xmoco)"},
    ),
    "encoders": Question(
        "encoders.jsonl",
        {"shape": "images"},
        {
            "xmoco (one stream)": "one stream",
            "xmoco": "xmoco",
            "convolution of the stem": "Stem convolution",
            "pooling": "Stem pooling",
            "queries and keys": "Both encoders",
        },
        apart={"operation": "{}"},
    ),
    "loss": Question(
        "loss.jsonl",
        {"bank_length": "K", "launch": "mode"},
        {"loss_ms": "Time", "loss_gpu_memory": "GPU memory"},
        ordered=True,
    ),
    "knn": Question(
        "knn.jsonl",
        {"queries": "test images", "bank_images": "training images"},
        {"knn_seconds": "time", "knn_gpu_memory": "GPU memory"},
    ),
    "logistic": Question(
        "logistic.jsonl",
        words={"logistic_seconds": "time", "logistic_top1": "top-1", "xmoco": "xmoco"},
    ),
    "startup": Question(
        "startup.jsonl",
        {"when": "when", "stage": "stage"},
        {"first_run_seconds": "first run", "later_run_seconds": "later run"},
        apart={"recipe": "recipe {}", "changes": "{}"},
        lead="""## Start-up time of short runs

Two runs, each in its own process: the first compiles the kernels, the second uses the compiled
ones.""",
    ),
    "side-by-side": Question(
        "side-by-side.jsonl",
        {"runs": "concurrent runs"},
        {"images_per_second": "total throughput"},
        apart={"recipe": "recipe {}", "changes": "{}", "multi_process_service": "MPS {}"},
        lead="""## Several runs on one GPU

Several processes train on one GPU at the same time; the total throughput is shown.""",
    ),
}
SHOWN_ELSEWHERE = (
    *("demo.jsonl", "methods.jsonl", "recipe-*.jsonl", "protocols-*.jsonl"),
    *(
        "changed-recipes.jsonl",
        "compare-*.jsonl",
        "trials-*.jsonl",
        "speed.jsonl",
        "gpu-tests.jsonl",
        "chaos.jsonl",
        "fuzz.jsonl",
        "endurance.jsonl",
        "tables*.jsonl",
        "detect.jsonl",
        "detect-metrics.jsonl",
        "detect-overfit.jsonl",
        "detect-speed.jsonl",
        "scaling.jsonl",
        "eval-size.jsonl",
        "tuning.jsonl",
        "shards.jsonl",
    ),
)


def answer(place: Place, question: Question) -> str:
    """Tables of the records that the question is about."""
    tables = []
    for file in place.files(question.file):
        records = read_records(file, AnyRecord)
        if question.ordered:
            records.sort(key=lambda r: tuple(map(r.protocol.__getitem__, question.rows)))
        for group in grouped(records, lambda r: tuple(map(r.protocol.get, question.apart))):
            values = ((form, group[0].protocol[key]) for key, form in question.apart.items())
            of = [
                form.format(question.words.get(str(value), shown(value)))
                for form, value in values
                if value != ""
            ]
            lead = [f"**{', '.join(of)}**"] if of else []
            facts = {heading: protocol_value(key) for key, heading in question.rows.items()}
            tables += [*lead, *plain_tables(group, facts, question.words)]
            tables.append(source(place, file, group, question.apart))
    return "\n\n".join([question.lead, *tables] if tables and question.lead else tables)


def other_tables(place: Place) -> str:
    """The records of files that no table asks for, whatever they measure."""
    asked = [*SHOWN_ELSEWHERE, *(question.file for question in QUESTIONS.values())]
    parts = []
    for file in place.files("*.jsonl"):
        if not any(file.match(pattern) for pattern in asked):
            records = read_records(file, AnyRecord)
            parts += [f"### {file.stem}", *plain_tables(records, settings_of(records))]
            parts.append(source(place, file, records))
    return "\n\n".join(["## Other records", *parts] if parts else [])


def source(place: Place, file: Path, records: Sequence[AnyRecord], told: Iterable[str] = ()) -> str:
    """Below a table: how its figures came about, without what is told above it."""
    shared = shared_facts(records, told)
    return f"{circumstances(records, lambda _: shared)} {place.link(file)}"


def settings_of(records: Sequence[AnyRecord]) -> dict[str, Fact]:
    """What tells any records apart: their work, and the settings in which they differ."""

    def told(record: AnyRecord, keys: Iterable[str]) -> str:
        known = record.protocol | {"seed": record.seed}
        return ", ".join(protocol_fact(key, known[key]) for key in keys if key in known)

    keys = (*SETTINGS, "seed")
    differing = [key for key in keys if len({told(record, [key]) for record in records}) > 1]
    return {"work": by_work, "settings": lambda record: told(record, differing)}


def plain_tables(
    records: Sequence[AnyRecord],
    facts: Mapping[str, Fact],
    words: Mapping[str, str] = MappingProxyType({}),
) -> list[str]:
    """Rows by what tells records apart, columns by who was measured or, of one, by the measure.

    Several measures of several subjects have a table each; but if nothing else tells them apart,
    subjects are the rows and measures the columns of one.
    """
    subjects, measures = ({get(r) for r in records} for get in (by_subject, by_measure))
    rows = {tuple(fact(record) for fact in facts.values()) for record in records}

    def measure_named(record: AnyRecord) -> str:
        return words.get(record.measure, record.measure.replace("_", " "))

    def subject_named(record: AnyRecord) -> str:
        return words.get(record.subject, name_of(record))

    if len(rows) == 1 and len(subjects) > 1:
        return [cross_table(records, {"": subject_named}, measure_named)]
    if len(subjects) == 1:
        return [cross_table(records, facts, measure_named)]
    tables = []
    for own in grouped(records, by_measure):
        lead = [f"{measure_named(own[0])}:"] if len(measures) > 1 else []
        tables += [*lead, cross_table(own, facts, subject_named)]
    return tables


def cross_table(
    records: Sequence[AnyRecord], facts: Mapping[str, Fact], column: Callable[[Any], str]
) -> str:
    """A row for every combination of the facts; where several records meet, the last has the cell.

    Facts in which no records differ are left out.
    """

    def row(record: AnyRecord) -> tuple[str, ...]:
        return tuple(fact(record) or "" for fact in facts.values())

    cells = {(row(record), column(record)): record for record in records}
    rows = list(dict.fromkeys(key for key, _ in cells))
    columns = list(dict.fromkeys(name for _, name in cells))
    kept = [place for place in range(len(facts)) if len({key[place] for key in rows}) > 1] or [0]
    lines = []
    for key in rows:
        found = [cells.get((key, name)) for name in columns]
        values = [NOTHING if r is None else f"{significant(r.value)} {r.unit}" for r in found]
        lines.append([*(key[place] for place in kept), *values])
    headings = [list(facts)[place] for place in kept]
    return markdown_table([*headings, *columns], "l" * len(kept) + "r" * len(columns), lines)


SINGULARS = {"classes": "class", "queries": "query"}
"""Of those that do not only end in s."""
FORMS = {
    **dict.fromkeys(("data", "split", "files", "operation", "dtype", "backbone"), "{}"),
    **{name: f"{{}} {name}" for name in ("images", "views", "readers", "rounds", "queries")},
    **{name: f"{{}} {name}" for name in ("epochs", "classes", "dimensions", "strengths", "fits")},
    "bytes_per_file": "{} bytes per file",
    "bank_length": "K = {}",
    "feature_size": "{} features",
    "knn_k": "k = {}",
    "k": "k = {}",
    "epoch": "weights after {} epochs",
    "trained_size": "trained on crops of {} px",
    "repeats": "each of {} repeats",
    "speed_of_one": "throughput of a single GPU {} images/s",
    "speed_measured_with": "measured with a batch of {}",
}
"""How settings of a protocol are told below a table; others by their names."""


def shared_facts(records: Sequence[AnyRecord], without: Iterable[str] = ()) -> str:
    """What the protocols of all records agree in, as far as it is short."""
    first, *others = (record.protocol for record in records)
    shared = [key for key in first if all(other.get(key) == first[key] for other in others)]
    facts = [
        told(key, first[key])
        for key in shared
        if key not in without and not isinstance(first[key], dict)
    ]
    return "; ".join(fact for fact in facts if len(fact) <= LONGEST_FACT)


def told(key: str, value: object) -> str:
    """A setting of the protocol, in words."""
    if key not in FORMS:
        return protocol_fact(key, value)
    words = FORMS[key].format(shown(value))
    if words != f"1 {key}":
        return words
    return f"1 {SINGULARS.get(key, key.removesuffix('s'))}"


def protocol_fact(key: str, value: object) -> str:
    return f"{key.replace('_', ' ')} {shown(value)}"


def protocol_value(key: str) -> Fact:
    """The value alone, as it stands in a column."""

    def tell(record: AnyRecord) -> str:
        value = record.protocol.get(key)
        match key:
            case "shape" if isinstance(value, list):
                return "×".join(map(str, value))
            case "changes":
                return f"`{value}`"
            case "digest":
                return str(value)[:6]
        return shown(value)

    return tell


def shown(value: object) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value))
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def significant(value: float) -> str:
    """Four digits, or more where there are more before the point."""
    if value == 0 or not math.isfinite(value):
        return str(value)
    return f"{value:,.{max(0, 3 - math.floor(math.log10(abs(value))))}f}"
