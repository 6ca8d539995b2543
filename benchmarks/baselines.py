"""Who takes part in the races of ``speed.py``, and what they are made of.

A ``Course`` travels to the process of each contender, which makes the contender there.
"""

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import Dataset

from torchvision_loop import TorchvisionLoop, our_steps, plain_steps
from xmoco.config import Config
from xmoco.data import ArrayImages, Batches, ImageSet, open_images
from xmoco.data.streaming import READ_AHEAD
from xmoco.methods import build_method
from xmoco.nn.encoder import build_encoder, momentum_copy
from xmoco.settings import load_config
from xmoco.train.engine import build_fabric, resolve_batch_norm
from xmoco.train.loop import Training
from xmoco.train.run_folder import RunFolder

WARM_UP = 12
"""Steps of xmoco before it is timed: it decides about CUDA graphs after eight."""


class Contender(Protocol):
    config: Config

    @property
    def waited(self) -> float:
        """Seconds without images, so far."""

    @property
    def steps_of_a_round(self) -> int: ...

    def turn(self) -> contextlib.AbstractContextManager[None]:
        """Around its steps; warms up, and has worker processes if it needs them."""

    def steps(self, count: int) -> None: ...


class Ours:
    """A run of xmoco as ``xmoco pretrain`` would have it, without its log and its kNN."""

    def __init__(self, config: Config, images: ImageSet, folder: Path) -> None:
        fabric = build_fabric(config.run)
        model = resolve_batch_norm(config.model, fabric, config.train.batch)
        self.config = config.model_copy(update={"model": model})
        torch.manual_seed(config.train.seed)
        method = build_method(model, config.method)
        self.batches = Batches(
            images,
            batch=config.train.batch,
            seed=0,
            device=fabric.device,
            readers=config.run.readers,
            preload_gib=config.data.preload_gib,
        )
        self.training = Training(self.config, fabric, method, self.batches, RunFolder(folder))
        self.training.method.train()
        self.stream = self.batches.from_step(0)

    @property
    def waited(self) -> float:
        return self.batches.waited

    @property
    def steps_of_a_round(self) -> int:
        if not torch.cuda.is_available():
            return 20
        return 60 if self.config.views.size < 64 else 30

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        for _ in range(READ_AHEAD):  # made while others had their turns: no merit of this one
            next(self.stream)
        self.steps(3)  # its caches are cold
        yield

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.training.advance(self.stream)

    def measure(self) -> None:
        """A step that measures, as at every line of the log."""
        self.training.advance(self.stream, with_metrics=True)


class NoLoss(nn.Module):
    """As little as can be between features and gradients."""

    def forward(self, q_s: Tensor, q_t: Tensor, k_s: Tensor, k_t: Tensor) -> Any:
        terms = {"source": -(q_s * k_t).mean(), "target": -(q_t * k_s).mean()}
        return terms["source"] + terms["target"], terms

    def metrics(self, *_features: Tensor) -> dict[str, Tensor]:
        return {}


class WithoutLoss(Ours):
    """All that a run does but the loss: what the loss takes is what the others take more."""

    def __init__(self, config: Config, images: ImageSet, folder: Path) -> None:
        super().__init__(config, images, folder)
        self.training.method.loss = NoLoss().to(self.training.fabric.device)


class EncoderOnly:
    """What the network costs, compiled: queries with gradient, keys without."""

    waited = 0.0
    steps_of_a_round = 20

    def __init__(self, config: Config) -> None:
        self.config = config
        encoder = build_encoder(config.model).cuda().to(memory_format=torch.channels_last)
        self.parameters = list(encoder.parameters())
        self.momentum_encoder = torch.compile(momentum_copy(encoder))
        self.encoder = torch.compile(encoder)
        shape = (config.train.batch, 3, config.views.size, config.views.size)
        views = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
        self.views = views.to(memory_format=torch.channels_last)

    def turn(self) -> contextlib.AbstractContextManager[None]:
        self.steps(3)
        return contextlib.nullcontext()

    def steps(self, count: int) -> None:
        for _ in range(count):
            with torch.autocast("cuda", torch.bfloat16):
                losses = [self.encoder(self.views).sum() for _ in range(2)]
                with torch.no_grad():
                    for _ in range(2):
                        self.momentum_encoder(self.views)
            torch.stack(losses).sum().backward()
            for parameter in self.parameters:
                parameter.grad = None


class Pictures(Dataset[tuple[Any, int]]):
    """Decoded images in memory, as torchvision's CIFAR10 holds them."""

    transform: Callable[[Image.Image], Any]  # lightly sets it

    def __init__(self, pixels: Tensor) -> None:
        self.pixels = pixels.permute(0, 2, 3, 1).contiguous().numpy()

    def __len__(self) -> int:
        return len(self.pixels)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return self.transform(Image.fromarray(self.pixels[index])), 0


def decoded(images: ImageSet) -> ArrayImages:
    """The same images in memory."""
    batches = Batches(images, batch=1, seed=0, device=torch.device("cpu"), readers=16)
    assert isinstance(batches.images, ArrayImages)
    return batches.images


@dataclass(frozen=True)
class Course:
    """What is trained, and the contenders who train it."""

    recipe: str
    overrides: tuple[str, ...]
    folder: Path
    """For runs."""
    source: str | None = None
    """Of images, where not the recipe's own."""
    pixels: Path | None = None
    """A file with them decoded: that need not be done for every contender."""

    def config(self, *changes: str) -> Config:
        source = {} if self.source is None else {"data.source": self.source}
        return load_config(self.recipe, [*self.overrides, *changes], source)

    def images(self) -> ImageSet:
        if self.pixels is not None:
            return ArrayImages(self.recipe, torch.load(self.pixels))
        images = open_images(self.config().data, "train")
        assert images is not None
        return images

    def with_pixels(self) -> "Course":
        pixels = self.folder / "pixels.pt"
        torch.save(decoded(self.images()).pixels, pixels)
        return replace(self, pixels=pixels)

    def xmoco(self, *changes: str) -> Ours:
        return self._warm(Ours(self.config(*changes), self.images(), self._new_folder()))

    def without_loss(self) -> Ours:
        return self._warm(WithoutLoss(self.config(), self.images(), self._new_folder()))

    def encoder_only(self) -> EncoderOnly:
        return EncoderOnly(self.config())

    def lightly(self, tuned: bool = False, compiled: bool = False) -> Contender:
        from lightly_moco import LightlyMoCo

        images: Any = self.source if self.pixels is None else Pictures(torch.load(self.pixels))
        moco = self.config("method=mocov2plus")
        return LightlyMoCo(images, moco, tuned=tuned, compiled=compiled)

    def torchvision(self, workers: int, our_step: bool = False) -> Contender:
        config = self.config()
        take = our_steps(self.xmoco().training) if our_step else plain_steps(config)
        return TorchvisionLoop(config, decoded(self.images()), take, workers)

    def _warm(self, ours: Ours) -> Ours:
        ours.steps(WARM_UP)
        ours.measure()
        for log in ours.training.run.path.glob("train.log"):  # tells of a CUDA graph
            print(log.read_text().strip(), flush=True)
        return ours

    def _new_folder(self) -> Path:
        return Path(tempfile.mkdtemp(prefix="run", dir=self.folder))
