"""Grids of rates and weight decays, searched point by point, with a file that remembers.

Each finished point is a line of ``grid.jsonl``; the first line holds the settings, and one more
what the chosen point reached in the end. A search that was interrupted goes on where it stopped,
but only with the settings it began with.
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
from xmoco.train.run_folder import plain, refuse_other_settings


class Point(NamedTuple):
    rate: float
    weight_decay: float

    def __str__(self) -> str:
        return f"rate-{self.rate:g}-decay-{self.weight_decay:g}"


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
    result: float | None = None  # of the best point, on the test images
    unreadable: int = 0  # of these

    @classmethod
    def open(cls, folder: Path, settings: dict[str, Any]) -> "GridFile":
        """A new file, or that of an interrupted search with the same settings."""
        file = cls(folder / "grid.jsonl")
        folder.mkdir(parents=True, exist_ok=True)
        lines = file._whole_lines()
        if not lines:
            file._append(plain(settings))
            return file
        try:
            begun, *entries = map(json.loads, lines)
            for entry in entries:
                file._take(entry)
            before = {**begun}
        except (ValueError, LookupError, TypeError):
            raise UserError(f"{file.path} is damaged: remove it to begin the grid anew.") from None
        refuse_other_settings(file.path, before, settings)
        return file

    def _take(self, entry: dict[str, Any]) -> None:
        if "result" in entry:
            self.result = float(entry["result"])
            self.unreadable = int(entry.get("unreadable", 0))
        else:
            self.values[Point(entry["rate"], entry["weight_decay"])] = float(entry["value"])

    def add(self, point: Point, value: float) -> "GridFile":
        self.values[point] = value
        self._append({**point._asdict(), "value": value})
        return self

    def finish(self, result: float, unreadable: int) -> "GridFile":
        """What the best point reached on the test images, of which some may be unreadable."""
        self.result, self.unreadable = result, unreadable
        self._append({"result": result, **({"unreadable": unreadable} if unreadable else {})})
        return self

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
