"""Barlow Twins' and VICReg's losses against their definitions, number by number.

Two processes are in test_processes.py.
"""

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from xmoco.losses.barlowtwins import cross_correlation, redundancy_reduction
from xmoco.losses.vicreg import invariance, variance_and_covariance


def barlow_twins(z_s: Tensor, z_t: Tensor, weight: float = 0.3) -> Tensor:
    same, others = redundancy_reduction(cross_correlation(z_s, z_t))
    return same + weight * others


def vicreg(z_s: Tensor, z_t: Tensor) -> Tensor:
    variance, covariance = variance_and_covariance(z_s, z_t)
    return 25 * invariance(z_s, z_t) + 25 * variance + 2 * covariance


def barlow_twins_by_hand(z_s: Tensor, z_t: Tensor, weight: float = 0.3) -> Tensor:
    """Algorithm 1 of Barlow Twins' paper, a pair of features at a time; batch norm is torch's."""
    a, b = (F.batch_norm(z, None, None, training=True) for z in (z_s, z_t))
    loss = z_s.new_zeros(())
    for i in range(z_s.shape[1]):
        for j in range(z_s.shape[1]):
            c = (a[:, i] * b[:, j]).mean()
            loss = loss + ((1 - c) ** 2 if i == j else weight * c**2)
    return loss


def vicreg_by_hand(z_s: Tensor, z_t: Tensor) -> Tensor:
    """Algorithm 1 of VICReg's paper, with torch's own (co)variances, a feature at a time."""
    features = z_s.shape[1]
    differences = [a - b for a, b in zip(z_s.flatten(), z_t.flatten(), strict=True)]
    loss = 25 * torch.stack([difference**2 for difference in differences]).mean()
    for z in (z_s, z_t):
        covariances = torch.cov(z.T).reshape(features, features)
        for i in range(features):
            deviation = torch.sqrt(z[:, i].var() + 1e-4)
            loss = loss + 25 * torch.clamp(1 - deviation, min=0) / (2 * features)
            for j in range(features):
                if i != j:
                    loss = loss + 2 * covariances[i, j] ** 2 / features
    return loss


LOSSES: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
    "barlow twins": (barlow_twins, barlow_twins_by_hand),
    "vicreg": (vicreg, vicreg_by_hand),
}
each_loss = pytest.mark.parametrize("name", LOSSES)


def two_sides(count: int, features: int, seed: int = 0, size: float = 1.0) -> Tensor:
    """Sides that have something to do with each other, features of any mean and size."""
    generator = torch.Generator().manual_seed(seed)
    draw = partial(torch.randn, generator=generator, dtype=torch.float64)
    both, own = draw(1, count, features), draw(2, count, features)
    return size * draw(2, 1, features).exp() * (both + own) + draw(2, 1, features)


@each_loss
@given(
    count=st.integers(2, 9),
    features=st.integers(1, 5),
    seed=st.integers(0, 2**32),
    size=st.sampled_from([0.05, 1.0]),
)
@settings(max_examples=25, deadline=None)
def test_loss_and_gradients_are_the_definitions(
    name: str, count: int, features: int, seed: int, size: float
) -> None:
    ours, by_hand = LOSSES[name]
    found, expected = (two_sides(count, features, seed, size).requires_grad_() for _ in range(2))
    loss, by_definition = ours(*found), by_hand(*expected)
    assert_close(loss, by_definition, rtol=1e-9, atol=1e-9)
    loss.backward()
    by_definition.backward()
    assert_close(found.grad, expected.grad, rtol=1e-7, atol=1e-8)


@each_loss
def test_gradients_pass_gradcheck(name: str) -> None:
    """On the hinge's slope and beyond it."""
    for size in (0.2, 2.0):
        z = two_sides(5, 3, size=size).requires_grad_()
        assert torch.autograd.gradcheck(lambda z: LOSSES[name][0](*z), (z,))


@each_loss
def test_the_order_of_images_and_sides_does_not_matter(name: str) -> None:
    z_s, z_t = two_sides(7, 4)
    order = torch.tensor([3, 1, 5, 0, 2, 4, 6])
    expected = LOSSES[name][0](z_s, z_t)
    assert_close(LOSSES[name][0](z_t, z_s), expected)
    assert_close(LOSSES[name][0](z_s[order], z_t[order]), expected)


def test_what_barlow_twins_wants_costs_nothing() -> None:
    """The same features in both views, each of its own, whatever their mean and size."""
    z = torch.tensor([[1, 1], [1, -1], [-1, 1], [-1, -1]], dtype=torch.float64)
    same, others = redundancy_reduction(cross_correlation(100 * z + 3, 70 * z - 5))
    assert same.item() == pytest.approx(0, abs=1e-8)
    assert others.item() == pytest.approx(0, abs=1e-12)
    twice = 100 * z[:, [0, 0]]  # the same feature twice
    assert redundancy_reduction(cross_correlation(twice, twice))[1].item() == pytest.approx(2)


def test_vicreg_tells_collapse_from_features_that_vary() -> None:
    still = torch.ones(4, 2, dtype=torch.float64)
    variance, covariance = variance_and_covariance(still, still)
    assert variance.item() == pytest.approx(1 - 0.01)
    assert covariance.item() == 0
    wide = 5 * torch.tensor([[1, 1], [1, -1], [-1, 1], [-1, -1]], dtype=torch.float64)
    assert variance_and_covariance(wide, wide) == (0, 0)
    assert invariance(wide, wide) == 0


@each_loss
@pytest.mark.parametrize("precision", [torch.bfloat16, torch.float32])
def test_arithmetic_is_float32_whatever_the_features_or_autocast(
    name: str, precision: torch.dtype
) -> None:
    ours, by_hand = LOSSES[name]
    z = two_sides(16, 4).to(precision).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        loss = ours(*z)
    assert loss.dtype == torch.float32
    assert_close(loss.double(), by_hand(*z.detach().double()), rtol=1e-4, atol=1e-4)
    loss.backward()
    assert z.grad is not None
    assert z.grad.dtype == precision
    assert z.grad.isfinite().all()


@each_loss
def test_twenty_steps_lower_the_loss(name: str) -> None:
    z = two_sides(8, 4, size=0.3).requires_grad_()
    losses = []
    for _ in range(21):
        loss = LOSSES[name][0](*z)
        (gradient,) = torch.autograd.grad(loss, z)
        with torch.no_grad():
            z -= 0.02 * gradient
        losses.append(loss.item())
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.9 * losses[0]
