"""Records: every reported number with its protocol, one json object per line.

Any two records with the same ``work`` and ``measure`` compare; ``subject`` says who was measured.
Whoever measures writes a ``Record``, whose protocol may tell anything. Whoever shows records says
which kind of protocol it needs, and gets ``Measured`` of that kind: what is missing or wrong in a
file is told by line.
"""

import functools
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from collections.abc import Container, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Generic, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from xmoco.errors import UserError
from xmoco.files import text_of
from xmoco.text import printable, shortened

LARGEST_FILE = 2**30
"""Bytes of a file of records."""

if sys.platform != "win32":
    import fcntl


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


@functools.cache
def versions() -> dict[str, str]:
    names = ("xmoco", "torch", "torchvision", "lightning-fabric", "numpy")
    found = {"python": platform.python_version()}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


@functools.cache
def machine() -> dict[str, Any]:
    """What computed the number: processor, cores, devices. No host or user names."""
    import torch  # whoever measures has it already; whoever reads need not wait for it

    facts: dict[str, Any] = {
        "system": platform.system(),
        "processor": _processor(),
        "threads": torch.get_num_threads(),
    }
    if torch.cuda.is_available():
        facts["gpus"] = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return facts


@functools.cache
def commit() -> str | None:
    """The commit of the source tree xmoco runs from, with + when it was edited.

    Where there is no git, the variable XMOCO_COMMIT may tell; otherwise nothing is known.
    """
    told = os.environ.get("XMOCO_COMMIT")
    if told:
        return told
    here = Path(__file__).parent
    try:
        top = _git(here, "rev-parse", "--show-toplevel")
        if not (Path(top) / "src" / "xmoco").is_dir():
            return None
        edited = "+" if _git(here, "status", "--porcelain", "--untracked-files=no") else ""
        return _git(here, "rev-parse", "--short=12", "HEAD") + edited
    except (OSError, subprocess.CalledProcessError):
        return None


@dataclass(frozen=True)
class Record:
    measure: str
    value: float
    unit: str
    subject: str
    work: str
    protocol: dict[str, Any]
    seed: int
    commit: str | None = field(default_factory=commit)
    versions: dict[str, str] = field(default_factory=versions)
    machine: dict[str, Any] = field(default_factory=machine)
    time: str = field(default_factory=now)

    def json(self) -> str:
        return json.dumps(asdict(self), ensure_ascii=False)


def append_records(path: Path, records: Iterable[Record]) -> None:
    """Add records to a .jsonl file, one per line; several programs may do so at once."""
    lines = b"".join(f"{record.json()}\n".encode() for record in records)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a+b") as file:
            _lock(file)
            file.seek(0, os.SEEK_END)
            if file.tell() and not _ends_line(file):
                file.write(b"\n")  # another program, or a hand, left the last line open
            file.write(lines)
    except OSError as error:
        raise UserError(f"could not write {path}: {error.strerror or error}.") from None


def forget_half_line(path: Path) -> None:
    """Cut off the half record that a program leaves which is killed while it adds one.

    A file that is none of records is left as it is, for whoever reads it to say so.
    """
    with path.open("r+b") as file:
        _lock(file)
        content = file.read()
        whole = content.rfind(b"\n") + 1
        lines, last = content[:whole].splitlines(), content[whole:]
        begins_record = last.startswith(RECORD_BEGINS[: len(last)])
        if begins_record and all(map(_is_object, lines)) and not _is_object(last):
            file.truncate(whole)


RECORD_BEGINS = b'{"measure": '


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line or b"{}"), dict)
    except ValueError:
        return False


def _lock(file: BinaryIO) -> None:
    """Wait for others that are writing; closing the file lets them go on."""
    if sys.platform != "win32":
        fcntl.flock(file, fcntl.LOCK_EX)


def _ends_line(file: BinaryIO) -> bool:
    file.seek(-1, os.SEEK_END)
    return file.read() == b"\n"


# Kinds of protocols: of each, what those who show records need. A protocol may tell more.

Name = Annotated[str, Field(min_length=1), AfterValidator(printable)]
STRICT = ConfigDict(strict=True, frozen=True, str_strip_whitespace=True)


class JudgedImages(BaseModel):
    """How any backbone was judged."""

    model_config = STRICT

    data: Name
    backbone: Name | None = Field(None, description="Not told of raw pixels and by the monitor.")
    digest: str = Field("", description="Of the weights; older records have none.")
    epoch: int = Field(ge=0, description="Epochs of training; 0 where nobody knows.")
    size: int = Field(ge=1, description="Of the images judged.")
    judged_images: int = Field(ge=0)
    changes: str = Field("", description="To the recipe, as benchmarks/recipe.py notes them.")


class KnnProtocol(JudgedImages):
    """kNN, by the monitor of a run or by ``xmoco evaluate knn``."""

    split: Name
    k: int = Field(ge=1)
    temperature: float
    bank_images: int = Field(ge=0)
    run_seconds: float | None = Field(None, description="Of the whole run, where it was recorded.")
    settings: str = Field("", description="Of the run, as yaml.")


class ClassifierProtocol(JudgedImages):
    """Linear classification and fine-tuning."""

    name: Name
    label_fraction: float = Field(gt=0, le=1)
    crop_size: int | None = Field(None, ge=1, description="Of training; older: as size.")


class TransferProtocol(JudgedImages):
    """Transfer, frozen or end to end."""

    backbone: Name
    set: Name
    metric: Name
    name: Name
    crop_size: int | None = Field(None, ge=1, description="Of training; older: as size.")
    labelled: bool = Field(False, description="Whether the weights are of a classifier.")


