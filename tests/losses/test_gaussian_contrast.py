"""JCL's loss against its formula, image by image, with the covariance as a matrix."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from xmoco.losses.contrast import contrast
from xmoco.losses.jcl import gaussian_contrast

TAU = 0.3


def unit(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return F.normalize(torch.randn(*shape, dtype=torch.float64, generator=generator), dim=-1)


def by_hand(q: Tensor, keys: Tensor, bank: Tensor, weight: float) -> tuple[Tensor, Tensor]:
    """Equation 8 of the paper: InfoNCE with the bound's positive logit, and the penalty."""
    infonce, penalties = [], []
    for n, query in enumerate(q):
        own = keys[:, n]
        mean = own.mean(dim=0)
        covariance = sum(torch.outer(k - mean, k - mean) for k in own) / len(own)
        spread = query @ covariance @ query
        positive = query @ mean / TAU + weight / (2 * TAU**2) * spread
        logits = torch.stack([positive, *(query @ key / TAU for key in bank)])
        infonce.append(logits.logsumexp(dim=0) - positive)
        penalties.append(weight / (2 * TAU**2) * spread)
    return torch.stack(infonce).mean(), torch.stack(penalties).mean()


@given(
    N=st.integers(1, 4),
    M=st.integers(2, 5),
    K=st.integers(2, 6),
    weight=st.floats(0, 4),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=25, deadline=None)
def test_loss_and_gradients_are_the_formula(
    N: int, M: int, K: int, weight: float, seed: int
) -> None:
    q = unit(N, 4, seed=seed).requires_grad_()
    keys, bank = unit(M, N, 4, seed=seed + 1), unit(K, 4, seed=seed + 2)
    changing = bank.clone()
    P, penalty = gaussian_contrast(q, list(keys), changing, TAU, weight)
    loss = P.infonce() + penalty
    changing.zero_()  # before the way back, as a bank that moves on
    P.bank = bank
    infonce, expected_penalty = by_hand(q, keys, bank, weight)
    assert_close(penalty, expected_penalty, rtol=1e-9, atol=1e-12)
    assert_close(loss, infonce + expected_penalty, rtol=1e-9, atol=1e-10)
    (found,) = torch.autograd.grad(loss, q)
    (expected,) = torch.autograd.grad(infonce + expected_penalty, q)
    assert_close(found, expected, rtol=1e-8, atol=1e-9)
    # As keys stand what makes the positive's logit: for whoever compares P otherwise.
    logits = torch.cat([(q * P.keys).sum(dim=1, keepdim=True), q @ bank.T], dim=1) / TAU
    assert_close(P.log_p, logits.log_softmax(dim=1))


def test_gradients_pass_gradcheck() -> None:
    keys, bank, q = unit(3, 2, 4, seed=1), unit(5, 4, seed=2), unit(2, 4).requires_grad_()

    def loss(q: Tensor) -> Tensor:
        P, penalty = gaussian_contrast(q, list(keys), bank, TAU, 1.5)
        return P.infonce() + penalty

    assert torch.autograd.gradcheck(loss, (q,))


def test_keys_that_are_one_are_infonces() -> None:
    q, k, bank = unit(5, 6), unit(5, 6, seed=1), unit(7, 6, seed=2)
    P, penalty = gaussian_contrast(q, [k, k, k], bank, TAU, 2.0)
    assert_close(P.infonce(), contrast(q, k, bank, TAU).infonce())
    assert penalty.item() == pytest.approx(0, abs=1e-12)


def test_the_weight_may_be_a_number_on_the_device() -> None:
    q, keys, bank = unit(4, 6).float(), unit(3, 4, 6, seed=1).float(), unit(7, 6, seed=2).float()
    on_device = torch.tensor(1.5, dtype=torch.float64)
    P, penalty = gaussian_contrast(q, list(keys), bank, TAU, on_device)
    Q, expected = gaussian_contrast(q, list(keys), bank, TAU, 1.5)
    assert penalty.dtype == P.log_p.dtype == torch.float32
    assert_close(penalty, expected)
    assert_close(P.log_p, Q.log_p)


def test_arithmetic_is_float32_whatever_the_features_or_autocast() -> None:
    for precision in (torch.float16, torch.bfloat16, torch.float32):
        q = unit(6, 16).to(precision).requires_grad_()
        keys, bank = unit(5, 6, 16, seed=1).to(precision), unit(9, 16, seed=2).float()
        with torch.autocast("cpu", torch.bfloat16):
            P, penalty = gaussian_contrast(q, list(keys), bank, 0.2, 2.0)
            loss = P.infonce() + penalty
        assert loss.dtype == torch.float32
        exact = (q.detach().double(), list(keys.double()), bank.double())
        Q, expected = gaussian_contrast(*exact, 0.2, 2.0)
        assert_close(loss.double(), Q.infonce() + expected, rtol=1e-4, atol=1e-4)
        loss.backward()
        assert q.grad is not None
        assert q.grad.isfinite().all()


def test_twenty_steps_lower_the_loss() -> None:
    keys, bank, q = unit(5, 8, 4, seed=1), unit(16, 4, seed=2), unit(8, 4).requires_grad_()
    losses = []
    for _ in range(21):
        P, penalty = gaussian_contrast(F.normalize(q, dim=1), list(keys), bank, 0.5, 0.5)
        loss = P.infonce() + penalty
        (gradient,) = torch.autograd.grad(loss, q)
        with torch.no_grad():
            q -= 0.5 * gradient
        losses.append(loss.item())
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.9 * losses[0]
