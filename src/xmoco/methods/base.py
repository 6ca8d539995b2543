"""What the training loop knows of a method, and what methods with a momentum encoder share."""

from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor, nn

from xmoco.config import MoCoConfig, ModelConfig
from xmoco.losses import MoCoLoss
from xmoco.losses.metrics import feature_metrics
from xmoco.nn.batchnorm import (
    keys_in_other_processes,
    keys_in_split_groups,
    split_statistics,
    stack_views,
)
from xmoco.nn.blocks import fuse_norms
from xmoco.nn.encoder import Encoder, build_encoder, momentum_copy, momentum_update
from xmoco.nn.two_threads import both, has_halves, with_parallel_backward


class StepOutput(NamedTuple):
    """What a forward pass tells: the loss to minimise, its named terms, metrics for the log."""

    loss: Tensor
    terms: dict[str, Tensor]
    metrics: dict[str, Tensor]


class Method(nn.Module, ABC):
    """A way to learn from two views of every image.

    The loop calls the method with a batch of source and of target views, back-propagates the loss,
    steps the optimiser over ``parameters()`` that require gradients, then calls ``after_step``.
    Everything a method must remember is in ``state_dict``. ``encoder.backbone`` is what is kept.
    """

    encoder: Encoder

    @abstractmethod
    def forward(self, x_s: Tensor, x_t: Tensor, with_metrics: bool = False) -> StepOutput:
        """The loss of a batch; metrics only when asked for, since they cost time."""

    @abstractmethod
    def after_step(self) -> None:
        """What follows the optimiser's step."""

    def suit_gpu(self) -> None:
        """Change what a GPU would rather have otherwise; what is computed stays the same."""

    def suit_cpu(self) -> None:
        """The same for a CPU."""

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
        self.stacked = False
        self.two_threads = False

    def suit_gpu(self) -> None:
        """Both views go through an encoder as one batch, their statistics still apart, and batch
        norms take the additions and ReLUs along. Synchronised ones can do neither."""
        if self.model.batch_norm != "synchronised":
            for encoder in (self.encoder, self.momentum_encoder):
                stack_views(encoder, views=2)
                fuse_norms(encoder)
            self.stacked = True

    def suit_cpu(self) -> None:
        """The two encoders run at once, and then the ways back of the two views."""
        self.two_threads = has_halves()

    def features(self, x_s: Tensor, x_t: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q_s and q_t of f, k_s and k_t of g."""
        if not self.two_threads:
            return *self.queries(x_s, x_t), *self.keys(x_s, x_t)
        queries, keys = both(lambda: self.queries(x_s, x_t), lambda: self.keys(x_s, x_t))
        learned = [p for p in self.encoder.parameters() if p.requires_grad]
        return *with_parallel_backward(queries, learned), *keys

    def queries(self, x_s: Tensor, x_t: Tensor) -> tuple[Tensor, Tensor]:
        """q_s and q_t of f."""
        if not self.stacked:
            return self.encoder(x_s), self.encoder(x_t)
        q_s, q_t = self.encoder(torch.cat([x_s, x_t])).chunk(2)
        return q_s, q_t

    @torch.no_grad()
    def keys(self, x_s: Tensor, x_t: Tensor) -> tuple[Tensor, Tensor]:
        """k_s and k_t of g, in batch-norm company other than the queries' (nn/batchnorm.py)."""
        if not self.stacked:
            return self._keys(x_s, views=1), self._keys(x_t, views=1)
        k_s, k_t = self._keys(torch.cat([x_s, x_t]), views=2).chunk(2)
        return k_s, k_t

    def _keys(self, images: Tensor, views: int) -> Tensor:
        encoder = self.momentum_encoder
        match self.model.batch_norm:
            case "split":
                groups = self.model.batch_norm_groups
                return keys_in_split_groups(encoder, images, groups, views)
            case "shuffled":
                return keys_in_other_processes(encoder, images, views)
            case _:
                keys: Tensor = encoder(images)
                return keys

    def contrast(
        self, q_s: Tensor, q_t: Tensor, k_s: Tensor, k_t: Tensor, with_metrics: bool
    ) -> StepOutput:
        metrics: dict[str, Tensor] = {}
        if with_metrics:
            metrics = feature_metrics(q_s) | self.loss.metrics(q_s, q_t, k_s, k_t)
        loss, terms = self.loss(q_s, q_t, k_s, k_t)
        return StepOutput(loss, terms, metrics)

    def after_step(self) -> None:
        momentum_update(self.momentum_encoder, self.encoder, self.key_momentum)

    @property
    def bank_fill(self) -> float:
        return self.loss.banks.fill
