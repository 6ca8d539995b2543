"""MoCo v2 with align/uniform: queries lie near their keys and far from all others; no softmax."""

from collections.abc import Sequence

import torch
from torch import Tensor

from xmoco.config import Config
from xmoco.config.methods import AlignUniformConfig
from xmoco.losses.metrics import feature_metrics
from xmoco.losses.prediction import prediction_loss
from xmoco.losses.uniformity import uniformity
from xmoco.methods.base import DirectedMethod, named
from xmoco.task import StepOutput, Values


class AlignUniform(DirectedMethod):
    title = "MoCo v2 + align/uniform"

    def __init__(self, config: Config) -> None:
        assert isinstance(config.method, AlignUniformConfig)
        # That of e^(q·k/τ), which e^(−t‖q−k‖²) is up to a factor.
        super().__init__(config, temperature=1 / (2 * config.method.uniform_sharpness))
        self.settings = config.method

    def forward(
        self, views: Sequence[Tensor], at: Values, with_metrics: bool = False
    ) -> StepOutput:
        queries, keys = self.queries_and_keys_of(views)
        ways = self.ways(queries, keys)
        distances = [prediction_loss(way.queries, way.keys) for way in ways]
        crowding = [
            uniformity(way.queries, way.bank, self.settings.uniform_sharpness) for way in ways
        ]
        loss = self.settings.align_weight * torch.stack(distances).sum()
        loss = loss + self.settings.uniform_weight * torch.stack(crowding).sum()
        if self.training:
            self.banks.enqueue(*keys)
        terms = named("alignment", distances) | named("uniformity", crowding)
        return StepOutput(loss, terms, feature_metrics(queries[0]) if with_metrics else {})

    def reference_levels(self) -> dict[str, float]:
        """The squared distance of unrelated directions."""
        return {"unrelated": 2.0}
