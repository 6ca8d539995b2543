"""kNN accuracy against scikit-learn and brute force, whatever the block sizes."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.neighbors import KNeighborsClassifier
from torch import Tensor

from xmoco.evaluate import knn
from xmoco.evaluate.knn import knn_accuracy, nearest_neighbours, voters


def clouds(count: int, seed: int, classes: int = 5, size: int = 8) -> tuple[Tensor, Tensor]:
    """Unit vectors around a centre per class, close enough to be confused."""
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(classes, size, generator=torch.Generator().manual_seed(99))
    labels = torch.randint(classes, (count,), generator=generator)
    points = centres[labels] + 1.5 * torch.randn(count, size, generator=generator)
    return F.normalize(points, dim=1), labels


def brute_force(
    bank: Tensor, labels: Tensor, queries: Tensor, k: int, temperature: float, alone: bool
) -> list[int]:
    """Predicted classes, one query at a time, in float64."""
    predicted = []
    for position, query in enumerate(queries.double()):
        similarities = (bank.double() @ query).tolist()
        if alone:
            similarities[position] = -np.inf
        voters = min(k, len(bank) - alone)
        order = np.argsort(similarities)[::-1][:voters].tolist()
        votes = np.zeros(int(labels.max()) + 1)
        for j in order:
            votes[labels[j]] += np.exp(similarities[j] / temperature)
        predicted.append(int(votes.argmax()))
    return predicted


@pytest.mark.parametrize("k", [1, 5, 20, 200])
@pytest.mark.parametrize("temperature", [0.1, 0.5])
def test_scikit_learn_agrees(k: int, temperature: float) -> None:
    bank, bank_labels = clouds(300, seed=0)
    queries, query_labels = clouds(200, seed=1)
    judge = KNeighborsClassifier(
        k, metric="cosine", weights=lambda distances: np.exp((1 - distances) / temperature)
    ).fit(bank.double().numpy(), bank_labels.numpy())
    expected = 100 * judge.score(queries.double().numpy(), query_labels.numpy())
    found = knn_accuracy(bank, bank_labels, queries, query_labels, ks=(k,), temperature=temperature)
    assert found[k] == pytest.approx(expected)
    assert 20 < found[k] < 100


@pytest.mark.parametrize("k", [1, 7, 59, 1000])
def test_leave_one_out_agrees_with_brute_force(k: int) -> None:
    bank, labels = clouds(60, seed=2)
    predicted = torch.tensor(brute_force(bank, labels, bank, k, 0.1, alone=True))
    expected = 100 * float((predicted == labels).double().mean())
    assert knn_accuracy(bank, labels, None, None, ks=(k,))[k] == pytest.approx(expected)


def test_several_k_at_once_are_each_alone() -> None:
    bank, labels = clouds(80, seed=3)
    ks = (3, 10, 40)
    together = knn_accuracy(bank, labels, None, None, ks=ks)
    assert together == {k: knn_accuracy(bank, labels, None, None, ks=(k,))[k] for k in ks}


@settings(max_examples=20, deadline=None)
@given(
    queries_at_once=st.integers(1, 70),
    bank_at_once=st.integers(1, 70),
    k=st.integers(1, 80),
    alone=st.booleans(),
)
def test_blocks_make_no_difference(
    queries_at_once: int, bank_at_once: int, k: int, alone: bool
) -> None:
    bank, labels = clouds(60, seed=4)
    queries, query_labels = (None, None) if alone else clouds(50, seed=5)
    whole = knn_accuracy(bank, labels, queries, query_labels, ks=(k,))
    (whole_neighbours,) = nearest_neighbours(bank, queries, k)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(knn, "QUERIES_AT_ONCE", queries_at_once)
        patch.setattr(knn, "BANK_AT_ONCE", bank_at_once)
        assert knn_accuracy(bank, labels, queries, query_labels, ks=(k,)) == whole
        blocks = list(nearest_neighbours(bank, queries, k))
    assert [first for first, _, _ in blocks] == list(range(0, 60 if alone else 50, queries_at_once))
    positions = torch.cat([found for _, _, found in blocks])
    similarities = torch.cat([found for _, found, _ in blocks])
    assert torch.equal(positions, whole_neighbours[2])
    torch.testing.assert_close(similarities, whole_neighbours[1])
    assert positions.shape[1] == voters(k, 60, alone)
    if alone:
        assert not (positions == torch.arange(60)[:, None]).any()
        assert similarities.isfinite().all()


def test_no_more_vote_than_there_are() -> None:
    assert [voters(k, 10, alone=False) for k in (1, 10, 11, 200)] == [1, 10, 10, 10]
    assert [voters(k, 10, alone=True) for k in (1, 9, 10, 200)] == [1, 9, 9, 9]


def test_classes_that_only_the_queries_have_count_as_wrong() -> None:
    bank = torch.eye(2)
    found = knn_accuracy(
        bank, torch.tensor([0, 1]), bank[[0, 1, 1]], torch.tensor([0, 1, 7]), ks=(1,)
    )
    assert found[1] == pytest.approx(200 / 3)
