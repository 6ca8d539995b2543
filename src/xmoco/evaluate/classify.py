"""Training a classifier on a backbone: linear (the backbone is frozen) or end to end.

A protocol says how long, with which rates and on what course; ``train_classifier`` follows it in
the loop that pre-training has, and ``class_scores`` lets the result judge other images.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from xmoco.config import AugmentationConfig, InputConfig
from xmoco.config.optimizers import SGDConfig
from xmoco.data import Batch, ImageSet, Unreadable, in_order
from xmoco.data.batches import Progress
from xmoco.data.streaming import sent
from xmoco.data.views import ViewGroup, central, views_of
from xmoco.errors import UserError
from xmoco.fabric import Fabric
from xmoco.losses.labels import label_loss
from xmoco.nn.backbones import feature_size
from xmoco.task import Moment, ParamGroup, StepOutput, Task, Values
from xmoco.train.in_folder import OnStep, StepReporter, train_in_folder
from xmoco.train.loop import Plan

MOMENTUM = 0.9
HEAD_STD = 0.01
LEAST_BATCH = 16
"""To so few, batches shrink for the sake of steps: of fewer images, batch norm knows too little,
and the rates are not made for them."""
TEST_BATCH = 256
CROPS_AND_FLIPS = AugmentationConfig(crop_scale=(0.08, 1.0), jitter=0.0, grey=0.0, blur=0.0)


@dataclass(frozen=True)
class TrainingProtocol(ABC):
    """Settings of SGD. ``backbone_rate`` 0 means frozen: the backbone stays in eval mode and gets
    no gradients."""

    name: str
    batch: int
    head_rate: float
    backbone_rate: float
    weight_decay: float

    nesterov = False

    @property
    def frozen(self) -> bool:
        return self.backbone_rate == 0

    def batch_for(self, images: int) -> int:
        """How many of so many images make a batch."""
        return min(self.batch, images)

    @abstractmethod
    def total_steps(self, steps_per_epoch: int, /) -> int: ...

    @abstractmethod
    def factor(self, done: float) -> float:
        """What the rates are multiplied with when a share of the course, 0 to 1, is done."""


@dataclass(frozen=True)
class EpochProtocol(TrainingProtocol):
    """A number of epochs; the rates fall by ``decay`` at the ``milestones`` (epochs)."""

    epochs: int
    milestones: tuple[int, ...]
    decay: float
    least_steps: int = 1  # of an epoch: of few images, smaller batches are made

    def batch_for(self, images: int) -> int:
        fewest = min(LEAST_BATCH, self.batch, images)
        return max(2, fewest, min(self.batch, images // self.least_steps))

    def total_steps(self, steps_per_epoch: int, /) -> int:
        return self.epochs * steps_per_epoch

    def factor(self, done: float) -> float:
        return self.decay ** sum(done >= milestone / self.epochs for milestone in self.milestones)

    def changed(
        self,
        epochs: int | None = None,
        batch: int | None = None,
        head_rate: float | None = None,
        backbone_rate: float | None = None,
    ) -> "EpochProtocol":
        """The same course with other settings, where they are given; its name says which."""
        now, named = self, list[str]()
        if epochs is not None and epochs != self.epochs:
            milestones = tuple(round(m * epochs / self.epochs) for m in self.milestones)
            now = replace(now, epochs=epochs, milestones=milestones)
            named.append("1 epoch" if epochs == 1 else f"{epochs} epochs")
        if batch is not None:  # of few images, too, no smaller one is made
            now = replace(now, batch=batch, least_steps=1)
            named.append(f"batch {batch}")
        if head_rate is not None and head_rate != self.head_rate:
            now = replace(now, head_rate=head_rate)
            named.append(f"head rate {head_rate:g}")
        if backbone_rate is not None and backbone_rate != self.backbone_rate:
            now = replace(now, backbone_rate=backbone_rate)
            named.append(f"backbone rate {backbone_rate:g}")
        return replace(now, name=", ".join([self.name, *named])) if named else self


@dataclass(frozen=True)
class CosineProtocol(TrainingProtocol):
    """A number of steps with Nesterov's momentum; the rates fall to 0 along a half cosine."""

    steps: int

    nesterov = True

    def total_steps(self, _steps_per_epoch: int, /) -> int:
        return self.steps

    def factor(self, done: float) -> float:
        return (1 + math.cos(math.pi * done)) / 2


LINEAR = {
    "paper": EpochProtocol("linear (paper)", 512, 60.0, 0.0, 1e-4, 100, (60, 80), 0.1),
    "moco": EpochProtocol("linear (MoCo)", 256, 30.0, 0.0, 0.0, 100, (60, 80), 0.1),
}
# At 1 % of the labels of a small set, batches of 256 would leave hardly a step to an epoch.
FINETUNE = EpochProtocol("fine-tune", 256, 0.2, 0.01, 0.0, 20, (12, 16), 0.2, least_steps=20)


