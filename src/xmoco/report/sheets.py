"""Sheets of pictures: what the network is shown (views) and what it finds alike (neighbours).

Pictures are uint8 tensors of shape (3, height, width); sheets are PNG files as bytes, on
transparent paper, with writing in a grey that reads on light and dark pages alike.
"""

from collections.abc import Mapping, Sequence

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.patches import Rectangle
from matplotlib.typing import LineStyleType
from torch import Tensor

from xmoco.report.curves import to_png

INK = "#7b8087"
RIGHT, WRONG = "#0f8fd0", "#e07b1a"
VERDICTS: Mapping[bool, tuple[str, str, LineStyleType]] = {
    True: ("✓", RIGHT, "-"),
    False: ("✗", WRONG, (0, (1, 1.5))),
}
"""Right and wrong differ in mark, in colour (safe for colour-blind readers) and in the frame's
line."""
CELL = 1.15  # inches, of which a picture leaves a gap
GAP = 0.09
MARGIN = 0.3  # left of the pictures or above them, for titles
LARGE_CELL = 3.6


def views_sheet(names: Sequence[str], columns: Sequence[Sequence[Tensor]]) -> bytes:
    """One column per image: the original on top, its views of these names below."""
    if not columns:
        raise ValueError("a sheet of views needs at least one image")
    sheet = _Sheet(rows=1 + len(names), columns=len(columns))
    for column, pictures in enumerate(columns):
        for row, picture in enumerate(pictures):
            sheet.show(row, column, picture)
    for row, title in enumerate(("original", *names)):
        sheet.name_row(row, title)
    return to_png(sheet.figure)


def neighbours_sheet(
    queries: Tensor,
    neighbours: Tensor,
    similarities: Tensor,
    *,
    query_labels: Tensor | None = None,
    neighbour_labels: Tensor | None = None,
    classes: Sequence[str] | None = None,
    form: str = "{:.2f}",
) -> bytes:
    """One row per query: it stands left, its nearest neighbours right, nearest first.

    Shapes: queries (q, 3, h, w), neighbours (q, k, 3, h, w), similarities (q, k); labels are (q)
    and (q, k), and index ``classes``.
    """
    count, nearest = similarities.shape
    if neighbours.shape[:2] != (count, nearest) or len(queries) != count:
        raise ValueError(
            f"{len(queries)} queries, neighbours {tuple(neighbours.shape[:2])} and similarities "
            f"{tuple(similarities.shape)} do not belong together"
        )
    sheet = _Sheet(rows=count, columns=1 + nearest, heading=MARGIN, caption=0.2)
    sheet.name_column(0, "query")
    for row in range(count):
        sheet.show(row, 0, queries[row])
        if query_labels is not None and classes is not None:
            sheet.caption(row, 0, _short(classes[int(query_labels[row])]))
        for rank in range(nearest):
            picture = sheet.show(row, 1 + rank, neighbours[row, rank])
            caption = form.format(float(similarities[row, rank]))
            if query_labels is None or neighbour_labels is None:
                sheet.caption(row, 1 + rank, caption)
            else:
                label = int(neighbour_labels[row, rank])
                right = label == int(query_labels[row])
                if classes is not None and not right:
                    caption += " " + _short(classes[label])
                mark, colour, line = VERDICTS[right]
                sheet.caption(row, 1 + rank, f"{mark} {caption}", colour)
                sheet.frame(picture, colour, line)
    return to_png(sheet.figure)


def pictures_sheet(pictures: Sequence[Tensor], columns: int = 2) -> bytes:
    """Pictures of any sizes, large enough to look at, row by row."""
    rows = -(-len(pictures) // columns)
    figure = Figure(figsize=(LARGE_CELL * columns, LARGE_CELL * rows), layout="constrained")
    figure.set_facecolor("none")
    FigureCanvasAgg(figure)
    for number, picture in enumerate(pictures, start=1):
        axes = figure.add_subplot(rows, columns, number)
        axes.imshow(picture.permute(1, 2, 0).numpy())
        axes.set_axis_off()
    return to_png(figure)


def _short(name: str) -> str:
    """A class name that does not run into the next cell."""
    return name if len(name) <= 12 else name[:11] + "…"


class _Sheet:
    """A grid of pictures, with room for a heading and for captions of these heights in inches.

    All are drawn on one pair of axes, whose unit is the inch: as many axes as pictures would take
    a second and more to lay out.
    """

    def __init__(self, rows: int, columns: int, heading: float = 0.0, caption: float = 0.0) -> None:
        self.heading, self.row_height = heading, CELL + caption
        width, height = MARGIN + CELL * columns, heading + self.row_height * rows
        self.figure = Figure(figsize=(width, height), facecolor="none")
        FigureCanvasAgg(self.figure)
        self.axes = self.figure.add_axes((0, 0, 1, 1))
        self.axes.set_axis_off()
        self.axes.set(xlim=(0, width), ylim=(height, 0))

    def show(self, row: int, column: int, picture: Tensor) -> AxesImage:
        """As large as its cell allows, in the middle of it."""
        height, width = picture.shape[-2:]
        x, y = self._middle(row, column)
        inches = (CELL - GAP) / 2 / max(height, width)
        wide, high = inches * width, inches * height
        return self.axes.imshow(
            picture.permute(1, 2, 0).cpu().numpy(),
            extent=(x - wide, x + wide, y + high, y - high),
            aspect="auto",
            # Small pictures keep their pixels; large ones are shrunk, which needs smoothing.
            interpolation="nearest" if max(height, width) <= 128 else "antialiased",
        )

    def name_row(self, row: int, title: str) -> None:
        _, y = self._middle(row, 0)
        self._write(MARGIN / 2, y, title, INK, 9, rotation=90)

    def name_column(self, column: int, title: str) -> None:
        x, _ = self._middle(0, column)
        self._write(x, self.heading / 2, title, INK, 9)

    def caption(self, row: int, column: int, text: str, colour: str = INK) -> None:
        x, y = self._middle(row, column)
        self._write(x, y + CELL / 2 + 0.05, text, colour, 8)

    def frame(self, picture: AxesImage, colour: str, line: LineStyleType) -> None:
        left, right, bottom, top = picture.get_extent()
        frame = Rectangle((left, top), right - left, bottom - top, fill=False)
        frame.set(edgecolor=colour, linestyle=line, linewidth=2.5)
        self.axes.add_patch(frame)

    def _middle(self, row: int, column: int) -> tuple[float, float]:
        return MARGIN + CELL * (column + 0.5), self.heading + self.row_height * row + CELL / 2

    def _write(
        self, x: float, y: float, text: str, colour: str, size: float, rotation: float = 0
    ) -> None:
        self.axes.text(
            x,
            y,
            text,
            color=colour,
            fontsize=size,
            rotation=rotation,
            ha="center",
            va="center",
            parse_math=False,  # names may hold dollar signs
        )
