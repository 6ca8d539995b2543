"""The fast losses against the plain ones: gradients in closed form, and streamed past queries.

Triton's own kernel is run by test_streamed.py; here a few lines of PyTorch stand in for it, so that
everything around it is checked in full precision.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.testing import assert_close

from xmoco.losses import MoCoLoss, XMoCoLoss, soft_labels, streamed
from xmoco.losses.bank import PairedRing
from xmoco.losses.sinkhorn import column_scaling
from xmoco.losses.streamed import can_stream

Loss = MoCoLoss | XMoCoLoss

BUILD: dict[str, Callable[[int, int], Loss]] = {
    "moco": lambda d, K: MoCoLoss(d, K),
    "queries": lambda d, K: XMoCoLoss(d, K, history="queries"),
    "probabilities": lambda d, K: XMoCoLoss(d, K, history="probabilities"),
    "none": lambda d, K: XMoCoLoss(d, K, history="none"),
}


def twins(kind: str, d: int, K: int, precision: torch.dtype) -> tuple[Loss, Loss]:
    """The same loss twice, fast and plain."""
    fast, plain = BUILD[kind](d, K).to(precision), BUILD[kind](d, K).to(precision)
    plain.load_state_dict(fast.state_dict())
    plain.plain = True
    return fast, plain


def random_features(rows: int, size: int, precision: torch.dtype = torch.float64) -> list[Tensor]:
    """q_s, q_t, k_s, k_t: an image's four features are alike."""
    image = torch.randn(rows, size, dtype=precision)
    return [F.normalize(image + 0.7 * torch.randn_like(image), dim=1) for _ in range(4)]


def dense_logsumexp(
    rows: Any, columns: Any, addend: Tensor, scale: float, skip_own: bool = True
) -> Tensor:
    """What the kernel computes, from whole matrices and in float64; in two parts, like the GPU."""
    similarities = rows.vectors.double() @ columns.vectors.double().mT
    exponents = scale * similarities[:, : rows.count, : columns.count] + addend[:, None]
    if skip_own:
        own = rows.slots[: rows.count, None] == columns.slots[: columns.count]
        exponents = exponents.masked_fill(own, -torch.inf)
    half = (columns.count + 1) // 2
    parts = [part.logsumexp(dim=2) for part in exponents.split(half, dim=2)]
    return torch.stack(parts).to(addend.dtype)


@pytest.fixture
def streams_on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(streamed, "_logsumexp", dense_logsumexp)
    monkeypatch.setattr(soft_labels, "can_stream", lambda _: True)
    return


# Gradients in closed form


@given(
    kind=st.sampled_from(sorted(BUILD)),
    N=st.integers(1, 9),
    K=st.integers(2, 12),
    d=st.integers(1, 8),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=60, deadline=None)
