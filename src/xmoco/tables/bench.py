"""A trial → its records: what ``xmoco tables`` and benchmarks/compare.py rest on.

It is trained on images that were decoded once for all, and judged on others by every column that is
asked for.
"""

import gc
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from xmoco.config import Config
from xmoco.errors import UserError
from xmoco.fabric import Fabric
from xmoco.files import write_whole
from xmoco.methods import Method, build_method
from xmoco.nn.backbone_files import BackboneCard, save_backbone
from xmoco.nn.weights import load_weights
from xmoco.pretraining import identity_of, prepare_training
from xmoco.records import Record, commit, machine, versions
from xmoco.tables.columns import Column
from xmoco.tables.images import Images
from xmoco.tables.judging import Ended, Judge
from xmoco.tables.sharing import meeting_place, taking_part
from xmoco.tables.trials import DIVERGED, PART, Trial, numerics, unwatched
from xmoco.train.callback import Callback
from xmoco.train.engine import build_fabric
from xmoco.train.loop import Training
from xmoco.train.run_folder import RunFolder, plain

TRAINED = "trained.json"
"""In a run folder, what training told: there once it is over and its weights are saved."""


COURSE = "course.json"
"""In a run folder, what was noted of the training while it went on, over all sessions."""


@dataclass(frozen=True)
class Bench:
    """Where trials are trained and judged."""

    fabric: Fabric
    images: Images

    @property
    def device(self) -> torch.device:
        return self.fabric.device

    @property
    def judge(self) -> Judge:
        return Judge(self.fabric, self.images)

    def measure(
        self,
        trial: Trial,
        columns: Sequence[Column],
        run: RunFolder,
        *,
        sizes: Sequence[int] = (),
        watch: Callable[[Training], Callback] = lambda _: Callback(),
        build: Callable[[Config], Method] = build_method,
        command: str = "",
    ) -> list[Record]:
        """Train, or go on where ``run`` was interrupted, or take what was trained there; then
        measure, by images of ``sizes``.

        Sizes are the recipe's for evaluation if not given. ``build`` makes the method that the
        configuration names, or one of another library; ``command`` is what a person goes on with.
        """
        config = trial.config
        kept = self._kept(run)
        if kept is None:
            backbone, told = self._trained(trial, run, watch, build, command)
            told["by"] = who_computes()
            card = BackboneCard.of_run(config, config.train.epochs)
            save_backbone(backbone, card, run.weights)
            write_whole(run.path / TRAINED, json.dumps(told).encode())
        else:
            backbone, told = kept
        # Records tell who measures. Weights may have been kept since another day.
        before = {} if told["by"] == who_computes() else {"trained_by": told["by"]}
        common = {
            **before,
            **trial.facts,
            **trial.told,
            **self.images.fingerprints,
            "numerics": numerics(config),
            "data": self.images.train.name,
            "train_images": len(self.images.train),
            "judged_images": len(self.images.test),
            "features": "backbone",
            "train_seconds": round(told["train_seconds"], 1),
            "images_per_second": round(told["images_per_second"]),
            **told.get("course", {}),
        }
        found = [
            self._record(trial, column, value, common | {"size": size} | facts)
            for size in sizes or [config.input.central_size]
            for column, value, facts in self.judge.judged(
                backbone,
                config.input.model_copy(update={"eval_size": size}),
                columns,
                run.path,
                steps=int(told["steps"]),
            )
        ]
        values = told | {"train_seconds": steady_seconds(told, config.train.epochs)}
        found += [
            self._record(trial, column, values[column.measure], common)
            for column in columns
            if column.measure in values
        ]
        return found

    def _kept(self, run: RunFolder) -> tuple[nn.Module, dict[str, Any]] | None:
        """What was trained here before, if it is whole."""
        try:
            told: dict[str, Any] = json.loads((run.path / TRAINED).read_bytes())
            return load_weights(run.weights).backbone.to(self.device), told
        except (OSError, ValueError, UserError):
            return None

    def _trained(
        self,
        trial: Trial,
        run: RunFolder,
        watch: Callable[[Training], Callback],
        build: Callable[[Config], Method],
        command: str,
    ) -> tuple[nn.Module, dict[str, Any]]:
        """The backbone, and what training tells, by the measures of columns."""
        held = self._free()
        config = trial.config
        training = prepare_training(
            config,
            self.fabric,
            self.images.train,
            run,
            build,
            identity=identity_of(unwatched(config), self.images.fingerprints["train_fingerprint"]),
            resume_command=command,
        )
        training.restore()
        seconds, memory = training.seconds, run.path / "gpu_memory"
        course = Course.read(run.path / COURSE)
        if not training.finished:  # by the last checkpoint of one that was stopped
            seconds = self._train(training, watch, course, memory, held)
        method = training.task
        assert isinstance(method, Method)
        told: dict[str, Any] = {
            "steps": training.total_steps,
            "train_seconds": seconds,
            "images_per_second": training.total_steps * config.train.batch / seconds,
            "bank_memory": bank_bytes(method) / 2**20,
            "backbone_parameters": parameters(method.encoder.backbone) / 1e6,
            "course": course.told(),
        }
        if memory.exists():  # unless killed between the last step and this
            told["gpu_memory"] = int(memory.read_bytes()) / 2**30
        return method.encoder.backbone, told

    def _free(self) -> int:
        """Free what the last trial left on the GPU, however it ended: a recorded CUDA graph goes
        with its cycles, and cuBLAS keeps a workspace for each stream (32 MiB on an H200), which
        would count for the first trial only. Gives the bytes that stay held: the images."""
        if self.device.type != "cuda":
            return 0
        gc.collect()
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved(self.device)

    def _train(
        self,
        training: Training,
        watch: Callable[[Training], Callback],
        course: "Course",
        memory: Path,
        held: int,
    ) -> float:
        """Seconds of training over all sessions. Into the file goes how many bytes it held on the
        GPU at the most, beside those ``held`` before: streams hold memory of their own, so that
        this is more than is in use at a time."""
        on_gpu = self.device.type == "cuda"
        if on_gpu:
            torch.cuda.reset_peak_memory_stats(self.device)
        before, started = training.seconds, time.perf_counter()
        with ExitStack() as stack:
            trials_here = stack.enter_context(taking_part(meeting_place(self.device)))
            try:
                with watch(training) as callback:
                    training.train(_Noted(callback, course, trials_here))
                if on_gpu:
                    torch.cuda.synchronize(self.device)
                return before + time.perf_counter() - started
            finally:  # also if it is stopped, be it after the last step
                course.write(training.run.path / COURSE)
                if on_gpu:
                    peak = torch.cuda.max_memory_reserved(self.device)
                    write_whole(memory, str(peak - held).encode())

    @staticmethod
    def _record(
        trial: Trial, column: Column, value: float | Ended, protocol: dict[str, Any]
    ) -> Record:
        if isinstance(value, Ended):
            facts = protocol | {PART: column.measure}
            return Record(
                DIVERGED, value.step, "step", trial.subject, trial.work, facts, trial.seed
            )
        return Record(
            column.measure, value, column.unit, trial.subject, trial.work, protocol, trial.seed
        )


