"""Devices, precision and processes, by way of Lightning Fabric."""

import inspect
import logging
from collections.abc import Callable
from typing import Any, Protocol, TypeVar, cast

import torch
from lightning_fabric import Fabric
from lightning_fabric.strategies.ddp import DDPStrategy
from torch.nn.parallel import DistributedDataParallel

from xmoco.errors import UserError
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
    precision = run.precision
    if precision == "auto":
        precision = "bf16" if device == "cuda" else "fp32"
    many = run.devices * run.nodes > 1
    if many and device == "mps":
        raise UserError("one machine has one MPS device: use devices=1, or device=cpu.")
    if device == "cuda" and run.devices > torch.cuda.device_count():
        raise UserError(
            f"devices={run.devices}, but this machine has {torch.cuda.device_count()} CUDA devices."
        )
    logging.getLogger("lightning_fabric").setLevel(logging.WARNING)  # what it says, we say
    # Batches keep their size, so it pays to let cuDNN try its algorithms once.
    torch.backends.cudnn.benchmark = device == "cuda"
    if device == "cpu":
        keep_memory()
    return Fabric(
        accelerator=device,
        devices=run.devices,
        num_nodes=run.nodes,
        precision="bf16-mixed" if precision == "bf16" else "32-true",
        strategy=_data_parallel() if many else "auto",
    )


def _data_parallel() -> DDPStrategy:
    """Gradients are averaged over processes, and nothing is broadcast before a step: what a
    task remembers is the same everywhere by construction, batch statistics are a process's own."""
    known = inspect.signature(DistributedDataParallel.__init__).parameters
    new, old = "forward_sync_buffers", "broadcast_buffers"  # torch renamed it after 2.11
    options: dict[str, Any] = {new if new in known else old: False}
    return DDPStrategy(**options)


def on_first(fabric: Fabric, action: Callable[[], T]) -> T:
    """Do something on the first process only; all get its result, or raise its ``UserError``."""
    outcome: tuple[T | None, str | None] = (None, None)
    if fabric.is_global_zero:
        try:
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
