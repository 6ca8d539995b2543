"""VICReg: views agree, every feature varies, and no two features vary together."""

import math
from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor

from xmoco.config import Config
from xmoco.config.methods import VICRegConfig
from xmoco.losses.metrics import feature_metrics
from xmoco.losses.vicreg import EPSILON, invariance, variance_and_covariance
from xmoco.methods.base import Method
from xmoco.task import StepOutput, Values


class VICReg(Method):
    title = "VICReg"

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        assert isinstance(config.method, VICRegConfig)
        self.settings = config.method
        self.encoder = self.build_encoder(config, unit_length=False, ending="unbiased")

    def forward(
        self, views: Sequence[Tensor], at: Values, with_metrics: bool = False
    ) -> StepOutput:
        z_s, z_t = self.run.encode(self.encoder, views)
        variance, covariance = variance_and_covariance(z_s, z_t)
        terms = {
            "invariance": self.settings.invariance_weight * invariance(z_s, z_t),
            "variance": self.settings.variance_weight * variance,
            "covariance": self.settings.covariance_weight * covariance,
        }
        metrics = feature_metrics(F.normalize(z_s)) if with_metrics else {}
        loss = terms["invariance"] + terms["variance"] + terms["covariance"]
        return StepOutput(loss, terms, metrics)

    def reference_levels(self) -> dict[str, float]:
        """The variance term of features that are the same for every image."""
        return {"collapsed": self.settings.variance_weight * (1 - math.sqrt(EPSILON))}