class Classifier(Task):
    """A linear head on a backbone, trained on random resized crops and flips.

    The loss is cross entropy or, where an image may be of several classes, the binary one of each
    class. A frozen backbone stays in eval mode and gets no gradients.
    """

    def __init__(
        self,
        backbone: nn.Module,
        classes: int,
        protocol: TrainingProtocol,
        input: InputConfig,
        seed: int,
    ) -> None:
        super().__init__()
        self.title = protocol.name
        self.protocol = protocol
        self.crops = ViewGroup(("crop",), CROPS_AND_FLIPS, input)
        self.backbone = backbone.requires_grad_(not protocol.frozen)
        torch.manual_seed(seed)
        self.head = nn.Linear(feature_size(backbone), classes)
        nn.init.normal_(self.head.weight, std=HEAD_STD)
        nn.init.zeros_(self.head.bias)

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        self.backbone.train(mode and not self.protocol.frozen)
        return self

    def param_groups(self) -> list[ParamGroup]:
        groups = [ParamGroup(list(self.head.parameters()), self.protocol.head_rate)]
        if not self.protocol.frozen:
            tuned = list(self.backbone.parameters())
            groups.append(ParamGroup(tuned, self.protocol.backbone_rate))
        return groups

    def inputs(self, batch: Batch, moment: Moment) -> Sequence[Tensor]:
        assert batch.labels is not None
        crops = views_of(
            batch.images,
            batch.sizes,
            [self.crops],
            seed=moment.seed,
            step=moment.step,
            batch=moment.batch,
            rows=moment.rows,
        )
        return [*crops, sent(batch.labels, batch.images.device)]

    def forward(
        self,
        inputs: Sequence[Tensor],
        at: Values,  # noqa: ARG002
        with_metrics: bool = False,  # noqa: ARG002
    ) -> StepOutput:
        images, labels = inputs
        features = self.backbone(images)
        with torch.autocast(features.device.type, enabled=False):
            loss = label_loss(self.head(features.float()), labels)
        return StepOutput(loss, {}, {})


def train_classifier(
    backbone: nn.Module,
    train: ImageSet,
    protocol: TrainingProtocol,
    folder: Path,
    settings: Mapping[str, Any],
    *,
    input: InputConfig,
    fabric: Fabric,
    seed: int = 0,
    readers: int = 8,
    command: str = "the same call",
    on_step: OnStep | None = None,
    say: Callable[[str], None] | None = None,
) -> Classifier:
    """A classifier trained as the protocol says, in a run folder as pre-training has one.

    The same call goes on where it was interrupted, and finds a finished classifier again;
    ``settings`` are what must not have changed meanwhile. ``command`` is what a person is told to
    go on with. Fine-tuning changes the backbone that is given; a frozen one is checked to be as it
    was. With several processes, each has batch statistics of its own while a backbone is tuned;
    those of the first are kept.
    """
    batch = _batch(train, protocol, fabric.world_size)
    classifier = Classifier(backbone, len(train.classes or ()), protocol, input, seed)
    before = _copy(backbone) if protocol.frozen else None
    train_in_folder(
        classifier,
        train,
        lambda steps_per_epoch: _plan(protocol, batch, steps_per_epoch, seed),
        folder,
        settings,
        what="classifier",
        batch=batch,
        seed=seed,
        fabric=fabric,
        readers=readers,
        command=command,
        say=say,
        reporter=lambda training: StepReporter(training, on_step),
    )
    if before is not None:
        _check_unchanged(backbone, before)
    return classifier


def _batch(train: ImageSet, protocol: TrainingProtocol, processes: int) -> int:
    """Images a step, if these can be trained on at all."""
    if train.labels is None or train.classes is None:
        raise UserError(f"{train.name} has no labels: a classifier needs them.")
    if len(train) < 2:
        raise UserError(f"{train.name} has a single image: a classifier needs at least two.")
    batch = protocol.batch_for(len(train))
    if batch % processes:
        raise UserError(
            f"{protocol.name} has batches of {batch} images here, which {processes} processes "
            "cannot share equally: give --devices a number that divides it."
        )
    return batch


def _plan(protocol: TrainingProtocol, batch: int, steps_per_epoch: int, seed: int) -> Plan:
    optim = SGDConfig(
        learning_rate=1.0,  # of which the rates of head and backbone are multiples
        sgd_momentum=MOMENTUM,
        weight_decay=protocol.weight_decay,
        nesterov=protocol.nesterov,
    )
    return Plan(
        batch=batch,
        total_steps=protocol.total_steps(steps_per_epoch),
        seed=seed,
        optim=optim,
        learning_rate=lambda clock: protocol.factor(clock.done),
        peak_rate=optim.learning_rate,
    )


@torch.no_grad()
def class_scores(
    backbone: nn.Module,
    head: nn.Module,
    images: ImageSet,
    *,
    input: InputConfig,
    device: torch.device,
    bf16: bool = False,
    readers: int = 8,
    border: bool = True,
    unreadable: Unreadable | None = None,
    on_progress: Progress | None = None,
) -> tuple[Tensor, Tensor]:
    """Scores (n, classes) of the central views, and the labels, both on the device.

    ``border`` is that of ``central``.
    """
    backbone.eval()
    scores, labels = [], []
    batches = in_order(images, TEST_BATCH, device, readers=readers, unreadable=unreadable)
    with closing(batches):
        for batch in batches:
            pixels = central(batch.images, batch.sizes, input.central_size, input, border=border)
            with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
                features = backbone(pixels)
            scores.append(head(features.float()))
            if batch.labels is None:
                raise UserError(f"{images.name} has no labels to judge by.")
            labels.append(batch.labels)
            if on_progress is not None:
                on_progress(sum(map(len, labels)), len(images))
    return torch.cat(scores), torch.cat(labels).to(device)


def _copy(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in module.state_dict().items()}


def _check_unchanged(module: nn.Module, before: dict[str, Tensor]) -> None:
    now = {name: value.to(before[name].device) for name, value in module.state_dict().items()}
    changed = [name for name, value in now.items() if not torch.equal(value, before[name])]
    if changed:
        raise RuntimeError(f"the frozen backbone changed in training: {changed[:3]}")
