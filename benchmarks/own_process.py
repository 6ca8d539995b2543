"""A participant of ``speed.py`` in a process of its own, with its own settings, threads and memory.

Only one works at a time: the others wait for a word over their pipes.
"""

import atexit
import contextlib
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

Environment = Mapping[str, str]
FAILURES = (torch.OutOfMemoryError, EOFError, OSError)
"""Too little memory on the device; the process has ended."""
PATIENCE = 20
"""Seconds for a process to end by itself."""


class Elsewhere:
    """A participant in another process, which is asked over a pipe.

    The process loads its libraries at once; ``loaded`` waits for that. ``ready`` has the
    participant made. All raise ``FAILURES`` where the process fails; it tells itself why.
    """

    def __init__(self, pipe: Connection) -> None:
        self.pipe = pipe
        atexit.register(pipe.close)  # or it would be waited for, should another one fail
        self.waited = 0.0

    def loaded(self) -> None:
        self.pipe.recv()

    def ready(self) -> None:
        self.config, self.steps_of_a_round, self.graphed = self._ask("make")

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

    def _ask(self, question: str | int) -> Any:
        self.pipe.send(question)
        answer = self.pipe.recv()
        if isinstance(answer, torch.OutOfMemoryError):
            raise answer
        return answer


class InItsOwnProcess(Elsewhere):
    """What ``make`` makes, in a new process that starts with this ``environment``."""

    def __init__(self, make: Callable[[], Any], environment: Environment) -> None:
        context = multiprocessing.get_context("spawn")
        pipe, theirs = context.Pipe()
        usual = multiprocessing.get_start_method()
        with _environment(environment):
            self.process = context.Process(target=serve, args=(make, theirs, usual))
            self.process.start()
        theirs.close()
        super().__init__(pipe)

    def close(self) -> None:
        super().close()
        self.process.join(PATIENCE)
        self.process.terminate()
        self.process.join()


class InAnotherCheckout(Elsewhere):
    """xmoco as it is in another checkout, on this ``workload``; see other_checkout.py.

    Its settings may have other names and stay there: ``config`` has them by ours.
    """

    def __init__(self, checkout: Path, workload: Any, environment: Environment) -> None:
        pipe, theirs = multiprocessing.Pipe()
        program = Path(__file__).with_name("other_checkout.py")
        source = os.pathsep.join([str(checkout / "src"), environment.get("PYTHONPATH", "")])
        self.process = subprocess.Popen(
            [sys.executable, program, checkout, str(theirs.fileno()), *as_arguments(workload)],
            env={**environment, "PYTHONPATH": source},
            pass_fds=[theirs.fileno()],
        )
        theirs.close()
        super().__init__(pipe)
        self.known = workload.config()

    def ready(self) -> None:
        super().ready()
        self.config = self.known

    def close(self) -> None:
        super().close()
        try:
            self.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def as_arguments(workload: Any) -> list[str]:
    """As other_checkout.py reads them."""
    places = (workload.recipe, workload.folder, workload.source or "", workload.pixels or "")
    return [*map(str, places), *workload.overrides]


def serve(make: Callable[[], Any], pipe: Connection, start_method: str) -> None:
    """Do as told until the other end closes."""
    # Its own workers start the usual way, not the way this process did.
    multiprocessing.set_start_method(start_method, force=True)
    # For all participants: batches keep their size.
    torch.backends.cudnn.benchmark = True
    participant: Any = None
    turn = contextlib.ExitStack()

    def answer(question: str | int) -> Any:
        nonlocal participant
        if question == "make":
            participant = make()
            return participant.config, participant.steps_of_a_round, participant.graphed
        if question == "begin":
            turn.enter_context(participant.turn())
        elif question == "end":
            turn.close()
            if torch.cuda.is_initialized():
                torch.cuda.empty_cache()
        else:
            participant.steps(question)
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        return participant.waited

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
