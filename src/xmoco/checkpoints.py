"""Checkpoints: everything a run needs to go on exactly where it was.

Written whole or not at all, in the background while training goes on, with a checksum of every
part. The last two are kept, so the last good one is never touched while the next is written; where
the last one is damaged or lost, the one before serves. Read without running any code they might
contain.
"""

import math
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from xmoco.errors import UserError
from xmoco.files import write_whole
from xmoco.pickles import RefusedPickle, check_parts, read_pickle

FORMAT = "xmoco checkpoint 1"
KEPT = 2
SHARE = 0.02
"""Of the time, at most, in which checkpoints at epoch ends are being written."""


class Newest(NamedTuple):
    """The last checkpoint that is whole, if there is any, and what is to be said of later ones."""

    path: Path | None
    notes: list[str]


class Checkpoints:
    """The ``checkpoints`` folder of a run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def save(self, step: int, state: dict[str, Any]) -> Path:
        self.folder.mkdir(exist_ok=True)
        path = self.folder / f"step-{step:09d}.ckpt"
        content = {"format": FORMAT, "step": step, **state}
        write_whole(path, lambda file: torch.save(content, file))
        write_whole(self._note, path.name.encode())
        left_over = [*self.folder.glob(".*.part"), *self.folder.glob("*.damaged")]
        for old in [*self.paths()[:-KEPT], *left_over]:
            old.unlink(missing_ok=True)
        return path

    def paths(self) -> list[Path]:
        """Oldest first."""
        return sorted(self.folder.glob("step-*.ckpt"))

    def latest(self) -> Path | None:
        paths = self.paths()
        return paths[-1] if paths else None

    def newest_whole(self) -> Newest:
        """What to go on from; a ``UserError`` if there are checkpoints, but none that is whole."""
        notes: list[str] = []
        paths = self.paths()
        last = self._last_written()
        if last is not None and last not in paths and not any(path > last for path in paths):
            notes.append(f"{last.name} is missing")
        found = None
        for path in reversed(paths):
            try:
                check_parts(path, checked=True)
            except RefusedPickle as reason:
                notes.append(f"{path.name} {reason}")
            except OSError as error:  # of a failing disk, say
                notes.append(f"{path.name} cannot be read ({error.strerror or error})")
            else:
                found = path
                break
        if found is None and paths:
            raise UserError(
                f"no checkpoint in {self.folder} is whole: {'; '.join(notes)}. Remove them to "
                "start this run again from the beginning."
            )
        way_on = f"going on from {found.name}" if found else "beginning anew"
        return Newest(found, [f"{note}; {way_on}" for note in notes])

    def keep_newest(self) -> None:
        """Those before it are of no use to a run that is finished and whose result is kept."""
        for path in self.paths()[:-1]:
            path.unlink(missing_ok=True)

    def put_aside(self, after: Path) -> None:
        """Rename those after a checkpoint, which are damaged. The next save removes them."""
        for path in self.paths():
            if path > after:
                path.rename(path.with_suffix(".damaged"))

    @property
    def _note(self) -> Path:
        """Names the last checkpoint that was written, by which a lost one is noticed."""
        return self.folder / "newest"

    def _last_written(self) -> Path | None:
        with suppress(OSError, ValueError):
            name = self._note.read_bytes()[:100].decode("ascii")
            if name.startswith("step-") and "/" not in name:
                return self.folder / name
        return None


class BackgroundSaver:
    """Writes one checkpoint at a time, in a thread, from a copy of the state."""

    def __init__(self, checkpoints: Checkpoints) -> None:
        self._checkpoints = checkpoints
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None
        self.seconds = 0.0
        """That the last one took, from its copy until it was written."""

    def save(self, step: int, state: dict[str, Any]) -> None:
        """Begin to write; the caller may change the state as soon as this returns."""
        self.finish()
        started = time.perf_counter()
        copied: dict[str, Any] = _on_host(state)
        self._thread = threading.Thread(
            target=self._write, args=(step, copied, started), name="xmoco-checkpoint"
        )
        self._thread.start()

    @property
    def busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def check(self) -> None:
        """Raise what went wrong in the background, if anything has."""
        if self._failure is not None:
            self.finish()

    def finish(self) -> None:
        """Wait until all is written; raises if it could not be."""
        self.wait()
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def wait(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _write(self, step: int, state: dict[str, Any], started: float) -> None:
        try:
            self._checkpoints.save(step, state)
            self.seconds = time.perf_counter() - started
        except Exception as error:  # to be raised where the run can be ended
            if isinstance(error, UserError):
                error.only_here = True  # other processes write nothing
            self._failure = error


class SaveClock:
    """When to write a checkpoint: every so many seconds, and at epoch ends unless epochs are so
    short that one would be written for more than a small share of the time. That is done in the
    background, but takes a core and the disk from whoever else wants them."""

    def __init__(self, interval: float) -> None:
        self.interval = interval
        self.restart()

    def restart(self) -> None:
        self.last = time.perf_counter()

    def due(self, epoch_over: bool, saver: BackgroundSaver) -> bool:
        since = time.perf_counter() - self.last
        cheap = not saver.busy and saver.seconds <= SHARE * since
        return since >= self.interval or (epoch_over and cheap)


def _on_host(value: Any) -> Any:
    """A copy of a nested state, its tensors in the host's memory."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: _on_host(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(_on_host, value))
    return value


def load_checkpoint(path: Path) -> dict[str, Any]:
    """The state in ``path``; a ``UserError`` if it is damaged, foreign or holds code."""
    try:
        state = read_pickle(path, checked=True)
    except RefusedPickle as error:
        raise UserError(f"{path} {error}. {_way_out(path)}") from None
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}.") from None
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise UserError(f"{path} is not a checkpoint of xmoco. {_way_out(path)}")
    return state


class Reached(NamedTuple):
    """Where a checkpoint was written."""

    step: int
    seconds: float
    loss_level: float | None
    left_out: list[int]


def reached_by(state: Mapping[str, Any], total_steps: int) -> Reached:
    """A ``ValueError`` or the like if it cannot be."""
    step, seconds, level = state["step"], float(state["seconds"]), state.get("loss_level")
    if type(step) is not int or not 0 <= step <= total_steps or not 0 <= seconds < math.inf:
        raise ValueError("no moment of this run")
    if level is not None and not 0 <= (level := float(level)) < math.inf:
        raise ValueError("no level of losses")
    left_out = state.get("left_out", [])  # older checkpoints do not tell
    if not all(type(bad) is int and 0 <= bad < total_steps for bad in left_out):
        raise ValueError("no steps of this run")
    return Reached(step, seconds, level, left_out)


def _way_out(path: Path) -> str:
    older = [other for other in Checkpoints(path.parent).paths() if other != path]
    if older:
        return f"Remove it to go on from {older[-1].name}."
    return "Remove it to start this run again from the beginning."
