"""A run's history, read from its ``metrics.jsonl`` and the files beside it."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field, FiniteFloat, ValidationError

from xmoco.errors import UserError
from xmoco.records import RunMetrics
from xmoco.settings import read_text, read_yaml
from xmoco.train.run_folder import read_environment

LARGEST_DRAWN = 1e30
"""Beyond that, and where a value is no number, matplotlib's arithmetic fails."""

Record = Mapping[str, Any]


@dataclass(frozen=True)
class Series:
    """A value over epochs."""

    epochs: Sequence[float]
    values: Sequence[float]


@dataclass(frozen=True)
class History:
    """What a run measured: training values by name, and records. And with which configuration."""

    training: Mapping[str, Series]
    records: Sequence[Record]
    config: Mapping[str, Any]
    reference_levels: Mapping[str, float] = field(default_factory=dict)
    """What the method says its loss terms are to be compared with."""
    subject: str | None = None
    """What its records call the method."""
    title: str | None = None
    """What people call it."""

    @property
    def method(self) -> str:
        return self.subject or str(self.config.get("method", {}).get("name", "unknown method"))

    def named(self, subject: str) -> str:
        """What people call the subject of a record."""
        return self.title if self.title and subject == self.method else subject

    def setting(self, section: str, name: str) -> Any:
        """None where the configuration does not say."""
        return self.config.get(section, {}).get(name)

    def knn_records(self) -> list[Record]:
        """The kNN accuracies that may be compared: all with the k of the first."""
        records = [record for record in self.records if record["measure"] == "knn_top1"]
        return [record for record in records if _k(record) == _k(records[0])]

    def measured(self, measure: str) -> Series | None:
        """A measure of the run itself over epochs."""
        points = {
            record["protocol"]["epoch"]: record["value"]
            for record in self.records
            if record["measure"] == measure
        }
        return _series(points) if points else None

    def knn(self) -> dict[str, Series]:
        """kNN accuracy over epochs by subject: the run's own first, then the baselines."""
        points: dict[str, dict[float, float]] = {}
        for record in self.knn_records():
            points.setdefault(record["subject"], {})[record["protocol"]["epoch"]] = record["value"]
        series = {subject: _series(by_epoch) for subject, by_epoch in points.items()}
        order = sorted(series, key=lambda name: (name != self.method, -series[name].values[-1]))
        return {subject: series[subject] for subject in order}


def read_history(run: Path) -> History:
    """Reads a run folder. Where a resumed run repeated steps, the later line counts."""
    metrics = run / "metrics.jsonl"
    if not metrics.is_file():
        raise UserError(f"{run} has no metrics.jsonl, so it is not a run folder of xmoco.")
    training: dict[str, dict[float, float]] = {}
    records: list[Record] = []
    for line in RunMetrics.read(metrics).lines:
        if "measure" in line.entry:
            records.append(line.entry)
        else:
            for name, value in line.entry["values"].items():
                training.setdefault(name, {})[line.entry["epoch"]] = _drawable(value)
    about = _about_the_method(read_environment(run))
    return History(
        training={name: _series(points) for name, points in training.items()},
        records=[{**record, "value": _drawable(record["value"])} for record in records],
        config=_config(run / "config.yaml"),
        reference_levels=about.reference_levels,
        subject=about.subject,
        title=about.title,
    )


class _AboutTheMethod(BaseModel):
    """What a run's environment.json tells of its method."""

    reference_levels: dict[str, FiniteFloat] = Field(default_factory=dict)
    subject: str | None = None
    title: str | None = None


def _about_the_method(environment: Mapping[str, Any]) -> _AboutTheMethod:
    try:
        return _AboutTheMethod.model_validate(environment.get("method", {}))
    except ValidationError:  # damaged; the curves are not
        return _AboutTheMethod()


def _config(file: Path) -> dict[str, Any]:
    """The sections of a run's config.yaml, as far as they are there."""
    try:
        content = read_yaml(read_text(file), "it")
    except UserError:
        content = None
    sections = content.items() if isinstance(content, dict) else ()
    return {str(name): fields for name, fields in sections if isinstance(fields, dict)}


def _drawable(value: float) -> float:
    """Where there is nothing to draw, curves have a gap."""
    return value if abs(value) < LARGEST_DRAWN else math.nan


def _series(points: Mapping[float, float]) -> Series:
    epochs = sorted(points)
    return Series(epochs, [points[epoch] for epoch in epochs])


def _k(record: Record) -> object:
    return record["protocol"].get("k")
