"""SimSiam: a predictor tells, from one view, what the same encoder makes of the other."""

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from xmoco.config import Config
from xmoco.config.methods import SimSiamConfig
from xmoco.losses.metrics import feature_metrics
from xmoco.losses.prediction import negative_cosine
from xmoco.methods.base import Method
from xmoco.nn.heads import mlp_head
from xmoco.task import ParamGroup, StepOutput, Values


class SimSiam(Method):
    title = "SimSiam"

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        assert isinstance(config.method, SimSiamConfig)
        size = config.model.feature_size
        self.encoder = self.build_encoder(config, unit_length=False, ending="normalised")
        self.predictor = mlp_head(size, config.method.predictor_hidden, size, layers=2)
        self.run.prepare(self.predictor)

    def networks(self) -> list[nn.Module]:
        return [*super().networks(), self.predictor]

    def param_groups(self) -> list[ParamGroup]:
        """The predictor must stay ahead of the encoder: its rate does not fall."""
        learned = [p for p in self.encoder.parameters() if p.requires_grad]
        return [ParamGroup(learned), ParamGroup(list(self.predictor.parameters()), scheduled=False)]

    def forward(
        self, views: Sequence[Tensor], at: Values, with_metrics: bool = False
    ) -> StepOutput:
        z_s, z_t = self.run.encode(self.encoder, views)
        p_s, p_t = self.run.encode(self.predictor, (z_s, z_t))
        terms = {"source": negative_cosine(p_s, z_t) / 2, "target": negative_cosine(p_t, z_s) / 2}
        metrics = feature_metrics(F.normalize(z_s)) if with_metrics else {}
        return StepOutput(terms["source"] + terms["target"], terms, metrics)

    def reference_levels(self) -> dict[str, float]:
        """The cosine of unrelated directions."""
        return {"unrelated": 0.0}
