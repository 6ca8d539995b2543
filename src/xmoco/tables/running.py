"""Runs what is missing of a table: one trial after the other, or one per device.

Every trial has a run folder, which is locked while somebody trains in it. So several processes may
work on one table, whoever started them: each takes the next trial that nobody works on, and none is
trained twice. Records are added when a trial is done; until then its checkpoints stay, from which
the same command goes on.
"""

import hashlib
import json
import multiprocessing
import os
import re
import shutil
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple, Self

import torch
from rich.console import Console

from xmoco.config import Config
from xmoco.errors import Interrupted, UserError
from xmoco.planning import say
from xmoco.records import append_records
from xmoco.settings import config_yaml
from xmoco.tables.bench import (
    Bench,
    Images,
    Kept,
    Trial,
    divergences,
    known_records,
    lasting,
    numerics,
)
from xmoco.tables.columns import COLUMNS, Column
from xmoco.tables.definition import Table, read_table
from xmoco.tables.drawing import Group, draw, fill
from xmoco.tables.plan import Asked, Planned, plan
from xmoco.tables.tuning import Tuned, is_tuned, not_trained, trials_asked, with_best_rates
from xmoco.train.engine import build_fabric, choose_device
from xmoco.train.loop import Callback, DivergedError, Training
from xmoco.train.progress import Progress
from xmoco.train.run_folder import RunFolder


@dataclass(frozen=True)
class Job:
    """A table to be run, and where all of it is kept."""

    table: Table
    name: str
    """Of its files."""
    asked: Asked
    out: Path
    records: Path
    command: str = "the same command"
    """With which a person goes on."""
    images: Mapping[str, str] = field(default_factory=dict)
    """What tells the images from others of the same name, if they are there."""

    @classmethod
    def of(
        cls,
        name: str,
        asked: Asked,
        out: Path,
        records: Path | None = None,
        command: str = "the same command",
    ) -> "Job":
        table = read_table(name)
        return cls(table, Path(name).stem, asked, out, records or out / "records.jsonl", command)

    def known(self) -> list[Kept]:
        """All records but those of other images that only have the same name. Images of the same
        names, numbers and labels are the same: what they show is not looked at."""
        return [
            record
            for record in known_records(self.records)
            if all(record.protocol.get(key, own) == own for key, own in self.images.items())
        ]


@dataclass
class Course:
    """What became of the trials of a table."""

    failed: dict[str, str] = field(default_factory=dict)
    """Label and reason."""
    elsewhere: list[str] = field(default_factory=list)
    """Labels of those that another process is training."""


@dataclass(frozen=True)
class Outcome:
    files: list[Path]
    problem: str | None
    """What failed, as a sentence, if anything did."""


def run_table(
    job: Job, *, devices: int = 1, dry_run: bool = False, console: Console | None = None
) -> Outcome:
    """Run what is missing of a table, on so many devices at once, and draw what there is. Trials of
    the rows' learning rates come first, if the table wants them."""
    console = console or Console()
    # A mistake is told before anything is trained, trials included.
    job = replace(job, images=_fingerprints(job, dry_run))
    jobs = [job]
    if is_tuned(job.table, job.asked):
        table, asked = trials_asked(job.table, job.asked)
        jobs.insert(0, replace(job, table=table, name=f"{job.name}-rates", asked=asked))
    outcomes = [_run(one, devices, dry_run, console) for one in jobs]
    problem = " ".join(outcome.problem for outcome in outcomes if outcome.problem is not None)
    if dry_run and problem:  # it has done what it was asked for
        say(console, problem)
        problem = ""
    return Outcome([file for outcome in outcomes for file in outcome.files], problem or None)


def _fingerprints(job: Job, dry_run: bool) -> Mapping[str, str]:
    """Of the images; without them, a table can still be drawn."""
    data = plan(job.table, job.asked)[0].trial.config.data
    try:
        usable = data.model_copy(update={"download": data.download and not dry_run})
        return Images.open(usable, job.asked.held_out).fingerprints
    except UserError:
        if dry_run:
            return {}
        raise


def _run(job: Job, devices: int, dry_run: bool, console: Console) -> Outcome:
    """One table, whatever comes before it."""
    every = plan(job.table, job.asked)
    planned, chosen = _planned(job)
    device = choose_device(every[0].trial.config.run.device)
    missing = _missing(job, planned, device)
    runs = "1 run" if len(every) == 1 else f"{len(every)} runs"
    waiting = [one for one in every if one.row.name in chosen.waiting]
    later = f", {len(waiting)} when their learning rates are chosen" if waiting else ""
    say(console, f"{job.table.title}: {runs}, {len(missing)} to be trained{later}")
    if missing and dry_run:
        say(console, f"missing: {'; '.join(one.label for one in missing)}")
    course = Course()
    if missing and not dry_run:
        course = run_missing(job, console) if devices == 1 else _on_devices(job, devices, device)
        for one in _missing(job, planned, device):
            if one.label not in course.failed and not _in_work(job, one.trial):
                course.failed[one.label] = "the process that worked on it did not finish it"
        unfinished = {one.label for one in _missing(job, planned, device)} - course.failed.keys()
        course.elsewhere = [label for label in course.elsewhere if label in unfinished]
    if course.elsewhere:
        say(
            console,
            f"in work by another process: {'; '.join(course.elsewhere)}. When it is done, the same "
            "command draws the table again.",
        )
    group = Group.of(every[0].trial.facts)
    known = job.known()
    files = draw(
        fill(job.table, known, group, job.asked.overrides), job.name, job.out, course.failed
    )
    problems = [_failures(course, len(planned))]
    if job.asked.held_out is None:  # where settings are tried, it is a result
        rows = {one.row.name for one in every}
        lost = [name for name in chosen.all_diverged if name in rows]
        problems += [_divergence(planned, known), not_trained(lost)]
    return Outcome(files, " ".join(filter(None, problems)) or None)


