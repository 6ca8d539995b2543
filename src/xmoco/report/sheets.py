"""Sheets of pictures: what the network is shown (views) and what it finds alike (neighbours).

Pictures are uint8 tensors of shape (3, height, width); sheets are PNG files as bytes, on
transparent paper, with writing in a grey that reads on light and dark pages alike.
"""

from bisect import bisect
from collections.abc import Mapping, Sequence

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.patches import Rectangle
from matplotlib.typing import LineStyleType
from torch import Tensor

from xmoco.report.canvas import Canvas
from xmoco.report.curves import to_png
from xmoco.text import printable

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
HEADING = 0.3  # above the pictures, for titles of columns
TITLE, CAPTION = 9, 8  # points
LINE = 1.2 * CAPTION / 72  # inches
WIDEST_TITLE = 2.5
LARGE_CELL = 3.6


def views_sheet(names: Sequence[str], columns: Sequence[Sequence[Tensor]]) -> bytes:
    """One column per image: the original on top, its views of these names below."""
    if not columns:
        raise ValueError("a sheet of views needs at least one image")
    titles = ("original", *names)
    sheet = _Sheet(rows=len(titles), columns=len(columns), titles=titles)
    for column, pictures in enumerate(columns):
        for row, picture in enumerate(pictures):
            sheet.show(row, column, picture)
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
    if count == 0:
        raise ValueError("a sheet of neighbours needs at least one query")
    lines = 1 if classes is None or neighbour_labels is None else 2
    sheet = _Sheet(rows=count, columns=1 + nearest, heading=HEADING, lines=lines)
    sheet.name_column(0, "query")
    for row in range(count):
        sheet.show(row, 0, queries[row])
        if query_labels is not None and classes is not None:
            sheet.caption(row, 0, [classes[int(query_labels[row])]])
        for rank in range(nearest):
            picture = sheet.show(row, 1 + rank, neighbours[row, rank])
            similarity = form.format(float(similarities[row, rank]))
            if query_labels is None or neighbour_labels is None:
                sheet.caption(row, 1 + rank, [similarity])
            else:
                label = int(neighbour_labels[row, rank])
                right = label == int(query_labels[row])
                named = [] if right or classes is None else [classes[label]]
                mark, colour, line = VERDICTS[right]
                sheet.caption(row, 1 + rank, [f"{mark} {similarity}", *named], colour)
                sheet.frame(picture, colour, line)
    return to_png(sheet.figure)


def captioned_sheet(
    pictures: Sequence[Tensor],
    captions: Sequence[Sequence[str]],
    paths: Sequence[str],
    columns: int,
) -> bytes:
    """Pictures row by row, each with its lines below, and the end of its path."""
    rows, columns = -(-len(pictures) // columns), min(columns, len(pictures))
    sheet = _Sheet(rows, columns, lines=1 + max(map(len, captions)))
    for number, (picture, lines, path) in enumerate(zip(pictures, captions, paths, strict=True)):
        row, column = divmod(number, columns)
        sheet.show(row, column, picture)
        sheet.caption(row, column, [*lines, sheet.end_of(path)])
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


class _Sheet(Canvas):
    """A grid of pictures, with titles left of its rows, where they have any, room for a heading
    above, in inches, and for lines below each.

    All are drawn on one pair of axes: as many axes as pictures would take a second and more to lay
    out.
    """

    def __init__(
        self,
        rows: int,
        columns: int,
        titles: Sequence[str] = (),
        heading: float = 0.0,
        lines: int = 0,
    ) -> None:
        super().__init__("none", color=INK, ha="center", va="center")
        titles = [self._fitting(title, TITLE, WIDEST_TITLE) for title in titles]
        widths = [self.width(title, fontsize=TITLE) for title in titles]
        self.margin = GAP + max(widths) if widths else 0.0
        self.heading = heading
        self.row_height = CELL + (LINE * lines + GAP if lines else 0)
        self.cut(self.margin + CELL * columns, heading + self.row_height * rows)
        for row, title in enumerate(titles):
            _, y = self._middle(row, 0)
            self.write(self.margin - GAP / 2, y, title, fontsize=TITLE, ha="right")

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

    def name_column(self, column: int, title: str) -> None:
        x, _ = self._middle(0, column)
        self.write(x, self.heading / 2, title, fontsize=TITLE)

    def caption(self, row: int, column: int, lines: Sequence[str], colour: str = INK) -> None:
        """Each line as far as it fits below the picture."""
        x, y = self._middle(row, column)
        for number, line in enumerate(lines):
            fitting = self._fitting(line, CAPTION, CELL - GAP)
            below = y + CELL / 2 + LINE * (number + 0.5)
            self.write(x, below, fitting, fontsize=CAPTION, color=colour)

    def end_of(self, path: str) -> str:
        """As much of a path as fits below a picture: its end, where files differ."""
        path = printable(path)
        if self.width(path, fontsize=CAPTION) <= CELL - GAP:
            return path
        kept = bisect(
            range(1, len(path)),
            CELL - GAP,
            key=lambda n: self.width(f"…{path[-n:]}", fontsize=CAPTION),
        )
        return f"…{path[-kept:]}" if kept else "…"

    def frame(self, picture: AxesImage, colour: str, line: LineStyleType) -> None:
        left, right, bottom, top = picture.get_extent()
        frame = Rectangle((left, top), right - left, bottom - top, fill=False)
        frame.set(edgecolor=colour, linestyle=line, linewidth=2.5)
        self.axes.add_patch(frame)

    def _middle(self, row: int, column: int) -> tuple[float, float]:
        return self.margin + CELL * (column + 0.5), self.heading + self.row_height * row + CELL / 2

    def _fitting(self, text: str, size: float, inches: float) -> str:
        """The text on one line, and its end left out where it is wider than this."""
        text = printable(text)
        if self.width(text, fontsize=size) <= inches:
            return text
        kept = bisect(
            range(1, len(text)), inches, key=lambda n: self.width(text[:n] + "…", fontsize=size)
        )
        return text[:kept].rstrip() + "…"
