"""BYOL: a predictor tells, from one view, what the momentum encoder makes of the other."""

from collections.abc import Sequence

from torch import Tensor, nn

from xmoco.config import Config
from xmoco.config.methods import BYOLConfig
from xmoco.losses.metrics import feature_metrics
from xmoco.losses.prediction import prediction_loss
from xmoco.methods.base import MomentumMethod
from xmoco.nn.heads import mlp_head
from xmoco.task import StepOutput, Values


class BYOL(MomentumMethod):
    title = "BYOL"

    def __init__(self, config: Config) -> None:
        super().__init__(config, unit_length=False)
        assert isinstance(config.method, BYOLConfig)
        size = config.model.feature_size
        self.predictor = mlp_head(size, config.method.predictor_hidden, size, layers=2)
        self.run.prepare(self.predictor)

    def networks(self) -> list[nn.Module]:
        return [*super().networks(), self.predictor]

    def forward(
        self, views: Sequence[Tensor], at: Values, with_metrics: bool = False
    ) -> StepOutput:
        (q_s, q_t), (k_s, k_t) = self.queries_and_keys(views, views)
        p_s, p_t = self.run.encode(self.predictor, (q_s, q_t))
        terms = {"source": prediction_loss(p_s, k_t), "target": prediction_loss(p_t, k_s)}
        metrics = feature_metrics(nn.functional.normalize(q_s)) if with_metrics else {}
        return StepOutput(terms["source"] + terms["target"], terms, metrics)

    def reference_levels(self) -> dict[str, float]:
        """The squared distance of unrelated directions."""
        return {"unrelated": 2.0}
