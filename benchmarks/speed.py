"""How fast xmoco trains, beside lightly and beside what the encoder alone would allow.

    python benchmarks/speed.py cifar10 --data cifar10.tar
    python benchmarks/speed.py photographs            # writes JPEG files of 500×375 to train on
    python benchmarks/speed.py demo                   # on the CPU

The contenders take turns, a few steps each; the median round counts. All train the same network on
the same images with views of the same settings. On a GPU they share a process and are lightly, if
it is installed, and ``encoder only``: the compiled network with nothing around it, forward and
backward for the queries, forward for the keys. On the CPU each has a process of its own, since how
xmoco starts up (threads, memory) is part of its speed and not the others'. The rival is plain
PyTorch with views from torchvision's transforms in a DataLoader; ``our step`` is the same with
xmoco's start-up and steps, so that what is left between it and xmoco are the views.
``--stages`` also tells where the time of a step goes, its stages one after the other.
"""

import argparse
import contextlib
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Protocol

import torch
from PIL import Image
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.utils.data import Dataset

from decode import write_photographs
from own_process import InItsOwnProcess
from recipe import RESULTS
from torchvision_loop import TorchvisionLoop, our_steps, plain_steps
from xmoco.config import Config
from xmoco.data import ArrayImages, Batches, ImageSet, open_images
from xmoco.methods import build_method
from xmoco.nn.encoder import build_encoder, momentum_copy
from xmoco.records import Record, append_records
from xmoco.settings import load_config
from xmoco.train.engine import build_fabric, resolve_batch_norm
from xmoco.train.loop import Training
from xmoco.train.run_folder import RunFolder

WARM_UP = 12
"""Steps of xmoco before it is timed: it decides about CUDA graphs after eight."""

REFILL = 0.4
"""Seconds in which readers and decoder are done with the next batches, and disturb no stage."""


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
            resident_gib=config.data.resident_gib,
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
        self.steps(3)  # its caches are cold after the others' turns
        yield

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.training.advance(self.stream)

    def measure(self) -> None:
        """A step that measures, as at every line of the log."""
        self.training.advance(self.stream, measure=True)


class NoLoss(nn.Module):
    """As little as can be between features and gradients."""

    def forward(self, q_s: Tensor, q_t: Tensor, k_s: Tensor, k_t: Tensor) -> Any:
        terms = {"source": -(q_s * k_t).mean(), "target": -(q_t * k_s).mean()}
        return terms["source"] + terms["target"], terms

    def gauges(self, *_features: Tensor) -> dict[str, Tensor]:
        return {}


class WithoutLoss(Ours):
    """All that a run does but the loss: what the loss takes is what the others take more."""

    def __init__(self, config: Config, images: ImageSet, folder: Path) -> None:
        super().__init__(config, images, folder)
        self.training.method.loss = NoLoss().cuda()


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

    def __init__(self, images: ArrayImages) -> None:
        self.pixels = images.pixels.permute(0, 2, 3, 1).contiguous().numpy()

    def __len__(self) -> int:
        return len(self.pixels)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return self.transform(Image.fromarray(self.pixels[index])), 0


def decoded(images: ImageSet) -> ArrayImages:
    """The same images in memory: decoding them once is enough for all contenders."""
    batches = Batches(images, batch=1, seed=0, device=torch.device("cpu"), readers=16)
    assert isinstance(batches.images, ArrayImages)
    return batches.images


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("work", choices=["cifar10", "photographs", "demo"])
    parser.add_argument("--data", help="the images of cifar10: an archive or torchvision:CIFAR10")
    parser.add_argument("--photographs", type=int, default=4096, help="files to write")
    parser.add_argument("--batch", type=int, default=512, help="on a GPU")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="no round begins after so many"
    )
    parser.add_argument("--only", nargs="*", help="some of the contenders")
    parser.add_argument("--stages", action="store_true", help="where the time of a step goes")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        race(options, Path(folder))


def race(options: argparse.Namespace, folder: Path) -> None:
    makers = on_the_cpu(folder) if options.work == "demo" else on_a_gpu(options, folder)
    # For all contenders, whoever comes first: batches keep their size.
    torch.backends.cudnn.benchmark = True
    chosen = {name: makers[name] for name in options.only or makers}
    show(run_rounds(chosen, options.rounds, options.seconds), options)
    if options.stages:
        if options.work == "demo":
            show_stages(stage_times(demo_run(folder)), demo_config(), options)
        else:
            # Beside each other they tell what XMoCo's loss takes more, whatever images cost.
            for name in ("xmoco", "mocov2plus"):
                ours = makers[name]()
                assert isinstance(ours, Ours)
                show_stages(stage_times(ours), ours.config, options)


Makers = dict[str, Callable[[], Contender]]


def on_the_cpu(folder: Path) -> Makers:
    plain = dict(os.environ)
    from xmoco import cli  # which sets what a process of xmoco is to find

    assert cli.app
    ours = dict(os.environ)
    makers: Makers = {"xmoco": partial(InItsOwnProcess, partial(demo_run, folder), ours)}
    for workers in (0, 1, 2):
        name = f"torchvision, {workers} workers"
        makers[name] = partial(InItsOwnProcess, partial(torchvision_demo, workers), plain)
    for workers in (0, 1, 2):
        make = partial(torchvision_demo, workers, folder)
        makers[f"our step, torchvision, {workers} workers"] = partial(InItsOwnProcess, make, ours)
    return makers


