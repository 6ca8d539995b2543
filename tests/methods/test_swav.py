"""SwAV as a whole: six crops against the published loop, prototypes, and the queue."""

import copy
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.testing import assert_close
from toys import (
    EPOCH,
    PLAIN,
    assert_same_state,
    built,
    six_views,
    train,
    trainable,
    two_views,
    values,
)

from helpers import TINY_SPLIT
from xmoco.config import Config, InputConfig, ModelConfig
from xmoco.config.methods import SwAVConfig
from xmoco.methods.swav import SwAV
from xmoco.schedules import Clock, ScheduledValues

TINY = SwAVConfig(prototypes=7)
QUEUE = 32  # of two batches


def swav(model: ModelConfig = PLAIN, seed: int = 0, **options: Any) -> SwAV:
    method = built(TINY.model_copy(update=options), model, seed)
    assert isinstance(method, SwAV)
    return method


def published_codes(scores: Tensor, epsilon: float = 0.05, iterations: int = 3) -> Tensor:
    Q = (scores.detach().double() / epsilon).exp().T
    Q = Q / Q.sum()
    K, B = Q.shape
    for _ in range(iterations):
        Q = Q / Q.sum(dim=1, keepdim=True) / K
        Q = Q / Q.sum(dim=0, keepdim=True) / B
    return (Q * B).T


def published_loss(
    z: list[Tensor], prototypes: Tensor, queue: list[Tensor] | None = None
) -> Tensor:
    """Of the features of all views, the two full ones first."""
    scores = [features.double() @ prototypes.double().T for features in z]
    loss = torch.zeros((), dtype=torch.float64)
    for full in (0, 1):
        rows = scores[full]
        if queue is not None:
            rows = torch.cat([queue[full].double() @ prototypes.double().T, rows])
        q = published_codes(rows)[-len(z[0]) :]
        others = [view for view in range(len(z)) if view != full]
        for view in others:
            log_p = (scores[view] / 0.1).log_softmax(dim=1)
            loss = loss - (q * log_p).sum(dim=1).mean() / len(others)
    return loss / 2


@pytest.mark.parametrize("crops", [0, 4])
@pytest.mark.parametrize("with_queue", [False, True])
def test_a_step_is_the_published_one(crops: int, with_queue: bool) -> None:
    """Loss, gradients of encoder and prototypes: two views or six, a full queue or none."""
    options = {"queue_length": QUEUE, "queue_from_epoch": 0.0} if with_queue else {}
    method = swav(local_crops=crops, **options)
    views_of = six_views if crops else two_views
    queue = None
    if with_queue:
        for step in (1, 2):
            method(views_of(step), values(method))
        assert method.queue is not None
        queue = [method.queue.source.clone(), method.queue.target.clone()]
    encoder = copy.deepcopy(method.encoder)
    prototypes = method.prototypes.weight.detach().clone().requires_grad_()
    loss = method(views_of(0), values(method)).loss
    expected = published_loss([encoder(view) for view in views_of(0)], prototypes, queue)
    assert_close(loss.double(), expected, rtol=1e-4, atol=1e-5)
    loss.backward()
    expected.backward()
    assert_close(method.prototypes.weight.grad, prototypes.grad, rtol=1e-3, atol=1e-5)
    for mine, theirs in zip(method.encoder.parameters(), encoder.parameters(), strict=True):
        assert_close(mine.grad, theirs.grad, rtol=1e-3, atol=1e-4)


def test_six_crops_come_in_two_groups() -> None:
    config = Config(
        input=InputConfig(size=32),
        method=SwAVConfig(local_crops=4, local_size=16, local_scale=(0.1, 0.3)),
    )
    full, small = SwAV.view_groups(config)
    assert full.names == ("view 1", "view 2")
    assert small.names == tuple(f"small view {number}" for number in (1, 2, 3, 4))
    assert (full.input.size, small.input.size) == (32, 16)
    assert full.augmentation == config.views
    assert small.augmentation == config.views.model_copy(update={"crop_scale": (0.1, 0.3)})
    assert (small.input.mean, small.input.std) == (config.input.mean, config.input.std)
    (only,) = SwAV.view_groups(Config(method=SwAVConfig()))
    assert only.names == ("view 1", "view 2")


def test_small_views_that_are_not_smaller_are_told() -> None:
    config = Config(input=InputConfig(size=32), model=PLAIN)
    for size, warned in ((16, False), (96, True)):
        settings = TINY.model_copy(update={"local_crops": 2, "local_size": size})
        warnings = SwAV(config.model_copy(update={"method": settings})).warnings(images=100)
        assert [("local_size" in warning) for warning in warnings] == [True] * warned
    assert swav().warnings(images=100) == []


@pytest.mark.parametrize("model", [TINY_SPLIT, PLAIN], ids=["split", "plain"])
def test_six_crops_are_stacked_size_by_size(model: ModelConfig) -> None:
    """What suits a GPU computes the same: two views in one pass, four small ones in another."""
    stacked, apart = (swav(model, local_crops=4, queue_length=24) for _ in range(2))
    for method in (stacked, apart):
        method.encoder.double()
    stacked.optimize_for(torch.device("cuda"))
    passes: list[tuple[int, ...]] = []
    stacked.encoder.backbone.register_forward_pre_hook(
        lambda _, images: passes.append(tuple(images[0].shape))
    )
    assert_close(train(stacked, range(3)), train(apart, range(3)), rtol=1e-6, atol=1e-6)
    assert passes[:2] == [(32, 3, 8, 8), (64, 3, 4, 4)]
    for name, value in apart.state_dict().items():
        assert_close(stacked.state_dict()[name], value, rtol=1e-3, atol=1e-5)


