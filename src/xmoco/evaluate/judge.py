"""Judging weights on data: one function per protocol, each returning records."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from xmoco.config import DataConfig, ViewsConfig
from xmoco.data import ImageSet, open_images
from xmoco.data.subset import labelled_share
from xmoco.data.trees import printable
from xmoco.errors import UserError, nearest
from xmoco.evaluate.classify import FINETUNE, LINEAR, Protocol, train_classifier
from xmoco.evaluate.features import Features, backbone_features
from xmoco.evaluate.knn import knn_accuracy, voters
from xmoco.nn.weights import Weights, load_weights
from xmoco.records import Record
from xmoco.train.engine import choose_device

OnStep = Callable[[int, int, float], None]
"""Told the steps done, their total and the loss."""


@dataclass(frozen=True)
class Place:
    """Where and how an evaluation runs, and where torchvision sets are."""

    device: str = "auto"
    precision: str = "fp32"
    readers: int = 8
    root: str = "data"
    download: bool = False

    def torch_device(self) -> torch.device:
        if self.precision not in ("fp32", "bf16"):
            raise UserError(f"precision={self.precision} is not fp32 or bf16.")
        return torch.device(choose_device(self.device))


def evaluate_knn(
    weights: str | Path,
    data: str | Path,
    *,
    ks: Sequence[int] = (10, 20, 100, 200),
    temperature: float = 0.1,
    device: str = "auto",
    place: Place | None = None,
) -> list[Record]:
    """Weighted kNN accuracy of frozen features: test images judged by training images.

    Where the data has no test split, every image is judged by all the others. ``weights`` are what
    ``load_backbone`` takes.
    """
    if min(ks, default=0) < 1 or temperature <= 0:
        raise UserError("k must be at least 1, and the temperature above 0.")
    place = place or Place(device=device)
    case = _Case.open(weights, data, place)
    bank = case.features(case.train)
    asked = None if case.test is None else case.features(case.test)
    assert bank.labels is not None
    accuracies = knn_accuracy(
        bank.vectors,
        bank.labels,
        None if asked is None else asked.vectors,
        None if asked is None else asked.labels,
        ks=ks,
        temperature=temperature,
    )
    judged = case.train if case.test is None else case.test
    return [
        case.record(
            "knn_top1",
            accuracy,
            split="leave one out" if case.test is None else "test",
            features="backbone",
            k=k,
            voters=voters(k, len(case.train), alone=asked is None),
            temperature=temperature,
            bank_images=len(case.train),
            judged_images=len(judged),
        )
        for k, accuracy in accuracies.items()
    ]


def evaluate_linear(
    weights: str | Path,
    data: str | Path,
    *,
    preset: str = "paper",
    epochs: int | None = None,
    seed: int = 0,
    place: Place | None = None,
    on_step: OnStep | None = None,
) -> list[Record]:
    """Top-1 and top-5 accuracy of a linear classifier on the frozen backbone.

    Presets are the paper's settings and MoCo's. Fewer ``epochs`` make a protocol of another name.
    """
    if preset not in LINEAR:
        raise UserError(
            f"unknown preset {preset!r}{nearest(preset, LINEAR)}; there are {', '.join(LINEAR)}."
        )
    protocol = LINEAR[preset].shortened(epochs)
    return _classify("linear", weights, data, protocol, 1.0, seed, place, on_step)


def evaluate_finetune(
    weights: str | Path,
    data: str | Path,
    *,
    fraction: float = 1.0,
    epochs: int | None = None,
    seed: int = 0,
    place: Place | None = None,
    on_step: OnStep | None = None,
) -> list[Record]:
    """Top-1 and top-5 accuracy after fine-tuning end to end on a share of the labels.

    Which images a share holds is a fixed rule: see ``xmoco.data.subset.labelled_share``.
    """
    protocol = FINETUNE.shortened(epochs)
    return _classify("finetune", weights, data, protocol, fraction, seed, place, on_step)


@dataclass(frozen=True)
class _Case:
    """Weights and labelled data, ready to be judged."""

    weights: Weights
    source: Path
    train: ImageSet
    test: ImageSet | None
    place: Place
    device: torch.device

    @classmethod
    def open(cls, weights: str | Path, data: str | Path, place: Place) -> "_Case":
        device = place.torch_device()
        loaded = load_weights(weights)
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
        loaded.backbone.to(device)
        return cls(loaded, Path(data), train, test, place, device)

    @property
    def views(self) -> ViewsConfig:
        card = self.weights.card
        return ViewsConfig(size=card.size, mean=card.mean, std=card.std)

    def features(self, images: ImageSet) -> Features:
        backbone, readers = self.weights.backbone, self.place.readers
        return backbone_features(backbone, images, self.views, self.device, readers)

    def record(
        self, measure: str, value: float, seed: int | None = None, **protocol: Any
    ) -> Record:
        card = self.weights.card
        name = self.source.name.removeprefix("torchvision:").partition(".")[0].lower()
        # Our own are told by subject, work and epoch; of others, what became of the file matters.
        foreign = self.weights.report.layout != "xmoco"
        return Record(
            measure=measure,
            value=value,
            unit="%",
            subject=card.method,
            work=f"{printable(name)}-{card.backbone}-{card.epochs}ep",
            protocol={
                "data": self.train.name,
                **({"weights": str(self.weights.report)} if foreign else {}),
                "size": card.size,
                "epoch": card.epochs,
                **protocol,
            },
            seed=card.seed if seed is None else seed,
        )


def _classify(
    measure: str,
    weights: str | Path,
    data: str | Path,
    protocol: Protocol,
    fraction: float,
    seed: int,
    place: Place | None,
    on_step: OnStep | None,
) -> list[Record]:
    if protocol.epochs < 1:
        raise UserError(f"{protocol.epochs} epochs are too few: give at least 1.")
    place = place or Place()
    case = _Case.open(weights, data, place)
    if case.test is None:
        raise UserError(
            f"{case.train.name} has no test split: put the images into train/ and val/ folders."
        )
    train = labelled_share(case.train, fraction) if fraction != 1 else case.train
    accuracy = train_classifier(
        case.weights.backbone,
        train,
        case.test,
        protocol,
        views=case.views,
        device=case.device,
        bf16=place.precision == "bf16",
        seed=seed,
        readers=place.readers,
        on_step=on_step,
    )
    return [
        case.record(
            f"{measure}_{name}",
            value,
            seed,
            split="test",
            **asdict(protocol),
            label_fraction=fraction,
            train_images=len(train),
            judged_images=len(case.test),
            precision=place.precision,
        )
        for name, value in (("top1", accuracy.top1), ("top5", accuracy.top5))
    ]
