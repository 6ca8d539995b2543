"""Sheets show the right pictures in the right places, and say right from wrong without colour."""

import io
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.text import Text
from matplotlib.transforms import Bbox
from PIL import Image
from torch import Tensor

from xmoco.report import sheets
from xmoco.report.curves import DPI, to_png

RED, GREEN, BLUE = (
    torch.tensor(c, dtype=torch.uint8) for c in ((255, 0, 0), (0, 255, 0), (0, 0, 255))
)

NAMES = ("source view", "target view")


def plain(colour: Tensor, height: int = 8, width: int = 8) -> Tensor:
    return colour[:, None, None].expand(3, height, width).clone()


def pixels(png: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(png)).convert("RGBA")).astype(int)


def centre(picture: np.ndarray, colour: Tensor) -> tuple[float, float]:
    """Where a colour lies, as shares of the height and width."""
    wanted = [*colour.tolist(), 255]
    rows, columns = np.nonzero((picture == wanted).all(axis=-1))
    assert len(rows), "the colour is not there"
    return rows.mean() / picture.shape[0], columns.mean() / picture.shape[1]


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> Callable[[], Figure]:
    """The figure behind the last sheet."""
    figures: list[Figure] = []

    def remember(figure: Figure) -> bytes:
        figure.set_dpi(DPI)  # so that texts are measured as they are drawn
        figures.append(figure)
        return to_png(figure)

    monkeypatch.setattr(sheets, "to_png", remember)
    return lambda: figures[-1]


def written(figure: Figure) -> list[str]:
    """All that is written on a sheet, in the order in which it was."""
    return [text.get_text() for text in figure.axes[0].texts]


def area(drawn: AxesImage | Text) -> Bbox:
    """What a picture or text covers of its sheet, in inches from the left and from the top."""
    if isinstance(drawn, AxesImage):
        left, right, bottom, top = drawn.get_extent()
        return Bbox.from_extents(left, top, right, bottom)
    covered = drawn.get_window_extent().transformed(drawn.axes.transData.inverted())
    (left, right), (top, bottom) = sorted(covered.intervalx), sorted(covered.intervaly)
    return Bbox.from_extents(left, top, right, bottom)


def middle(area: Bbox) -> tuple[float, float]:
    return (area.x0 + area.x1) / 2, (area.y0 + area.y1) / 2


def assert_captions_keep_to_their_pictures(figure: Figure, columns: int) -> None:
    """Every picture has text of its own below it: in the middle, above the next row, and apart from
    the text beside it and from the sheet's edges."""
    axes = figure.axes[0]
    pictures = [area(picture) for picture in axes.images]
    heading, *texts = axes.texts
    assert middle(area(heading))[0] == pytest.approx(middle(pictures[0])[0])
    assert area(heading).y1 < pictures[0].y0
    (left, right), (end, _) = axes.get_xlim(), axes.get_ylim()
    lines: dict[float, list[Bbox]] = {}
    for text in texts:
        written = area(text)
        above = [
            number
            for number, picture in enumerate(pictures)
            if abs(middle(picture)[0] - middle(written)[0]) < 0.01 and picture.y1 < written.y0
        ]
        assert above, f"{text.get_text()!r} is below no picture"
        below = above[-1] + columns
        assert written.y1 < (pictures[below].y0 if below < len(pictures) else end), text.get_text()
        assert left < written.x0 <= written.x1 < right, text.get_text()
        lines.setdefault(text.get_position()[1], []).append(written)
    for line in lines.values():
        line.sort(key=lambda written: written.x0)
        assert all(one.x1 < other.x0 for one, other in pairwise(line))


def test_views_stand_below_their_original() -> None:
    pair = (plain(RED, 8, 12), plain(GREEN), plain(BLUE))
    picture = pixels(sheets.views_sheet(NAMES, [pair, pair]))
    heights = [centre(picture, colour)[0] for colour in (RED, GREEN, BLUE)]
    assert heights == sorted(heights)


@pytest.mark.parametrize("second", ["target view", "a target view by its name", "W" * 200])
def test_views_are_named(drawn: Callable[[], Figure], second: str) -> None:
    """Left of the first picture of their row, whole unless they are wider than two pictures."""
    sheets.views_sheet(["source view", second], [(plain(RED), plain(GREEN), plain(BLUE))] * 2)
    *usual, last = written(drawn())
    assert usual == ["original", "source view"]
    assert last == second or (len(second) == 200 and 10 < len(last) == last.index("…") + 1)
    for text, picture in zip(drawn().axes[0].texts, drawn().axes[0].images[:3], strict=True):
        name, shown = area(text), area(picture)
        assert text.get_position()[1] == pytest.approx(middle(shown)[1])
        assert shown.y0 < name.y0 < name.y1 < shown.y1
        assert 0 < name.x0 < name.x1 < shown.x0


def test_a_sheet_has_as_many_views_as_a_method_makes(drawn: Callable[[], Figure]) -> None:
    names = [f"crop {number}" for number in range(1, 6)]
    sheets.views_sheet(names, [(plain(RED), *[plain(GREEN)] * 5)] * 2)
    assert len(drawn().axes[0].images) == 12
    assert written(drawn()) == ["original", *names]


def test_a_sheet_has_transparent_paper() -> None:
    picture = pixels(sheets.views_sheet(NAMES, [(plain(RED), plain(GREEN), plain(BLUE))]))
    assert picture[0, 0, 3] == 0


