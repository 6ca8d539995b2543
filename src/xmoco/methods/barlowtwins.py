"""Barlow Twins: the features of two views correlate one by one, and not with each other."""

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor

from xmoco.config import Config
from xmoco.config.methods import BarlowTwinsConfig
from xmoco.losses.barlowtwins import cross_correlation, redundancy_reduction
from xmoco.losses.metrics import feature_metrics
from xmoco.methods.base import Method
from xmoco.task import StepOutput, Values


class BarlowTwins(Method):
    title = "Barlow Twins"

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        assert isinstance(config.method, BarlowTwinsConfig)
        self.settings = config.method
        self.features = config.model.feature_size
        self.encoder = self.build_encoder(config, unit_length=False, ending="unbiased")

    def forward(
        self, views: Sequence[Tensor], at: Values, with_metrics: bool = False
    ) -> StepOutput:
        z_s, z_t = self.run.encode(self.encoder, views)
        same, others = redundancy_reduction(cross_correlation(z_s, z_t))
        scale, weight = self.settings.loss_scale, self.settings.redundancy_weight
        terms = {"invariance": scale * same, "redundancy": scale * weight * others}
        metrics = feature_metrics(F.normalize(z_s)) if with_metrics else {}
        return StepOutput(terms["invariance"] + terms["redundancy"], terms, metrics)

    def reference_levels(self) -> dict[str, float]:
        """The invariance of views whose features do not correlate."""
        return {"unrelated": self.settings.loss_scale * self.features}
