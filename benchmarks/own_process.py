"""A contender of ``speed.py`` in a process of its own, with its own settings, threads and memory.

Only one works at a time: the others wait for a word over their pipes.
"""

import atexit
import contextlib
import multiprocessing
import os
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection
from typing import Any

import torch

Environment = Mapping[str, str]
FAILURES = (torch.OutOfMemoryError, EOFError, OSError)
"""Too little memory on the device; the process has ended."""


class InItsOwnProcess:
    """What ``make`` makes, in a new process that starts with this ``environment``.

    The process loads its libraries at once; ``loaded`` waits for that. ``ready`` has the contender
    made. All raise ``FAILURES`` where the process fails; it tells itself why.
    """

    def __init__(self, make: Callable[[], Any], environment: Environment) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        usual = multiprocessing.get_start_method()
        with _environment(environment):
            self.process = context.Process(target=_serve, args=(make, theirs, usual))
            self.process.start()
        theirs.close()
        atexit.register(self.pipe.close)  # or it would be waited for, should another one fail
        self.waited = 0.0

    def loaded(self) -> None:
        self.pipe.recv()

    def ready(self) -> None:
        self.config, self.steps_of_a_round = self._ask("make")

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Memory that can be given back when it ends, is."""
        self.waited = self._ask("begin")
        yield
        self._ask("end")

    def steps(self, count: int) -> None:
        """It is over when the device has done them."""
        self.waited = self._ask(count)

    def close(self) -> None:
        """The process ends by itself, or is made to."""
        self.pipe.close()
        self.process.join(20)
        self.process.terminate()
        self.process.join()

    def _ask(self, question: str | int) -> Any:
        self.pipe.send(question)
        answer = self.pipe.recv()
        if isinstance(answer, torch.OutOfMemoryError):
            raise answer
        return answer


def _serve(make: Callable[[], Any], pipe: Connection, start_method: str) -> None:
    """Do as told until the other end closes."""
    # Its own workers start the usual way, not the way this process did.
    multiprocessing.set_start_method(start_method, force=True)
    # For all contenders: batches keep their size.
    torch.backends.cudnn.benchmark = True
    contender: Any = None
    turn = contextlib.ExitStack()

    def answer(question: str | int) -> Any:
        nonlocal contender
        if question == "make":
            contender = make()
            return contender.config, contender.steps_of_a_round
        if question == "begin":
            turn.enter_context(contender.turn())
        elif question == "end":
            turn.close()
            if torch.cuda.is_initialized():
                torch.cuda.empty_cache()
        else:
            contender.steps(question)
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        return contender.waited

    with contextlib.suppress(EOFError):
        pipe.send("loaded")
        while True:
            question = pipe.recv()
            try:
                told = answer(question)
            except torch.OutOfMemoryError as error:
                told = error
            pipe.send(told)


@contextlib.contextmanager
def _environment(wanted: Environment) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.clear()
    os.environ.update(wanted)
    yield
    os.environ.clear()
    os.environ.update(before)