def demo_config() -> Config:
    return load_config("demo", ["device=cpu", "epochs=1000"])


def demo_run(folder: Path) -> Ours:
    config = demo_config()
    images = open_images(config.data, "train")
    assert images is not None
    return Ours(config, images, new_folder(folder / "demo"))


def torchvision_demo(workers: int, folder: Path | None = None) -> TorchvisionLoop:
    """With our steps if there is a ``folder`` for our run."""
    config = demo_config()
    images = open_images(config.data, "train")
    assert images is not None
    take = plain_steps(config) if folder is None else our_steps(demo_run(folder).training)
    return TorchvisionLoop(config, decoded(images), take, workers)


def on_a_gpu(options: argparse.Namespace, folder: Path) -> Makers:
    cifar = options.work == "cifar10"
    if cifar:
        source, recipe = options.data, "cifar10"
    else:
        source, recipe = str(folder / "photographs"), "imagenet"
        Path(source).mkdir()
        write_photographs(Path(source), options.photographs)
    overrides = [f"batch={options.batch}", "precision=bf16", "device=cuda", "epochs=1000"]
    if not cifar:
        overrides += ["resident_gib=0"]  # as a set that is too large for the device
    config = load_config(recipe, overrides, {"data.source": source})
    moco = load_config(recipe, [*overrides, "method=mocov2plus"], {"data.source": source})
    images = open_images(config.data, "train")
    assert images is not None
    if cifar:
        images = decoded(images)
    long = load_config(recipe, [*overrides, "bank_length=65536"], {"data.source": source})
    makers: Makers = {
        "xmoco": lambda: Ours(config, images, new_folder(folder / "xmoco")),
        "xmoco, K 65,536": lambda: Ours(long, images, new_folder(folder / "long")),
        "mocov2plus": lambda: Ours(moco, images, new_folder(folder / "mocov2plus")),
        "without a loss": lambda: WithoutLoss(config, images, new_folder(folder / "without")),
        "encoder only": lambda: EncoderOnly(config),
    }
    try:
        from lightly_moco import LightlyMoCo
    except ImportError:
        print("lightly is not installed and takes no part", flush=True)
        return makers
    pictures: Any = Pictures(images) if isinstance(images, ArrayImages) else source
    lightly = partial(LightlyMoCo, pictures, moco)
    makers["lightly"] = partial(lightly, quick=True, tuned=True)
    makers["lightly, compiled"] = partial(lightly, quick=True, tuned=True, compiled=True)
    makers["lightly (its own settings)"] = partial(lightly, quick=True)
    makers["lightly (its defaults)"] = lightly
    return makers


def new_folder(path: Path) -> Path:
    """A folder of that name, or of another if it is there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return Path(tempfile.mkdtemp(prefix=path.name, dir=path.parent))


@dataclass
class Outcome:
    """What the rounds of a contender told."""

    config: Config
    steps: int
    speeds: list[float] = field(default_factory=list)
    waiting: list[float] = field(default_factory=list)
    gib: float = 0.0


def run_rounds(makers: Makers, rounds: int, seconds: float) -> dict[str, Outcome]:
    """Alternate. Contenders are made in the first round, and the memory of each is what the GPU has
    less after its first turn than before it was made."""
    end = time.perf_counter() + seconds
    contenders: dict[str, Contender] = {}
    outcomes: dict[str, Outcome] = {}
    for name, make in makers.items():
        free = free_memory()
        try:
            contender = warm(make())
            outcome = Outcome(contender.config, contender.steps_of_a_round)
            take_turn(contender, outcome)
        except torch.OutOfMemoryError:
            print(f"{name} does not fit", flush=True)
            continue
        outcome.gib = (free - free_memory(now=True)) / 2**30
        contenders[name], outcomes[name] = contender, outcome
        print(f"round 1: {name} {outcome.speeds[-1]:,.0f} images/s", flush=True)
    for number in range(2, rounds + 1):
        if time.perf_counter() > end:
            print(f"no time for round {number}", flush=True)
            break
        for name, outcome in outcomes.items():
            take_turn(contenders[name], outcome)
            print(f"round {number}: {name} {outcome.speeds[-1]:,.0f} images/s", flush=True)
    return outcomes


def warm(contender: Contender) -> Contender:
    if isinstance(contender, Ours):
        contender.steps(WARM_UP)
        contender.measure()
        for log in contender.training.run.path.glob("train.log"):  # tells of a CUDA graph
            print(log.read_text().strip(), flush=True)
    return contender


def take_turn(contender: Contender, outcome: Outcome) -> None:
    with contender.turn():
        synchronise()
        waited, started = contender.waited, time.perf_counter()
        contender.steps(outcome.steps)
        synchronise()
        seconds = time.perf_counter() - started
        waited = contender.waited - waited
    outcome.speeds.append(outcome.steps * outcome.config.train.batch / seconds)
    outcome.waiting.append(waited / seconds)


def synchronise() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def free_memory(now: bool = False) -> int:
    """Bytes free on the GPU; as they are ``now``, or once PyTorch has given back what it can."""
    if not torch.cuda.is_available():
        return 0
    if not now:
        synchronise()
        torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


def show(outcomes: dict[str, Outcome], options: argparse.Namespace) -> None:
    """The table, beside the best of another library's contenders."""
    speeds = {name: statistics.median(outcome.speeds) for name, outcome in outcomes.items()}
    rival = max(
        (speed for name, speed in speeds.items() if name.startswith(("lightly", "torchvision"))),
        default=None,
    )
    table = Table(title=f"images per second: {options.work}")
    for heading in ("", "images/s", "× best rival", "GPU memory, GiB", "waiting"):
        table.add_column(heading, justify="left" if heading == "" else "right")
    records = []
    for name, outcome in outcomes.items():
        waiting = statistics.median(outcome.waiting)
        times = None if rival is None else speeds[name] / rival
        table.add_row(
            name,
            f"{speeds[name]:,.0f}",
            "" if times is None else f"{times:.2f}",
            f"{outcome.gib:.1f}" if outcome.gib else "",
            f"{waiting:.1%}",
        )
        records.append(
            record(
                "images_per_second",
                speeds[name],
                "images/s",
                name,
                outcome.config,
                options,
                rival=lightly_version() if name.startswith("lightly") else None,
                files=options.photographs if options.work == "photographs" else None,
                rounds=[round(value) for value in outcome.speeds],
                steps=outcome.steps,
                waiting=round(waiting, 4),
                gpu_memory_gib=round(outcome.gib, 2) or None,
                times_rival=None if times is None else round(times, 3),
            )
        )
    Console(width=110).print(table)
    append_records(options.results / "speed.jsonl", records)


