"""Averages between lines of the log."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from xmoco.data import Batches
from xmoco.distributed import sum_over_processes
from xmoco.fabric import Fabric
from xmoco.task import StepOutput


class RunningMeans:
    """Averages of the loss terms and the speed since the last log line, fetched late."""

    def __init__(self, fabric: Fabric, batches: Batches) -> None:
        self.fabric, self.batches = fabric, batches
        self.begin()

    def begin(self) -> None:
        self.sums: dict[str, Tensor] = {}
        self.steps = 0
        self.started = time.perf_counter()
        self.waited = self.batches.waited

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What happens meanwhile is no training. The steps before it are: they are waited for."""
        if self.fabric.device.type == "cuda":
            torch.cuda.synchronize()
        paused, waited = time.perf_counter(), self.batches.waited
        yield
        self.started += time.perf_counter() - paused
        self.waited += self.batches.waited - waited

    def add(self, step: StepOutput) -> None:
        losses = {"loss": step.loss} | {f"loss/{name}": term for name, term in step.terms.items()}
        for name, value in losses.items():
            value = value.detach()
            self.sums[name] = self.sums[name] + value if name in self.sums else value
        self.steps += 1

    def take(self, batch: int) -> dict[str, float]:
        """Those of steps of so many images, over all processes; others begin."""
        sums = sum_over_processes(torch.stack(list(self.sums.values()))).tolist()
        count = self.steps * self.fabric.world_size
        values = {name: total / count for name, total in zip(self.sums, sums, strict=True)}
        seconds = time.perf_counter() - self.started  # the device is done: its sums are here
        values["images_per_second"] = self.steps * batch / seconds
        values["waiting"] = (self.batches.waited - self.waited) / seconds
        self.begin()
        return values
