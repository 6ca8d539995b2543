"""The paper's transfer tables with measured rows below them, as Markdown and as pictures.

Measured rows come from records, the paper's from ``paper_transfer.yaml``. There is one table for
frozen backbones and one for backbones tuned end to end. Rows compare when backbone, image size and
protocol agree: among these, a column's best is bold and its second underlined. They are ranked by
the figures shown, so equal figures have equal marks. As in the paper, backbones trained with labels
are shown for comparison and never marked.
"""

import re
import statistics
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import yaml
from matplotlib.patches import Rectangle
from pydantic import Field

from xmoco.errors import UserError
from xmoco.files import write_files
from xmoco.methods import METHODS
from xmoco.records import Measured, TransferProtocol, read_records
from xmoco.report.canvas import Canvas
from xmoco.report.curves import LIGHT, to_png

Mode = Literal["frozen", "end to end"]
Mark = Literal["best", "second"]

MEASURES: Mapping[str, Mode] = {
    "transfer_frozen": "frozen",
    "transfer_end_to_end": "end to end",
}
# The paper's protocols, as `xmoco evaluate transfer` names them.
PAPER_PROTOCOLS: Mapping[Mode, str] = {
    "frozen": "transfer, frozen",
    "end to end": "transfer, end to end (paper grid)",
}
TITLES: Mapping[Mode, str] = {
    "frozen": "Transfer: logistic regression on the frozen backbone",
    "end to end": "Transfer: backbone and classifier tuned end to end",
}
METHOD_NAMES: Mapping[str, str] = {
    **{settings.model_fields["name"].default: method.title for settings, method in METHODS.items()},
    "xmoco+": "XMoCo+",
    "mocov2plus+small views": "MoCo v2+ with small views",
    "supervised": "Supervised",
}
COMPARISON = (
    "In %. Per column, the best is bold and the second underlined (equal figures alike) among rows "
    "with the same backbone, image size and protocol; backbones trained with labels take no part. "
    "± is the standard deviation over seeds."
)
CAUTION = (
    "Rows compare fully only with the same backbone and images. In the paper, DeepCluster-v2, SwAV "
    "and SwAV+UTOA learnt from more than two views of an image."
)


class Transfer(Measured[TransferProtocol]):
    """A record of transfer, as ``xmoco evaluate transfer`` writes it."""

    measure: Literal["transfer_frozen", "transfer_end_to_end"]
    value: float = Field(ge=0, le=100, allow_inf_nan=False)


@dataclass(frozen=True)
class Column:
    """A set under one metric; the same set under another is another column."""

    set: str
    metric: str


@dataclass(frozen=True)
class Setting:
    """What rows must share to be compared."""

    backbone: str
    size: int
    protocol: str
    crop_size: int | None = None
    """Where the classifier was trained on crops of another size than the images judged."""


@dataclass(frozen=True)
class Cell:
    """A mean over seeds, with its standard deviation where there are several."""

    mean: float
    deviation: float | None = None

    @property
    def shown(self) -> str:
        return f"{self.mean:.1f}"

    def __str__(self) -> str:
        return self.shown if self.deviation is None else f"{self.shown} ± {self.deviation:.1f}"


@dataclass(frozen=True)
class Row:
    label: str
    setting: Setting
    measured: bool
    """By xmoco; otherwise the row is the paper's."""
    labelled: bool
    """The backbone was trained with labels."""
    cells: Mapping[Column, Cell]

    @property
    def block(self) -> str:
        """The heading under which the row stands."""
        images = f"{backbone_name(self.setting.backbone)}, {self.setting.size} px"
        if self.setting.crop_size is not None:
            images += f" (trained on {self.setting.crop_size} px)"
        if self.measured:
            return f"Measured: {images}; {self.setting.protocol}"
        return f"Paper: {images}"