class DetectionProtocol(JudgedImages):
    """Detection and segmentation: the measures are box_ap, box_ap50 … and mask_ap, mask_ap50 …"""

    backbone: Name
    model: Name
    schedule: Name
    metric: Name = Field(description="Whose rules: COCO, or VOC with 11 points or by area.")
    batch: int = Field(ge=1)
    steps: int = Field(ge=1)
    categories: int = Field(ge=1)
    train_images: int = Field(ge=1)
    labelled: bool = Field(False, description="Whether the weights are of a classifier.")


class SpeedProtocol(BaseModel):
    """How fast training is."""

    model_config = STRICT

    data: Name
    batch: int = Field(ge=1)
    size: int = Field(ge=1)
    bank_length: int | None = Field(None, description="Of methods that have banks.")
    precision: str
    rounds: list[float] = Field(min_length=1, description="Images per second in each.")
    waiting: float
    gpu_memory_gib: float | None = None
    times_baseline: float | None = Field(None, description="Where a baseline was measured, too.")
    graph: bool = Field(False, description="Whether steps were replayed as a CUDA graph.")


class StageProtocol(BaseModel):
    """How long a stage of a step takes."""

    model_config = STRICT

    data: Name
    batch: int = Field(ge=1)
    size: int = Field(ge=1)
    bank_length: int | None = None
    stage: Name


P = TypeVar("P")


class Measured(BaseModel, Generic[P]):
    """A record as it is read, with a protocol of the kind ``P``."""

    model_config = STRICT

    measure: Name
    value: float
    unit: str = ""
    subject: Name
    work: str = ""
    protocol: P
    seed: int
    commit: str | None = None
    versions: dict[str, str] = Field(default_factory=dict)
    machine: dict[str, Any] = Field(default_factory=dict)
    time: str = ""


M = TypeVar("M", bound=Measured[Any])


def read_records(file: Path, kind: type[M], measures: Container[str] | None = None) -> list[M]:
    """The records of a .jsonl file, or those of some measures; other lines are passed over."""
    return [
        _validated(line, kind)
        for line in read_lines(file)
        if "measure" in line.entry and (measures is None or line.entry["measure"] in measures)
    ]


@dataclass(frozen=True)
class Line:
    """A line of a .jsonl file."""

    where: str
    text: str
    entry: dict[str, Any]
    """A record, or the training values that a run's metrics.jsonl holds beside records."""


def read_lines(file: Path) -> Iterator[Line]:
    """The lines of a file of records, each of which must be one."""
    try:
        texts = text_of(file, LARGEST_FILE).split("\n")
    except FileNotFoundError:
        raise UserError(f"there is no file of records at {file}.") from None
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror or error}.") from None
    except ValueError:
        raise UserError(f"{file} is not a text file: give a .jsonl file of records.") from None
    for number, text in enumerate(texts, start=1):
        if text.strip():
            yield _parse(text, f"{file}, line {number}")


class TrainingValues(BaseModel):
    """A line of a run's metrics.jsonl that is no record."""

    model_config = STRICT

    step: int = Field(ge=0)
    epoch: float = Field(ge=0, allow_inf_nan=False)
    values: dict[str, float]


class RunProtocol(BaseModel):
    """What a record in a run's metrics.jsonl tells of its moment."""

    model_config = STRICT

    epoch: int = Field(ge=0)
    step: int = Field(0, ge=0)


class RunRecord(BaseModel):
    """What a run and its report need of a record in metrics.jsonl."""

    model_config = STRICT

    measure: str
    value: float
    subject: str
    protocol: RunProtocol


@dataclass(frozen=True)
class RunMetrics:
    """The metrics.jsonl of a run: its lines, and how many are damaged."""

    lines: list[Line] = field(default_factory=list)
    damaged: int = 0

    @classmethod
    def read(cls, file: Path) -> "RunMetrics":
        """Of a run that may be writing it: there may be none yet, and the half line that a run
        leaves which is killed counts for nothing. Whatever else is no line of ours is counted."""
        if not file.exists():
            return cls()
        try:
            texts = file.read_bytes().decode("utf-8", "replace").split("\n")
        except OSError as error:
            raise UserError(f"cannot read {file}: {error.strerror or error}.") from None
        found = [_line_of_run(text, f"{file}, line {n}") for n, text in enumerate(texts, start=1)]
        whole = [line for line in found if line is not None]
        damaged = sum(bool(text.strip()) for text in texts[:-1]) - len(whole) + bool(found[-1])
        return cls(whole, damaged)

    def knn(self) -> list[dict[str, Any]]:
        """The records of kNN accuracy."""
        return [line.entry for line in self.lines if line.entry.get("measure") == "knn_top1"]


def _line_of_run(text: str, where: str) -> Line | None:
    try:
        line = _parse(text, where)
        (RunRecord if "measure" in line.entry else TrainingValues).model_validate(line.entry)
    except (UserError, ValidationError):
        return None
    return line


def _parse(text: str, where: str) -> Line:
    try:
        entry = json.loads(text)
    except (ValueError, RecursionError):
        raise UserError(f"{where} is not json: every line must hold one record.") from None
    match entry:
        case {"measure": str()} | {"values": dict()}:
            return Line(where, text, entry)
    raise UserError(f"{where} holds no record: it must be a json object with a measure.")


def _validated(line: Line, kind: type[M]) -> M:
    try:
        return kind.model_validate(line.entry)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        if first["type"] == "missing":
            raise UserError(f"{line.where}: the record lacks {key}.") from None
        wanted = first["msg"].replace("Input should", "must")
        raise UserError(f"{line.where}: {key} = {shortened(first['input'])} {wanted}.") from None


def _git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
