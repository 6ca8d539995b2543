"""A figure whose places are inches from its upper left corner, and which can measure what is
written: for pictures that are laid out by hand."""

from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text

from xmoco.report.curves import DPI


class Canvas:
    """``style`` is that of its writing, unless said otherwise. It has no size until it is cut."""

    def __init__(self, paper: str, **style: Any) -> None:
        # Texts are as wide as measured only where they are drawn with the same dots.
        self.figure = Figure(facecolor=paper, dpi=DPI)
        FigureCanvasAgg(self.figure)
        self.axes = self.figure.add_axes((0, 0, 1, 1))
        self.axes.set_axis_off()
        self.style = {"parse_math": False, **style}  # dollar signs may be meant

    def cut(self, width: float, height: float) -> None:
        self.figure.set_size_inches(width, height)
        self.axes.set(xlim=(0, width), ylim=(height, 0))

    def write(self, x: float, y: float, text: str, **style: Any) -> Text:
        return self.axes.text(x, y, text, **self.style | style)

    def width(self, text: str, **style: Any) -> float:
        """How wide a text would be."""
        written = self.write(0, 0, text, **style)
        pixels = written.get_window_extent().width
        written.remove()
        return float(pixels / self.figure.dpi)
