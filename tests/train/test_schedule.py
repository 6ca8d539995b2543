"""The learning rate against the specification's plain formula."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xmoco.train.schedule import learning_rate

totals = st.integers(1, 100_000)


@given(total=totals, share=st.floats(0, 1), peak=st.floats(1e-6, 100), offset=st.floats(0, 1))
def test_cosine_is_the_papers(total: int, share: float, peak: float, offset: float) -> None:
    step = int(share * total)
    found = learning_rate(step, total, peak=peak, offset=offset, warmup_steps=0)
    expected = peak * (offset + (1 - offset) * 0.5 * (1 + math.cos(math.pi * step / total)))
    assert found == pytest.approx(expected)
    assert offset * peak <= found * (1 + 1e-9)
    assert found <= peak * (1 + 1e-9)


@given(total=st.integers(2, 10_000), warmup=st.integers(1, 10_000), offset=st.floats(0, 1))
def test_warm_up_is_linear_and_meets_the_cosine(total: int, warmup: int, offset: float) -> None:
    def rate(step: int) -> float:
        return learning_rate(step, total, peak=3.0, offset=offset, warmup_steps=warmup)

    assert rate(0) == pytest.approx(3.0 / warmup)
    assert rate(warmup - 1) == pytest.approx(3.0)
    assert rate(warmup) == pytest.approx(3.0)
    if total > warmup:
        assert rate(total) == pytest.approx(3.0 * offset)
        later = [rate(step) for step in range(warmup, min(total, warmup + 50))]
        assert later == sorted(later, reverse=True)


def test_the_paper_s_first_and_last_rate() -> None:
    """0.0675 × 512/256 to begin with, a tenth of it at the end."""
    peak = 0.0675 * 512 / 256
    settings = {"peak": peak, "offset": 0.1, "warmup_steps": 0}
    assert learning_rate(0, 1000, **settings) == pytest.approx(0.135)
    assert learning_rate(500, 1000, **settings) == pytest.approx(0.135 * 0.55)
    assert learning_rate(1000, 1000, **settings) == pytest.approx(0.0135)
