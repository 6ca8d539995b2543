"""What the training loop tells as it goes."""

from collections.abc import Mapping
from typing import Self


class Callback:
    """The loop tells of epochs to every process, which may work together then, and of steps
    to the first only. This one is not interested.

    A context manager: it is entered before the first step and left after the last.
    """

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def on_step(self, step: int) -> None:
        """``step`` steps are done."""

    def on_values(self, step: int, epoch: float, values: Mapping[str, float]) -> None:
        """Averages since the last time."""

    def on_epoch(self, epoch: int, step: int) -> None:
        """``epoch`` epochs are done."""

    def on_note(self, text: str) -> None:
        """Something happened that a person should know."""
