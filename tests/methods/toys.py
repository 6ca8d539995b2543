"""What tests of methods share: a tiny encoder, images of four pixels, and the loop in ten lines."""

import torch
import torch.nn.functional as F
from torch import Tensor

from helpers import TINY_SPLIT
from xmoco.config import Config, MethodConfig, ModelConfig
from xmoco.methods import Method, build_method
from xmoco.schedules import Clock, ScheduledValues, Value

PLAIN = TINY_SPLIT.model_copy(update={"batch_norm": "plain"})
BATCH = 16
EPOCH, EPOCHS = 4, 10


def built(settings: MethodConfig, model: ModelConfig = TINY_SPLIT, seed: int = 0) -> Method:
    torch.manual_seed(seed)
    return build_method(Config(model=model, method=settings))


def two_views(step: int) -> list[Tensor]:
    """Two noisy looks at random images of 8×8, made of four large pixels."""
    generator = torch.Generator().manual_seed(step)
    images = F.interpolate(torch.randn(BATCH, 3, 2, 2, generator=generator), 8)
    return [images + 0.2 * torch.randn(images.shape, generator=generator) for _ in range(2)]


def six_views(step: int) -> list[Tensor]:
    """The same and four small ones, each of two of the large pixels."""
    generator = torch.Generator().manual_seed(1000 + step)
    full = two_views(step)
    small = [full[number % 2][:, :, 2:6, 2:6] for number in range(4)]
    return [
        *full,
        *(view + 0.2 * torch.randn(view.shape, generator=generator) for view in small),
    ]


def values(method: Method, step: int = 0) -> dict[str, Value]:
    """The scheduled values ``step`` steps into ten epochs of four."""
    return ScheduledValues(method.schedules()).at(Clock(step, EPOCHS * EPOCH, EPOCH))


def trainable(method: Method) -> dict[str, Tensor]:
    return {name: p for name, p in method.named_parameters() if p.requires_grad}


def train(method: Method, steps: range, rate: float = 0.05) -> list[float]:
    """What the loop does. (A momentum buffer would be the loop's to save; here there is none.)"""
    optimiser = torch.optim.SGD(trainable(method).values(), lr=rate)
    views_of = two_views if len(method.views) == 1 else six_views
    losses = []
    for step in steps:
        at = values(method, step)
        optimiser.zero_grad()
        precision = next(method.parameters()).dtype
        loss = method([view.to(precision) for view in views_of(step)], at).loss
        loss.backward()
        method.before_update(at)
        optimiser.step()
        method.after_update(at)
        losses.append(loss.item())
    return losses


def copied(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in state.items()}


def assert_same_state(one: Method, other: dict[str, Tensor]) -> None:
    """To the bit."""
    state = one.state_dict()
    assert state.keys() == other.keys()
    for name, value in other.items():
        assert torch.equal(state[name], value), name
