"""A contender of ``speed.py`` in a process of its own, where settings of the process are its own.

Only one works at a time: the others wait for a word over their pipes.
"""

import atexit
import contextlib
import multiprocessing
import os
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection
from typing import Any


class InItsOwnProcess:
    """What ``make`` makes, in a new process that starts with this ``environment``."""

    def __init__(self, make: Callable[[], Any], environment: Mapping[str, str]) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        usual = multiprocessing.get_start_method()
        with _environment(environment):
            context.Process(target=_serve, args=(make, theirs, usual)).start()
        theirs.close()
        atexit.register(self.pipe.close)  # or it would be waited for, should another one fail
        self.config, self.steps_of_a_round = self.pipe.recv()
        self.waited = 0.0

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        self._ask("begin")
        yield
        self._ask("end")

    def steps(self, count: int) -> None:
        self.waited = self._ask(count)

    def _ask(self, question: str | int) -> float:
        self.pipe.send(question)
        waited: float = self.pipe.recv()
        return waited


def _serve(make: Callable[[], Any], pipe: Connection, start_method: str) -> None:
    """Do as told until the other end closes."""
    # Its own workers start the usual way, not the way this process did.
    multiprocessing.set_start_method(start_method, force=True)
    contender = make()
    pipe.send((contender.config, contender.steps_of_a_round))
    turn = contextlib.ExitStack()
    with contextlib.suppress(EOFError):
        while True:
            question = pipe.recv()
            if question == "begin":
                turn.enter_context(contender.turn())
            elif question == "end":
                turn.close()
            else:
                contender.steps(question)
            pipe.send(contender.waited)


@contextlib.contextmanager
def _environment(wanted: Mapping[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.clear()
    os.environ.update(wanted)
    yield
    os.environ.clear()
    os.environ.update(before)
