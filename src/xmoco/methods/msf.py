"""MSF, mean shift: a predictor tells the other view's key and that key's nearest neighbours."""

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor

from xmoco.config import Config
from xmoco.data.views import ViewGroup
from xmoco.losses.metrics import feature_metrics
from xmoco.losses.neighbours import mean_shift, nearest
from xmoco.methods.base import NeighbourMethod, query_and_key_views
from xmoco.task import StepOutput, Values


class MSF(NeighbourMethod):
    title = "MSF"

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.keys_at_once = config.train.batch // config.train.accumulate

    @staticmethod
    def view_groups(config: Config) -> tuple[ViewGroup, ...]:
        return query_and_key_views(config, ("query view",), ("key view",))

    def forward(
        self, views: Sequence[Tensor], at: Values, with_metrics: bool = False
    ) -> StepOutput:
        (q,), (k,) = self.queries_and_keys(views[:1], views[1:])
        (p,) = self.run.encode(self.predictor, [q])
        k = F.normalize(k, dim=1)
        if self.training:  # before the search: a key is its own nearest neighbour
            self.bank.enqueue(k)
        loss = mean_shift(p, nearest(k, self.bank.keys, self.settings.neighbours))
        return StepOutput(loss, {}, feature_metrics(F.normalize(q)) if with_metrics else {})

    def warnings(self, images: int) -> list[str]:
        found = super().warnings(images)
        if self.bank.length < self.keys_at_once:
            found.append(
                f"a bank of {self.bank.length} keys cannot hold the {self.keys_at_once} that enter "
                "it at once, so not every key is among its neighbours: raise bank_length"
            )
        return found
