"""A table filled with what records tell: a line for every row, of one group of figures."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from xmoco.data.subset import HELD_OUT
from xmoco.methods import method_class
from xmoco.tables.columns import Column
from xmoco.tables.definition import Row, Table
from xmoco.tables.plan import Asked, trials_of_rows
from xmoco.tables.trials import Kept, Trial, divergences
from xmoco.tables.tuning import Tried, with_best_settings


class Group(NamedTuple):
    """What all figures of a table share."""

    source: str
    epochs: int
    split: str
    held_out_share: float | None

    @classmethod
    def of(cls, protocol: Mapping[str, Any]) -> "Group":
        return cls(
            protocol["source"],
            protocol["epochs"],
            protocol["split"],
            protocol.get("held_out_share"),
        )

    def __str__(self) -> str:
        epochs = "1 epoch" if self.epochs == 1 else f"{self.epochs} epochs"
        judged = "test images"
        if self.split == HELD_OUT:
            judged = f"a held-out {100 * (self.held_out_share or 0):g} % of the training images"
        return f"trained on {self.source} for {epochs}, evaluated on {judged}"


@dataclass(frozen=True)
class Cell:
    """What was measured, by seed."""

    values: Mapping[int, float]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values.values())

    @property
    def deviation(self) -> float | None:
        return statistics.stdev(self.values.values()) if len(self.values) > 1 else None


@dataclass(frozen=True)
class Line:
    """A row and what was measured of it."""

    row: Row
    cells: Mapping[Column, Cell]
    trial: Trial | None = None
    """What is trained of it; nothing of a row that is the paper's alone."""

    @property
    def seeds(self) -> int:
        return max((len(cell.values) for cell in self.cells.values()), default=0)

    @property
    def learns_labels(self) -> bool:
        return self.trial is not None and method_class(self.trial.config.method).uses_labels


@dataclass(frozen=True)
class Filled:
    """A table with all that records tell of it in one group."""

    table: Table
    group: Group
    lines: Sequence[Line]
    records: Sequence[Kept]
    tried: Mapping[str, Tried] = field(default_factory=dict)
    """What became of rows' tries, where the table has trials of them."""
    diverged: Sequence[str] = ()
    """Runs of which nothing else is known, and when it was."""

    @property
    def columns(self) -> list[Column]:
        """Those of which something is known: not every device measures all."""
        known = [c for c in self.table.measured if any(c in line.cells for line in self.lines)]
        return known or self.table.measured

    def measured_only(self) -> "Filled":
        """Without the rows that are still to be measured."""
        lines = [line for line in self.lines if line.cells or line.row.paper_only]
        return replace(self, lines=lines)


def fill(
    table: Table, records: Sequence[Kept], group: Group, overrides: Sequence[str] = ()
) -> Filled:
    """The table of one group. A record belongs to the row whose settings it has."""
    asked = Asked(held_out=group.held_out_share, overrides=tuple(overrides))
    chosen = with_best_settings(table, asked, records, group.source, group.epochs)
    trials = trials_of_rows(chosen.table, overrides)
    own = [
        record for record in records if _of_a_table(record) and Group.of(record.protocol) == group
    ]
    shown: list[Kept] = []
    lines: list[Line] = []
    diverged: list[str] = []
    for row in table.rows:
        trial = trials.get(row.name)
        found = [r for r in own if trial is not None and identity(r) == trial.identity]
        cells = {}
        for column in table.measured:
            last = {r.seed: r for r in found if trial is not None and trial.is_shown(column, r)}
            if last:
                cells[column] = Cell({seed: record.value for seed, record in last.items()})
                shown += last.values()
        for seed in dict.fromkeys(record.seed for record in found):
            ends = divergences([record for record in found if record.seed == seed])
            diverged += [f"{row.name}, seed {seed}{end}" for end in ends.values()]
        lines.append(Line(row, cells, trial))
    return Filled(table, group, lines, shown, chosen.tried, diverged)


def fill_all(table: Table, records: Sequence[Kept]) -> list[Filled]:
    """The table of every group of which records tell something."""
    groups = dict.fromkeys(Group.of(r.protocol) for r in records if _of_a_table(r))
    filled = [fill(table, records, group) for group in groups]
    return [one for one in filled if one.records or one.diverged]


def identity(record: Kept) -> tuple[str, Any]:
    return record.subject, record.protocol["settings"]


def _of_a_table(record: Kept) -> bool:
    return {"source", "settings", "epochs", "split"} <= record.protocol.keys()
