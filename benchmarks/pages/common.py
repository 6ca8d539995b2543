"""What is told of records on a page: what is called how, and where it is found."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xmoco.demo import NAMES
from xmoco.records import Measured
from xmoco.report.circumstances import Fact, Record, threads_told
from xmoco.report.tables import METHOD_NAMES

ROOT = Path(__file__).resolve().parents[2]

AnyRecord = Measured[dict[str, Any]]

NOTHING = "–"
NO_CHANGES = "none"
"""What the records in tuning.jsonl have for a recipe as it is."""
SUBJECTS = {
    **METHOD_NAMES,
    **NAMES,
    "supervised": "supervised",
    "moco": "MoCo (one direction)",
    "mocov2plus+weak keys": "MoCo v2+ with weak keys",
    "mocov2plus+weak keys+small views": "MoCo v2+ with weak keys and small views",
    "mocov2plus+predictor": "MoCo v2+ with a predictor",
    "mocov2plus (again)": "MoCo v2+, repeated",
    "xmoco, K 65,536": "XMoCo, K = 65,536",
    "xmoco (plain)": "XMoCo, plain PyTorch",
    "encoder only": "encoder only, compiled (upper bound)",
    "lightly": "lightly, tuned",
    "lightly, compiled": "lightly, tuned and compiled",
    "lightly (its defaults)": "lightly, defaults",
}


@dataclass(frozen=True)
class Place:
    """Where records are, and the page that shows them."""

    results: Path
    up: str = ""
    """Leads from the page to the root of the repository."""

    def files(self, pattern: str) -> list[Path]:
        return sorted(self.results.glob(pattern))

    def link(self, file: Path) -> str:
        where = f"{self.up}{file.relative_to(ROOT)}" if file.is_relative_to(ROOT) else file.name
        return f"([records]({where}))"


def by_work(record: Record) -> str:
    return record.work


def by_subject(record: Record) -> str:
    return record.subject


def by_measure(record: Record) -> str:
    return record.measure


def percentage(record: Record | None) -> str:
    return NOTHING if record is None else f"{record.value:.1f} {record.unit}"


def common_overrides(trials: Sequence[str]) -> tuple[str, dict[str, str]]:
    """What the overrides of all trials have in common, as a sentence, and what each has besides."""
    parts = {trial: [] if trial == NO_CHANGES else trial.split() for trial in trials}
    shared = [
        part for part in next(iter(parts.values()), []) if all(part in p for p in parts.values())
    ]
    own = {trial: " ".join(p for p in some if p not in shared) for trial, some in parts.items()}
    told = f"All have `{' '.join(shared)}`." if shared else ""
    return told, {trial: f"`{words}`" if words else "" for trial, words in own.items()}


def name_of(record: Record) -> str:
    return SUBJECTS.get(record.subject, record.subject)


def device(record: Record) -> str:
    """What did the computing, in short."""
    processor = f"{record.machine['processor']}, {threads_told([record.machine['threads']])}"
    return ", ".join(record.machine.get("gpus", [])) or processor


def setting(key: str, words: str) -> Fact:
    """A setting of the protocol in words, where it has it."""

    def tell(record: Record) -> str | None:
        value = getattr(record.protocol, key)
        return None if value is None else words.format(value)

    return tell


def data(record: Record) -> str:
    """Without what tells the split: ``archive pets.tar (train), 80 % kept`` is of pets.tar."""
    return str(record.protocol.data).partition(" (train)")[0]


image_size = setting("size", "images of {} px")
WORK_FACTS = (data, setting("batch", "batch {}"), setting("bank_length", "K = {:,}"), image_size)
