"""The paper's metrics against their definitions, spelt out, and against scikit-learn."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import balanced_accuracy_score, top_k_accuracy_score
from torch import Tensor

from xmoco.errors import UserError
from xmoco.evaluate.metrics import eleven_point_map, mean_per_class, top_k

seeds = st.integers(0, 2**31)


def single_labels(
    seed: int, count: int = 60, classes: int = 6, levels: int = 4
) -> tuple[Tensor, Tensor]:
    """Scores of few levels, so that many are equal."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randint(levels, (count, classes), generator=generator).float()
    return scores, torch.randint(classes, (count,), generator=generator)


def many_labels(
    seed: int, count: int = 40, classes: int = 5, levels: int = 7
) -> tuple[Tensor, Tensor]:
    """As above; the first class always has an image, others perhaps not."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randint(levels, (count, classes), generator=generator).float()
    labels = (torch.rand(count, classes, generator=generator) < 0.15).long()
    labels[0, 0] = 1
    return scores, labels


def voc_by_the_book(scores: Tensor, labels: Tensor) -> float:
    """The definition of the VOC 2007 development kit, one threshold after another."""
    averages = []
    for column, truth in zip(scores.T.tolist(), labels.T.tolist(), strict=True):
        if sum(truth) == 0:
            continue
        curve = []
        for threshold in sorted(set(column)):
            retrieved = [t for score, t in zip(column, truth, strict=True) if score >= threshold]
            curve.append((sum(retrieved) / sum(truth), sum(retrieved) / len(retrieved)))
        total = 0.0
        for point in np.arange(0, 1.1, 0.1):
            reached = [p for recall, p in curve if recall >= point]
            total += max(reached, default=0.0) / 11
        averages.append(total)
    return 100 * float(np.mean(averages))


@given(seed=seeds, k=st.integers(1, 6))
@settings(max_examples=30, deadline=None)
def test_top_k_is_a_stable_sort(seed: int, k: int) -> None:
    scores, labels = single_labels(seed)
    best = scores.sort(dim=1, descending=True, stable=True).indices[:, :k]
    expected = 100 * float((best == labels[:, None]).any(dim=1).double().mean())
    assert top_k(scores, labels, k) == pytest.approx(expected)


def test_scikit_learn_agrees_on_top_k() -> None:
    generator = torch.Generator().manual_seed(0)
    scores = torch.rand(200, 12, generator=generator)
    labels = torch.randint(12, (200,), generator=generator)
    for k in (1, 5):
        expected = top_k_accuracy_score(labels, scores, k=k, labels=range(12))
        assert top_k(scores, labels, k) == pytest.approx(100 * expected)
    assert top_k(scores, labels, 12) == top_k(scores, labels, 99) == 100


@pytest.mark.filterwarnings("ignore:y_pred contains classes not in y_true")
@given(seed=seeds, missing=st.booleans())
@settings(max_examples=30, deadline=None)
def test_scikit_learn_agrees_on_mean_per_class(seed: int, missing: bool) -> None:
    scores, labels = single_labels(seed)
    if missing:
        labels = labels.clamp(min=2)
    expected = 100 * balanced_accuracy_score(labels, scores.argmax(dim=1))
    assert mean_per_class(scores, labels) == pytest.approx(expected)


def test_rare_classes_weigh_as_much_as_common_ones() -> None:
    scores = torch.tensor([[2.0, 1.0]]).repeat(10, 1)
    labels = torch.tensor([0] * 9 + [1])
    assert top_k(scores, labels, 1) == pytest.approx(90)
    assert mean_per_class(scores, labels) == pytest.approx(50)


@given(seed=seeds, levels=st.sampled_from([1, 3, 10, 10_000]))
@settings(max_examples=40, deadline=None)
def test_eleven_points_by_the_book(seed: int, levels: int) -> None:
    scores, labels = many_labels(seed, levels=levels)
    expected = voc_by_the_book(scores, labels)
    assert eleven_point_map(scores, labels) == pytest.approx(expected)


def test_eleven_points_by_hand() -> None:
    # In order: right, wrong, right. Recall 0 … 0.5 at precision 1; 0.6 … 1 at 2/3.
    scores, labels = torch.tensor([[3.0], [2.0], [1.0]]), torch.tensor([[1], [0], [1]])
    assert eleven_point_map(scores, labels) == pytest.approx(100 * (6 + 5 * 2 / 3) / 11)
    # Ten positives, and wrong ones between: recall 3/10 falls short of VOC's point 3 · 0.1.
    labels = torch.tensor([1, 1, 1] + [0] * 7 + [1] * 7)[:, None]
    scores = -torch.arange(17.0)[:, None]
    assert eleven_point_map(scores, labels) == pytest.approx(100 * (3 + 8 * 10 / 17) / 11)


def test_constant_scores_have_the_precision_of_chance() -> None:
    labels = torch.zeros(50, 1).index_fill(0, torch.arange(5), 1)
    assert eleven_point_map(torch.zeros(50, 1), labels) == pytest.approx(10)


def test_a_class_without_positives_is_left_out() -> None:
    scores, labels = many_labels(3)
    more = torch.cat([labels, torch.zeros(40, 1, dtype=torch.long)], dim=1)
    scores = torch.cat([scores, scores[:, :1]], dim=1)
    assert eleven_point_map(scores, more) == eleven_point_map(scores[:, :-1], labels)


@given(seed=seeds, shift=st.integers(-50, 50))
@settings(max_examples=30, deadline=None)
def test_order_of_images_and_shift_of_scores_change_nothing(seed: int, shift: int) -> None:
    scores, labels = single_labels(seed)
    several, zeros_and_ones = many_labels(seed)
    order = torch.randperm(60, generator=torch.Generator().manual_seed(seed))
    other = order[order < 40]
    found = (
        top_k(scores, labels, 2),
        mean_per_class(scores, labels),
        eleven_point_map(several, zeros_and_ones),
    )
    again = (
        top_k((scores + shift)[order], labels[order], 2),
        mean_per_class((scores + shift)[order], labels[order]),
        eleven_point_map((several + shift)[other], zeros_and_ones[other]),
    )
    assert again == pytest.approx(found)
    assert all(0 <= value <= 100 for value in found)


def test_perfect_and_worst() -> None:
    labels = torch.tensor([0, 2, 1, 2])
    perfect = torch.eye(3)[labels]
    assert top_k(perfect, labels, 1) == mean_per_class(perfect, labels) == 100
    assert top_k(-perfect, labels, 2) == mean_per_class(-perfect, labels) == 0
    assert eleven_point_map(perfect, perfect.long()) == 100


def test_not_a_number_never_helps() -> None:
    scores, labels = torch.full((4, 3), torch.nan), torch.tensor([0, 1, 2, 0])
    assert top_k(scores, labels, 2) == mean_per_class(scores, labels) == 0
    first_unknown = torch.tensor([[torch.nan], [1.0]])
    assert eleven_point_map(first_unknown, torch.tensor([[0], [1]])) == 100
    assert eleven_point_map(first_unknown, torch.tensor([[1], [0]])) == 50


def test_what_does_not_fit_is_refused() -> None:
    scores = torch.zeros(3, 2)
    for labels in (torch.zeros(2), torch.zeros(3, 2), torch.zeros(0)):
        with pytest.raises(UserError, match="cannot be judged"):
            top_k(scores, labels.long(), 1)
    with pytest.raises(UserError, match="at least one"):
        mean_per_class(torch.zeros(0, 2), torch.zeros(0).long())
    with pytest.raises(UserError, match=r"from 0 to 2, but the scores are of 2 classes"):
        top_k(scores, torch.tensor([0, 1, 2]), 1)
    with pytest.raises(UserError, match="cannot be judged"):
        eleven_point_map(scores, torch.zeros(3, 3))
    with pytest.raises(UserError, match="none does"):
        eleven_point_map(scores, torch.zeros(3, 2))
