"""What is to be trained of a table: every row as a configuration, with each of its seeds."""

from collections.abc import Sequence
from dataclasses import dataclass

from xmoco.errors import UserError, nearest
from xmoco.planning import with_full_paths
from xmoco.settings import load_config
from xmoco.tables.definition import Row, Table
from xmoco.tables.trials import Trial, recipe_told, refuse_twins

OPTIONS = {"epochs": "--epochs", "seed": "--seeds"}
"""Settings that tables have options for."""


@dataclass(frozen=True)
class Asked:
    """How a table is to be run: on which images, and what differs from its file."""

    data: str | None = None
    epochs: int | None = None
    seeds: tuple[int, ...] | None = None
    rows: tuple[str, ...] | None = None
    held_out: float | None = None
    """The share of the training images that is judged in place of the test images."""
    overrides: tuple[str, ...] = ()


@dataclass(frozen=True)
class Planned:
    """A trial, and the row it belongs to."""

    row: Row
    trial: Trial

    @property
    def label(self) -> str:
        return f"{self.row.name}, seed {self.trial.seed}"


def plan(table: Table, asked: Asked) -> list[Planned]:
    """All trials, every row's first seed before any row's second. Mistakes are told now."""
    for change in asked.overrides:
        name = change.partition("=")[0].strip().removeprefix("train.")
        if name in OPTIONS:
            raise UserError(f"{change}: give {OPTIONS[name]} instead, which is for all rows.")
    rows = _chosen(table, asked)
    seeds = {row.name: list(dict.fromkeys(asked.seeds or row.seeds or table.seeds)) for row in rows}
    planned = [
        Planned(row, _trial(table, row, asked, seeds[row.name][turn]))
        for turn in range(max(map(len, seeds.values())))
        for row in rows
        if turn < len(seeds[row.name])
    ]
    for one in planned:
        if one.trial.config.data != planned[0].trial.config.data:
            raise UserError(
                f"row {one.row.name} has other images than row {planned[0].row.name}: all rows of "
                "a table learn from the same, which --data gives, or the table's recipe."
            )
    return planned


def _chosen(table: Table, asked: Asked) -> list[Row]:
    if asked.rows is None:
        return table.trained
    names = [row.name for row in table.trained]
    for name in asked.rows:
        if name not in names:
            raise UserError(
                f"there is no row {name!r}{nearest(name, names)}; there are {', '.join(names)}."
            )
    return [row for row in table.trained if row.name in asked.rows]


def _trial(table: Table, row: Row, asked: Asked, seed: int) -> Trial:
    recipe = row.recipe or table.recipe
    changes = [*table.settings.split(), *row.settings.split(), *asked.overrides]
    epochs = table.epochs if asked.epochs is None else asked.epochs
    data = {} if asked.data is None else {"source": asked.data}
    try:
        images = load_config(table.recipe).data  # of all rows, whatever their own recipes say
        config = load_config(
            recipe,
            [*changes, f"epochs={epochs}", f"seed={seed}"],
            data,
            below={f"data.{name}": value for name, value in images},
        )
    except UserError as error:
        raise UserError(f"row {row.name}: {error}") from None
    if config.run.devices * config.run.nodes > 1:
        raise UserError("a row is trained on one device: give --devices for several rows at once.")
    return Trial.of(with_full_paths(config), asked.held_out, recipe_told(recipe, changes))


def refuse_same_rows(table: Table, asked: Asked) -> None:
    """As those asked for are, before the best settings of each are known."""
    rows = {row.name for row in _chosen(table, asked)}
    trials = trials_of_rows(table, asked.overrides)
    refuse_twins({f"row {name}": trial for name, trial in trials.items() if name in rows})


def trials_of_rows(table: Table, overrides: Sequence[str] = ()) -> dict[str, Trial]:
    """Every row that is trained, by its name, as a trial of the first seed."""
    asked = Asked(overrides=tuple(overrides))
    return {row.name: _trial(table, row, asked, seed=0) for row in table.trained}
