"""Runs what is missing of a table: one trial after the other, or one per device.

Where a table wants trials of its rows' settings, they are a table of their own, and those of
a row come right before it: a table that has to end early has some rows whole.
"""

import multiprocessing
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple, Self

import torch
from rich.console import Console

from xmoco.errors import Interrupted, UserError
from xmoco.planning import say
from xmoco.records import append_records
from xmoco.tables.attempts import Books, Wanted, attempt
from xmoco.tables.bench import Benches
from xmoco.tables.definition import Table, read_table
from xmoco.tables.drawing import draw
from xmoco.tables.filling import Group, fill
from xmoco.tables.images import Images
from xmoco.tables.plan import Asked, Planned, plan, refuse_same_rows, trials_of_rows
from xmoco.tables.processes import end_with_parent, stop_all
from xmoco.tables.trials import Kept, divergences, numerics
from xmoco.tables.tuning import (
    Tuned,
    is_tuned,
    not_trained,
    trial_names,
    trials_asked,
    with_best_settings,
)
from xmoco.train.callback import Callback
from xmoco.train.engine import choose_device
from xmoco.train.loop import Training
from xmoco.train.progress import Progress


@dataclass(frozen=True)
class Job:
    """A table to be run, and where all of it is kept."""

    table: Table
    name: str
    """Of its files."""
    asked: Asked
    out: Path
    records: Path
    also: Sequence[Path] = ()
    """Other files of records, as of benchmarks/compare.py: what they have is not run again."""
    command: str = "the same command"
    """With which a person goes on."""
    images: Mapping[str, str] = field(default_factory=dict)
    """What tells the images from others of the same name, if they are there."""
    pictured: bool = True
    """Whether it is drawn as a picture, too."""

    @classmethod
    def of(
        cls,
        name: str,
        asked: Asked,
        out: Path,
        records: Sequence[Path] = (),
        command: str = "the same command",
    ) -> "Job":
        """New records go into the first file."""
        table = read_table(name)
        own, *also = records or [out / "records.jsonl"]
        return cls(table, file_name(name, table, asked), asked, out, own, also, command)

    @property
    def books(self) -> Books:
        return Books(self.records, self.out / "runs", self.images, self.also)

    def trials(self) -> "Job | None":
        """Of its rows' settings, if it wants some."""
        if not is_tuned(self.table, self.asked):
            return None
        table, asked = trials_asked(self.table, self.asked)
        # Three columns of points for every row would be too wide to read.
        return replace(self, table=table, name=f"{self.name}-trials", asked=asked, pictured=False)


LONGEST_NAME = 120


def file_name(name: str, table: Table, asked: Asked) -> str:
    """Of a table's files, which say in what it is not the table as it is defined: it would replace
    that one, or be replaced by it."""
    parts = [Path(name).stem]
    if asked.epochs not in (None, table.epochs):
        parts.append(f"{asked.epochs}ep")
    if asked.held_out is not None:
        parts.append(f"held-out-{100 * asked.held_out:g}")
    own, changed = trials_of_rows(table), trials_of_rows(table, asked.overrides)
    if any(own[row].identity != changed[row].identity for row in own):
        parts += [re.sub(r"[^\w.+-]+", "_", change) for change in asked.overrides]
    return "-".join(parts)[:LONGEST_NAME]


@dataclass(frozen=True)
class Outcome:
    files: list[Path]
    problem: str | None
    """What failed, as a sentence, if anything did."""


