"""MNN, mixed nearest neighbours: BYOL, and keys mixed with their nearest neighbours to tell too."""

from collections.abc import Mapping, Sequence

import torch.nn.functional as F
from torch import Tensor

from xmoco.config import Config
from xmoco.data.views import ViewGroup
from xmoco.losses.metrics import feature_metrics
from xmoco.losses.neighbours import mixed_neighbours, nearest
from xmoco.losses.prediction import prediction_loss
from xmoco.methods.base import NeighbourMethod, query_and_key_views
from xmoco.schedules import Drawn, Schedule
from xmoco.task import StepOutput, Values


class MNN(NeighbourMethod):
    title = "MNN"

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.seed = config.train.seed

    @staticmethod
    def view_groups(config: Config) -> tuple[ViewGroup, ...]:
        return query_and_key_views(config, ("view 1",), ("view 2",))

    def schedules(self) -> Mapping[str, Schedule]:
        return {**super().schedules(), "share": Drawn("share of neighbours", self.seed)}

    def forward(
        self, views: Sequence[Tensor], at: Values, with_metrics: bool = False
    ) -> StepOutput:
        (q_s, q_t), (k_s, k_t) = self.queries_and_keys(views, views)
        p_s, p_t = self.run.encode(self.predictor, (q_s, q_t))
        keys = prediction_loss(p_s, k_t) + prediction_loss(p_t, k_s)
        u_s, u_t = (nearest(k, self.bank.keys, self.settings.neighbours) for k in (k_s, k_t))
        neighbours = mixed_neighbours(p_s, k_t, u_t, at["share"]) + mixed_neighbours(
            p_t, k_s, u_s, at["share"]
        )
        if self.training:
            self.bank.enqueue(k_t)
        terms = {"keys": keys / 2, "neighbours": neighbours / 2}
        metrics = feature_metrics(F.normalize(q_s)) if with_metrics else {}
        return StepOutput(terms["keys"] + terms["neighbours"], terms, metrics)
