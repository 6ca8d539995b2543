"""A task trained in a run folder where the same call goes on: what evaluations that train share."""

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

from xmoco.data import Batches, ImageSet, Unreadable
from xmoco.data.batches import Order, epoch_order
from xmoco.fabric import Fabric
from xmoco.task import Task
from xmoco.train.callback import Callback
from xmoco.train.engine import on_first
from xmoco.train.loop import Plan, Training
from xmoco.train.run_folder import RunFolder, plain

OnStep = Callable[[int, int, float | None], None]
"""Told the steps done, their total and the loss, now and then; before the first step, no loss."""
TELL_AFTER = 2.0
"""Seconds: where steps are slow, each is told of."""


class StepReporter(Callback):
    """Writes values into the run folder, and tells how far it is."""

    def __init__(self, training: Training, on_step: OnStep | None) -> None:
        self.training = training
        self.listener = on_step
        self.loss: float | None = None

    def __enter__(self) -> Self:
        self._tell(self.training.step)
        return self

    def on_step(self, step: int) -> None:
        if time.monotonic() > self.told + TELL_AFTER:
            self._tell(step)

    def on_values(self, step: int, epoch: float, values: Mapping[str, float]) -> None:
        self.training.run.add_values(step, epoch, values)
        self.loss = values["loss"]
        self._tell(step)

    def _tell(self, step: int) -> None:
        self.told = time.monotonic()
        if self.listener is not None:
            self.listener(step, self.training.total_steps, self.loss)


def train_in_folder(
    task: Task,
    images: ImageSet,
    plan: Callable[[int], Plan],
    folder: Path,
    settings: Mapping[str, Any],
    *,
    what: str,
    batch: int,
    seed: int,
    fabric: Fabric,
    order: Order = epoch_order,
    readers: int = 8,
    command: str = "the same call",
    say: Callable[[str], None] | None = None,
    reporter: Callable[[Training], StepReporter],
) -> Training:
    """The task, trained to the end of its plan, which depends on the steps of an epoch.

    The same call goes on where it was interrupted, and finds a finished task again; ``settings``
    are what must not have changed meanwhile. ``what`` it is, ``say`` tells the user; ``command`` is
    what a person is told to go on with.
    """
    on_first(fabric, lambda: RunFolder.holds(folder, settings))
    batches = Batches(
        images,
        batch=batch,
        seed=seed,
        device=fabric.device,
        rank=fabric.global_rank,
        processes=fabric.world_size,
        readers=readers,
        order=order,
        known_unreadable=RunFolder(folder).known_unreadable(Unreadable(len(images)).limit),
    )
    run = on_first(fabric, lambda: RunFolder.begun(folder, settings))
    on_first(fabric, run.lock)
    try:
        training = Training(
            plan(batches.steps_per_epoch),
            fabric,
            task,
            batches,
            run,
            identity=plain(settings),
            resume_command=command,
        )
        restored = training.restore()
        if say is not None:
            for note in training.notes:
                say(f"{note}.")
            if restored:
                say(_going_on(training, what))
        if not training.finished:
            _train(training, images, reporter)
    finally:
        run.unlock()
    return training


def _train(
    training: Training, images: ImageSet, reporter: Callable[[Training], StepReporter]
) -> None:
    fabric, run = training.fabric, training.run
    if not fabric.is_global_zero:
        training.train(Callback())
        return
    run.forget_after(training.step)
    run.write_environment(device=str(fabric.device), processes=fabric.world_size)
    run.log(
        f"{training.task.title} on {images.name}: {len(images):,} images, batch "
        f"{training.plan.batch}, {fabric.world_size} × {fabric.device.type}, from step "
        f"{training.step} of {training.total_steps}"
    )
    with reporter(training) as callback:
        training.train(callback)


def _going_on(training: Training, what: str) -> str:
    where, step, total = training.run.path, training.step, training.total_steps
    if training.finished:
        return f"{where} holds the finished {what}, which is evaluated without training it again."
    return f"resuming in {where} after step {step} of {total}."
