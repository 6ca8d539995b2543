"""Who takes part in the benchmark of ``speed.py``, and what they are made of.

A ``Workload`` travels to the process of each participant, which is made there.
"""

import contextlib
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

from cuda_graph import recorded
from torchvision_loop import TorchvisionLoop, our_steps, plain_steps
from xmoco.config import Config
from xmoco.data import ArrayImages, Batches, ImageSet, open_images
from xmoco.data.streaming import READ_AHEAD
from xmoco.methods import Method, build_method
from xmoco.methods.mocov2plus import MoCoV2Plus
from xmoco.nn.encoder import build_encoder, momentum_copy
from xmoco.pretraining import prepare_training
from xmoco.settings import load_config
from xmoco.task import StepOutput, Values
from xmoco.train.engine import build_fabric
from xmoco.train.run_folder import RunFolder
from xmoco.train.step import GraphedStepper

WARM_UP = 12
"""Steps of xmoco before it is timed: it decides about CUDA graphs after eight."""


class Participant(Protocol):
    config: Config

    @property
    def graphed(self) -> bool:
        """Whether its steps are replayed as a CUDA graph."""

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

    def __init__(
        self,
        config: Config,
        images: ImageSet,
        folder: Path,
        build: Callable[[Config], Method] = build_method,
    ) -> None:
        self.config = config
        fabric = build_fabric(config.run)
        self.training = prepare_training(config, fabric, images, RunFolder(folder), build)
        self.training.task.train()
        self.stream = self.training.batches.from_step(0)

    @property
    def graphed(self) -> bool:
        stepper = self.training.stepper
        return isinstance(stepper, GraphedStepper) and stepper.graph is not None

    @property
    def waited(self) -> float:
        return self.training.batches.waited

    @property
    def steps_of_a_round(self) -> int:
        if not torch.cuda.is_available():
            return 20
        return 60 if self.config.input.size < 64 else 30

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


class WithoutLoss(MoCoV2Plus):
    """As little as can be between features and gradients: what a loss takes, others take more."""

    def forward(
        self, views: Sequence[Tensor], at: Values, with_metrics: bool = False
    ) -> StepOutput:
        (q_s, q_t), (k_s, k_t) = self.queries_and_keys(views)
        terms = {"source": -(q_s * k_t).mean(), "target": -(q_t * k_s).mean()}
        return StepOutput(terms["source"] + terms["target"], terms, {})


class EncoderOnly:
    """What the network costs, compiled: queries with gradient, keys without.

    Its kernels are launched together, as a CUDA graph: otherwise a small network would be timed by
    how fast Python can launch them.
    """

    waited = 0.0
    steps_of_a_round = 20

    def __init__(self, config: Config) -> None:
        self.config = config
        encoder = build_encoder(config.model).cuda().to(memory_format=torch.channels_last)
        self.parameters = list(encoder.parameters())
        self.momentum_encoder = torch.compile(momentum_copy(encoder))
        self.encoder = torch.compile(encoder)
        shape = (config.train.batch, 3, config.input.size, config.input.size)
        views = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
        self.views = views.to(memory_format=torch.channels_last)
        self.take: Callable[[], None] = self._step
        self.graphed = True
        try:
            self.take = recorded(self._step)
        except RuntimeError as error:
            self.graphed = False
            reason = str(error).partition("\n")[0]
            print(
                f"encoder only: launched kernel by kernel, as no graph of it can be ({reason})",
                flush=True,
            )

    def turn(self) -> contextlib.AbstractContextManager[None]:
        self.steps(3)
        return contextlib.nullcontext()

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.take()

    def _step(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None
        with torch.autocast("cuda", torch.bfloat16):
            losses = [self.encoder(self.views).sum() for _ in range(2)]
            with torch.no_grad():
                for _ in range(2):
                    self.momentum_encoder(self.views)
        torch.stack(losses).sum().backward()


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
class Workload:
    """What is trained, and the participants who train it."""

    recipe: str
    overrides: tuple[str, ...]
    folder: Path
    """For runs."""
    source: str | None = None
    """Of images, where not the recipe's own."""
    pixels: Path | None = None
    """A file with them decoded: that need not be done for every participant."""

    def config(self, *changes: str) -> Config:
        source = {} if self.source is None else {"data.source": self.source}
        return load_config(self.recipe, [*self.overrides, *changes], source)

    def images(self) -> ImageSet:
        if self.pixels is not None:
            return ArrayImages(self.recipe, torch.load(self.pixels))
        images = open_images(self.config().data, "train")
        assert images is not None
        return images

    def with_pixels(self) -> "Workload":
        pixels = self.folder / "pixels.pt"
        torch.save(decoded(self.images()).pixels, pixels)
        return replace(self, pixels=pixels)

    def xmoco(self, *changes: str) -> Ours:
        return self._ours(self.config(*changes))

    def without_loss(self) -> Ours:
        return self._ours(self.config("method=mocov2plus"), WithoutLoss)

    def encoder_only(self) -> EncoderOnly:
        return EncoderOnly(self.config())

    def lightly(self, tuned: bool = False, compiled: bool = False) -> Participant:
        from lightly_moco import LightlyMoCo

        images: Any = self.source if self.pixels is None else Pictures(torch.load(self.pixels))
        moco = self.config("method=mocov2plus")
        return LightlyMoCo(images, moco, tuned=tuned, compiled=compiled)

    def torchvision(self, workers: int, our_step: bool = False) -> Participant:
        config = self.config()
        take = our_steps(self.xmoco().training) if our_step else plain_steps(config)
        return TorchvisionLoop(config, decoded(self.images()), take, workers)

    def _ours(self, config: Config, build: Callable[[Config], Method] = build_method) -> Ours:
        """Warmed up."""
        folder = Path(tempfile.mkdtemp(prefix="run", dir=self.folder))
        ours = Ours(config, self.images(), folder, build)
        ours.steps(WARM_UP)
        ours.measure()
        for log in folder.glob("train.log"):  # tells of a CUDA graph
            print(log.read_text().strip(), flush=True)
        return ours
