"""Judging weights on labelled images by kNN, linear classification and fine-tuning, as records."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from torch import Tensor

from xmoco.data import ImageSet, Unreadable
from xmoco.data.subset import labelled_share
from xmoco.errors import UserError, nearest
from xmoco.evaluate.classify import FINETUNE, LINEAR, EpochProtocol, class_scores, train_classifier
from xmoco.evaluate.evaluation import (
    EvalOptions,
    Evaluation,
    Listener,
    check_seed,
    labelled_splits,
    source_name,
)
from xmoco.evaluate.knn import knn_accuracy, voters
from xmoco.evaluate.metrics import top_k
from xmoco.records import Record


def evaluate_knn(
    weights: str | Path,
    data: str | Path,
    *,
    ks: Sequence[int] = (10, 20, 100, 200),
    temperature: float = 0.1,
    options: EvalOptions | None = None,
    listener: Listener | None = None,
) -> list[Record]:
    """Weighted kNN accuracy of frozen features: test images judged by training images.

    Where the data has no test split, every image is judged by all the others. ``weights`` are what
    ``load_backbone`` takes.
    """
    if min(ks, default=0) < 1 or not 0 < temperature < math.inf:
        raise UserError("k must be at least 1, and the temperature above 0.")
    evaluation = Evaluation.open(weights, options, listener)
    train, test = labelled_splits(data, evaluation.options)
    bank = evaluation.features(train, "training images")
    asked = None if test is None else evaluation.features(test, "test images")
    assert bank.labels is not None
    if test is None:
        _tell_of_single_images(evaluation, train, bank.labels)
    accuracies = knn_accuracy(
        bank.vectors,
        bank.labels,
        None if asked is None else asked.vectors,
        None if asked is None else asked.labels,
        ks=ks,
        temperature=temperature,
        device=evaluation.device,
        on_progress=evaluation.on_progress("neighbours"),
    )
    return [
        evaluation.record(
            "knn_top1",
            accuracy,
            train,
            source_name(data),
            split="leave one out" if test is None else "test",
            judged=(test or train).name,
            features="backbone",
            k=k,
            voters=voters(k, len(train), alone=test is None),
            temperature=temperature,
            bank_images=len(train),
            judged_images=len(train if test is None else test),
        )
        for k, accuracy in accuracies.items()
    ]


def _tell_of_single_images(evaluation: Evaluation, images: ImageSet, labels: Tensor) -> None:
    counts = Counter(labels.tolist())
    alone = [name for label, name in enumerate(images.classes or ()) if counts[label] == 1]
    if alone:
        more = f" and {len(alone) - 1} more" if len(alone) > 1 else ""
        evaluation.listener.say(
            f"{images.name} has a single image of class {alone[0]}{more}: no other image can vote "
            "for it, so it counts as wrong."
        )


def evaluate_linear(
    weights: str | Path,
    data: str | Path,
    *,
    preset: str = "paper",
    epochs: int | None = None,
    seed: int = 0,
    options: EvalOptions | None = None,
    listener: Listener | None = None,
) -> list[Record]:
    """Top-1 and top-5 accuracy of a linear classifier on the frozen backbone.

    Presets are the paper's settings and MoCo's. Fewer ``epochs`` make a protocol of another name.
    """
    if preset not in LINEAR:
        raise UserError(
            f"unknown preset {preset!r}{nearest(preset, LINEAR)}; there are {', '.join(LINEAR)}."
        )
    evaluation = Evaluation.open(weights, options, listener)
    return _classify("linear", evaluation, data, LINEAR[preset].shortened(epochs), 1.0, seed)


def evaluate_finetune(
    weights: str | Path,
    data: str | Path,
    *,
    fraction: float = 1.0,
    epochs: int | None = None,
    seed: int = 0,
    options: EvalOptions | None = None,
    listener: Listener | None = None,
) -> list[Record]:
    """Top-1 and top-5 accuracy after fine-tuning end to end on a share of the labels.

    Which images a share holds is a fixed rule: see ``xmoco.data.subset.labelled_share``.
    """
    evaluation = Evaluation.open(weights, options, listener)
    return _classify("finetune", evaluation, data, FINETUNE.shortened(epochs), fraction, seed)


def _classify(
    measure: str,
    evaluation: Evaluation,
    data: str | Path,
    protocol: EpochProtocol,
    fraction: float,
    seed: int,
) -> list[Record]:
    check_seed(seed)
    if protocol.epochs < 1:
        raise UserError(f"{protocol.epochs} epochs are too few: give at least 1.")
    train, test = labelled_splits(data, evaluation.options)
    if test is None:
        raise UserError(
            f"{train.name} has no test split: put the images into train/ and val/ folders."
        )
    if fraction != 1:
        train = labelled_share(train, fraction)
    backbone, input, device = evaluation.weights.backbone, evaluation.input, evaluation.device
    head = train_classifier(
        backbone, train, protocol, input=input, device=device, bf16=evaluation.bf16, seed=seed,
        readers=evaluation.options.readers, on_step=evaluation.on_step(protocol.name),
        on_unreadable=evaluation.tell_of,
    )  # fmt: skip
    broken = Unreadable(len(test))
    scores, labels = class_scores(
        backbone, head, test, input=input, device=device, bf16=evaluation.bf16,
        readers=evaluation.options.readers, unreadable=broken,
        on_progress=evaluation.on_progress("judging"),
    )  # fmt: skip
    evaluation.tell_of(broken)
    return [
        evaluation.record(
            f"{measure}_top{k}",
            top_k(scores, labels, k),
            train,
            source_name(data),
            seed,
            split="test",
            judged=test.name,
            crop_size=input.size,
            **asdict(protocol) | {"batch": protocol.batch_for(len(train))},
            label_fraction=fraction,
            train_images=len(train),
            judged_images=len(test),
            precision=evaluation.options.precision,
        )
        for k in (1, 5)
    ]
