"""SCE: a strong view finds the weak one's key, and is as similar to past images as that key is."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from xmoco.config import Config
from xmoco.config.methods import SCEConfig
from xmoco.losses.consistency import consistency
from xmoco.losses.sce import soft_contrast
from xmoco.methods.base import DirectedMethod, named
from xmoco.methods.ideas import ideas_schedules
from xmoco.schedules import Schedule, scaled
from xmoco.task import StepOutput, Values


class SCE(DirectedMethod):
    title = "SCE"

    def __init__(self, config: Config) -> None:
        assert isinstance(config.method, SCEConfig)
        super().__init__(config, config.method.temperature)
        self.settings = config.method

    def schedules(self) -> Mapping[str, Schedule]:
        return {**super().schedules(), **ideas_schedules(self.settings)}

    def forward(
        self, views: Sequence[Tensor], at: Values, with_metrics: bool = False
    ) -> StepOutput:
        queries, keys = self.queries_and_keys_of(views)
        contrasts = self.similarities(queries, keys)
        losses = [
            soft_contrast(
                P,
                positive_share=self.settings.positive_share,
                key_temperature=self.settings.key_temperature,
            )
            for P in contrasts
        ]
        loss = torch.stack(losses).sum()
        terms = named("soft_contrast", losses) if len(losses) > 1 else {}
        if self.settings.consistency_weight:  # XMoCo's, in both directions
            P_s, P_t = contrasts
            agreement = consistency(P_s, P_t, P_s.p, P_t.p)
            loss = loss + scaled(
                torch.stack(list(agreement.values())).sum(), at["consistency_weight"]
            )
            terms |= agreement
        if self.training:
            self.banks.enqueue(*keys)
        return StepOutput(loss, terms, self.metrics(contrasts) if with_metrics else {})
