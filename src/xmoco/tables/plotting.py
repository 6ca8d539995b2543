"""The picture of a table.

Measured figures and those of the paper have panels of their own, on scales of the same span: a
point of accuracy is as high in either.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from xmoco.report.curves import LIGHT
from xmoco.tables.filling import Filled


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
