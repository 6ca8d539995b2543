"""kNN accuracy against scikit-learn and brute force, whatever the block sizes."""

from collections.abc import Iterator
from contextlib import contextmanager

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
    """Vectors of any length around a centre per class, close enough to be confused."""
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(classes, size, generator=torch.Generator().manual_seed(99))
    labels = torch.randint(classes, (count,), generator=generator)
    points = centres[labels] + 1.5 * torch.randn(count, size, generator=generator)
    return points, labels


def brute_force(
    bank: Tensor, labels: Tensor, queries: Tensor, k: int, temperature: float, alone: bool
) -> list[int]:
    """Predicted classes, one query at a time, in float64."""
    predicted = []
    unit = F.normalize(bank.double(), dim=1)
    for position, query in enumerate(F.normalize(queries.double(), dim=1)):
        similarities = (unit @ query).tolist()
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


@settings(max_examples=30, deadline=None)
@given(
    queries_at_once=st.integers(1, 70),
    bank_at_once=st.integers(1, 70),
    per_round=st.integers(1, 70),
    k=st.integers(1, 80),
    alone=st.booleans(),
)
def test_blocks_make_no_difference(
    queries_at_once: int, bank_at_once: int, per_round: int, k: int, alone: bool
) -> None:
    bank, labels = clouds(60, seed=4)
    queries, query_labels = (None, None) if alone else clouds(50, seed=5)
    whole = knn_accuracy(bank, labels, queries, query_labels, ks=(k,))
    ((_, whole_similarities, whole_positions),) = nearest_neighbours(bank, queries, k)
    before = bank.clone()
    with blocks(queries_at_once, bank_at_once, per_round, k=voters(k, 60, alone)):
        assert knn_accuracy(bank, labels, queries, query_labels, ks=(k,)) == whole
        rounds = list(nearest_neighbours(bank, queries, k))
    assert [first for first, _, _ in rounds] == list(range(0, 60 if alone else 50, per_round))
    similarities = torch.cat([found for _, found, _ in rounds])
    positions = torch.cat([found for _, _, found in rounds])
    assert torch.equal(positions, whole_positions)
    torch.testing.assert_close(similarities, whole_similarities)
    assert positions.shape[1] == voters(k, 60, alone)
    assert torch.equal(bank, before)
    if alone:
        assert not (positions == torch.arange(60)[:, None]).any()
        assert similarities.isfinite().all()


