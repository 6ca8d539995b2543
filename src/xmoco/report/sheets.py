"""Sheets of pictures: what the network is shown (views) and what it finds alike (neighbours).

Pictures are uint8 tensors of shape (3, height, width); sheets are PNG files as bytes, on
transparent paper, with writing in a grey that reads on light and dark pages alike.
"""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from torch import Tensor

from xmoco.report.curves import to_png

INK = "#7b8087"
# Right and wrong differ in colour (safe for colour-blind readers), in mark and in the frame's line.
RIGHT, WRONG = "#0f8fd0", "#e07b1a"
CELL = 1.15  # inches
LARGE_CELL = 3.6


def views_sheet(names: Sequence[str], columns: Sequence[Sequence[Tensor]]) -> bytes:
    """One column per image: the original on top, its views of these names below."""
    if not columns:
        raise ValueError("a sheet of views needs at least one image")
    cells = _cells(rows=1 + len(names), columns=len(columns), caption=0.0)
    for column, pictures in enumerate(columns):
        for row, picture in enumerate(pictures):
            _show(cells[row][column], picture)
    for line, title in zip(cells, ("original", *names), strict=True):
        line[0].set_ylabel(title, color=INK, fontsize=9)
    return to_png(_figure_of(cells))


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
    cells = _cells(rows=count, columns=1 + nearest, caption=0.25)
    cells[0][0].set_title("query", color=INK, fontsize=9)
    for row in range(count):
        _show(cells[row][0], queries[row])
        if query_labels is not None and classes is not None:
            _caption(cells[row][0], _short(classes[int(query_labels[row])]), INK)
        for rank in range(nearest):
            axes = cells[row][1 + rank]
            _show(axes, neighbours[row, rank])
            caption = form.format(float(similarities[row, rank]))
            if query_labels is None or neighbour_labels is None:
                _caption(axes, caption, INK)
            else:
                label = int(neighbour_labels[row, rank])
                right = label == int(query_labels[row])
                if classes is not None and not right:
                    caption += " " + _short(classes[label])
                _judge(axes, right, caption)
    return to_png(_figure_of(cells))


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


def _caption(axes: Axes, text: str, colour: str) -> None:
    axes.set_xlabel(text, color=colour, fontsize=8, parse_math=False)  # names may hold dollar signs


def _judge(axes: Axes, right: bool, caption: str) -> None:
    colour = RIGHT if right else WRONG
    _caption(axes, f"{'✓' if right else '✗'} {caption}", colour)
    for spine in axes.spines.values():
        spine.set(
            visible=True, color=colour, linewidth=2.5, linestyle="-" if right else (0, (1, 1.5))
        )


def _cells(rows: int, columns: int, caption: float) -> list[list[Axes]]:
    """A grid of empty cells, each with room for a caption of this height in inches below it."""
    size = (CELL * columns + 0.3, (CELL + caption) * rows + 0.3)
    figure = Figure(figsize=size, layout="constrained", facecolor="none")
    FigureCanvasAgg(figure)
    grid = figure.subplots(rows, columns, squeeze=False)
    return [[grid[row, column] for column in range(columns)] for row in range(rows)]


def _show(axes: Axes, picture: Tensor) -> None:
    height, width = picture.shape[-2:]
    # Small pictures keep their pixels; large ones are shrunk, which needs smoothing.
    interpolation = "nearest" if max(height, width) <= 128 else "antialiased"
    axes.imshow(picture.permute(1, 2, 0).cpu().numpy(), interpolation=interpolation)
    axes.set(xticks=[], yticks=[])
    for spine in axes.spines.values():
        spine.set_visible(False)


def _figure_of(cells: list[list[Axes]]) -> Figure:
    figure = cells[0][0].figure
    assert isinstance(figure, Figure)
    return figure
