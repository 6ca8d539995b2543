"""As many trials for every row of a table: each takes the best of a few learning rates.

Rates are tried in short trainings and judged by images held out of the training set. The trials of
a table are a table themselves, with a row for every rate of every row, which is run and drawn like
others; what was chosen follows from its records.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from xmoco.tables.columns import COLUMNS
from xmoco.tables.definition import Row, Table, Tuning
from xmoco.tables.plan import Asked, trials_of_rows
from xmoco.tables.trials import DIVERGED, PART, Kept, split_facts

SETTING = "learning_rate"


def is_tuned(table: Table, asked: Asked) -> bool:
    """Whether rates are to be chosen: not in trials, nor where the rate is given for all rows."""
    given = {change.partition("=")[0].strip().removeprefix("optim.") for change in asked.overrides}
    return table.tuning is not None and asked.held_out is None and SETTING not in given


def trials_asked(table: Table, asked: Asked) -> tuple[Table, Asked]:
    """The table of trials, and how it is to be run."""
    tuning = table.tuning
    assert tuning is not None
    trials = trial_table(table, asked.epochs or table.epochs, asked.overrides)
    rows = None
    if asked.rows is not None:
        rows = tuple(
            trial_name(row, factor)
            for row in table.trained
            if row.name in asked.rows
            for factor in tuning.rates
        )
    how = Asked(data=asked.data, rows=rows, held_out=tuning.share, overrides=asked.overrides)
    return trials, how


def trial_table(table: Table, epochs: int, overrides: Sequence[str] = ()) -> Table:
    """A row for every rate of every row; ``epochs`` are the table's own."""
    tuning = table.tuning
    assert tuning is not None
    usual = usual_rates(table, overrides)
    rows = [
        Row(
            name=trial_name(row, factor),
            recipe=row.recipe,
            settings=with_rate(row, factor, usual[row.name]),
        )
        for row in table.trained
        for factor in tuning.rates
    ]
    return table.model_copy(
        update={
            "title": f"{table.title}: learning rates",
            "epochs": trial_epochs(tuning, epochs),
            "seeds": table.seeds[:1],
            # All but what is trained by itself: what is tried here, another table may have as well.
            "columns": [name for name in table.columns if name != "linear" or name == tuning.by],
            "axis": None,
            "paper": "",
            "paper_columns": [],
            "chosen": "",
            "tuning": None,
            "rows": rows,
        }
    )


def trial_epochs(tuning: Tuning, epochs: int) -> int:
    return min(tuning.epochs, epochs)


def trial_names(table: Table, row: str) -> set[str]:
    """Of the rows that a row's trials are."""
    assert table.tuning is not None
    (own,) = (one for one in table.trained if one.name == row)
    return {trial_name(own, factor) for factor in table.tuning.rates}


def trial_name(row: Row, factor: float) -> str:
    return f"{row.name}, rate × {factor:g}"


def usual_rates(table: Table, overrides: Sequence[str]) -> dict[str, float]:
    trials = trials_of_rows(table, overrides)
    return {name: trial.config.optim.learning_rate for name, trial in trials.items()}


def with_rate(row: Row, factor: float, usual: float) -> str:
    """The row's settings; its own rate is not named, so that its trial may be another table's."""
    changed = [] if factor == 1 else [f"{SETTING}={factor * usual:.10g}"]
    return " ".join([*row.settings.split(), *changed])


@dataclass(frozen=True)
class Tried:
    """What became of a row's rates."""

    judged: Mapping[float, float]
    """Accuracy by factor of the row's own rate."""
    diverged: Sequence[float]
    missing: Sequence[float]

    @property
    def best(self) -> float | None:
        """None if all have diverged, or as long as one is missing. Of equal ones the row's own."""
        if self.missing or not self.judged:
            return None
        return max(self.judged, key=lambda factor: (self.judged[factor], factor == 1))

    @property
    def all_diverged(self) -> bool:
        return not (self.missing or self.judged)


@dataclass(frozen=True)
class Tuned:
    """A table whose rows have the best of their rates, or their own as long as none is chosen."""

    table: Table
    tried: Mapping[str, Tried]
    """By row."""

    @property
    def waiting(self) -> list[str]:
        """Rows whose trials are not all there."""
        return [name for name, tried in self.tried.items() if tried.missing]

    @property
    def all_diverged(self) -> list[str]:
        """Rows of which every trial did."""
        return [name for name, tried in self.tried.items() if tried.all_diverged]


