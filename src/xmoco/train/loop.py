"""The training loop: plain, and ignorant of any particular task.

Order of samples, views and learning rate are functions of the step, and everything else a step
depends on is in the checkpoint; so a resumed run equals an uninterrupted one, on a CPU bit for bit.
"""

import hashlib
import operator
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from typing import Any, NoReturn, Self

import torch
from torch import Tensor

from xmoco.checkpoints import BackgroundSaver, Newest, SaveClock, load_checkpoint, reached_by
from xmoco.config.optimizers import OptimConfig
from xmoco.data import Batch, Batches
from xmoco.data.unreadable import TooManyUnreadable
from xmoco.distributed import consolidate_state_dict, largest_of_all
from xmoco.errors import Interrupted, UserError
from xmoco.fabric import Fabric
from xmoco.schedules import Clock, Schedule
from xmoco.task import Moment, StepOutput, Task
from xmoco.train.bad_steps import BadStep, BadSteps, DivergedError
from xmoco.train.callback import Callback
from xmoco.train.engine import on_first
from xmoco.train.means import RunningMeans
from xmoco.train.optimizers import build_optimizer, never_decayed, remembers_rightly
from xmoco.train.partners import watching
from xmoco.train.run_folder import RunFolder
from xmoco.train.step import build_stepper
from xmoco.train.stopping import StopRequest

