"""As many trials for every row of a table: each takes the best of a few settings.

They are tried in short trainings and judged by images held out of the training set. The trials of
a table are a table themselves, with a row for every try of every row, which is run and drawn like
others; what was chosen follows from its records.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from xmoco.config import Config
from xmoco.tables.columns import COLUMNS
from xmoco.tables.definition import Changes, Row, Table, Tuning
from xmoco.tables.plan import Asked, trials_of_rows
from xmoco.tables.trials import DIVERGED, PART, Kept, Trial, split_facts

SETTINGS = {"batch", "learning_rate"}
"""What tries change."""
OWN = Changes()


def is_tuned(table: Table, asked: Asked) -> bool:
    """Whether settings are to be chosen: not in trials, nor where they are given for all rows."""
    given = {change.partition("=")[0].strip().rpartition(".")[2] for change in asked.overrides}
    return table.tuning is not None and asked.held_out is None and not SETTINGS & given


def trials_asked(table: Table, asked: Asked) -> tuple[Table, Asked]:
    """The table of trials, and how it is to be run."""
    tuning = table.tuning
    assert tuning is not None
    trials = trial_table(table, asked.epochs or table.epochs, asked.overrides)
    rows = None
    if asked.rows is not None:
        names = trial_names(table, asked.overrides)
        rows = tuple(name for row in asked.rows for name in names.get(row, {}).values())
    how = Asked(data=asked.data, rows=rows, held_out=tuning.share, overrides=asked.overrides)
    return trials, how


def trial_table(table: Table, epochs: int, overrides: Sequence[str] = ()) -> Table:
    """A row for every try of every row; ``epochs`` are the table's own."""
    tuning = table.tuning
    assert tuning is not None
    usual = usual_configs(table, overrides)
    rows = [
        Row(name=name, recipe=row.recipe, settings=with_changes(row, changes, usual[row.name]))
        for row in table.trained
        for changes, name in trial_names(table, overrides)[row.name].items()
    ]
    return table.model_copy(
        update={
            "title": f"{table.title}: trials",
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


def trial_names(table: Table, overrides: Sequence[str] = ()) -> dict[str, dict[Changes, str]]:
    """The rows that are the trials of every row, by what they try."""
    assert table.tuning is not None
    return {
        row: {changes: f"{row}, {changes}" for changes in table.tuning.of(config.train.batch)}
        for row, config in usual_configs(table, overrides).items()
    }


def usual_configs(table: Table, overrides: Sequence[str]) -> dict[str, Config]:
    return {name: trial.config for name, trial in trials_of_rows(table, overrides).items()}


def with_changes(row: Row, changes: Changes, usual: Config) -> str:
    """The row's settings; what stays as it is is not named."""
    settings = row.settings.split()
    if changes.batch is not None:
        settings.append(f"batch={changes.batch}")
    if changes.rate != 1:
        settings.append(f"learning_rate={changes.rate * usual.optim.learning_rate:.10g}")
    return " ".join(settings)


@dataclass(frozen=True)
class Tried:
    """What became of a row's tries."""

    judged: Mapping[Changes, float]
    """Accuracies."""
    diverged: Sequence[Changes]
    missing: Sequence[Changes]

    @property
    def best(self) -> Changes | None:
        """None if all have diverged, or as long as one is missing. Of equal ones the row's own."""
        if self.missing or not self.judged:
            return None
        return max(self.judged, key=lambda changes: (self.judged[changes], changes == OWN))

    @property
    def all_diverged(self) -> bool:
        return not (self.missing or self.judged)


@dataclass(frozen=True)
class Tuned:
    """A table whose rows have the best of what was tried, or their own settings until then."""

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


def with_best_settings(
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
    usual, names = usual_configs(table, overrides), trial_names(table, overrides)
    tried, rows = {}, []
    for row in table.rows:
        if row.name in usual:  # it is not the paper's alone
            one = tried[row.name] = _tried(
                tuning, {c: configurations[name] for c, name in names[row.name].items()}, own
            )
            if one.best is not None:
                settings = with_changes(row, one.best, usual[row.name])
                row = row.model_copy(update={"settings": settings})
        rows.append(row)
    return Tuned(table.model_copy(update={"rows": rows}), tried)


def _tried(tuning: Tuning, trials: Mapping[Changes, Trial], records: Sequence[Kept]) -> Tried:
    by = COLUMNS[tuning.by]
    judged, diverged, missing = {}, [], []
    for changes, trial in trials.items():
        own = [r for r in records if (r.subject, r.protocol["settings"]) == trial.identity]
        # The first counts: a choice stays, whatever is measured again or with other numerics.
        verdict = next((r for r in own if trial.is_shown(by, r) or _ends(r, by.measure)), None)
        if verdict is None:
            missing.append(changes)
        elif verdict.measure == DIVERGED:
            diverged.append(changes)
        else:
            judged[changes] = verdict.value
    return Tried(judged, diverged, missing)


def _ends(record: Kept, measure: str) -> bool:
    """Whether it tells that there will be no such measure, as something diverged."""
    return record.measure == DIVERGED and record.protocol.get(PART, measure) == measure


def choice_told(
    tuning: Tuning, tried: Mapping[str, Tried], rows: Sequence[str], epochs: int
) -> str:
    """How the settings of these rows, which were trained, were chosen; the table has ``epochs``."""
    names: dict[Changes, list[str]] = {}
    for row in rows:
        best = tried[row].best
        if best is not None:
            names.setdefault(best, []).append(row)
    told = []
    if names:
        usual = max(names, key=lambda changes: len(names[changes]))
        others = [f"{c} for {', '.join(names[c])}" for c in names if c != usual]
        chosen = "; ".join([*others, f"{usual} for {'all others' if others else 'all'}"])
        counted = trial_epochs(tuning, epochs)
        told.append(
            f"Batch and learning rate are the best of {tuning.number} tries for every row, its own "
            f"among them, by {COLUMNS[tuning.by].heading} on a held-out {100 * tuning.share:g} % "
            f"of the training images after {counted} epoch{'s' * (counted > 1)}: {chosen}."
        )
    diverged = [f"{row}, {changes}" for row in rows for changes in tried[row].diverged]
    if diverged:
        told.append(f"Diverged in trials: {'; '.join(diverged)}.")
    untried = [row for row in rows if tried[row].missing]
    if untried:
        told.append(f"With their own settings, as trials are missing: {', '.join(untried)}.")
    lost = [row for row, one in tried.items() if one.all_diverged]
    if kept := [row for row in lost if row in rows]:  # trained before the trials
        told.append(f"With their own settings, as all trials diverged: {', '.join(kept)}.")
    return " ".join(filter(None, [*told, not_trained([row for row in lost if row not in rows])]))


def not_trained(rows: Sequence[str]) -> str:
    if not rows:
        return ""
    return (
        f"Not trained, as all of their trials diverged: {', '.join(rows)}. With --row and "
        "learning_rate=… they are, without trials."
    )
