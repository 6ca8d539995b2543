"""Banks and history: what is kept, where, for how long, and at what price."""

import io
from collections import deque

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from xmoco.losses import MoCoLoss, XMoCoLoss
from xmoco.losses.bank import KeyBanks, PairedRing
from xmoco.losses.soft_labels import History

HISTORIES: list[History] = ["queries", "probabilities", "none"]


def random_features(rows: int, size: int) -> list[Tensor]:
    """q_s, q_t, k_s, k_t."""
    return [F.normalize(torch.randn(rows, size), dim=1) for _ in range(4)]


@given(
    length=st.integers(1, 12),
    batches=st.lists(st.integers(1, 30), min_size=1, max_size=8),
)
@settings(max_examples=60, deadline=None)
def test_ring_keeps_the_newest_of_both_sides_together(length: int, batches: list[int]) -> None:
    """Row n of the source is n, of the target −n: uneven lengths, batches too long."""
    ring, expected, enqueued = PairedRing(length, 2), deque[int](maxlen=length), 0
    for count in batches:
        numbers = torch.arange(enqueued + 1, enqueued + count + 1)
        rows = numbers[:, None].expand(count, 2).float()
        ring.enqueue(rows, -rows)
        enqueued += count
        expected.extend(numbers.tolist())
        held = ring.source[:, 0].int().tolist()
        assert sorted(number for number in held if number) == list(expected)
        assert torch.equal(ring.source, -ring.target)
        assert ring.enqueued == enqueued
        assert ring.fill == len(expected) / length


def test_oldest_leave_first_and_nothing_else_moves() -> None:
    ring = PairedRing(5, 1)
    for batch in ([1, 2, 3], [4, 5, 6], [7, 8, 9]):
        rows = torch.tensor(batch)[:, None].float()
        ring.enqueue(rows, rows)
    assert ring.source[:, 0].tolist() == [6, 7, 8, 9, 5]


@pytest.mark.parametrize("count", [8, 9, 16, 21])
def test_a_batch_longer_than_the_bank_leaves_its_newest(count: int) -> None:
    ring, rows = PairedRing(8, 1), torch.arange(count)[:, None].float()
    ring.enqueue(rows, rows)
    assert ring.fill == 1
    assert sorted(ring.source[:, 0].tolist()) == list(range(count - 8, count))


def test_banks_begin_with_random_unit_vectors_that_do_not_count_as_filled() -> None:
    banks = KeyBanks(64, 16)
    for side in (banks.source, banks.target):
        assert_close(side.norm(dim=1), torch.ones(64))
    assert not torch.equal(banks.source, banks.target)
    assert banks.fill == 0


@pytest.mark.parametrize("kind", [XMoCoLoss, MoCoLoss])
def test_keys_of_an_image_share_a_slot(kind: type[MoCoLoss | XMoCoLoss]) -> None:
    criterion = kind(8, 7)
    for _ in range(4):
        q_s, q_t, k_s, k_t = random_features(5, 8)
        criterion(q_s, q_t, k_s, k_t)
        for row in range(5):
            (slot,) = (criterion.banks.source == k_s[row]).all(dim=1).nonzero().flatten()
            assert torch.equal(criterion.banks.target[slot], k_t[row])


def test_a_past_query_sits_in_the_slot_of_its_keys() -> None:
    criterion = XMoCoLoss(8, 7)
    assert criterion.soft_labels is not None
    history = criterion.soft_labels.history
    assert history is not None
    for _ in range(4):
        q_s, q_t, k_s, k_t = random_features(5, 8)
        criterion(q_s, q_t, k_s, k_t)
        slots = [int((criterion.banks.source == k).all(dim=1).nonzero()) for k in k_s]
        assert torch.equal(history.source[slots], q_s)
        assert torch.equal(history.target[slots], q_t)


@pytest.mark.parametrize("history", ["queries", "probabilities"])
@pytest.mark.parametrize(("batch", "joins_after"), [(4, 2), (3, 3), (8, 1), (11, 1)])
def test_history_joins_exactly_when_full(history: History, batch: int, joins_after: int) -> None:
    with_history, without = XMoCoLoss(6, 8, history=history), XMoCoLoss(6, 8, history="none")
    without.banks.load_state_dict(with_history.banks.state_dict())
    for step in range(joins_after + 2):
        features = random_features(batch, 6)
        _, terms = with_history(*features)
        _, plain = without(*features)
        same = torch.equal(terms["labels_source"], plain["labels_source"])
        assert same == (step < joins_after)
        assert torch.equal(terms["consistency_source"], plain["consistency_source"])


