"""A run's curves, drawn from its ``metrics.jsonl`` and nothing else.

Methods differ in what they log, so a panel is made for whatever is there: kNN beside its baselines,
the loss and its terms, and one for every other value. Each panel has labelled axes and a scale that
does not flatter: percentages run from 0 to 100, probabilities from 0 to 1, amounts from zero.
Figures are made by matplotlib's object interface: nothing global stays changed in the caller's
program.
"""

import io
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from pydantic import BaseModel, Field, FiniteFloat, ValidationError

from xmoco.errors import UserError
from xmoco.records import RunMetrics
from xmoco.settings import read_text, read_yaml
from xmoco.text import printable
from xmoco.train.run_folder import read_environment

LARGEST_DRAWN = 1e30
"""Beyond that, and where a value is no number, matplotlib's arithmetic fails."""

Record = Mapping[str, Any]


@dataclass(frozen=True)
class Series:
    """A value over epochs."""

    epochs: Sequence[float]
    values: Sequence[float]


@dataclass(frozen=True)
class History:
    """What a run measured: training values by name, and records. And with which configuration."""

    training: Mapping[str, Series]
    records: Sequence[Record]
    config: Mapping[str, Any]
    reference_levels: Mapping[str, float] = field(default_factory=dict)
    """What the method says its loss terms are to be compared with."""
    subject: str | None = None
    """What its records call the method."""
    title: str | None = None
    """What people call it."""

    @property
    def method(self) -> str:
        return self.subject or str(self.config.get("method", {}).get("name", "unknown method"))

    def named(self, subject: str) -> str:
        """What people call the subject of a record."""
        return self.title if self.title and subject == self.method else subject

    def setting(self, section: str, name: str) -> Any:
        """None where the configuration does not say."""
        return self.config.get(section, {}).get(name)

    def knn_records(self) -> list[Record]:
        """The kNN accuracies that may be compared: all with the k of the first."""
        records = [record for record in self.records if record["measure"] == "knn_top1"]
        return [record for record in records if _k(record) == _k(records[0])]

    def measured(self, measure: str) -> Series | None:
        """A measure of the run itself over epochs."""
        points = {
            record["protocol"]["epoch"]: record["value"]
            for record in self.records
            if record["measure"] == measure
        }
        return _series(points) if points else None

    def knn(self) -> dict[str, Series]:
        """kNN accuracy over epochs by subject: the run's own first, then the baselines."""
        points: dict[str, dict[float, float]] = {}
        for record in self.knn_records():
            points.setdefault(record["subject"], {})[record["protocol"]["epoch"]] = record["value"]
        series = {subject: _series(by_epoch) for subject, by_epoch in points.items()}
        order = sorted(series, key=lambda name: (name != self.method, -series[name].values[-1]))
        return {subject: series[subject] for subject in order}


def read_history(run: Path) -> History:
    """Reads a run folder. Where a resumed run repeated steps, the later line counts."""
    metrics = run / "metrics.jsonl"
    if not metrics.is_file():
        raise UserError(f"{run} has no metrics.jsonl, so it is not a run folder of xmoco.")
    training: dict[str, dict[float, float]] = {}
    records: list[Record] = []
    for line in RunMetrics.read(metrics).lines:
        if "measure" in line.entry:
            records.append(line.entry)
        else:
            for name, value in line.entry["values"].items():
                training.setdefault(name, {})[line.entry["epoch"]] = _drawable(value)
    about = _about_the_method(read_environment(run))
    return History(
        training={name: _series(points) for name, points in training.items()},
        records=[{**record, "value": _drawable(record["value"])} for record in records],
        config=_config(run / "config.yaml"),
        reference_levels=about.reference_levels,
        subject=about.subject,
        title=about.title,
    )


class _AboutTheMethod(BaseModel):
    """What a run's environment.json tells of its method."""

    reference_levels: dict[str, FiniteFloat] = Field(default_factory=dict)
    subject: str | None = None
    title: str | None = None


def _about_the_method(environment: Mapping[str, Any]) -> _AboutTheMethod:
    try:
        return _AboutTheMethod.model_validate(environment.get("method", {}))
    except ValidationError:  # damaged; the curves are not
        return _AboutTheMethod()


