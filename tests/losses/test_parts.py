"""Soft labels and consistency as parts with weights of their own, and the precision they keep."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import Algorithm
from torch import Tensor
from torch.testing import assert_close

from xmoco.losses import MoCoLoss, XMoCoLoss
from xmoco.losses.bank import KeyBanks
from xmoco.losses.consistency import consistency
from xmoco.losses.contrast import contrast_both_sides
from xmoco.losses.similarity import cross_entropy, crossed_similarities
from xmoco.losses.soft_labels import History, SoftLabels, soft_labels

N, K, D = 5, 9, 6
HISTORIES: list[History] = ["queries", "probabilities", "none"]

each_history = pytest.mark.parametrize("history", HISTORIES)


def batch(step: int) -> list[Tensor]:
    """q_s, q_t, k_s, k_t: an image's four features are alike."""
    generator = torch.Generator().manual_seed(step)

    def rows() -> Tensor:
        return F.normalize(torch.randn(N, D, dtype=torch.float64, generator=generator), dim=1)

    image = rows()
    return [F.normalize(image + 0.7 * rows(), dim=1) for _ in range(4)]


def built(**options: Any) -> XMoCoLoss:
    torch.manual_seed(0)
    return XMoCoLoss(D, K, **options).double()


def moco() -> MoCoLoss:
    torch.manual_seed(0)
    return MoCoLoss(D, K).double()


def step_of(criterion: MoCoLoss | XMoCoLoss, step: int) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    """Loss, terms and the queries' gradient of batch number ``step``."""
    q_s, q_t, k_s, k_t = batch(step)
    queries = torch.stack([q_s, q_t]).requires_grad_()
    loss, terms = criterion(*queries, k_s, k_t)
    loss.backward()
    assert queries.grad is not None
    return loss.detach(), {name: term.detach() for name, term in terms.items()}, queries.grad


# The weight of the labels


def test_no_labels_and_no_consistency_is_the_symmetric_infonce_of_mocov2plus() -> None:
    xmoco, banks = built(label_weight=0.0, consistency_weight=0.0), moco().banks
    assert xmoco.soft_labels is None
    assert xmoco.state_dict().keys() == moco().state_dict().keys()
    for step in range(4):
        loss, terms, gradient = step_of(xmoco, step)
        q_s, q_t, k_s, k_t = batch(step)
        queries = torch.stack([q_s, q_t]).requires_grad_()
        expected = {}
        sides = zip(("source", "target"), queries, (k_t, k_s), banks.rows()[::-1], strict=True)
        for side, q, k, bank in sides:
            logits = torch.cat([(q * k).sum(dim=1, keepdim=True), q @ bank.T], dim=1) / 0.2
            expected[f"contrast_{side}"] = F.cross_entropy(logits, torch.zeros(N, dtype=torch.long))
        total = expected["contrast_source"] + expected["contrast_target"]
        assert_close(loss, total)
        assert_close(terms, {side: term.detach() for side, term in expected.items()})
        assert_close(gradient, torch.autograd.grad(total, queries)[0])
        banks.enqueue(k_s, k_t)


@each_history
def test_labels_of_full_positive_mass_are_mocov2pluss_step_by_step(history: History) -> None:
    xmoco, plain = built(positive_mass=1.0, consistency_weight=0.0, history=history), moco()
    for step in range(5):
        loss, _, gradient = step_of(xmoco, step)
        expected, _, expected_gradient = step_of(plain, step)
        assert_close(loss, expected, rtol=1e-12, atol=1e-12)
        assert_close(gradient, expected_gradient, rtol=1e-10, atol=1e-12)
        assert torch.equal(xmoco.banks.source, plain.banks.source)
        assert torch.equal(xmoco.banks.target, plain.banks.target)


@given(weight=st.floats(0, 1), mass=st.floats(0.05, 1), history=st.sampled_from(HISTORIES))
@settings(max_examples=25, deadline=None)
def test_the_label_weight_mixes_infonce_and_soft_labels(
    weight: float, mass: float, history: History
) -> None:
    """(1−w)·InfoNCE + w·CE(Y, P), and its gradient, also once the history has joined."""
    options: dict[str, Any] = {
        "positive_mass": mass,
        "history": history,
        "consistency_weight": 0.0,
    }
    mixed, soft, hard = built(label_weight=weight, **options), built(**options), moco()
    for step in range(4):
        loss, _, gradient = step_of(mixed, step)
        soft_loss, _, soft_gradient = step_of(soft, step)
        hard_loss, _, hard_gradient = step_of(hard, step)
        assert_close(loss, (1 - weight) * hard_loss + weight * soft_loss, rtol=1e-12, atol=1e-12)
        expected = (1 - weight) * hard_gradient + weight * soft_gradient
        assert_close(gradient, expected, rtol=1e-9, atol=1e-12)


