"""SwAV: codes of a view over prototypes, balanced by optimal transport, told from other views."""

import math
from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from xmoco.config import Config
from xmoco.config.shared import PrototypesConfig
from xmoco.data.views import ViewGroup
from xmoco.losses.bank import SharedRing
from xmoco.losses.metrics import feature_metrics
from xmoco.losses.swav import codes, swapped_prediction
from xmoco.methods.base import Method, small_views, small_views_warnings
from xmoco.schedules import FromEpoch, Schedule
from xmoco.task import StepOutput, Values


class SwAV(Method):
    title = "SwAV"

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        assert isinstance(config.method, PrototypesConfig)
        self.settings = config.method
        self.encoder = self.build_encoder(config)
        size = config.model.feature_size
        self.prototypes = nn.Linear(size, self.settings.prototypes, bias=False)
        length = self.settings.queue_length
        self.queue = SharedRing(length, size) if length else None
        self._to_unit_length()

    @staticmethod
    def view_groups(config: Config) -> tuple[ViewGroup, ...]:
        """Two full views and, in multi-crop, some small ones."""
        return (*Method.view_groups(config), *small_views(config))

    def schedules(self) -> Mapping[str, Schedule]:
        return {
            "prototypes_learn": FromEpoch(self.settings.freeze_prototypes_epochs),
            "queue_counts": FromEpoch(self.settings.queue_from_epoch),
        }

    def forward(
        self, views: Sequence[Tensor], at: Values, with_metrics: bool = False
    ) -> StepOutput:
        z = self.run.encode(self.encoder, views)
        scores = [self.scores(features) for features in z]
        targets = [self.codes(scores[view], view, at) for view in (0, 1)]
        weights = self.view_weights(z, at)
        loss = swapped_prediction(scores, targets, self.settings.temperature, weights)
        if self.training and self.queue is not None:
            self.queue.enqueue(z[0], z[1])
        return StepOutput(loss, {}, feature_metrics(z[0]) if with_metrics else {})

    def view_weights(self, features: Sequence[Tensor], at: Values) -> Sequence[Tensor] | None:
        """How much every view of every image counts: all alike."""
        return None

    def scores(self, features: Tensor) -> Tensor:
        """Similarities to the prototypes, which are of unit length too."""
        with torch.autocast(features.device.type, enabled=False):
            return F.linear(features, self.prototypes.weight)

    @torch.no_grad()
    def codes(self, scores: Tensor, view: int, at: Values) -> Tensor:
        """Of a full view; the queue takes part when it is full and its time has come."""
        past, counts = None, None
        if self.queue is not None:
            past = self.scores(self.queue.own_rows[view])
            counts = self.queue.counts & (at["queue_counts"] > 0)
        return codes(
            scores,
            epsilon=self.settings.epsilon,
            iterations=self.settings.sinkhorn_iterations,
            past_scores=past,
            past_counts=counts,
        )

    def before_update(self, at: Values) -> None:
        """Prototypes stay where they are at first (by zero, not by none: a graph takes it too).

        Weight decay and momentum move them along themselves only, which their unit length undoes.
        """
        gradient = self.prototypes.weight.grad
        if gradient is not None:
            gradient.mul_(at["prototypes_learn"])

    def after_update(self, at: Values) -> None:
        self._to_unit_length()

    @torch.no_grad()
    def _to_unit_length(self) -> None:
        self.prototypes.weight.copy_(F.normalize(self.prototypes.weight, dim=1))

    def reference_levels(self) -> dict[str, float]:
        return {"chance": math.log(self.settings.prototypes)}

    def fill_levels(self) -> dict[str, float]:
        return {} if self.queue is None else {"queue": self.queue.fill}

    def warnings(self, images: int) -> list[str]:
        found = []
        if self.settings.queue_length > images:
            found.append(
                f"a queue of {self.settings.queue_length} is longer than the {images} images: "
                "lower queue_length"
            )
        return found + small_views_warnings(self.views)