@dataclass(frozen=True)
class Table:
    title: str
    columns: Sequence[Column]
    rows: Sequence[Row]
    notes: Sequence[str]

    def blocks(self) -> dict[str, list[Row]]:
        """Rows by heading: the paper's first."""
        found: dict[str, list[Row]] = {}
        for row in self.rows:
            found.setdefault(row.block, []).append(row)
        return found

    def mark(self, row: Row, column: Column) -> Mark | None:
        """Whether the cell is the best or the second of those it compares with, if any."""
        figures = [
            float(other.cells[column].shown)
            for other in self.rows
            if other.setting == row.setting and not other.labelled and column in other.cells
        ]
        if row.labelled or column not in row.cells or len(figures) < 2:
            return None
        marks: Sequence[Mark] = ("best", "second")
        ranking = dict(zip(sorted(set(figures), reverse=True), marks, strict=False))
        return ranking.get(float(row.cells[column].shown))


def draw_transfer(
    records_files: Sequence[Path], out: Path, *, mode: Mode | None = None
) -> list[Path]:
    """Write ``transfer-frozen`` and ``transfer-end-to-end``, as .md and .png, into folder ``out``.

    Drawn is each mode that has records, or the given one only. Existing files of these names are
    overwritten: they follow from the records and can be drawn again.
    """
    tables = _tables(read_transfer(records_files), mode)
    if not tables:
        kind, option = ("", "") if mode is None else (f" {mode}", f" --mode {_slug(mode)}")
        raise UserError(
            f"no records of transfer{kind} in {', '.join(map(str, records_files))}: measure some "
            f"with `xmoco evaluate transfer WEIGHTS SET{option} --records FILE`."
        )
    return write_tables({f"transfer-{_slug(mode)}": table for mode, table in tables.items()}, out)


def write_tables(tables: Mapping[str, Table], out: Path) -> list[Path]:
    """Each by its name as .md and .png in folder ``out``."""
    contents: dict[str, bytes] = {}
    for name, table in tables.items():
        contents[f"{name}.md"] = as_markdown(table).encode()
        contents[f"{name}.png"] = as_picture(table)
    return write_files(out, contents)


def _slug(mode: Mode) -> str:
    """As in file names and on the command line."""
    return mode.replace(" ", "-")


def transfer_tables(records: Sequence[Transfer], mode: Mode | None = None) -> dict[Mode, str]:
    """The tables as Markdown, for each mode that has records or for the given one only."""
    return {drawn: as_markdown(table) for drawn, table in _tables(records, mode).items()}


def read_transfer(files: Iterable[Path]) -> list[Transfer]:
    """The records of transfer in .jsonl files; those of other measures are passed over."""
    return [record for file in files for record in read_records(file, Transfer, MEASURES)]


def _tables(records: Sequence[Transfer], mode: Mode | None) -> dict[Mode, Table]:
    modes = MEASURES.values() if mode is None else [mode]
    by_mode = {
        drawn: [record for record in records if MEASURES[record.measure] == drawn]
        for drawn in modes
    }
    return {drawn: _table(drawn, own) for drawn, own in by_mode.items() if own}


def _table(mode: Mode, records: Sequence[Transfer]) -> Table:
    records = _counted(records)
    rows = [*_paper_rows(mode), *_measured_rows(records)]
    columns = dict.fromkeys(column for row in rows for column in row.cells)
    images = dict.fromkeys(f"{record.protocol.set} – {record.protocol.data}" for record in records)
    notes = (COMPARISON, CAUTION, f"Images measured on: {'; '.join(images)}.")
    return Table(TITLES[mode], list(columns), rows, notes)


def _paper_rows(mode: Mode) -> Iterator[Row]:
    text = (resources.files("xmoco") / "report" / "paper_transfer.yaml").read_text("utf-8")
    paper = yaml.safe_load(text)
    columns = [Column(name, metric) for name, metric in paper["sets"].items()]
    for method, values in paper[mode].items():
        yield Row(
            label=method,
            setting=Setting("resnet50", 224, PAPER_PROTOCOLS[mode]),
            measured=False,
            labelled=method == "Supervised",
            cells={column: Cell(value) for column, value in zip(columns, values, strict=True)},
        )


RowKey = tuple[str, int, Setting, str]
"""Subject, epochs, setting; and the digest of the weights, where the rest does not tell them."""


def _row_key(record: Transfer, digest: str = "") -> RowKey:
    protocol = record.protocol
    crops = None if protocol.crop_size == protocol.size else protocol.crop_size
    setting = Setting(protocol.backbone, protocol.size, protocol.name, crops)
    return record.subject, protocol.epoch, setting, digest