STEPS_BETWEEN_TALKS = 10  # of several processes, which have to agree when to save and to stop


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
    skip_bad_steps: bool = False
    to_save_memory: str = "take smaller batches or smaller images"
    """What to do where memory is short."""
    to_converge: str = "lower the learning rate"
    """What to do where a loss is no number."""


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
    notes: list[str] = field(default_factory=list)
    """What a person should know of how it was restored."""

    def __post_init__(self) -> None:
        plan, device = self.plan, self.fabric.device
        self.steps_per_epoch = self.batches.steps_per_epoch
        self.unreadable_named = len(self.run.unreadable())
        self.name_unreadable()
        self.task.optimize_for(device)
        self.task.to(memory_format=torch.channels_last)
        optimizer = build_optimizer(
            plan.optim, self.task.param_groups(), device, never_decayed(self.task)
        )
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
        self.bad_steps = BadSteps(
            self.fabric,
            self.task,
            self.optimizer.optimizer,
            plan.skip_bad_steps,
            self._diverged,
        )
        self.saver = BackgroundSaver(self.run.checkpoints)

    @property
    def total_steps(self) -> int:
        return self.plan.total_steps

    @property
    def finished(self) -> bool:
        return self.step >= self.total_steps

    def clock(self, step: int) -> Clock:
        return Clock(step, self.total_steps, self.steps_per_epoch)

    def restore(self) -> bool:
        """Go back to the last checkpoint that is whole. False if there is none yet."""
        path, self.notes = on_first(self.fabric, self._newest)
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
            reached = reached_by(state, self.total_steps)
        except (RuntimeError, LookupError, ValueError, TypeError, AttributeError):
            raise UserError(
                f"{path} belongs to another configuration than {self.run.path}."
            ) from None
        self.step, self.seconds = reached.step, reached.seconds
        self.bad_steps.restore(reached.loss_level, reached.left_out)
        return True

    def _newest(self) -> Newest:
        newest = self.run.checkpoints.newest_whole()
        if newest.path is not None:
            self.run.checkpoints.put_aside(after=newest.path)
        return newest

    def save(self) -> None:
        """Write a checkpoint, unless weights are NaN or infinite."""
        self.begin_saving()
        self.saver.finish()

    def begin_saving(self) -> None:
        """The same, but training may go on while it is written."""
        # Parameters are the same on all processes, which must end together.
        norms = torch._foreach_norm(list(self.task.parameters()))
        if not torch.stack(norms).isfinite().all():
            raise self._diverged(f"the weights are NaN or infinite at step {self.step}", self.step)
        consolidate_state_dict(self.task)
        if not self.fabric.is_global_zero:
            return
        state = {
            "identity": self.identity,
            "epoch": self.step / self.steps_per_epoch,  # for whoever judges an unfinished run
            "seconds": self.seconds,
            "loss_level": self.bad_steps.losses.level,
            "left_out": sorted(self.bad_steps.left_out),
            "task": self.task.state_dict(),
            "optimizer": self.optimizer.state_dict(),
        }
        self.saver.save(self.step, state)

    def train(self, callback: Callback) -> None:
        """Take all steps that are left. Raises ``Interrupted``, saved, when asked to stop."""
        means, losses = RunningMeans(self.fabric, self.batches), self.bad_steps.losses
        log_every, epoch_length = self.plan.log_every, self.steps_per_epoch
        saves = SaveClock(self.plan.checkpoint_minutes * 60)
        self.task.train()
        before, started = self.seconds, time.perf_counter()
        with ExitStack() as stack:
            stack.enter_context(watching(self.fabric, self.resume_command))
            stop = stack.enter_context(StopRequest())
            stack.callback(self.name_unreadable)
            stack.callback(self.saver.wait)
            stack.enter_context(self._short_memory_told())
            stream = stack.enter_context(_Stream(self.batches, self.step))
            stack.callback(self.bad_steps.forget)
            self.bad_steps.remember(self.step)
            while not self.finished:
                log = (self.step + 1) % log_every == 0 or self.step + 1 == self.total_steps
                try:
                    step = self._advance_or_leave_out(stream, log)
                except TooManyUnreadable as error:
                    self._save_until_they_are_back(error)
                    raise
                if step is not None:
                    means.add(step)
                    self.bad_steps.add(self.step, step.loss)
                self.seconds = before + time.perf_counter() - started
                if self.fabric.is_global_zero:
                    callback.on_step(self.step)
                    self.saver.check()
                epoch_over = self.step % epoch_length == 0
                stopped_by, save = self._asked_for(stop, saves, epoch_over)
                if log or epoch_over or save or stopped_by or losses.full:
                    bad = losses.look()
                    if bad is not None:
                        self._leave_out(bad, callback)
                        stream.begin(self.step)
                        means.begin()
                        continue
                    if log and step is not None:
                        losses.note_level()
                    self.bad_steps.remember(self.step)
                if log and means.steps:
                    values = self._values(means, {} if step is None else step.metrics)
                    self._check_unreadable()
                    if self.fabric.is_global_zero:
                        callback.on_values(self.step, self.step / epoch_length, values)
                if epoch_over:  # before the checkpoint: what is told of an epoch is never skipped
                    with means.paused():
                        callback.on_epoch(self.step // epoch_length, self.step)
                if save or stopped_by:
                    with means.paused():
                        self.begin_saving()
                    saves.restart()
                if stopped_by:
                    self._stop(stopped_by)
            self.saver.finish()
            # Whoever asked while the last epoch was judged, or saved, is heard as well.
            stopped_by, _ = self._asked_for(stop, saves, epoch_over=True)
            if stopped_by:
                self._stop(stopped_by)

    def _stop(self, signal_number: int) -> NoReturn:
        self.saver.finish()
        where = f"after step {self.step} of {self.total_steps}"
        raise Interrupted(signal_number, where, self.resume_command)

    def _asked_for(self, stop: StopRequest, saves: SaveClock, epoch_over: bool) -> tuple[int, bool]:
        """The signal that asks all to stop, or 0; and whether all are to save.

        Several processes agree on it now and then: each has heard its own signals, and the first
        one's clock counts.
        """
        due = self.fabric.is_global_zero and saves.due(epoch_over, self.saver)
        asked = [stop.signal_number, int(due)]
        if self.fabric.world_size > 1:
            now = epoch_over or self.step % STEPS_BETWEEN_TALKS == 0
            asked = largest_of_all(asked, self.fabric.device) if now else [0, 0]
        return asked[0], bool(asked[1]) or self.finished

    def _advance_or_leave_out(self, stream: Iterator[Batch], log: bool) -> StepOutput | None:
        if not self.bad_steps.skips(self.step):
            return self.advance(stream, with_metrics=log)
        self._next(stream)
        self.step += 1
        return None

    def _leave_out(self, bad: BadStep, callback: Callback) -> None:
        """Go back to before a bad step, and tell of it."""
        self.step = self.bad_steps.leave_out(bad, self.step)
        self.stepper.forget_graph()
        note = f"{bad}: that step is skipped"
        self.run.log(note)
        if self.fabric.is_global_zero:
            callback.on_note(note)

    def _values(self, means: RunningMeans, metrics: Mapping[str, Tensor]) -> dict[str, float]:
        """What is logged after a step."""
        values = means.take(self.plan.batch)
        values["learning_rate"] = self.stepper.scheduled_rate(self.clock(self.step - 1))
        fill = self.task.fill_levels()
        values |= {f"fill/{name}": share for name, share in fill.items()}
        return values | {name: float(value) for name, value in metrics.items()}

    def _save_until_they_are_back(self, error: TooManyUnreadable) -> None:
        """Images that are on a disk which went away, say. Of several processes, others are in the
        middle of a step."""
        if self.fabric.world_size == 1 and self.bad_steps.losses.look() is None:
            self.save()
            error.add(
                f"The run is saved after step {self.step}; when they are back, go on with: "
                f"{self.resume_command}"
            )

    @contextmanager
    def _short_memory_told(self) -> Iterator[None]:
        """What a person can do about it is said."""
        try:
            yield
        except torch.OutOfMemoryError as error:
            reason = str(error).partition(". ")[0]
            short = UserError(
                f"the device ran out of memory after step {self.step} ({reason}): "
                f"{self.plan.to_save_memory}; {self._last_good()}."
            )
            short.only_here = self.fabric.world_size > 1  # others may have had enough
            raise short from error

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
            error.only_here = True  # other processes may have had no trouble with their images
            raise

    def _check_unreadable(self) -> None:
        """The limit is for all processes together, and all stop together."""
        self.name_unreadable()
        if self.fabric.world_size > 1:
            found = self.fabric.broadcast(len(self.run.unreadable()))
            allowed = self.batches.unreadable
            if found > allowed.limit:
                raise UserError(
                    f"{found} of {allowed.images} images cannot be read, which is more than "
                    f"{allowed.limit_told}; they are named in {self.run.path / 'unreadable.txt'}."
                )

    def name_unreadable(self) -> None:
        """Write the images that could not be read into the run folder."""
        found = list(self.batches.unreadable)
        self.run.add_unreadable(found[self.unreadable_named :])
        self.unreadable_named = len(found)

    def _diverged(self, what: str, step: int) -> DivergedError:
        sentence = f"{what}; {self._last_good()}: {self.plan.to_converge}, and start again."
        return DivergedError(sentence, step)

    def _last_good(self) -> str:
        last = self.run.checkpoints.latest()
        return f"the last good checkpoint is {last}" if last else "there is no checkpoint yet"


class _Stream(Iterator[Batch]):
    """Batches from a step on, or from another one."""

    def __init__(self, batches: Batches, step: int) -> None:
        self._batches = batches
        self._now = batches.from_step(step)

    def begin(self, step: int) -> None:
        self._now.close()
        self._now = self._batches.from_step(step)

    def __next__(self) -> Batch:
        return next(self._now)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._now.close()
