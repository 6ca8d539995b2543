"""What a person sees of a run, and what is written down of it: the loop tells, this listens."""

from collections.abc import Mapping
from typing import Self

from rich.console import Console
from torch.utils.tensorboard import SummaryWriter

from xmoco.config import Config
from xmoco.errors import Interrupted
from xmoco.evaluate.monitor import Monitor
from xmoco.evaluate.similarities import NegativesMonitor
from xmoco.methods import Method
from xmoco.records import Record
from xmoco.train.callback import Callback
from xmoco.train.loop import Training
from xmoco.train.progress import Progress
from xmoco.train.run_folder import RunFolder
from xmoco.wandb_log import WandbLog


class Judge(Callback):
    """Judges a run as it goes, all processes together."""

    def __init__(self, training: Training, method: Method, monitor: Monitor) -> None:
        self.training = training
        self.backbone = method.encoder.backbone
        self.monitor = monitor

    def __enter__(self) -> Self:
        if self.training.step == 0 and self.monitor.due(0):
            self.on_record(self.monitor.raw_pixels())
            self.on_record(self.monitor.initial(self.backbone))
        return self

    def on_epoch(self, epoch: int, step: int) -> None:
        if self.monitor.due(epoch):
            self.on_record(self.monitor.trained(self.backbone, epoch, step))

    def on_record(self, record: Record) -> None:
        """All processes have measured this."""


class RunLogger(Judge):
    """Shows and logs a run as well, on the first process."""

    def __init__(
        self,
        config: Config,
        training: Training,
        method: Method,
        monitor: Monitor,
        run: RunFolder,
        console: Console,
    ) -> None:
        super().__init__(training, method, monitor)
        self.config = config
        self.method = method
        self.similarities = NegativesMonitor(config, monitor.work, monitor.train, monitor.device)
        self.run = run
        self.progress = Progress(
            title=f"{method.title} · {monitor.train.name} · {config.model.backbone}",
            total_steps=training.total_steps,
            steps_per_epoch=training.steps_per_epoch,
            first_step=training.step,
            reference_levels=method.reference_levels(),
            console=console,
        )
        # What an interrupted session wrote of steps that are about to be repeated is not shown.
        again = training.step + 1 if training.step else 0
        self.events = SummaryWriter(str(run.path), purge_step=again)
        project = config.run.wandb
        self.wandb = None if project is None else WandbLog(project, run, config)
        if self.wandb is not None:
            self.progress.note(f"logged to Weights & Biases: {self.wandb.place}")

    def __enter__(self) -> Self:
        super().__enter__()
        if self.training.step == 0:
            self._look(0, 0)
        for epoch, value in self.run.knn_curve(self.config.method.subject):
            self.progress.knn(epoch, value)  # of earlier sessions, so that the best is known
        self.progress.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self.progress.__exit__(*error)
        self.events.close()
        if self.wandb is not None:
            raised = error[1] if len(error) > 1 else None
            self.wandb.close(failed=raised is not None and not isinstance(raised, Interrupted))

    def on_step(self, step: int) -> None:
        self.progress.tick(step)

    def on_values(self, step: int, epoch: float, values: Mapping[str, float]) -> None:
        self.progress.update(step, values)
        self.run.add_values(step, epoch, values)
        self._show(values, step)

    def on_epoch(self, epoch: int, step: int) -> None:
        super().on_epoch(epoch, step)
        self._look(epoch, step)

    def _look(self, epoch: int, step: int) -> None:
        """Measure the paper's claims, where that is due and there are negatives to look at: a small
        thing, for which the other processes wait."""
        look = self.similarities.look(self.method) if self.similarities.due(epoch) else None
        for record in [] if look is None else self.similarities.records(look, epoch, step):
            self.run.add_record(record)
            self._show({f"similarities/{record.measure}": record.value}, step)

    def on_note(self, text: str) -> None:
        self.progress.note(text)

    def on_record(self, record: Record) -> None:
        if record.subject == self.config.method.subject:
            self.progress.knn(record.protocol["epoch"], record.value)
        self.run.add_record(record)
        self._show({f"knn/{record.subject}": record.value}, record.protocol["step"])
        self.run.log(f"kNN of {record.subject}: {record.value:.2f} % ({record.protocol})")

    def _show(self, values: Mapping[str, float], step: int) -> None:
        """In what else people read logs with."""
        for name, value in values.items():
            self.events.add_scalar(name, value, step)
        if self.wandb is not None:
            self.wandb.add(values, step)
