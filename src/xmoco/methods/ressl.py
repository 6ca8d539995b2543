"""ReSSL: a strong view is as similar to past images as a weak view of the same image is."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from xmoco.config import Config
from xmoco.config.methods import ReSSLConfig
from xmoco.losses.metrics import feature_metrics
from xmoco.losses.ressl import relational_loss
from xmoco.methods.base import DirectedMethod, named
from xmoco.task import StepOutput, Values


class ReSSL(DirectedMethod):
    title = "ReSSL"

    def __init__(self, config: Config) -> None:
        assert isinstance(config.method, ReSSLConfig)
        super().__init__(config, config.method.temperature)
        self.settings = config.method

    def forward(
        self, views: Sequence[Tensor], at: Values, with_metrics: bool = False
    ) -> StepOutput:
        queries, keys = self.queries_and_keys_of(views)
        losses = [
            relational_loss(
                *way,
                temperature=self.settings.temperature,
                key_temperature=self.settings.key_temperature,
            )
            for way in self.ways(queries, keys)
        ]
        if self.training:
            self.banks.enqueue(*keys)
        metrics = feature_metrics(queries[0]) if with_metrics else {}
        terms = named("relations", losses) if len(losses) > 1 else {}
        return StepOutput(torch.stack(losses).sum(), terms, metrics)

    def reference_levels(self) -> dict[str, float]:
        """The cross entropy of a guess among the keys of the bank: there is no positive."""
        return {"chance": math.log(self.banks.length)}