def _planned(job: Job) -> tuple[list[Planned], Tuned]:
    """What is to be trained, by the best of the learning rates that were tried."""
    facts = plan(job.table, job.asked)[0].trial.facts
    known = job.known()
    chosen = with_best_rates(job.table, job.asked, known, facts["source"], facts["epochs"])
    without = {*chosen.waiting, *chosen.all_diverged}
    ready = [one for one in plan(chosen.table, job.asked) if one.row.name not in without]
    return ready, chosen


def _missing(job: Job, planned: Sequence[Planned], device: str) -> list[Planned]:
    known = job.known()
    columns = _columns(job.table, device)
    return [one for one in planned if one.trial.lacks(columns, known)]


def _in_work(job: Job, trial: Trial) -> bool:
    with _claimed(job, trial) as run:
        return run is None


def _columns(table: Table, device: str) -> list[Column]:
    return [column for column in table.measured if column.can_be_had_on(device)]


def _with_all_that_is_told(columns: Sequence[Column], device: str) -> list[Column]:
    """What training tells is recorded whether the table shows it or not: another table that does,
    and has the run in common, would train it again."""
    told = [c for c in COLUMNS.values() if c.told_by_training and c.can_be_had_on(device)]
    return [*columns, *(column for column in told if column not in columns)]


def _failures(course: Course, planned: int) -> str:
    if not course.failed:
        return ""
    reasons = "; ".join(f"{label}: {reason}" for label, reason in course.failed.items())
    return (
        f"{len(course.failed)} of {planned} runs failed and are gaps in the table ({reasons}). "
        "The same command tries them again."
    )


def _divergence(planned: Sequence[Planned], known: Sequence[Kept]) -> str:
    found = [f"{one.label}{end}" for one in planned for end in divergences(one.trial.own(known))]
    if not found:
        return ""
    bf16 = any(numerics(one.trial.config)["precision"] == "bf16" for one in planned)
    return (
        f"Gaps in the table, as training diverged: {'; '.join(found)}. To try again, give another "
        f"learning_rate{', precision=fp32' * bf16} or skip_bad_steps=true."
    )


def run_missing(job: Job, console: Console, live: bool = True) -> Course:
    """Train and judge, one after the other, what has no records yet and nobody works on."""
    course, bench = Course(), None
    for one in _planned(job)[0]:
        columns = _columns(job.table, choose_device(one.trial.config.run.device))
        if not one.trial.lacks(columns, job.known()):
            continue
        if bench is None:  # images are decoded once, and only if somebody needs them
            bench = _bench(one.trial.config, job.asked, console)
            append_records(job.records, ())  # who cannot write there learns it before the training
        with _claimed(job, one.trial) as run:
            if run is None:
                course.elsewhere.append(one.label)
            elif one.trial.lacks(columns, job.known()):  # nobody was faster
                _attempt(bench, one, columns, run, job, course, console, live)
    return course


def _bench(config: Config, asked: Asked, console: Console) -> Bench:
    fabric = build_fabric(config.run)
    with console.status(f"reading {config.data.source}"):
        return Bench(fabric, Images.open(config.data, asked.held_out).decoded(fabric.device))


@contextmanager
def _claimed(job: Job, trial: Trial) -> Iterator[RunFolder | None]:
    """The trial's run folder, in which nobody else trains meanwhile; none if somebody does."""
    run = RunFolder(job.out / "runs" / run_name(trial, job.images))
    file = run.path / "config.yaml"
    if not file.exists():
        try:
            RunFolder.create(run.path, config_yaml(trial.config))
        except UserError:
            if not file.exists():  # otherwise another process was faster
                raise
    try:
        run.lock()
    except UserError:
        yield None
        return
    try:
        yield run
    finally:
        run.unlock()


def run_name(trial: Trial, images: Mapping[str, str]) -> str:
    """A folder's name for this trial on these images alone."""
    config = trial.config
    own = [lasting(config), numerics(config), trial.work, dict(trial.facts)]
    told = json.dumps([*own, images.get("train_fingerprint")], sort_keys=True)
    digest = hashlib.blake2b(told.encode(), digest_size=5).hexdigest()
    words = f"{trial.subject}-{config.model.backbone}-{digest}-seed{trial.seed}"
    return re.sub(r"[^\w.+-]+", "_", words)


