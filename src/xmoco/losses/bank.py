"""Memory of past batches: ring buffers whose slots belong together (step 3 of the method).

Banks are the same in all processes, since every query meets all keys. What only joins a sum over
all samples (the label history, SwAV's queue) is shared out: a process keeps its own.
"""

from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from xmoco.distributed import SharedOut, gather, gather_to_first, own_share, processes, rank


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
        self._replace_oldest(gather(torch.cat(rows, dim=1)).chunk(len(rows), dim=1))

    def _replace_oldest(self, rows: Sequence[Tensor]) -> None:
        count = len(rows[0])
        kept = min(count, self.length)
        newest = torch.arange(count - kept, count, device=rows[0].device)
        slots = (self.enqueued + newest) % self.length
        for held, new in zip(self.rows(), rows, strict=True):
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


class SharedRing(PairedRing, SharedOut):
    """A ring over all processes, each of which keeps the rows it has enqueued itself.

    Nothing travels when rows are enqueued. Alone, a process has the whole ring. Among others it
    begins with its share of the whole ring, empty or from a ``state_dict``, and knows its rows by
    ``numbers``: row n of all that were ever enqueued belongs into slot n mod ``length``.

    ``state_dict`` is that of the whole ring, on the first process, after all have called
    ``consolidate_state_dict``.
    """

    numbers: Tensor | None = None
    """Of the rows here, where they are shared out; below 0 for places never filled."""
    written: Tensor
    """Rows that were ever written here, so that the next goes where the oldest is."""
    whole: list[Tensor] | None = None
    """The sides of the whole ring, since they were brought together here."""

    @property
    def own_rows(self) -> list[Tensor]:
        """Of every side, those that this process answers for."""
        return self.rows() if self.numbers is not None else [own_share(r) for r in self.rows()]

    def rows(self) -> list[Tensor]:
        """What every side holds here."""
        return [getattr(self, side) for side in self.sides]

    @property
    def slots(self) -> Tensor:
        """Where the whole ring has these rows."""
        if self.numbers is None:
            return own_share(torch.arange(self.length, device=self.enqueued.device))
        return self.numbers % self.length

    @property
    def counts(self) -> Tensor:
        """Whether the ring is full and, where rows are shared out, which of them are still in it:
        a truth value, or one for each row. Nobody asks the device."""
        full = self.enqueued >= self.length
        return full if self.numbers is None else full & (self.numbers >= self._oldest)

    @property
    def _oldest(self) -> Tensor:
        """The number of the oldest row that is still in the ring."""
        return (self.enqueued - self.length).clamp_min(0)

    @torch.no_grad()
    def enqueue(self, *rows: Tensor) -> None:
        """Let the rows of all processes, in rank order, replace the oldest: some for every side."""
        if processes() == 1:
            self._replace_oldest(rows)
            return
        count = len(rows[0])
        self._make_room(count)
        assert self.numbers is not None
        own = torch.arange(count, device=rows[0].device)
        places = (self.written + own) % len(self.numbers)
        for held, new in zip(self.rows(), rows, strict=True):
            held[places] = new.to(held.dtype)
        self.numbers[places] = self.enqueued + rank() * count + own
        self.written += count
        self.enqueued += processes() * count
        self.whole = None

    def _make_room(self, batch: int) -> None:
        """For as many rows as may have to be kept here while batches are not larger than this.

        Of the last K rows all but those of one batch were enqueued by all processes alike.
        """
        room = self.length // processes() + batch
        if self.numbers is not None and len(self.numbers) >= room:
            return
        if self.numbers is None:
            device = self.enqueued.device
            numbers = torch.arange(int(self._oldest), int(self.enqueued), device=device)
            numbers = numbers[numbers % processes() == rank()]
            places = numbers % self.length
        else:
            numbers, order = self.numbers.sort()
            kept = numbers >= self._oldest
            numbers, places = numbers[kept], order[kept]
        for side, rows in zip(self.sides, self.rows(), strict=True):
            # No buffers from here on: DistributedDataParallel would make them the same everywhere.
            self._buffers.pop(side, None)
            setattr(self, side, self._filled_up(rows[places], room, 0))
        self.numbers = self._filled_up(numbers, room, -1)
        self.written = torch.tensor(len(numbers), device=numbers.device)

    @staticmethod
    def _filled_up(rows: Tensor, room: int, value: int) -> Tensor:
        return torch.cat([rows, rows.new_full((room - len(rows), *rows.shape[1:]), value)])

    @torch.no_grad()
    def consolidate(self) -> None:
        if self.numbers is None:
            return
        numbers = gather_to_first(self.numbers)
        sides = [gather_to_first(rows) for rows in self.rows()]
        if numbers is None:
            return
        kept = numbers >= self._oldest
        self.whole = []
        for rows in sides:
            assert rows is not None
            whole = rows.new_zeros(self.length, rows.shape[1])
            whole[numbers[kept] % self.length] = rows[kept]
            self.whole.append(whole)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.numbers is None:
            return
        if self.whole is None:
            raise RuntimeError(
                "each process holds a part of this state: call consolidate_state_dict on all of "
                "them, and then state_dict on the first."
            )
        for side, rows in zip(self.sides, self.whole, strict=True):
            destination[f"{prefix}{side}"] = rows

    def _load_from_state_dict(self, *arguments: Any) -> None:
        if self.numbers is not None:  # what is loaded is whole, to be shared out anew
            for side, rows in zip(self.sides, self.rows(), strict=True):
                delattr(self, side)
                self.register_buffer(side, rows.new_zeros(self.length, rows.shape[1]))
            self.numbers, self.whole = None, None
        super()._load_from_state_dict(*arguments)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        if self.numbers is not None:
            for name in (*self.sides, "numbers", "written"):
                setattr(self, name, fn(getattr(self, name)))
        return self


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
