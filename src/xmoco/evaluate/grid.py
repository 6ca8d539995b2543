"""Grids of rates and weight decays, searched point by point, with a file that remembers.

Each finished point is a line of ``grid.jsonl``; the first line holds the settings. A search that
was interrupted goes on where it stopped, but only with the settings it began with.
"""

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from xmoco.errors import UserError
from xmoco.evaluate.classify import CosineProtocol
from xmoco.files import write_whole


class Point(NamedTuple):
    rate: float
    weight_decay: float


@dataclass(frozen=True)
class Grid:
    """All pairs of a rate and a weight decay, each trained for ``steps`` batches."""

    name: str
    rates: tuple[float, ...]
    weight_decays: tuple[float, ...]
    steps: int
    batch: int

    @property
    def points(self) -> list[Point]:
        return [Point(rate, decay) for rate in self.rates for decay in self.weight_decays]

    def protocol(self, point: Point) -> CosineProtocol:
        name = f"transfer, end to end ({self.name} grid)"
        return CosineProtocol(
            name, self.batch, point.rate, point.rate, point.weight_decay, self.steps
        )


def _spaced(first: float, last: float, count: int) -> tuple[float, ...]:
    return tuple(float(f"{value:.4g}") for value in np.geomspace(first, last, count))


GRIDS = {
    grid.name: grid
    for grid in (
        Grid("paper", _spaced(1e-4, 1e-1, 10), (0.0, *_spaced(1e-6, 1e-3, 10)), 5000, 64),
        Grid("small", (0.001, 0.01, 0.1), (0.0, 1e-4), 1000, 64),
    )
}


@dataclass
class GridFile:
    """The finished points of a search, and what each reached on the validation images."""

    path: Path
    values: dict[Point, float] = field(default_factory=dict)

    @classmethod
    def open(cls, folder: Path, settings: dict[str, Any]) -> "GridFile":
        """A new file, or that of an interrupted search with the same settings."""
        file = cls(folder / "grid.jsonl")
        settings = json.loads(json.dumps(settings))  # as they are read back
        folder.mkdir(parents=True, exist_ok=True)
        lines = file._whole_lines()
        if not lines:
            file._append(settings)
            return file
        try:
            begun, *points = map(json.loads, lines)
            both = begun | settings
            changed = [name for name in both if begun.get(name) != settings.get(name)]
            file.values = {Point(p["rate"], p["weight_decay"]): float(p["value"]) for p in points}
        except (ValueError, LookupError, TypeError, AttributeError):
            raise UserError(f"{file.path} is damaged: remove it to begin the grid anew.") from None
        if changed:
            name = changed[0]
            raise UserError(
                f"{file.path} was begun with other settings: {name} was {_short(begun.get(name))} "
                f"and is {_short(settings.get(name))} now. Go on as it was begun, or give another "
                "folder with --out."
            )
        return file

    def add(self, point: Point, value: float) -> None:
        self.values[point] = value
        self._append({**point._asdict(), "value": value})

    def best(self) -> tuple[Point, float]:
        """Of equals the one with the lowest rate, then weight decay."""
        return max(self.values.items(), key=lambda item: (item[1], -item[0].rate, -item[0][1]))

    def _whole_lines(self) -> list[str]:
        """All lines but a last one that was cut off in writing, which is removed."""
        if not self.path.exists():
            return []
        content = self.path.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        if whole != content:
            write_whole(self.path, whole)
        return whole.decode(errors="replace").splitlines()

    def _append(self, content: dict[str, Any]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(content) + "\n")
            file.flush()
            os.fsync(file.fileno())


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
