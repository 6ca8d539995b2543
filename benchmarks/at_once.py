"""Several processes on one GPU, with NVIDIA's multi-process service where their kernels are to run
at the same time; without it the GPU takes turns between processes (side_by_side.py measures both).
"""

import contextlib
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from xmoco.tables.processes import stop_all

CONTEXT = multiprocessing.get_context("spawn")
"""CUDA cannot be used in forks."""
PIPES = "CUDA_MPS_PIPE_DIRECTORY"


@contextlib.contextmanager
def multi_process_service(wanted: bool = True) -> Iterator[None]:
    """NVIDIA's, for processes started meanwhile. One that the environment names is used."""
    if not wanted or PIPES in os.environ:
        yield
        return
    if shutil.which("nvidia-cuda-mps-control") is None:
        sys.exit("there is no nvidia-cuda-mps-control on this machine: leave --mps out.")
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {PIPES: folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        subprocess.run(["nvidia-cuda-mps-control", "-d"], check=True)
        try:
            yield
        finally:
            subprocess.run(["nvidia-cuda-mps-control"], input=b"quit\n", check=False)
            del os.environ[PIPES], os.environ["CUDA_MPS_LOG_DIRECTORY"]


def in_processes(function: Callable[..., None], arguments: Sequence[tuple[Any, ...]]) -> int:
    """Call it in a process of its own for each of the arguments; tells how many of them failed. Who
    is asked to stop, asks them."""
    # OpenMP's idle threads spin for the next loop, and take the cores of the other processes.
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    processes = [CONTEXT.Process(target=function, args=one) for one in arguments]
    try:
        for process in processes:
            process.start()
        for process in processes:
            process.join()
    except KeyboardInterrupt:  # of which they have heard themselves
        for process in processes:
            process.join()
        sys.exit(128 + signal.SIGINT)
    finally:
        stop_all([process for process in processes if process.is_alive()])
        signal.signal(signal.SIGTERM, before)
    return sum(process.exitcode != 0 for process in processes)
