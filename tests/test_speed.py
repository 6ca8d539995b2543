"""benchmarks/own_process.py: participants work elsewhere, as if they were here."""

import contextlib
import importlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch


class Counter:
    """Takes steps that are only counted; the fourth is too many."""

    steps_of_a_round = 2
    graphed = True

    def __init__(self) -> None:
        self.config = os.environ.get("FLAVOUR")
        self.process = os.getpid()
        self.waited = 0.0

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        self.waited += 100
        yield
        self.waited += 1000

    def steps(self, count: int) -> None:
        self.waited += count
        if self.waited % 10 > 3:
            raise torch.OutOfMemoryError("no room for another step")


@pytest.fixture(scope="module")
def own_process(benchmarks: None) -> ModuleType:
    return importlib.import_module("own_process")


def test_a_participant_in_its_own_process(own_process: ModuleType) -> None:
    before = dict(os.environ)
    participant = own_process.InItsOwnProcess(Counter, {**before, "FLAVOUR": "plain"})
    assert dict(os.environ) == before
    participant.loaded()
    participant.ready()
    told = (participant.config, participant.steps_of_a_round, participant.graphed)
    assert told == ("plain", 2, True)
    with participant.turn():
        assert participant.waited == 100  # before its steps count
        participant.steps(2)
        assert participant.waited == 102
        participant.steps(1)
    with pytest.raises(torch.OutOfMemoryError, match="no room"), participant.turn():
        participant.steps(1)
    participant.close()
    assert not participant.process.is_alive()


def failing() -> None:
    raise ValueError("there is no such participant")


def test_a_participant_whose_process_fails(own_process: ModuleType) -> None:
    participant = own_process.InItsOwnProcess(failing, os.environ)
    participant.loaded()
    with pytest.raises(own_process.FAILURES):
        participant.ready()
    participant.close()
    assert not participant.process.is_alive()


def test_only_the_waiting_of_a_round_counts(own_process: ModuleType) -> None:
    speed = importlib.import_module("speed")

    class Slow(Counter):
        """Waits for a day before its round, and all the time in it."""

        def turn(self) -> contextlib.AbstractContextManager[None]:
            self.waited += 86_400
            return contextlib.nullcontext()

        def steps(self, count: int) -> None:
            time.sleep(0.02 * count)
            self.waited += 0.02 * count

    config = SimpleNamespace(train=SimpleNamespace(batch=8))
    outcome = speed.Outcome(config, steps=5, graphed=False)
    for _ in range(2):
        speed.take_turn(Slow(), outcome)
    assert len(outcome.waiting) == 2
    assert all(0.5 < share <= 1 for share in outcome.waiting)


def test_the_benchmark_takes_turns_and_goes_on_without_who_does_not_fit(
    own_process: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    speed = importlib.import_module("speed")
    order: list[str] = []

    class Here:
        """A participant that needs no process."""

        steps_of_a_round = 4
        graphed = False
        waited = 0.0

        def __init__(self, name: str) -> None:
            self.name, self.config = name, SimpleNamespace(train=SimpleNamespace(batch=8))

        def loaded(self) -> None:
            order.append(f"{self.name} is here")

        def ready(self) -> None:
            if self.name == "large":
                raise torch.OutOfMemoryError("too large")
            if self.name == "broken":
                raise EOFError

        def turn(self) -> contextlib.AbstractContextManager[None]:
            return contextlib.nullcontext()

        def steps(self, count: int) -> None:
            order.append(f"{self.name} {count}")

        def close(self) -> None:
            order.append(f"{self.name} ends")

    options = SimpleNamespace(seconds=1000.0, rounds=2)
    names = ["a", "large", "b", "broken"]
    outcomes = speed.run_rounds({name: Here(name) for name in names}, options)
    assert order[:4] == [f"{name} is here" for name in names]
    first, second = ["a 4", "large ends", "b 4", "broken ends"], ["a 4", "b 4"]
    assert order[4:] == [*first, *second, "a ends", "b ends"]
    assert {name: len(outcome.speeds) for name, outcome in outcomes.items()} == {"a": 2, "b": 2}
    printed = capsys.readouterr().out
    assert "large is out: too large" in printed
    assert "broken is out: its process has ended" in printed

    options = SimpleNamespace(seconds=0.0, rounds=5)
    assert len(speed.run_rounds({"a": Here("a")}, options)["a"].speeds) == 1
    assert "no time for round 2" in capsys.readouterr().out


def test_another_checkout_takes_part_by_its_own_code(
    own_process: ModuleType, tmp_path: Path
) -> None:
    """One whose settings and participants have the names of former times."""
    other = tmp_path / "before"
    (other / "src" / "xmoco").mkdir(parents=True)
    (other / "src" / "xmoco" / "__init__.py").touch()
    (other / "src" / "xmoco" / "cli.py").write_text("app = True\n")
    (other / "benchmarks").mkdir()
    (other / "benchmarks" / "contenders.py").write_text(FORMER_CONTENDERS)
    speed = importlib.import_module("speed")
    baselines = importlib.import_module("baselines")
    workload = baselines.Workload("demo", ("preload_gib=2",), tmp_path)
    ((name, participant),) = speed.start_beside(other, workload).items()
    assert name == "xmoco (before)"
    participant.loaded()
    participant.ready()
    assert participant.config == workload.config()
    assert (participant.steps_of_a_round, participant.graphed) == (3, True)
    with participant.turn():
        participant.steps(3)
    assert participant.waited == 3
    participant.close()
    assert participant.process.returncode == 0
    with pytest.raises(SystemExit, match="no checkout of xmoco"):
        speed.start_beside(tmp_path, workload)


FORMER_CONTENDERS = """
import contextlib
from types import SimpleNamespace


class Ours:
    config = object()
    steps_of_a_round = 3
    waited = 0
    training = SimpleNamespace(stepper=SimpleNamespace(graph="recorded"))

    def turn(self):
        return contextlib.nullcontext()

    def steps(self, count):
        self.waited += count


class Course:
    def __init__(self, recipe, overrides, folder, source, pixels):
        assert (recipe, overrides, source, pixels) == ("demo", ("resident_gib=2",), None, None)

    def xmoco(self):
        return Ours()
"""
