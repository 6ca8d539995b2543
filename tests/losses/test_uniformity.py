"""Uniformity against its definition, pair by pair; two processes are in tests/methods."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from xmoco.losses.uniformity import uniformity


def by_hand(queries: Tensor, bank: Tensor, t: float) -> Tensor:
    """Equation 18 of the paper: all queries with all keys, and every pair of queries once."""
    pairs = [(x, y) for x in queries for y in bank.detach()]
    pairs += [(x, y) for n, x in enumerate(queries) for y in queries[n + 1 :]]
    return torch.stack([(-t * (x - y).square().sum()).exp() for x, y in pairs]).mean().log()


def unit(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


def normalised(x: Tensor) -> Tensor:
    return F.normalize(x, dim=1)


@given(N=st.integers(1, 5), K=st.integers(2, 6), t=st.floats(0.5, 4), seed=st.integers(0, 2**32))
@settings(max_examples=25, deadline=None)
def test_value_and_gradients_are_the_definitions(N: int, K: int, t: float, seed: int) -> None:
    """Gradients of what is made unit length; the bank may change before the way back."""
    found, expected = (unit(N, 4, seed=seed).requires_grad_() for _ in range(2))
    bank = normalised(unit(K, 4, seed=seed + 1))
    changing = bank.clone()
    value, by_definition = (
        uniformity(normalised(found), changing, t),
        by_hand(normalised(expected), bank, t),
    )
    changing.zero_()
    assert_close(value, by_definition, rtol=1e-9, atol=1e-10)
    value.backward()
    by_definition.backward()
    assert_close(found.grad, expected.grad, rtol=1e-8, atol=1e-10)


def test_gradients_pass_gradcheck() -> None:
    bank, x = normalised(unit(5, 4, seed=1)), unit(3, 4).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: uniformity(normalised(x), bank, 2.0), (x,))


def test_it_is_least_where_all_are_far_apart() -> None:
    crowd = normalised(torch.ones(4, 3, dtype=torch.float64))
    assert uniformity(crowd, crowd, 3.0).item() == pytest.approx(0)
    corners = torch.eye(4, dtype=torch.float64)
    far, near = (uniformity(corners, sign * corners[:1], 3.0) for sign in (-1, 1))
    assert far < -5 < near < 0


def test_arithmetic_is_float32_whatever_the_features_or_autocast() -> None:
    for precision in (torch.float16, torch.bfloat16, torch.float32):
        q = normalised(unit(6, 16)).to(precision).requires_grad_()
        bank = normalised(unit(9, 16, seed=1)).float()
        with torch.autocast("cpu", torch.bfloat16):
            value = uniformity(q, bank, 3.0)
        assert value.dtype == torch.float32
        expected = uniformity(q.detach().double(), bank.double(), 3.0)
        assert_close(value.double(), expected, rtol=1e-5, atol=1e-5)
        value.backward()
        assert q.grad is not None
        assert q.grad.dtype == precision
        assert q.grad.isfinite().all()


def test_twenty_steps_lower_it() -> None:
    bank, x = normalised(unit(16, 4, seed=1)), (1 + 0.1 * unit(8, 4)).requires_grad_()
    values = []
    for _ in range(21):
        value = uniformity(normalised(x), bank, 3.0)
        (gradient,) = torch.autograd.grad(value, x)
        with torch.no_grad():
            x -= 0.5 * gradient
        values.append(value.item())
    assert values == sorted(values, reverse=True)
    assert values[-1] < values[0] - 0.5
