"""The seam between what is trained and the loop that trains it.

A task is a module that makes its inputs of a batch, gives a loss for them, and says what else has
to happen around the optimiser's step. Pre-training methods are tasks, and so is a classifier in
training. The loop knows nothing but this.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from xmoco.data.streaming import Batch
from xmoco.schedules import Clock, Schedule, Value

Values = Mapping[str, Value]
"""Scheduled values by name, at a step."""


class StepOutput(NamedTuple):
    """What a forward pass tells: the loss to minimise, its named terms, metrics for the log."""

    loss: Tensor
    terms: dict[str, Tensor]
    metrics: dict[str, Tensor]


class ParamGroup(NamedTuple):
    """Parameters that learn alike."""

    parameters: list[nn.Parameter]
    rate_factor: float = 1.0
    """Of the scheduled learning rate."""
    scheduled: bool = True
    """Whether the rate follows the schedule; else it stays at its peak."""
    decays: bool = True
    """Whether weight decay is for them."""


class Moment(NamedTuple):
    """What chance depends on: the step, and which rows of its global batch these are."""

    seed: int
    step: int
    batch: int
    rows: slice | NDArray[np.int64]


class Task(nn.Module, ABC):
    """Something to be trained.

    At every step the loop makes ``inputs``, calls the task with them, back-propagates the loss,
    calls ``before_update``, steps the optimiser over ``param_groups``, and calls ``after_update``.
    Everything a task must remember is in ``state_dict``.
    """

    title: str
    capturable = True
    """Whether a step may be replayed from a CUDA graph: it does the same at every step but for
    numbers on the device, and never asks the device for one."""

    @abstractmethod
    def inputs(self, batch: Batch, moment: Moment) -> Sequence[Tensor]:
        """What ``forward`` gets, on the device."""

    @abstractmethod
    def forward(
        self, inputs: Sequence[Tensor], at: Values, with_metrics: bool = False
    ) -> StepOutput:
        """The loss of a batch; metrics only when asked for, since they cost time."""

    def schedules(self) -> Mapping[str, Schedule]:
        """The values that a step finds in ``at``."""
        return {}

    def param_groups(self) -> list[ParamGroup]:
        return [ParamGroup([p for p in self.parameters() if p.requires_grad])]

    def rate_factor(self, clock: Clock) -> float:
        """What the scheduled learning rate is multiplied by at a step."""
        return 1.0

    def before_update(self, at: Values) -> None:
        """The gradients are there."""

    def after_update(self, at: Values) -> None:
        """The optimiser has taken its step."""

    def optimize_for(self, device: torch.device) -> None:
        """Change what the device would rather have otherwise; what is computed stays the same."""

    def reference_levels(self) -> dict[str, float]:
        """What the loss terms are to be compared with, by name."""
        return {}

    def fill_levels(self) -> dict[str, float]:
        """How full its memories are, 0 to 1, by name. May ask the device."""
        return {}

    def warnings(self, images: int) -> list[str]:
        """What a user with so many images should know before waiting."""
        return []
