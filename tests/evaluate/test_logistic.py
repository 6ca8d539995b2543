"""Logistic regression against scikit-learn, and on data that solvers trip over."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.linear_model import LogisticRegression
from torch import Tensor

from xmoco.errors import UserError
from xmoco.evaluate import logistic
from xmoco.evaluate.logistic import STRENGTHS, LinearModel, fit, fit_path
from xmoco.evaluate.metrics import top_k


def features(count: int, size: int = 12, classes: int = 4, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Like a backbone's: non-negative, correlated, of uneven spread, with overlapping classes."""
    fixed = torch.Generator().manual_seed(99)
    centres = torch.randn(classes, size, generator=fixed)
    mixing = torch.randn(size, size, generator=fixed)
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(classes, (count,), generator=generator)
    hidden = centres[labels] + 1.5 * torch.randn(count, size, generator=generator)
    hidden = hidden / torch.arange(1, size + 1)
    return F.relu(hidden @ mixing + 0.5), labels


def several_labels(count: int, classes: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """As for VOC: most classes absent from an image, some of them together."""
    vectors, first = features(count, classes=classes, seed=seed)
    second = features(count, classes=classes, seed=seed + 1)[1]
    return vectors, (
        F.one_hot(first, classes) | (F.one_hot(second, classes) * (second < 3)[:, None])
    )


def objective(model: LinearModel, vectors: Tensor, labels: Tensor, strength: float) -> float:
    scores = vectors.double() @ model.weight.double().T + model.bias.double()
    if labels.ndim == 1:
        loss = F.cross_entropy(scores, labels, reduction="sum")
    else:
        loss = F.binary_cross_entropy_with_logits(scores, labels.double(), reduction="sum")
    return float(loss + strength / 2 * model.weight.double().square().sum())


@pytest.fixture
def tight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logistic, "TOLERANCE", 1e-8)
    monkeypatch.setattr(logistic, "ITERATIONS", 5000)


def scikit_learn(vectors: Tensor, labels: Tensor, strength: float) -> LogisticRegression:
    solver = LogisticRegression(C=1 / strength, solver="newton-cg", tol=1e-10, max_iter=5000)
    return solver.fit(vectors.numpy(), labels.numpy())


def test_the_strengths_are_the_papers() -> None:
    assert len(STRENGTHS) == 45
    np.testing.assert_allclose(STRENGTHS, np.logspace(-6, 5, 45))


@pytest.mark.parametrize("strength", [100.0, 1.0, 0.01])
def test_coefficients_are_scikit_learns(tight: None, strength: float) -> None:
    vectors, labels = features(400)
    vectors = vectors.double()
    expected = scikit_learn(vectors, labels, strength)
    found = fit(vectors, labels, 4, strength)
    torch.testing.assert_close(found.weight, torch.tensor(expected.coef_), rtol=1e-4, atol=1e-5)
    # The same number added to every intercept changes no probability.
    intercept = torch.tensor(expected.intercept_ - expected.intercept_.mean())
    torch.testing.assert_close(found.bias - found.bias.mean(), intercept, rtol=1e-4, atol=1e-5)


def test_two_classes_have_two_weights_and_twice_the_strength(tight: None) -> None:
    vectors, labels = features(300, classes=2)
    expected = scikit_learn(vectors.double(), labels, 1.5)
    found = fit(vectors.double(), labels, 2, 3.0)
    difference = found.weight[1] - found.weight[0]
    torch.testing.assert_close(difference, torch.tensor(expected.coef_[0]), rtol=1e-4, atol=1e-5)