def _config(file: Path) -> dict[str, Any]:
    """The sections of a run's config.yaml, as far as they are there."""
    try:
        content = read_yaml(read_text(file), "it")
    except UserError:
        content = None
    sections = content.items() if isinstance(content, dict) else ()
    return {str(name): fields for name, fields in sections if isinstance(fields, dict)}


def _drawable(value: float) -> float:
    """Where there is nothing to draw, curves have a gap."""
    return value if abs(value) < LARGEST_DRAWN else math.nan


def _series(points: Mapping[float, float]) -> Series:
    epochs = sorted(points)
    return Series(epochs, [points[epoch] for epoch in epochs])


def _k(record: Record) -> object:
    return record["protocol"].get("k")


@dataclass(frozen=True)
class Panel:
    """One plot: curves, constant levels to compare them with, and what the scale must include."""

    title: str
    unit: str
    curves: Mapping[str, Series]
    levels: Mapping[str, float] = field(default_factory=dict)
    includes: Sequence[float] = ()
    along: str = "epoch"
    meaning: str = ""
    """What it is and what is good or bad, in plain words."""
    colours: Sequence[int] = ()
    """The number of every curve's colour; unless given, each has its own."""


@dataclass(frozen=True)
class Look:
    """How a logged value is shown: in words, in which unit, on a scale that includes what."""

    title: str
    unit: str
    includes: Sequence[float] = (0,)
    factor: float = 1.0  # from the logged number to the unit
    meaning: str = ""


# What methods and the loop are known to log, in the order shown. Other names are shown as they are.
LOOKS: Mapping[str, Look] = {
    "positive_probability": Look(
        "Probability of the positive",
        "probability",
        (0, 1),
        meaning="How sure the network is which of all keys shows the same image as the query. It "
        "should rise; values far below 1 are usual where there are many keys.",
    ),
    "label_entropy": Look(
        "Entropy of the labels",
        "nats",
        meaning="How widely soft labels spread: 0 is all on the positive. It usually falls as "
        "the labels single out some negatives, and then stays above 0.",
    ),
    "consistency_gap": Look(
        "Gap between the two sides",
        "total variation",
        meaning="How differently the two views of an image spread their similarity over all keys: "
        "0 is alike, 1 has nothing in common. A rise at the start is usual; low is good while the "
        "features keep their spread.",
    ),
    "feature_spread": Look(
        "Spread of the features (0 = collapsed)",
        "spread",
        meaning="How far apart features of different images lie. Near 0 all images look the same "
        "to the network, which is collapse; features of length one reach at most 1.",
    ),
    "effective_rank": Look(
        "Effective rank of the features",
        "dimensions",
        meaning="How many directions the features make use of. A dip at the start is usual; "
        "falling to 1 for good is collapse.",
    ),
    "learning_rate": Look(
        "Learning rate",
        "rate",
        meaning="The size of the optimiser's steps, as planned: nothing to be judged.",
    ),
    "images_per_second": Look(
        "Speed",
        "images/s",
        meaning="Higher is faster. A lasting drop means that images come too slowly or that "
        "something else uses the machine.",
    ),
    "waiting": Look(
        "Time spent waiting for data",
        "%",
        (0, 100),
        factor=100,
        meaning="Near 0 is good. A large share means that reading and decoding images slows the "
        "training.",
    ),
}


@dataclass(frozen=True)
class Claim:
    """A panel of what is measured of negatives (evaluate/similarities.py): a curve for each measure
    that a run has."""

    title: str
    unit: str
    curves: Mapping[str, str]
    includes: Sequence[float] = (0,)
    level: str | None = None
    """A measure that stays the same: what the curves are to be compared with."""
    meaning: str = ""


