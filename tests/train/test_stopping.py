"""Signals ask for a stop; a second one does not wait; handlers are put back."""

import os
import signal
import threading

import pytest

from xmoco.train.stopping import StopRequest

SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1]


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_is_noticed_and_handlers_are_put_back(number: signal.Signals) -> None:
    before = [signal.getsignal(s) for s in SIGNALS]
    with StopRequest() as stop:
        assert stop.signal_number == 0
        os.kill(os.getpid(), number)
        assert stop.signal_number == number
    assert [signal.getsignal(s) for s in SIGNALS] == before


def test_what_a_cluster_sends_twice_is_one_request() -> None:
    with StopRequest() as stop:
        for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGTERM):
            os.kill(os.getpid(), number)
        assert stop.signal_number == signal.SIGUSR1


def test_a_second_signal_from_the_keyboard_stops_at_once() -> None:
    before = [signal.getsignal(s) for s in SIGNALS]

    def impatient() -> None:
        with StopRequest():
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        impatient()
    assert [signal.getsignal(s) for s in SIGNALS] == before


def test_other_threads_do_without() -> None:
    found: list[int] = []

    def work() -> None:
        with StopRequest() as stop:
            found.append(stop.signal_number)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [0]
