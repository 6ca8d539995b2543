"""How many trials share a GPU: their times are no measure of speed.

Each holds a lock on a file of its own while it trains, in a folder that belongs to the GPU, whoever
started it and by which command. The system frees the lock of a process that is killed.
"""

import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

if sys.platform != "win32":
    import fcntl


def meeting_place(device: torch.device) -> Path | None:
    """The folder of a GPU. On a CPU nothing is counted: other programs compute there as well."""
    if device.type != "cuda" or sys.platform == "win32":
        return None
    gpu = torch.cuda.get_device_properties(device).uuid
    return Path(tempfile.gettempdir()) / f"xmoco-trials-{os.getuid()}" / str(gpu)


@contextmanager
def taking_part(folder: Path | None) -> Iterator[Callable[[], int]]:
    """Be one of those that train there meanwhile. Gives who counts them, this one included."""
    if folder is None or sys.platform == "win32":
        yield lambda: 1
        return
    folder.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=folder)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield lambda: sum(map(_is_held, folder.iterdir()))
    finally:
        Path(name).unlink(missing_ok=True)
        os.close(handle)


def _is_held(file: Path) -> bool:
    """Whether somebody trains: a killed process leaves its file, but not the lock."""
    try:
        handle = os.open(file, os.O_RDONLY)
    except FileNotFoundError:  # just over
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    else:
        return False
    finally:
        os.close(handle)
