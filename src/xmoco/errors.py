"""Errors that end a command with a sentence instead of a traceback."""

import difflib
import signal
from collections.abc import Iterable

TRY_AGAIN = 75
"""The exit status EX_TEMPFAIL: all is saved, and the same command, or --resume, goes on. A job
script, or a cluster told so, starts it again."""
LONGEST_WORD = 500
"""Letters of what may be a misspelt word or path: comparing takes time."""


class UserError(Exception):
    """Something the user can put right: what is wrong, where, and what would be right.

    Where several processes train together, all meet the same mistake and the first tells of it;
    ``only_here`` marks what only one of them has met.
    """

    only_here = False
    status = 2
    """With which a command ends."""


class LostPartnerError(UserError):
    """Another process of the run is gone, and with it the run."""

    status = 1


class Interrupted(Exception):  # noqa: N818 - nothing went wrong
    """A run was asked to stop by a signal, and has saved itself."""

    def __init__(self, signal_number: int, where: str, way_on: str) -> None:
        name = signal.Signals(signal_number).name
        super().__init__(f"stopped by {name} {where}; everything is saved. Resume with: {way_on}")
        self.signal_number = signal_number

    @property
    def status(self) -> int:
        """With which a program ends. A person who presses Ctrl-C wants it stopped; whoever sends
        another signal wants the machine, and the run should go on when there is one."""
        return 130 if self.signal_number == signal.SIGINT else TRY_AGAIN


def nearest(word: str, known: Iterable[str]) -> str:
    """`` (did you mean X?)`` when something known is close to ``word``, otherwise nothing."""
    if len(word) > LONGEST_WORD:
        return ""
    names = {name.lower(): name for name in known}
    close = difflib.get_close_matches(word.lower(), names, n=1, cutoff=0.6)
    return f" (did you mean {names[close[0]]}?)" if close else ""