def test_terms_and_any_mixture_of_their_gradients_equal_autograds(
    kind: str, N: int, K: int, d: int, seed: int
) -> None:
    """Over enough steps that the history joins; each term counts for itself, not only their sum."""
    torch.manual_seed(seed)
    fast, plain = twins(kind, d, K, torch.float64)
    for _ in range(K // N + 2):
        q_s, q_t, k_s, k_t = random_features(N, d)
        weights = torch.randn(5, dtype=torch.float64)
        gradients = []
        for criterion in (fast, plain):
            queries = torch.stack([q_s, q_t]).requires_grad_()
            loss, terms = criterion(*queries, k_s, k_t)
            values = torch.stack([loss, *terms.values()])
            (values * weights[: len(values)]).sum().backward()
            gradients.append((values.detach(), queries.grad))
        (values, gradient), (expected_values, expected_gradient) = gradients
        assert_close(values, expected_values, rtol=1e-12, atol=1e-12)
        assert_close(gradient, expected_gradient, rtol=1e-9, atol=1e-10)
    for name, value in plain.state_dict().items():
        assert torch.equal(fast.state_dict()[name], value), name


@pytest.mark.parametrize("kind", sorted(BUILD))
def test_no_more_than_the_queries_size_is_kept_for_the_backward_pass(kind: str) -> None:
    N, K, d = 16, 96, 8
    kept: dict[bool, int] = {}
    for plain in (False, True):
        torch.manual_seed(0)
        criterion = BUILD[kind](d, K)
        criterion.plain = plain
        sizes: list[int] = []

        def note(tensor: Tensor, sizes: list[int] = sizes) -> Tensor:
            sizes.append(tensor.numel())
            return tensor

        q_s, q_t, k_s, k_t = random_features(N, d, torch.float32)
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            criterion(q_s.requires_grad_(), q_t.requires_grad_(), k_s, k_t)
        kept[plain] = max(sizes)
    assert kept[False] == N * d
    assert kept[True] >= N * K


def test_without_gradients_nothing_is_attached() -> None:
    q_s, q_t, k_s, k_t = random_features(4, 6, torch.float32)
    for criterion in (MoCoLoss(6, 8), XMoCoLoss(6, 8)):
        with torch.no_grad():
            loss, terms = criterion(q_s.requires_grad_(), q_t.requires_grad_(), k_s, k_t)
        assert not loss.requires_grad
        assert not any(term.requires_grad for term in terms.values())


def test_a_second_derivative_is_refused_not_taken_for_zero() -> None:
    q_s, q_t, k_s, k_t = random_features(4, 6)
    fast, plain = twins("queries", 6, 8, torch.float64)
    loss, _ = fast(q_s.requires_grad_(), q_t, k_s, k_t)
    with pytest.raises(RuntimeError, match="no second derivatives; set plain"):
        torch.autograd.grad(loss, q_s, create_graph=True)
    loss, _ = plain(q_s, q_t, k_s, k_t)
    (gradient,) = torch.autograd.grad(loss, q_s, create_graph=True)
    gradient.sum().backward()
    assert q_s.grad is not None


# Balancing


def log_space(log_kernel: Tensor, iterations: int) -> Tensor:
    """Sinkhorn with every round in log space and float64."""
    kernel = log_kernel.double()
    samples = torch.zeros(len(kernel), 1, dtype=torch.float64)
    for _ in range(iterations):
        columns = -(kernel + samples).logsumexp(dim=0)
        samples = -(kernel + columns).logsumexp(dim=1, keepdim=True)
    return columns


@given(
    M=st.integers(1, 30),
    K=st.integers(1, 30),
    size=st.sampled_from([1.0, 30.0, 300.0, 3000.0]),
    iterations=st.integers(1, 6),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=60, deadline=None)
def test_rounds_outside_log_space_lose_nothing(
    M: int, K: int, size: float, iterations: int, seed: int
) -> None:
    """Also for kernels e^3000 wide, in float32: as exact as its log kernel is."""
    log_kernel = size * torch.randn(M, K, generator=torch.Generator().manual_seed(seed))
    found, expected = column_scaling(log_kernel, iterations), log_space(log_kernel, iterations)
    error = found.double() - expected
    tolerance = 8 * torch.finfo(torch.float32).eps * (8 + 4 * size)
    assert (error - error.mean()).abs().max() < iterations * tolerance


def test_a_thousand_rounds_on_a_hopeless_kernel_stay_finite() -> None:
    """Five samples that all want column 0 of 40: the totals cannot be balanced."""
    log_kernel = torch.zeros(5, 40)
    log_kernel[:, 0] = 500
    assert column_scaling(log_kernel, 1000).isfinite().all()
    assert_close(
        (log_kernel + column_scaling(log_kernel, 1000)).softmax(dim=1).sum(dim=1), torch.ones(5)
    )


# Streamed past queries


@given(
    N=st.integers(1, 14),
    K=st.integers(2, 12),
    d=st.integers(1, 20),
    iterations=st.integers(1, 4),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=40, deadline=None)
def test_streaming_takes_the_same_rows_with_the_same_weights(
    N: int, K: int, d: int, iterations: int, seed: int
) -> None:
    """With features that float16 holds exactly, nothing is left to round."""
    torch.manual_seed(seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(streamed, "_logsumexp", dense_logsumexp)
        patch.setattr(soft_labels, "can_stream", lambda _: True)
        fast = XMoCoLoss(d, K, iterations=iterations).double()
        fast.banks.source.copy_(fast.banks.source.half())
        fast.banks.target.copy_(fast.banks.target.half())
        plain = XMoCoLoss(d, K, iterations=iterations).double()
        plain.load_state_dict(fast.state_dict())
        plain.plain = True
        for _ in range(K // N + 2):
            features = [x.half().double() for x in random_features(N, d)]
            loss, terms = fast(*features)
            expected, expected_terms = plain(*features)
            assert_close(terms, expected_terms, rtol=1e-9, atol=1e-9)
            assert_close(loss, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.usefixtures("streams_on_cpu")
def test_the_whole_loss_is_one_graph_that_no_step_recompiles() -> None:
    """Before the history is full and after, wherever the rings stand."""
    torch.manual_seed(0)
    fast, plain = twins("queries", 6, 20, torch.float32)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(fast, backend=counter, fullgraph=True)
    for _ in range(6):
        q_s, q_t, k_s, k_t = random_features(7, 6, torch.float32)
        found, expected = q_s.clone().requires_grad_(), q_s.clone().requires_grad_()
        loss, _ = compiled(found, q_t, k_s, k_t)
        loss.backward()
        expected_loss, _ = plain(expected, q_t, k_s, k_t)
        expected_loss.backward()
        assert_close(loss, expected_loss, rtol=0, atol=1e-3)
        assert_close(found.grad, expected.grad, rtol=0, atol=1e-3)
    assert counter.frame_count == 1
    assert fast.banks.fill == 1


@pytest.mark.usefixtures("streams_on_cpu")
def test_labels_stream_too() -> None:
    torch.manual_seed(0)
    fast, plain = twins("queries", 6, 9, torch.float32)
    assert isinstance(fast, XMoCoLoss)
    assert isinstance(plain, XMoCoLoss)
    for _ in range(3):
        features = random_features(5, 6, torch.float32)
        fast(*features)
        plain(*features)
    features = random_features(5, 6, torch.float32)
    found, expected = (kind.labels(*kind.similarities(*features)) for kind in (fast, plain))
    assert_close(found, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("installed", [True, False])
def test_only_gpus_with_triton_stream_and_only_what_tiles_can_hold(
    monkeypatch: pytest.MonkeyPatch, installed: bool
) -> None:
    class OnGpu(Tensor):
        is_cuda = True

        def get_device(self) -> int:
            return 1

    def on_gpu(features: int, precision: torch.dtype) -> Tensor:
        return torch.zeros(2, features, dtype=precision).as_subclass(OnGpu)

    monkeypatch.setattr(streamed, "HAS_TRITON", installed)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert not can_stream(torch.zeros(2, 128))
    assert can_stream(on_gpu(128, torch.float32)) == installed
    assert can_stream(on_gpu(128, torch.bfloat16)) == installed
    assert not can_stream(on_gpu(128, torch.float64))
    assert not can_stream(on_gpu(1000, torch.float32))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    assert not can_stream(on_gpu(128, torch.float32))


# Training


@pytest.mark.parametrize("kind", sorted(BUILD))
def test_thirty_steps_of_training_take_the_same_course(kind: str) -> None:
    fast, plain = (course(kind, is_plain) for is_plain in (False, True))
    assert plain[-1] < plain[5]
    assert_close(torch.tensor(fast), torch.tensor(plain), rtol=0, atol=1e-4)


def course(kind: str, is_plain: bool) -> list[float]:
    """The losses of a linear encoder that learns to see through noise."""
    torch.manual_seed(0)
    criterion, encoder = BUILD[kind](16, 64), nn.Linear(24, 16)
    criterion.plain = is_plain
    optimiser = torch.optim.SGD(encoder.parameters(), lr=0.2)
    losses = []
    for _ in range(30):
        images = torch.randn(32, 24)
        q_s, q_t, k_s, k_t = (
            F.normalize(encoder(images + 0.3 * torch.randn_like(images)), dim=1) for _ in range(4)
        )
        loss, _ = criterion(q_s, q_t, k_s.detach(), k_t.detach())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    return losses


# The counter on the device


def history_of(criterion: XMoCoLoss) -> PairedRing:
    assert criterion.soft_labels is not None
    assert criterion.soft_labels.history is not None
    return criterion.soft_labels.history


def test_the_counter_goes_where_the_rows_go() -> None:
    criterion = XMoCoLoss(6, 8).to("meta")
    assert criterion.banks.enqueued.is_meta
    assert history_of(criterion).enqueued.is_meta
    assert XMoCoLoss(6, 8).double().banks.enqueued.dtype == torch.int64


def test_an_emptier_state_makes_a_full_history_wait_again() -> None:
    torch.manual_seed(0)
    criterion = XMoCoLoss(6, 8)
    fresh = {name: torch.as_tensor(value).clone() for name, value in criterion.state_dict().items()}
    for _ in range(3):
        criterion(*random_features(5, 6, torch.float32))
    assert history_of(criterion).full
    criterion.load_state_dict(fresh)
    assert not history_of(criterion).full
    assert criterion.banks.fill == 0


def test_a_saved_state_does_not_count_on() -> None:
    criterion = MoCoLoss(6, 8)
    saved = criterion.state_dict()["banks._extra_state"]
    criterion(*random_features(5, 6, torch.float32))
    assert saved == 0
    assert criterion.banks.enqueued == 5
