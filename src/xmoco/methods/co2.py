"""CO2: InfoNCE, and a query that agrees with its key on how similar all negatives are."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from xmoco.config.methods import CO2Config
from xmoco.losses.co2 import disagreement
from xmoco.methods.base import named
from xmoco.methods.ideas import loss_and_terms
from xmoco.methods.moco import MoCo
from xmoco.schedules import Schedule, scaled, warmed_up
from xmoco.task import StepOutput, Values


class CO2(MoCo):
    title = "CO2"
    settings: CO2Config

    def schedules(self) -> Mapping[str, Schedule]:
        weight, epochs = self.settings.agreement_weight, self.settings.agreement_warmup_epochs
        return {**super().schedules(), "agreement_weight": warmed_up(weight, epochs)}

    def forward(
        self, views: Sequence[Tensor], at: Values, with_metrics: bool = False
    ) -> StepOutput:
        queries, keys = self.queries_and_keys_of(views)
        contrasts = self.similarities(queries, keys)
        loss, terms = loss_and_terms(self.ideas, contrasts, at)
        negatives = [disagreement(P, self.settings.agreement_temperature) for P in contrasts]
        loss = loss + scaled(torch.stack(negatives).sum(), at["agreement_weight"])
        if self.training:
            self.banks.enqueue(*keys)
        return StepOutput(
            loss,
            terms | named("agreement", negatives),
            self.metrics(contrasts) if with_metrics else {},
        )
