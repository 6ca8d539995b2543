"""Records become a table: Markdown, CSV and a picture, with the paper's ImageNet figures beside.

Measured figures and the paper's are of different images and networks, so that orders and trends
compare, not values. In the picture they have panels of their own, on scales of the same span: a
point of accuracy is as high in either.
"""

import csv
import io
import itertools
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from xmoco.config import Config
from xmoco.data.subset import HELD_OUT
from xmoco.files import write_files
from xmoco.methods import method_class
from xmoco.planning import describe_views
from xmoco.report.circumstances import circumstances, markdown_table, sentence
from xmoco.report.curves import LIGHT, to_png
from xmoco.tables.columns import Column
from xmoco.tables.definition import PaperColumn, Row, Table
from xmoco.tables.plan import Asked, trials_of_rows
from xmoco.tables.trials import Kept, Trial, divergences
from xmoco.tables.tuning import Tried, choice_told, with_best_rates

NOTHING = "–"
DIGITS = {"%": 1, "s": 0, "GiB": 2, "MiB": 1, "M": 1}
VARYING = ("%", "s")
"""Units of what differs from seed to seed."""
DEVIATION = "± is the standard deviation over seeds."


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
    """What became of rows' learning rates, where the table has trials of them."""
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
    chosen = with_best_rates(table, asked, records, group.source, group.epochs)
    trials = trials_of_rows(chosen.table, overrides)
    own = [
        record for record in records if _of_a_table(record) and Group.of(record.protocol) == group
    ]
    shown: list[Kept] = []
    lines: list[Line] = []
    diverged: list[str] = []
    for row in table.rows:
        trial = trials.get(row.name)
        found = [r for r in own if trial is not None and _identity(r) == trial.identity]
        cells = {}
        for column in table.measured:
            last = {record.seed: record for record in found if column.shows(record)}
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


def _identity(record: Kept) -> tuple[str, Any]:
    return record.subject, record.protocol["settings"]


def _of_a_table(record: Kept) -> bool:
    return {"source", "settings", "epochs", "split"} <= record.protocol.keys()


def draw(
    filled: Filled, name: str, out: Path, failed: Mapping[str, str], pictured: bool = True
) -> list[Path]:
    """Write the table as Markdown, CSV and, if that is wanted, a picture into folder ``out``."""
    files = {f"{name}.md": page(filled, failed).encode(), f"{name}.csv": csv_text(filled).encode()}
    if pictured:
        files[f"{name}.png"] = to_png(picture(filled))
    return write_files(out, files)


# Words


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
    told.append(_precisions(filled))
    told += [*unequal(filled), _rates(filled), filled.table.chosen]
    if filled.records:
        told.append(circumstances(filled.records, _data, _size))
    if filled.table.paper:
        told.append(f"Paper: {filled.table.paper}.")
    return [words for words in told if words]


def _rates(filled: Filled) -> str:
    """How the rows' learning rates were chosen, if they were."""
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


def _rows_by(filled: Filled, of: Callable[[Kept], Any]) -> dict[Any, list[str]]:
    """The names of rows by what their records tell; a row may have several."""
    rows: dict[Any, list[str]] = {}
    for line in filled.lines:
        if line.trial is not None:
            own = [r for r in filled.records if _identity(r) == line.trial.identity]
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
    points = max(1, round(100 / math.sqrt(min(judged, default=10_000))))
    return f"differences below {'one point' if points == 1 else f'{points} points'} may be chance"


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


# The picture


class Point(NamedTuple):
    place: int
    value: float
    deviation: float | None


@dataclass(frozen=True)
class Panel:
    """Series over the rows, all of one unit."""

    title: str
    unit: str
    series: Mapping[str, Sequence[Point]]


HEIGHT, ROW_WIDTH, LEAST_WIDTH = 3.6, 0.55, 3.4  # inches
LEAST_SPAN = 10.0  # points of accuracy: smaller differences are shown as the small ones they are
PANELS_ABREAST = 3
APART = 0.12  # rows: so that series do not hide each other
LONG_NAME = 6  # letters; longer names stand upright


