"""XMoCoLoss against the paper's algorithm, its labels' constraints, gradients and precision."""

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import Algorithm, Array, get_prob, loss_terms, sinkhorn
from torch import Tensor
from torch.testing import assert_close

from xmoco.losses import MoCoLoss, XMoCoLoss
from xmoco.losses.metrics import label_metrics, similarity_metrics
from xmoco.losses.similarity import cross_entropy, crossed_similarities, past_similarities
from xmoco.losses.soft_labels import History, soft_labels

HISTORIES: list[History] = ["queries", "probabilities", "none"]

Features = tuple[Tensor, Tensor, Tensor, Tensor]

settings_of_the_loss = st.fixed_dictionaries(
    {
        "temperature": st.floats(0.05, 1.0),
        "sharpness": st.floats(0.25, 10.0),
        "positive_mass": st.floats(0.05, 1.0),
        "iterations": st.integers(1, 5),
    }
)


def unit_rows(rows: int, size: int, generator: torch.Generator) -> Tensor:
    return F.normalize(torch.randn(rows, size, dtype=torch.float64, generator=generator), dim=1)


def random_features(rows: int, size: int, generator: torch.Generator) -> Features:
    """q_s, q_t, k_s, k_t: an image's four features are alike, as they are in training."""
    image = unit_rows(rows, size, generator)
    q_s, q_t, k_s, k_t = (
        F.normalize(image + 0.7 * unit_rows(rows, size, generator), dim=1) for _ in range(4)
    )
    return q_s, q_t, k_s, k_t


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def paper(criterion: XMoCoLoss) -> Algorithm:
    """The paper's algorithm with the same settings and banks."""
    labels = criterion.soft_labels
    assert labels is not None
    return Algorithm(
        Ks=criterion.banks.source.double().numpy().copy(),
        Kt=criterion.banks.target.double().numpy().copy(),
        tau=criterion.temperature,
        lam=labels.sharpness,
        xi=labels.positive_mass,
        niters=labels.iterations,
        history=labels.history_kind,
    )


def arrays(features: Features) -> list[Array]:
    return [tensor.detach().double().numpy() for tensor in features]


def assert_same(
    loss: Tensor, terms: dict[str, Tensor], expected: dict[str, float], tolerance: float
) -> None:
    """Within ``tolerance``, relative to the value where it exceeds 1."""
    assert {name: value.item() for name, value in terms.items()} == pytest.approx(
        expected, rel=tolerance, abs=tolerance
    )
    assert loss.item() == pytest.approx(sum(expected.values()), rel=tolerance, abs=tolerance)


@given(
    N=st.integers(1, 9),
    K=st.integers(2, 12),
    d=st.integers(2, 8),
    options=settings_of_the_loss,
    history=st.sampled_from(HISTORIES),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=150, deadline=None)