def test_six_crops_learn_and_go_on_from_their_state() -> None:
    method = swav(local_crops=4, queue_length=24, queue_from_epoch=1.0)
    losses = train(method, range(23))
    assert sum(losses[-3:]) < 0.95 * sum(losses[:3])
    restored = swav(seed=1, local_crops=4, queue_length=24, queue_from_epoch=1.0)
    restored.load_state_dict(method.state_dict())
    assert train(method, range(23, 26)) == train(restored, range(23, 26))
    assert_same_state(restored, method.state_dict())


# Prototypes


def moves(method: SwAV, optimiser: torch.optim.Optimizer, steps: range) -> list[Tensor]:
    """The prototypes after each step."""
    found = []
    for step in steps:
        at = values(method, step)
        optimiser.zero_grad()
        method(two_views(step), at).loss.backward()
        method.before_update(at)
        optimiser.step()
        method.after_update(at)
        found.append(method.prototypes.weight.detach().clone())
    return found


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_prototypes_stay_for_an_epoch_then_move_and_are_always_of_unit_length(kind: str) -> None:
    """Whatever weight decay and momentum do meanwhile."""
    method = swav(freeze_prototypes_epochs=1.0)
    learned = trainable(method).values()
    optimiser: torch.optim.Optimizer = (
        torch.optim.SGD(learned, lr=0.1, momentum=0.9, weight_decay=0.01)
        if kind == "sgd"
        else torch.optim.AdamW(learned, lr=0.01, weight_decay=0.1)
    )
    start = method.prototypes.weight.detach().clone()
    history = [start, *moves(method, optimiser, range(2 * EPOCH))]
    for prototypes in history:
        assert_close(prototypes.norm(dim=1), torch.ones(7))
    for step, (before, after) in enumerate(pairwise(history)):
        same = torch.allclose(before, after, rtol=0, atol=1e-6)
        assert same == (step < EPOCH), step
    assert_close(history[EPOCH], start, rtol=0, atol=1e-6)


def test_the_encoder_learns_while_prototypes_wait() -> None:
    method = swav(freeze_prototypes_epochs=1.0)
    before = method.encoder.head[-1].weight.clone()
    train(method, range(1))
    assert not torch.equal(method.encoder.head[-1].weight, before)


def test_prototypes_need_not_wait() -> None:
    method = swav(freeze_prototypes_epochs=0.0)
    before = method.prototypes.weight.detach().clone()
    train(method, range(1))
    assert not torch.allclose(method.prototypes.weight, before, atol=1e-6)


# The queue


def features_of(method: SwAV, views: list[Tensor]) -> list[Tensor]:
    encoder = copy.deepcopy(method.encoder)
    return [encoder(view).detach() for view in views]


def test_the_queue_counts_once_it_is_full_and_its_epoch_has_come() -> None:
    """Two batches fill it; its epoch, the third, begins at step 8."""
    method = swav(queue_length=QUEUE, queue_from_epoch=2.0)
    early = swav(queue_length=QUEUE, queue_from_epoch=0.0)
    never = swav()
    for step in range(2 * EPOCH + 2):
        loss, of_early, without = (
            model(two_views(step), values(model, step)).loss for model in (method, early, never)
        )
        assert torch.isclose(loss, without, rtol=1e-5) == (step < 2 * EPOCH), step
        assert torch.isclose(of_early, without, rtol=1e-5) == (step < 2), step


def test_the_queue_holds_past_features_of_both_views_without_gradient() -> None:
    method = swav(queue_length=QUEUE)
    assert method.queue is not None
    expected: list[list[Tensor]] = []
    for step in range(2):
        expected.append(features_of(method, two_views(step)))
        method(two_views(step), values(method, step)).loss.backward()
    for side, held in enumerate((method.queue.source, method.queue.target)):
        assert_close(held, torch.cat([features[side] for features in expected]))
        assert not held.requires_grad
        assert_close(held, F.normalize(held, dim=1))


@pytest.mark.parametrize("step", [0, EPOCH, 3 * EPOCH])
def test_scheduled_numbers_may_be_on_the_device(step: int) -> None:
    """As a replayed CUDA graph reads them: the same loss, the same gradients."""
    options: dict[str, Any] = {"queue_length": 16, "queue_from_epoch": 2.0}
    on_host, on_device = swav(**options), swav(**options)
    for method, device in ((on_host, None), (on_device, torch.device("cpu"))):
        at = ScheduledValues(method.schedules(), device).at(Clock(step, 10 * EPOCH, EPOCH))
        for number in (0, 1):
            method.zero_grad()
            method(two_views(number), at).loss.backward()
            method.before_update(at)
    for mine, theirs in zip(on_device.parameters(), on_host.parameters(), strict=True):
        assert_close(mine.grad, theirs.grad)
    gradient = on_host.prototypes.weight.grad
    assert gradient is not None
    assert gradient.any() == (step >= EPOCH)
