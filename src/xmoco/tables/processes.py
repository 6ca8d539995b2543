"""Processes that train trials for another one, and end when it does."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Sequence
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess


def stop_all(processes: Sequence[BaseProcess]) -> None:
    """Ask all of them to stop, and then wait for each: one that still trains saves what it has,
    and asked only after the others had ended it would train on meanwhile."""
    for process in processes:
        process.terminate()
    for process in processes:
        process.join()


def end_with_parent() -> None:
    """Stop this process, as by SIGTERM, when the one that started it is gone, be it killed."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_stop_after, args=[parent.sentinel], daemon=True).start()


def _stop_after(sentinel: int) -> None:
    wait([sentinel])
    os.kill(os.getpid(), signal.SIGTERM)
