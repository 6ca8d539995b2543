"""Memory of past batches: ring buffers whose slots belong together (step 3 of the method)."""

from collections.abc import Callable, Sequence
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from xmoco.distributed import gather


class Ring(nn.Module):
    """The last ``length`` rows of every side; slot j of all sides comes from the same image.

    Rings wrap around when their length is no multiple of the batch. ``enqueued`` counts the rows so
    far. It lives on the device like the rows, so that no step waits for it and a captured CUDA
    graph moves on by itself; it is part of ``state_dict``.
    """

    def __init__(self, length: int, width: int, sides: Sequence[str]) -> None:
        super().__init__()
        for side in sides:
            self.register_buffer(side, torch.zeros(length, width))
        self.sides = tuple(sides)
        self.length = length
        self.enqueued = torch.tensor(0)
        self._known_full = False

    def rows(self) -> list[Tensor]:
        """What every side holds."""
        return [self.get_buffer(side) for side in self.sides]

    @property
    def fill(self) -> float:
        """The share of slots that hold a row of a past batch. Asks the device."""
        return min(1.0, int(self.enqueued) / self.length)

    @property
    def full(self) -> bool:
        """Whether every slot holds a row of a past batch. Asks the device until it is so."""
        self._known_full = self._known_full or self.fill == 1
        return self._known_full

    @torch.no_grad()
    def enqueue(self, *rows: Tensor) -> None:
        """Let the rows of all processes, in rank order, replace the oldest: some for every side."""
        everyones = [gather(own) for own in rows]
        count = len(everyones[0])
        kept = min(count, self.length)
        newest = torch.arange(count - kept, count, device=everyones[0].device)
        slots = (self.enqueued + newest) % self.length
        for held, new in zip(self.rows(), everyones, strict=True):
            held[slots] = new[count - kept :].to(held.dtype)
        self.enqueued += count

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """What ``to``, ``cuda`` and the like do: the counter goes where the rows go."""
        nn.Module._apply(self, fn, recurse)
        self.enqueued = fn(self.enqueued)
        return self

    def get_extra_state(self) -> Tensor:
        return self.enqueued.clone().cpu()

    def set_extra_state(self, state: Tensor) -> None:
        self.enqueued.copy_(state)
        self._known_full = False


class PairedRing(Ring):
    """A source and a target side."""

    source: Tensor
    target: Tensor

    def __init__(self, length: int, width: int) -> None:
        super().__init__(length, width, ("source", "target"))


class KeyBanks(PairedRing):
    """The banks B_s and B_t of keys. Like MoCo's, they begin with random unit vectors."""

    def __init__(self, length: int, feature_size: int) -> None:
        super().__init__(checked_length(length), feature_size)
        _fill_at_random(self)


class KeyBank(Ring):
    """The one bank of keys of a loss in one direction."""

    keys: Tensor

    def __init__(self, length: int, feature_size: int) -> None:
        super().__init__(checked_length(length), feature_size, ("keys",))
        _fill_at_random(self)


def checked_length(length: int) -> int:
    if length < 2:
        raise ValueError(f"bank_length {length} must be at least 2")
    return length


def _fill_at_random(ring: Ring) -> None:
    for rows in ring.rows():
        rows.copy_(F.normalize(torch.randn(rows.shape), dim=1))
