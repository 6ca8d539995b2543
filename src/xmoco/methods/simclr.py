"""SimCLR: two views of an image find each other among all other views of the batch."""

import math
from collections.abc import Mapping, Sequence

from torch import Tensor

from xmoco.config import Config
from xmoco.config.methods import SimCLRConfig
from xmoco.losses.metrics import feature_metrics, similarity_metrics
from xmoco.losses.ntxent import batch_contrasts, nt_xent
from xmoco.methods.base import Meeting, Method
from xmoco.methods.ideas import build_ideas, ideas_schedules
from xmoco.schedules import Schedule
from xmoco.task import StepOutput, Values


class SimCLR(Method):
    title = "SimCLR"

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        assert isinstance(config.method, SimCLRConfig)
        self.settings = config.method
        self.temperature = config.method.temperature
        self.ideas = build_ideas(config.method)
        self.candidates = 2 * config.train.batch // config.train.accumulate - 1
        self.encoder = self.build_encoder(config)

    def schedules(self) -> Mapping[str, Schedule]:
        return ideas_schedules(self.settings)

    def forward(
        self, views: Sequence[Tensor], at: Values, with_metrics: bool = False
    ) -> StepOutput:
        z_s, z_t = self.run.encode(self.encoder, views)
        metrics = feature_metrics(z_s) if with_metrics else {}
        if self.ideas is None:
            return StepOutput(nt_xent(z_s, z_t, self.temperature), {}, metrics)
        P_s, P_t = batch_contrasts(z_s, z_t, self.temperature)
        if with_metrics:
            metrics |= similarity_metrics(P_s.log_p, P_t.log_p)
        loss, terms = self.ideas.compare(P_s, P_t, at["consistency_weight"])
        return StepOutput(loss / 2, terms, metrics)  # NT-Xent is a mean over both sides

    def reference_levels(self) -> dict[str, float]:
        return {"chance": math.log(self.candidates)}

    def meeting(self, views: Sequence[Tensor]) -> Meeting:
        features = [self.encoder(view) for view in views]
        return Meeting(features, features, self.temperature, self.ideas)
