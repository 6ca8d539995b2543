"""Log-space balancing against plain matrix scaling, at extremes, and over several processes."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import Array
from torch import Tensor
from torch.testing import assert_close

from xmoco.losses.sinkhorn import column_scaling


def plan(log_kernel: Tensor, iterations: int) -> Tensor:
    """The transport plan with sample totals 1/M."""
    return (log_kernel + column_scaling(log_kernel, iterations)).softmax(dim=1) / len(log_kernel)


def scaled(kernel: Array, iterations: int) -> Array:
    """Cuturi's scaling of a positive matrix to row totals 1/M and column totals 1/K."""
    M, K = kernel.shape
    rows = np.ones(M)
    for _ in range(iterations):
        columns = (1 / K) / (kernel.T @ rows)
        rows = (1 / M) / (kernel @ columns)
    balanced: Array = rows[:, None] * kernel * columns
    return balanced


shapes = {"M": st.integers(1, 12), "K": st.integers(1, 12), "seed": st.integers(0, 2**32)}


def random_kernel(M: int, K: int, seed: int, scale: float = 2.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(M, K, dtype=torch.float64, generator=generator)


@given(**shapes, iterations=st.integers(1, 6))
@settings(max_examples=50, deadline=None)
def test_equals_plain_scaling_after_any_number_of_rounds(
    M: int, K: int, seed: int, iterations: int
) -> None:
    log_kernel = random_kernel(M, K, seed)
    expected = scaled(log_kernel.exp().numpy(), iterations)
    assert_close(plan(log_kernel, iterations), torch.from_numpy(expected), rtol=1e-9, atol=0)


@given(**shapes)
@settings(max_examples=25, deadline=None)
def test_converges_to_the_transport_plan(M: int, K: int, seed: int) -> None:
    """Its totals and its form diag(α)·kernel·diag(β) determine the plan."""
    log_kernel = random_kernel(M, K, seed, scale=1.0)
    found = plan(log_kernel, 2000)
    assert_close(found.sum(dim=1), torch.full((M,), 1 / M, dtype=torch.float64))
    assert_close(found.sum(dim=0), torch.full((K,), 1 / K, dtype=torch.float64))
    ratio = found.log() - log_kernel
    form = ratio.mean(dim=0) + ratio.mean(dim=1, keepdim=True) - ratio.mean()
    assert_close(ratio, form, rtol=0, atol=1e-9)


@given(**shapes, iterations=st.integers(1, 5))
@settings(max_examples=25, deadline=None)
def test_the_scale_of_the_whole_kernel_does_not_matter(
    M: int, K: int, seed: int, iterations: int
) -> None:
    log_kernel = random_kernel(M, K, seed)
    assert_close(plan(log_kernel, iterations), plan(log_kernel - 500, iterations))


def test_forbidden_columns_get_nothing_and_the_rest_is_balanced() -> None:
    log_kernel = random_kernel(6, 5, seed=1)
    for sample, column in [(0, 0), (0, 1), (3, 2), (5, 4)]:
        log_kernel[sample, column] = -torch.inf
    found = plan(log_kernel, 2000)
    assert (found[log_kernel == -torch.inf] == 0).all()
    assert_close(found.sum(dim=0), torch.full((5,), 1 / 5, dtype=torch.float64))
    assert_close(found, torch.from_numpy(scaled(log_kernel.exp().numpy(), 2000)))


@pytest.mark.parametrize("size", [1e3, 1e6, 1e30])
@pytest.mark.parametrize("sign", [1, -1])
def test_huge_logits_do_not_overflow(size: float, sign: int) -> None:
    log_kernel = sign * size * torch.rand(8, 6, generator=torch.Generator().manual_seed(2))
    found = plan(log_kernel, 3)
    assert found.isfinite().all()
    assert_close(found.sum(dim=1), torch.full((8,), 1 / 8))


@pytest.mark.parametrize("iterations", [20, 21, 300])
def test_sharp_kernels_in_float32_follow_float64(iterations: int) -> None:
    """Entries far too small for float32 may come to matter after many rounds."""
    kernel = random_kernel(24, 40, seed=1, scale=40.0)
    samples = torch.zeros(24, 1, dtype=torch.float64)
    for _ in range(iterations):
        columns = -(kernel + samples).logsumexp(dim=0)
        samples = -(kernel + columns).logsumexp(dim=1, keepdim=True)
    expected = (kernel + columns).softmax(dim=1) / 24
    assert_close(plan(kernel.float(), iterations).double(), expected, rtol=0, atol=2e-6)


def test_columns_that_are_alike_get_alike_scalings() -> None:
    scaling = column_scaling(torch.zeros(3, 4), 3)
    assert_close(scaling, scaling[:1].expand(4))


# Rows that take no part


@given(**shapes, others=st.integers(0, 6), iterations=st.sampled_from([1, 2, 3, 20, 21, 60]))
@settings(max_examples=50, deadline=None)
def test_rows_that_take_no_part_are_as_good_as_absent(
    M: int, K: int, seed: int, others: int, iterations: int
) -> None:
    """Wherever they stand; also over so many rounds that all are taken in log space."""
    log_kernel = random_kernel(M + others, K, seed)
    takes_part = torch.zeros(M + others, dtype=torch.bool)
    takes_part[torch.randperm(M + others, generator=torch.Generator().manual_seed(seed))[:M]] = True
    kept = log_kernel[takes_part]
    found = column_scaling(log_kernel, iterations, takes_part=takes_part)
    assert_close(found, column_scaling(kept, iterations), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("iterations", [1, 3, 20, 21, 300])
def test_a_past_that_is_all_out_or_all_in(iterations: int) -> None:
    """As a queue before it is full and after: the mask alone differs."""
    batch, past = random_kernel(5, 6, seed=1), random_kernel(9, 6, seed=2)
    rows = torch.cat([batch, past])
    for past_counts, expected in ((False, batch), (True, rows)):
        takes_part = torch.tensor([True] * 5 + [past_counts] * 9)
        found = column_scaling(rows, iterations, takes_part=takes_part)
        assert_close(found, column_scaling(expected, iterations), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("iterations", [3, 40])
def test_zero_rows_of_an_empty_queue_leave_no_trace(iterations: int) -> None:
    """In float32, and for scores so sharp that their exponentials are beyond it."""
    batch = random_kernel(5, 6, seed=3, scale=200.0).float()
    rows, takes_part = torch.cat([batch, torch.zeros(9, 6)]), torch.arange(14) < 5
    found = column_scaling(rows, iterations, takes_part=takes_part)
    assert_close(found, column_scaling(batch, iterations), rtol=1e-6, atol=1e-3)
