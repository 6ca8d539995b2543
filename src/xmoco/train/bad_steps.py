"""Steps whose loss is no number, or out of all proportion: found out late, but by name.

Asking the device for every loss would make it wait. So losses are kept where they are, and looked
at when the loop has something to say or to save; no checkpoint is written before. Then the step is
known at which a run went wrong. To leave such steps out, the loop keeps a copy of all that changes
from the last time it looked, goes back to it, and takes the same steps again but for the bad one.
"""

import math
from collections.abc import Callable, Collection
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from xmoco.distributed import sum_over_processes
from xmoco.errors import UserError
from xmoco.fabric import Fabric

SPIKE = 1000.0
"""A loss so many times as large as those before is no step of learning. (A linear classifier at
the paper's rate of 60 begins with some that are a hundred times as large.)"""
MOST_UNSEEN = 1000
"""Losses that are kept before they are looked at, where the log is silent for longer."""
FEW = 10
"""Bad steps that may be left out in any case."""
SHARE = 0.01
"""Of all steps, how many may be left out."""


class DivergedError(UserError):
    """The loss or the weights are no longer numbers, at ``step``."""

    def __init__(self, sentence: str, step: int) -> None:
        super().__init__(sentence)
        self.step = step


class BadStep(NamedTuple):
    step: int
    loss: float

    def __str__(self) -> str:
        if math.isfinite(self.loss):
            return f"the loss jumped to {self.loss:.4g} at step {self.step}"
        return f"the loss is NaN or infinite at step {self.step}"


class LossWatch:
    """Losses that nobody has looked at yet."""

    def __init__(self, fabric: Fabric, level: float | None = None) -> None:
        self._fabric = fabric
        self._losses: dict[int, Tensor] = {}
        self.level = level
        """Of the loss at the last step that was logged: so it does not depend on when checkpoints
        were written, or a run was resumed."""
        self._last = 0.0

    def add(self, step: int, loss: Tensor) -> None:
        self._losses[step] = loss.detach()

    @property
    def full(self) -> bool:
        return len(self._losses) >= MOST_UNSEEN

    def look(self) -> BadStep | None:
        """The first bad step of those since the last look; all processes must look together."""
        if not self._losses:
            return None
        total = sum_over_processes(torch.stack(list(self._losses.values())).float())
        losses = (total / self._fabric.world_size).tolist()
        limit = math.inf if self.level is None else SPIKE * max(1.0, self.level)
        found = [BadStep(*pair) for pair in zip(self._losses, losses, strict=True)]
        self._losses = {}
        for bad in found:
            if not abs(bad.loss) < limit:  # also what is no number
                return bad
        self._last = losses[-1]
        return None

    def note_level(self) -> None:
        """The last loss, which has been looked at, is what later ones are compared with."""
        self.level = abs(self._last)


class _ModuleCopy:
    """What a module itself holds, without its parts: parameters, buffers, and tensors and numbers
    that are plain attributes, as what processes share out."""

    PLAIN = (bool, int, float, type(None))

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._held = {name: held.clone() for name, held in _tensors(module).items()}
        self._buffers = [name for name, held in module._buffers.items() if held is not None]
        self._plain = {
            name: value for name, value in vars(module).items() if isinstance(value, self.PLAIN)
        }

    def put_back(self) -> None:
        """In its old place where there is one: a CUDA graph knows no other."""
        now = _tensors(self._module)
        for name in now.keys() - self._held.keys():
            delattr(self._module, name)
        for name, value in self._held.items():
            if name in now and now[name].shape == value.shape:
                now[name].copy_(value)
            else:
                vars(self._module).pop(name, None)
                place = self._module._buffers if name in self._buffers else vars(self._module)
                place[name] = value.clone()
        vars(self._module).update(self._plain)


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    found = {**vars(module), **module._buffers, **module._parameters}
    return {name: value.detach() for name, value in found.items() if isinstance(value, Tensor)}


class WayBack:
    """A copy, on the device, of all that a step changes."""

    def __init__(
        self, step: int, level: float | None, task: nn.Module, optimizer: Optimizer
    ) -> None:
        self.step, self.level = step, level
        self._task = [_ModuleCopy(module) for module in task.modules()]
        self._optimizer = optimizer
        self._memory = {
            parameter: {k: v.clone() for k, v in state.items() if isinstance(v, Tensor)}
            for parameter, state in optimizer.state.items()
        }

    @torch.no_grad()
    def go(self) -> None:
        """Put everything back."""
        for part in self._task:
            part.put_back()
        for parameter, state in self._optimizer.state.items():
            before = self._memory.get(parameter, {})
            for key, value in state.items():
                if isinstance(value, Tensor):
                    # What an optimiser did not remember yet is zero in all of ours.
                    value.copy_(before[key]) if key in before else value.zero_()


def too_many(left_out: int, steps: int) -> bool:
    return left_out > max(FEW, SHARE * steps)


class BadSteps:
    """Finds bad steps and, if they are to be ``skipped``, leaves them out.

    Steps are functions of what they start from, so the others will be the same again. ``diverged``
    words the error that ends a run: of what, at which step.
    """

    def __init__(
        self,
        fabric: Fabric,
        task: nn.Module,
        optimizer: Optimizer,
        skipped: bool,
        diverged: Callable[[str, int], DivergedError],
    ) -> None:
        self.losses = LossWatch(fabric)
        self.left_out: set[int] = set()
        """Of all sessions, counted from 0 as the loop does."""
        self._task, self._optimizer = task, optimizer
        self._skipped, self._diverged = skipped, diverged
        self._way_back: WayBack | None = None

    def restore(self, level: float | None, left_out: Collection[int]) -> None:
        self.losses.level, self.left_out = level, set(left_out)

    def remember(self, step: int) -> None:
        """What is good, if it may be needed."""
        self.forget()  # before the next one is made: two would take twice the memory
        if self._skipped:
            self._way_back = WayBack(step, self.losses.level, self._task, self._optimizer)

    def forget(self) -> None:
        self._way_back = None

    def skips(self, step: int) -> bool:
        return self._skipped and step in self.left_out

    def add(self, step: int, loss: Tensor) -> None:
        """The loss of a step; or, where bad steps are left out, no number if the weights are none
        after it: a gradient may be none where the loss still was."""
        if self._skipped:
            norms = torch._foreach_norm(list(self._task.parameters()))
            loss = loss + 0.0 * torch.stack(norms).sum()
        self.losses.add(step, loss)

    def leave_out(self, bad: BadStep, done: int) -> int:
        """Go back to before a bad step, which will be left out, when ``done`` steps are; without a
        way back it is the end. How many are done then."""
        if self._way_back is None:
            raise self._diverged(str(bad), bad.step)
        self.left_out.add(bad.step - 1)
        if too_many(len(self.left_out), done):
            skipped = f"{bad}, and {len(self.left_out)} steps were skipped already"
            raise self._diverged(skipped, bad.step)
        self._way_back.go()
        self.losses.level = self._way_back.level
        return self._way_back.step
