"""Panels drawn: a run's curves as one figure, or each by itself for a page.

Figures are made by matplotlib's object interface: nothing global stays changed in the caller's
program.
"""

import io
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from xmoco.report.history import History, read_history
from xmoco.report.panels import Panel, claim_panels, panels
from xmoco.text import printable


@dataclass(frozen=True)
class Theme:
    """Colours of ink, grid and paper; the page shows the one that fits the reader's screen."""

    ink: str
    grid: str
    paper: str
    curves: Sequence[str]

    @property
    def colours(self) -> Sequence[str]:
        return self.ink, self.grid, self.paper, *self.curves


# Okabe and Ito's colours, which colour-blind readers can tell apart; lightened for dark paper.
LIGHT = Theme("#33373d", "#e3e5e8", "#ffffff", ("#0072b2", "#d55e00", "#009e73", "#cc79a7"))
DARK = Theme("#d5d8dc", "#373b42", "#1b1e23", ("#56b4e9", "#f0a04b", "#3ec9a0", "#e39ac4"))
LETTERS = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', sans-serif"
CURVE_STYLES = ("-", "--", "-.", ":")
WIDTH, HEIGHT = 4.0, 2.75  # of a panel, in inches
LEGEND_LINE = 0.18  # inches
LONGEST_BESIDE = 24  # letters of names that have another one beside them
DPI = 180
FEW_POINTS = 40  # up to here every point is marked; a single one would not be seen otherwise


def draw_curves(run: Path, theme: Theme = LIGHT) -> Figure:
    """All of a run's panels in one figure."""
    found = panels(read_history(run))
    columns = min(3, max(1, len(found)))
    rows = max(1, math.ceil(len(found) / columns))
    figure = _figure(WIDTH * columns, HEIGHT * rows, theme)
    figure.set_layout_engine("constrained", h_pad=0.1, w_pad=0.1)
    for index, panel in enumerate(found):
        draw_panel(figure.add_subplot(rows, columns, index + 1), panel, theme)
    if not found:
        figure.text(0.5, 0.5, "nothing measured yet", color=theme.ink, ha="center", va="center")
    return figure


def claims_png(histories: Mapping[str, History]) -> bytes | None:
    """What became of the paper's claims in several runs, side by side; none if nobody looked."""
    found = claim_panels(histories)
    if not found:
        return None
    figure = _figure(1.2 * WIDTH * len(found), 1.5 * HEIGHT, LIGHT)
    figure.set_layout_engine("constrained")
    for index, panel in enumerate(found):
        draw_panel(figure.add_subplot(1, len(found), index + 1), panel, LIGHT)
    return to_png(figure)


def panel_svg(panel: Panel) -> str:
    """A single panel as a picture, for places where a wide figure would be too small to read. It
    follows the reader's light or dark screen by itself."""
    # Fixed margins, so that the panels of a page line up; those with a legend are higher by it.
    names = _legend(panel)
    below = LEGEND_LINE * math.ceil(len(names) / _legend_columns(names))
    height = HEIGHT + below
    figure = _figure(WIDTH, height, LIGHT)
    area = (0.19, (0.17 * HEIGHT + below) / height, 0.78, 0.72 * HEIGHT / height)
    draw_panel(figure.add_axes(area), panel, LIGHT)
    picture = io.StringIO()
    # Writing stays writing, and equal panels make equal pictures.
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "xmoco"}):
        figure.savefig(picture, format="svg", metadata={"Date": None, "Creator": None})
    return _in_either_theme(picture.getvalue())


def _in_either_theme(svg: str) -> str:
    """With names in place of the light theme's colours, whose meaning depends on the screen; and in
    the screen's own letters."""
    names = {colour: f"--c{number}" for number, colour in enumerate(LIGHT.colours)}

    def themed(tag: re.Match[str]) -> str:
        coloured = re.sub(
            "(fill|stroke): (#[0-9a-f]{6})",
            lambda m: f"{m[1]}: var({names[m[2]]})" if m[2] in names else m[0],
            tag[0],
        )
        return re.sub('font-family: [^;"]*', f"font-family: {LETTERS}", coloured)

    svg = re.sub("<[^>]*>", themed, svg)  # and what stands between tags is text
    light, dark = (
        ";".join(f"{name}:{colour}" for name, colour in zip(names.values(), t.colours, strict=True))
        for t in (LIGHT, DARK)
    )
    rules = f":root{{{light}}} @media (prefers-color-scheme: dark) {{:root{{{dark}}}}}"
    return svg.replace("<defs>", f"<defs><style>{rules}</style>", 1)


def draw_panel(axes: Axes, panel: Panel, theme: Theme) -> None:
    for index, series in enumerate(panel.curves.values()):
        colour = panel.colours[index] if panel.colours else index
        # where colours begin again, styles do not
        line = index + index // len(theme.curves)
        axes.plot(
            series.epochs,
            series.values,
            color=theme.curves[colour % len(theme.curves)],
            linestyle=CURVE_STYLES[line % len(CURVE_STYLES)],
            linewidth=1.6,
            marker="o" if len(series.values) <= FEW_POINTS else None,
            markersize=3,
        )
    for index, level in enumerate(panel.levels.values()):
        style = (0, (4 + 4 * index, 2))  # every further level has longer dashes
        axes.axhline(level, color=theme.ink, linestyle=style, lw=1)
    heading = printable(panel.title)
    title = axes.set_title(heading, loc="left", fontsize=10, weight="bold", color=theme.ink)
    unit = axes.set_ylabel(printable(panel.unit), color=theme.ink, fontsize=9)
    for text in (title, unit):
        text.set_parse_math(False)  # names may hold dollar signs
    axes.set_xlabel(panel.along, color=theme.ink, fontsize=9)
    if panel.includes:
        axes.update_datalim([(0, value) for value in panel.includes], updatex=False)
    if panel.curves:  # from the start: a single point has no scale of its own
        axes.update_datalim([(0, 0)], updatey=False)
    axes.autoscale_view()
    axes.tick_params(colors=theme.ink, labelsize=8, length=0)
    axes.yaxis.set_major_formatter("{x:,.6g}")
    axes.grid(color=theme.grid, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.set_facecolor(theme.paper)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(theme.grid)
    if names := _legend(panel):
        legend = axes.legend(
            axes.lines,
            names,  # given, as it hides those with a _
            fontsize=8,
            ncols=_legend_columns(names),
            # Below the axes and what is written there: inside, it would hide curves.
            loc="upper center",
            bbox_to_anchor=(0.42, 0),  # the middle of panel and unit together
            borderaxespad=4,
            borderpad=0,
            frameon=False,
        )
        for text in legend.get_texts():
            text.set(color=theme.ink, parse_math=False)


def _legend(panel: Panel) -> list[str]:
    """Names of all lines; a single one needs none beside the title. Names may hold what neither a
    font nor XML has."""
    curves = [printable(name) for name in panel.curves]
    levels = [f"{printable(name)} {level:.3g}" for name, level in panel.levels.items()]
    return [*curves, *levels] if len(curves) + len(levels) > 1 else []


def _legend_columns(names: Sequence[str]) -> int:
    return 2 if max(map(len, names), default=0) <= LONGEST_BESIDE else 1


def to_png(figure: Figure) -> bytes:
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=DPI, facecolor=figure.get_facecolor())
    return picture.getvalue()


def _figure(width: float, height: float, theme: Theme) -> Figure:
    figure = Figure(figsize=(width, height), facecolor=theme.paper)
    FigureCanvasAgg(figure)
    return figure
