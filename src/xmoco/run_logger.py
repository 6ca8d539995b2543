"""What a person sees of a run, and what is written down of it: the loop tells, this listens."""

from collections.abc import Mapping
from typing import Self

from rich.console import Console
from torch import nn
from torch.utils.tensorboard import SummaryWriter

from xmoco.config import Config
from xmoco.evaluate.monitor import Monitor
from xmoco.methods import Method
from xmoco.records import Record
from xmoco.train.loop import Callback, Training
from xmoco.train.progress import Progress
from xmoco.train.run_folder import RunFolder


class RunLogger(Callback):
    """Shows, logs and judges a run as it goes."""

    def __init__(
        self,
        config: Config,
        training: Training,
        method: Method,
        monitor: Monitor,
        run: RunFolder,
        console: Console,
    ) -> None:
        self.config = config
        self.training = training
        self.method = method
        self.monitor = monitor
        self.run = run
        self.progress = Progress(
            title=f"{method.title} · {monitor.train.name} · {config.model.backbone}",
            total_steps=training.total_steps,
            steps_per_epoch=training.steps_per_epoch,
            first_step=training.step,
            reference_levels=method.reference_levels(),
            console=console,
        )
        self.events = SummaryWriter(str(run.path), purge_step=training.step)

    def __enter__(self) -> Self:
        if self.judging and self.training.step == 0:
            self._add(self.monitor.raw_pixels())
            self._add(self.monitor.untrained(self.backbone))
        for epoch, value in self.run.knn_curve(self.config.method.subject):
            self.progress.knn(epoch, value)  # of earlier sessions, so that the best is known
        self.progress.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self.progress.__exit__(*error)
        self.events.close()

    @property
    def judging(self) -> bool:
        return self.monitor.possible and self.config.monitor.knn_every > 0

    @property
    def backbone(self) -> nn.Module:
        return self.method.encoder.backbone

    def on_step(self, step: int) -> None:
        self.progress.tick(step)

    def on_values(self, step: int, epoch: float, values: Mapping[str, float]) -> None:
        self.progress.update(step, values)
        self.run.add_values(step, epoch, values)
        for name, value in values.items():
            self.events.add_scalar(name, value, step)

    def on_epoch(self, epoch: int, step: int) -> None:
        monitor = self.config.monitor
        if self.judging and (epoch % monitor.knn_every == 0 or epoch == self.config.train.epochs):
            record = self.monitor.trained(self.backbone, epoch, step)
            self._add(record)
            self.progress.knn(epoch, record.value)

    def _add(self, record: Record) -> None:
        self.run.add_record(record)
        self.events.add_scalar(f"knn/{record.subject}", record.value, record.protocol["step"])
        self.run.log(f"kNN of {record.subject}: {record.value:.2f} % ({record.protocol})")
