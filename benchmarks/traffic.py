"""Counts what a process sends to others, whoever sends it: our own code, or torch's.

Collective operations pass through torch's dispatcher like any other. A process that takes part in
one sends so many bytes, if it is done in the way that moves least (rings, for many processes):

    sum of n bytes over W processes      2 · n · (W − 1) / W
    everybody's n bytes to everybody     n · (W − 1)
    n bytes shared out to all            n · (W − 1) / W
    n bytes of one to all                n
"""

from collections import Counter
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

SENT = {
    "allreduce_": lambda sizes, world: 2 * sum(sizes) * (world - 1) / world,
    "_allgather_base_": lambda sizes, world: sizes[1] * (world - 1),
    "alltoall_base_": lambda sizes, world: sizes[1] * (world - 1) / world,
    "broadcast_": lambda sizes, _world: sum(sizes),
}
"""Bytes by operation, of the sizes of its tensors (results first) and the number of processes."""


class Traffic(TorchDispatchMode):
    """While it is entered, adds up the bytes that this process sends, by operation and size."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()

    @property
    def bytes(self) -> float:
        return sum(self.sent.values())

    def __torch_dispatch__(
        self, func: Any, _types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        if func.namespace == "c10d":
            name = func._schema.name.removeprefix("c10d::")
            if name not in SENT:
                raise NotImplementedError(f"nobody has said yet how much {name} sends")
            sizes = [leaf.nbytes for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
            self.sent[name] += SENT[name](sizes, dist.get_world_size())
            self.calls[name] += 1
        return func(*args, **(kwargs or {}))
