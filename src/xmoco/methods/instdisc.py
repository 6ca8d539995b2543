"""InstDisc: an image finds its own slot among those of all images, which keep their past looks."""

import math
from collections.abc import Sequence

from torch import Tensor

from xmoco.config import Config, InstDiscConfig
from xmoco.data.imagesets import ImageSet
from xmoco.data.streaming import Batch
from xmoco.data.views import ViewGroup
from xmoco.losses.instdisc import Slots, instance_loss
from xmoco.losses.metrics import feature_metrics
from xmoco.methods.base import Method
from xmoco.task import StepOutput, Values


class InstDisc(Method):
    title = "InstDisc"

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        assert isinstance(config.method, InstDiscConfig)
        self.settings = config.method
        self.encoder = self.build_encoder(config)
        self.slots = Slots(0, config.model.feature_size)

    @staticmethod
    def view_groups(config: Config) -> tuple[ViewGroup, ...]:
        return (ViewGroup(("view",), config.views, config.input),)

    def meet(self, images: ImageSet) -> None:
        self.slots = Slots(len(images), self.slots.rows.shape[1])

    def beside_views(self, batch: Batch) -> list[Tensor]:
        return [batch.indices]

    def forward(
        self, views: Sequence[Tensor], at: Values, with_metrics: bool = False
    ) -> StepOutput:
        view, positions = views
        (z,) = self.run.encode(self.encoder, [view])
        loss = instance_loss(z, positions, self.slots.rows, self.settings.temperature)
        if self.training:
            self.slots.update(positions, z, self.settings.slot_momentum)
        return StepOutput(loss, {}, feature_metrics(z) if with_metrics else {})

    def reference_levels(self) -> dict[str, float]:
        """The cross entropy of a guess among all images."""
        return {"chance": math.log(max(1, len(self.slots.rows)))}
