"""Supervised: a linear classifier on the backbone learns labels, the upper reference."""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from xmoco.config import Config
from xmoco.data.imagesets import ImageSet
from xmoco.data.streaming import Batch
from xmoco.data.views import ViewGroup
from xmoco.errors import UserError
from xmoco.losses.labels import label_loss
from xmoco.losses.metrics import feature_metrics
from xmoco.methods.base import Method
from xmoco.nn.backbones import feature_size
from xmoco.nn.encoder import Encoder, checked_backbone
from xmoco.task import StepOutput, Values


class Supervised(Method):
    title = "Supervised"
    uses_labels = True
    classifier: nn.Linear
    several: bool
    """Whether an image may be of several classes."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        backbone = checked_backbone(config.model, config.input)
        self.encoder = Encoder(backbone, nn.Identity(), unit_length=False)
        self.run.prepare(self.encoder)
        self.run.notes.append(
            "a linear classifier takes the place of the head: head_layers, head_hidden and "
            "feature_size do nothing"
        )

    @staticmethod
    def view_groups(config: Config) -> tuple[ViewGroup, ...]:
        return (ViewGroup(("view",), config.views, config.input),)

    def prepare_for(self, images: ImageSet) -> None:
        if images.classes is None or images.labels is None:
            raise UserError(
                f"{images.name} has no labels, from which method=supervised learns: put images "
                "into one folder per class, or name their classes in labels.csv, and leave the "
                "setting labels at auto."
            )
        if len(images.classes) < 2:
            raise UserError(f"{images.name} has a single class: there is nothing to tell apart.")
        self.classifier = nn.Linear(feature_size(self.encoder.backbone), len(images.classes))
        self.several = images.multi_label

    def beside_views(self, batch: Batch) -> list[Tensor]:
        assert batch.labels is not None
        return [batch.labels]

    def forward(
        self, views: Sequence[Tensor], at: Values, with_metrics: bool = False
    ) -> StepOutput:
        view, labels = views
        (features,) = self.run.encode(self.encoder, [view])
        with torch.autocast(features.device.type, enabled=False):
            loss = label_loss(self.classifier(features), labels)
        return StepOutput(loss, {}, feature_metrics(F.normalize(features)) if with_metrics else {})

    def reference_levels(self) -> dict[str, float]:
        """The cross entropy of a guess among the classes, or of being of one at all."""
        return {"chance": math.log(2 if self.several else self.classifier.out_features)}
