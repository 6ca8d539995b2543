"""NT-Xent against its definition, view by view; two processes are in test_processes.py."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from xmoco.losses.ntxent import nt_xent


def by_hand(z_s: Tensor, z_t: Tensor, temperature: float) -> Tensor:
    """Equation 1 of SimCLR's paper for each of the 2N views, and the mean of all."""
    views, count = [*z_s, *z_t], len(z_s)
    losses = []
    for i, view in enumerate(views):
        partner = views[i + count if i < count else i - count]
        others = [view @ other / temperature for k, other in enumerate(views) if k != i]
        losses.append(torch.stack(others).exp().sum().log() - view @ partner / temperature)
    return torch.stack(losses).mean()


def unit_views(count: int, size: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    views = torch.randn(2, count, size, dtype=torch.float64, generator=generator)
    return F.normalize(views, dim=2)


@given(
    count=st.integers(1, 9),
    size=st.integers(2, 8),
    temperature=st.floats(0.05, 1),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=50, deadline=None)
def test_loss_and_gradients_are_the_definitions(
    count: int, size: int, temperature: float, seed: int
) -> None:
    found, expected = (unit_views(count, size, seed).requires_grad_() for _ in range(2))
    loss, by_definition = nt_xent(*found, temperature), by_hand(*expected, temperature)
    assert_close(loss, by_definition, rtol=1e-10, atol=1e-10)
    loss.backward()
    by_definition.backward()
    assert_close(found.grad, expected.grad, rtol=1e-9, atol=1e-10)


def test_gradients_pass_gradcheck() -> None:
    z = unit_views(3, 4).requires_grad_()
    assert torch.autograd.gradcheck(lambda z: nt_xent(*z, 0.5), (z,))


def test_the_sides_may_be_swapped_and_the_batch_reordered() -> None:
    z_s, z_t = unit_views(6, 5)
    order = torch.tensor([3, 1, 5, 0, 2, 4])
    expected = nt_xent(z_s, z_t, 0.2)
    assert_close(nt_xent(z_t, z_s, 0.2), expected)
    assert_close(nt_xent(z_s[order], z_t[order], 0.2), expected)


def test_unrelated_views_are_at_chance_and_a_lone_image_has_nothing_to_mistake() -> None:
    alike = torch.ones(4, 9, dtype=torch.float64) / 3
    assert nt_xent(alike, alike, 0.5).item() == pytest.approx(torch.tensor(7.0).log().item())
    z_s, z_t = unit_views(1, 5)
    assert nt_xent(z_s, z_t, 0.5).item() == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("precision", [torch.float16, torch.bfloat16, torch.float32])
def test_arithmetic_is_float32_whatever_the_features_or_autocast(precision: torch.dtype) -> None:
    z = unit_views(8, 16).to(precision).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        loss = nt_xent(*z, 0.05)
    assert loss.dtype == torch.float32
    assert_close(loss.double(), by_hand(*z.detach().double(), 0.05), rtol=1e-5, atol=1e-5)
    loss.backward()
    assert z.grad is not None
    assert z.grad.dtype == precision
    assert z.grad.isfinite().all()


def test_twenty_steps_lower_the_loss() -> None:
    z = unit_views(8, 4).requires_grad_()
    losses = []
    for _ in range(21):
        loss = nt_xent(*F.normalize(z, dim=2), 0.5)
        (gradient,) = torch.autograd.grad(loss, z)
        with torch.no_grad():
            z -= gradient
        losses.append(loss.item())
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.9 * losses[0]