def test_equals_the_papers_algorithm_in_float64(
    N: int, K: int, d: int, options: dict[str, Any], history: History, seed: int
) -> None:
    """Over enough steps that the history joins and both rings wrap around."""
    criterion = XMoCoLoss(d, K, history=history, **options).double()
    algorithm, generator = paper(criterion), seeded(seed)
    for _ in range(2 * K // N + 2):
        features = random_features(N, d, generator)
        loss, terms = criterion(*features)
        assert_same(loss, terms, algorithm.step(*arrays(features)), tolerance=1e-9)


@given(
    N=st.integers(1, 9),
    K=st.integers(2, 12),
    options=settings_of_the_loss,
    history=st.sampled_from(HISTORIES),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=40, deadline=None)
def test_float32_is_as_accurate_as_float32_can_be(
    N: int, K: int, options: dict[str, Any], history: History, seed: int
) -> None:
    """An error of one unit in a similarity becomes λ/τ of them in a label's logarithm."""
    criterion = XMoCoLoss(6, K, history=history, **options)
    algorithm, generator = paper(criterion), seeded(seed)
    tolerance = (
        4 * torch.finfo(torch.float32).eps * (4 + options["sharpness"] / options["temperature"])
    )
    for _ in range(K // N + 2):
        q_s, q_t, k_s, k_t = (x.float() for x in random_features(N, 6, generator))
        loss, terms = criterion(q_s, q_t, k_s, k_t)
        assert loss.dtype == torch.float32
        assert_same(loss, terms, algorithm.step(*arrays((q_s, q_t, k_s, k_t))), tolerance)


@given(
    N=st.integers(1, 20),
    K=st.integers(1, 20),
    past=st.integers(0, 20),
    options=settings_of_the_loss,
    seed=st.integers(0, 2**32),
)
@settings(max_examples=60, deadline=None)
def test_labels_are_distributions_with_the_positive_mass_in_front(
    N: int, K: int, past: int, options: dict[str, Any], seed: int
) -> None:
    temperature = options.pop("temperature")
    generator = seeded(seed)
    q, k, bank = (unit_rows(rows, 5, generator) for rows in (N, N, K))
    log_p = crossed_similarities(q, k, bank, temperature)
    history = crossed_similarities(
        unit_rows(past, 5, generator), unit_rows(past, 5, generator), bank, temperature
    )[:, 1:]
    for precision in (torch.float64, torch.float32):
        y = soft_labels(log_p.to(precision), history=history.to(precision), **options)
        assert y.dtype == precision
        assert y.shape == (N, 1 + K)
        assert (y >= 0).all()
        assert (y[:, 0] == options["positive_mass"]).all()
        assert_close(y.sum(dim=1), torch.ones(N, dtype=precision))


@pytest.mark.parametrize(("N", "K", "past"), [(12, 12, 0), (24, 7, 0), (6, 16, 16), (1, 9, 30)])
@pytest.mark.parametrize("sharpness", [0.5, 2.0, 6.0])
def test_negatives_get_equal_totals_at_convergence(
    N: int, K: int, past: int, sharpness: float
) -> None:
    """Over all rows that take part, batch and history: their labels are made as one batch here."""
    generator = seeded(N + K)
    bank = unit_rows(K, 8, generator)
    log_p = crossed_similarities(
        unit_rows(N + past, 8, generator), unit_rows(N + past, 8, generator), bank, 0.2
    )
    options: dict[str, Any] = {"positive_mass": 0.8, "sharpness": sharpness, "iterations": 3000}
    everyone = soft_labels(log_p, **options)
    totals = everyone[:, 1:].sum(dim=0)
    assert_close(totals, torch.full_like(totals, (N + past) * 0.2 / K), rtol=1e-6, atol=0)
    batch = soft_labels(log_p[:N], history=log_p[N:, 1:], **options)
    assert_close(batch, everyone[:N])


def test_balancing_with_history_evens_out_a_popular_negative() -> None:
    """A negative that everybody resembles gets no more of the labels than any other."""
    generator = seeded(0)
    bank = unit_rows(16, 8, generator)
    queries = F.normalize(bank[3] + 0.5 * unit_rows(20, 8, generator), dim=1)
    log_p = crossed_similarities(queries, queries, bank, 0.2)
    assert log_p[:, 1:].exp().mean(dim=0).argmax() == 3
    y = soft_labels(
        log_p[:4], positive_mass=0.9, sharpness=2, iterations=200, history=log_p[4:, 1:]
    )
    assert y[:, 1 + 3].mean() < 1.5 * 0.1 / 16


@given(
    N=st.integers(1, 8),
    K=st.integers(2, 10),
    temperature=st.floats(0.05, 1),
    history=st.sampled_from(HISTORIES),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=30, deadline=None)
def test_full_positive_mass_makes_the_label_terms_symmetric_infonce(
    N: int, K: int, temperature: float, history: History, seed: int
) -> None:
    xmoco = XMoCoLoss(5, K, temperature, positive_mass=1.0, history=history).double()
    moco = MoCoLoss(5, K, temperature).double()
    moco.banks.load_state_dict(xmoco.banks.state_dict())
    generator = seeded(seed)
    for _ in range(K // N + 2):
        q_s, q_t, k_s, k_t = random_features(N, 5, generator)
        positives_first = torch.zeros(N, dtype=torch.long)
        logits_s = torch.cat([(q_s * k_t).sum(1, True), q_s @ moco.banks.target.T], 1) / temperature
        logits_t = torch.cat([(q_t * k_s).sum(1, True), q_t @ moco.banks.source.T], 1) / temperature
        _, terms = xmoco(q_s, q_t, k_s, k_t)
        moco_loss, moco_terms = moco(q_s, q_t, k_s, k_t)
        assert_close(terms["labels_target"], F.cross_entropy(logits_s, positives_first))
        assert_close(terms["labels_source"], F.cross_entropy(logits_t, positives_first))
        assert_close(moco_terms["contrast_source"], terms["labels_target"])
        assert_close(moco_terms["contrast_target"], terms["labels_source"])
        assert_close(moco_loss, terms["labels_source"] + terms["labels_target"])


def test_a_past_query_does_not_take_its_own_key_for_a_negative() -> None:
    generator = seeded(1)
    bank, queries = unit_rows(6, 4, generator), unit_rows(4, 4, generator)
    slots = torch.tensor([5, 0, 3, 1])
    log_p = past_similarities(queries, slots, bank, 0.2)
    plain = F.log_softmax(queries @ bank.T / 0.2, dim=1)
    for row, slot in enumerate(slots.tolist()):
        assert log_p[row, slot] == -torch.inf
        others = [column for column in range(6) if column != slot]
        assert_close(log_p[row, others], plain[row, others])


# Gradients


def frozen(criterion: XMoCoLoss, features: Features) -> Array:
    """Finite differences by q_s and q_t of the paper's loss, labels and targets held fixed."""
    algorithm = paper(criterion)
    q, keys = np.stack(arrays(features)[:2]), arrays(features)[2:]

    def probabilities(q: Array) -> tuple[Array, Array]:
        return (
            get_prob(q[0], keys[1], algorithm.Kt, algorithm.tau),
            get_prob(q[1], keys[0], algorithm.Ks, algorithm.tau),
        )

    Ps, Pt = probabilities(q)
    Ys, Yt = (sinkhorn(P, algorithm.lam, algorithm.xi, algorithm.niters) for P in (Ps, Pt))

    def loss(q: Array) -> float:
        Ps_now, Pt_now = probabilities(q)
        told = loss_terms(Ps_now, Pt_now, Ys + Ps, Yt + Pt)  # CE is linear in its target
        return told["labels_source"] + told["labels_target"]

    assert loss(q) == pytest.approx(sum(loss_terms(Ps, Pt, Ys, Yt).values()))
    gradient, step = np.zeros_like(q), 1e-6
    for index in np.ndindex(q.shape):
        shift = np.zeros_like(q)
        shift[index] = step
        gradient[index] = (loss(q + shift) - loss(q - shift)) / (2 * step)
    return gradient


@pytest.mark.parametrize("positive_mass", [0.3, 0.9, 1.0])
@pytest.mark.parametrize(("temperature", "sharpness"), [(0.2, 2.0), (0.1, 5.0)])
def test_gradients_match_finite_differences(
    positive_mass: float, temperature: float, sharpness: float
) -> None:
    criterion = XMoCoLoss(4, 7, temperature, sharpness, positive_mass).double()
    features = random_features(3, 4, seeded(3))
    expected = frozen(criterion, features)
    q_s, q_t = (x.requires_grad_() for x in features[:2])
    criterion(*features)[0].backward()
    assert q_s.grad is not None
    assert q_t.grad is not None
    assert_close(
        torch.stack([q_s.grad, q_t.grad]), torch.from_numpy(expected), rtol=1e-6, atol=1e-7
    )


def test_similarities_pass_gradcheck() -> None:
    generator = seeded(4)
    q, k, bank = (unit_rows(rows, 4, generator) for rows in (3, 3, 6))
    target = F.softmax(torch.randn(3, 7, dtype=torch.float64, generator=generator), dim=1)
    assert torch.autograd.gradcheck(
        lambda q: cross_entropy(target, crossed_similarities(q, k, bank, 0.2)),
        (q.requires_grad_(),),
    )


@pytest.mark.parametrize("kind", [XMoCoLoss, MoCoLoss])
def test_no_gradient_reaches_keys_banks_or_history(kind: type[MoCoLoss | XMoCoLoss]) -> None:
    criterion = kind(4, 6).double()
    generator = seeded(5)
    for _ in range(3):  # the last step has a full history
        features = tuple(x.requires_grad_() for x in random_features(4, 4, generator))
        q_s, q_t, k_s, k_t = features
        criterion(q_s, q_t, k_s, k_t)[0].backward()
        for query in (q_s, q_t):
            assert query.grad is not None
            assert query.grad.abs().sum() > 0
        assert k_s.grad is None
        assert k_t.grad is None
    for name, buffer in criterion.named_buffers():
        assert not buffer.requires_grad, name
        assert buffer.grad_fn is None, name


def test_no_gradient_reaches_labels() -> None:
    criterion = XMoCoLoss(4, 6).double()
    q_s, q_t, k_s, k_t = random_features(4, 4, seeded(6))
    criterion.plain = True
    P_s, P_t = criterion.similarities(q_s.requires_grad_(), q_t.requires_grad_(), k_s, k_t)
    assert P_s.log_p.requires_grad
    for labels in criterion.labels(P_s, P_t):
        assert labels is not None
        assert not labels.requires_grad
    told = F.softmax(torch.randn(4, 7), dim=1).requires_grad_()
    cross_entropy(told, torch.randn(4, 7, requires_grad=True)).backward()
    assert told.grad is None


# Precision


@pytest.mark.parametrize("precision", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("history", HISTORIES)
def test_finite_at_sharp_settings_and_half_precision(
    precision: torch.dtype, history: History
) -> None:
    criterion = XMoCoLoss(16, 24, temperature=0.05, sharpness=10, history=history)
    generator = seeded(7)
    hardest = torch.eye(16, dtype=torch.float64)[:1].expand(8, 16)
    for step in range(8):
        features = random_features(8, 16, generator)
        if step >= 4:  # collapse: all images alike, then keys opposite to their queries
            features = (hardest, hardest, hardest, hardest if step < 6 else -hardest)
        q_s, q_t, k_s, k_t = (x.to(precision) for x in features)
        q_s, q_t = q_s.clone().requires_grad_(), q_t.clone().requires_grad_()
        loss, terms = criterion(q_s, q_t, k_s, k_t)
        loss.backward()
        assert loss.dtype == torch.float32
        assert all(term.isfinite() for term in terms.values())
        for query in (q_s, q_t):
            assert query.grad is not None
            assert query.grad.dtype == precision
            assert query.grad.isfinite().all()


@pytest.mark.parametrize("history", HISTORIES)
def test_autocast_changes_nothing(history: History) -> None:
    torch.manual_seed(8)
    inside = XMoCoLoss(16, 24, 0.05, 10, history=history)
    outside = XMoCoLoss(16, 24, 0.05, 10, history=history)
    outside.load_state_dict(inside.state_dict())
    generator = seeded(8)
    for _ in range(5):
        q_s, q_t, k_s, k_t = (x.float() for x in random_features(8, 16, generator))
        gradients = []
        for criterion, enabled in ((inside, True), (outside, False)):
            query = q_s.clone().requires_grad_()
            with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                loss, _ = criterion(query, q_t, k_s, k_t)
            loss.backward()
            assert query.grad is not None
            gradients.append((loss.detach(), query.grad))
        (loss_inside, gradient_inside), (loss_outside, gradient_outside) = gradients
        assert loss_inside.dtype == torch.float32
        assert torch.equal(loss_inside, loss_outside)
        assert torch.equal(gradient_inside, gradient_outside)


def test_tiny_probabilities_keep_their_differences() -> None:
    """P^λ here is near 1e−170: powers of float32 probabilities would all be 0, labels 0/0."""
    log_p = torch.tensor([[0.0, -38.0, -39.0, -40.0], [0.0, -40.0, -38.5, -39.0]])
    options: dict[str, Any] = {"positive_mass": 0.6, "sharpness": 10.0, "iterations": 3}
    expected = sinkhorn(log_p.double().exp().numpy(), 10, 0.6, 3)
    assert_close(
        soft_labels(log_p, **options).double(), torch.from_numpy(expected), rtol=1e-4, atol=1e-7
    )


# Wrong input


@pytest.mark.parametrize("kind", [XMoCoLoss, MoCoLoss])
@pytest.mark.parametrize("wrong", range(4))
@pytest.mark.parametrize("shape", [(4, 5), (3, 6), (6,), (4, 6, 1)])
def test_wrong_shapes_are_named(
    kind: type[MoCoLoss | XMoCoLoss], wrong: int, shape: tuple[int, ...]
) -> None:
    features = [torch.randn(4, 6) for _ in range(4)]
    features[wrong] = torch.randn(*shape)
    with pytest.raises(ValueError, match=r"expected .* one row per image"):
        kind(6, 8)(*features)


# The metrics of a step


def test_metrics_describe_the_batch_and_looking_changes_nothing() -> None:
    criterion = XMoCoLoss(5, 7, positive_mass=0.7).double()
    generator = seeded(9)
    for _ in range(3):
        criterion(*random_features(4, 5, generator))
    before = {name: value.clone() for name, value in criterion.state_dict().items()}
    features = random_features(4, 5, generator)
    P_s, P_t = criterion.similarities(*features)
    Y_s, Y_t = criterion.labels(P_s, P_t)
    assert Y_s is not None
    assert Y_t is not None
    metrics = similarity_metrics(P_s.log_p, P_t.log_p) | label_metrics(Y_s, Y_t)
    assert all(torch.equal(before[name], value) for name, value in criterion.state_dict().items())
    algorithm = paper(criterion)
    q_s, q_t, k_s, k_t = arrays(features)
    Ps = get_prob(q_s, k_t, algorithm.Kt, algorithm.tau)
    Pt = get_prob(q_t, k_s, algorithm.Ks, algorithm.tau)
    labels = [y.numpy() for y in (Y_s, Y_t)]
    entropy = np.mean([-(y * np.log(y)).sum(axis=1).mean() for y in labels])
    assert {name: value.item() for name, value in metrics.items()} == pytest.approx(
        {
            "positive_probability": (Ps[:, 0].mean() + Pt[:, 0].mean()) / 2,
            "consistency_gap": np.abs(Ps - Pt).sum(axis=1).mean() / 2,
            "label_entropy": entropy,
        }
    )


@pytest.mark.parametrize(
    "wrong",
    [
        {"history": "past"},
        {"iterations": 0},
        {"sharpness": 0.0},
        {"positive_mass": 0.0},
        {"positive_mass": 1.1},
        {"bank_length": 1},
        {"temperature": 0.0},
        {"label_weight": -0.1},
        {"label_weight": 1.1},
        {"consistency_weight": -1.0},
        {"teacher": "labels"},
    ],
)
def test_settings_that_cannot_work_are_refused_by_name(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        XMoCoLoss(**{"feature_size": 4, "bank_length": 8} | wrong)
