"""SimCLR's batch as XMoCo's ideas see it: by hand, view by view; two processes as one."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from xmoco.losses import BatchXMoCoLoss
from xmoco.losses.cross_similarity import CrossSimilarity
from xmoco.losses.ntxent import batch_contrasts, nt_xent
from xmoco.losses.soft_labels import weighted_soft_labels

TAU, LAMBDA, XI = 0.3, 2.0, 0.7


def unit_views(count: int, size: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    views = torch.randn(2, count, size, dtype=torch.float64, generator=generator)
    return F.normalize(views, dim=2)


def ideas(label_weight: float, consistency_weight: float) -> CrossSimilarity:
    labels = weighted_soft_labels(label_weight, 0, 0, LAMBDA, XI, 3, "none")
    return CrossSimilarity(labels, consistency_weight)


def by_hand(z_s: Tensor, z_t: Tensor) -> tuple[Tensor, Tensor]:
    """P_s and P_t (N, 1 + 2N): the partner, the others of the other side, the others of one's own.
    An image's own places are 0."""
    sides = []
    for own, other in ((z_s, z_t), (z_t, z_s)):
        rows = []
        for i, view in enumerate(own):
            powers = [(view @ other[i] / TAU).exp()]
            for candidates in (other, own):
                powers += [
                    (view @ z / TAU).exp() if j != i else torch.zeros((), dtype=z.dtype)
                    for j, z in enumerate(candidates)
                ]
            rows.append(torch.stack(powers) / torch.stack(powers).sum())
        sides.append(torch.stack(rows))
    return sides[0], sides[1]


def labels_by_hand(P: Tensor) -> Tensor:
    """Step 5 of the method, entry by entry, where an image's own places stay empty."""
    plan = P.detach()[:, 1:] ** LAMBDA
    for _ in range(3):
        for column in range(plan.shape[1]):
            plan[:, column] /= plan[:, column].sum() * plan.shape[1]
        for row in range(len(plan)):
            plan[row] /= plan[row].sum() * len(plan)
    positives = torch.full((len(P), 1), XI, dtype=P.dtype)
    return torch.cat([positives, (1 - XI) * len(P) * plan], dim=1)


def cross_entropy(target: Tensor, P: Tensor) -> Tensor:
    """Where P is 0 so is the target."""
    terms = [
        -t * p.log() for row in zip(target, P, strict=True) for t, p in zip(*row, strict=True) if t
    ]
    return torch.stack(terms).sum() / len(P)


@given(count=st.integers(2, 5), size=st.integers(2, 5), seed=st.integers(0, 2**32))
@settings(max_examples=10, deadline=None)
def test_both_ideas_are_the_papers(count: int, size: int, seed: int) -> None:
    """Labels are swapped, consistency is crossed, and nobody who tells gets a gradient."""
    found, expected = (unit_views(count, size, seed).requires_grad_() for _ in range(2))
    loss, terms = ideas(1.0, 0.5).compare(*batch_contrasts(*found, TAU))
    P_s, P_t = by_hand(*expected)
    Y_s, Y_t = labels_by_hand(P_s), labels_by_hand(P_t)
    by_definition = {
        "labels_source": cross_entropy(Y_s, P_t),
        "labels_target": cross_entropy(Y_t, P_s),
        "consistency_source": cross_entropy(P_s.detach(), P_t),
        "consistency_target": cross_entropy(P_t.detach(), P_s),
    }
    assert_close(terms, by_definition, rtol=1e-8, atol=1e-9)
    labels_s, labels_t, told_s, told_t = by_definition.values()
    total = labels_s + labels_t + 0.5 * (told_s + told_t)
    assert_close(loss, total, rtol=1e-8, atol=1e-9)
    loss.backward()
    total.backward()
    assert_close(found.grad, expected.grad, rtol=1e-7, atol=1e-8)


def test_without_ideas_it_is_nt_xent() -> None:
    found, expected = (unit_views(6, 5).requires_grad_() for _ in range(2))
    loss, terms = ideas(0.0, 0.0).compare(*batch_contrasts(*found, TAU))
    assert set(terms) == {"contrast_source", "contrast_target"}
    half, whole = loss / 2, nt_xent(*expected, TAU)
    assert_close(half, whole)
    half.backward()
    whole.backward()
    assert_close(found.grad, expected.grad)


def test_labels_gradient_passes_gradcheck() -> None:
    """Of labels that stay as they are; those that follow the views have none to give."""
    z = unit_views(3, 4).requires_grad_()
    P_s, P_t = batch_contrasts(*z, TAU)
    Y_s, Y_t = ideas(1.0, 0.0).labels(P_s, P_t)
    assert Y_s is not None
    assert Y_t is not None

    def loss(z: Tensor) -> Tensor:
        P_s, P_t = batch_contrasts(*z, TAU)
        return P_t.cross_entropy(Y_s) + P_s.cross_entropy(Y_t)

    assert torch.autograd.gradcheck(loss, (z,))


@pytest.mark.parametrize("precision", [torch.float16, torch.bfloat16, torch.float32])
def test_numbers_are_finite_in_float32(precision: torch.dtype) -> None:
    z = unit_views(8, 16).to(precision).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        P_s, P_t = batch_contrasts(*z, 0.05)
        loss, _ = ideas(1.0, 1.0).compare(P_s, P_t)
    assert P_s.log_p.dtype == loss.dtype == torch.float32
    exact = batch_contrasts(*z.detach().double(), 0.05)
    assert_close(loss.double(), ideas(1.0, 1.0).compare(*exact)[0], rtol=1e-4, atol=1e-4)
    loss.backward()
    assert z.grad is not None
    assert z.grad.isfinite().all()


@pytest.mark.parametrize("weights", [(1.0, 0.0), (0.0, 1.0), (1.0, 1.0)])
def test_twenty_steps_lower_the_loss(weights: Any) -> None:
    z = unit_views(8, 4).requires_grad_()
    losses = []
    for _ in range(21):
        loss, _ = ideas(*weights).compare(*batch_contrasts(*F.normalize(z, dim=2), 0.5))
        (gradient,) = torch.autograd.grad(loss, z)
        with torch.no_grad():
            z -= gradient
        losses.append(loss.item())
    assert losses[-1] < 0.95 * losses[0]


def test_the_module_for_any_loop_takes_the_mean_of_both_sides() -> None:
    z_s, z_t = unit_views(6, 5)
    criterion = BatchXMoCoLoss(TAU, LAMBDA, XI, consistency_weight=0.5)
    loss, terms = criterion(z_s, z_t)
    whole, expected = ideas(1.0, 0.5).compare(*batch_contrasts(z_s, z_t, TAU))
    assert_close(loss, whole / 2)
    assert_close(terms, expected)
    assert criterion.state_dict() == {}
    for mistake in ({"temperature": 0.0}, {"label_weight": 1.5}, {"consistency_weight": -1.0}):
        with pytest.raises(ValueError, match=next(iter(mistake))):
            BatchXMoCoLoss(**mistake)


def test_a_single_image_has_no_negatives() -> None:
    with pytest.raises(ValueError, match=r"^a batch needs at least two images: .* negatives$"):
        BatchXMoCoLoss()(*unit_views(1, 4))
    loss, _ = BatchXMoCoLoss()(*unit_views(2, 4))
    assert loss.item() < 10
