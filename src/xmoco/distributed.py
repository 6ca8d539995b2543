"""What processes that train together tell each other; nothing at all where there is only one.

Losses use these, so that they work unchanged inside anyone's DistributedDataParallel loop.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from xmoco.launchers import local_rank

T = TypeVar("T")

ROWS_AT_ONCE = 16_384

_alone = False


@contextmanager
def alone() -> Iterator[None]:
    """What happens meanwhile is this process's own affair: others are neither told nor asked."""
    global _alone
    before, _alone = _alone, True
    try:
        yield
    finally:
        _alone = before


def _together() -> bool:
    return not _alone and dist.is_available() and dist.is_initialized()


def processes() -> int:
    return dist.get_world_size() if _together() else 1


def rank() -> int:
    return dist.get_rank() if _together() else 0


@torch.no_grad()
def gather(rows: Tensor) -> Tensor:
    """The rows of every process one below the other, in rank order; no gradient flows through."""
    if processes() == 1:
        return rows.detach()
    everyones = rows.new_empty(processes() * len(rows), *rows.shape[1:])
    dist.all_gather_into_tensor(everyones, rows.detach().contiguous())
    return everyones


@torch.no_grad()
def gather_to_first(rows: Tensor) -> Tensor | None:
    """``gather`` for the first process only; the others get nothing."""
    if processes() == 1:
        return rows.detach()
    parts = [torch.empty_like(rows) for _ in range(processes())] if rank() == 0 else None
    dist.gather(rows.detach().contiguous(), parts)
    return None if parts is None else torch.cat(parts)


@torch.no_grad()
def exchange(rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
    """Send each process its rows, the first ``sent[0]`` of them to the first process and so on, and
    get those it has for this one, ``received`` of each."""
    if processes() == 1:
        return rows.detach()
    # Rows must lie one after the other; those of images do so with their channels last, too.
    channels_last = rows.dim() == 4 and rows.is_contiguous(memory_format=torch.channels_last)
    rows = (rows.permute(0, 2, 3, 1) if channels_last else rows).detach().contiguous()
    arrived = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(arrived, rows, received, sent)
    return arrived.permute(0, 3, 1, 2) if channels_last else arrived


@torch.no_grad()
def logsumexp_over_rows(rows: Tensor) -> Tensor:
    """Logsumexp over the first dimension of the rows of all processes: (m, k) → (k,).

    Each process sums its share of the columns, relative to the largest part as in any stable
    logsumexp, and tells the result. That moves as many numbers as a plain sum would.
    """
    total = rows.logsumexp(dim=0)
    if processes() == 1:
        return total
    share = math.ceil(total.numel() / processes())
    columns = F.pad(total.flatten(), (0, share * processes() - total.numel()))
    ones = [1] * processes()
    parts = exchange(columns.view(processes(), share), ones, ones)
    return gather(parts.logsumexp(dim=0))[: total.numel()].view_as(total)


@torch.no_grad()
def sum_over_processes(values: Tensor) -> Tensor:
    """The sum of a tensor over all processes; every process gets it."""
    total = values.detach().clone()
    if processes() > 1:
        dist.all_reduce(total, dist.ReduceOp.SUM)
    return total


@torch.no_grad()
def largest_of_all(numbers: list[int], device: torch.device) -> list[int]:
    """Of each number the largest that any process has."""
    largest = torch.tensor(numbers, device=device)
    if processes() > 1:
        dist.all_reduce(largest, dist.ReduceOp.MAX)
    values: list[int] = largest.tolist()
    return values


def own_share(rows: Tensor) -> Tensor:
    """This process's part of rows that all processes hold: every W-th, starting at its rank."""
    return rows[rank() :: processes()]


def own_part(total: int, of_rank: int | None = None) -> range:
    """The part of this process, or of another, of so many things in a row, one after the other."""
    r = rank() if of_rank is None else of_rank
    return range(total * r // processes(), total * (r + 1) // processes())


@torch.no_grad()
def gather_parts(rows: Tensor, total: int, device: torch.device) -> Tensor:
    """The rows of all processes, of which each has its ``own_part``, one below the other.

    They are where this process's are, and travel by way of the device, a block at a time.
    """
    if processes() == 1:
        return rows
    parts = [own_part(total, of_rank) for of_rank in range(processes())]
    together = rows.new_empty(total, *rows.shape[1:])
    for first in range(0, max(map(len, parts)), ROWS_AT_ONCE):
        own = rows[first : first + ROWS_AT_ONCE]
        most = min(ROWS_AT_ONCE, max(map(len, parts)) - first)
        block = rows.new_zeros(most, *rows.shape[1:], device=device)
        block[: len(own)] = own
        for part, theirs in zip(parts, gather(block).split(most), strict=True):
            places = part[first : first + most]
            together[places.start : places.stop] = theirs[: len(places)]
    return together


@torch.no_grad()
def share_buffers(module: nn.Module) -> None:
    """Let running statistics be those of the first process, whose weights are kept."""
    if processes() > 1:
        for buffer in module.buffers():
            dist.broadcast(buffer, 0)


def gather_with_gradient(rows: Tensor) -> Tensor:
    """``gather`` through which gradients flow back to the rows of every process."""
    if processes() == 1:
        return rows
    gathered: Tensor = _Gathered.apply(rows)
    return gathered


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, rows: Tensor) -> Tensor:
        return gather(rows)

    @staticmethod
    def backward(_ctx: Any, gradient: Tensor) -> Tensor:
        own = gradient.new_empty(len(gradient) // processes(), *gradient.shape[1:])
        dist.reduce_scatter_tensor(own, gradient.contiguous())
        return own


def first_on_machine(action: Callable[[], T]) -> T:
    """Do something on the first process of every machine; all get its result, which should be
    small, or raise what was raised on any."""
    if processes() == 1:
        return action()
    outcome: tuple[T | None, Exception | None] = (None, None)
    if local_rank() == 0:
        try:
            with alone():
                outcome = (action(), None)
        except Exception as raised:
            outcome = (None, raised)
    outcomes = [outcome] * processes()
    dist.all_gather_object(outcomes, outcome)
    for _, error in outcomes:
        if error is not None:
            raise error
    return cast(T, outcomes[rank() - local_rank()][0])


class SharedOut(nn.Module, ABC):
    """A module of whose state each process holds a part."""

    @abstractmethod
    def consolidate(self) -> None:
        """Bring the parts together on the first process, for ``state_dict``; all must ask."""


def consolidate_state_dict(module: nn.Module) -> None:
    """To be called on all processes before the first asks for ``state_dict``, if there are several:
    what is shared out among them comes together there."""
    for part in module.modules():
        if isinstance(part, SharedOut):
            part.consolidate()
