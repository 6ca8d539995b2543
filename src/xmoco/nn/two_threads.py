"""Two independent pieces of work at once, each on half of the CPU's cores.

PyTorch shares every single operation out to all cores, which meet again after each of them: several
hundred times a step. Two halves that each do a whole pass meet only at its end. That pays where
waiting threads soon sleep, as under the command line (``GOMP_SPINCOUNT``); where they spin for
long, which is PyTorch's default, it makes no difference.
"""

import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

First = TypeVar("First")
Second = TypeVar("Second")
Result = TypeVar("Result")


def has_halves() -> bool:
    """Whether PyTorch has an even number of the CPU's cores to use."""
    return torch.get_num_threads() % 2 == 0


def both(first: Callable[[], First], second: Callable[[], Second]) -> tuple[First, Second]:
    """What the two return. Gradients and precision are as they are for the caller."""
    # Python's threads do not inherit these settings.
    with_gradients = torch.is_grad_enabled()
    mixed, dtype = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")

    def as_here(work: Callable[[], Result]) -> Result:
        with torch.set_grad_enabled(with_gradients), torch.autocast("cpu", dtype, enabled=mixed):
            return work()

    halves = _halves(os.getpid(), max(1, torch.get_num_threads() // 2))
    other = halves.submit(as_here, second)
    return halves.submit(as_here, first).result(), other.result()


def with_parallel_backward(
    outputs: tuple[Tensor, Tensor], parameters: Iterable[Tensor]
) -> tuple[Tensor, Tensor]:
    """The same outputs, each from a pass of its own; gradients go back through both at once.

    ``parameters`` are all that is to get gradients.
    """
    first, second = _ParallelBackward.apply(outputs, *parameters)
    return first, second


class _ParallelBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, outputs: tuple[Tensor, Tensor], *parameters: Tensor) -> Any:
        ctx.outputs = outputs  # with the passes they came from, which autograd does not see
        ctx.save_for_backward(*parameters)
        return tuple(output.detach() for output in outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        parameters = ctx.saved_tensors

        def back(place: int) -> tuple[Tensor, ...]:
            found: tuple[Tensor, ...] = torch.autograd.grad(
                ctx.outputs[place], parameters, gradients[place]
            )
            return found

        first, second = both(lambda: back(0), lambda: back(1))
        del ctx.outputs
        torch._foreach_add_(first, second)  # in place, which keeps the layout of each
        return None, *first


@cache
def _halves(process: int, threads: int) -> ThreadPoolExecutor:
    """Two threads of Python that use so many of PyTorch's. A forked ``process`` needs its own."""

    def begin() -> None:
        torch.set_num_threads(threads)
        torch.get_num_threads()  # from now on the number holds for this thread, whatever others set

    everywhere = torch.get_num_threads()
    halves = ThreadPoolExecutor(2, thread_name_prefix=f"half of {process}", initializer=begin)
    meeting = threading.Barrier(2)
    for present in [halves.submit(meeting.wait) for _ in range(2)]:
        present.result()
    torch.set_num_threads(everywhere)  # for threads yet to come, and for matrix products
    return halves