@dataclass
class Course:
    """What is noted of a training while it goes on."""

    epoch_seconds: list[float] = field(default_factory=list)
    """Without the first epoch of every session, in which kernels are compiled, and evaluations."""
    runs_at_once: int = 1
    """How many trained on this GPU, at the most."""

    @classmethod
    def read(cls, file: Path) -> "Course":
        return cls(**json.loads(file.read_bytes())) if file.exists() else cls()

    def write(self, file: Path) -> None:
        write_whole(file, json.dumps(vars(self)).encode())

    def told(self) -> dict[str, Any]:
        """As records tell it."""
        facts: dict[str, Any] = {}
        if self.epoch_seconds:
            facts["epoch_seconds"] = round(statistics.fmean(self.epoch_seconds), 3)
        if self.runs_at_once > 1:
            facts["runs_at_once"] = self.runs_at_once
        return facts


class _Noted(Callback):
    """Tells another callback everything, and notes the course."""

    def __init__(self, callback: Callback, course: Course, trials_here: Callable[[], int]) -> None:
        self.callback, self.course, self.trials_here = callback, course, trials_here
        self.epoch_began: float | None = None

    def on_step(self, step: int) -> None:
        self.callback.on_step(step)

    def on_values(self, step: int, epoch: float, values: Mapping[str, float]) -> None:
        self.callback.on_values(step, epoch, values)

    def on_note(self, text: str) -> None:
        self.callback.on_note(text)

    def on_epoch(self, epoch: int, step: int) -> None:
        # The loop has just looked at the losses, so that the GPU has done all steps.
        if self.epoch_began is not None:
            self.course.epoch_seconds.append(round(time.perf_counter() - self.epoch_began, 4))
        self.course.runs_at_once = max(self.course.runs_at_once, self.trials_here())
        self.callback.on_epoch(epoch, step)
        self.epoch_began = time.perf_counter()


class Benches:
    """A bench for every device, precision and share of images held out: configurations of one call
    may differ in them. Images are decoded once for each device and share."""

    def __init__(self) -> None:
        self._images: dict[tuple[str, float | None], Images] = {}
        self._benches: dict[tuple[str, float | None, str], Bench] = {}

    def of(self, config: Config, held_out: float | None) -> Bench:
        run, data = config.run, config.data
        key = (run.device, held_out)
        if (*key, run.precision) not in self._benches:
            fabric = build_fabric(run)
            if key not in self._images:
                opened = Images.open(data, held_out)
                self._images[key] = opened.decoded(fabric.device, data.preload_gib)
            self._benches[*key, run.precision] = Bench(fabric, self._images[key])
        return self._benches[*key, run.precision]


def steady_seconds(told: Mapping[str, Any], epochs: int) -> float:
    """Of training without compiling, which the first of several runs pays for: an epoch's, times
    all. Of a single epoch there is nothing else than the whole."""
    epoch = told.get("course", {}).get("epoch_seconds")
    return float(told["train_seconds"]) if epoch is None else epoch * epochs


def who_computes() -> dict[str, Any]:
    """The code and the machine, by which something is trained or measured."""
    return plain({"commit": commit(), "versions": versions(), "machine": machine()})


def bank_bytes(method: Method) -> int:
    """What a method remembers beside its networks: banks, histories, queues."""
    known = {id(buffer) for network in method.networks() for buffer in network.buffers()}
    return sum(b.numel() * b.element_size() for b in method.buffers() if id(b) not in known)


def parameters(backbone: nn.Module) -> int:
    return sum(p.numel() for p in backbone.parameters())