def lightly_version() -> str | None:
    try:
        return f"lightly {version('lightly')}"
    except PackageNotFoundError:
        return None


def record(
    measure: str,
    value: float,
    unit: str,
    subject: str,
    config: Config,
    options: argparse.Namespace,
    **protocol: Any,
) -> Record:
    data = {"photographs": "photograph-like JPEG files of 500×375", "cifar10": "CIFAR-10"}
    return Record(
        measure,
        value,
        unit,
        subject,
        f"speed-{options.work}-{config.model.backbone}",
        {
            "data": data.get(options.work, "patterns"),
            "batch": config.train.batch,
            "size": config.views.size,
            "bank_length": config.method.bank_length,
            "precision": "fp32" if options.work == "demo" or "defaults" in subject else "bf16",
            **protocol,
        },
        config.train.seed,
    )


def stage_times(ours: Ours) -> dict[str, float]:
    """Milliseconds of each stage, one after the other, the GPU waited for in between."""
    training = ours.training
    ours.steps(WARM_UP)
    rounds: list[dict[str, float]] = []
    for _ in range(10):
        watch = _Watch()
        with watch("images"):
            batch = next(ours.stream)
        time.sleep(REFILL)
        with watch("views"):
            x_s, x_t = training.views(batch, training.step)
        rounds.append(watch.times | _parts_of_a_step(training, x_s, x_t))
    return {name: statistics.median(r[name] for r in rounds) for name in rounds[0]}


def _parts_of_a_step(training: Training, x_s: Tensor, x_t: Tensor) -> dict[str, float]:
    watch, method, optimizer = _Watch(), training.method, training.optimizer
    device = training.fabric.device.type
    precision = torch.autocast(device, torch.bfloat16, enabled=device == "cuda")
    with precision, watch("encoder, forward"):
        q_s, q_t = method.queries(x_s, x_t)
    with precision, watch("momentum encoder"):
        k_s, k_t = method.keys(x_s, x_t)
    with watch("loss"):
        loss, _ = method.loss(q_s, q_t, k_s, k_t)
    with watch("backward"):
        loss.backward()
    with watch("optimiser"):
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    with watch("momentum update"):
        method.after_step()
    return watch.times


class _Watch:
    def __init__(self) -> None:
        self.times: dict[str, float] = {}

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        synchronise()
        started = time.perf_counter()
        yield
        synchronise()
        self.times[name] = 1000 * (time.perf_counter() - started)


def show_stages(stages: dict[str, float], config: Config, options: argparse.Namespace) -> None:
    total = sum(stages.values())
    subject = config.method.name
    table = Table(title=f"stages of a step of {subject}, each waited for")
    table.add_column("stage")
    for heading in ("ms", "share"):
        table.add_column(heading, justify="right")
    for name, milliseconds in stages.items():
        table.add_row(name, f"{milliseconds:.2f}", f"{milliseconds / total:.1%}")
    Console(width=110).print(table)
    append_records(
        options.results / "speed.jsonl",
        [
            record("stage_ms", milliseconds, "ms", subject, config, options, stage=name)
            for name, milliseconds in stages.items()
        ],
    )


if __name__ == "__main__":
    main()
