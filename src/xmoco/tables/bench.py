"""A trial → its records: what ``xmoco tables`` and benchmarks/compare.py rest on.

It is trained on images that were decoded once for all, and judged on others by every column that is
asked for.
"""

import copy
import gc
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from xmoco.config import Config, DataConfig, InputConfig
from xmoco.data import ImageSet
from xmoco.data.batches import preload
from xmoco.data.fingerprint import fingerprint
from xmoco.data.subset import held_out, held_out_positions
from xmoco.errors import UserError
from xmoco.evaluate.classify import LINEAR, class_scores, train_classifier
from xmoco.evaluate.evaluation import labelled_splits_of
from xmoco.evaluate.features import Features, backbone_features
from xmoco.evaluate.knn import knn_accuracy
from xmoco.evaluate.logistic import fit, fit_path
from xmoco.evaluate.metrics import top_k
from xmoco.fabric import Fabric
from xmoco.files import write_whole
from xmoco.methods import Method, build_method
from xmoco.nn.backbone_files import BackboneCard, save_backbone
from xmoco.nn.weights import load_weights
from xmoco.pretraining import identity_of, prepare_training
from xmoco.records import Record, commit, machine, versions
from xmoco.starting_weights import start_from_weights
from xmoco.tables.columns import Column
from xmoco.tables.trials import DIVERGED, PART, Trial, numerics, unwatched
from xmoco.train.bad_steps import DivergedError
from xmoco.train.callback import Callback
from xmoco.train.loop import Training
from xmoco.train.run_folder import RunFolder, plain

STRENGTHS = (10.0, 1.0, 0.1, 0.01, 0.001)
"""Of the penalty of the logistic regression."""
CHOOSING_SHARE = 0.2
"""Of the training images, by which a strength is chosen: never by the images that are judged."""
KNN_TEMPERATURE = 0.1
TRAINED = "trained.json"
"""In a run folder, what training told: there once it is over and its weights are saved."""


@dataclass(frozen=True)
class Images:
    """What all trials learn from and are judged by."""

    train: ImageSet
    test: ImageSet
    fingerprints: Mapping[str, str]
    """Which images they are, as records tell it: of all training images, whether some are held out
    or not, and of the test images if these are judged."""

    @classmethod
    def open(cls, data: DataConfig, held_out_share: float | None) -> "Images":
        """With a share, that part of the training images is judged, and no test image looked at."""
        train, test = labelled_splits_of(data)
        fingerprints = {"train_fingerprint": fingerprint(train, with_labels=True)}
        if held_out_share is not None:
            train, test = held_out(train, held_out_share)
        elif test is None:
            raise UserError(
                f"{train.name} has no test images to judge by: use --held-out, which holds out "
                "training images."
            )
        else:
            fingerprints["test_fingerprint"] = fingerprint(test, with_labels=True)
        return cls(train, test, fingerprints)

    def decoded(self, device: torch.device, gib: float) -> "Images":
        """The same on the device, where they fit."""
        train, test = (preload(part, device, gib=gib) for part in (self.train, self.test))
        return replace(self, train=train, test=test)


@dataclass(frozen=True)
class Ended:
    """How a column's classifier diverged."""

    step: int


