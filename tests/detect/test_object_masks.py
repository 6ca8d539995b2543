"""Masks as run lengths are those that COCO's own tools read and write."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from pycocotools import mask as reference

from xmoco.detect.masks import bitmap_of_runs, runs_of_bitmap, runs_of_polygons, runs_of_text

bitmaps = arrays(np.bool_, st.tuples(st.integers(1, 12), st.integers(1, 12)))


@given(bitmaps)
def test_bitmaps_there_and_back(bitmap: np.ndarray) -> None:
    runs = runs_of_bitmap(bitmap)
    assert runs.sum() == bitmap.size
    assert (runs[1:] > 0).all()
    assert np.array_equal(bitmap_of_runs(runs, *bitmap.shape), bitmap)


@given(bitmaps)
def test_texts_are_read_as_pycocotools_writes_them(bitmap: np.ndarray) -> None:
    text = reference.encode(np.asfortranarray(bitmap.astype(np.uint8)))["counts"]
    for form in (text, text.decode()):
        assert np.array_equal(bitmap_of_runs(runs_of_text(form), *bitmap.shape), bitmap)


def test_long_runs_take_several_characters() -> None:
    bitmap = np.zeros((300, 400), dtype=np.uint8)
    bitmap[17:290, 33:34] = 1
    bitmap[250:252, 50:390] = 1
    text = reference.encode(np.asfortranarray(bitmap))["counts"]
    assert np.array_equal(bitmap_of_runs(runs_of_text(text), 300, 400), bitmap == 1)


@pytest.mark.parametrize("text", ["", "P", "5b", "~~"])
def test_damaged_texts(text: str) -> None:
    with pytest.raises(ValueError, match="damaged"):
        runs_of_text(text)


corner = st.floats(0, 20, allow_nan=False)
polygon = st.lists(st.tuples(corner, corner), min_size=3, max_size=6).map(
    lambda points: [number for point in points for number in point]
)


@given(st.lists(polygon, min_size=1, max_size=3))
def test_polygons_are_drawn_as_pycocotools_does(polygons: list[list[float]]) -> None:
    expected = reference.decode(reference.merge(reference.frPyObjects(polygons, 16, 20)))
    assert np.array_equal(bitmap_of_runs(runs_of_polygons(polygons, 16, 20), 16, 20), expected == 1)