@pytest.mark.parametrize("history", HISTORIES)
@pytest.mark.parametrize("steps", [0, 1, 3])  # empty, half full, full and wrapped around
def test_state_dict_round_trip_continues_identically(history: History, steps: int) -> None:
    original, restored = XMoCoLoss(6, 8, history=history), XMoCoLoss(6, 8, history=history)
    for _ in range(steps):
        original(*random_features(5, 6))
    file = io.BytesIO()
    torch.save(original.state_dict(), file)
    file.seek(0)
    restored.load_state_dict(torch.load(file, weights_only=True))
    assert restored.banks.fill == original.banks.fill
    for _ in range(4):
        features = random_features(5, 6)
        loss, _ = original(*features)
        again, _ = restored(*features)
        assert torch.equal(loss, again)


def test_state_of_moco_round_trips_too() -> None:
    original, restored = MoCoLoss(6, 8), MoCoLoss(6, 8)
    original(*random_features(5, 6))
    restored.load_state_dict(original.state_dict())
    for _ in range(3):
        features = random_features(5, 6)
        assert torch.equal(original(*features)[0], restored(*features)[0])


@pytest.mark.parametrize("kind", [XMoCoLoss, MoCoLoss])
def test_two_forwards_before_two_backwards(kind: type[MoCoLoss | XMoCoLoss]) -> None:
    """Keys enter the banks before the backward pass needs the old ones."""
    one_by_one, together = kind(6, 8), kind(6, 8)
    together.load_state_dict(one_by_one.state_dict())
    batches = [random_features(5, 6) for _ in range(3)]

    def queries() -> list[Tensor]:
        return [features[0].clone().requires_grad_() for features in batches]

    expected, found = queries(), queries()
    for query, (_, *others) in zip(expected, batches, strict=True):
        one_by_one(query, *others)[0].backward()
    losses = [
        together(query, *others)[0] for query, (_, *others) in zip(found, batches, strict=True)
    ]
    for loss in losses:
        loss.backward()
    for query, reference in zip(found, expected, strict=True):
        assert query.grad is not None
        assert reference.grad is not None
        assert torch.equal(query.grad, reference.grad)


# The memory row of the paper's table on the bank length


def buffer_bytes(criterion: XMoCoLoss) -> int:
    return sum(buffer.nbytes for buffer in criterion.buffers())


@pytest.mark.parametrize(("K", "mib"), [(512, 4), (1024, 13), (2048, 42), (4096, 148), (8192, 552)])
def test_probabilities_cost_what_the_paper_says(K: int, mib: int) -> None:
    """Batch 512, d 128: banks, history and the batch's own rows, both sides, rounded down."""
    criterion = XMoCoLoss(128, K, history="probabilities")
    P_s, P_t = criterion.similarities(*random_features(512, 128))
    rows = P_s.log_p[:, 1:].nbytes + P_t.log_p[:, 1:].nbytes
    assert (buffer_bytes(criterion) + rows) // 2**20 == mib


def test_queries_cost_little() -> None:
    assert buffer_bytes(XMoCoLoss(128, 8192, history="queries")) < 17 * 2**20


def test_without_history_only_the_banks_cost() -> None:
    assert buffer_bytes(XMoCoLoss(128, 512, history="none")) == 2 * 512 * 128 * 4


def test_eval_mode_changes_nothing() -> None:
    torch.manual_seed(0)
    criterion = XMoCoLoss(feature_size=4, bank_length=8).eval()
    features = [torch.nn.functional.normalize(torch.randn(3, 4), dim=1) for _ in range(4)]
    before = {name: torch.as_tensor(v).clone() for name, v in criterion.state_dict().items()}
    first, second = criterion(*features)[0], criterion(*features)[0]
    assert torch.equal(first, second)
    for name, value in criterion.state_dict().items():
        assert torch.equal(torch.as_tensor(value), before[name]), name