def _row_keys(records: Sequence[Transfer]) -> list[RowKey]:
    """Of every record, the row it belongs to.

    Weights of several seeds share a row, as runs of one method. Different weights of the same seed
    are of different methods, whatever their name: those have rows of their own.
    """
    digests: dict[tuple[RowKey, int], set[str]] = {}
    for record in records:
        digests.setdefault((_row_key(record), record.seed), set()).add(record.protocol.digest)
    mixed = {key for (key, _), found in digests.items() if len(found - {""}) > 1}
    return [
        _row_key(record, record.protocol.digest if _row_key(record) in mixed else "")
        for record in records
    ]


def _column(record: Transfer) -> Column:
    return Column(record.protocol.set, record.protocol.metric)


def _counted(records: Sequence[Transfer]) -> list[Transfer]:
    """The records that count: of a seed measured again, the last.

    Where a set's images were exchanged meanwhile, only the last images count: a mean over different
    images would be of neither.
    """
    keyed = list(zip(_row_keys(records), records, strict=True))
    images = {(key, _column(record)): record.protocol.data for key, record in keyed}
    last = {
        (key, _column(record), record.seed): record
        for key, record in keyed
        if record.protocol.data == images[key, _column(record)]
    }
    return list(last.values())


def _measured_rows(records: Sequence[Transfer]) -> Iterator[Row]:
    """One row per method, epochs and setting, in the order of their first records."""
    found: dict[RowKey, dict[Column, list[float]]] = {}
    classifiers = set()
    for key, record in zip(_row_keys(records), records, strict=True):
        if record.protocol.labelled:
            classifiers.add(key)
        cells = found.setdefault(key, {})
        cells.setdefault(_column(record), []).append(record.value)
    for key, by_column in found.items():
        subject, epochs, setting, digest = key
        label = label_of(subject, epochs, setting.backbone)
        yield Row(
            label=f"{label} ({digest[:6]})" if digest else label,
            setting=setting,
            measured=True,
            # Whatever torchvision and timm offer by these names was trained with labels.
            labelled=key in classifiers
            or subject == "supervised"
            or subject.startswith(("torchvision:", "timm:")),
            cells={column: cell_of(values) for column, values in by_column.items()},
        )


def cell_of(values: Sequence[float]) -> Cell:
    deviation = statistics.stdev(values) if len(values) > 1 else None
    return Cell(statistics.fmean(values), deviation)


def label_of(subject: str, epochs: int, backbone: str) -> str:
    trained = {0: "", 1: ", 1 epoch"}.get(epochs, f", {epochs} epochs")
    return f"{METHOD_NAMES.get(subject, subject)}, {backbone_name(backbone)}{trained}"


def backbone_name(backbone: str) -> str:
    return re.sub(r"^resnet(?=\d)", "ResNet-", backbone)


def as_markdown(table: Table) -> str:
    heads = [f"{_escaped(column.set)}<br>{_escaped(column.metric)}" for column in table.columns]
    lines = [["pre-train", *heads], [":--", *(":-:" for _ in heads)]]
    for block, rows in table.blocks().items():
        lines.append([f"*{_escaped(block)}*", *("" for _ in heads)])
        for row in rows:
            cells = [_markdown_cell(table, row, column) for column in table.columns]
            lines.append([_escaped(row.label), *cells])
    grid = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    notes = "\n\n".join(map(_escaped, table.notes))
    return f"# {table.title}\n\n{grid}\n\n{notes}\n"


def _markdown_cell(table: Table, row: Row, column: Column) -> str:
    if column not in row.cells:
        return "–"
    shape = {"best": "**{}**", "second": "<u>{}</u>", None: "{}"}[table.mark(row, column)]
    return shape.format(row.cells[column])


def _escaped(text: str) -> str:
    """Names may hold anything; here they stand for themselves."""
    return re.sub(r"([\\`*_\[\]<>|~&$])", r"\\\1", text)


# Of the picture: inches, points, letters.
MARGIN, GAP, ROW_HEIGHT = 0.3, 0.2, 0.25
NOTE_HEIGHT, NOTE_LETTERS_PER_INCH = 0.18, 16
LONGEST_NAME = 44  # longer names are cut in the picture; the Markdown has them whole
SOFT, ACCENT = "#6b7077", LIGHT.curves[0]
SMALL: dict[str, Any] = {"fontsize": 7.5, "color": SOFT}
TITLE: dict[str, Any] = {"fontsize": 12, "weight": "bold"}


