"""One trial after the other: claimed, trained, judged and recorded, or its failure noted.

Every trial has a run folder, which is locked while somebody trains in it. So several processes may
work on the same trials, whoever started them: each takes the next one that nobody works on, and
none is trained twice. Records are added when a trial is done. Until then its checkpoints stay, from
which the same command goes on; after that its weights, by which more can be measured later.
"""

import hashlib
import json
import re
import shutil
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from xmoco.config import Config
from xmoco.errors import Interrupted, UserError
from xmoco.methods import Method, build_method
from xmoco.records import Record, append_records
from xmoco.settings import config_yaml
from xmoco.tables.bench import TRAINED, Bench
from xmoco.tables.columns import COLUMNS, Column
from xmoco.tables.trials import Kept, Trial, known_records, lasting, numerics
from xmoco.train.bad_steps import DivergedError
from xmoco.train.callback import Callback
from xmoco.train.loop import Training
from xmoco.train.run_folder import RunFolder


@dataclass(frozen=True)
class Wanted:
    """A trial, and what is to be measured of it."""

    label: str
    trial: Trial
    columns: Sequence[Column]
    sizes: Sequence[int] = ()
    """Of the images it is judged by, if not the recipe's for evaluation."""
    build: Callable[[Config], Method] = build_method

    def with_all_that_is_told(self, device: str) -> "Wanted":
        """What training tells is recorded whether it is shown or not: a table that does, and has
        the run in common, would train it again."""
        told = [c for c in COLUMNS.values() if c.told_by_training and c.can_be_had_on(device)]
        besides = [column for column in told if column not in self.columns]
        return replace(self, columns=[*self.columns, *besides])

    def lacks_any(self, known: Sequence[Kept]) -> bool:
        return bool(self.trial.lacks(self.columns, known))


@dataclass(frozen=True)
class Books:
    """Where trials leave what becomes of them."""

    records: Path
    runs: Path
    images: Mapping[str, str] = field(default_factory=dict)
    """What tells the images from others of the same name, if they are there."""
    also: Sequence[Path] = ()
    """Other files of records: what they have is not measured again."""

    def known(self) -> list[Kept]:
        """All records but those of other images that only have the same name. Images of the same
        names, numbers and labels are the same: what they show is not looked at."""
        return [
            record
            for file in (*self.also, self.records)
            for record in known_records(file)
            if all(record.protocol.get(key, own) == own for key, own in self.images.items())
        ]

    def to_be_trained(self, wanted: Wanted, known: Sequence[Kept]) -> bool:
        """Whether it lacks something. What only the training of a run could tell that is over and
        gone, as of one that was recorded before such was, is not worth another."""
        lacking = wanted.trial.lacks(wanted.columns, known)
        gone = all(column.told_by_training for column in lacking) and wanted.trial.own(known)
        return bool(lacking) and not (gone and not self.weights_kept(wanted.trial))

    def weights_kept(self, trial: Trial) -> bool:
        """Whether more can be measured of it without training."""
        return (self.runs / run_name(trial, self.images) / TRAINED).exists()

    @contextmanager
    def claimed(self, trial: Trial) -> Iterator[RunFolder | None]:
        """The trial's run folder, in which nobody else trains meanwhile; none if somebody does."""
        run = RunFolder(self.runs / run_name(trial, self.images))
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
    words = f"{trial.subject[:80]}-{config.model.backbone}-{digest}-seed{trial.seed}"
    return re.sub(r"[^\w.+-]+", "_", words)


def attempt(
    wanted: Wanted,
    books: Books,
    bench: Bench,
    failed: dict[str, str],
    *,
    watch: Callable[[Training], Callback] = lambda _: Callback(),
    mark: Callable[[RunFolder, Sequence[Record]], None] = lambda *_: None,
    command: str = "",
) -> str | None:
    """Measure what a trial lacks, and only that, unless another process does; and record it. What
    fails is noted in ``failed``, by label, so that the rest can go on. Gives what became of it, in
    a line.

    ``mark`` may add to what the records tell; ``command`` is what a person goes on with.
    """
    with books.claimed(wanted.trial) as run:
        if run is None:
            return None
        lacking = wanted.trial.lacks(wanted.columns, books.known())
        if not lacking:
            return None  # another process was faster
        try:
            found: Sequence[Record] = bench.measure(
                wanted.trial,
                lacking,
                run,
                sizes=wanted.sizes,
                watch=watch,
                build=wanted.build,
                command=command,
            )
            line = f"{wanted.label}: {_values(wanted, found)}"
        except DivergedError as error:
            found = [wanted.trial.divergence(error.step, bench.images.fingerprints)]
            line = f"{wanted.label} diverged at step {error.step:,}"
        except Interrupted:
            raise
        except Exception as error:
            failed[wanted.label] = _reason(error, run)
            return f"{wanted.label} failed: {failed[wanted.label]}"
        mark(run, found)
        append_records(books.records, found)
        for left in (run.checkpoints.folder, *run.path.glob("linear-*")):
            shutil.rmtree(left, ignore_errors=True)
    return line


def _values(wanted: Wanted, found: Sequence[Record]) -> str:
    several = len(wanted.sizes) > 1
    return ", ".join(
        f"{column.heading} {record.value:.1f} {column.unit}"
        + (f" at {record.protocol['size']} px" if several and "size" in record.protocol else "")
        for record in found
        for column in wanted.columns
        if column.shows(record)
    )


def _reason(error: Exception, run: RunFolder) -> str:
    match error:
        case UserError():
            return str(error).removesuffix(".")
        case torch.OutOfMemoryError():
            return "the device has too little memory for it"
    run.log(traceback.format_exc())
    reason = str(error).partition("\n")[0] or type(error).__name__
    return f"{reason} (all about it is in {run.path / 'train.log'})"