def run_table(
    job: Job, *, devices: int = 1, dry_run: bool = False, console: Console | None = None
) -> Outcome:
    """Run what is missing of a table, on so many devices at once, and draw what there is."""
    console = console or Console()
    # A mistake is told before anything is trained, trials included.
    refuse_same_rows(job.table, job.asked)
    job = replace(job, images=_fingerprints(job, dry_run, console))
    jobs = [one for one in (job.trials(), job) if one is not None]
    device = choose_device(plan(job.table, job.asked)[0].trial.config.run.device)
    missing = [_tell_what_is_missing(one, device, dry_run, console) for one in jobs]
    failed: Mapping[str, str] = {}
    if any(missing) and not dry_run:
        failed = run_missing(job, console) if devices == 1 else _on_devices(job, devices, device)
    outcomes = [_drawn(one, failed, device, dry_run, console) for one in jobs]
    problem = " ".join(outcome.problem for outcome in outcomes if outcome.problem is not None)
    if dry_run and problem:  # it has done what it was asked for
        say(console, problem)
        problem = ""
    return Outcome([file for outcome in outcomes for file in outcome.files], problem or None)


def _fingerprints(job: Job, dry_run: bool, console: Console) -> Mapping[str, str]:
    """Of the images; without them, a table can still be drawn."""
    data = plan(job.table, job.asked)[0].trial.config.data
    try:
        usable = data.model_copy(update={"download": data.download and not dry_run})
        return Images.open(usable, job.asked.held_out).fingerprints
    except UserError as error:
        if not dry_run:
            raise
        say(console, f"Nothing could be trained now: {error}")
        return {}


def _tell_what_is_missing(job: Job, device: str, dry_run: bool, console: Console) -> bool:
    """And whether anything is."""
    every = plan(job.table, job.asked)
    planned, chosen = _planned(job)
    missing = _missing(job, planned, device)
    runs = "1 run" if len(every) == 1 else f"{len(every)} runs"
    waiting = [one for one in every if one.row.name in chosen.waiting]
    later = f", {len(waiting)} when their settings are chosen" if waiting else ""
    say(console, f"{job.table.title}: {runs}, {len(missing)} to be trained{later}")
    if missing and dry_run:
        for line in ("missing:", *(f"  {one.label}" for one in missing)):
            say(console, line)
    return bool(missing or waiting)


def _drawn(
    job: Job, failed: Mapping[str, str], device: str, dry_run: bool, console: Console
) -> Outcome:
    """The table as far as it goes, and what is wrong with it: runs that ``failed``, by label, with
    the reason."""
    every = plan(job.table, job.asked)
    planned, chosen = _planned(job)
    missing = [] if dry_run else _missing(job, planned, device)
    labels = {one.label for one in missing}  # another process may have had more memory
    failed = {label: why for label, why in failed.items() if label in labels}
    for one in missing:
        if one.label not in failed and not _in_work(job, one):
            failed[one.label] = "the process that worked on it did not finish it"
    elsewhere = [one.label for one in missing if one.label not in failed]
    if elsewhere:
        say(
            console,
            f"in work by another process: {'; '.join(elsewhere)}. When it is done, the same "
            "command draws the table again.",
        )
    known = job.books.known()
    filled = fill(job.table, known, Group.of(every[0].trial.facts), job.asked.overrides)
    empty = dry_run and not (filled.records or filled.diverged)  # and may replace a full one
    files = [] if empty else draw(filled, job.name, job.out, failed, pictured=job.pictured)
    problems = [_failures(failed, len(planned))]
    if job.asked.held_out is None:  # where settings are tried, it is a result
        rows = {one.row.name for one in every}
        lost = [name for name in chosen.all_diverged if name in rows]
        problems += [_divergence(planned, known), not_trained(lost)]
    return Outcome(files, " ".join(filter(None, problems)) or None)


def _planned(job: Job) -> tuple[list[Planned], Tuned]:
    """What is to be trained, by the best of the settings that were tried."""
    facts = plan(job.table, job.asked)[0].trial.facts
    known = job.books.known()
    chosen = with_best_settings(job.table, job.asked, known, facts["source"], facts["epochs"])
    without = {*chosen.waiting, *chosen.all_diverged}
    ready = [one for one in plan(chosen.table, job.asked) if one.row.name not in without]
    return ready, chosen


