"""Processes that train together end together.

Gloo tells at once that another process is gone; NCCL waits for it, for ten minutes and more. So
each process has a thread that gives signs of life and watches for those of the next one. Whoever
misses them says so to all, and all end, with a sentence. Silence is counted in signs of one's own,
not in seconds: a run that was suspended as a whole, or a clock that jumps, is no reason to end.
"""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from subprocess import Popen

import torch.distributed as dist

from xmoco.errors import Interrupted, LostPartnerError, UserError
from xmoco.fabric import Fabric

BEAT = 1.0
"""Seconds between signs of life."""
SILENCE = 30
"""Signs that are missed before a process counts as gone."""
GRACE = 10.0
"""Seconds in which a process may find out by itself, before its thread ends it."""

_GONE = "xmoco/gone"


@contextmanager
def watching(fabric: Fabric, way_on: str = "") -> Iterator[None]:
    """While it lasts, all processes end if one of them does. ``way_on`` is how a user goes on."""
    if fabric.world_size == 1 or _Watch.current is not None:
        if _Watch.current is not None:
            _Watch.current.way_on = way_on
        yield
        return
    fabric.barrier()
    watch = _Watch.current = _Watch(fabric, way_on)
    watch.start()
    try:
        yield
        fabric.barrier()  # nobody leaves early
    except Interrupted:  # by all together, of which the first may be writing still
        fabric.barrier()
        raise
    except RuntimeError as error:
        if not _lost_connection(error):
            watch.tell_that_gone(fabric.global_rank)
            raise
        if not watch.known.wait(BEAT * (SILENCE + 5)):
            raise
        raise watch.lost_partner() from error
    except BaseException as error:
        if not isinstance(error, UserError) or error.only_here:
            watch.tell_that_gone(fabric.global_rank)
        raise
    finally:
        watch.leave()
        _Watch.current = None


def _lost_connection(error: RuntimeError) -> bool:
    return isinstance(error, dist.DistError) or "gloo" in str(error)


def _sign_of(rank: int) -> str:
    return f"xmoco/alive/{rank}"


def _name_of_signal(number: int) -> str:
    """Most real-time signals have none."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


class _Watch(threading.Thread):
    current: "_Watch | None" = None

    def __init__(self, fabric: Fabric, way_on: str) -> None:
        super().__init__(name="xmoco-partners", daemon=True)
        self.rank, self.world = fabric.global_rank, fabric.world_size
        self.local_rank = fabric.local_rank
        self.way_on = way_on
        # A connection of its own: operations of the first may be waiting.
        self.store = dist.distributed_c10d._get_default_store().clone()
        launcher = getattr(fabric.strategy, "launcher", None)
        self.children: list[Popen[bytes]] = getattr(launcher, "procs", [])
        for thread in threading.enumerate():  # Fabric's, which kills all without a word
            if thread.name == "child-process-observer":
                thread._child_processes = []  # type: ignore[attr-defined]
        self.beats = 0
        self.gone: int | None = None
        self.how = ""
        self.known = threading.Event()
        """That somebody is gone."""
        self.leaving = threading.Event()
        # Asking the store may take for ever, where its machine has lost its power.
        self.signs = threading.Thread(target=self._talk, name="xmoco-signs", daemon=True)

    def leave(self) -> None:
        """Ends both threads: Python that ends while one of them is in the store's code aborts."""
        self.leaving.set()
        self.join()
        self.signs.join(BEAT)

    def run(self) -> None:
        """Ends this process when another is gone."""
        self.signs.start()
        heard, silent = 0, 0
        while self.gone is None and not self.leaving.wait(BEAT):
            silent = silent + 1 if self.beats == heard else 0
            heard = self.beats
            if silent >= SILENCE:
                self.gone = 0
        if self.gone is not None:
            self.known.set()
            if not self.leaving.wait(GRACE):
                self._end()

    def _talk(self) -> None:
        """Give signs of life, and listen to those of the next process, by way of the store."""
        following = (self.rank + 1) % self.world
        heard, silent = -1, 0
        try:
            while self.gone is None and not self.leaving.is_set():
                self.store.add(_sign_of(self.rank), 1)
                now = self.store.add(_sign_of(following), 0)
                silent = silent + 1 if now == heard else 0
                heard = now
                if silent >= SILENCE:
                    self.tell_that_gone(following)
                self._look_at_children()
                if self.store.check([_GONE]):
                    self.gone = int(self.store.get(_GONE))
                self.beats += 1
                self.leaving.wait(BEAT)
        except RuntimeError:  # the first process, or who started it, keeps the store
            self.gone = 0

    def _look_at_children(self) -> None:
        for local_rank, child in enumerate(self.children, start=1):
            if child.poll():
                if child.returncode < 0:
                    self.how = f"was ended by {_name_of_signal(-child.returncode)}"
                self.tell_that_gone(local_rank)

    def tell_that_gone(self, rank: int) -> None:
        """The first to be missed is the one that counts."""
        with suppress(RuntimeError):
            self.store.compare_set(_GONE, "", str(rank))

    def lost_partner(self) -> LostPartnerError:
        ended = self.how or "has ended: it says why, or else was killed or lost its machine"
        go_on = f" Resume with: {self.way_on}" if self.way_on else ""
        error = LostPartnerError(
            f"the process of rank {self.gone}, of {self.world}, {ended}.{go_on}"
        )
        # One speaks for all; where the first is gone, one of each machine.
        instead = self.gone == 0 and (self.rank == 1 or self.local_rank == 0)
        error.only_here = self.rank == 0 or instead
        return error

    def _end(self) -> None:
        """While the process waits for one that will not answer."""
        error = self.lost_partner()
        if error.only_here:
            print(f"xmoco: {error}", file=sys.stderr, flush=True)
        os._exit(1)
