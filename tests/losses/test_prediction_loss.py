"""BYOL's loss and SimSiam's against their definitions, row by row."""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from xmoco.losses.prediction import negative_cosine, prediction_loss

Loss = Callable[[Tensor, Tensor], Tensor]


def byol_by_hand(prediction: Tensor, target: Tensor) -> Tensor:
    """Equation 2 of BYOL's paper: the squared distance of the normalised vectors, row by row."""
    distances = []
    for p, k in zip(prediction, target.detach(), strict=True):
        difference = p / p.square().sum().sqrt() - k / k.square().sum().sqrt()
        distances.append(difference.square().sum())
    return torch.stack(distances).mean()


def simsiam_by_hand(prediction: Tensor, target: Tensor) -> Tensor:
    """Equation 1 of SimSiam's paper, row by row."""
    products = [
        -(p * z).sum() / (p.square().sum() * z.square().sum()).sqrt()
        for p, z in zip(prediction, target.detach(), strict=True)
    ]
    return torch.stack(products).mean()


LOSSES = {
    "byol": (prediction_loss, byol_by_hand),
    "simsiam": (negative_cosine, simsiam_by_hand),
}
each_loss = pytest.mark.parametrize(("loss_of", "by_hand"), LOSSES.values(), ids=LOSSES)


def pair(count: int, size: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Of any length."""
    generator = torch.Generator().manual_seed(seed)
    p, k = 3 * torch.randn(2, count, size, dtype=torch.float64, generator=generator)
    return p.requires_grad_(), k.requires_grad_()


@each_loss
@given(count=st.integers(1, 9), size=st.integers(2, 8), seed=st.integers(0, 2**32))
@settings(max_examples=50, deadline=None)
def test_loss_and_gradients_are_the_definitions(
    loss_of: Loss, by_hand: Loss, count: int, size: int, seed: int
) -> None:
    (found, target), (expected, _) = pair(count, size, seed), pair(count, size, seed)
    loss, by_definition = loss_of(found, target), by_hand(expected, target)
    assert_close(loss, by_definition, rtol=1e-10, atol=1e-10)
    loss.backward()
    by_definition.backward()
    assert_close(found.grad, expected.grad, rtol=1e-8, atol=1e-9)
    assert target.grad is None


@each_loss
def test_gradients_pass_gradcheck(loss_of: Loss, by_hand: Loss) -> None:
    p, k = pair(4, 3)
    assert torch.autograd.gradcheck(lambda p: loss_of(p, k), (p,))


def test_same_opposite_and_unrelated_directions() -> None:
    p = torch.eye(4, dtype=torch.float64)
    for target, distance in ((7 * p, 0), (-p, 4), (p.roll(1, 0), 2)):
        assert prediction_loss(p, target).item() == pytest.approx(distance, abs=1e-12)
        assert negative_cosine(p, target).item() == pytest.approx(distance / 2 - 1, abs=1e-12)


@each_loss
def test_lengths_do_not_matter(loss_of: Loss, by_hand: Loss) -> None:
    p, k = pair(5, 6)
    assert_close(loss_of(0.01 * p, 100 * k), loss_of(p, k))


@each_loss
@pytest.mark.parametrize("precision", [torch.float16, torch.bfloat16, torch.float32])
def test_arithmetic_is_float32_whatever_the_features_or_autocast(
    loss_of: Loss, by_hand: Loss, precision: torch.dtype
) -> None:
    p, k = (x.detach().to(precision) for x in pair(8, 16))
    p.requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        loss = loss_of(p, k.float())
    assert loss.dtype == torch.float32
    assert_close(loss.double(), by_hand(p.detach().double(), k.double()), rtol=1e-5, atol=1e-5)
    loss.backward()
    assert p.grad is not None
    assert p.grad.dtype == precision
    assert p.grad.isfinite().all()


@each_loss
def test_twenty_steps_lower_the_loss(loss_of: Loss, by_hand: Loss) -> None:
    p, k = pair(8, 4)
    losses = []
    for _ in range(21):
        loss = loss_of(p, k)
        (gradient,) = torch.autograd.grad(loss, p)
        with torch.no_grad():
            p -= 5 * gradient
        losses.append(loss.item())
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0] - 0.1
    assert math.isfinite(losses[-1])
