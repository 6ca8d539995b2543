"""Losses that tell a key's nearest neighbours, against their definitions, row by row."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from xmoco.losses.neighbours import mean_shift, mixed_neighbours, nearest


def distance(p: Tensor, u: Tensor) -> Tensor:
    """‖p/|p| − u/|u|‖²."""
    return (p / p.square().sum().sqrt() - u / u.square().sum().sqrt()).square().sum()


def nearest_by_hand(key: Tensor, bank: Tensor, count: int) -> list[Tensor]:
    return sorted(bank, key=lambda u: float(distance(key, u)))[:count]


def msf_by_hand(predictions: Tensor, keys: Tensor, bank: Tensor, count: int) -> Tensor:
    """Equation 1 of MSF's paper, a query and a neighbour at a time."""
    losses = [
        distance(p, u)
        for p, k in zip(predictions, keys, strict=True)
        for u in nearest_by_hand(k, bank, count)
    ]
    return torch.stack(losses).mean()


def mnn_by_hand(
    predictions: Tensor, keys: Tensor, bank: Tensor, count: int, share: float
) -> Tensor:
    """What MNN's paper adds to BYOL, a query and a neighbour at a time."""
    losses = [
        distance(p, share * u + (1 - share) * k)
        for p, k in zip(predictions, keys, strict=True)
        for u in nearest_by_hand(k, bank, count)
    ]
    return torch.stack(losses).mean()


def drawn(count: int, length: int, size: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Predictions, keys and a bank, all of any length."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(2 * count + length, size, dtype=torch.float64, generator=generator)
    rows *= torch.rand(len(rows), 1, dtype=torch.float64, generator=generator) + 0.1
    p, k, bank = rows.split([count, count, length])
    return p.clone().requires_grad_(), k, bank


@given(
    count=st.integers(1, 6),
    length=st.integers(4, 9),
    size=st.integers(2, 6),
    neighbours=st.integers(1, 4),
    share=st.floats(0.01, 0.99),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=40, deadline=None)
def test_losses_and_gradients_are_the_definitions(
    count: int, length: int, size: int, neighbours: int, share: float, seed: int
) -> None:
    (p, k, bank), (q, _, _) = (drawn(count, length, size, seed) for _ in range(2))
    u = nearest(k, bank, neighbours)
    assert u.shape == (count, neighbours, size)
    for found, by_hand in (
        (mean_shift(p, u), msf_by_hand(q, k, bank, neighbours)),
        (mixed_neighbours(p, k, u, share), mnn_by_hand(q, k, bank, neighbours, share)),
    ):
        assert_close(found, by_hand, rtol=1e-9, atol=1e-9)
        (mine,), (theirs,) = torch.autograd.grad(found, p), torch.autograd.grad(by_hand, q)
        assert_close(mine, theirs, rtol=1e-7, atol=1e-8)


def test_gradients_pass_gradcheck() -> None:
    p, k, bank = drawn(3, 7, 4)
    u = nearest(k, bank, 2)
    assert torch.autograd.gradcheck(lambda p: mean_shift(p, u), (p,))
    assert torch.autograd.gradcheck(lambda p: mixed_neighbours(p, k, u, 0.3), (p,))


def test_neighbours_are_found_by_direction_and_come_as_they_are() -> None:
    bank = torch.tensor([[0.0, 9.0], [0.1, 0.0], [-5.0, 0.0], [2.0, 1.0]])
    key = torch.tensor([[3.0, 0.0]])
    assert torch.equal(nearest(key, bank, 3), bank[[1, 3, 0]][None])


def test_a_share_of_nothing_is_the_key_alone() -> None:
    p, k, bank = drawn(4, 6, 5)
    u = nearest(k, bank, 3)
    assert_close(mixed_neighbours(p, k, u, 0.0), mean_shift(p, k[:, None]))
    assert_close(mixed_neighbours(p, k, u, 1.0), mean_shift(p, u))
    on_device = torch.tensor(0.25, dtype=torch.float64)  # where a replayed CUDA graph reads it
    assert_close(mixed_neighbours(p, k, u, on_device), mixed_neighbours(p, k, u, 0.25))


@pytest.mark.parametrize("precision", [torch.bfloat16, torch.float32])
def test_arithmetic_is_float32_whatever_the_features_or_autocast(precision: torch.dtype) -> None:
    p, k, bank = (rows.detach().to(precision) for rows in drawn(5, 8, 16))
    p.requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        u = nearest(k, bank, 3)
        loss = mean_shift(p, u) + mixed_neighbours(p, k, u, torch.tensor(0.3).double())
    assert loss.dtype == torch.float32
    p_, k_, bank_ = (rows.detach().double() for rows in (p, k, bank))
    expected = msf_by_hand(p_, k_, bank_, 3) + mnn_by_hand(p_, k_, bank_, 3, 0.3)
    assert_close(loss.double(), expected, rtol=1e-5, atol=1e-5)
    loss.backward()
    assert p.grad is not None
    assert p.grad.dtype == precision


def test_twenty_steps_lower_the_losses() -> None:
    for share in (None, 0.4):
        p, k, bank = drawn(8, 20, 4)
        u = nearest(k, bank, 3)
        losses = []
        for _ in range(21):
            loss = mean_shift(p, u) if share is None else mixed_neighbours(p, k, u, share)
            (gradient,) = torch.autograd.grad(loss, p)
            with torch.no_grad():
                p -= 0.3 * gradient
            losses.append(loss.item())
        assert losses == sorted(losses, reverse=True)
        assert losses[-1] < 0.9 * losses[0]
