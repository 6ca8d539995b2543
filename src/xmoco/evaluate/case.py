"""What every evaluation starts from: weights, a place to run, labelled images; and its records."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from xmoco.config import DataConfig, ViewsConfig
from xmoco.data import ImageSet, open_images
from xmoco.data.trees import printable
from xmoco.errors import UserError
from xmoco.evaluate.cache import cached_features
from xmoco.evaluate.classify import OnStep
from xmoco.evaluate.features import Features
from xmoco.nn.weights import Weights, load_weights
from xmoco.records import Record
from xmoco.train.engine import choose_device


class Listener:
    """What an evaluation tells as it goes; this one does not listen."""

    def progress(self, stage: str, done: int, total: int, note: str = "") -> None:
        """So much of a stage is done; the note may be a loss or an accuracy."""

    def say(self, sentence: str) -> None:
        """Something the user should know."""


@dataclass(frozen=True)
class Place:
    """Where and how an evaluation runs, and where it finds torchvision sets and old features."""

    device: str = "auto"
    precision: str = "fp32"
    readers: int = 8
    root: str = "data"
    download: bool = False
    size: int | None = None  # of the images; that of pre-training if not given
    cache: Path | None = None  # where features are kept; nowhere if not given

    def torch_device(self) -> torch.device:
        if self.precision not in ("fp32", "bf16"):
            raise UserError(f"precision={self.precision} is not fp32 or bf16.")
        if self.size is not None and self.size < 8:
            raise UserError(f"images of {self.size} px are too small: give at least 8.")
        return torch.device(choose_device(self.device))


@dataclass(frozen=True)
class Case:
    """Weights to be judged, on their device."""

    weights: Weights
    place: Place
    device: torch.device
    listener: Listener

    @classmethod
    def open(
        cls, weights: str | Path, place: Place | None = None, listener: Listener | None = None
    ) -> "Case":
        place = place or Place()
        device = place.torch_device()
        loaded = load_weights(weights)
        loaded.backbone.to(device)
        return cls(loaded, place, device, listener or Listener())

    @property
    def views(self) -> ViewsConfig:
        card = self.weights.card
        return ViewsConfig(size=self.place.size or card.size, mean=card.mean, std=card.std)

    @property
    def bf16(self) -> bool:
        return self.place.precision == "bf16"

    def features(self, images: ImageSet, stage: str, border: bool = True) -> Features:
        """Features of the central views, from the cache if they are there."""
        return cached_features(
            self.weights.backbone,
            images,
            self.views,
            self.device,
            readers=self.place.readers,
            border=border,
            folder=self.place.cache,
            on_progress=self.on_progress(stage),
            say=self.listener.say,
        )

    def on_progress(self, stage: str) -> Callable[[int, int], None]:
        return partial(self.listener.progress, stage)

    def on_step(self, stage: str) -> OnStep:
        return lambda done, total, loss: self.listener.progress(
            stage, done, total, f"loss {loss:.3f}"
        )

    def record(
        self,
        measure: str,
        value: float,
        data: ImageSet,
        work: str,
        seed: int | None = None,
        **protocol: Any,
    ) -> Record:
        """``work`` names the images; weights of one architecture compare on them."""
        card, report = self.weights.card, self.weights.report
        # Our own are told by subject, work and epoch; of others, what became of the file matters.
        foreign = report.layout != "xmoco"
        return Record(
            measure=measure,
            value=value,
            unit="%",
            subject=card.method,
            work=f"{work}-{card.backbone}",
            protocol={
                "data": data.name,
                **({"weights": str(report)} if foreign else {}),
                "backbone": card.backbone,
                "size": self.views.size,
                "epoch": card.epochs,
                **protocol,
            },
            seed=card.seed if seed is None else seed,
        )


def labelled_splits(data: str | Path, place: Place) -> tuple[ImageSet, ImageSet | None]:
    """Training and test images with one label each; a set of one split has no test images."""
    # Not checked as a setting, which is text: a path may hold bytes that are not.
    source = DataConfig().model_copy(
        update={"source": str(data), "root": place.root, "download": place.download}
    )
    train, test = open_images(source, "train"), open_images(source, "test")
    assert train is not None
    for images in filter(None, (train, test)):
        if images.labels is None:
            raise UserError(
                f"{images.name} has no labels: put the images into one subfolder per class."
            )
        if images.multi_label:
            raise UserError(
                f"{images.name} has images of several classes at once: only "
                "`xmoco evaluate transfer` can judge by those."
            )
    return train, test


def source_name(data: str | Path) -> str:
    """A short name of the images for records: that of the folder, archive or torchvision set."""
    name = Path(data).name.removeprefix("torchvision:").partition(".")[0].lower()
    return printable(name)
