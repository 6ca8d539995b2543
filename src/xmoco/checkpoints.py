"""Checkpoints: everything a run needs to go on exactly where it was.

Written whole or not at all; the last two are kept, so the last good one is never touched while the
next is written; read without running any code they might contain.
"""

from pathlib import Path
from typing import Any

import torch

from xmoco.errors import UserError
from xmoco.files import write_whole
from xmoco.pickles import RefusedPickle, read_pickle

FORMAT = "xmoco checkpoint 1"
KEPT = 2


class Checkpoints:
    """The ``checkpoints`` folder of a run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def save(self, step: int, state: dict[str, Any]) -> Path:
        self.folder.mkdir(exist_ok=True)
        path = self.folder / f"step-{step:09d}.ckpt"
        content = {"format": FORMAT, "step": step, **state}
        write_whole(path, lambda file: torch.save(content, file))
        left_by_a_killed_run = self.folder.glob(".step-*.part")
        for old in [*self.paths()[:-KEPT], *left_by_a_killed_run]:
            old.unlink(missing_ok=True)
        return path

    def paths(self) -> list[Path]:
        """Oldest first."""
        return sorted(self.folder.glob("step-*.ckpt"))

    def latest(self) -> Path | None:
        paths = self.paths()
        return paths[-1] if paths else None


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


def _way_out(path: Path) -> str:
    older = [other for other in Checkpoints(path.parent).paths() if other != path]
    if older:
        return f"Remove it to go on from {older[-1].name}."
    return "Remove it to start this run again from the beginning."