CLAIMS = (
    Claim(
        "|q_s·B_t − q_t·B_s|",
        "cosine, mean over negatives",
        {
            "similarity_gap": "two views of an image",
            "similarity_gap_unrelated": "views of two images",
        },
        meaning="How far the two views of an image (queries q_s, q_t) disagree about its "
        "similarity to a negative (keys in B_t, B_s). Low is good as long as the same of two "
        "different images is well above it; both near 0 is collapse.",
    ),
    Claim(
        "How evenly a batch falls on negatives",
        "1: on all negatives alike",
        {"similarity_evenness": "similarities", "label_evenness": "soft labels"},
        (0, 1),
        meaning="Whether all negatives together receive alike: 1 is perfectly even and good, near "
        "0 a few negatives take everything, whatever the query.",
    ),
    Claim(
        "Negatives of the query's class",
        "% of the 5 largest",
        {
            "labelled_of_own_class": "by soft label",
            "similar_of_own_class": "by similarity",
        },
        (0, 100),
        level="any_of_own_class",
        meaning="Of the five negatives that a query is told to resemble most, or finds most "
        "similar, how many are of its own class. Well above chance, the network finds related "
        "images. Training does not see the classes.",
    ),
)
KNN_MEANING = (
    "How often the nearest neighbours in feature space name an image's class rightly. Higher is "
    "better; what does not rise above the dashed lines has learnt nothing."
)
LOSS_MEANING = (
    "What training minimises. It should fall in the long run; values of different methods or "
    "settings do not compare."
)
LEVEL_MEANINGS: Mapping[str, str] = {
    "chance": "The dashed line is a blind guess: a term that stays there learns nothing.",
    "unrelated": "The dashed line is what views that have nothing in common would give.",
    "collapsed": "The dashed line is what features that are the same for all images would give.",
}


def panels(history: History) -> list[Panel]:
    """Everything there is to plot, the most telling first."""
    return [
        *_knn_panel(history),
        *_loss_panels(history),
        *claim_panels({"": history}),
        *_other_panels(history),
    ]


def claim_panels(histories: Mapping[str, History]) -> list[Panel]:
    """What became of the paper's claims, in a run or in several by name: of these, each has its
    colour in all panels, as it has where it is a single curve."""
    found = []
    for claim in CLAIMS:
        curves, levels, colours = {}, {}, []
        for number, (name, history) in enumerate(histories.items()):
            for measure, label in claim.curves.items():
                if (series := history.measured(measure)) is not None:
                    curves[f"{name}, {label}" if name else label] = series
                    colours.append(number)
            if claim.level and (series := history.measured(claim.level)) is not None:
                levels = {"chance": series.values[-1]}
        if curves:
            panel = Panel(
                claim.title, claim.unit, curves, levels, claim.includes, meaning=claim.meaning
            )
            found.append(panel if len(histories) == 1 else replace(panel, colours=colours))
    return found


def _knn_panel(history: History) -> list[Panel]:
    knn = history.knn()
    own = {
        history.named(subject): series
        for subject, series in knn.items()
        if subject == history.method
    }
    baselines = {
        subject: series.values[-1] for subject, series in knn.items() if subject != history.method
    }
    if not knn:
        return []
    return [Panel("kNN accuracy", "top-1, %", own, baselines, (0, 100), meaning=KNN_MEANING)]


def _loss_panels(history: History) -> list[Panel]:
    total = {name: series for name, series in history.training.items() if name == "loss"}
    terms = {
        name.removeprefix("loss/").replace("_", " "): series
        for name, series in history.training.items()
        if name.startswith("loss/")
    }
    # Levels are those of a single term, so a total of several is not held against it.
    levels = history.reference_levels
    known = " ".join(LEVEL_MEANINGS[name] for name in levels if name in LEVEL_MEANINGS)
    found = []
    if total:
        meaning = LOSS_MEANING if terms else f"{LOSS_MEANING} {known}".strip()
        found.append(Panel("Loss", "loss", total, {} if terms else levels, meaning=meaning))
    if terms:
        meaning = f"What the loss is made of. {known}".strip()
        if any(name.startswith("consistency") for name in terms):
            meaning += " Consistency cannot fall to 0, so it changes less."
        found.append(Panel("Terms of the loss", "loss", terms, levels, meaning=meaning))
    return found


def _other_panels(history: History) -> list[Panel]:
    names = [name for name in history.training if name.split("/")[0] != "loss"]
    known = [name for name in LOOKS if name in names]
    unknown = sorted(set(names) - set(known))
    found = []
    for name in known + unknown:
        look = LOOKS.get(name) or _look(name)
        series = history.training[name]
        shown = Series(series.epochs, [look.factor * value for value in series.values])
        panel = Panel(
            look.title, look.unit, {name: shown}, includes=look.includes, meaning=look.meaning
        )
        found.append(panel)
    return found


def _look(name: str) -> Look:
    """Of a value that only the method knows."""
    memory = name.removeprefix("fill/")
    if memory != name:
        meaning = "The method works as meant once this memory of past images is full."
        return Look(f"Filling of the {memory}", "%", (0, 100), factor=100, meaning=meaning)
    return Look(name.replace("_", " "), "value", ())


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
