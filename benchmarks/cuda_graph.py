"""Work replayed as a CUDA graph, so that launching it from Python takes no time of its own."""

from collections.abc import Callable

import torch

WARM_UP = 3
"""Times before recording: kernels are compiled, and cuDNN chooses its own."""


def recorded(work: Callable[[], object]) -> Callable[[], None]:
    """What does the same as ``work`` on the same tensors. ``RuntimeError`` if it cannot be."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UP):
            work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    # A failure returns to the stream that is named first.
    with torch.cuda.stream(torch.cuda.current_stream()), torch.cuda.graph(graph):
        work()
    return graph.replay
