"""What a person sees while a run is going: a live display on a terminal, plain lines elsewhere.

The training loop reports facts (a step is done, here are the averages, kNN came in) and knows
nothing of how they are shown. On a terminal they make a bar and a few aligned lines that stay in
place; in a log file one line per epoch or so, so that 200 epochs are still pleasant to read.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from time import monotonic
from typing import NamedTuple, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

# Seconds between plain lines: one line per epoch, unless that would be a flood or a long silence.
SHORTEST_SILENCE = 10.0
LONGEST_SILENCE = 120.0


class Fact(NamedTuple):
    """Something worth showing, in words."""

    name: str
    value: str


@dataclass
class RecentMean:
    """A mean that slowly forgets: the n-th last value weighs ``keep`` to the power n."""

    keep: float
    total: float = 0.0
    weight: float = 0.0

    def add(self, value: float) -> None:
        self.total = self.keep * self.total + value
        self.weight = self.keep * self.weight + 1

    def value(self, otherwise: float) -> float:
        return self.total / self.weight if self.weight else otherwise


class TimeLeft:
    """How long a step takes, and so how long is left.

    Steps inside an epoch and steps that cross an epoch's end are timed apart: the latter also hold
    the pause for kNN and a checkpoint. Without this, every pause would make the time left jump.
    Time before this session's first step (start-up, compilation) counts for nothing.
    """

    def __init__(self, total_steps: int, steps_per_epoch: int) -> None:
        self.total_steps = total_steps
        self.steps_per_epoch = steps_per_epoch
        self._inside = RecentMean(keep=0.99)
        self._across = RecentMean(keep=0.8)
        self._step = 0
        self._time: float | None = None

    def tick(self, step: int, time: float) -> None:
        if self._time is not None:
            crosses = self._crossings(self._step, step) > 0
            (self._across if crosses else self._inside).add(time - self._time)
        self._step, self._time = step, time

    def seconds_left(self) -> float | None:
        """None while nothing is known: one step must follow another first."""
        if not self._inside.weight and not self._across.weight:
            return None
        across = self._crossings(self._step, self.total_steps)
        inside = self.total_steps - self._step - across
        step_time = self._inside.value(otherwise=self._across.value(0.0))
        return inside * step_time + across * self._across.value(otherwise=step_time)

    def _crossings(self, done: int, until: int) -> int:
        """How many steps after ``done``, up to ``until``, are the first of a new epoch."""
        return (until - 1) // self.steps_per_epoch - (done - 1) // self.steps_per_epoch


class Progress:
    """Shows a run's progress; a context manager.

    ``step`` counts the finished steps of the whole run, earlier sessions included.
    ``reference_levels`` are what loss terms are to be compared with, as that of a guess.
    """

    def __init__(
        self,
        title: str,
        total_steps: int,
        steps_per_epoch: int,
        first_step: int,
        reference_levels: Mapping[str, float],
        console: Console | None = None,
    ) -> None:
        self._title = title
        self._total_steps = total_steps
        self._steps_per_epoch = steps_per_epoch
        self._step = first_step
        self._levels = reference_levels
        self._console = console or Console()
        self._values: dict[str, float] = {}
        self._knn: float | None = None
        self._best_knn, self._best_epoch = -1.0, 0
        self._time_left = TimeLeft(total_steps, steps_per_epoch)
        self._started = monotonic()
        self._said_step: int | None = None  # plain lines: step, time and kNN of the last one
        self._said_time = self._started
        self._said_knn: float | None = None
        self._live: Live | None = None
        if self._console.is_interactive:
            self._live = Live(
                get_renderable=self._display, console=self._console, refresh_per_second=4
            )

    def __enter__(self) -> Self:
        self._started = monotonic()
        if self._live:
            self._live.start()
        else:
            self.note(self._title)
        return self

    def __exit__(self, *error: object) -> None:
        if self._live:
            self._live.stop()
        elif self._values and (self._said_step, self._said_knn) != (self._step, self._knn):
            self._say()

    def tick(self, step: int) -> None:
        """A step is done. Cheap enough for every step."""
        self._step = step
        self._time_left.tick(step, monotonic())

    def update(self, step: int, values: Mapping[str, float]) -> None:
        """The averages of the last few steps, as they go into metrics.jsonl."""
        self._step = step
        self._values = dict(values)
        self._say_when_due()

    def knn(self, epoch: int, value: float) -> None:
        """A kNN accuracy in percent, measured after ``epoch``."""
        self._knn = value
        if value > self._best_knn:
            self._best_knn, self._best_epoch = value, epoch
        self._say_when_due()

    def note(self, text: str) -> None:
        """Prints a line; a live display stays whole below it."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    # What is shown, the same on a terminal and in a log.

    def _position(self) -> list[str]:
        epochs = self._total_steps / self._steps_per_epoch
        left = self._time_left.seconds_left()
        return [
            f"epoch {self._step / self._steps_per_epoch:.1f}/{epochs:.0f}",
            f"step {self._step}/{self._total_steps}",
            f"{_duration(monotonic() - self._started)} elapsed",
            f"{'?' if left is None else _duration(left)} left",
        ]

    def _state(self) -> list[Fact]:
        """How the run is doing. What a method or a machine does not measure is left out."""
        values = self._values
        facts = [
            Fact(name, pattern.format(values[key]))
            for name, key, pattern in (
                ("images/s", "images_per_second", "{:,.0f}"),
                ("waiting", "waiting", "{:.0%}"),
                ("rate", "learning_rate", "{:.3g}"),
            )
            if key in values
        ]
        facts += [
            Fact(key.removeprefix("fill/"), f"{value:.0%}")
            for key, value in values.items()
            if key.startswith("fill/")
        ]
        if self._knn is not None:
            best = f"best {self._best_knn:.1f} at {self._best_epoch}"
            facts.append(Fact("kNN", f"{self._knn:.1f}% ({best})"))
        return facts

    def _losses(self) -> list[Fact]:
        """The loss, its terms and reference levels. The two sides of a term share a place."""
        facts = [Fact("loss", f"{self._values['loss']:.3f}")] if "loss" in self._values else []
        terms: dict[str, list[str]] = {}
        for key, value in self._values.items():
            if key.startswith("loss/"):
                name, side = _name_and_side(key.removeprefix("loss/"))
                terms.setdefault(name, []).append(f"{side}{value:.3f}")
        facts += [Fact(name, " ".join(numbers)) for name, numbers in terms.items()]
        return facts + [Fact(name, f"{level:.3f}") for name, level in self._levels.items()]

    # A terminal.

    def _display(self) -> RenderableType:
        heading = Table.grid(expand=True, padding=(0, 2, 0, 0))
        heading.add_column(ratio=1, min_width=4)
        heading.add_row(ProgressBar(self._total_steps, self._step), *self._position())
        return Group(
            Text(self._title, style="bold"),
            heading,
            *(_in_a_row(facts) for facts in (self._state(), self._losses())),
        )

    # A log.

    def _say_when_due(self) -> None:
        if self._live or not self._values:
            return
        silence = monotonic() - self._said_time
        first = self._said_step is None
        new_epoch = not first and self._epochs_done(self._step) > self._epochs_done(self._said_step)
        if first or silence > LONGEST_SILENCE or (new_epoch and silence > SHORTEST_SILENCE):
            self._say()

    def _epochs_done(self, step: int | None) -> int:
        return (step or 0) // self._steps_per_epoch

    def _say(self) -> None:
        self._said_step, self._said_time, self._said_knn = self._step, monotonic(), self._knn
        facts = [f"{fact.name} {fact.value}" for fact in self._state() + self._losses()]
        self.note(" · ".join(self._position() + facts))


def _name_and_side(term: str) -> tuple[str, str]:
    """("labels", "s ") for labels_source; a term that has no sides keeps its name."""
    stem, _, side = term.rpartition("_")
    if side not in ("source", "target"):
        return term.replace("_", " "), ""
    return stem.replace("_", " ") or "terms", f"{side[0]} "


def _in_a_row(facts: list[Fact]) -> Text:
    pieces = (Text.assemble((fact.name, "dim"), " ", fact.value) for fact in facts)
    return Text("  ").join(pieces)


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{seconds:02}"
