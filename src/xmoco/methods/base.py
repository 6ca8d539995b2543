"""What pre-training methods share: views of images, and encoders of which one backbone is kept."""

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from xmoco.config import Config, MomentumEncoderConfig
from xmoco.data.streaming import Batch
from xmoco.data.views import ViewGroup, views_of
from xmoco.losses.bank import KeyBanks
from xmoco.nn.encoder import Encoder, build_encoder, momentum_copy, momentum_update
from xmoco.nn.encoding import EncoderRunner
from xmoco.schedules import Schedule, rising
from xmoco.task import Moment, StepOutput, Task, Values


class Method(Task):
    """A way to learn from views of images without labels. ``encoder.backbone`` is what is kept."""

    hides_keys: ClassVar[bool] = False
    """Whether batch statistics must not tell a query which key is its own."""
    encoder: Encoder

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.views = self.view_groups(config)
        self.run = EncoderRunner(config.model)

    @staticmethod
    def view_groups(config: Config) -> tuple[ViewGroup, ...]:
        """The views a step is given, in this order: two alike unless a method wants others."""
        return (ViewGroup(("view 1", "view 2"), config.views, config.input),)

    def build_encoder(self, config: Config, unit_length: bool = True) -> Encoder:
        encoder = build_encoder(config.model, unit_length)
        self.run.prepare(encoder)
        return encoder

    def inputs(self, batch: Batch, moment: Moment) -> Sequence[Tensor]:
        return views_of(
            batch.images,
            batch.sizes,
            self.views,
            seed=moment.seed,
            step=moment.step,
            batch=moment.batch,
            rows=moment.rows,
        )

    @abstractmethod
    def forward(
        self, views: Sequence[Tensor], at: Values, with_metrics: bool = False
    ) -> StepOutput: ...

    def optimize_for(self, device: torch.device) -> None:
        self.run.optimize_for(device, self.encoder)


class MomentumMethod(Method):
    """An encoder f with gradients and a momentum encoder g without: g ← m·g + (1−m)·f."""

    def __init__(self, config: Config, unit_length: bool = True) -> None:
        super().__init__(config)
        assert isinstance(config.method, MomentumEncoderConfig)
        self.momentum = rising(config.method.key_momentum, config.method.key_momentum_end)
        self.encoder = self.build_encoder(config, unit_length)
        self.momentum_encoder = momentum_copy(self.encoder)

    def schedules(self) -> Mapping[str, Schedule]:
        return {"key_momentum": self.momentum}

    def optimize_for(self, device: torch.device) -> None:
        self.run.optimize_for(device, self.encoder, self.momentum_encoder)

    def queries_and_keys(self, views: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Features of every view, by f and by g."""
        return self.run.queries_and_keys(self.encoder, self.momentum_encoder, views)

    def after_update(self, at: Values) -> None:
        momentum_update(self.momentum_encoder, self.encoder, at["key_momentum"])


class BankMethod(MomentumMethod):
    """Queries of either side of an image meet the keys of the other, and banks of past keys."""

    hides_keys = True

    @property
    @abstractmethod
    def banks(self) -> KeyBanks: ...

    @staticmethod
    def view_groups(config: Config) -> tuple[ViewGroup, ...]:
        return (ViewGroup(("source view", "target view"), config.views, config.input),)

    def reference_levels(self) -> dict[str, float]:
        """The cross entropy of a guess among the positive and the keys of a bank."""
        return {"chance": math.log(self.banks.length + 1)}

    def fill_levels(self) -> dict[str, float]:
        return {"bank": self.banks.fill}

    def warnings(self, images: int) -> list[str]:
        if self.banks.length <= images:
            return []
        return [
            f"a bank of {self.banks.length} keys is larger than the {images} images, so an image "
            "meets itself as a negative; lower bank_length"
        ]