@dataclass(frozen=True)
class Bench:
    """Where trials are trained and judged."""

    fabric: Fabric
    images: Images

    @property
    def device(self) -> torch.device:
        return self.fabric.device

    def attempt(
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
        }
        found = [
            self._record(trial, column, value, common | {"size": size} | facts)
            for size in sizes or [config.input.central_size]
            for column, value, facts in self._judged(
                backbone,
                config.input.model_copy(update={"eval_size": size}),
                columns,
                run.path,
                steps=int(told["steps"]),
            )
        ]
        found += [
            self._record(trial, column, told[column.measure], common)
            for column in columns
            if column.measure in told
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
        if not training.restore():  # whatever checkpoints there were
            assert isinstance(training.task, Method)
            start_from_weights(training.task, config)
        seconds, memory = training.seconds, run.path / "gpu_memory"
        if not training.finished:  # by the last checkpoint of one that was stopped
            seconds = self._train(training, watch, memory, held)
        method = training.task
        assert isinstance(method, Method)
        told: dict[str, Any] = {
            "steps": training.total_steps,
            "train_seconds": seconds,
            "images_per_second": training.total_steps * config.train.batch / seconds,
            "bank_memory": bank_bytes(method) / 2**20,
            "backbone_parameters": parameters(method.encoder.backbone) / 1e6,
        }
        if memory.exists():  # unless killed between the last step and this
            told["gpu_memory"] = int(memory.read_bytes()) / 2**30
        return method.encoder.backbone, told

    def knn(self, backbone: nn.Module, input: InputConfig, k: int) -> float:
        """How good the backbone is by now."""
        bank, asked = self._features(backbone, input)
        return self._knn(bank, asked, [k])[k]

    def _features(self, backbone: nn.Module, input: InputConfig) -> tuple[Features, Features]:
        """Of the images trained on and of those judged."""
        train, test = (
            backbone_features(backbone, part, input, self.device)
            for part in (self.images.train, self.images.test)
        )
        return train, test

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
        self, training: Training, watch: Callable[[Training], Callback], memory: Path, held: int
    ) -> float:
        """Seconds of training over all sessions. Into the file goes how many bytes it held on the
        GPU at the most, beside those ``held`` before: streams hold memory of their own, so that
        this is more than is in use at a time."""
        on_gpu = self.device.type == "cuda"
        if on_gpu:
            torch.cuda.reset_peak_memory_stats(self.device)
        before, started = training.seconds, time.perf_counter()
        try:
            with watch(training) as callback:
                training.train(callback)
            if on_gpu:
                torch.cuda.synchronize(self.device)
            return before + time.perf_counter() - started
        finally:  # also if it is stopped, be it after the last step
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

    def _judged(
        self,
        backbone: nn.Module,
        input: InputConfig,
        columns: Sequence[Column],
        folder: Path,
        steps: int,
    ) -> Iterator[tuple[Column, float | Ended, dict[str, Any]]]:
        """How good the backbone is, after so many steps, on the images held back, and what is
        particular to a column."""
        bank, asked = self._features(backbone, input)
        if not all(part.vectors.isfinite().all() for part in (bank, asked)):
            # The loss may have been a number; kNN would make an accuracy of anything.
            raise DivergedError("the backbone's features are NaN or infinite.", steps)
        ks = [column.k for column in columns if column.k is not None]
        neighbours = self._knn(bank, asked, ks) if ks else {}
        for column in columns:
            facts: dict[str, Any]
            match column.measure:
                case "knn_top1":
                    assert column.k is not None
                    facts = {"k": column.k, "temperature": KNN_TEMPERATURE}
                    yield column, neighbours[column.k], facts
                case "logistic_top1":
                    facts = {
                        "strengths": list(STRENGTHS),
                        "strength_chosen_on": f"{CHOOSING_SHARE:.0%} of the training images",
                    }
                    yield column, self._logistic(bank, asked), facts
                case "linear_top1":
                    protocol = LINEAR["moco"]
                    value = self._linear(copy.deepcopy(backbone), input, folder)
                    yield column, value, {"name": protocol.name, "crop_size": input.size}

    def _knn(self, bank: Features, asked: Features, ks: Sequence[int]) -> dict[int, float]:
        assert bank.labels is not None
        return knn_accuracy(
            bank.vectors,
            bank.labels,
            asked.vectors,
            asked.labels,
            ks=ks,
            temperature=KNN_TEMPERATURE,
            device=self.device,
        )

    def _logistic(self, bank: Features, asked: Features) -> float:
        """Of the strength that suits a part of the training images best, fitted to all of them."""
        assert bank.labels is not None
        assert asked.labels is not None
        labels, asked_labels = bank.labels.to(self.device), asked.labels.to(self.device)
        classes = int(labels.max()) + 1
        positions = held_out_positions(self.images.train, CHOOSING_SHARE)
        fitted, chosen_by = (part.to(self.device) for part in positions)
        path = fit_path(bank.vectors[fitted], labels[fitted], classes, STRENGTHS)
        _, strength = max(
            (top_k(model.scores(bank.vectors[chosen_by]), labels[chosen_by], 1), strength)
            for strength, model in path
        )
        model = fit(bank.vectors, labels, classes, strength)
        return top_k(model.scores(asked.vectors), asked_labels, 1)

    def _linear(self, backbone: nn.Module, input: InputConfig, folder: Path) -> float | Ended:
        """By MoCo's settings; trained in a folder of its own, where it goes on if interrupted."""
        protocol = LINEAR["moco"]
        try:
            classifier = train_classifier(
                backbone,
                self.images.train,
                protocol,
                folder / f"linear-{input.size}",  # the same, whatever it is judged at
                {"name": protocol.name},
                input=input,
                fabric=self.fabric,
            )
        except DivergedError as error:  # which the backbone has not
            return Ended(error.step)
        scores, labels = class_scores(
            classifier.backbone, classifier.head, self.images.test, input=input, device=self.device
        )
        return top_k(scores, labels, 1)


def who_computes() -> dict[str, Any]:
    """The code and the machine, by which something is trained or measured."""
    return plain({"commit": commit(), "versions": versions(), "machine": machine()})


def bank_bytes(method: Method) -> int:
    """What a method remembers beside its networks: banks, histories, queues."""
    known = {id(buffer) for network in method.networks() for buffer in network.buffers()}
    return sum(b.numel() * b.element_size() for b in method.buffers() if id(b) not in known)


def parameters(backbone: nn.Module) -> int:
    return sum(p.numel() for p in backbone.parameters())
