"""The kNN monitor: is it learning? Where labels exist, a run is judged as it goes."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from xmoco.config import Config
from xmoco.data import ImageSet
from xmoco.evaluate.features import (
    Features,
    backbone_features,
    left_out_of,
    pixel_features,
    pixel_side,
    unreadable_fact,
)
from xmoco.evaluate.knn import knn_accuracy, nearest_neighbours, voters
from xmoco.nn.backbone_files import weights_name
from xmoco.records import Record


@dataclass
class Monitor:
    """Measures kNN accuracy on labelled images: test images judged by training images.

    Without a test split every training image is judged by the others. Images that cannot be read
    are left out. All processes measure together, each a part, and get the same records.
    """

    config: Config
    work: str
    train: ImageSet
    test: ImageSet | None
    device: torch.device
    _last: list[Features] | None = None
    """Of the last epoch, for a picture after it."""

    @property
    def possible(self) -> bool:
        """Judging needs labels on both sides, one for each image."""
        return all(images.labels is not None and not images.multi_label for images in self._sets())

    def due(self, epoch: int) -> bool:
        """Whether an epoch is to be judged; 0 is before the first step."""
        every, last = self.config.monitor.knn_every, self.config.train.epochs
        return self.possible and every > 0 and (epoch % every == 0 or epoch == last)

    def raw_pixels(self) -> Record:
        input, readers = self.config.input, self.config.run.readers
        sets = [
            pixel_features(
                images,
                input,
                self.device,
                readers,
                together=True,
                unreadable=left_out_of(images),
            )
            for images in self._sets()
        ]
        record = self._judge(sets, subject="raw pixels", features="pixels", epoch=0, step=0)
        record.protocol["size"] = pixel_side(self.config.input)
        return record

    def initial(self, backbone: nn.Module) -> Record:
        """What the backbone is worth before the first step."""
        sets = self._features(backbone)
        subject = "untrained" if self.config.model.weights is None else "initial weights"
        return self._judge(sets, subject=subject, features="backbone", epoch=0, step=0)

    def trained(self, backbone: nn.Module, epoch: int, step: int) -> Record:
        sets = self._features(backbone)
        if epoch == self.config.train.epochs:
            self._last = sets
        subject = self.config.method.subject
        return self._judge(sets, subject=subject, features="backbone", epoch=epoch, step=step)

    def neighbours(
        self, backbone: nn.Module, queries: int, k: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Some images to ask about (their positions), their neighbours among the training images
        (positions), and the similarities, for a picture of both. Of one process, by a backbone
        that is trained to its end."""
        sets = self._last or self._features(backbone, together=False)
        bank, *rest = (features.vectors for features in sets)
        asked = rest[0] if rest else bank
        chosen = torch.linspace(0, len(asked) - 1, queries).long()
        extra = 0 if rest else 1  # without a test split the nearest neighbour is the image itself
        asked = asked[chosen.to(asked.device)]
        _, similarities, positions = next(
            nearest_neighbours(bank, asked, k + extra, device=self.device)
        )
        positions = sets[0].places[positions[:, extra:].cpu()]
        return sets[-1].places[chosen], positions, similarities[:, extra:].cpu()

    def _sets(self) -> list[ImageSet]:
        return [self.train] if self.test is None else [self.train, self.test]

    def _features(self, backbone: nn.Module, together: bool = True) -> list[Features]:
        input, readers = self.config.input, self.config.run.readers
        return [
            backbone_features(
                backbone,
                images,
                input,
                self.device,
                readers,
                together=together,
                unreadable=left_out_of(images),
            )
            for images in self._sets()
        ]

    def _judge(
        self, sets: list[Features], *, subject: str, features: str, epoch: int, step: int
    ) -> Record:
        monitor = self.config.monitor
        bank, leave_one_out = sets[0], self.test is None
        assert bank.labels is not None
        accuracy = knn_accuracy(
            bank.vectors,
            bank.labels,
            None if leave_one_out else sets[1].vectors,
            None if leave_one_out else sets[1].labels,
            ks=(monitor.knn_k,),
            temperature=monitor.knn_temperature,
            device=self.device,
            together=True,
        )[monitor.knn_k]
        started_from = weights_name(self.config.model.weights)
        protocol: dict[str, Any] = {
            "data": self.train.name,
            **({} if started_from is None else {"started_from": started_from}),
            "split": "leave one out" if leave_one_out else "test",
            "features": features,
            "size": self.config.input.central_size,
            "k": monitor.knn_k,
            "voters": voters(monitor.knn_k, len(bank.places), leave_one_out),
            "temperature": monitor.knn_temperature,
            "bank_images": len(bank.places),
            "judged_images": len(sets[-1].places),
            **unreadable_fact(
                sum(map(len, self._sets())), sum(len(features.places) for features in sets)
            ),
            "epoch": epoch,
            "step": step,
        }
        seed = self.config.train.seed
        return Record("knn_top1", accuracy, "%", subject, self.work, protocol, seed)