def _attempt(
    bench: Bench,
    one: Planned,
    columns: Sequence[Column],
    run: RunFolder,
    job: Job,
    course: Course,
    console: Console,
    live: bool,
) -> None:
    """Whatever fails is noted, and the rest goes on."""
    try:
        found = bench.attempt(
            one.trial,
            _with_all_that_is_told(columns, bench.device.type),
            run,
            watch=lambda training: _Shown(one.label, training, console, live),
            command=job.command,
        )
        append_records(job.records, found)
    except Interrupted:
        raise
    except DivergedError as error:
        found = [one.trial.divergence(error.step, bench.images.fingerprints)]
        append_records(job.records, found)
        say(console, f"{one.label} diverged at step {error.step:,}")
    except UserError as error:
        course.failed[one.label] = str(error).removesuffix(".")
    except torch.OutOfMemoryError:
        course.failed[one.label] = "the device has too little memory for it"
    except Exception as error:
        run.log(traceback.format_exc())
        reason = str(error).partition("\n")[0] or type(error).__name__
        course.failed[one.label] = f"{reason} (all about it is in {run.path / 'train.log'})"
    if one.label in course.failed:
        say(console, f"{one.label} failed: {course.failed[one.label]}")
        return
    for left in (run.checkpoints.folder, *run.path.glob("linear-*")):
        shutil.rmtree(left, ignore_errors=True)
    values = [
        f"{column.heading} {record.value:.1f} {column.unit}"
        for column in columns
        for record in found
        if column.shows(record)
    ]
    if values:
        say(console, f"{one.label}: {', '.join(values)}")


class _Shown(Callback):
    """Tells a person how far a trial is, and writes its values into its run folder."""

    def __init__(self, label: str, training: Training, console: Console, live: bool) -> None:
        self.training = training
        self.progress = Progress(
            title=f"{label} · {training.task.title}",
            total_steps=training.total_steps,
            steps_per_epoch=training.steps_per_epoch,
            first_step=training.step,
            reference_levels=training.task.reference_levels(),
            console=console if live else Console(quiet=True),
        )

    def __enter__(self) -> Self:
        run, training = self.training.run, self.training
        run.forget_after(training.step)
        run.write_environment(device=str(training.fabric.device), processes=1)
        self.progress.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self.progress.__exit__(*error)

    def on_step(self, step: int) -> None:
        self.progress.tick(step)

    def on_values(self, step: int, epoch: float, values: Mapping[str, float]) -> None:
        self.progress.update(step, values)
        self.training.run.add_values(step, epoch, values)


# Several devices

PROCESSES = multiprocessing.get_context("spawn")
"""CUDA cannot be used in forks."""


def _on_devices(job: Job, devices: int, kind: str) -> Course:
    """A process for every device, each doing what ``run_missing`` does."""
    if kind == "mps":
        raise UserError("one machine has one MPS device: leave out --devices.")
    if kind == "cuda" and devices > torch.cuda.device_count():
        raise UserError(
            f"--devices {devices}, but this machine has {torch.cuda.device_count()} CUDA devices."
        )
    workers = []
    try:
        for index in range(devices):
            answer, told = PROCESSES.Pipe(duplex=False)
            place = _Place.of(index, devices, kind)
            process = PROCESSES.Process(target=_worker, args=(job, place, told))
            process.start()
            told.close()
            workers.append((process, answer))
        found = [_told(answer) for _, answer in workers]
    finally:
        for process, _ in workers:
            process.terminate()  # one that still trains saves what it has
            process.join()
    for one in found:
        if isinstance(one, UserError):
            raise one
    return _together([one for one in found if isinstance(one, Course)])


def _together(courses: Sequence[Course]) -> Course:
    """What one of them left to another is not elsewhere."""
    failed = {label: why for course in courses for label, why in course.failed.items()}
    left = [{*course.elsewhere} for course in courses]
    return Course(failed, sorted(set.intersection(*left)) if left else [])


class _Place(NamedTuple):
    """Where a process computes."""

    cuda_devices: str | None
    threads: int | None

    @classmethod
    def of(cls, index: int, devices: int, kind: str) -> "_Place":
        """The index-th of the CUDA devices, or a share of the cores."""
        if kind != "cuda":
            return cls(None, max(1, torch.get_num_threads() // devices))
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        return cls(visible.split(",")[index] if visible else str(index), None)

    def take(self) -> None:
        if self.cuda_devices is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = self.cuda_devices  # before CUDA is first used
        if self.threads is not None:
            torch.set_num_threads(self.threads)


def _worker(job: Job, place: _Place, told: Connection) -> None:
    if sys.platform != "win32":
        os.setpgrp()  # Ctrl-C is for the first process, which then asks this one to stop
    place.take()
    try:
        told.send(run_missing(job, Console(), live=False))
    except UserError as error:
        told.send(error)
    except Interrupted as stop:
        print(f"xmoco: {stop}", file=sys.stderr)


def _told(answer: Connection) -> Course | UserError | None:
    try:
        found: Course | UserError = answer.recv()
    except EOFError:  # it was stopped or killed
        return None
    return found
