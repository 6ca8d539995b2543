"""Records: every reported number with its protocol, one json object per line.

Any two records with the same ``work`` and ``measure`` compare; ``subject`` says who was measured.
"""

import functools
import importlib.metadata
import json
import os
import platform
import subprocess
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO

import torch

from xmoco.errors import UserError


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
    """Add records to a .jsonl file, one per line."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a+b") as file:
            if file.tell() and not _ends_line(file):
                file.write(b"\n")  # another program, or a hand, left the last line open
            file.writelines(f"{record.json()}\n".encode() for record in records)
    except OSError as error:
        raise UserError(f"could not write {path}: {error.strerror or error}.") from None


def _ends_line(file: BinaryIO) -> bool:
    file.seek(-1, os.SEEK_END)
    return file.read() == b"\n"


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