# The weight of the consistency


@pytest.mark.parametrize("weight", [0.25, 1.0, 3.0])
def test_the_consistency_weight_scales_its_terms_in_the_loss(weight: float) -> None:
    weighted, without, whole = (built(consistency_weight=number) for number in (weight, 0.0, 1.0))
    for step in range(4):
        loss, terms, gradient = step_of(weighted, step)
        labels, label_terms, label_gradient = step_of(without, step)
        both, all_terms, whole_gradient = step_of(whole, step)
        assert terms == all_terms  # told as they are, whatever they weigh
        assert set(label_terms) == {"labels_source", "labels_target"}
        assert_close(loss, labels + weight * (both - labels), rtol=1e-12, atol=1e-12)
        expected = label_gradient + weight * (whole_gradient - label_gradient)
        assert_close(gradient, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("weight", [0.0, 0.25, 1.0])
@pytest.mark.parametrize("precision", [torch.float32, torch.float64])
def test_a_weight_on_the_device_is_the_number_it_holds(
    weight: float, precision: torch.dtype
) -> None:
    """Scheduled weights are float64 numbers on the device; the loss keeps its own precision."""
    criterion = built().to(precision)
    losses, gradients = [], []
    for given_weight in (weight, torch.tensor(weight, dtype=torch.float64)):
        q_s, q_t, k_s, k_t = (x.to(precision) for x in batch(0))
        queries = torch.stack([q_s, q_t]).requires_grad_()
        P_s, P_t = criterion.similarities(*queries, k_s, k_t)
        labels = criterion.labels(P_s, P_t)
        loss, terms = criterion.cross_entropies(P_s, P_t, P_s.p, P_t.p, *labels, given_weight)
        loss.backward()
        assert loss.dtype == precision
        assert "consistency_source" in terms  # whatever its weight is at this step
        losses.append(loss.detach())
        gradients.append(queries.grad)
    assert_close(*losses, rtol=1e-6, atol=1e-7)
    assert_close(*gradients, rtol=1e-5, atol=1e-7)


# Each part by itself, as another method would borrow it


@each_history
def test_soft_labels_alone_are_those_of_the_whole_loss(history: History) -> None:
    torch.manual_seed(0)
    banks, whole = KeyBanks(K, D).double(), built(history=history)
    banks.load_state_dict(whole.banks.state_dict())
    part = SoftLabels(D, K, history=history).double()
    for step in range(5):
        features = batch(step)
        P_s, P_t = contrast_both_sides(*features, banks, 0.2)
        Y_s, Y_t = part(P_s, P_t)
        expected = {
            "labels_source": cross_entropy(Y_s, P_t.log_p),
            "labels_target": cross_entropy(Y_t, P_s.log_p),
        }
        _, terms = whole(*features)
        assert_close({name: terms[name] for name in expected}, expected, rtol=1e-12, atol=1e-12)
        part.remember(P_s, P_t)
        banks.enqueue(features[2], features[3])


def test_without_history_soft_labels_are_the_functions() -> None:
    criterion = built(history="none", sharpness=3.0, positive_mass=0.7, iterations=4)
    P_s, P_t = criterion.similarities(*batch(0))
    options: dict[str, Any] = {"positive_mass": 0.7, "sharpness": 3.0, "iterations": 4}
    found = criterion.labels(P_s, P_t)
    assert_close(found, (soft_labels(P_s.log_p, **options), soft_labels(P_t.log_p, **options)))


def test_consistency_alone_is_two_cross_entropies_with_stopped_targets() -> None:
    banks = KeyBanks(K, D).double()
    q_s, q_t, k_s, k_t = batch(0)
    found, expected = (torch.stack([q_s, q_t]).requires_grad_() for _ in range(2))
    P_s, P_t = contrast_both_sides(*found, k_s, k_t, banks, 0.2)
    terms = consistency(P_s, P_t, P_s.p, P_t.p)
    log_s = crossed_similarities(expected[0], k_t, banks.target, 0.2)
    log_t = crossed_similarities(expected[1], k_s, banks.source, 0.2)
    by_hand = {
        "consistency_source": -(log_s.detach().exp() * log_t).sum(dim=1).mean(),
        "consistency_target": -(log_t.detach().exp() * log_s).sum(dim=1).mean(),
    }
    assert_close(terms, by_hand)
    torch.stack(list(terms.values())).sum().backward()
    torch.stack(list(by_hand.values())).sum().backward()
    assert_close(found.grad, expected.grad)


# Keys as the teacher, which the paper does not have


@each_history
def test_keys_that_are_the_queries_teach_the_same(history: History) -> None:
    by_queries, by_keys = built(history=history), built(history=history, teacher="keys")
    for step in range(4):
        q_s, q_t, *_ = batch(step)
        losses = []
        for criterion in (by_queries, by_keys):
            queries = torch.stack([q_s, q_t]).requires_grad_()
            loss, _ = criterion(*queries, q_s, q_t)
            loss.backward()
            losses.append((loss.detach(), queries.grad))
        assert_close(losses[1], losses[0])


def test_keys_teach_labels_and_consistency_without_gradient() -> None:
    criterion = built(teacher="keys", history="none")
    q_s, q_t, k_s, k_t = batch(0)
    bank_s, bank_t = criterion.banks.source.clone(), criterion.banks.target.clone()
    log_s, log_t = (
        crossed_similarities(q_s, k_t, bank_t, 0.2),
        crossed_similarities(q_t, k_s, bank_s, 0.2),
    )
    told_s, told_t = (
        crossed_similarities(k_s, k_t, bank_t, 0.2),
        crossed_similarities(k_t, k_s, bank_s, 0.2),
    )
    options: dict[str, Any] = {"positive_mass": 0.9, "sharpness": 2.0, "iterations": 3}
    k_s.requires_grad_()
    _, terms = criterion(q_s.requires_grad_(), q_t, k_s, k_t)
    assert_close(
        terms,
        {
            "labels_source": cross_entropy(soft_labels(told_s, **options), log_t),
            "labels_target": cross_entropy(soft_labels(told_t, **options), log_s),
            "consistency_source": cross_entropy(told_s.exp(), log_t),
            "consistency_target": cross_entropy(told_t.exp(), log_s),
        },
    )
    torch.stack(list(terms.values())).sum().backward()
    assert q_s.grad is not None
    assert k_s.grad is None


# Float64 features with the default criterion, whose banks are float32


@each_history
@pytest.mark.parametrize("plain", [False, True])
def test_float64_features_work_with_the_default_criterion(history: History, plain: bool) -> None:
    """What is computed of a batch is float64; banks and history round what they keep."""
    torch.manual_seed(0)
    criterion = XMoCoLoss(D, K, history=history)
    criterion.plain = plain
    exact = Algorithm(
        Ks=criterion.banks.source.double().numpy(),
        Kt=criterion.banks.target.double().numpy(),
        tau=0.2,
        lam=2.0,
        xi=0.9,
        niters=3,
        history=history,
    )
    exact_gradients = built(history=history)
    exact_gradients.banks.load_state_dict(criterion.banks.state_dict())
    for step in range(5):
        loss, terms, gradient = step_of(criterion, step)
        assert loss.dtype == gradient.dtype == torch.float64
        expected = exact.step(*(x.numpy() for x in batch(step)))
        tolerance = 1e-12 if step == 0 else 1e-5
        values = {name: term.item() for name, term in terms.items()}
        assert values == pytest.approx(expected, rel=tolerance)
        assert loss.item() == pytest.approx(sum(expected.values()), rel=tolerance)
        assert_close(gradient, step_of(exact_gradients, step)[2], rtol=0, atol=tolerance)
    assert criterion.banks.source.dtype == torch.float32


def test_float64_features_work_with_the_default_moco_loss() -> None:
    torch.manual_seed(0)
    criterion, exact = MoCoLoss(D, K), moco()
    exact.load_state_dict(criterion.state_dict())
    for step in range(4):
        loss, _, gradient = step_of(criterion, step)
        expected, _, expected_gradient = step_of(exact, step)
        assert loss.dtype == gradient.dtype == torch.float64
        assert_close(loss, expected, rtol=1e-6, atol=1e-6)
        assert_close(gradient, expected_gradient, rtol=0, atol=1e-6)
