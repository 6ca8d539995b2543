"""A trial: a configuration with a seed, and what records tell of it.

Its records tell it from all other trials, so that one whose records are there is never run again.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from xmoco.config import KINDS, Config, DataConfig
from xmoco.data.subset import HELD_OUT
from xmoco.pretraining import work_name
from xmoco.records import Measured, Record, forget_half_line, read_records
from xmoco.settings import FREE
from xmoco.tables.columns import Column
from xmoco.train.engine import choose_device, in_bf16
from xmoco.train.run_folder import plain

DIVERGED = "diverged"
"""What a record measures that tells at which step a trial ended so."""
PART = "of"
"""Where such a record tells the measure whose classifier did, if not the method itself."""

Kept = Measured[dict[str, Any]]


@dataclass(frozen=True)
class Trial:
    """A configuration, seed included, to be trained and judged."""

    subject: str
    config: Config
    facts: Mapping[str, Any]
    """What its records say that those of no other configuration do."""
    told: Mapping[str, Any] = field(default_factory=dict)
    """What they say besides."""

    @property
    def seed(self) -> int:
        return self.config.train.seed

    @property
    def work(self) -> str:
        return work_name(self.config)

    @property
    def identity(self) -> tuple[str, Any]:
        """What tells its configuration from others, whatever the images, epochs and seed."""
        return self.subject, self.facts["settings"]

    def own(self, records: Sequence[Kept]) -> list[Kept]:
        """Those of this very trial."""
        wanted = self.facts.items()
        return [
            record
            for record in records
            if (record.subject, record.work, record.seed) == (self.subject, self.work, self.seed)
            and wanted <= record.protocol.items()
        ]

    def lacks(self, columns: Sequence[Column], records: Sequence[Kept]) -> list[Column]:
        """The columns that none of the records shows for this trial, unless it diverged: on
        held-out images, where settings are tried, that is a result; elsewhere it may be trained
        once more with other numerics."""
        own = self.own(records)
        ends = [record for record in own if record.measure == DIVERGED]
        if self.facts["split"] != HELD_OUT:
            now = numerics(self.config)
            # which a linear classifier does not depend on
            ends = [r for r in ends if PART in r.protocol or r.protocol.get("numerics") == now]
        ended = {record.protocol.get(PART) for record in ends}
        return [
            column
            for column in columns
            if None not in ended and column.measure not in ended and not any(map(column.shows, own))
        ]

    def divergence(self, step: int, images: Mapping[str, str]) -> Record:
        """Its only record, if it has diverged; ``images`` tell which they were."""
        protocol = {**self.facts, **self.told, **images, "numerics": numerics(self.config)}
        return Record(DIVERGED, step, "step", self.subject, self.work, protocol, self.seed)


def divergences(own: Sequence[Kept]) -> dict[str | None, str]:
    """What of a trial diverged and was not measured after all, by its records: in words, by the
    measure whose classifier did; by none if the method did."""
    measured = {record.measure for record in own} - {DIVERGED}
    told: dict[str | None, str] = {}
    for record in own:
        part = record.protocol.get(PART)
        if record.measure == DIVERGED and (part not in measured if part else not measured):
            what = ", its linear classifier" if part else ""
            told[part] = f"{what}, at step {int(record.value):,}"
    return told


def numerics(config: Config) -> dict[str, Any]:
    """What is no setting of a method, but may decide whether a training diverges."""
    run = config.run
    return {
        "precision": "bf16" if in_bf16(run, choose_device(run.device)) else "fp32",
        "skip_bad_steps": run.skip_bad_steps,
    }


def known_records(path: Path) -> list[Kept]:
    """All records of a file that may not be there yet, and to which others may be adding."""
    if not path.exists():
        return []
    forget_half_line(path)
    return read_records(path, Kept)


def split_facts(held_out_share: float | None) -> dict[str, Any]:
    """Which images a record is of."""
    if held_out_share is None:
        return {"split": "test"}
    return {"split": HELD_OUT, "held_out_share": held_out_share}


def unwatched(config: Config) -> Config:
    """With the settings on which the weights depend; where the images are, the device and watching
    are as by default."""
    usual = Config()
    train = {name: getattr(usual.train, name) for name in FREE["train"]}
    data = DataConfig(short_side=config.data.short_side)
    return config.model_copy(
        update={
            "run": usual.run,
            "data": data,
            "monitor": usual.monitor,
            "train": config.train.model_copy(update=train),
        }
    )


def lasting(config: Config) -> dict[str, Any]:
    """The settings on which the weights depend, as they are read back from a file.

    Of them, what differs from xmoco's defaults: settings that are younger than a record change
    nothing.
    """
    settings = unwatched(config).model_dump(mode="json", exclude_defaults=True)
    for section in KINDS:
        settings[section] = {"name": getattr(config, section).name, **settings.get(section, {})}
    return plain({"train": {}, **settings})
