"""Schedules: pure functions of the step, right at both ends, and seen where a graph looks."""

import math

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from xmoco.schedules import (
    Clock,
    Constant,
    Drawn,
    FromEpoch,
    FromShare,
    HalfCosine,
    LinearRise,
    LinearToTheEnd,
    Schedule,
    ScheduledValues,
    WarmupCosine,
    rising,
    scaled,
    warmed_up,
)

numbers = st.floats(-100, 100)
shares = st.floats(0, 1)
schedules = st.one_of(
    st.builds(Constant, numbers),
    st.builds(HalfCosine, numbers, numbers),
    st.builds(LinearRise, numbers, st.floats(0.01, 100)),
    st.builds(LinearToTheEnd, numbers),
    st.builds(FromEpoch, st.floats(0, 100)),
    st.builds(Drawn, st.just("a share"), st.integers(0, 99)),
    st.builds(FromShare, shares, numbers, numbers),
    st.builds(WarmupCosine, st.floats(1e-6, 100), shares, st.floats(0, 20)),
)


@st.composite
def clocks(draw: st.DrawFn, epochs: int = 200) -> Clock:
    steps_per_epoch = draw(st.integers(1, 500))
    total = steps_per_epoch * draw(st.integers(1, epochs))
    return Clock(draw(st.integers(0, total)), total, steps_per_epoch)


def test_what_is_drawn_fills_the_range_evenly_and_depends_on_what_and_seed() -> None:
    clocks = [Clock(step, 1000, 10) for step in range(1000)]
    one, *others = (
        [schedule(clock) for clock in clocks]
        for schedule in (Drawn("a", 0), Drawn("a", 1), Drawn("b", 0))
    )
    assert 0 < min(one) < 0.01
    assert 0.99 < max(one) < 1
    counts = torch.histc(torch.tensor(one), bins=10, min=0, max=1)
    assert (counts - 100).abs().max() < 40  # four times the deviation of chance
    for other in others:
        assert not set(one) & set(other)


def test_a_clock_tells_epochs_and_the_share_that_is_done() -> None:
    clock = Clock(step=30, total_steps=120, steps_per_epoch=20)
    assert (clock.epoch, clock.done) == (1.5, 0.25)


@given(schedule=schedules, clock=clocks(), others=st.lists(clocks(), max_size=3))
def test_they_remember_nothing(schedule: Schedule, clock: Clock, others: list[Clock]) -> None:
    value = schedule(clock)
    for other in others:
        schedule(other)
    assert schedule(clock) == value
    assert math.isfinite(value)


@given(start=numbers, end=numbers, clock=clocks())
def test_a_half_cosine_goes_from_end_to_end(start: float, end: float, clock: Clock) -> None:
    schedule = HalfCosine(start, end)
    assert schedule(clock._replace(step=0)) == start
    assert schedule(clock._replace(step=clock.total_steps)) == end
    # BYOL's published form of it.
    done = clock.step / clock.total_steps
    expected = end - (end - start) * (math.cos(math.pi * done) + 1) / 2
    assert schedule(clock) == pytest.approx(expected, abs=1e-9)
    low, high = sorted((start, end))
    assert low - 1e-9 <= schedule(clock) <= high + 1e-9


@given(start=shares, end=st.none() | shares, clock=clocks())
def test_what_has_no_other_end_is_constant(start: float, end: float | None, clock: Clock) -> None:
    schedule = rising(start, end)
    assert isinstance(schedule, Constant) == (end in (None, start))
    assert schedule(clock._replace(step=0)) == start
    last = clock._replace(step=clock.total_steps)
    assert schedule(last) == (start if end is None else end)


@given(value=numbers, epochs=st.integers(1, 50), clock=clocks())
def test_a_rise_is_linear_from_nothing_and_then_stays(
    value: float, epochs: int, clock: Clock
) -> None:
    schedule = LinearRise(value, epochs)
    assert schedule(clock._replace(step=0)) == 0
    risen = epochs * clock.steps_per_epoch
    assert schedule(clock._replace(step=risen)) == value
    assert schedule(clock._replace(step=risen + 7)) == value
    if clock.step < risen:
        assert schedule(clock) == pytest.approx(value * clock.step / risen)


