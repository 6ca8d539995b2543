"""The training loop: plain, and ignorant of any particular task.

Order of samples, views and learning rate are functions of the step, and everything else a step
depends on is in the checkpoint; so a resumed run equals an uninterrupted one, on a CPU bit for bit.
"""

import hashlib
import math
import operator
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from xmoco.checkpoints import load_checkpoint
from xmoco.config import OptimConfig
from xmoco.data import Batch, Batches
from xmoco.distributed import consolidate_state_dict, sum_over_processes
from xmoco.errors import Interrupted, UserError
from xmoco.fabric import Fabric
from xmoco.schedules import Clock, Schedule
from xmoco.task import Moment, StepOutput, Task
from xmoco.train.optimizers import build_optimizer, remembers_rightly
from xmoco.train.partners import watching
from xmoco.train.run_folder import RunFolder
from xmoco.train.step import build_stepper
from xmoco.train.stopping import StopRequest

CHECKPOINT_SHARE = 0.02  # of the time, at most, goes into checkpoints at epoch ends
STEPS_BETWEEN_STOP_CHECKS = 10  # with several processes, which have to agree


class Callback:
    """What the loop tells as it goes: of epochs to every process, which may work together then, of
    steps to the first only. This one is not interested.

    A context manager: it is entered before the first step and left after the last.
    """

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def on_step(self, step: int) -> None:
        """``step`` steps are done."""

    def on_values(self, step: int, epoch: float, values: Mapping[str, float]) -> None:
        """Averages since the last time."""

    def on_epoch(self, epoch: int, step: int) -> None:
        """``epoch`` epochs are done."""


@dataclass(frozen=True)
class Plan:
    """How a task is trained."""

    batch: int  # images a step, over all processes
    total_steps: int
    seed: int
    optim: OptimConfig
    learning_rate: Schedule
    peak_rate: float
    accumulate: int = 1
    log_every: int = 20
    checkpoint_minutes: float = 10.0


