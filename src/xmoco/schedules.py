"""Schedules: pure functions of the step, so that resuming or replaying needs no state."""

import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

Value = float | Tensor
"""A scheduled number. One that changes is a tensor where a replayed CUDA graph must see it."""


class Clock(NamedTuple):
    """Where training stands: ``step`` steps are done."""

    step: int
    total_steps: int
    steps_per_epoch: int

    @property
    def epoch(self) -> float:
        return self.step / self.steps_per_epoch

    @property
    def done(self) -> float:
        """The share of all steps, from 0 to 1."""
        return self.step / self.total_steps


Schedule = Callable[[Clock], float]


@dataclass(frozen=True)
class Constant:
    value: float

    def __call__(self, clock: Clock) -> float:
        return self.value


@dataclass(frozen=True)
class HalfCosine:
    """From ``start`` to ``end`` along a half cosine over all of training."""

    start: float
    end: float

    def __call__(self, clock: Clock) -> float:
        left = 0.5 * (1 + math.cos(math.pi * clock.done))
        return self.start * left + self.end * (1 - left)


@dataclass(frozen=True)
class LinearRise:
    """From 0 to ``value`` over the first epochs."""

    value: float
    epochs: float

    def __call__(self, clock: Clock) -> float:
        return self.value * min(1.0, clock.epoch / self.epochs)


@dataclass(frozen=True)
class LinearToTheEnd:
    """From 0 to ``value`` over all of training."""

    value: float

    def __call__(self, clock: Clock) -> float:
        return self.value * clock.done


@dataclass(frozen=True)
class FromShare:
    """``before`` a share of training is done, ``after`` from it on."""

    share: float
    before: float
    after: float

    def __call__(self, clock: Clock) -> float:
        return self.after if clock.done >= self.share else self.before


@dataclass(frozen=True)
class FromEpoch:
    """0 before an epoch, 1 from it on."""

    epoch: float

    def __call__(self, clock: Clock) -> float:
        return float(clock.epoch >= self.epoch)


@dataclass(frozen=True)
class Drawn:
    """A number between 0 and 1, drawn anew at every step; ``what`` and seed tell draws apart."""

    what: str
    seed: int

    def __call__(self, clock: Clock) -> float:
        words = f"{self.what} {self.seed} {clock.step}"
        digest = hashlib.blake2b(words.encode(), digest_size=8).digest()
        return (int.from_bytes(digest, "big") + 0.5) / 2**64


@dataclass(frozen=True)
class WarmupCosine:
    """The learning rate: a linear warm-up, then a cosine from ``peak`` down to ``offset · peak``.

    The paper's "cosine scheduler with coefficient 0.5 and offset 0.1":
    lr0 · (offset + (1 − offset) · 0.5 · (1 + cos π t/T)).
    """

    peak: float
    offset: float
    warmup_epochs: float

    def __call__(self, clock: Clock) -> float:
        warmup_steps = round(self.warmup_epochs * clock.steps_per_epoch)
        if clock.step < warmup_steps:
            return self.peak * (clock.step + 1) / warmup_steps
        done = (clock.step - warmup_steps) / max(1, clock.total_steps - warmup_steps)
        return self.peak * (self.offset + (1 - self.offset) * 0.5 * (1 + math.cos(math.pi * done)))


def rising(start: float, end: float | None) -> Schedule:
    """Constant where there is no other ``end``."""
    return Constant(start) if end is None or end == start else HalfCosine(start, end)


def warmed_up(value: float, epochs: float) -> Schedule:
    """Constant where there are no epochs over which it rises from 0."""
    return LinearRise(value, epochs) if epochs else Constant(value)


def scaled(term: Tensor, weight: Value) -> Tensor:
    """A term of a loss times its weight at a step, in the term's precision."""
    return term * (weight.to(term.dtype) if isinstance(weight, Tensor) else weight)


class ScheduledValues:
    """The values of schedules at a step.

    With a ``device``, those that change are numbers there, each always in the same place, so that a
    replayed CUDA graph reads today's.
    """

    def __init__(
        self, schedules: Mapping[str, Schedule], device: torch.device | None = None
    ) -> None:
        self.schedules = schedules
        self.places = {
            name: torch.zeros((), dtype=torch.float64, device=device)
            for name, schedule in schedules.items()
            if device is not None and not isinstance(schedule, Constant)
        }

    def at(self, clock: Clock) -> dict[str, Value]:
        values: dict[str, Value] = {}
        for name, schedule in self.schedules.items():
            number = schedule(clock)
            place = self.places.get(name)
            values[name] = number if place is None else place.fill_(number)
        return values
