"""Memory of past batches: two ring buffers whose slots belong together (step 3 of the method)."""

from collections.abc import Callable
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from xmoco.distributed import gather


class PairedRing(nn.Module):
    """The last ``length`` rows of either side; slot j of both sides comes from the same image.

    Rings wrap around when their length is no multiple of the batch. ``enqueued`` counts the rows so
    far. It lives on the device like the rows, so that no step waits for it and a captured CUDA
    graph moves on by itself; it is part of ``state_dict``.
    """

    source: Tensor
    target: Tensor

    def __init__(self, length: int, width: int) -> None:
        super().__init__()
        self.register_buffer("source", torch.zeros(length, width))
        self.register_buffer("target", torch.zeros(length, width))
        self.enqueued = torch.tensor(0)
        self._known_full = False

    @property
    def length(self) -> int:
        return len(self.source)

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
    def enqueue(self, source: Tensor, target: Tensor) -> None:
        """Let the rows of all processes, in rank order, replace the oldest."""
        source, target = gather(source), gather(target)
        count = len(source)
        kept = min(count, self.length)
        newest = torch.arange(count - kept, count, device=source.device)
        slots = (self.enqueued + newest) % self.length
        self.source[slots] = source[count - kept :].to(self.source.dtype)
        self.target[slots] = target[count - kept :].to(self.target.dtype)
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


class KeyBanks(PairedRing):
    """The banks B_s and B_t of keys. Like MoCo's, they begin with random unit vectors."""

    def __init__(self, length: int, feature_size: int) -> None:
        if length < 2:
            raise ValueError(f"bank_length {length} must be at least 2")
        super().__init__(length, feature_size)
        self.source.copy_(F.normalize(torch.randn(length, feature_size), dim=1))
        self.target.copy_(F.normalize(torch.randn(length, feature_size), dim=1))
