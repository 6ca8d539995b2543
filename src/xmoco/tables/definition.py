"""A table as a small yaml file: rows that are configurations, columns that are measurements.

Rows say in which settings they differ from the table's recipe, and what the paper measured on
ImageNet. ``plan.py`` makes of them what is to be trained.
"""

from importlib import resources
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from xmoco.errors import UserError, nearest
from xmoco.settings import read_text, read_yaml
from xmoco.tables.columns import COLUMNS, Column

STRICT = ConfigDict(extra="forbid", strict=True, frozen=True)


def _known_column(name: str) -> str:
    if name not in COLUMNS:
        known = ", ".join(COLUMNS)
        raise ValueError(f"unknown column {name!r}{nearest(name, COLUMNS)}; there are {known}")
    return name


ColumnName = Annotated[str, AfterValidator(_known_column)]
Seeds = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]
Text = Annotated[str, Field(min_length=1)]


class PaperColumn(BaseModel):
    """A column of the paper's own figures."""

    model_config = STRICT

    heading: Text
    unit: str = "%"
    beside: ColumnName | None = Field(
        None, description="The measured column whose order of rows is to be compared with it."
    )


class Changes(BaseModel):
    """Settings that a row is tried with, in place of its own."""

    model_config = STRICT

    batch: int | None = Field(None, ge=1, description="Where not the row's own.")
    rate: float = Field(1.0, gt=0, description="What its own learning rate is multiplied by.")

    def __str__(self) -> str:
        batch = [] if self.batch is None else [f"batch {self.batch}"]
        rate = [] if self.rate == 1 else [f"rate × {self.rate:g}"]
        return ", ".join([*batch, *rate]) or "own settings"


class Tuning(BaseModel):
    """Trials of every row on held-out training images, as many for each."""

    model_config = STRICT

    tries: list[Changes] = Field(description="In this order, those that change something.")
    number: int = Field(ge=2, description="Of tries for every row: its own settings, and others.")
    epochs: int = Field(ge=1, description="Of a trial, at most.")
    share: float = Field(0.2, gt=0, lt=1, description="Of the training images, held out.")
    by: ColumnName = Field("knn20", description="The column by which the best is chosen.")

    @model_validator(mode="after")
    def _can_choose(self) -> "Tuning":
        if COLUMNS[self.by].told_by_training:
            raise ValueError(f"{self.by} is no accuracy, by which settings could be chosen")
        return self

    def of(self, batch: int) -> list[Changes]:
        """The tries of a row whose own batch this is: where it is the one that is to be tried,
        another try takes the place."""
        own = Changes()
        tries = [
            one.model_copy(update={"batch": None}) if one.batch == batch else one
            for one in self.tries
        ]
        found = list(dict.fromkeys([own, *tries]))[: self.number]
        if len(found) < self.number:
            raise UserError(
                f"there are only {len(found)} different tries for a row with a batch of {batch}, "
                f"but every row is to have {self.number}: add one to tuning.tries."
            )
        return found


class Row(BaseModel):
    model_config = STRICT

    name: Text
    recipe: Text | None = Field(None, description="Where not the table's.")
    settings: str = Field("", description="Changes to the recipe, as key=value.")
    seeds: Seeds | None = Field(None, description="Where not the table's.")
    paper: list[float | None] = Field(default_factory=list, description="By its columns.")
    paper_only: bool = Field(False, description="It is not trained here.")


class Table(BaseModel):
    model_config = STRICT

    title: Text
    about: Text = Field(description="One line for the list of tables.")
    recipe: Text
    settings: str = Field("", description="Changes to the recipe that all rows have.")
    epochs: int = Field(ge=1)
    seeds: Seeds
    columns: Annotated[list[ColumnName], Field(min_length=1)]
    chosen: str = Field("", description="In a sentence, how the rows' settings were chosen.")
    tuning: Tuning | None = Field(None, description="How each row's settings are chosen.")
    axis: Text | None = Field(None, description="What rows in order are values of, as ξ.")
    paper: Text = Field("", description="How the paper's figures came about.")
    paper_columns: list[PaperColumn] = Field(default_factory=list)
    rows: Annotated[list[Row], Field(min_length=1)]

    @model_validator(mode="after")
    def _rows_fit(self) -> "Table":
        names = [row.name for row in self.rows]
        if len({*names}) < len(names):
            raise ValueError("two rows have the same name")
        if not self.trained:
            raise ValueError("all rows are the paper's alone: there is nothing to train")
        for column in self.paper_columns:
            if column.beside is not None and column.beside not in self.columns:
                raise ValueError(f"{column.beside}, beside which {column.heading} is, is no column")
        if self.tuning is not None and self.tuning.by not in self.columns:
            raise ValueError(f"{self.tuning.by}, by which settings are to be chosen, is no column")
        for row in self.rows:
            if row.paper and len(row.paper) != len(self.paper_columns):
                raise ValueError(
                    f"row {row.name} has {len(row.paper)} of the paper's figures, but there are "
                    f"{len(self.paper_columns)} paper_columns"
                )
        return self

    @property
    def measured(self) -> list[Column]:
        return [COLUMNS[name] for name in self.columns]

    @property
    def trained(self) -> list[Row]:
        """Without those that are the paper's alone."""
        return [row for row in self.rows if not row.paper_only]


def table_names() -> list[str]:
    folder = resources.files("xmoco") / "tables"
    return sorted(item.name[:-5] for item in folder.iterdir() if item.name.endswith(".yaml"))


def read_table(name: str) -> Table:
    """A table of xmoco's by its name, or one of the user's own in a yaml file."""
    if name in table_names():
        text = (resources.files("xmoco") / "tables" / f"{name}.yaml").read_text(encoding="utf-8")
        return _validated(read_yaml(text, f"table {name}"), f"table {name}")
    if Path(name).suffix not in {".yaml", ".yml"}:
        raise UserError(
            f"unknown table {name!r}{nearest(name, table_names())}; there are "
            f"{', '.join(table_names())}, or give a .yaml file."
        )
    try:
        content = read_yaml(read_text(Path(name)), name)
    except UserError as error:
        raise UserError(f"cannot read the table {name}: {error}") from None
    table = _validated(content, name)
    folder = Path(name).parent
    rows = [row.model_copy(update={"recipe": _beside(row.recipe, folder)}) for row in table.rows]
    return table.model_copy(update={"recipe": _beside(table.recipe, folder), "rows": rows})


def _beside(recipe: str | None, folder: Path) -> str | None:
    """A recipe that is a file is looked for beside the table."""
    is_file = recipe is not None and Path(recipe).suffix in {".yaml", ".yml"}
    return str(folder / recipe) if recipe is not None and is_file else recipe


def _validated(content: Any, where: str) -> Table:
    try:
        return Table.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        match first["type"]:
            case "missing":
                raise UserError(f"{where} lacks {place}.") from None
            case "extra_forbidden":
                raise UserError(f"{where} has an unknown key {place}.") from None
            case "value_error":
                wanted = str(first["ctx"]["error"])
            case _:
                wanted = first["msg"].replace("Input should", "it must")
        raise UserError(f"{where}: {f'{place}: ' if place else ''}{wanted}.") from None
