"""What a backbone is worth: the columns of tables that are accuracies."""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from xmoco.config import InputConfig
from xmoco.data.subset import held_out_positions
from xmoco.evaluate.classify import LINEAR, class_scores, train_classifier
from xmoco.evaluate.features import Features, backbone_features
from xmoco.evaluate.knn import knn_accuracy
from xmoco.evaluate.logistic import fit, fit_path
from xmoco.evaluate.metrics import top_k
from xmoco.fabric import Fabric
from xmoco.tables.columns import Column
from xmoco.tables.images import Images
from xmoco.tables.trials import CHOSEN
from xmoco.train.bad_steps import DivergedError

STRENGTHS = (10.0, 1.0, 0.1, 0.01, 0.001)
"""Of the penalty of the logistic regression."""
CHOOSING_SHARE = 0.2
"""Of the training images, by which a strength is chosen: never by the images that are judged."""
KNN_TEMPERATURE = 0.1


@dataclass(frozen=True)
class Ended:
    """How a column's classifier diverged."""

    step: int


@dataclass(frozen=True)
class Judge:
    """Judges backbones by the images that are held back, with the labels of those trained on."""

    fabric: Fabric
    images: Images

    @property
    def device(self) -> torch.device:
        return self.fabric.device

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

    def judged(
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
                        CHOSEN: f"{CHOOSING_SHARE:.0%} of the training images",
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
