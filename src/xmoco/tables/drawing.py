"""A filled table as files: Markdown, CSV and a picture, with the paper's ImageNet figures beside.

Measured figures and the paper's are of different images and networks, so that orders and trends
compare, not values.
"""

import csv
import io
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from xmoco.config import Config
from xmoco.files import write_files
from xmoco.methods import method_class
from xmoco.planning import describe_views
from xmoco.report.circumstances import circumstances, markdown_table, sentence
from xmoco.report.curves import to_png
from xmoco.tables.columns import Column
from xmoco.tables.definition import PaperColumn, Row, Table
from xmoco.tables.filling import Cell, Filled, Line, identity
from xmoco.tables.plotting import picture
from xmoco.tables.trials import Kept
from xmoco.tables.tuning import choice_told

NOTHING = "–"
DIGITS = {"%": 1, "s": 0, "GiB": 2, "MiB": 1, "M": 1}
VARYING = ("%", "s")
"""Units of what differs from seed to seed."""
DEVIATION = "± is the standard deviation over seeds."


def draw(
    filled: Filled, name: str, out: Path, failed: Mapping[str, str], pictured: bool = True
) -> list[Path]:
    """Write the table as Markdown, CSV and, if that is wanted, a picture into folder ``out``."""
    files = {f"{name}.md": page(filled, failed).encode(), f"{name}.csv": csv_text(filled).encode()}
    if pictured:
        files[f"{name}.png"] = to_png(picture(filled))
    return write_files(out, files)


def page(filled: Filled, failed: Mapping[str, str]) -> str:
    gaps = [f"- {label} failed: {reason}." for label, reason in failed.items()]
    parts = [
        f"# {filled.table.title}",
        sentence(str(filled.group)),
        markdown(filled),
        "\n".join(gaps),
        " ".join(notes(filled)),
    ]
    return "\n\n".join(filter(None, parts)) + "\n"


def markdown(filled: Filled) -> str:
    table = filled.table
    headings = [
        table.axis or "",
        *(column.heading for column in filled.columns),
        "seeds",
        *(f"paper: {column.heading}" for column in table.paper_columns),
    ]
    rows = [
        [
            line.row.name,
            *(_cell(line, column) for column in filled.columns),
            _number(line.seeds),
            *(_figure(figure, column.unit) for figure, column in _paper(table, line.row)),
        ]
        for line in filled.lines
    ]
    return markdown_table(headings, "l" + "r" * (len(headings) - 1), rows)


def _paper(table: Table, row: Row) -> Iterator[tuple[float | None, PaperColumn]]:
    figures = row.paper or [None] * len(table.paper_columns)
    return zip(figures, table.paper_columns, strict=True)


def _cell(line: Line, column: Column) -> str:
    cell = line.cells.get(column)
    if cell is None:
        return NOTHING
    digits, deviation, fewer = DIGITS[column.unit], "", ""
    if column.unit in VARYING:
        if cell.deviation is not None:
            deviation = f" ± {cell.deviation:.{digits}f}"
        if len(cell.values) < line.seeds:  # than the row's other figures
            fewer = f" (seeds: {_number(len(cell.values))})"
    return f"{cell.mean:,.{digits}f}{deviation} {column.unit}{fewer}"


def _figure(figure: float | None, unit: str) -> str:
    if figure is None:
        return NOTHING
    return f"{figure:.1f} %" if unit == "%" else f"{figure:g} {unit}"


def _number(seeds: int) -> str:
    return {0: NOTHING, 1: "one"}.get(seeds, str(seeds))


def notes(filled: Filled) -> list[str]:
    """What is to be read out of the table, and how its figures came about."""
    told = [*agreements(filled), _spread(filled), _divergence(filled), _skipping(filled)]
    told += [_precisions(filled), _sharing(filled)]
    told += [*unequal(filled), _choice(filled), filled.table.chosen]
    if filled.records:
        told.append(circumstances(filled.records, _data, _size))
    if filled.table.paper:
        told.append(f"Paper: {filled.table.paper}.")
    return [words for words in told if words]


def _choice(filled: Filled) -> str:
    """How the rows' settings were chosen, if they were."""
    tuning = filled.table.tuning
    if tuning is None or not filled.tried:
        return ""
    rows = [line.row.name for line in filled.lines if line.cells]
    return choice_told(tuning, filled.tried, rows, filled.group.epochs)


def _divergence(filled: Filled) -> str:
    return f"Training diverged: {'; '.join(filled.diverged)}." if filled.diverged else ""


def _skipping(filled: Filled) -> str:
    """Which rows are not quite what their settings say."""
    rows = _rows_by(filled, lambda record: _numerics(record).get("skip_bad_steps")).get(True)
    return f"Trained with skip_bad_steps=true: {', '.join(rows)}." if rows else ""


def _precisions(filled: Filled) -> str:
    """Which rows were trained in which precision, if not all in the same."""
    rows = _rows_by(filled, lambda record: _numerics(record).get("precision"))
    rows.pop(None, None)  # old records do not tell
    if len(rows) < 2:
        return ""
    told = "; ".join(f"{precision}: {', '.join(names)}" for precision, names in rows.items())
    return f"Trained in different precisions, so that times do not compare. {told}."


