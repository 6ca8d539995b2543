"""Training a classifier on a backbone: linear (the backbone is frozen) or end to end.

A protocol says how long, with which rates and on what course; ``train_classifier`` follows it, and
``class_scores`` lets the result judge other images.
"""

import dataclasses
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from itertools import islice

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from xmoco.config import AugmentationConfig, InputConfig
from xmoco.data import Batch, Batches, ImageSet, Unreadable, in_order
from xmoco.data.batches import Progress
from xmoco.data.views import ViewGroup, central, views_of
from xmoco.errors import UserError
from xmoco.nn.backbones import feature_size

MOMENTUM = 0.9
HEAD_STD = 0.01
TEST_BATCH = 256
CROPS_AND_FLIPS = AugmentationConfig(crop_scale=(0.08, 1.0), jitter=0.0, grey=0.0, blur=0.0)
PIXELS_AT_ONCE = 256 * 224**2
"""What a frozen backbone looks at together: MoCo's batch of photographs, or many small ones."""
MOST_AT_ONCE = 16
"""Batches."""

OnStep = Callable[[int, int, float | None], None]
"""Told the steps done, their total and the loss, now and then; before the first step, no loss."""
TELL_AFTER = 2.0
"""Seconds: where steps are slow, each is told of."""


@dataclass(frozen=True)
class ClassifierProtocol(ABC):
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
class EpochProtocol(ClassifierProtocol):
    """A number of epochs; the rates fall by ``decay`` at the ``milestones`` (epochs)."""

    epochs: int
    milestones: tuple[int, ...]
    decay: float
    least_steps: int = 1  # of an epoch: of few images, smaller batches are made

    def batch_for(self, images: int) -> int:
        return max(2, min(self.batch, images // self.least_steps))

    def total_steps(self, steps_per_epoch: int, /) -> int:
        return self.epochs * steps_per_epoch

    def factor(self, done: float) -> float:
        return self.decay ** sum(done >= milestone / self.epochs for milestone in self.milestones)

    def shortened(self, epochs: int | None) -> "EpochProtocol":
        """The same course in fewer epochs; it says so in its name."""
        if epochs is None or epochs == self.epochs:
            return self
        milestones = tuple(round(m * epochs / self.epochs) for m in self.milestones)
        name = f"{self.name}, {epochs} epochs"
        return dataclasses.replace(self, name=name, epochs=epochs, milestones=milestones)


@dataclass(frozen=True)
class CosineProtocol(ClassifierProtocol):
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


def train_classifier(
    backbone: nn.Module,
    train: ImageSet,
    protocol: ClassifierProtocol,
    *,
    input: InputConfig,
    device: torch.device,
    bf16: bool = False,
    seed: int = 0,
    readers: int = 8,
    on_step: OnStep | None = None,
    on_unreadable: Callable[[Unreadable], None] | None = None,
) -> nn.Linear:
    """The head of a classifier trained on random resized crops and flips of ``train``.

    Its loss is cross entropy or, where an image may be of several classes, the binary one of each
    class. Fine-tuning changes the backbone that is given; a frozen one is checked to be as it was.
    ``on_unreadable`` is told at the end which images could not
    be read.
    """
    if train.labels is None or train.classes is None:
        raise UserError(f"{train.name} has no labels: a classifier needs them.")
    if len(train) < 2:
        raise UserError(f"{train.name} has a single image: a classifier needs at least two.")
    batch = protocol.batch_for(len(train))
    crops = ViewGroup(("crop",), CROPS_AND_FLIPS, input)
    backbone.to(device).to(memory_format=torch.channels_last)
    before = _copy(backbone) if protocol.frozen else None
    backbone.train(not protocol.frozen)
    torch.manual_seed(seed)
    head = nn.Linear(feature_size(backbone), len(train.classes)).to(device)
    nn.init.normal_(head.weight, std=HEAD_STD)
    nn.init.zeros_(head.bias)
    groups = [{"params": list(head.parameters()), "peak": protocol.head_rate}]
    if not protocol.frozen:
        groups.append({"params": list(backbone.parameters()), "peak": protocol.backbone_rate})
    optimizer = torch.optim.SGD(
        groups, lr=1.0, momentum=MOMENTUM, weight_decay=protocol.weight_decay,
        nesterov=protocol.nesterov,
    )  # fmt: skip
    batches = Batches(train, batch=batch, seed=seed, device=device, readers=readers)
    total = protocol.total_steps(batches.steps_per_epoch)

    def see(images: Batch, step: int) -> Tensor:
        (views,) = views_of(images.images, images.sizes, [crops], seed=seed, step=step, batch=batch)
        return views

    if on_step is not None:
        on_step(0, total, None)
    told = time.monotonic()
    with closing(batches.from_step(0)) as stream:
        at_once = _batches_at_once(batch, input.size, device) if protocol.frozen else 1
        steps = _seen(stream, see, total, at_once, backbone, protocol.frozen, bf16)
        for step, (features, labels) in enumerate(steps):
            for group in optimizer.param_groups:
                group["lr"] = group["peak"] * protocol.factor(step / total)
            loss = _loss(head(features.float()), labels.to(device))
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            late = time.monotonic() > told + TELL_AFTER
            if step % 20 == 19 or step + 1 == total or late:
                told = time.monotonic()
                value = float(loss.detach())
                if not math.isfinite(value):
                    raise DivergedError(
                        f"the classifier's loss is no longer a number at step {step + 1}."
                    )
                if on_step is not None:
                    on_step(step + 1, total, value)
    if before is not None:
        _check_unchanged(backbone, before)
    if on_unreadable is not None:
        on_unreadable(batches.unreadable)
    return head


def _batches_at_once(batch: int, size: int, device: torch.device) -> int:
    """A frozen backbone can look at several small batches together, which a GPU does sooner."""
    if device.type == "cpu":
        return 1
    return min(MOST_AT_ONCE, max(1, PIXELS_AT_ONCE // (batch * size**2)))


def _seen(
    stream: Iterator[Batch],
    see: Callable[[Batch, int], Tensor],
    total: int,
    at_once: int,
    backbone: nn.Module,
    frozen: bool,
    bf16: bool,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Features and labels of every step's batch, without gradients if the backbone is frozen."""
    for first in range(0, total, at_once):
        steps = range(first, min(first + at_once, total))
        views, labels = [], []
        for batch, step in zip(islice(stream, len(steps)), steps, strict=True):
            views.append(see(batch, step))  # whole images may be many times as large
            assert batch.labels is not None
            labels.append(batch.labels)
        pixels = torch.cat(views).contiguous(memory_format=torch.channels_last)
        precision = torch.autocast(pixels.device.type, torch.bfloat16, enabled=bf16)
        with precision, torch.set_grad_enabled(not frozen):
            features = backbone(pixels)
        yield from zip(features.chunk(len(steps)), labels, strict=True)


class DivergedError(UserError):
    """A rate was too high for this backbone and these images."""


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


def _loss(scores: Tensor, labels: Tensor) -> Tensor:
    if labels.ndim == 2:
        return F.binary_cross_entropy_with_logits(scores, labels.float())
    return F.cross_entropy(scores, labels)


def _copy(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in module.state_dict().items()}


def _check_unchanged(module: nn.Module, before: dict[str, Tensor]) -> None:
    changed = [n for n, value in module.state_dict().items() if not torch.equal(value, before[n])]
    if changed:
        raise RuntimeError(f"the frozen backbone changed in training: {changed[:3]}")
