"""Small processes that work for this one.

Threads could do the same. But a thread takes and gives up Python's lock many times for every file,
and training needs the lock to launch its kernels. A process has a lock of its own. What it has done
comes through a socket, many files at a time, outside the lock.
"""

import contextlib
import os
import socket
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from queue import Empty, SimpleQueue
from types import ModuleType
from typing import TypeVar

from xmoco.data.wire import receive_into, received

POSSIBLE = os.name == "posix" and bool(sys.executable)

T = TypeVar("T")


class Processes:
    """As many processes as threads ask at the same time, started when they do.

    Where one fails, that is told, and none is asked from then on.
    """

    def __init__(self, program: ModuleType, work: str) -> None:
        """``program`` answers what comes by its standard input, a socket, and ends with it.
        ``work`` is what it does, for a person."""
        self._program = program
        self._work = work
        self._idle: SimpleQueue[Process] = SimpleQueue()
        self._all: list[Process] = []
        self._usable = POSSIBLE

    def close(self) -> None:
        """To be called when no thread asks any more."""
        for process in self._all:
            process.close()

    def ask(self, question: "Callable[[Process], T]") -> T | None:
        """What ``question`` gets from one of them; none if this process is to help itself."""
        if self._usable:
            try:
                process = self._take()
                answer = question(process)
            except OSError as error:  # none can be started, or it was killed, for want of memory?
                self._give_up(error)
            else:
                self._idle.put(process)
                return answer
        return None

    def _give_up(self, error: OSError) -> None:
        first, self._usable = self._usable, False
        if first:
            warnings.warn(
                f"a process that was to {self._work} failed ({error}): threads do that from now "
                "on, which may be slower.",
                RuntimeWarning,
                stacklevel=2,
            )

    def _take(self) -> "Process":
        try:
            return self._idle.get_nowait()
        except Empty:
            process = Process(self._program)
            self._all.append(process)
            return process


class Process:
    """One process. It ends when its connection is closed, so it never outlives this one."""

    def __init__(self, program: ModuleType) -> None:
        self.connection, its_end = socket.socketpair()
        with its_end:
            # A group of its own: the keyboard's interrupt is not for it. And what libraries print
            # about broken files is for nobody.
            self._process = subprocess.Popen(
                command(program),
                stdin=its_end.fileno(),
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )

    def receive(self, length: int) -> bytearray:
        """So many bytes; raises an ``OSError`` if the process has ended."""
        content = received(self.connection, length)
        _assert_whole(len(content), length)
        return content

    def receive_into(self, view: memoryview) -> None:
        _assert_whole(receive_into(self.connection, view), len(view))

    def close(self) -> None:
        # A forked process may have a copy of the connection, for which closing it means nothing.
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)
        self.connection.close()
        self._process.wait()


def _assert_whole(there: int, wanted: int) -> None:
    if there < wanted:
        raise ConnectionResetError("the process has ended")


def command(program: ModuleType) -> list[str]:
    """Runs ``main`` of a module of this package, and starts at once.

    It is isolated, and packages are without their ``__init__``, which would import torch. What else
    the module imports is found where this process finds it: in folders named by text, as imports
    pass over all else that may be in ``sys.path``.
    """
    data = Path(__file__).parent
    code = (
        "import sys, types\n"
        f"sys.path += {[p for p in sys.path if isinstance(p, str) and Path(p).is_absolute()]!r}\n"
        f"for name, path in (('xmoco', {str(data.parent)!r}), ('xmoco.data', {str(data)!r})):\n"
        "    sys.modules[name] = types.ModuleType(name)\n"
        "    sys.modules[name].__path__ = [path]\n"
        f"from {program.__name__} import main\n"
        "main()"
    )
    return [sys.executable, "-I", "-S", "-c", code]