def _missing(job: Job, planned: Sequence[Planned], device: str) -> list[Planned]:
    known = job.books.known()
    return [one for one in planned if job.books.to_be_trained(_wanted(job, one, device), known)]


def _in_work(job: Job, one: Planned) -> bool:
    with job.books.claimed(one.trial) as run:
        return run is None


def _wanted(job: Job, one: Planned, device: str) -> Wanted:
    columns = [column for column in job.table.measured if column.can_be_had_on(device)]
    return Wanted(one.label, one.trial, columns)


def _failures(failed: Mapping[str, str], planned: int) -> str:
    if not failed:
        return ""
    reasons = "; ".join(f"{label}: {reason}" for label, reason in failed.items())
    return (
        f"{len(failed)} of {planned} runs failed and are gaps in the table ({reasons}). "
        "The same command tries them again."
    )


def _divergence(planned: Sequence[Planned], known: Sequence[Kept]) -> str:
    ends = {one.label: divergences(one.trial.own(known)) for one in planned}
    found = [f"{label}{words}" for label, own in ends.items() for words in own.values()]
    if not found:
        return ""
    gaps = f"Gaps in the table, as training diverged: {'; '.join(found)}."
    if not any(None in own for own in ends.values()):
        return gaps  # linear classifiers, whose settings are the protocol's
    bf16 = any(numerics(one.trial.config)["precision"] == "bf16" for one in planned)
    return (
        f"{gaps} To try again, give another learning_rate{', precision=fp32' * bf16} or "
        "skip_bad_steps=true."
    )


def run_missing(job: Job, console: Console, live: bool = True) -> dict[str, str]:
    """Train and judge, one after the other, what has no records yet and nobody works on. Tells what
    failed, and why."""
    failed: dict[str, str] = {}
    benches = Benches()
    writable = False
    for own, one in _in_order(job):
        device = choose_device(one.trial.config.run.device)
        wanted = _wanted(own, one, device)
        if one.label in failed or not own.books.to_be_trained(wanted, own.books.known()):
            continue
        if not writable:
            append_records(own.records, ())  # who cannot write there learns it before the training
            writable = True
        with console.status(f"reading {one.trial.config.data.source}"):
            bench = benches.of(one.trial.config, own.asked.held_out)
        line = attempt(
            wanted.with_all_that_is_told(device),
            own.books,
            bench,
            failed,
            watch=partial(_Shown, one.label, console=console, live=live),
            command=own.command,
        )
        if line is not None:
            say(console, line)
    return failed


def _in_order(job: Job) -> Iterator[tuple[Job, Planned]]:
    """What is to be trained, in this order: the trials of a row, then the row by its first seed;
    when all have that, whatever is left, or was not ready as others were still trying."""
    trials = job.trials()
    rows = dict.fromkeys(one.row.name for one in plan(job.table, job.asked))
    names = {} if trials is None else trial_names(job.table, job.asked.overrides)
    for row in rows if trials is not None else ():
        assert trials is not None
        tried = {*names[row].values()}
        yield from ((trials, one) for one in _planned(trials)[0] if one.row.name in tried)
        ready = [one for one in _planned(job)[0] if one.row.name == row]
        yield from ((job, one) for one in ready[:1])
    yield from ((job, one) for one in _planned(job)[0])


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


def _on_devices(job: Job, devices: int, kind: str) -> dict[str, str]:
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
        stop_all([process for process, _ in workers])
    for one in found:
        if isinstance(one, UserError):
            raise one
    return {label: why for one in found if isinstance(one, dict) for label, why in one.items()}


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
    end_with_parent()
    place.take()
    try:
        told.send(run_missing(job, Console(), live=False))
    except UserError as error:
        told.send(error)
    except Interrupted as stop:
        print(f"xmoco: {stop}", file=sys.stderr)


def _told(answer: Connection) -> dict[str, str] | UserError | None:
    try:
        found: dict[str, str] | UserError = answer.recv()
    except EOFError:  # it was stopped or killed
        return None
    return found
