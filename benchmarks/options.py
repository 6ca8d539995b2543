"""Kinds of options that several programs take."""

import argparse
from collections.abc import Callable


def at_least(least: int) -> Callable[[str], int]:
    """A whole number that is not below this."""

    def number(text: str) -> int:
        try:
            if (given := int(text)) >= least:
                return given
        except ValueError:
            pass
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least {least}")

    return number


def share_of_one(text: str) -> float:
    """A number between 0 and 1, neither included."""
    try:
        if 0 < (given := float(text)) < 1:
            return given
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"{text!r} is not between 0 and 1")
