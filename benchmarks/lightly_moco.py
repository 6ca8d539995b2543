"""Symmetric MoCo as lightly's users write it, a baseline of ``speed.py``.

Dataset, transform, loss with its memory bank and momentum update are lightly's; the network is the
one xmoco trains, and the settings of the views are the same. Needs ``pip install lightly``.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightly.data import LightlyDataset
from lightly.loss import NTXentLoss
from lightly.models.utils import (
    batch_shuffle,
    batch_unshuffle,
    deactivate_requires_grad,
    update_momentum,
)
from lightly.transforms import MoCoV2Transform
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, RandomSampler

from xmoco.config import Config
from xmoco.data.batches import Waiting
from xmoco.nn.encoder import build_encoder


def transform(config: Config) -> MoCoV2Transform:
    views, shown = config.views, config.input
    return MoCoV2Transform(
        input_size=shown.size,
        cj_prob=views.jitter,
        cj_strength=1.0,
        cj_bright=views.brightness,
        cj_contrast=views.contrast,
        cj_sat=views.saturation,
        cj_hue=views.hue,
        min_scale=views.crop_scale[0],
        random_gray_scale=views.grey,
        gaussian_blur=views.blur,
        sigmas=views.blur_sigma,
        hf_prob=views.flip,
        normalize={"mean": list(shown.mean), "std": list(shown.std)},
    )


class LightlyMoCo:
    """``images`` is a folder of image files, or a data set of (PIL image, label).

    ``tuned`` is what its users can do for speed: bf16, 16 workers, pinned memory, channels-last,
    a fused optimiser. ``compiled`` adds ``torch.compile``. Otherwise its defaults: fp32, 8 workers.
    """

    graphed = False

    def __init__(
        self,
        images: str | Dataset[Any],
        config: Config,
        *,
        tuned: bool = False,
        compiled: bool = False,
    ) -> None:
        self.config, self.bf16 = config, tuned
        self.workers = 16 if tuned else 8
        self.format = torch.channels_last if tuned else torch.contiguous_format
        if isinstance(images, str):
            data = LightlyDataset(images, transform=transform(config))
        else:
            data = LightlyDataset.from_torch_dataset(images, transform=transform(config))
        self.loader = DataLoader(
            data,
            batch_size=config.train.batch,
            # As a set so large that no epoch ends in a round: at an end its workers start anew.
            sampler=RandomSampler(data, replacement=True, num_samples=2**40),
            num_workers=self.workers,
            pin_memory=tuned,
        )
        self.encoder = build_encoder(config.model).cuda().to(memory_format=self.format)
        self.momentum_encoder = copy.deepcopy(self.encoder)
        deactivate_requires_grad(self.momentum_encoder)
        bank = config.method.bank_length, config.model.feature_size
        self.losses = [NTXentLoss(config.method.temperature, bank).cuda() for _ in range(2)]
        self.optimizer = torch.optim.SGD(
            self.encoder.parameters(), lr=0.06, momentum=0.9, weight_decay=5e-4, fused=tuned
        )
        compile_ = torch.compile if compiled else _as_it_is
        self.queries, self.keys = compile_(self.encoder), compile_(self.momentum_encoder)
        self.waiting = Waiting(torch.device("cuda"))

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Workers run only in this participant's turn, and are well under way when it is timed.

        The first steps are slow, and batches pile up meanwhile: these are passed over, since a run
        lives on what its workers make. After as many steps again, workers and GPU are in step.
        """
        self.stream = iter(self.loader)
        self.steps(3)
        for _ in range(self.workers):
            next(self.stream)
        self.steps(self.workers)
        yield
        del self.stream

    @property
    def steps_of_a_round(self) -> int:
        """Workers finish a batch each at about the same time: a whole round of them counts."""
        return self.workers

    @property
    def waited(self) -> float:
        return self.waiting.seconds()

    def steps(self, count: int) -> None:
        for _ in range(count):
            with self.waiting.measured():
                views = next(self.stream)[0]
            update_momentum(self.encoder, self.momentum_encoder, m=0.99)
            x0, x1 = (view.cuda(non_blocking=True).to(memory_format=self.format) for view in views)
            with torch.autocast("cuda", torch.bfloat16, enabled=self.bf16):
                loss = self._side(x0, x1, 0) + self._side(x1, x0, 1)
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def _side(self, query_view: Tensor, key_view: Tensor, side: int) -> Tensor:
        queries = self.queries(query_view)
        with torch.no_grad():
            shuffled, order = batch_shuffle(key_view)
            keys = batch_unshuffle(self.keys(shuffled), order)
        loss: Tensor = self.losses[side](queries, keys)
        return loss / 2


def _as_it_is(module: nn.Module) -> nn.Module:
    return module
