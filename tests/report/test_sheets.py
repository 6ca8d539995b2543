"""Sheets show the right pictures in the right places, and say right from wrong without colour."""

import io
from collections.abc import Callable

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from PIL import Image
from torch import Tensor

from xmoco.report import sheets
from xmoco.report.curves import to_png

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
        figures.append(figure)
        return to_png(figure)

    monkeypatch.setattr(sheets, "to_png", remember)
    return lambda: figures[-1]


def written(figure: Figure) -> list[str]:
    """All that is written on a sheet, in the order in which it was."""
    return [text.get_text() for text in figure.axes[0].texts]


def middle(picture: AxesImage) -> tuple[float, float]:
    left, right, bottom, top = picture.get_extent()
    return (left + right) / 2, (bottom + top) / 2


def test_views_stand_below_their_original() -> None:
    pair = (plain(RED, 8, 12), plain(GREEN), plain(BLUE))
    picture = pixels(sheets.views_sheet(NAMES, [pair, pair]))
    heights = [centre(picture, colour)[0] for colour in (RED, GREEN, BLUE)]
    assert heights == sorted(heights)


def test_views_are_named(drawn: Callable[[], Figure]) -> None:
    sheets.views_sheet(NAMES, [(plain(RED), plain(GREEN), plain(BLUE))])
    assert written(drawn()) == ["original", *NAMES]


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
    queries, neighbours = torch.zeros(1, 3, 8, 8).byte(), torch.zeros(1, 2, 3, 8, 8).byte()
    sheets.neighbours_sheet(queries, neighbours, torch.tensor([[0.934, -0.5]]))
    assert written(drawn()) == ["query", "0.93", "-0.50"]
    _, *neighbour_places = (middle(picture) for picture in drawn().axes[0].images)
    below = [text.get_position() for text in drawn().axes[0].texts[1:]]
    assert [x for x, _ in below] == pytest.approx([x for x, _ in neighbour_places])
    assert all(text > place for (_, text), (_, place) in zip(below, neighbour_places, strict=True))


def test_right_and_wrong_differ_in_mark_and_line_not_only_colour(
    drawn: Callable[[], Figure],
) -> None:
    sheets.neighbours_sheet(
        torch.zeros(1, 3, 8, 8).byte(),
        torch.zeros(1, 2, 3, 8, 8).byte(),
        torch.tensor([[0.9, 0.8]]),
        query_labels=torch.tensor([1]),
        neighbour_labels=torch.tensor([[1, 0]]),
        classes=["$a$ class of long name", r"$\rings{$"],
    )
    assert written(drawn()) == ["query", r"$\rings{$", "✓ 0.90", "✗ 0.80 $a$ class o…"]
    frames = drawn().axes[0].patches
    assert len(frames) == 2
    assert frames[0].get_edgecolor() != frames[1].get_edgecolor()
    assert frames[0].get_linestyle() != frames[1].get_linestyle()


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
