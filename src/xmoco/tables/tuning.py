"""Equal effort for all rows of a table: each takes the best of a few learning rates.

Rates are tried in short trainings and judged by images held out of the training set. The trials of
a table are a table themselves, with a row for every rate of every row, which is run and drawn like
others; what was chosen follows from its records.
"""

import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from xmoco.tables.bench import Kept, split_facts
from xmoco.tables.columns import COLUMNS
from xmoco.tables.definition import Row, Table, Tuning
from xmoco.tables.plan import Asked, Planned, plan, trials_of_rows

SETTING = "learning_rate"


def is_tuned(table: Table, asked: Asked) -> bool:
    """Whether rates are to be chosen: not in trials, nor where the rate is given for all rows."""
    given = any(change.partition("=")[0] == SETTING for change in asked.overrides)
    return table.tuning is not None and asked.held_out is None and not given


def trials_asked(table: Table, asked: Asked) -> tuple[Table, Asked]:
    """The table of trials, and how it is to be run."""
    assert table.tuning is not None
    chosen = {row.name for row in table.trained} if asked.rows is None else {*asked.rows}
    epochs = table.epochs if asked.epochs is None else asked.epochs
    trials = trial_table(table, epochs, asked.overrides, chosen)
    how = Asked(data=asked.data, held_out=table.tuning.share, overrides=asked.overrides)
    return trials, how


def trial_table(
    table: Table,
    epochs: int,
    overrides: Sequence[str] = (),
    chosen: Collection[str] | None = None,
) -> Table:
    """A row for every rate of every row, or of those ``chosen``; ``epochs`` are the table's own."""
    tuning = table.tuning
    assert tuning is not None
    usual = {
        name: trial.config.optim.learning_rate
        for name, trial in trials_of_rows(table, overrides).items()
    }
    rows = [
        Row(
            name=trial_name(row, factor),
            recipe=row.recipe,
            settings=with_rate(row, factor, usual[row.name]),
        )
        for row in table.trained
        if chosen is None or row.name in chosen
        for factor in tuning.rates
    ]
    return table.model_copy(
        update={
            "title": f"{table.title}: learning rates",
            "epochs": min(tuning.epochs, epochs),
            "seeds": table.seeds[:1],
            "paper": "",
            "paper_columns": [],
            "chosen": "",
            "tuning": None,
            "rows": rows,
        }
    )


def trial_name(row: Row, factor: float) -> str:
    return f"{row.name}, rate × {factor:g}"


def with_rate(row: Row, factor: float, usual: float) -> str:
    """The row's settings; its own rate is not named, so that its trial may be another table's."""
    changed = [] if factor == 1 else [f"{SETTING}={factor * usual:.10g}"]
    return " ".join([*row.settings.split(), *changed])


@dataclass(frozen=True)
class Tuned:
    """A table whose rows have the best of their rates."""

    table: Table
    factors: Mapping[str, float] | None = None
    """Of a row's own rate, by row, of those that have been tried; of no row of a table without
    trials."""
    waiting: frozenset[str] = frozenset()
    """Rows whose trials are not all there."""


def tuned(
    table: Table,
    records: Sequence[Kept],
    source: str,
    epochs: int,
    overrides: Sequence[str] = (),
    given_up: Collection[str] = (),
) -> Tuned:
    """By records of images from ``source``, for a table of so many epochs. Trials that were
    ``given_up`` are not waited for."""
    tuning = table.tuning
    assert tuning is not None
    trials = trial_table(table, epochs, overrides)
    tried, usual = trials_of_rows(trials, overrides), trials_of_rows(table, overrides)
    facts = {"source": source, "epochs": trials.epochs, **split_facts(tuning.share)}
    judged = [
        record
        for record in records
        if COLUMNS[tuning.by].shows(record) and facts.items() <= record.protocol.items()
    ]
    factors, waiting, rows = {}, set(), []
    for row in table.rows:
        if row.name not in usual:  # the paper's alone
            rows.append(row)
            continue
        values = {}
        for factor in tuning.rates:
            identity = tried[trial_name(row, factor)].identity
            found = [r.value for r in judged if (r.subject, r.protocol["settings"]) == identity]
            if found:
                values[factor] = statistics.fmean(found)
            elif trial_name(row, factor) not in given_up:
                waiting.add(row.name)
        if values:  # of equal ones the row's own
            factors[row.name] = max(values, key=lambda factor: (values[factor], factor == 1))
        else:
            waiting.add(row.name)
        own = usual[row.name].config.optim.learning_rate
        best = with_rate(row, factors.get(row.name, 1.0), own)
        rows.append(row.model_copy(update={"settings": best}))
    return Tuned(table.model_copy(update={"rows": rows}), factors, frozenset(waiting))


def plan_tuned(
    table: Table, asked: Asked, records: Sequence[Kept], given_up: Collection[str] = ()
) -> tuple[list[Planned], list[str]]:
    """What is to be trained, by the best rates; and the rows that wait for trials."""
    planned = plan(table, asked)
    if not is_tuned(table, asked):
        return planned, []
    facts = planned[0].trial.facts
    chosen = tuned(table, records, facts["source"], facts["epochs"], asked.overrides, given_up)
    found = plan(chosen.table, asked)
    ready = [one for one in found if one.row.name not in chosen.waiting]
    waiting = dict.fromkeys(one.row.name for one in found if one.row.name in chosen.waiting)
    return ready, [*waiting]


def choice_told(tuning: Tuning, factors: Mapping[str, float], rows: Sequence[str]) -> str:
    """How the rates of these rows were chosen, in a sentence."""
    names: dict[str, list[str]] = {}
    for row in rows:
        words = f"× {factors[row]:g}" if row in factors else "not tried"
        names.setdefault(words, []).append(row)
    usual = max(names, key=lambda words: len(names[words]))
    others = [f"{words} for {', '.join(own)}" for words, own in names.items() if words != usual]
    chosen = "; ".join([*others, f"{usual} for all{' others' * bool(others)}"])
    rates = ", ".join(f"{factor:g}" for factor in tuning.rates)
    epochs = "1 epoch" if tuning.epochs == 1 else f"at most {tuning.epochs} epochs"
    return (
        f"The learning rate of every row is the best of {len(tuning.rates)} (its own × {rates}) by "
        f"{COLUMNS[tuning.by].heading} on a held-out {100 * tuning.share:g} % of the training "
        f"images after {epochs}: {chosen}."
    )
