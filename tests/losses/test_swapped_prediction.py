"""SwAV's codes and loss against the published algorithm, matrix entry by matrix entry."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from xmoco.losses.swav import codes, swapped_prediction


def sinkhorn_by_hand(scores: Tensor, epsilon: float, iterations: int) -> Tensor:
    """``distributed_sinkhorn`` as published, for (B, K) scores of one process."""
    Q = (scores / epsilon).exp().T.clone()
    K, B = Q.shape
    Q /= Q.sum()
    for _ in range(iterations):
        for prototype in range(K):
            Q[prototype] /= Q[prototype].sum()
            Q[prototype] /= K
        for sample in range(B):
            Q[:, sample] /= Q[:, sample].sum()
            Q[:, sample] /= B
    Q *= B
    return Q.T


def loss_by_hand(scores: list[Tensor], targets: list[Tensor], temperature: float) -> Tensor:
    """The published loop: for each full view the mean over all others, then over full views."""
    loss = torch.zeros((), dtype=torch.float64)
    for full, q in enumerate(targets):
        subloss = torch.zeros((), dtype=torch.float64)
        for view, score in enumerate(scores):
            if view == full:
                continue
            for row, target in zip(score / temperature, q, strict=True):
                log_p = row - row.exp().sum().log()
                subloss = subloss - (target * log_p).sum() / len(score)
        loss = loss + subloss / (len(scores) - 1)
    return loss / len(targets)


def random_scores(count: int, samples: int, prototypes: int, seed: int = 0) -> list[Tensor]:
    """Cosines, as of unit vectors on prototypes."""
    generator = torch.Generator().manual_seed(seed)
    features, weights = (
        F.normalize(torch.randn(*shape, 6, dtype=torch.float64, generator=generator), dim=-1)
        for shape in ((count, samples), (prototypes,))
    )
    return list((features @ weights.T).unbind())


shapes = {"N": st.integers(1, 9), "K": st.integers(2, 9), "seed": st.integers(0, 2**32)}
OPTIONS: dict[str, Any] = {"epsilon": 0.05, "iterations": 3}


@given(**shapes, epsilon=st.floats(0.03, 1), iterations=st.integers(1, 5))
@settings(max_examples=40, deadline=None)
def test_codes_are_the_published_ones(
    N: int, K: int, seed: int, epsilon: float, iterations: int
) -> None:
    (scores,) = random_scores(1, N, K, seed)
    found = codes(scores, epsilon=epsilon, iterations=iterations)
    assert_close(found, sinkhorn_by_hand(scores, epsilon, iterations), rtol=1e-8, atol=1e-12)
    assert_close(found.sum(dim=1), torch.ones(N, dtype=torch.float64))


@given(**shapes, past=st.integers(1, 12))
@settings(max_examples=30, deadline=None)
def test_a_queue_joins_the_balancing_where_it_counts(N: int, K: int, seed: int, past: int) -> None:
    queued, scores = random_scores(1, past + N, K, seed)[0].split([past, N])
    joined = sinkhorn_by_hand(torch.cat([queued, scores]), **OPTIONS)[-N:]
    alone = sinkhorn_by_hand(scores, **OPTIONS)
    for counts, expected in ((True, joined), (False, alone)):
        found = codes(scores, past_scores=queued, past_counts=torch.tensor(counts), **OPTIONS)
        assert_close(found, expected, rtol=1e-8, atol=1e-12)


def test_prototypes_share_the_samples_equally() -> None:
    (scores,) = random_scores(1, 24, 6)
    totals = codes(scores, epsilon=0.2, iterations=500).sum(dim=0)
    assert_close(totals, torch.full((6,), 24 / 6, dtype=torch.float64))


def test_codes_are_finite_where_powers_underflow() -> None:
    """exp(±1/0.001) is beyond float32: the published code would divide 0 by 0."""
    scores = 2 * torch.rand(16, 8, generator=torch.Generator().manual_seed(0)) - 1
    found = codes(scores, epsilon=0.001, iterations=3)
    assert found.isfinite().all()
    assert_close(found.sum(dim=1), torch.ones(16))


@given(**shapes, views=st.sampled_from([2, 3, 6, 8]), temperature=st.floats(0.05, 1))
@settings(max_examples=40, deadline=None)
def test_loss_and_gradients_are_the_published_ones(
    N: int, K: int, seed: int, views: int, temperature: float
) -> None:
    """Six views: the codes of the two full ones are told from the five others each."""
    found, expected = (
        [score.requires_grad_() for score in random_scores(views, N, K, seed)] for _ in range(2)
    )
    loss = swapped_prediction(found, [codes(score, **OPTIONS) for score in found[:2]], temperature)
    by_definition = loss_by_hand(
        expected,
        [sinkhorn_by_hand(score.detach(), **OPTIONS) for score in expected[:2]],
        temperature,
    )
    assert_close(loss, by_definition, rtol=1e-8, atol=1e-10)
    loss.backward()
    by_definition.backward()
    for mine, theirs in zip(found, expected, strict=True):
        assert_close(mine.grad, theirs.grad, rtol=1e-7, atol=1e-10)


def test_no_gradient_goes_through_codes() -> None:
    full, other = (score.requires_grad_() for score in random_scores(2, 5, 4))
    target = codes(full, **OPTIONS)
    assert not target.requires_grad
    told = target.clone().requires_grad_()
    swapped_prediction([full, other], [told], 0.1).backward()
    assert told.grad is None
    assert full.grad is None  # it was the one to be told
    assert other.grad is not None


@pytest.mark.parametrize("precision", [torch.float16, torch.bfloat16, torch.float32])
def test_arithmetic_is_float32_whatever_the_scores_or_autocast(precision: torch.dtype) -> None:
    scores = [score.to(precision).requires_grad_() for score in random_scores(3, 8, 5)]
    with torch.autocast("cpu", torch.bfloat16):
        targets = [codes(score, **OPTIONS) for score in scores[:2]]
        loss = swapped_prediction(scores, targets, 0.1)
    exact = [score.detach().double() for score in scores]
    expected = loss_by_hand(exact, [sinkhorn_by_hand(score, **OPTIONS) for score in exact[:2]], 0.1)
    assert loss.dtype == torch.float32
    assert_close(loss.double(), expected, rtol=1e-4, atol=1e-4)
    loss.backward()
    for score in scores:
        assert score.grad is not None
        assert score.grad.dtype == precision
        assert score.grad.isfinite().all()


def test_twenty_steps_lower_the_loss() -> None:
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(2, 8, 6, dtype=torch.float64, generator=generator).requires_grad_()
    prototypes = F.normalize(torch.randn(5, 6, dtype=torch.float64, generator=generator), dim=1)
    losses = []
    for _ in range(21):
        scores = [F.normalize(view, dim=1) @ prototypes.T for view in z]
        loss = swapped_prediction(scores, [codes(score, **OPTIONS) for score in scores], 0.1)
        (gradient,) = torch.autograd.grad(loss, z)
        with torch.no_grad():
            z -= gradient
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]