def test_one_against_the_rest_is_as_many_separate_fits(tight: None) -> None:
    vectors, labels = several_labels(300, classes=20)
    vectors = vectors.double()
    found = fit(vectors, labels, 20, 0.5)
    for column in range(20):
        expected = scikit_learn(vectors, labels[:, column], 0.5)
        weight, bias = torch.tensor(expected.coef_[0]), torch.tensor(expected.intercept_[0])
        torch.testing.assert_close(found.weight[column], weight, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(found.bias[column], bias, rtol=1e-4, atol=1e-5)


def test_accuracies_along_the_path_are_scikit_learns() -> None:
    vectors, labels = features(600)
    others, truth = features(500, seed=1)
    path = list(fit_path(vectors, labels, 4))
    assert [strength for strength, _ in path] == sorted(STRENGTHS, reverse=True)
    for strength, model in path[::4]:
        expected = scikit_learn(vectors.double(), labels, strength)
        accuracy = 100 * expected.score(others.double().numpy(), truth.numpy())
        assert top_k(model.scores(others), truth, 1) == pytest.approx(accuracy, abs=0.6)
        least = objective(
            LinearModel(torch.tensor(expected.coef_), torch.tensor(expected.intercept_)),
            vectors,
            labels,
            strength,
        )
        assert objective(model, vectors, labels, strength) <= least + 1e-5 * len(vectors)


@pytest.mark.parametrize("several", [False, True])
def test_a_path_and_single_fits_reach_the_same_minimum(several: bool) -> None:
    vectors, labels = several_labels(300, 5) if several else features(300, classes=5)
    for strength, model in fit_path(vectors, labels, 5, (1e2, 1e-1, 1e1, 1e0, 1e-1)):
        alone = objective(fit(vectors, labels, 5, strength), vectors, labels, strength)
        assert objective(model, vectors, labels, strength) == pytest.approx(alone, rel=1e-4)


def test_a_start_at_the_minimum_stays_there() -> None:
    vectors, labels = features(300)
    first = fit(vectors, labels, 4, 1.0)
    again = fit(vectors, labels, 4, 1.0, start=first)
    torch.testing.assert_close(again.weight, first.weight, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(again.bias, first.bias, rtol=1e-3, atol=1e-3)


def test_far_fewer_evaluations_than_iterations_of_scikit_learn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    vectors, labels = features(1000, size=48, classes=6)
    evaluations = 0
    predict = logistic._Problem.predict

    def counted(problem: logistic._Problem, coefficients: Tensor) -> tuple[Tensor, Tensor]:
        nonlocal evaluations
        evaluations += 1
        return predict(problem, coefficients)

    monkeypatch.setattr(logistic._Problem, "predict", counted)
    list(fit_path(vectors, labels, 6))
    assert evaluations < 45 * 20


def test_a_fit_tells_whether_it_came_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    vectors, labels = features(300)
    assert fit(vectors, labels, 4, 1e-4).converged
    assert all(model.converged for _, model in fit_path(vectors, labels, 4))
    monkeypatch.setattr(logistic, "ITERATIONS_ALONE", 3)
    assert not fit(vectors, labels, 4, 1e-4).converged
    monkeypatch.setattr(logistic, "ITERATIONS", 1)
    assert not all(model.converged for _, model in fit_path(vectors, labels, 4))


def test_a_single_fit_has_more_iterations_than_one_of_a_path(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(logistic, "ITERATIONS", 5)
    vectors, labels = features(300)
    ((_, hurried),) = fit_path(vectors, labels, 4, [1e-4])
    alone = fit(vectors, labels, 4, 1e-4, start=hurried)
    assert (hurried.converged, alone.converged) == (False, True)
    assert objective(alone, vectors, labels, 1e-4) < objective(hurried, vectors, labels, 1e-4)


def constant_feature(vectors: Tensor) -> Tensor:
    return vectors.index_fill(1, torch.tensor([0, 3]), 7.0)


def doubled_features(vectors: Tensor) -> Tensor:
    return torch.cat([vectors, vectors, -vectors[:, :3]], dim=1)


def nothing_varies(vectors: Tensor) -> Tensor:
    return torch.full_like(vectors, 3.0)


def far_from_zero(vectors: Tensor) -> Tensor:
    return vectors + 1000


def many_dimensions(vectors: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.cat([vectors, torch.rand(len(vectors), 200, generator=generator)], dim=1)


def separable(vectors: Tensor) -> Tensor:
    return F.one_hot(features(len(vectors))[1]) + 0.01 * vectors[:, :4]


def half_precision(vectors: Tensor) -> Tensor:
    return vectors.bfloat16()


@pytest.mark.parametrize(
    "change",
    [
        constant_feature,
        doubled_features,
        nothing_varies,
        far_from_zero,
        many_dimensions,
        separable,
        half_precision,
    ],
)
@pytest.mark.parametrize("several", [False, True])
def test_awkward_features(change: Callable[[Tensor], Tensor], several: bool) -> None:
    vectors, labels = features(80)
    vectors = change(vectors)
    if several:
        labels = F.one_hot(labels, 4)
    nothing = LinearModel(torch.zeros(4, vectors.shape[1]), torch.zeros(4))
    lowest = math.inf
    for strength, model in fit_path(vectors, labels, 4, STRENGTHS[::4]):
        assert model.weight.isfinite().all()
        assert model.bias.isfinite().all()
        reached = objective(model, vectors, labels, strength)
        assert reached < objective(nothing, vectors, labels, strength)
        # A weaker penalty never costs more.
        assert reached <= lowest + 1e-3
        lowest = reached


@pytest.mark.parametrize("scale", [1e-20, 1e-3, 1e3, 1e15])
def test_the_unit_of_the_features_is_the_unit_of_the_strength(scale: float) -> None:
    vectors, labels = features(200)
    found = fit(vectors.double() * scale, labels, 4, 0.1 * scale**2)
    expected = fit(vectors.double(), labels, 4, 0.1)
    torch.testing.assert_close(found.weight * scale, expected.weight, rtol=1e-3, atol=1e-3)
    raw = fit((vectors * scale), labels, 4, 0.1)
    assert raw.weight.isfinite().all()
    assert raw.bias.isfinite().all()


def test_doubled_samples_are_half_the_strength() -> None:
    vectors, labels = features(150)
    once = fit(vectors, labels, 4, 0.5)
    twice = fit(vectors.repeat(2, 1), labels.repeat(2), 4, 1.0)
    torch.testing.assert_close(twice.weight, once.weight, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("several", [False, True])
def test_a_class_without_samples_is_never_likely(several: bool) -> None:
    vectors, labels = features(200)
    given = F.one_hot(labels, 5) if several else labels
    for _, model in fit_path(vectors, given, 5, STRENGTHS[::4]):
        assert model.weight.isfinite().all()
        assert model.bias.isfinite().all()
        scores = model.scores(vectors)
        likelihood = scores.sigmoid() if several else scores.softmax(dim=1)
        assert likelihood[:, 4].max() < 0.05


def test_one_sample_and_one_class() -> None:
    assert fit(torch.ones(1, 3), torch.tensor([0]), 1, 1.0).scores(torch.ones(2, 3)).shape == (2, 1)
    one = fit(torch.ones(1, 3), torch.tensor([1]), 2, 1.0)
    assert one.scores(torch.ones(1, 3)).argmax() == 1


@given(seed=st.integers(0, 2**31), shift=st.floats(-5, 5))
@settings(max_examples=10, deadline=None)
def test_order_rotation_and_shift_change_nothing(seed: int, shift: float) -> None:
    vectors, labels = features(120)
    vectors = vectors.double()
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(120, generator=generator)
    square = torch.randn(12, 12, generator=generator, dtype=torch.float64)
    rotation = torch.linalg.qr(square).Q
    expected = fit(vectors, labels, 4, 1.0).scores(vectors)
    moved = vectors @ rotation + shift
    found = fit(moved[order], labels[order], 4, 1.0).scores(moved)
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2)


def test_blocks_make_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    vectors, labels = features(100)
    whole = fit(vectors.double(), labels, 4, 1.0)
    monkeypatch.setattr(logistic, "ROWS_AT_ONCE", 7)
    parts = fit(vectors.double(), labels, 4, 1.0)
    torch.testing.assert_close(parts.weight, whole.weight)


def test_a_model_keeps_the_type_of_its_vectors() -> None:
    vectors, labels = features(50)
    assert fit(vectors, labels, 4, 1.0).weight.dtype == torch.float32
    assert fit(vectors.double(), labels, 4, 1.0).weight.dtype == torch.float64
    half = fit(vectors.half(), labels, 4, 1.0)
    assert half.scores(vectors.half()).dtype == torch.float32


def test_what_cannot_be_fitted_is_refused() -> None:
    vectors, labels = features(20)
    damaged = vectors.clone()
    damaged[3, 1], damaged[7, 0] = torch.nan, torch.inf
    with pytest.raises(UserError, match="2 of 20 feature vectors hold a value that is not"):
        fit(damaged, labels, 4, 1.0)
    for empty in (torch.zeros(0, 3), torch.zeros(20, 0), torch.zeros(20)):
        with pytest.raises(UserError, match="at least one vector of at least one dimension"):
            fit(empty, labels[: len(empty)], 4, 1.0)
    with pytest.raises(UserError, match=r"shape \(19,\) do not fit 20 vectors and 4 classes"):
        fit(vectors, labels[1:], 4, 1.0)
    with pytest.raises(UserError, match=r"right would be \(20,\) or \(20, 4\)"):
        fit(vectors, F.one_hot(labels, 5), 4, 1.0)
    with pytest.raises(UserError, match="labels go from 0 to 3, but 3 classes are numbered 0 to 2"):
        next(fit_path(vectors, labels, 3))
    with pytest.raises(UserError, match="may only hold 0 and 1"):
        fit(vectors, 2 * F.one_hot(labels, 4), 4, 1.0)
    for strength in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(UserError, match="a positive number, not"):
            fit(vectors, labels, 4, strength)