def test_no_views_is_an_error() -> None:
    with pytest.raises(ValueError, match="at least one image"):
        sheets.views_sheet(NAMES, [])


def test_neighbours_stand_right_of_their_query_in_order() -> None:
    queries = plain(RED)[None]
    neighbours = torch.stack([plain(GREEN), plain(BLUE)])[None]
    picture = pixels(sheets.neighbours_sheet(queries, neighbours, torch.tensor([[0.9, 0.5]])))
    columns = [centre(picture, colour)[1] for colour in (RED, GREEN, BLUE)]
    assert columns == sorted(columns)


def test_similarity_is_written_under_each_neighbour(drawn: Callable[[], Figure]) -> None:
    queries, neighbours = torch.zeros(2, 3, 8, 8).byte(), torch.zeros(2, 2, 3, 8, 8).byte()
    sheets.neighbours_sheet(queries, neighbours, torch.tensor([[0.934, -0.5], [1, 0]]))
    assert written(drawn()) == ["query", "0.93", "-0.50", "1.00", "0.00"]
    places = [area(picture) for picture in drawn().axes[0].images]
    assert places[0].x0 < 0.1, "rows without names need no margin"
    of_neighbours = [middle(places[number])[0] for number in (1, 2, 4, 5)]
    assert [text.get_position()[0] for text in drawn().axes[0].texts[1:]] == of_neighbours
    assert_captions_keep_to_their_pictures(drawn(), columns=3)


def test_right_and_wrong_differ_in_mark_and_line_not_only_colour(
    drawn: Callable[[], Figure],
) -> None:
    sheets.neighbours_sheet(
        torch.zeros(1, 3, 8, 8).byte(),
        torch.zeros(1, 2, 3, 8, 12).byte(),
        torch.tensor([[0.9, 0.8]]),
        query_labels=torch.tensor([1]),
        neighbour_labels=torch.tensor([[1, 0]]),
        classes=["$a$ class", r"$\rings{$"],
    )
    assert written(drawn()) == ["query", r"$\rings{$", "✓ 0.90", "✗ 0.80", "$a$ class"]
    frames, (_, *pictures) = drawn().axes[0].patches, drawn().axes[0].images
    for frame, picture in zip(frames, pictures, strict=True):
        assert frame.get_linewidth() > 0
        around = Bbox.from_bounds(*frame.get_xy(), frame.get_width(), frame.get_height())
        assert around.extents == pytest.approx(area(picture).extents)
    assert frames[0].get_edgecolor() != frames[1].get_edgecolor()
    assert frames[0].get_linestyle() != frames[1].get_linestyle()


def test_captions_keep_to_their_pictures_whatever_classes_are_called(
    drawn: Callable[[], Figure],
) -> None:
    classes = ["english springer", "two\nlines", "W" * 60, "iiiiiiiiiiiiiiiiiiii", "", "a \udcff b"]
    labels = torch.arange(6)
    sheets.neighbours_sheet(
        torch.zeros(6, 3, 8, 8).byte(),
        torch.zeros(6, 3, 3, 8, 8).byte(),
        torch.full((6, 3), 12.34),
        query_labels=labels,
        neighbour_labels=(labels[:, None] + torch.arange(3)) % 6,
        classes=classes,
        form="{:.1f} ×",
    )
    assert_captions_keep_to_their_pictures(drawn(), columns=4)
    names = {text for text in written(drawn()) if "12.3 ×" not in text} - {"query"}
    (shortened,) = (name for name in names if name.startswith("W"))
    assert 4 < len(shortened) == shortened.index("…") + 1
    assert names == {classes[0], r"two\nlines", shortened, classes[3], "", r"a \xff b"}


def test_no_queries_is_an_error() -> None:
    with pytest.raises(ValueError, match="at least one query"):
        sheets.neighbours_sheet(
            torch.zeros(0, 3, 8, 8).byte(), torch.zeros(0, 4, 3, 8, 8).byte(), torch.zeros(0, 4)
        )


def test_shapes_that_do_not_belong_together_are_refused() -> None:
    with pytest.raises(ValueError, match="do not belong together"):
        sheets.neighbours_sheet(
            torch.zeros(2, 3, 8, 8).byte(),
            torch.zeros(2, 4, 3, 8, 8).byte(),
            torch.zeros(2, 3),
        )


def test_large_pictures_are_smoothed_and_small_ones_keep_their_pixels(
    drawn: Callable[[], Figure],
) -> None:
    small, large = plain(RED, 32, 32), plain(RED, 300, 200)
    sheets.views_sheet(NAMES, [(large, small, small)])
    modes = [picture.get_interpolation() for picture in drawn().axes[0].images]
    assert modes[1] == modes[2] == "nearest"
    assert modes[0] != "nearest"


def test_paths_keep_their_end_where_they_do_not_fit(drawn: Callable[[], Figure]) -> None:
    paths = ["cat/1.jpg", "golden_retriever_of_the_king/p-000123.jpg"]
    sheets.captioned_sheet([plain(RED)] * 2, [["is cat"], ["is dog"]], paths, columns=2)
    short, long = written(drawn())[1::2]
    assert short == "cat/1.jpg"
    assert long.startswith("…")
    assert long.endswith("p-000123.jpg")
