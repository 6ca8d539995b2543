"""JCL: a query picks a Gaussian, of the keys of several views of its image, out of past means."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from xmoco.config import Config
from xmoco.config.methods import JCLConfig
from xmoco.data.views import ViewGroup
from xmoco.losses.bank import KeyBank
from xmoco.losses.cross_similarity import CrossSimilarity
from xmoco.losses.jcl import gaussian_contrast
from xmoco.methods.base import BankMethod, named, query_and_key_views
from xmoco.methods.ideas import build_ideas, ideas_schedules, loss_and_terms
from xmoco.schedules import LinearToTheEnd, Schedule
from xmoco.task import StepOutput, Values


class JCL(BankMethod):
    title = "JCL"

    def __init__(self, config: Config) -> None:
        settings, size = config.method, config.model.feature_size
        assert isinstance(settings, JCLConfig)
        super().__init__(config, settings.temperature)
        self.settings = settings
        self.bank = KeyBank(settings.bank_length, size)
        self.ideas = build_ideas(settings, size, settings.bank_length)

    @property
    def banks(self) -> KeyBank:
        return self.bank

    @staticmethod
    def view_groups(config: Config) -> tuple[ViewGroup, ...]:
        settings = config.method
        assert isinstance(settings, JCLConfig)
        queries = ("source view", "target view") if settings.symmetric else ("query view",)
        keys = tuple(f"key view {number}" for number in range(1, settings.key_views + 1))
        return query_and_key_views(config, queries, keys)

    def schedules(self) -> Mapping[str, Schedule]:
        return {
            **super().schedules(),
            **ideas_schedules(self.settings),
            "spread_weight": LinearToTheEnd(self.settings.spread_weight),
        }

    def forward(
        self, views: Sequence[Tensor], at: Values, with_metrics: bool = False
    ) -> StepOutput:
        settings = self.settings
        queries, keys = self.queries_and_keys(
            views[: -settings.key_views], views[-settings.key_views :]
        )
        found = [
            gaussian_contrast(q, keys, self.bank.keys, settings.temperature, at["spread_weight"])
            for q in queries
        ]
        contrasts, penalties = [P for P, _ in found], [penalty for _, penalty in found]
        loss, terms = loss_and_terms(self.ideas, contrasts, at)
        if self.training:
            self.bank.enqueue(torch.stack(keys).mean(dim=0))
        return StepOutput(
            loss + torch.stack(penalties).sum(),
            terms | named("spread", penalties),
            self.metrics(contrasts) if with_metrics else {},
        )

    def label_maker(self) -> CrossSimilarity | None:
        return self.ideas
