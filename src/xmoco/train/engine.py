"""Devices, precision and processes, by way of Lightning Fabric."""

import inspect
import logging
import os
import warnings
from collections.abc import Callable
from typing import Any, Protocol, TypeVar, cast

import torch
from torch.nn.parallel import DistributedDataParallel

from xmoco.distributed import alone
from xmoco.errors import UserError
from xmoco.fabric import DDPStrategy, Fabric, LightningEnvironment
from xmoco.launchers import launcher
from xmoco.train.cpu import keep_memory

T = TypeVar("T")


class RunSettings(Protocol):
    """Where something runs: the settings of a run, or the options of an evaluation."""

    @property
    def device(self) -> str: ...
    @property
    def devices(self) -> int: ...
    @property
    def nodes(self) -> int: ...
    @property
    def precision(self) -> str: ...


def build_fabric(run: RunSettings) -> Fabric:
    device = choose_device(run.device)
    devices, nodes = processes_of(run)
    many = devices * nodes > 1
    if many and device == "mps":
        raise UserError("one machine has one MPS device: use devices=1, or device=cpu.")
    if device == "cuda" and devices > torch.cuda.device_count():
        raise UserError(
            f"devices={devices}, but this machine has {torch.cuda.device_count()} CUDA devices."
        )
    logging.getLogger("lightning_fabric").setLevel(logging.WARNING)  # what it says, we say
    # Batches keep their size, so it pays to let cuDNN try its algorithms once.
    torch.backends.cudnn.benchmark = device == "cuda"
    if device == "cpu":
        keep_memory()
    return Fabric(
        accelerator=device,
        devices=devices,
        num_nodes=nodes,
        precision="bf16-mixed" if in_bf16(run, device) else "32-true",
        strategy=_data_parallel() if many else "auto",
        plugins=_environment(),
    )


def in_bf16(run: RunSettings, device: str) -> bool:
    """Whether layers compute in bfloat16, of which ``auto`` is sure on CUDA only."""
    return run.precision == "bf16" or (run.precision == "auto" and device == "cuda")


def processes_of(run: RunSettings) -> tuple[int, int]:
    """Processes a machine, and machines: as torchrun or srun has started them, or as asked for."""
    started = launcher()
    if started is None:
        if run.nodes > 1 and "MASTER_ADDR" not in os.environ:  # they would wait for ever
            raise UserError(
                f"nodes={run.nodes}, but nothing has started processes on other machines: start "
                "the run with torchrun or srun, as docs/cluster.md shows."
            )
        return run.devices, run.nodes
    there = started.devices, started.nodes
    if (run.devices, run.nodes) not in (there, (1, 1)):
        raise UserError(
            f"{started.name} has started {started.devices} × {started.nodes} processes (a machine "
            f"× machines), but devices={run.devices} and nodes={run.nodes}: leave both out, or "
            f"give devices={started.devices} nodes={started.nodes}."
        )
    return there


def _environment() -> LightningEnvironment | None:
    """Fabric finds out by itself who has started this process, but for two cases of SLURM."""
    started = launcher()
    if started is None and "SLURM_NTASKS" in os.environ:  # no srun: processes are yet to be started
        return LightningEnvironment()
    if started is not None and started.name == "srun":
        os.environ.setdefault("SLURM_NTASKS_PER_NODE", str(started.devices))
    return None


def _data_parallel() -> DDPStrategy:
    """Gradients are averaged over processes, and nothing is broadcast before a step: what a
    task remembers is the same everywhere by construction, batch statistics are a process's own."""
    # It is told of kernels of 1 × 1, whose layouts are all the same.
    warnings.filterwarnings("ignore", message="Grad strides do not match bucket view strides")
    known = inspect.signature(DistributedDataParallel.__init__).parameters
    new, old = "forward_sync_buffers", "broadcast_buffers"  # torch renamed it after 2.11
    options: dict[str, Any] = {new if new in known else old: False}
    return DDPStrategy(**options)


def on_first(fabric: Fabric, action: Callable[[], T]) -> T:
    """Do something on the first process only; all get its result, or raise its ``UserError``."""
    outcome: tuple[T | None, str | None] = (None, None)
    if fabric.is_global_zero:
        try:
            with alone():
                outcome = (action(), None)
        except UserError as error:
            outcome = (None, str(error))
    result, mistake = fabric.broadcast(outcome)
    if mistake is not None:
        raise UserError(mistake)
    return cast(T, result)


def choose_device(choice: str) -> str:
    """The kind of device meant by ``choice``, where ``auto`` is the fastest there is."""
    available = {
        "cuda": torch.cuda.is_available(),
        "mps": torch.backends.mps.is_available(),
        "cpu": True,
    }
    if choice == "auto":
        return next(name for name, there in available.items() if there)
    if not available.get(choice, False):
        raise UserError(f"device={choice} is not available here; use device=auto or device=cpu.")
    return choice
