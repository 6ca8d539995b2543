"""MoCo: a query picks its key out of a bank of past ones, in one direction (versions 1 and 2)."""

from collections.abc import Mapping, Sequence

from torch import Tensor

from xmoco.config import Config
from xmoco.config.shared import BankIdeasConfig, MoCoConfig
from xmoco.losses.cross_similarity import CrossSimilarity
from xmoco.methods.base import DirectedMethod
from xmoco.methods.ideas import build_ideas, ideas_schedules, loss_and_terms
from xmoco.schedules import Schedule
from xmoco.task import StepOutput, Values


class MoCo(DirectedMethod):
    title = "MoCo"

    def __init__(self, config: Config) -> None:
        settings = config.method
        assert isinstance(settings, MoCoConfig)
        assert isinstance(settings, BankIdeasConfig)
        super().__init__(config, settings.temperature)
        self.settings = settings
        self.ideas = build_ideas(settings, config.model.feature_size, self.banks.length)

    def schedules(self) -> Mapping[str, Schedule]:
        return {**super().schedules(), **ideas_schedules(self.settings)}

    def forward(
        self, views: Sequence[Tensor], at: Values, with_metrics: bool = False
    ) -> StepOutput:
        queries, keys = self.queries_and_keys_of(views)
        contrasts = self.similarities(queries, keys)
        loss, terms = loss_and_terms(self.ideas, contrasts, at)
        if self.training:
            self.banks.enqueue(*keys)
        metrics = self.metrics(contrasts) if with_metrics else {}
        return StepOutput(loss, terms if len(terms) > 1 else {}, metrics)

    def label_maker(self) -> CrossSimilarity | None:
        return self.ideas
