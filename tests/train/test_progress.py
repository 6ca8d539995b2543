"""Progress tells the truth about time, shows what a method measures, and stays readable."""

import io
import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from xmoco.train import progress
from xmoco.train.progress import Progress, TimeLeft

XMOCO = {
    "loss": 15.1,
    "loss/labels_source": 3.1,
    "loss/labels_target": 3.2,
    "loss/consistency_source": 4.4,
    "loss/consistency_target": 4.5,
    "learning_rate": 0.03,
    "images_per_second": 1512.3,
    "waiting": 0.02,
    "fill/bank": 1.0,
    "positive_probability": 0.2,
}
LEVELS = {"chance": math.log(1025)}
FACTS = (
    "images/s 1,512  waiting 2%  rate 0.03  bank 100%",
    "loss 15.100  labels s 3.100 t 3.200  consistency s 4.400 t 4.500  chance 6.932",
)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(progress, "monotonic", clock)
    return clock


def plain(**options: int) -> tuple[Progress, io.StringIO]:
    log = io.StringIO()
    settings = {"total_steps": 100, "steps_per_epoch": 10, "first_step": 0} | options
    console = Console(file=log, width=80)
    shown = Progress("a run", **settings, reference_levels=LEVELS, console=console)
    return shown, log


@given(
    steps_per_epoch=st.integers(1, 20),
    epochs=st.integers(1, 12),
    start=st.integers(0, 100),
    step_time=st.floats(0.01, 10),
    pause=st.floats(0, 100),
)
def test_time_left_is_exact_for_steady_steps_and_pauses(
    steps_per_epoch: int, epochs: int, start: int, step_time: float, pause: float
) -> None:
    """Simulates a whole session, resumed at any step, and compares with what really was left."""
    total = steps_per_epoch * epochs
    first = start % total
    left = TimeLeft(total, steps_per_epoch)
    now, times = 500.0, {}  # 500 s of start-up that must not count
    estimates = {}
    for step in range(first + 1, total + 1):
        now += step_time
        left.tick(step, now)
        times[step], estimates[step] = now, left.seconds_left()
        if step % steps_per_epoch == 0:
            now += pause
    assert estimates[first + 1] is None
    seen_both = max(first + 2, (first // steps_per_epoch + 1) * steps_per_epoch + 2)
    for step in range(seen_both, total + 1):
        assert estimates[step] == pytest.approx(times[total] - times[step], abs=1e-6)


def test_a_pause_does_not_make_the_time_left_jump() -> None:
    left, now = TimeLeft(1000, 100), 0.0
    for step in range(1, 100 + 1):
        now += 1.0
        left.tick(step, now)
    before = left.seconds_left()
    left.tick(101, now + 1.0 + 50.0)
    after = left.seconds_left()
    assert before == pytest.approx(900)
    # One pause of 50 s seen, eight more to come; a plain mean over steps would say 1,340.
    assert after == pytest.approx(899 + 8 * 50)


def test_speed_follows_a_change() -> None:
    left, now = TimeLeft(10_000, 10_000), 0.0
    for step in range(1, 2001):
        now += 1.0 if step <= 1000 else 2.0
        left.tick(step, now)
    assert left.seconds_left() == pytest.approx(8000 * 2.0, rel=0.01)


def test_a_plain_line_has_every_fact(clock: Clock) -> None:
    shown, log = plain()
    with shown:
        for step in range(1, 16):
            clock.now += 2.0
            shown.tick(step)
        shown.knn(1, 64.2)
        shown.update(15, XMOCO)
    title, line = log.getvalue().splitlines()
    assert title == "a run"
    assert line == (
        "epoch 1.5/10 · step 15/100 · 0:00:30 elapsed · 0:02:50 left · images/s 1,512 · waiting 2%"
        " · rate 0.03 · bank 100% · kNN 64.2% (best 64.2 at 1) · loss 15.100"
        " · labels s 3.100 t 3.200 · consistency s 4.400 t 4.500 · chance 6.932"
    )


def test_another_method_shows_what_it_measures(clock: Clock) -> None:
    shown, log = plain()
    with shown:
        shown.update(1, {"loss": 6.2, "loss/source": 3.1, "loss/target": 3.1, "loss/odd_one": 1.0})
    assert "loss 6.200 · terms s 3.100 t 3.100 · odd one 1.000 · chance 6.932" in log.getvalue()
    assert "bank" not in log.getvalue()


def test_a_method_without_levels_or_memories_shows_none(clock: Clock) -> None:
    log = io.StringIO()
    with Progress("a run", 10, 5, 0, {}, Console(file=log, width=80)) as shown:
        shown.update(1, {"loss": 6.2})
    assert log.getvalue().endswith("loss 6.200\n")


def test_every_memory_shows_how_full_it_is(clock: Clock) -> None:
    shown, log = plain()
    with shown:
        shown.update(1, {"loss": 6.2, "fill/queue": 0.25, "fill/prototypes": 1.0})
    assert "queue 25% · prototypes 100% · loss 6.200" in log.getvalue()


def test_knn_keeps_the_best(clock: Clock) -> None:
    shown, log = plain()
    with shown:
        for epoch, value in enumerate((20.0, 64.2, 61.0), start=1):
            shown.knn(epoch, value)
        shown.update(30, XMOCO)
    assert "kNN 61.0% (best 64.2 at 2)" in log.getvalue()


def lines_of_a_run(clock: Clock, epochs: int, steps_per_epoch: int, step_time: float) -> list[str]:
    total = epochs * steps_per_epoch
    shown, log = plain(total_steps=total, steps_per_epoch=steps_per_epoch)
    with shown:
        for step in range(1, total + 1):
            clock.now += step_time
            shown.tick(step)
            if step % 10 == 0:
                shown.update(step, XMOCO)
            if step % steps_per_epoch == 0:
                clock.now += 1.0
                shown.knn(step // steps_per_epoch, 50.0)
    return log.getvalue().splitlines()[1:]


def test_a_log_has_a_line_per_epoch(clock: Clock) -> None:
    lines = lines_of_a_run(clock, epochs=200, steps_per_epoch=100, step_time=0.5)
    assert 200 <= len(lines) <= 202
    assert lines[-1].startswith("epoch 200.0/200")
    assert "0:00:00 left" in lines[-1]


def test_short_epochs_do_not_flood_the_log(clock: Clock) -> None:
    lines = lines_of_a_run(clock, epochs=200, steps_per_epoch=10, step_time=0.1)
    assert len(lines) <= 400 / 10 + 2


def test_long_epochs_do_not_leave_the_log_silent(clock: Clock) -> None:
    lines = lines_of_a_run(clock, epochs=1, steps_per_epoch=1000, step_time=3.0)
    assert 3000 / 120 * 0.7 <= len(lines) <= 3000 / 120 + 2


def test_the_last_knn_is_always_said(clock: Clock) -> None:
    shown, log = plain()
    with shown:
        shown.update(100, XMOCO)
        shown.knn(10, 88.8)
    assert "kNN 88.8%" in log.getvalue().splitlines()[-1]


def test_nothing_is_said_twice_when_a_run_ends_at_once(clock: Clock) -> None:
    shown, log = plain()
    with pytest.raises(KeyboardInterrupt), shown:
        raise KeyboardInterrupt
    assert log.getvalue() == "a run\n"


def test_time_left_is_unknown_right_after_a_resume(clock: Clock) -> None:
    shown, log = plain(first_step=50)
    with shown:
        clock.now += 100
        shown.tick(51)
        shown.update(51, XMOCO)
    assert "step 51/100 · 0:01:40 elapsed · ? left" in log.getvalue()


def test_notes_are_printed_as_they_are(clock: Clock) -> None:
    shown, log = plain()
    note = "[3 images] could not be read: " + "a long path " * 20
    with shown:
        shown.note(note)
    assert note in log.getvalue()


@pytest.mark.parametrize("width", [80, 120])
def test_a_terminal_shows_four_lines_that_fit(clock: Clock, width: int) -> None:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=width, legacy_windows=False)
    with Progress("a run", 1410, 47, 0, LEVELS, console) as shown:
        for step in range(1, 121):
            clock.now += 0.5
            shown.tick(step)
        shown.update(120, XMOCO)
        shown.knn(2, 64.2)
        shown.note("a note")
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "\n", screen.getvalue())
    text = re.sub(r"[\r\n]+", "\n", text)
    last = text[text.rindex("a run") :].replace("\n", "")
    assert "epoch 2.6/30" in last
    assert "step 120/1410" in last
    assert "0:01:00 elapsed" in last
    assert "0:10:45 left" in last
    assert FACTS[0] + "  kNN 64.2% (best 64.2 at 2)" in last
    assert FACTS[1] in last
    assert "a note" in text
    assert len(console.render_lines(shown._display())) == 4