def picture(filled: Filled) -> Figure:
    found = _panels(filled)
    columns = min(PANELS_ABREAST, max(1, len(found)))
    rows = max(1, math.ceil(len(found) / columns))
    width = max(LEAST_WIDTH, ROW_WIDTH * len(filled.lines) + 0.8)
    size = (width * columns, HEIGHT * rows)
    figure = Figure(figsize=size, facecolor=LIGHT.paper, layout="constrained")
    FigureCanvasAgg(figure)
    title = figure.suptitle(f"{filled.table.title}\n{filled.group}", fontsize=10, color=LIGHT.ink)
    title.set_parse_math(False)
    span = min(100, max([LEAST_SPAN, *(1.15 * _extent(p) for p in found if p.unit == "%")]))
    for place, panel in enumerate(found):
        _draw_panel(figure.add_subplot(rows, columns, place + 1), panel, filled, span)
    scales = f"Every axis of accuracies spans {span:.0f} points; all others begin at 0."
    note = scales if found else "nothing measured yet"
    figure.supxlabel(note, fontsize=8, color=LIGHT.ink)
    return figure


def _panels(filled: Filled) -> list[Panel]:
    """Measured accuracies beside the paper's; then what has another unit, each by itself."""
    measured = {
        column: [
            Point(place, cell.mean, cell.deviation)
            for place, line in enumerate(filled.lines)
            if (cell := line.cells.get(column)) is not None
        ]
        for column in filled.table.measured
    }
    paper = {
        column: [
            Point(place, figure, None)
            for place, line in enumerate(filled.lines)
            if line.row.paper and (figure := line.row.paper[number]) is not None
        ]
        for number, column in enumerate(filled.table.paper_columns)
    }
    sides: list[tuple[str, Mapping[Any, list[Point]]]] = [
        ("measured", measured),
        ("paper, ImageNet", paper),
    ]
    accuracies = [
        Panel(title, "%", {c.heading: points for c, points in found.items() if c.unit == "%"})
        for title, found in sides
    ]
    others = [
        Panel(f"{title}: {column.heading}", column.unit, {column.heading: points})
        for title, found in sides
        for column, points in found.items()
        if column.unit != "%"
    ]
    return [p for p in (*accuracies, *others) if any(p.series.values())]


def _extent(panel: Panel) -> float:
    """From the lowest to the highest that is drawn."""
    low, high = _limits(panel)
    return high - low


def _limits(panel: Panel) -> tuple[float, float]:
    points = [point for series in panel.series.values() for point in series]
    return (
        min(point.value - (point.deviation or 0) for point in points),
        max(point.value + (point.deviation or 0) for point in points),
    )


def _draw_panel(axes: Axes, panel: Panel, filled: Filled, span: float) -> None:
    ordered = filled.table.axis is not None
    for number, (name, points) in enumerate(panel.series.items()):
        aside = APART * (number - (len(panel.series) - 1) / 2)
        axes.errorbar(
            [point.place + aside for point in points],
            [point.value for point in points],
            # none where there are none: the legend would show bars
            yerr=[p.deviation or 0 for p in points] if any(p.deviation for p in points) else None,
            label=name,
            color=LIGHT.curves[number % len(LIGHT.curves)],
            marker="osD^"[number % 4],
            markersize=5,
            linestyle="-" if ordered else "none",
            linewidth=1.2,
            capsize=3,
            clip_on=False,
        )
    names = [line.row.name for line in filled.lines]
    upright = 90 if max(map(len, names)) > LONG_NAME else 0
    axes.set_xticks(range(len(names)), names, rotation=upright, parse_math=False)
    axes.set_xlim(-0.5, len(names) - 0.5)
    axes.set_xlabel(filled.table.axis or "", color=LIGHT.ink, fontsize=9)
    low, high = _limits(panel)
    if panel.unit == "%":
        middle = min(max((low + high) / 2, span / 2), 100 - span / 2)
        axes.set_ylim(middle - span / 2, middle + span / 2)
    else:
        axes.set_ylim(0, 1.1 * high)
    unit = "accuracy, %" if panel.unit == "%" else panel.unit
    axes.set_ylabel(unit, color=LIGHT.ink, fontsize=9)
    title = axes.set_title(panel.title, loc="left", fontsize=9, weight="bold", color=LIGHT.ink)
    title.set_parse_math(False)
    axes.tick_params(colors=LIGHT.ink, labelsize=8, length=0)
    axes.grid(color=LIGHT.grid, linewidth=0.8)
    axes.set_axisbelow(True)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(LIGHT.grid)
    if len(panel.series) > 1:
        axes.legend(fontsize=8, edgecolor="none", labelcolor=LIGHT.ink)
