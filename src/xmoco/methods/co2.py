"""CO2: InfoNCE, and a query that agrees with its key on how similar all negatives are."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from xmoco.config import CO2Config, Config
from xmoco.losses.co2 import disagreement
from xmoco.losses.cross_similarity import CrossSimilarity
from xmoco.methods.base import DirectedMethod, named
from xmoco.methods.ideas import build_ideas, compared, ideas_schedules
from xmoco.schedules import Schedule, scaled, warmed_up
from xmoco.task import StepOutput, Values


class CO2(DirectedMethod):
    title = "CO2"

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        assert isinstance(config.method, CO2Config)
        self.settings = config.method
        self.ideas = build_ideas(
            config.method, config.model.feature_size, config.method.bank_length
        )

    def schedules(self) -> Mapping[str, Schedule]:
        weight, epochs = self.settings.agreement_weight, self.settings.agreement_warmup_epochs
        return {
            **super().schedules(),
            **ideas_schedules(self.settings),
            "agreement_weight": warmed_up(weight, epochs),
        }

    def forward(
        self, views: Sequence[Tensor], at: Values, with_metrics: bool = False
    ) -> StepOutput:
        queries, keys = self.contrasted(views)
        contrasts = self.contrasts(queries, keys, self.settings.temperature)
        loss, terms = compared(self.ideas, contrasts, at)
        negatives = [disagreement(P, self.settings.agreement_temperature) for P in contrasts]
        loss = loss + scaled(torch.stack(negatives).sum(), at["agreement_weight"])
        if self.training:
            self.banks.enqueue(*keys)
        return StepOutput(
            loss,
            terms | named("agreement", negatives),
            self.metrics(contrasts) if with_metrics else {},
        )

    def compared_by(self) -> CrossSimilarity | None:
        return self.ideas
