"""The run folder: what a run leaves behind, always under the same names.

``config.yaml``, ``environment.json``, ``metrics.jsonl``, ``train.log``, ``checkpoints/``,
``backbone.safetensors``, ``report.html``, ``events.*`` (TensorBoard) and, where some images could
not be read, ``unreadable.txt``.
"""

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from xmoco.checkpoints import Checkpoints
from xmoco.config import Config
from xmoco.errors import UserError
from xmoco.files import write_whole
from xmoco.records import Record, RunMetrics, commit, machine, now, versions
from xmoco.settings import read_config, read_text, read_yaml

if sys.platform != "win32":
    import fcntl


TEST_SPLIT = "test split: "


class RunFolder:
    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: int | None = None
        self.checkpoints = Checkpoints(path / "checkpoints")

    @classmethod
    def create(cls, path: Path, config: str) -> "RunFolder":
        """A new run. The folder appears together with its config.yaml, or not at all."""
        cls.refuse_existing(path)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            fresh = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
            try:
                with (fresh / "config.yaml").open("w", encoding="utf-8") as file:
                    file.write(config)
                    file.flush()
                    os.fsync(file.fileno())  # without it no checkpoint is of use
                umask = os.umask(0)
                os.umask(umask)
                fresh.chmod(0o777 & ~umask)  # mkdtemp's folders are for their owner only
                fresh.rename(path)
            finally:
                shutil.rmtree(fresh, ignore_errors=True)
        except OSError as error:
            raise UserError(f"cannot create {path}: {error.strerror or error}.") from None
        return cls(path)

    @staticmethod
    def refuse_existing(path: Path) -> None:
        if (path / "config.yaml").exists():
            raise UserError(
                f"{path} already holds a run: continue it with --resume, "
                "or choose another folder with --out."
            )
        if path.exists():
            raise UserError(f"{path} already exists: choose another folder with --out.")

    @staticmethod
    def refuse_unwritable(path: Path) -> None:
        """Where no folder of that name could be made, which is told before anything is measured."""
        there = next(folder for folder in path.absolute().parents if folder.exists())
        if not there.is_dir():
            raise UserError(f"cannot create {path}: {there} is not a folder.")
        if not os.access(there, os.W_OK | os.X_OK):
            raise UserError(f"cannot create {path}: {there} cannot be written to.")

    @classmethod
    def open(cls, path: Path) -> "RunFolder":
        """An existing run, to be continued."""
        if not (path / "config.yaml").is_file():
            there = "holds no run" if path.exists() else "does not exist"
            raise UserError(f"nothing to resume: {path} {there} (start one without --resume).")
        evaluation = _evaluation_in(path / "config.yaml")
        if evaluation is not None:
            raise UserError(
                f"{path} holds a run of `xmoco evaluate{evaluation}`, no pre-training: the command "
                "that began it goes on with it."
            )
        return cls(path)

    @classmethod
    def begun(cls, path: Path, settings: Mapping[str, Any]) -> "RunFolder":
        """Of a run that the same command goes on with: a new one, or one that ``holds`` it."""
        if not cls.holds(path, settings):
            cls.create(path, yaml.safe_dump(plain(settings), sort_keys=False, allow_unicode=True))
        return cls(path)

    @classmethod
    def holds(cls, path: Path, settings: Mapping[str, Any]) -> bool:
        """Whether a run with these settings was begun here; anything else there is refused."""
        file = path / "config.yaml"
        if not file.is_file():
            cls.refuse_existing(path)
            return False
        try:
            before = read_yaml(read_text(file), "it")
        except UserError:
            before = None
        if not isinstance(before, dict):
            raise UserError(f"{file} is damaged: choose another folder with --out.")
        refuse_other_settings(path, before, settings)
        return True

    def lock(self) -> None:
        """Keep other processes from training here until ``unlock``, or until this one ends."""
        if sys.platform == "win32":
            return
        self._lock = os.open(self.path / "config.yaml", os.O_RDONLY)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self.unlock()
            raise UserError(f"another process is training in {self.path}: wait for it.") from None
        for half_written in self.path.glob(".*.part"):  # by one that was killed
            half_written.unlink(missing_ok=True)

    def unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    @property
    def weights(self) -> Path:
        return self.path / "backbone.safetensors"

    def config(self) -> Config:
        return read_config(self.path / "config.yaml")

    def environment(self) -> dict[str, Any]:
        """What the last session wrote about itself; nothing if it did not get that far."""
        return read_environment(self.path)

    def write_environment(self, **facts: Any) -> None:
        """Of this session. Of those before, only when each began is kept."""
        before, began = self.environment(), now()
        started = before.get("started", began)
        sessions = before.get("sessions", [started] if before else [])
        content = {
            "started": started,
            "sessions": [*(sessions if isinstance(sessions, list) else []), began],
            "commit": commit(),
            "versions": versions(),
            "machine": machine(),
            **facts,
        }
        text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
        write_whole(self.path / "environment.json", text.encode())

    def add_values(self, step: int, epoch: float, values: Mapping[str, float]) -> None:
        line = {"step": step, "epoch": round(epoch, 4), "time": now(), "values": dict(values)}
        self._append("metrics.jsonl", json.dumps(line))

    def add_record(self, record: Record) -> None:
        self._append("metrics.jsonl", record.json())

    def add_new(self, records: Iterable[Record]) -> None:
        """Those that do not stand here yet: what is finished may be judged again."""
        known = [_told(line.entry) for line in self.metrics().lines if "measure" in line.entry]
        for record in records:
            if _told(plain(asdict(record))) not in known:
                self.add_record(record)

    def last_knn(self) -> dict[str, float]:
        """The last kNN accuracy of every subject."""
        return {record["subject"]: record["value"] for record in self.metrics().knn()}

    def knn_curve(self, subject: str) -> list[tuple[int, float]]:
        """Epochs and kNN accuracies of one subject."""
        return [
            (record["protocol"]["epoch"], record["value"])
            for record in self.metrics().knn()
            if record["subject"] == subject
        ]

    def metrics(self) -> RunMetrics:
        return RunMetrics.read(self.path / "metrics.jsonl")

    def log(self, text: str) -> None:
        self._append("train.log", f"{now()} {text}")

    def forget_after(self, step: int) -> int:
        """Drop metrics of steps that a resumed run is about to repeat; all, if it starts over.

        Damaged lines go, too; told is how many there were.
        """
        file = self.path / "metrics.jsonl"
        if not file.exists():
            return 0
        metrics = self.metrics()
        kept = [line.text + "\n" for line in metrics.lines if 0 < step >= _step(line.entry)]
        write_whole(file, "".join(kept).encode(errors="replace"))
        return metrics.damaged

    def known_unreadable(self, limit: int) -> list[tuple[str, str]]:
        """Those to begin with. A run that met more than so many ended because of them: they may be
        back, so it forgets them, and finds them again if not."""
        known = self.unreadable()
        if len(known) <= limit:
            return known
        (self.path / "unreadable.txt").unlink(missing_ok=True)
        return []

    def unreadable(self) -> list[tuple[str, str]]:
        """Training images that could not be read so far, each with the reason."""
        lines = [line for line in self._lines("unreadable.txt") if not line.startswith(TEST_SPLIT)]
        return list(dict(_pair(line) for line in lines).items())

    def add_unreadable(self, images: Iterable[tuple[str, str]], test: bool = False) -> None:
        """Every process adds its own; a name may stand there twice."""
        for where, why in images:
            self._append("unreadable.txt", f"{TEST_SPLIT if test else ''}{where}\t{why}")

    def _lines(self, name: str) -> list[str]:
        """Not by splitlines: names may hold characters that it takes for line ends."""
        file = self.path / name
        text = file.read_text(encoding="utf-8", errors="replace") if file.exists() else ""
        return [line for line in text.split("\n") if line]

    def _append(self, name: str, line: str) -> None:
        try:
            with (self.path / name).open("a", encoding="utf-8", errors="replace") as file:
                file.write(line + "\n")
        except OSError as error:
            raise UserError(
                f"could not write {self.path / name}: {error.strerror or error}."
            ) from None


