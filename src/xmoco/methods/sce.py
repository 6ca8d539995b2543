"""SCE: a strong view finds the weak one's key, and is as similar to past images as that key is."""

from collections.abc import Sequence

import torch
from torch import Tensor

from xmoco.config import Config, SCEConfig
from xmoco.losses.sce import soft_contrast
from xmoco.methods.base import DirectedMethod
from xmoco.task import StepOutput, Values


class SCE(DirectedMethod):
    title = "SCE"

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        assert isinstance(config.method, SCEConfig)
        self.settings = config.method

    def forward(
        self, views: Sequence[Tensor], at: Values, with_metrics: bool = False
    ) -> StepOutput:
        queries, keys = self.contrasted(views)
        contrasts = self.contrasts(queries, keys)
        losses = [
            soft_contrast(
                P,
                positive_share=self.settings.positive_share,
                key_temperature=self.settings.key_temperature,
            )
            for P in contrasts
        ]
        if self.training:
            self.banks.enqueue(*keys)
        metrics = self.metrics(contrasts) if with_metrics else {}
        return StepOutput(torch.stack(losses).sum(), self.named(labels=losses), metrics)
