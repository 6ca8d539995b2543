"""What is told below a table of records: how its figures came about; and tables in Markdown."""

import statistics
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, TypeVar

from xmoco.records import Measured

Record = Measured[Any]
Fact = Callable[[Any], str | None]
"""Something to tell of a record, if it is known."""
R = TypeVar("R", bound=Record)


def grouped(records: Iterable[R], key: Callable[[R], Hashable]) -> list[list[R]]:
    groups: dict[Hashable, list[R]] = {}
    for record in records:
        groups.setdefault(key(record), []).append(record)
    return list(groups.values())


def last_of_each(records: Iterable[R], key: Callable[[R], Hashable]) -> list[R]:
    """The records that count, in the order in which they were measured first."""
    return list({key(record): record for record in records}.values())


def circumstances(records: Sequence[Record], *facts: Fact) -> str:
    """Seeds, the facts, and then machine, versions, commit and date."""
    general: tuple[Fact, ...] = (
        lambda r: f"torch {r.versions['torch']}" if "torch" in r.versions else None,
        lambda r: f"commit {r.commit}" if r.commit else None,
        lambda r: r.time[:10],
        _trained_before,
    )
    before, after = ([differing(records, fact) for fact in some] for some in (facts, general))
    told = [seeds(records), *before, machines(records), *after]
    return sentence("; ".join(filter(None, told)))


def _trained_before(record: Record) -> str | None:
    """Of weights that were kept: by which code and where they were trained."""
    by = record.protocol.get("trained_by") if isinstance(record.protocol, dict) else None
    if by is None:
        return None
    where = ", ".join([*by["machine"].get("gpus", []), by["machine"]["processor"]])
    return f"trained before, by commit {by['commit'] or 'unknown'} on {where}"


def differing(records: Sequence[Record], fact: Fact) -> str:
    return " / ".join(dict.fromkeys(filter(None, map(fact, records))))


def seeds(records: Sequence[Record]) -> str:
    found = sorted({record.seed for record in records})
    return f"one seed ({found[0]})" if len(found) == 1 else f"seeds {', '.join(map(str, found))}"


def machines(records: Sequence[Record]) -> str:
    """Each with the numbers of threads it had."""
    threads: dict[str, set[int]] = {}
    for record in records:
        if record.machine:
            threads.setdefault(hardware(record), set()).add(record.machine["threads"])
    return " / ".join(f"{name}, {threads_told(numbers)}" for name, numbers in threads.items())


def threads_told(numbers: Iterable[int]) -> str:
    """``1 thread``, ``2 threads`` or, of several runs, ``1 / 2 threads``."""
    some = sorted(numbers)
    return f"{' / '.join(map(str, some))} thread{'s' * (some != [1])}"


def hardware(record: Record) -> str:
    return ", ".join([*record.machine.get("gpus", []), record.machine["processor"]])


def mean_and_deviation(values: Iterable[float], digits: int = 1) -> str:
    """Over seeds: ``85.3 ± 0.6``, or of a single one without a deviation; nothing of none."""
    some = list(values)
    if not some:
        return ""
    deviation = f" ± {statistics.stdev(some):.{digits}f}" if len(some) > 1 else ""
    return f"{statistics.fmean(some):.{digits}f}{deviation}"


def sentence(words: str) -> str:
    """With a capital and a full stop."""
    return f"{words[:1].upper()}{words[1:]}."


def section(table: str, *below: str) -> str:
    return f"{table}\n\n{' '.join(filter(None, below))}"


def markdown_table(headings: Sequence[str], align: str, rows: Iterable[Sequence[str]]) -> str:
    """Without the columns in which no row has anything."""
    rows = list(rows)
    kept = [place for place in range(len(headings)) if any(row[place] for row in rows)]
    rules = ["---:" if side == "r" else "---" for side in align]
    return "\n".join(
        f"| {' | '.join(cells[place] for place in kept)} |" for cells in [headings, rules, *rows]
    )
