"""Devices, precision and processes, by way of Lightning Fabric."""

import inspect
import logging
from typing import Any

import torch
from lightning_fabric import Fabric
from lightning_fabric.strategies.ddp import DDPStrategy
from torch.nn.parallel import DistributedDataParallel

from xmoco.config import ModelConfig, RunConfig
from xmoco.errors import UserError
from xmoco.train.cpu import keep_memory


def build_fabric(run: RunConfig) -> Fabric:
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


def resolve_batch_norm(model: ModelConfig, fabric: Fabric, images_per_forward: int) -> ModelConfig:
    """``auto`` becomes what suits the number of processes; what cannot work is a ``UserError``."""
    if images_per_forward < 2:
        raise UserError("batch norm needs at least two images at once: raise batch.")
    choice = model.batch_norm
    if choice == "auto":
        choice = "shuffled" if fabric.world_size > 1 else "split"
    if choice == "shuffled" and fabric.world_size == 1:
        raise UserError(
            "batch_norm=shuffled swaps keys between processes, and there is one; "
            "use batch_norm=split, or more devices."
        )
    if choice == "synchronised" and fabric.device.type != "cuda":
        raise UserError("batch_norm=synchronised needs CUDA; use batch_norm=split or shuffled.")
    if choice == "split" and (
        images_per_forward % model.batch_norm_groups
        or images_per_forward // model.batch_norm_groups < 2
    ):
        raise UserError(
            f"batch_norm=split needs equal groups of at least two: {images_per_forward} images "
            f"per process do not make {model.batch_norm_groups}; change batch, batch_norm_groups, "
            "or use batch_norm=plain."
        )
    return model.model_copy(update={"batch_norm": choice})


def describe_batch_norm(model: ModelConfig) -> str:
    """The choice, in words, for the start of a run."""
    return {
        "plain": "plain (statistics over a process's batch)",
        "split": f"split into {model.batch_norm_groups} groups, keys regrouped",
        "shuffled": "keys shuffled between processes",
        "synchronised": "synchronised over all processes",
    }[model.batch_norm]


def _data_parallel() -> DDPStrategy:
    """Gradients are averaged over processes, and nothing is broadcast before a step: the banks are
    the same everywhere by construction, and batch statistics belong to a process."""
    logging.getLogger("lightning_fabric").setLevel(logging.WARNING)
    known = inspect.signature(DistributedDataParallel.__init__).parameters
    new, old = "forward_sync_buffers", "broadcast_buffers"  # torch renamed it after 2.11
    options: dict[str, Any] = {new if new in known else old: False}
    return DDPStrategy(**options)


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
