"""What every evaluation starts from: weights, how to run, labelled images; and its records."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from xmoco.config import DataConfig, InputConfig
from xmoco.data import ImageSet, open_images
from xmoco.data.fingerprint import tensors_digest
from xmoco.data.layout import labels_needed
from xmoco.data.sources import opened_once
from xmoco.data.transfer_sets import check_classes
from xmoco.errors import UserError
from xmoco.evaluate.cache import cached_features
from xmoco.evaluate.classify import Classifier, class_scores
from xmoco.evaluate.features import Features, left_out_of, places_seen
from xmoco.fabric import Fabric
from xmoco.nn.backbone_files import Weights
from xmoco.nn.weights import load_weights
from xmoco.records import Record
from xmoco.train.engine import build_fabric, processes_of
from xmoco.train.in_folder import OnStep
from xmoco.train.partners import watching

Rgb = tuple[float, float, float]
SIZES = range(8, 1025)
DEVICES = ("auto", "cpu", "cuda", "mps")


def check_device(device: str) -> None:
    if device not in DEVICES:
        raise UserError(f"there is no device {device!r}: give {', '.join(DEVICES[:-1])} or mps.")


def expect_numbers(features: Features) -> None:
    if not features.vectors.isfinite().all():
        raise UserError(
            "the backbone's features are not all numbers: its weights are damaged, or it diverged "
            "in training."
        )


LEFT_OUT = "it is left out"
REPLACED = "another image takes its place"
"""What becomes of an image that cannot be read: in judging, in training."""


class Judged(NamedTuple):
    """What a classifier says of the images of a set that can be read."""

    scores: Tensor
    """(n, classes), on the device."""
    labels: Tensor
    """There, too."""
    places: Tensor
    """int64 (n,), on the CPU: where in the set they stand."""


class Listener:
    """What an evaluation tells as it goes; this one does not listen."""

    def progress(self, stage: str, done: int, total: int, note: str = "") -> None:
        """So much of a stage is done; the note may be a loss or an accuracy."""

    def say(self, sentence: str) -> None:
        """Something the user should know."""


@dataclass(frozen=True)
class EvalOptions:
    """Where and how an evaluation runs, and where it finds torchvision sets and old features.

    Several ``devices`` (processes, each with its own) and ``nodes`` (machines) are for evaluations
    that train. Of weights from elsewhere, ``mean``, ``std`` and whether they were trained with
    labels are guessed where not given.
    """

    device: str = "auto"
    precision: str = "fp32"
    devices: int = 1
    nodes: int = 1
    readers: int = 8
    root: str = "data"
    download: bool = False
    size: int | None = None  # of crops and central views; those of the weights if not given
    eval_size: int | None = None  # of central views, if not that of crops
    cache: str | Path | None = None  # where features are kept; nowhere if not given
    mean: Rgb | None = None
    std: Rgb | None = None
    labelled: bool | None = None
    command: str = "the same call"  # with which an interrupted evaluation goes on

    def __post_init__(self) -> None:
        check_device(self.device)
        if self.precision not in ("fp32", "bf16"):
            raise UserError(f"precision={self.precision} is not fp32 or bf16.")
        for size in (self.size, self.eval_size):
            if size is not None and size not in SIZES:
                raise UserError(
                    f"images of {size} px are too {'small' if size < 8 else 'large'}: give "
                    f"a whole number from {SIZES[0]} to {SIZES[-1]}."
                )
        for name in ("devices", "nodes", "readers"):
            if getattr(self, name) < 1:
                raise UserError(f"{name}={getattr(self, name)} is too few: give at least 1.")
        for name, colour in self.told_pixels.items():
            within = len(colour) == 3 and all(0 <= number <= 1 for number in colour)
            if not within or (name == "std" and 0 in colour):
                numbers = "numbers from 0 to 1" if name == "mean" else "positive numbers up to 1"
                raise UserError(
                    f"{name}={','.join(map(str, colour))} is not three {numbers}, one for each of "
                    "red, green and blue."
                )
        if self.cache is not None:
            object.__setattr__(self, "cache", Path(self.cache).expanduser())

    @property
    def told_pixels(self) -> dict[str, Rgb]:
        """Mean and std, where they are not left to the weights."""
        told = {"mean": self.mean, "std": self.std}
        return {name: colour for name, colour in told.items() if colour is not None}

    def expect_one_process(self, what: str) -> None:
        if processes_of(self) != (1, 1):
            raise UserError(f"{what} runs in one process: leave out devices and nodes.")

    def fabric(self) -> Fabric:
        """All processes are there from now on, each running the same program."""
        fabric = build_fabric(self)
        fabric.launch()
        return fabric


@dataclass(frozen=True)
class Evaluation:
    """Weights to be judged, on their device."""

    weights: Weights
    digest: str  # tells these weights from others, as they were before any tuning
    options: EvalOptions
    fabric: Fabric
    listener: Listener  # on the first process; others keep silent
    unreadable: set[str] = field(default_factory=set)  # images of which was told

    @classmethod
    def open(
        cls,
        weights: str | Path,
        options: EvalOptions | None = None,
        listener: Listener | None = None,
    ) -> "Evaluation":
        options = options or EvalOptions()
        fabric = options.fabric()
        loaded = load_weights(
            weights, mean=options.mean, std=options.std, labelled=options.labelled
        )
        digest = tensors_digest(loaded.backbone.state_dict())[:12]
        loaded.backbone.to(fabric.device)
        heard = (listener if fabric.is_global_zero else None) or Listener()
        for note in (*loaded.report.notes, *filter(None, [loaded.guess])):
            heard.say(f"{weights}: {note}.")
        return cls(loaded, digest, options, fabric, heard)

    def together(self) -> AbstractContextManager[None]:
        """While it lasts, all processes end if one of them does."""
        return watching(self.fabric, self.options.command)

    @property
    def device(self) -> torch.device:
        return self.fabric.device

    @property
    def input(self) -> InputConfig:
        return self.weights.card.input(self.options.size, self.options.eval_size)

    @property
    def bf16(self) -> bool:
        return self.options.precision == "bf16"

    def features(self, images: ImageSet, what: str, border: bool = True) -> Features:
        """Features of the central views, from the cache if they are there.

        ``what`` the images are stands beside the progress.
        """
        broken = left_out_of(images)
        features = cached_features(
            self.weights.backbone,
            images,
            self.input,
            self.device,
            readers=self.options.readers,
            border=border,
            folder=None if self.options.cache is None else Path(self.options.cache),
            unreadable=broken,
            on_reading=self.on_progress(f"reading {what}"),
            on_progress=self.on_progress(f"features of {what}"),
            say=self.listener.say,
        )
        self.tell_of(broken, LEFT_OUT)
        expect_numbers(features)
        return features

    def scores(self, classifier: Classifier, images: ImageSet, border: bool = True) -> Judged:
        """What a classifier makes of the central views, and the labels."""
        broken = left_out_of(images)
        scores, labels = class_scores(
            classifier.backbone,
            classifier.head,
            images,
            input=self.input,
            device=self.device,
            bf16=self.bf16,
            readers=self.options.readers,
            border=border,
            unreadable=broken,
            on_progress=self.on_progress("judging"),
        )
        self.tell_of(broken, LEFT_OUT)
        places = places_seen(images, broken)
        rows = places.to(scores.device)
        return Judged(scores[rows], labels[rows], places)

    def tell_of(self, unreadable: Iterable[tuple[str, str]], consequence: str = REPLACED) -> None:
        """Say which images could not be read, of each once."""
        for where, why in unreadable:
            if where not in self.unreadable:
                self.unreadable.add(where)
                self.listener.say(f"{where} cannot be read ({why}); {consequence}.")

    def on_progress(self, stage: str) -> Callable[[int, int], None]:
        return partial(self.listener.progress, stage)

    def on_step(self, stage: str) -> OnStep:
        return lambda done, total, loss: self.listener.progress(
            stage, done, total, "" if loss is None else f"loss {loss:.3f}"
        )

    def record(
        self,
        measure: str,
        value: float,
        data: ImageSet,
        work: str,
        seed: int | None = None,
        processes: int | None = None,
        **protocol: Any,
    ) -> Record:
        """``work`` names the images; weights of one architecture compare on them.

        ``processes`` are those that trained, where they are not the ones here.
        """
        processes = processes or self.fabric.world_size
        card, report = self.weights.card, self.weights.report
        # Our own are told by subject, work and epoch; of others, what became of the file matters.
        foreign = report.format != "xmoco"
        return Record(
            measure=measure,
            value=value,
            unit="%",
            subject=card.method,
            work=f"{work}-{card.backbone}",
            protocol={
                "data": data.name,
                **({"weights": str(report), "labelled": report.labelled} if foreign else {}),
                "backbone": card.backbone,
                **({"started_from": card.started_from} if card.started_from is not None else {}),
                "digest": self.digest,
                "size": self.input.central_size,
                "epoch": card.epochs,
                **self.options.told_pixels,
                **protocol,
                **({"processes": processes} if processes > 1 else {}),
            },
            seed=card.seed if seed is None else seed,
        )


def check_seed(seed: int) -> None:
    if not 0 <= seed < 2**63:
        raise UserError(f"seed={seed} is not from 0 to 2^63 - 1.")


def labelled_splits(
    data: str | Path, options: EvalOptions, listener: Listener | None = None
) -> tuple[ImageSet, ImageSet | None]:
    """Training and test images with one label each; a set of one split has no test images."""
    # Not checked as a setting, which is text: a path may hold bytes that are not.
    source = {"source": str(data), "root": options.root, "download": options.download}
    train, test = labelled_splits_of(DataConfig().model_copy(update=source))
    if listener is not None:
        tell_what_is_passed_over(train, listener)
    return train, test


def tell_what_is_passed_over(images: ImageSet, listener: Listener) -> None:
    if images.passed_over is not None:
        listener.say(f"{images.name}: {images.passed_over}.")


@opened_once()
def labelled_splits_of(data: DataConfig) -> tuple[ImageSet, ImageSet | None]:
    """The same, of a run's images."""
    with labels_needed():
        train, test = open_images(data, "train"), open_images(data, "test")
    assert train is not None
    for images in filter(None, (train, test)):
        if images.labels is None:
            if images.misplaced is not None:
                raise UserError(
                    f"{images.name} has no labels: {images.misplaced}; put every image directly "
                    "into the folder of its class, or remove it."
                )
            raise UserError(
                f"{images.name} has no labels: put the images into one subfolder per class, of at "
                "least two classes."
            )
        if images.multi_label:
            raise UserError(
                f"{images.name} has images of several classes at once: only "
                "`xmoco evaluate transfer` can judge by those."
            )
    if test is not None:
        check_classes([train, test])
    return train, test