@dataclass
class Training:
    """A run in progress: what is trained, on what, and how far it is."""

    plan: Plan
    fabric: Fabric
    task: Task
    batches: Batches
    run: RunFolder
    identity: dict[str, Any]
    """What must not change between sessions: settings and images."""
    same_identity: Callable[[Any, Any], bool] = operator.eq
    """Whether a checkpoint's identity is this one."""
    resume_command: str = ""
    step: int = 0
    seconds: float = 0.0  # of training, over all sessions

    def __post_init__(self) -> None:
        plan, device = self.plan, self.fabric.device
        self.steps_per_epoch = self.batches.steps_per_epoch
        self.unreadable_named = len(self.run.unreadable())
        self.name_unreadable()
        self.task.optimize_for(device)
        self.task.to(memory_format=torch.channels_last)
        optimizer = build_optimizer(plan.optim, self.task.param_groups(), device)
        model, self.optimizer = self.fabric.setup(self.task, optimizer)
        self.stepper = build_stepper(
            self.fabric,
            model,
            self.task,
            self.optimizer,
            plan.learning_rate,
            plan.peak_rate,
            plan.accumulate,
        )

    @property
    def total_steps(self) -> int:
        return self.plan.total_steps

    @property
    def finished(self) -> bool:
        return self.step >= self.total_steps

    def clock(self, step: int) -> Clock:
        return Clock(step, self.total_steps, self.steps_per_epoch)

    def restore(self) -> bool:
        """Go back to the last checkpoint. False if there is none yet."""
        path = self.run.checkpoints.latest()
        if path is None:
            return False
        state = load_checkpoint(path)
        if not self.same_identity(state.get("identity"), self.identity):
            raise UserError(
                f"{path} belongs to other settings or images than {self.run.path} has now: "
                "put config.yaml and the images back as they were, or start a new run with --out."
            )
        try:
            self.task.load_state_dict(state["task"])
            # Of the optimiser its memory only: its settings are those of this device and these
            # settings, and the rate is a function of the step.
            settings = self.optimizer.state_dict()["param_groups"]
            self.optimizer.load_state_dict(state["optimizer"] | {"param_groups": settings})
            if not remembers_rightly(self.optimizer.optimizer):
                raise ValueError("not this optimiser's")
            self.step, self.seconds = _reached(state, self.total_steps)
        except (RuntimeError, LookupError, ValueError, TypeError, AttributeError):
            raise UserError(
                f"{path} belongs to another configuration than {self.run.path}."
            ) from None
        return True

    def save(self) -> None:
        """Write a checkpoint, unless the weights are no longer numbers."""
        # Parameters are the same on all processes, which must end together.
        norms = torch._foreach_norm(list(self.task.parameters()))
        if not torch.stack(norms).isfinite().all():
            raise self._diverged()
        consolidate_state_dict(self.task)
        if not self.fabric.is_global_zero:
            return
        state = {
            "identity": self.identity,
            "epoch": self.step / self.steps_per_epoch,  # for whoever judges an unfinished run
            "seconds": self.seconds,
            "task": self.task.state_dict(),
            "optimizer": self.optimizer.state_dict(),
        }
        self.run.checkpoints.save(self.step, state)

    def train(self, callback: Callback) -> None:
        """Take all steps that are left. Raises ``Interrupted``, saved, when asked to stop."""
        means = _RunningMeans(self)
        log_every, epoch_length = self.plan.log_every, self.steps_per_epoch
        saves = _SaveClock(self.plan.checkpoint_minutes * 60)
        self.task.train()
        before, started = self.seconds, time.perf_counter()
        with ExitStack() as stack:
            stack.enter_context(watching(self.fabric, self.resume_command))
            stop = stack.enter_context(StopRequest())
            stack.callback(self.name_unreadable)
            stream = stack.enter_context(closing(self.batches.from_step(self.step)))
            while not self.finished:
                log = (self.step + 1) % log_every == 0 or self.step + 1 == self.total_steps
                step = self.advance(stream, with_metrics=log)
                means.add(step)
                self.seconds = before + time.perf_counter() - started
                if self.fabric.is_global_zero:
                    callback.on_step(self.step)
                if log:
                    values = means.values(step.metrics)
                    if not math.isfinite(values["loss"]):
                        raise self._diverged()
                    self._check_unreadable()
                    if self.fabric.is_global_zero:
                        callback.on_values(self.step, self.step / epoch_length, values)
                epoch_over = self.step % epoch_length == 0
                if epoch_over:  # before the checkpoint: what is told of an epoch is never skipped
                    with means.paused():
                        callback.on_epoch(self.step // epoch_length, self.step)
                if saves.due(epoch_over) or self.step == self.total_steps:
                    with means.paused():
                        saves.time(self.save)
                if self.fabric.world_size == 1 or self.step % STEPS_BETWEEN_STOP_CHECKS == 0:
                    signal_number = stop.agreed(self.fabric.device)
                    if signal_number and self.step < self.total_steps:
                        self.save()
                        raise Interrupted(
                            signal_number,
                            f"after step {self.step} of {self.total_steps}",
                            self.resume_command,
                        )

    def inputs(self, batch: Batch, step: int) -> Sequence[Tensor]:
        """What the task makes of this process's share of a step's batch."""
        moment = Moment(self.plan.seed, step, self.plan.batch, self.batches.rows)
        return self.task.inputs(batch, moment)

    def advance(self, stream: Iterator[Batch], with_metrics: bool = False) -> StepOutput:
        """Take the next batch and one step of the optimiser."""
        inputs = self.inputs(self._next(stream), self.step)
        self._seed_layers(self.step)
        step = self.stepper(inputs, self.clock(self.step), with_metrics)
        self.step += 1
        if self.stepper.news:
            self.run.log(self.stepper.news.pop())
        return step

    @torch.no_grad()
    def look_on(self, passes: int, before: Callable[[int], None]) -> None:
        """Forward passes over the batches that would come next, from which nothing is learnt;
        ``before`` each, its number is told, from 1."""
        self.task.train()
        with closing(self.batches.from_step(self.step)) as stream:
            for number in range(1, passes + 1):
                before(number)
                step = self.step + number - 1
                inputs = self.inputs(self._next(stream), step)
                self._seed_layers(step)
                self.stepper.model(inputs, self.stepper.values.at(self.clock(step)), False)

    def _seed_layers(self, step: int) -> None:
        """What layers draw (dropout, stochastic depth) is a function of seed, step and process."""
        words = f"layers {self.plan.seed} {step} {self.fabric.global_rank}"
        digest = hashlib.blake2b(words.encode(), digest_size=8).digest()
        seed = int.from_bytes(digest, "big")
        torch.default_generator.manual_seed(seed)  # torch.manual_seed takes a hundred times as long
        if self.fabric.device.type != "cpu":
            torch.get_device_module(self.fabric.device).manual_seed(seed)

    def _next(self, stream: Iterator[Batch]) -> Batch:
        try:
            return next(stream)
        except UserError as error:
            error.alone = True  # other processes may have had no trouble with their images
            raise

    def _check_unreadable(self) -> None:
        """The limit is for all processes together, and all stop together."""
        self.name_unreadable()
        if self.fabric.world_size > 1:
            found = self.fabric.broadcast(len(self.run.unreadable()))
            images, limit = self.batches.unreadable.images, self.batches.unreadable.limit
            if found > limit:
                raise UserError(
                    f"{found} of {images} images cannot be read, which is more than 1 %; "
                    f"they are named in {self.run.path / 'unreadable.txt'}."
                )

    def name_unreadable(self) -> None:
        """Write the images that could not be read into the run folder."""
        found = list(self.batches.unreadable)
        self.run.add_unreadable(found[self.unreadable_named :])
        self.unreadable_named = len(found)

    def _diverged(self) -> "DivergedError":
        last = self.run.checkpoints.latest()
        where = f"the last good checkpoint is {last}" if last else "there is no checkpoint yet"
        return DivergedError(
            f"the loss is no longer a number at step {self.step}; {where}. Lower the learning "
            "rate, raise a temperature, or use precision=fp32, and start again."
        )


def _reached(state: Mapping[str, Any], total_steps: int) -> tuple[int, float]:
    """Step and seconds of a checkpoint, if they can be."""
    step, seconds = state["step"], float(state["seconds"])
    if type(step) is not int or not 0 <= step <= total_steps or not 0 <= seconds < math.inf:
        raise ValueError("no moment of this run")
    return step, seconds


class DivergedError(UserError):
    """The loss or the weights are no longer numbers."""


class _RunningMeans:
    """Averages of the loss terms and the speed since the last log line, fetched late."""

    def __init__(self, training: Training) -> None:
        self.training = training
        self._begin()

    def _begin(self) -> None:
        self.sums: dict[str, Tensor] = {}
        self.steps = 0
        self.started = time.perf_counter()
        self.waited = self.training.batches.waited

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What happens meanwhile is no training. The steps before it are: they are waited for."""
        if self.training.fabric.device.type == "cuda":
            torch.cuda.synchronize()
        paused, waited = time.perf_counter(), self.training.batches.waited
        yield
        self.started += time.perf_counter() - paused
        self.waited += self.training.batches.waited - waited

    def add(self, step: StepOutput) -> None:
        losses = {"loss": step.loss} | {f"loss/{name}": term for name, term in step.terms.items()}
        for name, value in losses.items():
            value = value.detach()
            self.sums[name] = self.sums[name] + value if name in self.sums else value
        self.steps += 1

    def values(self, metrics: Mapping[str, Tensor]) -> dict[str, float]:
        training = self.training
        sums = sum_over_processes(torch.stack(list(self.sums.values()))).tolist()
        count = self.steps * training.fabric.world_size
        values = {name: total / count for name, total in zip(self.sums, sums, strict=True)}
        clock = training.clock(training.step - 1)
        values["learning_rate"] = training.stepper.scheduled_rate(clock)
        seconds = time.perf_counter() - self.started  # the device is done: its sums are here
        values["images_per_second"] = self.steps * training.plan.batch / seconds
        values["waiting"] = (training.batches.waited - self.waited) / seconds
        fill = training.task.fill_levels()
        values |= {f"fill/{name}": share for name, share in fill.items()}
        values |= {name: float(value) for name, value in metrics.items()}
        self._begin()
        return values


class _SaveClock:
    """When to write a checkpoint: every so many seconds, and at epoch ends unless epochs are so
    short that this would take more than a small share of the time."""

    def __init__(self, interval: float) -> None:
        self.interval = interval
        self.cost = 0.0
        self.last = time.perf_counter()

    def due(self, epoch_over: bool) -> bool:
        since = time.perf_counter() - self.last
        return since >= self.interval or (epoch_over and self.cost <= CHECKPOINT_SHARE * since)

    def time(self, save: Callable[[], Any]) -> None:
        started = time.perf_counter()
        save()
        self.last = time.perf_counter()
        self.cost = self.last - started
