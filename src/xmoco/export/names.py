"""Parameters under the names of another program."""

import re
from collections.abc import Mapping, Sequence

from torch import Tensor


def renamed(state: Mapping[str, Tensor], rules: Sequence[tuple[str, str]]) -> dict[str, Tensor]:
    """``state`` with every rule, a regular expression and its replacement, applied to its names."""
    return {_rename(name, rules): value for name, value in state.items()}


def _rename(name: str, rules: Sequence[tuple[str, str]]) -> str:
    for pattern, replacement in rules:
        name = re.sub(pattern, replacement, name)
    return name
