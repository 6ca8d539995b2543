"""What the training loop knows of a method, and what methods with a momentum encoder share."""

from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor, nn

from xmoco.config import MoCoConfig, ModelConfig
from xmoco.losses import MoCoLoss
from xmoco.losses.gauges import feature_gauges
from xmoco.nn.batchnorm import (
    keys_in_other_processes,
    keys_in_split_groups,
    split_statistics,
)
from xmoco.nn.encoder import Encoder, build_encoder, momentum_copy, momentum_update


class Step(NamedTuple):
    """What a forward pass tells: the loss to minimise, its named terms, gauges for the log."""

    loss: Tensor
    terms: dict[str, Tensor]
    gauges: dict[str, Tensor]


class Method(nn.Module, ABC):
    """A way to learn from two views of every image.

    The loop calls the method with a batch of source and of target views, back-propagates the loss,
    steps the optimiser over ``parameters()`` that require gradients, then calls ``after_step``.
    Everything a method must remember is in ``state_dict``. ``encoder.backbone`` is what is kept.
    """

    encoder: Encoder

    @abstractmethod
    def forward(self, x_s: Tensor, x_t: Tensor, measure: bool = False) -> Step:
        """The loss of a batch; gauges only when asked to ``measure``, since they cost time."""

    @abstractmethod
    def after_step(self) -> None:
        """What follows the optimiser's step."""

    @property
    @abstractmethod
    def bank_fill(self) -> float:
        """Share of the memory that holds real samples, 0 to 1."""


class MomentumMethod(Method):
    """An encoder f with gradients, a momentum encoder g without, and a loss that owns two banks."""

    def __init__(self, model: ModelConfig, settings: MoCoConfig, loss: MoCoLoss) -> None:
        super().__init__()
        self.model = model
        self.key_momentum = settings.key_momentum
        self.encoder = build_encoder(model)
        if model.batch_norm == "split":
            split_statistics(self.encoder, model.batch_norm_groups)
        elif model.batch_norm == "synchronised":
            self.encoder = nn.SyncBatchNorm.convert_sync_batchnorm(self.encoder)
        self.momentum_encoder = momentum_copy(self.encoder)
        self.loss = loss

    @torch.no_grad()
    def keys(self, views: Tensor) -> Tensor:
        """Keys of g, in batch-norm company other than the queries' (see nn/batchnorm.py)."""
        match self.model.batch_norm:
            case "split":
                groups = self.model.batch_norm_groups
                return keys_in_split_groups(self.momentum_encoder, views, groups)
            case "shuffled":
                return keys_in_other_processes(self.momentum_encoder, views)
            case _:
                keys: Tensor = self.momentum_encoder(views)
                return keys

    def contrast(self, q_s: Tensor, q_t: Tensor, k_s: Tensor, k_t: Tensor, measure: bool) -> Step:
        gauges: dict[str, Tensor] = {}
        if measure:
            gauges = feature_gauges(q_s) | self.loss.gauges(q_s, q_t, k_s, k_t)
        loss, terms = self.loss(q_s, q_t, k_s, k_t)
        return Step(loss, terms, gauges)

    def after_step(self) -> None:
        momentum_update(self.momentum_encoder, self.encoder, self.key_momentum)

    @property
    def bank_fill(self) -> float:
        return self.loss.banks.fill
