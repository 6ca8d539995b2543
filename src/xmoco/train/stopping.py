"""Leaving in good order: Ctrl-C, SIGTERM and SIGUSR1 ask the loop to save and stop after a step."""

import signal
import threading
from types import FrameType
from typing import Any, Self

from xmoco.launchers import PREEMPTING


class StopRequest:
    """Notices signals while it is entered; a second one from the keyboard stops at once. (Clusters
    and launchers may well send theirs twice.)"""

    def __init__(self) -> None:
        self.signal_number = 0
        """The first signal that was noticed, or 0."""
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is not threading.main_thread():
            return self  # Python delivers signals to the main thread only
        for number in (signal.SIGINT, *PREEMPTING):
            self._before[number] = signal.signal(number, self._notice)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _notice(self, number: int, _frame: FrameType | None) -> None:
        if self.signal_number and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.signal_number = self.signal_number or number
