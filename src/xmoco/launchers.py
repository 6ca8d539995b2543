"""Who started this process, and which of several it is: told by the environment alone.

``devices=N`` makes the first process start the others. Under torchrun and SLURM's srun all are
there already, and know each other by variables. A batch script of SLURM without srun is one
process, whatever its job has been given.
"""

import os
import signal
from typing import NamedTuple

NO_STEP = 0xFFFFFFF0
"""SLURM numbers steps that are none of srun's from here: batch scripts, interactive shells."""
PREEMPTING = (signal.SIGTERM, *([signal.SIGUSR1] if hasattr(signal, "SIGUSR1") else []))
"""What clusters send before they take a machine away; the second by SLURM's ``--signal=USR1@90``,
say. Windows has no such signal."""


class Launcher(NamedTuple):
    name: str
    devices: int
    """Processes it has started on each machine."""
    nodes: int


def launcher() -> Launcher | None:
    """What has started all processes of a run; none where this one is to start the others."""
    found = os.environ.get
    if "TORCHELASTIC_RUN_ID" in os.environ:
        world, local = int(found("WORLD_SIZE", "1")), int(found("LOCAL_WORLD_SIZE", "1"))
        return Launcher("torchrun", local, world // local)
    if by_srun():
        tasks = int(found("SLURM_STEP_NUM_TASKS", found("SLURM_NTASKS", "1")))
        nodes = int(found("SLURM_STEP_NUM_NODES", found("SLURM_NNODES", "1")))
        return Launcher("srun", tasks // nodes, nodes)
    return None


def by_srun() -> bool:
    step = os.environ.get("SLURM_STEP_ID", "")
    return "SLURM_PROCID" in os.environ and step.isdigit() and int(step) < NO_STEP


def local_rank() -> int:
    """Which of the processes of its machine this is."""
    by_slurm = "RANK" not in os.environ and by_srun()
    return int(os.environ.get("SLURM_LOCALID" if by_slurm else "LOCAL_RANK", "0"))


def first_process() -> bool:
    """Whether this is the process that speaks for all."""
    found = os.environ.get
    if "RANK" in os.environ:
        return found("RANK") == "0"
    if by_srun():
        return found("SLURM_PROCID") == "0"
    return found("LOCAL_RANK", "0") == "0" and found("NODE_RANK", "0") == "0"
