"""One step of the optimiser: forward, backward, update. On one GPU, replayed as a CUDA graph.

The step of a small network is hundreds of short kernels, which the host cannot launch as fast as a
GPU runs them. So after a few steps it is measured whether the host is the slower of the two; if it
is, the kernels of a whole step are recorded once and launched together from then on. What is
computed stays the same.
"""

import sys
import time
from dataclasses import dataclass, field

import torch
from lightning_fabric import Fabric
from lightning_fabric.wrappers import _FabricModule
from torch import Tensor
from torch.optim import Optimizer

from xmoco.methods import Method, StepOutput

WARM_UP = 8
"""Steps before a decision: by then cuDNN has chosen its algorithms and the optimiser has state."""
HOST_SHARE = 0.95
"""Launching must take less than this share of the GPU's time, or the GPU has to wait. The share is
high because a graph has its price too: it leaves no gaps in which the GPU could decode images."""
MEMORY_TIMES = 2.5
"""Of what a step needs: a graph keeps its own, and a step that measures needs as much again."""


@dataclass
class Stepper:
    """Takes steps, each batch in ``parts`` whose gradients add up."""

    fabric: Fabric
    model: _FabricModule
    """The method as seen by the loop (precision, gradients over all processes)."""
    method: Method
    optimizer: Optimizer
    parts: int = 1
    news: list[str] = field(default_factory=list)
    """What should be in the log."""

    def __call__(
        self, x_s: Tensor, x_t: Tensor, rate: float, with_metrics: bool = False
    ) -> StepOutput:
        self.set_rate(rate)
        return self.take(x_s, x_t, with_metrics)

    def set_rate(self, rate: float | Tensor) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = rate

    def take(self, x_s: Tensor, x_t: Tensor, with_metrics: bool = False) -> StepOutput:
        done = []
        halves = zip(x_s.chunk(self.parts), x_t.chunk(self.parts), strict=True)
        for part, (part_s, part_t) in enumerate(halves, start=1):
            last = part == self.parts
            with self.fabric.no_backward_sync(self.model, enabled=not last):
                step: StepOutput = self.model(part_s, part_t, with_metrics=with_metrics and last)
                self.fabric.backward(step.loss / self.parts)
            done.append(_values_of(step))
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.method.after_step()
        return _mean_of_parts(done)


@dataclass
class GraphedStepper(Stepper):
    """Replays its steps from a CUDA graph, once that has proved to pay.

    Steps that ``with_metrics`` are taken as ever: what they look at is not in the graph.
    """

    def __post_init__(self) -> None:
        self.taken = 0
        self.decide_after = WARM_UP
        self.graph: torch.cuda.CUDAGraph | None = None
        self.rate = torch.zeros((), device=self.fabric.device)

    def __call__(
        self, x_s: Tensor, x_t: Tensor, rate: float, with_metrics: bool = False
    ) -> StepOutput:
        # A number on the device: one on the host would be recorded as it is now.
        self.rate.fill_(rate)
        self.set_rate(self.rate)
        self.taken += 1
        if with_metrics:
            return self.take(x_s, x_t, with_metrics)
        if self.graph is not None:
            return self._replay(x_s, x_t)
        if self.taken >= self.decide_after:
            return self._decide(x_s, x_t)
        return self.take(x_s, x_t)

    def _replay(self, x_s: Tensor, x_t: Tensor) -> StepOutput:
        for place, view in zip(self.views, (x_s, x_t), strict=True):
            place.copy_(view)
        assert self.graph is not None
        self.graph.replay()
        values = self.values.clone()  # the next replay overwrites them
        return StepOutput(values[0], dict(zip(self.terms, values[1:], strict=True)), {})

    def _decide(self, x_s: Tensor, x_t: Tensor) -> StepOutput:
        """Time a step; record one for later if launching takes too long."""
        self.decide_after = sys.maxsize
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        started = time.perf_counter()
        begin.record()
        step = self.take(x_s, x_t)
        end.record()
        launching = 1000 * (time.perf_counter() - started)
        torch.cuda.synchronize()
        running = begin.elapsed_time(end)
        needed = torch.cuda.max_memory_allocated() - held
        if launching < HOST_SHARE * running:
            decision = "the GPU is never short of work"
        elif _free_memory() < MEMORY_TIMES * needed:
            decision = "a CUDA graph would help, but there is too little memory for one"
        else:
            decision = self._try_to_record(x_s, x_t)
        self.news.append(
            f"launching a step takes {launching:.1f} ms, running it {running:.1f} ms: {decision}"
        )
        return step

    def _try_to_record(self, x_s: Tensor, x_t: Tensor) -> str:
        try:
            with torch.cuda.stream(torch.cuda.current_stream()):  # to which a failure returns
                self._record(x_s, x_t)
        except RuntimeError as error:
            self.graph = None
            # Gradients may have been begun, in memory that is none any more.
            self.optimizer.zero_grad(set_to_none=True)
            # While the label history fills, some kinds of it ask the device for how much there is.
            self.decide_after = 8 * self.taken
            reason = str(error).partition("\n")[0]
            return f"a CUDA graph would help, but cannot be recorded yet ({reason})"
        return "from now on steps are replayed as a CUDA graph"

    def _record(self, x_s: Tensor, x_t: Tensor) -> None:
        self.views = x_s.clone(), x_t.clone()
        self.graph = torch.cuda.CUDAGraph()
        # Other threads may use the GPU meanwhile, to decode images.
        with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
            step = self.take(*self.views)
            self.terms = list(step.terms)
            self.values = torch.stack([step.loss, *step.terms.values()])


def _free_memory() -> int:
    """Bytes on the GPU that are free, or held by PyTorch for later use."""
    free, _ = torch.cuda.mem_get_info()
    return free + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()


def build_stepper(
    fabric: Fabric, model: _FabricModule, method: Method, optimizer: Optimizer, parts: int
) -> Stepper:
    """One that may use CUDA graphs, where there is one GPU and nothing to talk to."""
    alone = fabric.device.type == "cuda" and fabric.world_size == 1
    kind = GraphedStepper if alone and parts == 1 else Stepper
    return kind(fabric, model, method, optimizer, parts)


def _values_of(step: StepOutput) -> StepOutput:
    """The step without the way it came about, which would keep its nodes alive."""
    terms = {name: term.detach() for name, term in step.terms.items()}
    return StepOutput(step.loss.detach(), terms, step.metrics)


def _mean_of_parts(parts: list[StepOutput]) -> StepOutput:
    if len(parts) == 1:
        return parts[0]
    loss = torch.stack([part.loss for part in parts]).mean()
    terms = {name: torch.stack([p.terms[name] for p in parts]).mean() for name in parts[0].terms}
    return StepOutput(loss, terms, parts[-1].metrics)
