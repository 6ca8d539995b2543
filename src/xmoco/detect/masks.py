"""Masks as run lengths: from polygons, bitmaps and COCO's texts, and back."""

import importlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from xmoco.detect.objects import Runs
from xmoco.errors import UserError


def hotcoco(part: str = "hotcoco") -> Any:
    """The library that reads masks and computes COCO's AP, or a module of it."""
    try:
        return importlib.import_module(part)
    except ModuleNotFoundError:
        raise UserError("detection needs hotcoco: pip install 'xmoco[detect]'.") from None


def runs_of_polygons(polygons: Sequence[Sequence[float]], height: int, width: int) -> Runs:
    """One mask of all polygons, each x, y, x, y …, drawn as COCO does it."""
    rle = hotcoco("hotcoco.mask")
    parts = rle.frPyObjects([[*map(float, polygon)] for polygon in polygons], height, width)
    return runs_of_text(rle.merge(parts)["counts"])


def runs_of_text(counts: str | bytes) -> Runs:
    """Of COCO's compressed form: numbers of 5 bits a character, lowest first, each but the first
    three less the one before the last."""
    codes = np.frombuffer(counts.encode() if isinstance(counts, str) else counts, np.uint8)
    values = codes.astype(np.int64) - 48
    ends = np.flatnonzero(values & 32 == 0)  # the last character of each number
    if len(ends) == 0 or ends[-1] < len(values) - 1 or values.min() < 0 or values.max() > 63:
        raise ValueError("its text is damaged")
    starts = np.concatenate([[0], ends[:-1] + 1])
    place = np.arange(len(values)) - np.repeat(starts, ends + 1 - starts)
    numbers = np.add.reduceat((values & 31) << 5 * place, starts)
    numbers -= np.where(values[ends] & 16, 1 << 5 * (ends + 1 - starts), 0)  # negative ones
    numbers[1::2] = numbers[1::2].cumsum()
    numbers[2::2] = numbers[2::2].cumsum()
    return numbers


def runs_of_bitmap(mask: npt.NDArray[Any]) -> Runs:
    """Of an array (height, width)."""
    pixels = np.concatenate([[False], mask.ravel(order="F") != 0])  # runs begin with those off
    changes = np.flatnonzero(pixels[1:] != pixels[:-1])
    return np.diff(changes, prepend=0, append=mask.size).astype(np.int64)


def bitmap_of_runs(runs: Runs, height: int, width: int) -> npt.NDArray[np.bool_]:
    on = np.arange(len(runs)) % 2 == 1
    return np.repeat(on, runs).reshape(height, width, order="F")


def coco_rle(runs: Runs, height: int, width: int) -> dict[str, Any]:
    """As COCO's evaluation takes it."""
    return {"size": [height, width], "counts": runs.tolist()}