@contextmanager
def blocks(queries_at_once: int, bank_at_once: int, per_round: int, k: int) -> Iterator[None]:
    """Blocks of these sizes, for features of 8 dimensions."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(knn, "QUERIES_AT_ONCE", queries_at_once)
        patch.setattr(knn, "BANK_AT_ONCE", bank_at_once)
        patch.setattr(knn, "WAITING", per_round * (4 * 8 + 12 * k))
        yield


@settings(max_examples=30, deadline=None)
@given(
    places=st.lists(st.integers(0, 3), min_size=2, max_size=40),
    bank_at_once=st.integers(1, 15),
    k=st.integers(1, 50),
    alone=st.booleans(),
)
def test_of_equally_similar_images_any_may_vote(
    places: list[int], bank_at_once: int, k: int, alone: bool
) -> None:
    """Images of four kinds: any two are the same or have nothing in common."""
    labels = torch.tensor(places)
    bank = torch.eye(4, 8)[labels] * 2.0 ** torch.arange(len(places))[:, None]  # exact unit length
    queries = None if alone else torch.eye(4, 8)
    asked = bank if queries is None else queries
    expected = F.normalize(asked, dim=1) @ F.normalize(bank, dim=1).T
    if alone:
        expected.fill_diagonal_(-torch.inf)
    with blocks(3, bank_at_once, 5, k=voters(k, len(bank), alone)):
        rounds = list(nearest_neighbours(bank, queries, k))
        accuracy = knn_accuracy(bank, labels, queries, None if alone else torch.arange(4), ks=(k,))
    similarities = torch.cat([found for _, found, _ in rounds])
    positions = torch.cat([found for _, _, found in rounds])
    best = expected.sort(dim=1, descending=True).values[:, : voters(k, len(bank), alone)]
    assert torch.equal(similarities, best)
    assert torch.equal(expected.gather(1, positions), best)
    assert all(len(set(row)) == len(row) for row in positions.tolist())
    # One neighbour of the same kind outweighs all others; without one, only others are voted for.
    assert accuracy[k] == pytest.approx(100 * float((best[:, 0] == 1).double().mean()))


def test_the_lower_of_equally_voted_classes_wins() -> None:
    bank, asked = torch.eye(2), torch.ones(2, 2)
    found = knn_accuracy(bank, torch.tensor([1, 0]), asked, torch.tensor([0, 1]), ks=(2,))
    assert found == {2: 50}


def test_progress_counts_pairs() -> None:
    bank, _ = clouds(60, seed=6)
    queries, _ = clouds(25, seed=7)
    told: list[tuple[int, int]] = []
    with blocks(4, 20, 10, k=3):
        for _ in nearest_neighbours(bank, queries, 3, on_progress=lambda *c: told.append(c)):
            pass
    assert [done for done, _ in told] == [200, 400, 600, 800, 1000, 1200, 1300, 1400, 1500]
    assert {total for _, total in told} == {25 * 60}


def test_autocast_does_not_blur_similarities() -> None:
    bank, _ = clouds(60, seed=8)
    ((_, expected, _),) = nearest_neighbours(bank, None, 5)
    with torch.autocast("cpu", torch.bfloat16):
        ((_, found, _),) = nearest_neighbours(bank, None, 5)
    assert torch.equal(found, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("resident", [False, True])
def test_on_cuda_a_streamed_bank_gives_the_same(alone: bool, resident: bool) -> None:
    cuda = torch.device("cuda")
    bank, labels = clouds(60, seed=4)
    queries, query_labels = (None, None) if alone else clouds(50, seed=5)
    ((_, similarities, positions),) = nearest_neighbours(bank, queries, 20)
    expected = knn_accuracy(bank, labels, queries, query_labels, ks=(20,))
    place = bank.cuda() if resident else bank
    with blocks(16, 7, 30, k=20):  # many blocks take turns in two places
        rounds = list(nearest_neighbours(place, queries, 20, device=cuda))
        accuracy = knn_accuracy(place, labels, queries, query_labels, ks=(20,), device=cuda)
    assert all(found.is_cuda for _, *both in rounds for found in both)
    assert torch.equal(torch.cat([found for _, _, found in rounds]).cpu(), positions)
    torch.testing.assert_close(torch.cat([found for _, found, _ in rounds]).cpu(), similarities)
    assert accuracy == expected


@pytest.mark.gpu
def test_on_cuda_memory_does_not_grow_with_the_bank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(knn, "BANK_AT_ONCE", 4096)
    queries = torch.randn(2048, 512)
    peaks = []
    for length in (20_000, 200_000):
        torch.cuda.reset_peak_memory_stats()
        start = torch.cuda.memory_allocated()
        list(
            nearest_neighbours(torch.randn(length, 512), queries, 200, device=torch.device("cuda"))
        )
        peaks.append(torch.cuda.max_memory_allocated() - start)
    assert peaks[1] <= 1.1 * peaks[0]  # ten times the bank
    assert peaks[1] < 200_000 * 512 * 4 / 2


def test_no_more_vote_than_there_are() -> None:
    assert [voters(k, 10, leave_one_out=False) for k in (1, 10, 11, 200)] == [1, 10, 10, 10]
    assert [voters(k, 10, leave_one_out=True) for k in (1, 9, 10, 200)] == [1, 9, 9, 9]


def test_classes_that_only_the_queries_have_count_as_wrong() -> None:
    bank = torch.eye(2)
    found = knn_accuracy(
        bank, torch.tensor([0, 1]), bank[[0, 1, 1]], torch.tensor([0, 1, 7]), ks=(1,)
    )
    assert found[1] == pytest.approx(200 / 3)
