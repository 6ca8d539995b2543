"""One step of the optimiser: forward, backward, update. On one GPU, replayed as a CUDA graph.

The step of a small network is hundreds of short kernels, which the host cannot launch as fast as a
GPU runs them. So after a few steps it is measured whether the host is the slower of the two; if it
is, the kernels of a whole step are recorded once and launched together from then on. What is
computed stays the same: numbers that change with the step are read from their places on the device.
"""

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.optim import Optimizer

from xmoco.fabric import Fabric, FabricModule
from xmoco.schedules import Clock, Schedule, ScheduledValues
from xmoco.task import StepOutput, Task, Values

WARM_UP = 8
"""Steps before a decision: by then cuDNN has chosen its algorithms and the optimiser has state."""
HOST_SHARE = 0.95
"""Launching must take less than this share of the GPU's time, or the GPU has to wait. The share is
high because a graph has its price too: it leaves no gaps in which the GPU could decode images."""
MEMORY_TIMES = 2.5
"""Of what a step needs: a graph keeps its own, and a step with metrics needs as much again."""


@dataclass
class Stepper:
    """Takes steps, each batch in ``parts`` whose gradients add up."""

    fabric: Fabric
    model: FabricModule
    """The task as seen by the loop (precision, gradients over all processes)."""
    task: Task
    optimizer: Optimizer
    learning_rate: Schedule
    peak_rate: float
    """For parameters whose rate does not follow the schedule."""
    parts: int = 1
    news: list[str] = field(default_factory=list)
    """What should be in the log."""

    def __post_init__(self) -> None:
        self.values = ScheduledValues(self.task.schedules())

    def __call__(
        self, inputs: Sequence[Tensor], clock: Clock, with_metrics: bool = False
    ) -> StepOutput:
        for group, rate in zip(self.optimizer.param_groups, self.rates_at(clock), strict=True):
            group["lr"] = rate
        return self.take(inputs, self.values.at(clock), with_metrics)

    def scheduled_rate(self, clock: Clock) -> float:
        return self.learning_rate(clock) * self.task.rate_factor(clock)

    def rates_at(self, clock: Clock) -> list[float]:
        """Of every group."""
        scheduled = self.scheduled_rate(clock)
        return [
            (scheduled if group["scheduled"] else self.peak_rate) * group["rate_factor"]
            for group in self.optimizer.param_groups
        ]

    def forget_graph(self) -> None:
        """What a step does is no longer what it did, as after going back to before a memory was
        full. Only a replayed one would not notice."""

    def take(self, inputs: Sequence[Tensor], at: Values, with_metrics: bool = False) -> StepOutput:
        done = []
        parts = zip(*(tensor.chunk(self.parts) for tensor in inputs), strict=True)
        for part, own in enumerate(parts, start=1):
            last = part == self.parts
            with self.fabric.no_backward_sync(self.model, enabled=not last):
                step: StepOutput = self.model(list(own), at, with_metrics and last)
                self.fabric.backward(step.loss / self.parts)
            done.append(_values_of(step))
        self.task.before_update(at)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.task.after_update(at)
        return _mean_of_parts(done)


@dataclass
class GraphedStepper(Stepper):
    """Replays its steps from a CUDA graph, once that has proved to pay.

    Steps with metrics are taken as ever: what they look at is not in the graph.
    """

    def __post_init__(self) -> None:
        self.taken = 0
        self.decide_after = WARM_UP
        self.graph: torch.cuda.CUDAGraph | None = None
        # Numbers on the device: those on the host would be recorded as they are now.
        device = self.fabric.device
        self.values = ScheduledValues(self.task.schedules(), device)
        self.rates = [torch.zeros((), device=device) for _ in self.optimizer.param_groups]

    def __call__(
        self, inputs: Sequence[Tensor], clock: Clock, with_metrics: bool = False
    ) -> StepOutput:
        at = self.values.at(clock)
        places = zip(self.optimizer.param_groups, self.rates, self.rates_at(clock), strict=True)
        for group, place, rate in places:
            group["lr"] = place.fill_(rate)
        self.taken += 1
        if with_metrics:
            return self.take(inputs, at, with_metrics)
        if self.graph is not None:
            return self._replay(inputs)
        if self.taken >= self.decide_after:
            return self._decide(inputs, at)
        return self.take(inputs, at)

    def forget_graph(self) -> None:
        """Another one may be recorded, when as much has been seen of what is done now."""
        if self.graph is not None:
            self.graph, self.decide_after = None, self.taken + WARM_UP

    def _replay(self, inputs: Sequence[Tensor]) -> StepOutput:
        for place, tensor in zip(self.recorded_inputs, inputs, strict=True):
            place.copy_(tensor)
        assert self.graph is not None
        self.graph.replay()
        values = self.recorded_values.clone()  # the next replay overwrites them
        return StepOutput(values[0], dict(zip(self.terms, values[1:], strict=True)), {})

    def _decide(self, inputs: Sequence[Tensor], at: Values) -> StepOutput:
        """Time a step; record one for later if launching takes too long."""
        self.decide_after = sys.maxsize
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        started = time.perf_counter()
        begin.record()
        step = self.take(inputs, at)
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
            decision = self._try_to_record(inputs, at)
        self.news.append(
            f"launching a step takes {launching:.1f} ms, running it {running:.1f} ms: {decision}"
        )
        return step

    def _try_to_record(self, inputs: Sequence[Tensor], at: Values) -> str:
        try:
            with torch.cuda.stream(torch.cuda.current_stream()):  # to which a failure returns
                self._record(inputs, at)
        except RuntimeError as error:
            self.graph = None
            # Gradients may have been begun, in memory that is none any more.
            self.optimizer.zero_grad(set_to_none=True)
            # While a memory fills, some methods ask the device for how much there is.
            self.decide_after = 8 * self.taken
            reason = str(error).partition("\n")[0]
            return f"a CUDA graph would help, but cannot be recorded yet ({reason})"
        return "from now on steps are replayed as a CUDA graph"

    def _record(self, inputs: Sequence[Tensor], at: Values) -> None:
        self.recorded_inputs = [tensor.clone() for tensor in inputs]
        self.graph = torch.cuda.CUDAGraph()
        # Other threads may use the GPU meanwhile, to decode images.
        with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
            step = self.take(self.recorded_inputs, at)
            self.terms = list(step.terms)
            self.recorded_values = torch.stack([step.loss, *step.terms.values()])


def _free_memory() -> int:
    """Bytes on the GPU that are free, or held by PyTorch for later use."""
    free, _ = torch.cuda.mem_get_info()
    return free + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()


def build_stepper(
    fabric: Fabric,
    model: FabricModule,
    task: Task,
    optimizer: Optimizer,
    learning_rate: Schedule,
    peak_rate: float,
    parts: int,
) -> Stepper:
    """One that may use CUDA graphs, where there is one GPU and nothing to talk to."""
    one_gpu = fabric.device.type == "cuda" and fabric.world_size == 1
    kind = GraphedStepper if one_gpu and parts == 1 and task.capturable else Stepper
    return kind(fabric, model, task, optimizer, learning_rate, peak_rate, parts)


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
