"""Leaving in good order: Ctrl-C and SIGTERM ask the loop to save and stop after a step."""

import signal
import threading
from types import FrameType
from typing import Any, Self

import torch
import torch.distributed as dist

from xmoco.distributed import processes


class StopRequest:
    """Notices signals while it is entered; a second one stops at once."""

    def __init__(self) -> None:
        self.signal_number = 0
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is not threading.main_thread():
            return self  # Python delivers signals to the main thread only
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._notice)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _notice(self, number: int, _frame: FrameType | None) -> None:
        if self.signal_number:
            raise KeyboardInterrupt
        self.signal_number = number

    def agreed(self, device: torch.device) -> int:
        """The signal that any process has noticed, or 0; all processes must ask together."""
        if processes() == 1:
            return self.signal_number
        noticed = torch.tensor(self.signal_number, device=device)
        dist.all_reduce(noticed, dist.ReduceOp.MAX)
        return int(noticed)