def with_best_rates(
    table: Table, asked: Asked, records: Sequence[Kept], source: str, epochs: int
) -> Tuned:
    """The table as it is trained for so many epochs, by what records of images from ``source`` tell
    of its trials."""
    tuning, overrides = table.tuning, asked.overrides
    if tuning is None or not is_tuned(table, asked):
        return Tuned(table, {})
    trials = trial_table(table, epochs, overrides)
    facts = {"source": source, "epochs": trials.epochs, **split_facts(tuning.share)}
    own = [
        record
        for record in records
        if record.seed == trials.seeds[0] and facts.items() <= record.protocol.items()
    ]
    configurations = trials_of_rows(trials, overrides)
    usual = usual_rates(table, overrides)
    tried, rows = {}, []
    for row in table.rows:
        if row.name in usual:  # it is not the paper's alone
            found = {}
            for factor in tuning.rates:
                identity = configurations[trial_name(row, factor)].identity
                found[factor] = [r for r in own if (r.subject, r.protocol["settings"]) == identity]
            tried[row.name] = _tried(tuning, found)
            best = tried[row.name].best
            if best is not None:
                row = row.model_copy(update={"settings": with_rate(row, best, usual[row.name])})
        rows.append(row)
    return Tuned(table.model_copy(update={"rows": rows}), tried)


def _tried(tuning: Tuning, records: Mapping[float, Sequence[Kept]]) -> Tried:
    by = COLUMNS[tuning.by]
    judged, diverged, missing = {}, [], []
    for factor, own in records.items():
        # The first counts: a choice stays, whatever is measured again or with other numerics.
        verdict = next((r for r in own if by.shows(r) or _ends(r, by.measure)), None)
        if verdict is None:
            missing.append(factor)
        elif verdict.measure == DIVERGED:
            diverged.append(factor)
        else:
            judged[factor] = verdict.value
    return Tried(judged, diverged, missing)


def _ends(record: Kept, measure: str) -> bool:
    """Whether it tells that there will be no such measure, as something diverged."""
    return record.measure == DIVERGED and record.protocol.get(PART, measure) == measure


def choice_told(
    tuning: Tuning, tried: Mapping[str, Tried], rows: Sequence[str], epochs: int
) -> str:
    """How the rates of these rows, which were trained, were chosen; the table has ``epochs``."""
    names: dict[float, list[str]] = {}
    for row in rows:
        best = tried[row].best
        if best is not None:
            names.setdefault(best, []).append(row)
    told = []
    if names:
        usual = max(names, key=lambda factor: len(names[factor]))
        others = [f"× {f:g} for {', '.join(names[f])}" for f in sorted(names) if f != usual]
        chosen = "; ".join([*others, f"× {usual:g} for {'all others' if others else 'all'}"])
        rates = ", ".join(f"{factor:g}" for factor in tuning.rates)
        counted = trial_epochs(tuning, epochs)
        told.append(
            f"Learning rates are the best of {len(tuning.rates)} for every row (its own × {rates})"
            f", by {COLUMNS[tuning.by].heading} on a held-out {100 * tuning.share:g} % of the "
            f"training images after {counted} epoch{'s' * (counted > 1)}: {chosen}."
        )
    limits = {min(tuning.rates), max(tuning.rates)}
    edge = [row for row in rows if tried[row].best in limits]
    if edge:
        told.append(f"The lowest or highest was the best for: {', '.join(edge)}.")
    diverged = [f"{row} × {f:g}" for row in rows for f in tried[row].diverged]
    if diverged:
        told.append(f"Rates that diverged in trials: {', '.join(diverged)}.")
    untried = [row for row in rows if tried[row].missing]
    if untried:
        told.append(f"With their own learning rates, as trials are missing: {', '.join(untried)}.")
    lost = [row for row, one in tried.items() if one.all_diverged]
    if kept := [row for row in lost if row in rows]:  # trained before the trials
        told.append(f"With their own learning rates, as all trials diverged: {', '.join(kept)}.")
    return " ".join(filter(None, [*told, not_trained([row for row in lost if row not in rows])]))


def not_trained(rows: Sequence[str]) -> str:
    if not rows:
        return ""
    return (
        f"Not trained, as all of their trials diverged: {', '.join(rows)}. With --row and "
        "learning_rate=… they are, without trials."
    )