def read_environment(run: Path) -> dict[str, Any]:
    """The environment.json of a run folder; nothing if there is none, or none that is whole."""
    try:
        content = json.loads((run / "environment.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _evaluation_in(file: Path) -> str | None:
    """Which evaluation these are the settings of, if they are of one; the run's own reader says
    what else may be wrong with them."""
    try:
        content = read_yaml(read_text(file), "it")
    except UserError:
        return None
    if not isinstance(content, dict) or not {"weights", "images", "seed"} <= {*content}:
        return None
    if "objects" in content:
        return " detect"
    if "set" in content:
        return " transfer"
    if "backbone_rate" in content:
        return " finetune" if content["backbone_rate"] else " linear"
    return ""


def plain(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings as they are read back from a file."""
    content: dict[str, Any] = json.loads(json.dumps(settings))
    return content


def refuse_other_settings(
    path: Path, before: Mapping[str, Any], settings: Mapping[str, Any]
) -> None:
    """What was begun with some settings goes on with the same."""
    now = plain(settings)
    if not {*before} & {*now}:
        raise UserError(f"{path} holds a run of another kind: choose another folder with --out.")
    for name in {**before, **now}:
        if before.get(name) != now.get(name):
            raise UserError(
                f"{path} was begun with other settings: {name} was {_short(before.get(name))} and "
                f"is {_short(now.get(name))} now. Go on as it was begun, or give another folder "
                "with --out."
            )


def _short(value: object) -> str:
    text = json.dumps(value, default=str, skipkeys=True)  # a hand may have put anything there
    return text if len(text) <= 60 else f"{text[:57]}..."


def _told(entry: Mapping[str, Any]) -> tuple[Any, ...]:
    """What a record says, however long it took to find out."""
    protocol = {
        key: value for key, value in entry["protocol"].items() if not key.endswith("_seconds")
    }
    return entry["measure"], entry["value"], protocol


def _step(entry: Mapping[str, Any]) -> int:
    """After which step training values, or a record, were measured."""
    return int((entry["protocol"] if "measure" in entry else entry).get("step", 0))


def _pair(line: str) -> tuple[str, str]:
    where, _, why = line.partition("\t")
    return where, why
