"""SimCLR: two views of an image find each other among all other views of the batch."""

import math
from collections.abc import Sequence

from torch import Tensor

from xmoco.config import Config, SimCLRConfig
from xmoco.losses.metrics import feature_metrics
from xmoco.losses.ntxent import nt_xent
from xmoco.methods.base import Method
from xmoco.task import StepOutput, Values


class SimCLR(Method):
    title = "SimCLR"

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        assert isinstance(config.method, SimCLRConfig)
        self.temperature = config.method.temperature
        self.candidates = 2 * config.train.batch // config.train.accumulate - 1
        self.encoder = self.build_encoder(config)

    def forward(
        self, views: Sequence[Tensor], at: Values, with_metrics: bool = False
    ) -> StepOutput:
        z_s, z_t = self.run.encode(self.encoder, views)
        loss = nt_xent(z_s, z_t, self.temperature)
        return StepOutput(loss, {}, feature_metrics(z_s) if with_metrics else {})

    def reference_levels(self) -> dict[str, float]:
        return {"chance": math.log(self.candidates)}
