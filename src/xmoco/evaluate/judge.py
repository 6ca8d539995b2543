"""Judging weights on data: one function per protocol, each returning records."""

from collections.abc import Sequence
from pathlib import Path

import torch

from xmoco.config import DataConfig, ViewsConfig
from xmoco.data import ImageSet, open_images
from xmoco.errors import UserError
from xmoco.evaluate.features import backbone_features
from xmoco.evaluate.knn import knn_accuracy
from xmoco.nn.weights import load_backbone, read_card
from xmoco.records import Record
from xmoco.train.engine import choose_device


def evaluate_knn(
    weights: str | Path,
    data: str | Path,
    *,
    ks: Sequence[int] = (10, 20, 100, 200),
    temperature: float = 0.1,
    device: str = "auto",
    readers: int = 8,
) -> list[Record]:
    """Weighted kNN accuracy of a run's or a file's backbone: test images judged by training images.

    Where the data has no test split, every image is judged by all the others.
    """
    if min(ks, default=0) < 1 or temperature <= 0:
        raise UserError("k must be at least 1, and the temperature above 0.")
    card, path = read_card(weights)
    source = DataConfig(source=str(data))
    train, test = open_images(source, "train"), open_images(source, "test")
    assert train is not None
    for images in filter(None, (train, test)):
        _need_labels(images)
    place = torch.device(choose_device(device))
    backbone = load_backbone(path).to(place)
    views = ViewsConfig(size=card.size, mean=card.mean, std=card.std)
    bank = backbone_features(backbone, train, views, place, readers)
    queries = None if test is None else backbone_features(backbone, test, views, place, readers)
    assert train.labels is not None
    accuracies = knn_accuracy(
        bank,
        train.labels,
        queries,
        None if test is None else test.labels,
        ks=ks,
        temperature=temperature,
    )
    return [
        Record(
            measure="knn_top1",
            value=accuracy,
            unit="%",
            subject=card.method,
            work=f"{Path(data).name.partition('.')[0].lower()}-{card.backbone}-{card.epochs}ep",
            protocol={
                "data": train.name,
                "split": "leave one out" if test is None else "test",
                "features": "backbone",
                "size": card.size,
                "k": k,
                "temperature": temperature,
                "bank_images": len(train),
                "judged_images": len(train if test is None else test),
                "epoch": card.epochs,
            },
            seed=card.seed,
        )
        for k, accuracy in accuracies.items()
    ]


def _need_labels(images: ImageSet) -> None:
    if images.labels is None:
        raise UserError(
            f"{images.name} has no labels: kNN needs images in one subfolder per class."
        )