@given(epoch=st.integers(0, 50), clock=clocks())
def test_a_switch_is_off_before_its_epoch_and_on_from_it(epoch: int, clock: Clock) -> None:
    schedule, first = FromEpoch(epoch), epoch * clock.steps_per_epoch
    assert schedule(clock._replace(step=first)) == 1
    assert schedule(clock) == float(clock.step >= first)


@given(clock=clocks(), peak=st.floats(1e-6, 100), offset=shares)
def test_the_cosine_of_the_rate_is_the_papers(clock: Clock, peak: float, offset: float) -> None:
    found = WarmupCosine(peak, offset, 0)(clock)
    cosine = math.cos(math.pi * clock.step / clock.total_steps)
    assert found == pytest.approx(peak * (offset + (1 - offset) * 0.5 * (1 + cosine)))
    assert offset * peak <= found * (1 + 1e-9)
    assert found <= peak * (1 + 1e-9)


@given(clock=clocks(epochs=20), epochs=st.floats(0.01, 20), offset=shares)
def test_a_warm_up_is_linear_and_meets_the_cosine(
    clock: Clock, epochs: float, offset: float
) -> None:
    warmup = round(epochs * clock.steps_per_epoch)
    assume(warmup > 0)
    schedule = WarmupCosine(3.0, offset, epochs)

    def rate(step: int) -> float:
        return schedule(clock._replace(step=step))

    for step in range(min(warmup, 50)):
        assert rate(step) == pytest.approx(3.0 * (step + 1) / warmup)
    assert [rate(warmup - 1), rate(warmup)] == pytest.approx([3.0, 3.0])
    if clock.total_steps > warmup:
        assert rate(clock.total_steps) == 3.0 * offset
        later = [rate(step) for step in range(warmup, min(clock.total_steps, warmup + 50))]
        assert later == sorted(later, reverse=True)


def test_the_paper_s_first_and_last_rate() -> None:
    """0.0675 × 512/256 to begin with, a tenth of it at the end."""
    schedule = WarmupCosine(0.0675 * 512 / 256, 0.1, 0)
    rates = [schedule(Clock(step, 1000, 10)) for step in (0, 500, 1000)]
    assert rates == pytest.approx([0.135, 0.135 * 0.55, 0.0135])


@given(kinds=st.lists(schedules, max_size=5), times=st.lists(clocks(), min_size=1, max_size=4))
def test_values_are_those_of_their_schedules(kinds: list[Schedule], times: list[Clock]) -> None:
    """With a device each that changes keeps its place there, which is where a graph reads it."""
    named = {f"value {number}": schedule for number, schedule in enumerate(kinds)}
    plain, placed = ScheduledValues(named), ScheduledValues(named, torch.device("cpu"))
    places: dict[str, int] = {}
    for clock in times:
        expected = {name: schedule(clock) for name, schedule in named.items()}
        assert plain.at(clock) == expected
        assert all(isinstance(value, float) for value in plain.at(clock).values())
        found = placed.at(clock)
        assert found.keys() == expected.keys()
        for name, value in found.items():
            if isinstance(named[name], Constant):
                assert isinstance(value, float)
            else:
                assert isinstance(value, torch.Tensor)
                assert (value.shape, value.dtype) == ((), torch.float64)
                assert places.setdefault(name, value.data_ptr()) == value.data_ptr()
            assert float(value) == expected[name]


@given(value=numbers, share=shares, clock=clocks())
def test_some_change_with_the_share_that_is_done(value: float, share: float, clock: Clock) -> None:
    end = clock._replace(step=clock.total_steps)
    line = LinearToTheEnd(value)
    assert (line(clock._replace(step=0)), line(end)) == (0, value)
    assert line(clock) == pytest.approx(value * clock.step / clock.total_steps)
    jump = FromShare(share, before=1.0, after=value)
    assert jump(clock) == (value if clock.done >= share else 1.0)
    assert jump(end) == value


def test_a_weight_without_a_warm_up_is_constant() -> None:
    assert warmed_up(0.5, 0.0) == Constant(0.5)
    assert warmed_up(0.5, 2.0) == LinearRise(0.5, 2.0)


@pytest.mark.parametrize("precision", [torch.float32, torch.float64])
def test_weighted_terms_keep_their_precision(precision: torch.dtype) -> None:
    term = torch.tensor(3.0, dtype=precision)
    for weight in (0.5, torch.tensor(0.5, dtype=torch.float64)):
        product = scaled(term, weight)
        assert product == 1.5
        assert product.dtype == precision