def _sharing(filled: Filled) -> str:
    """Which rows' times are no measure of speed."""
    if not any(column.measure == "train_seconds" for column in filled.columns):
        return ""
    rows = _rows_by(filled, lambda record: "runs_at_once" in record.protocol).get(True)
    if rows is None:
        return ""
    return f"Other runs shared the GPU, so that times do not compare: {', '.join(rows)}."


def _rows_by(filled: Filled, of: Callable[[Kept], Any]) -> dict[Any, list[str]]:
    """The names of rows by what their records tell; a row may have several."""
    rows: dict[Any, list[str]] = {}
    for line in filled.lines:
        if line.trial is not None:
            own = [r for r in filled.records if identity(r) == line.trial.identity]
            for value in dict.fromkeys(map(of, own)):
                rows.setdefault(value, []).append(line.row.name)
    return rows


def _numerics(record: Kept) -> Mapping[str, Any]:
    numerics: Mapping[str, Any] = record.protocol.get("numerics", {})
    return numerics


def _spread(filled: Filled) -> str:
    """How far figures may be chance."""
    counts = {len(cell.values) for line in filled.lines for cell in line.cells.values()}
    if not counts:
        return ""
    if counts == {1}:
        return f"All figures are from one seed: {_chance(filled)}."
    some = f" Figures without ± are from one seed: {_chance(filled)}." if 1 in counts else ""
    return DEVIATION + some


def _chance(filled: Filled) -> str:
    """Which differences prove nothing: two standard errors of an accuracy near 50 %, by the number
    of images that were judged; never less than a point, which other seeds may make."""
    judged = [r.protocol["judged_images"] for r in filled.records if "judged_images" in r.protocol]
    points = chance_points(min(judged, default=10_000))
    return f"differences below {'one point' if points == 1 else f'{points} points'} may be chance"


def chance_points(judged_images: int) -> int:
    return max(1, round(100 / math.sqrt(judged_images)))


def unequal(filled: Filled) -> Iterator[str]:
    """Where measured rows, other than those of an axis, do not have the same effort."""
    if filled.table.axis is not None:
        return
    configs = {
        line.row.name: line.trial.config
        for line in filled.lines
        if line.cells and line.trial is not None
    }
    effort: dict[str, Callable[[Config], str]] = {
        "views per image": lambda c: describe_views(method_class(c.method).view_groups(c)),
        "batch size": lambda c: str(c.train.batch),
        "evaluation size": lambda c: f"{c.input.central_size} px",
    }
    for what, of in effort.items():
        rows: dict[str, list[str]] = {}
        for name, config in configs.items():
            rows.setdefault(of(config), []).append(name)
        if len(rows) > 1:
            usual = max(rows, key=lambda words: len(rows[words]))
            others = [f"{words} for {', '.join(names)}" for words, names in rows.items()]
            others.pop(list(rows).index(usual))
            yield sentence(f"{what}: {'; '.join(others)}; {usual} for all others")


def _data(record: Kept) -> str:
    facts = record.protocol
    counts = f"{facts['train_images']:,} training, {facts['judged_images']:,} evaluation images"
    return f"{str(facts['data']).partition(' (train)')[0]} ({counts})"


def _size(record: Kept) -> str | None:
    size = record.protocol.get("size")
    return None if size is None else f"evaluated at {size} px"


def agreements(filled: Filled) -> Iterator[str]:
    """Whether the paper's order of rows is found again, column by column."""
    columns = dict(zip(filled.table.columns, filled.table.measured, strict=True))
    for place, paper in enumerate(filled.table.paper_columns):
        if paper.beside is None:
            continue
        ours = columns[paper.beside]
        both = [
            (line.row.name, line.cells[ours].mean, figure)
            for line in filled.lines
            if ours in line.cells
            and line.row.paper
            and not line.learns_labels  # a reference, not one of those compared
            and (figure := line.row.paper[place]) is not None
        ]
        pairs = [
            (one[1] - other[1]) * (one[2] - other[2]) > 0
            for one, other in itertools.combinations(both, 2)
            if one[2] != other[2]
        ]
        if pairs:
            best, paper_best = (max(both, key=lambda row: row[i])[0] for i in (1, 2))
            yield (
                f"By {ours.heading}, {sum(pairs)} of {len(pairs)} pairs of rows are ranked as in "
                f"the paper ({paper.heading}); the best row is {best} here, {paper_best} in the "
                "paper."
            )


def csv_text(filled: Filled) -> str:
    """Every number of the table in a cell of its own."""
    table = filled.table
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    heads = [
        f"{column.heading} ({column.unit}) {what}"
        for column in table.measured
        for what in ("mean", "deviation", "seeds")
    ]
    paper = [f"paper: {column.heading} ({column.unit})" for column in table.paper_columns]
    writer.writerow([table.axis or "row", *heads, *paper])
    for line in filled.lines:
        numbers: list[Any] = []
        for column in table.measured:
            cell = line.cells.get(column)
            numbers += ["", "", 0] if cell is None else _numbers(cell)
        figures = [figure for figure, _ in _paper(table, line.row)]
        writer.writerow([line.row.name, *numbers, *figures])
    return text.getvalue()


def _numbers(cell: Cell) -> list[Any]:
    return [cell.mean, cell.deviation, len(cell.values)]
