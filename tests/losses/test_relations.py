"""The losses of ReSSL, SCE and CO2 against their formulas, row by row."""

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from xmoco.losses.co2 import disagreement
from xmoco.losses.contrast import contrast
from xmoco.losses.ressl import relational_loss
from xmoco.losses.sce import soft_contrast

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Of queries, keys and a bank."""


def softmax(scores: list[Tensor], temperature: float) -> Tensor:
    powers = torch.stack([(score / temperature).exp() for score in scores])
    return powers / powers.sum()


def over_rows(row: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Loss:
    """The mean over all queries and their keys."""

    def loss(q: Tensor, k: Tensor, bank: Tensor) -> Tensor:
        return torch.stack([row(*pair, bank) for pair in zip(q, k, strict=True)]).mean()

    return loss


@over_rows
def ressl_by_hand(q: Tensor, k: Tensor, bank: Tensor) -> Tensor:
    """Equations 4 to 6 of ReSSL's paper, with τ_t 0.06 and τ_s 0.2."""
    told = softmax([k @ key for key in bank], 0.06).detach()
    return -(told * softmax([q @ key for key in bank], 0.2).log()).sum()


@over_rows
def sce_by_hand(q: Tensor, k: Tensor, bank: Tensor) -> Tensor:
    """Equations 3 to 6 of SCE's paper, with λ 0.3, τ_m 0.07 and τ 0.2."""
    relations = softmax([k @ key for key in bank], 0.07)
    told = torch.cat([torch.tensor([0.3], dtype=q.dtype), 0.7 * relations]).detach()
    return -(told * softmax([q @ k.detach(), *(q @ key for key in bank)], 0.2).log()).sum()


@over_rows
def co2_by_hand(q: Tensor, k: Tensor, bank: Tensor) -> Tensor:
    """Equations 3 and 4 of CO2's paper, τ 0.1: half of both Kullback-Leibler divergences."""
    P = softmax([k @ key for key in bank], 0.1).detach()
    Q = softmax([q @ key for key in bank], 0.1)
    return ((P * (P / Q).log()).sum() + (Q * (Q / P).log()).sum()) / 2


def ressl(q: Tensor, k: Tensor, bank: Tensor) -> Tensor:
    return relational_loss(q, k, bank, temperature=0.2, key_temperature=0.06)


def sce(q: Tensor, k: Tensor, bank: Tensor) -> Tensor:
    P = contrast(q, k, bank, 0.2)
    return soft_contrast(P, positive_share=0.3, key_temperature=0.07)


def co2(q: Tensor, k: Tensor, bank: Tensor) -> Tensor:
    return disagreement(contrast(q, k, bank, 0.2), 0.1)


LOSSES: dict[str, tuple[Loss, Loss]] = {
    "ressl": (ressl, ressl_by_hand),
    "sce": (sce, sce_by_hand),
    "co2": (co2, co2_by_hand),
}
each_loss = pytest.mark.parametrize(("loss", "by_hand"), LOSSES.values(), ids=LOSSES.keys())


def unit(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return F.normalize(torch.randn(*shape, dtype=torch.float64, generator=generator), dim=-1)


@each_loss
@given(N=st.integers(1, 5), K=st.integers(2, 7), d=st.integers(2, 6), seed=st.integers(0, 2**32))
@settings(max_examples=15, deadline=None)
def test_loss_and_gradients_are_the_formulas(
    loss: Loss, by_hand: Loss, N: int, K: int, d: int, seed: int
) -> None:
    """None goes through keys or bank, and the bank may change before the way back."""
    q, k, bank = unit(N, d, seed=seed), unit(N, d, seed=seed + 1), unit(K, d, seed=seed + 2)
    q.requires_grad_()
    k.requires_grad_()
    changing = bank.clone()
    found = loss(q, k, changing)
    changing.zero_()
    (gradient,) = torch.autograd.grad(found, q)
    expected = by_hand(q, k, bank)
    assert_close(found, expected, rtol=1e-9, atol=1e-10)
    assert_close(gradient, torch.autograd.grad(expected, q)[0], rtol=1e-8, atol=1e-9)
    assert k.grad is None


@each_loss
def test_gradients_pass_gradcheck(loss: Loss, by_hand: Loss) -> None:
    q, k, bank = unit(3, 4).requires_grad_(), unit(3, 4, seed=1), unit(5, 4, seed=2)
    assert torch.autograd.gradcheck(lambda q: loss(q, k, bank), (q,))


@each_loss
def test_arithmetic_is_float32_whatever_the_features_or_autocast(loss: Loss, by_hand: Loss) -> None:
    for precision in (torch.float16, torch.bfloat16, torch.float32):
        q, k = (unit(6, 16, seed=seed).to(precision) for seed in (0, 1))
        bank = unit(9, 16, seed=2).float()
        q.requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            found = loss(q, k, bank)
        assert found.dtype == torch.float32
        expected = by_hand(q.detach().double(), k.double(), bank.double())
        assert_close(found.double(), expected, rtol=1e-4, atol=1e-4)
        found.backward()
        assert q.grad is not None
        assert q.grad.dtype == precision
        assert q.grad.isfinite().all()


@each_loss
def test_twenty_steps_lower_the_loss(loss: Loss, by_hand: Loss) -> None:
    q, k, bank = unit(8, 4).requires_grad_(), unit(8, 4, seed=1), unit(16, 4, seed=2)
    losses = []
    for _ in range(21):
        found = loss(F.normalize(q, dim=1), k, bank)
        (gradient,) = torch.autograd.grad(found, q)
        with torch.no_grad():
            q -= 0.2 * gradient
        losses.append(found.item())
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.9 * losses[0]


def test_special_cases() -> None:
    """SCE with all of a label on the positive is InfoNCE; CO2 of a query that is its key is 0."""
    q, k, bank = unit(5, 6), unit(5, 6, seed=1), unit(7, 6, seed=2)
    P = contrast(q, k, bank, 0.2)
    assert_close(soft_contrast(P, positive_share=1.0, key_temperature=0.05), P.infonce())
    assert disagreement(contrast(k, k, bank, 0.2), 0.05).item() == pytest.approx(0, abs=1e-12)
    alike = torch.ones(4, 9, dtype=torch.float64) / 3
    assert ressl(alike, alike, alike).item() == pytest.approx(math.log(4))
