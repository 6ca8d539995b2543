"""InstDisc: an image finds its own slot among those of all images, which keep their past looks."""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from xmoco.config import Config
from xmoco.config.methods import InstDiscConfig
from xmoco.data.imagesets import ImageSet
from xmoco.data.streaming import Batch
from xmoco.data.views import ViewGroup
from xmoco.losses.instdisc import Slots, slot_contrast
from xmoco.losses.metrics import feature_metrics, similarity_metrics
from xmoco.methods.base import Method
from xmoco.methods.ideas import build_ideas, ideas_schedules
from xmoco.schedules import Schedule
from xmoco.task import StepOutput, Values


class InstDisc(Method):
    title = "InstDisc"

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        assert isinstance(config.method, InstDiscConfig)
        self.settings = config.method
        self.ideas = build_ideas(config.method)
        self.encoder = self.build_encoder(config)
        self.slots = Slots(0, config.model.feature_size)

    @staticmethod
    def view_groups(config: Config) -> tuple[ViewGroup, ...]:
        """One; XMoCo's ideas compare two."""
        names = ("view 1", "view 2") if config.method.added else ("view",)
        return (ViewGroup(names, config.views, config.input),)

    def schedules(self) -> Mapping[str, Schedule]:
        return ideas_schedules(self.settings)

    def prepare_for(self, images: ImageSet) -> None:
        self.slots = Slots(len(images), self.slots.rows.shape[1])

    def beside_views(self, batch: Batch) -> list[Tensor]:
        return [batch.indices]

    def forward(
        self, views: Sequence[Tensor], at: Values, with_metrics: bool = False
    ) -> StepOutput:
        *views, positions = views
        z = self.run.encode(self.encoder, views)
        slots, temperature = self.slots.rows, self.settings.temperature
        contrasts = [slot_contrast(features, positions, slots, temperature) for features in z]
        metrics = feature_metrics(z[0]) if with_metrics else {}
        terms: dict[str, Tensor] = {}
        if self.ideas is None:
            loss = contrasts[0].infonce()
        else:
            P_s, P_t = contrasts
            if with_metrics:
                metrics |= similarity_metrics(P_s.log_p, P_t.log_p)
            both, terms = self.ideas.compare(P_s, P_t, at["consistency_weight"])
            loss = both / 2
        if self.training:
            self.slots.update(positions, torch.stack(z).mean(dim=0), self.settings.slot_momentum)
        return StepOutput(loss, terms, metrics)

    def reference_levels(self) -> dict[str, float]:
        """The cross entropy of a guess among all images."""
        return {"chance": math.log(max(1, len(self.slots.rows)))}
