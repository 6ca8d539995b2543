"""A trial: a configuration with a seed, and what records tell of it.

Its records tell it from all other trials, so that one whose records are there is never run again.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from xmoco.config import KINDS, Config, DataConfig
from xmoco.data.sources import source_name
from xmoco.data.subset import HELD_OUT
from xmoco.errors import UserError
from xmoco.pretraining import work_name
from xmoco.records import Measured, Record, forget_half_line, read_records
from xmoco.settings import FREE, load_config
from xmoco.tables.columns import Column
from xmoco.train.engine import choose_device, in_bf16
from xmoco.train.run_folder import plain

DIVERGED = "diverged"
"""What a record measures that tells at which step a trial ended so."""
PART = "of"
"""Where such a record tells the measure whose classifier did, if not the method itself."""

CHOSEN = "strength_chosen_on"
"""Where the record of a logistic regression tells which images its penalty was chosen by."""

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

    @classmethod
    def of(
        cls,
        config: Config,
        held_out: float | None,
        told: Mapping[str, Any],
        subject: str | None = None,
    ) -> "Trial":
        """By its settings alone, however these were asked for; the subject is the method, unless
        it is not one of ours."""
        return cls(subject or config.method.subject, config, facts_of(config, held_out), told)

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
            if None not in ended
            and column.measure not in ended
            and not any(self.is_shown(column, record) for record in own)
        ]

    def is_shown(self, column: Column, record: Kept) -> bool:
        """Whether the record, of this trial, is the column's figure: it may also have been judged
        by images of other sizes."""
        own = self.config.input.central_size
        return column.shows(record) and record.protocol.get("size", own) == own

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


def refuse_twins(trials: Mapping[str, Trial]) -> None:
    """Of two that are the same, the second would be shown with what the first one reached."""
    labels: list[tuple[str, Trial]] = []
    for label, trial in trials.items():
        for other, before in labels:
            if (trial.identity, trial.seed) == (before.identity, before.seed):
                raise UserError(
                    f"{label} is the same training as {other}: give one of them (device and "
                    "precision do not tell trainings apart)."
                )
        labels.append((label, trial))


def known_records(path: Path) -> list[Kept]:
    """All records of a file that may not be there yet, and to which others may be adding."""
    if not path.exists():
        return []
    forget_half_line(path)
    return with_facts(read_records(path, Kept))


def with_facts(records: Iterable[Kept]) -> list[Kept]:
    """Until 2026-11-20, comparisons told the settings of a run in its last record alone, and called
    the method as they liked. What such records tell of a trial is told by each here, so that it
    counts wherever that trial is wanted; a run whose settings are no longer known stays as it is.
    Logistic regressions whose strength was chosen by the images that they judged are left out.
    """
    records = list(records)
    settings = {_former_run(r): r.protocol["settings"] for r in records if _is_former(r)}
    return [
        _with_facts(record, settings.get(_former_run(record)))
        for record in records
        if record.measure != "logistic_top1" or CHOSEN in record.protocol
    ]


def _is_former(record: Kept) -> bool:
    return "source" not in record.protocol and "settings" in record.protocol


def _former_run(record: Kept) -> tuple[Any, ...]:
    told = ("changes", "recipe_digest", "split", "held_out_share")
    return record.subject, record.work, record.seed, *map(record.protocol.get, told)


def _with_facts(record: Kept, settings: Mapping[str, Any] | None) -> Kept:
    if settings is None or "source" in record.protocol:
        return record
    if settings.get("train", {}).get("epochs") != record.protocol["epochs"]:
        return record  # they are not whole
    try:
        config = Config.model_validate_json(json.dumps(settings))
    except ValidationError:
        return record
    facts = facts_of(config, record.protocol.get("held_out_share"))
    facts["source"] = record.work.removesuffix(f"-{config.model.backbone}-{config.train.epochs}ep")
    changed = {"subject": config.method.subject, "protocol": {**record.protocol, **facts}}
    return record.model_copy(update=changed)


def facts_of(config: Config, held_out: float | None) -> dict[str, Any]:
    """By which the records of a configuration are told from those of all others."""
    return {
        "source": source_name(config.data.source),
        "settings": own_settings(config),
        "epochs": config.train.epochs,
        "epoch": config.train.epochs,
        **split_facts(held_out),
    }


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


def own_settings(config: Config) -> dict[str, Any]:
    """Those that last, but for epochs and seed, which records tell themselves."""
    settings = lasting(config)
    train = {k: v for k, v in settings["train"].items() if k not in ("epochs", "seed")}
    return {**settings, "train": train}


def recipe_digest(config: Config) -> str:
    """Of all settings, in whatever order. Those at their defaults take no part: there was a time
    without them."""
    settings = config.model_dump(mode="json", exclude_defaults=True)
    for section in KINDS:  # each kind of method has its own name for a default
        kind = getattr(config, section)
        if type(kind) is not type(getattr(Config(), section)):
            settings.setdefault(section, {})["name"] = kind.name
    text = json.dumps(settings, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=4).hexdigest()


def recipe_told(recipe: str, changes: Sequence[str]) -> dict[str, Any]:
    """How a configuration was asked for, which its records tell besides."""
    return {
        "recipe": Path(recipe).stem,
        "recipe_digest": recipe_digest(load_config(recipe)),
        "changes": " ".join(changes),
    }
