"""The one exception a user's mistake raises: its text is the whole message, with no traceback."""

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """Something the user can put right. The message says what is wrong, where, and what would be right."""


def nearest(word: str, known: Iterable[str]) -> str:
    """' (did you mean X?)' when something known is close to ``word``, otherwise the empty string."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f" (did you mean {close[0]}?)" if close else ""
