"""What processes that train together tell each other; nothing at all where there is only one.

Losses use these, so that they work unchanged inside anyone's DistributedDataParallel loop.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dist_functional
from torch import Tensor

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
    rows = rows.detach().contiguous()
    parts = [torch.empty_like(rows) for _ in range(processes())]
    dist.all_gather(parts, rows)
    return torch.cat(parts)


@torch.no_grad()
def logsumexp_over_rows(rows: Tensor) -> Tensor:
    """Column-wise logsumexp over the rows of all processes: (m, k) → (k,)."""
    total = rows.logsumexp(dim=0)
    if processes() == 1:
        return total
    # The exponent is taken relative to the largest part, as in any stable logsumexp.
    largest = total.clone()
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    share = (total - largest).exp()
    dist.all_reduce(share, dist.ReduceOp.SUM)
    return largest + share.log()


@torch.no_grad()
def sum_over_processes(values: Tensor) -> Tensor:
    """The sum of a tensor over all processes; every process gets it."""
    total = values.detach().clone()
    if processes() > 1:
        dist.all_reduce(total, dist.ReduceOp.SUM)
    return total


def own_share(rows: Tensor) -> Tensor:
    """This process's part of rows that all processes hold: every W-th, starting at its rank."""
    return rows[rank() :: processes()]


def gather_with_gradient(rows: Tensor) -> Tensor:
    """``gather`` through which gradients flow back to the rows of every process."""
    if processes() == 1:
        return rows
    gathered: Tensor = torch.cat(dist_functional.all_gather(rows.contiguous()))
    return gathered
