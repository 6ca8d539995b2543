"""benchmarks/own_process.py: contenders of a race work elsewhere, as if they were here."""

import contextlib
import importlib
import os
import time
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace

import pytest
import torch


class Counter:
    """Takes steps that are only counted; the fourth is too many."""

    steps_of_a_round = 2

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


def test_a_contender_in_its_own_process(own_process: ModuleType) -> None:
    before = dict(os.environ)
    contender = own_process.InItsOwnProcess(Counter, {**before, "FLAVOUR": "plain"})
    assert dict(os.environ) == before
    contender.loaded()
    contender.ready()
    assert (contender.config, contender.steps_of_a_round) == ("plain", 2)
    with contender.turn():
        assert contender.waited == 100  # before its steps count
        contender.steps(2)
        assert contender.waited == 102
        contender.steps(1)
    with pytest.raises(torch.OutOfMemoryError, match="no room"), contender.turn():
        contender.steps(1)
    contender.close()
    assert not contender.process.is_alive()


def failing() -> None:
    raise ValueError("there is no such contender")


def test_a_contender_whose_process_fails(own_process: ModuleType) -> None:
    contender = own_process.InItsOwnProcess(failing, os.environ)
    contender.loaded()
    with pytest.raises(own_process.FAILURES):
        contender.ready()
    contender.close()
    assert not contender.process.is_alive()


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
    outcome = speed.Outcome(config, steps=5)
    for _ in range(2):
        speed.take_turn(Slow(), outcome)
    assert len(outcome.waiting) == 2
    assert all(0.5 < share <= 1 for share in outcome.waiting)


def test_a_race_takes_turns_and_goes_on_without_who_does_not_fit(
    own_process: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    speed = importlib.import_module("speed")
    order: list[str] = []

    class Here:
        """A contender that needs no process."""

        steps_of_a_round = 4
        waited = 0.0

        def __init__(self, name: str) -> None:
            self.name, self.config = name, SimpleNamespace(train=SimpleNamespace(batch=8))

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

    monkeypatch.setattr(speed, "start", lambda names: {name: Here(name) for name in names})
    options = SimpleNamespace(seconds=1000.0, rounds=2)
    outcomes = speed.run_rounds(dict.fromkeys(["a", "large", "b", "broken"]), options)
    assert order == ["a 4", "large ends", "b 4", "broken ends", "a 4", "b 4", "a ends", "b ends"]
    assert {name: len(outcome.speeds) for name, outcome in outcomes.items()} == {"a": 2, "b": 2}
    printed = capsys.readouterr().out
    assert "large is out: too large" in printed
    assert "broken is out: its process has ended" in printed

    options = SimpleNamespace(seconds=0.0, rounds=5)
    assert len(speed.run_rounds({"a": None}, options)["a"].speeds) == 1
    assert "no time for round 2" in capsys.readouterr().out
