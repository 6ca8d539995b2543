"""The same method driven the usual way, a baseline of ``speed.py``.

torchvision's transforms make the views, image by image, in the worker processes of a DataLoader.
The steps are plain PyTorch's, or those of xmoco's trainer.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms import v2

from xmoco.config import Config
from xmoco.data import ArrayImages
from xmoco.methods import build_method
from xmoco.pretraining import peak_rate
from xmoco.schedules import Clock, ScheduledValues
from xmoco.train.loop import Training

TakeStep = Callable[[Tensor, Tensor], None]


def transform(config: Config) -> v2.Compose:
    """The views of a recipe that has no blur."""
    views, size = config.views, config.input.size
    jitter = v2.ColorJitter(views.brightness, views.contrast, views.saturation, views.hue)
    return v2.Compose(
        [
            v2.RandomResizedCrop(size, views.crop_scale, views.crop_ratio, antialias=True),
            v2.RandomHorizontalFlip(views.flip),
            v2.RandomApply([jitter], views.jitter),
            v2.RandomGrayscale(views.grey),
            v2.RandomInvert(views.invert),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(config.input.mean, config.input.std),
        ]
    )


class TwoViews(Dataset[tuple[Tensor, Tensor]]):
    def __init__(self, images: ArrayImages, config: Config) -> None:
        self.pixels, self.transform = images.pixels, transform(config)

    def __len__(self) -> int:
        return len(self.pixels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image = self.pixels[index]
        return self.transform(image), self.transform(image)


def plain_steps(config: Config) -> TakeStep:
    """As anyone would write them."""
    torch.manual_seed(config.train.seed)
    method = build_method(config).to(memory_format=torch.channels_last)
    method.train()
    optim = config.optim
    optimizer = torch.optim.SGD(
        [p for p in method.parameters() if p.requires_grad],
        peak_rate(config),
        momentum=optim.sgd_momentum,
        weight_decay=optim.weight_decay,
    )

    at = ScheduledValues(method.schedules()).at(Clock(0, 1, 1))  # which stay what they are

    def take(x_s: Tensor, x_t: Tensor) -> None:
        optimizer.zero_grad()
        method((x_s, x_t), at).loss.backward()
        optimizer.step()
        method.after_update(at)

    return take


def our_steps(training: Training) -> TakeStep:
    def take(x_s: Tensor, x_t: Tensor) -> None:
        training.stepper((x_s, x_t), training.clock(training.step))
        training.step += 1

    return take


class TorchvisionLoop:
    """Takes steps with views from a DataLoader."""

    graphed = False

    def __init__(self, config: Config, images: ArrayImages, take: TakeStep, workers: int) -> None:
        self.config, self.take, self.workers = config, take, workers
        self.loader = DataLoader(
            TwoViews(images, config),
            batch_size=config.train.batch,
            shuffle=True,
            drop_last=True,
            num_workers=workers,
        )
        self.waited = 0.0

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Workers run only in this participant's turn, and have no batches ready when it begins to
        count."""
        self.stream = self._endless()
        self.steps(max(3, 2 * self.workers))
        yield
        del self.stream

    @property
    def steps_of_a_round(self) -> int:
        return 20

    def _endless(self) -> Iterator[Any]:
        while True:
            yield from self.loader

    def steps(self, count: int) -> None:
        for _ in range(count):
            started = time.perf_counter()
            x_s, x_t = next(self.stream)
            self.waited += time.perf_counter() - started
            self.take(*(x.contiguous(memory_format=torch.channels_last) for x in (x_s, x_t)))