class _Canvas(Canvas):
    def __init__(self) -> None:
        super().__init__(LIGHT.paper, fontsize=9, color=LIGHT.ink)

    def line(self, left: float, right: float, y: float, colour: str = LIGHT.ink) -> None:
        self.axes.plot([left, right], [y, y], color=colour, linewidth=1)

    def tint(self, left: float, right: float, top: float, height: float) -> None:
        area = Rectangle((left, top), right - left, height, color=ACCENT, alpha=0.1, linewidth=0)
        self.axes.add_patch(area)


def as_picture(table: Table) -> bytes:
    """The table as a PNG file, as wide as its words. Measured rows are tinted."""
    canvas = _Canvas()
    right = MARGIN + GAP + max(canvas.width(_short(row.label)) for row in table.rows)
    centres: dict[Column, float] = {}
    for column in table.columns:
        width = _column_width(canvas, table, column)
        centres[column] = right + width / 2
        right += width
    blocks = table.blocks()
    headings = [canvas.width(block, **SMALL | {"weight": "bold"}) for block in blocks]
    title = canvas.width(table.title, **TITLE)
    right = max(right, MARGIN + max(title, *headings))
    letters = int((right - MARGIN) * NOTE_LETTERS_PER_INCH)
    notes = [line for note in table.notes for line in textwrap.wrap(note, letters)]
    # Title and heads take three rows, each block its heading and half a row below.
    grid_height = ROW_HEIGHT * (3 + len(table.rows) + 1.5 * len(blocks))
    canvas.cut(right + MARGIN, 2 * MARGIN + grid_height + NOTE_HEIGHT * len(notes))

    y = MARGIN + 0.5 * ROW_HEIGHT
    canvas.write(MARGIN, y, table.title, **TITLE)
    y += 1.5 * ROW_HEIGHT
    for column, x in centres.items():
        canvas.write(x, y, _short(column.set), ha="center", weight="bold")
        canvas.write(x, y + 0.65 * ROW_HEIGHT, _short(column.metric), ha="center", **SMALL)
    y += ROW_HEIGHT
    canvas.line(MARGIN, right, y)
    for block, rows in blocks.items():
        y += ROW_HEIGHT
        colour = ACCENT if rows[0].measured else SOFT
        canvas.write(MARGIN, y, block, **SMALL | {"weight": "bold", "color": colour})
        for row in rows:
            y += ROW_HEIGHT
            if row.measured:
                edge = GAP / 2
                canvas.tint(MARGIN - edge, right + edge, y - 0.7 * ROW_HEIGHT, ROW_HEIGHT)
            canvas.write(MARGIN, y, _short(row.label))
            for column, x in centres.items():
                _draw_cell(canvas, x, y, row.cells.get(column), table.mark(row, column))
        y += 0.5 * ROW_HEIGHT
        canvas.line(MARGIN, right, y, LIGHT.grid)
    y += 0.3 * ROW_HEIGHT
    for note in notes:
        y += NOTE_HEIGHT
        canvas.write(MARGIN, y, note, **SMALL)
    return to_png(canvas.figure)


def _draw_cell(canvas: _Canvas, x: float, y: float, cell: Cell | None, mark: Mark | None) -> None:
    if cell is None:
        canvas.write(x, y, "–", ha="center", color=SOFT)
        return
    canvas.write(x, y, str(cell), ha="center", weight="bold" if mark == "best" else "normal")
    if mark == "second":
        half = canvas.width(str(cell)) / 2
        canvas.line(x - half, x + half, y + 0.15 * ROW_HEIGHT)


def _column_width(canvas: _Canvas, table: Table, column: Column) -> float:
    cells = [str(row.cells[column]) for row in table.rows if column in row.cells]
    bold = [canvas.width(text, weight="bold") for text in (_short(column.set), *cells)]
    return max(canvas.width(_short(column.metric), **SMALL), *bold) + GAP


def _short(name: str) -> str:
    return name if len(name) <= LONGEST_NAME else name[: LONGEST_NAME - 1] + "…"
