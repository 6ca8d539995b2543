"""Training a detector the usual way, a baseline of ``detect_speed.py``.

As torchvision's own program does it (references/detection/train.py): the plain model computes its
losses image by image, transforms run in the worker processes of a DataLoader, images of similar
shapes share a batch, SGD with momentum and no decay of norms (its --norm-weight-decay 0), gradients
scaled where ``amp`` is asked for. Better than there: workers never pause between epochs.
"""

import time
from collections.abc import Iterator
from itertools import count
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torchvision import tv_tensors
from torchvision.transforms import v2

from xmoco.detect.courses import NORM_DECAY, Course
from xmoco.detect.masks import bitmap_of_runs
from xmoco.detect.objects import DetectionSet
from xmoco.detect.task import norms_apart
from xmoco.detect.training import batches_of_one_shape, mean_statistics
from xmoco.schedules import Clock

Sample = tuple[Tensor, dict[str, Any]]


class Annotated(Dataset[Sample]):
    """Images with boxes, labels and, perhaps, masks, flipped at random."""

    def __init__(self, data: DetectionSet, masks: bool) -> None:
        self.data, self.masks = data, masks
        self.transform = v2.Compose(
            [
                v2.RandomHorizontalFlip(0.5),
                v2.ToDtype({tv_tensors.Image: torch.float32, "others": None}, scale=True),
                v2.ToPureTensor(),
            ]
        )

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Sample:
        size = tuple(map(int, self.data.sizes[index]))
        rows = np.flatnonzero(self.data.objects.images == index)
        objects = self.data.objects
        boxes = torch.from_numpy(objects.boxes[rows]).float()
        target: dict[str, Any] = {
            "boxes": tv_tensors.BoundingBoxes(boxes, format="XYXY", canvas_size=size),
            "labels": torch.from_numpy(objects.labels[rows]) + 1,
        }
        if self.masks:
            assert objects.masks is not None
            drawn = [bitmap_of_runs(objects.masks[row], *size) for row in rows]
            target["masks"] = tv_tensors.Mask(torch.from_numpy(np.stack(drawn)).to(torch.uint8))
        found: Sample = self.transform(tv_tensors.Image(self.data.images.read(index)), target)
        return found


def together(samples: list[Sample]) -> tuple[tuple[Tensor, ...], tuple[dict[str, Any], ...]]:
    images, targets = zip(*samples, strict=True)
    return images, targets


class Usual:
    """A participant: steps of torchvision's loop."""

    def __init__(
        self,
        detector: nn.Module,
        data: DetectionSet,
        course: Course,
        device: torch.device,
        *,
        masks: bool,
        amp: bool,
        workers: int,
        seed: int = 0,
    ) -> None:
        self.detector: Any = detector.to(device).train()
        self.detector.transform.min_size = course.sizes
        self.course, self.device, self.amp = course, device, amp
        norms, others = norms_apart(self.detector)
        self.optimizer = torch.optim.SGD(
            [{"params": others}, {"params": norms, "weight_decay": NORM_DECAY}],
            course.rate,
            momentum=course.momentum,
            weight_decay=course.weight_decay,
        )
        self.scaler = torch.amp.GradScaler(device.type, enabled=amp)
        self.loader = DataLoader(
            Annotated(data, masks),
            batch_sampler=_Batches(data, course.batch, seed),
            num_workers=workers,
            collate_fn=together,
            pin_memory=False,  # as in torchvision's program
        )
        self.stream: Iterator[Any] = iter(self.loader)
        self.step = 0
        self.waited = 0.0

    @property
    def images(self) -> str:
        """In which form the images wait for their turn."""
        return f"files, decoded by {self.loader.num_workers} workers"

    def steps(self, number: int) -> None:
        for _ in range(number):
            rate = self.course.learning_rate(Clock(self.step, self.course.steps, 1))
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            loss = self._loss()
            self.optimizer.zero_grad()
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.step += 1

    @torch.no_grad()
    def make_batch_norms_precise(self, batches: int) -> None:
        """As xmoco does after training, which torchvision's program does not: figures of the two
        are to tell their training apart."""
        with mean_statistics(self.detector) as weigh:
            for number in range(1, batches + 1):
                weigh(number)
                self._loss()

    def _loss(self) -> Tensor:
        """Of the next batch."""
        started = time.perf_counter()
        images, targets = next(self.stream)
        self.waited += time.perf_counter() - started
        images = [image.to(self.device) for image in images]
        targets = [{key: value.to(self.device) for key, value in t.items()} for t in targets]
        with torch.autocast(self.device.type, torch.float16, enabled=self.amp):
            loss: Tensor = sum(self.detector(images, targets).values())
        return loss


class _Batches:
    """The batches of one epoch after another, by the order that xmoco has, too. They never end: a
    loader that begins anew has nothing ready, and small sets have few batches in an epoch."""

    def __init__(self, data: DetectionSet, batch: int, seed: int) -> None:
        self.order = batches_of_one_shape(data, batch)
        self.images, self.batch, self.seed = len(data), batch, seed

    def __iter__(self) -> Iterator[list[int]]:
        whole = self.images - self.images % self.batch
        for epoch in count():
            for batch in self.order(self.images, self.seed, epoch)[:whole].split(self.batch):
                yield batch.tolist()
