"""Training a classifier on a backbone: linear (the backbone is frozen) or fine-tuned end to end."""

import dataclasses
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from xmoco.config import ViewsConfig
from xmoco.data import Batches, ImageSet, in_order
from xmoco.data.views import central, draw, render
from xmoco.errors import UserError
from xmoco.nn.backbones import feature_size

MOMENTUM = 0.9
HEAD_STD = 0.01
TEST_BATCH = 256


@dataclass(frozen=True)
class Protocol:
    """Settings of SGD whose rates fall by ``decay`` at the ``milestones`` (epochs).

    ``backbone_rate`` 0 means frozen: the backbone stays in eval mode and gets no gradients.
    """

    name: str
    epochs: int
    batch: int
    head_rate: float
    backbone_rate: float
    weight_decay: float
    milestones: tuple[int, ...]
    decay: float

    @property
    def frozen(self) -> bool:
        return self.backbone_rate == 0

    def factor(self, epoch: int) -> float:
        """What the rates are multiplied with in ``epoch``, counted from 0."""
        return self.decay ** sum(epoch >= milestone for milestone in self.milestones)

    def shortened(self, epochs: int | None) -> "Protocol":
        """The same course in fewer epochs; it says so in its name."""
        if epochs is None or epochs == self.epochs:
            return self
        milestones = tuple(round(m * epochs / self.epochs) for m in self.milestones)
        name = f"{self.name}, {epochs} epochs"
        return dataclasses.replace(self, name=name, epochs=epochs, milestones=milestones)


LINEAR = {
    "paper": Protocol("linear (paper)", 100, 512, 60.0, 0.0, 1e-4, (60, 80), 0.1),
    "moco": Protocol("linear (MoCo)", 100, 256, 30.0, 0.0, 0.0, (60, 80), 0.1),
}
FINETUNE = Protocol("fine-tune", 20, 256, 0.2, 0.01, 0.0, (12, 16), 0.2)


@dataclass(frozen=True)
class Accuracy:
    """In percent. Top-5 means little where there are hardly more classes than five."""

    top1: float
    top5: float


def train_classifier(
    backbone: nn.Module,
    train: ImageSet,
    test: ImageSet,
    protocol: Protocol,
    *,
    views: ViewsConfig,
    device: torch.device,
    bf16: bool = False,
    seed: int = 0,
    readers: int = 8,
    on_step: Callable[[int, int, float], None] | None = None,
) -> Accuracy:
    """Accuracy on ``test`` of a classifier trained on ``train``.

    Training sees random resized crops and flips, testing the central view. Fine-tuning changes the
    backbone that is given; a frozen one is checked to be as it was. ``views`` tells size, mean and
    std. ``on_step`` is told the steps done, their total and the loss, now and then.
    """
    classes = train.classes
    if train.labels is None or classes is None or test.labels is None:
        raise UserError(f"{train.name} has no labels: a classifier needs them.")
    batch = min(protocol.batch, len(train))
    crops = ViewsConfig(
        size=views.size, mean=views.mean, std=views.std, crop_scale=(0.08, 1.0),
        jitter=0.0, grey=0.0, blur=0.0,
    )  # fmt: skip
    backbone.to(device).to(memory_format=torch.channels_last)
    before = _copy(backbone) if protocol.frozen else None
    backbone.train(not protocol.frozen)
    torch.manual_seed(seed)
    head = nn.Linear(feature_size(backbone), len(classes)).to(device)
    nn.init.normal_(head.weight, std=HEAD_STD)
    nn.init.zeros_(head.bias)
    groups = [{"params": list(head.parameters()), "peak": protocol.head_rate}]
    if not protocol.frozen:
        groups.append({"params": list(backbone.parameters()), "peak": protocol.backbone_rate})
    optimizer = torch.optim.SGD(
        groups, lr=1.0, momentum=MOMENTUM, weight_decay=protocol.weight_decay
    )
    batches = Batches(train, batch=batch, seed=seed, device=device, readers=readers)
    total = protocol.epochs * batches.steps_per_epoch
    with closing(batches.from_step(0)) as stream:
        for step in range(total):
            for group in optimizer.param_groups:
                group["lr"] = group["peak"] * protocol.factor(step // batches.steps_per_epoch)
            images = next(stream)
            pixels = render(
                images.images, images.sizes, draw(crops, batch, seed, step, 0), crops
            ).contiguous(memory_format=torch.channels_last)
            precision = torch.autocast(device.type, torch.bfloat16, enabled=bf16)
            with precision, torch.set_grad_enabled(not protocol.frozen):
                features = backbone(pixels)
            assert images.labels is not None
            loss = F.cross_entropy(head(features.float()), images.labels.to(device))
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            if on_step is not None and (step % 20 == 19 or step + 1 == total):
                value = float(loss.detach())
                if value != value:
                    raise UserError(f"the classifier's loss is no longer a number at step {step}.")
                on_step(step + 1, total, value)
    if before is not None:
        _check_unchanged(backbone, before)
    return _accuracy(backbone.eval(), head, test, views, device, bf16, readers)


@torch.no_grad()
def _accuracy(
    backbone: nn.Module,
    head: nn.Module,
    test: ImageSet,
    views: ViewsConfig,
    device: torch.device,
    bf16: bool,
    readers: int,
) -> Accuracy:
    top1 = top5 = 0
    for batch in in_order(test, TEST_BATCH, device, readers=readers):
        pixels = central(batch.images, batch.sizes, views.size, views)
        with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
            features = backbone(pixels)
        scores: Tensor = head(features.float())
        best = scores.topk(min(5, scores.shape[1]), dim=1).indices
        assert batch.labels is not None
        right = best == batch.labels.to(device)[:, None]
        top1 += int(right[:, 0].sum())
        top5 += int(right.any(dim=1).sum())
    return Accuracy(100 * top1 / len(test), 100 * top5 / len(test))


def _copy(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in module.state_dict().items()}


def _check_unchanged(module: nn.Module, before: dict[str, Tensor]) -> None:
    changed = [n for n, value in module.state_dict().items() if not torch.equal(value, before[n])]
    if changed:
        raise RuntimeError(f"the frozen backbone changed in training: {changed[:3]}")
