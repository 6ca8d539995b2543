"""How fast xmoco trains, beside lightly and beside what the encoder alone would allow.

    python benchmarks/speed.py cifar10 --data cifar10.tar
    python benchmarks/speed.py photographs            # writes JPEG files of 500×375 to train on
    python benchmarks/speed.py demo                   # on the CPU

The contenders take turns, a few steps each; the median round counts. All train the same network on
the same images with views of the same settings. Each has a process of its own, since threads,
memory and how xmoco starts up are part of its own speed and not the others'. On a GPU they are
lightly, if it is installed, and ``encoder only``: the compiled network with nothing around it,
forward and backward for the queries, forward for the keys. On the CPU the rival is plain PyTorch
with views from torchvision's transforms in a DataLoader; ``our step`` is the same with xmoco's
start-up and steps, so that what is left between it and xmoco are the views.
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
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from baselines import Contender, Course, Ours
from decode import write_photographs
from own_process import FAILURES, InItsOwnProcess
from recipe import RESULTS
from xmoco.config import Config
from xmoco.records import Record, append_records
from xmoco.train.loop import Training

RIVALS = ("lightly", "torchvision")
"""How the names of other libraries' contenders begin."""
REFILL = 0.4
"""Seconds in which readers and decoder are done with the next batches, and disturb no stage."""


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
    on_cpu = options.work == "demo"
    course = demo_course(folder) if on_cpu else gpu_course(options, folder)
    makers = on_the_cpu(course) if on_cpu else on_a_gpu(course)
    show(run_rounds({name: makers[name] for name in options.only or makers}, options), options)
    if options.stages:
        torch.backends.cudnn.benchmark = True
        show_stages(stage_times(course.xmoco()), course.config(), options)
        if not on_cpu:
            # The two beside each other tell what XMoCo's loss takes more, whatever images cost.
            moco = course.xmoco("method=mocov2plus")
            show_stages(stage_times(moco), moco.config, options)


Makers = dict[str, Callable[[], Contender]]


def demo_course(folder: Path) -> Course:
    return Course("demo", ("device=cpu", "epochs=1000"), folder)


def on_the_cpu(course: Course) -> Makers:
    makers: Makers = {"xmoco": course.xmoco}
    for workers in (0, 1, 2):
        name = f"torchvision, {workers} workers"
        makers[name] = partial(course.torchvision, workers)
        makers[f"our step, {name}"] = partial(course.torchvision, workers, our_step=True)
    return makers


def gpu_course(options: argparse.Namespace, folder: Path) -> Course:
    overrides = (f"batch={options.batch}", "precision=bf16", "device=cuda", "epochs=1000")
    if options.work == "cifar10":
        return Course("cifar10", overrides, folder, options.data).with_pixels()
    photographs = folder / "photographs"
    photographs.mkdir()
    write_photographs(photographs, options.photographs)
    # As a set that is too large for the device.
    return Course("imagenet", (*overrides, "preload_gib=0"), folder, str(photographs))


def on_a_gpu(course: Course) -> Makers:
    makers: Makers = {
        "xmoco": course.xmoco,
        "xmoco, K 65,536": partial(course.xmoco, "bank_length=65536"),
        "mocov2plus": partial(course.xmoco, "method=mocov2plus"),
        "without a loss": course.without_loss,
        "encoder only": course.encoder_only,
    }
    if lightly_version() is None:
        print("lightly is not installed and takes no part", flush=True)
        return makers
    makers["lightly"] = partial(course.lightly, tuned=True)
    makers["lightly, compiled"] = partial(course.lightly, tuned=True, compiled=True)
    makers["lightly (its defaults)"] = course.lightly
    return makers


@dataclass
class Outcome:
    """What the rounds of a contender told."""

    config: Config
    steps: int
    speeds: list[float] = field(default_factory=list)
    waiting: list[float] = field(default_factory=list)
    gib: float = 0.0


def run_rounds(makers: Makers, options: argparse.Namespace) -> dict[str, Outcome]:
    """Alternate. Contenders are made in the first round, and the memory of each is what the GPU has
    less at the end of its first turn than before it was made. Who fails is out."""
    end = time.perf_counter() + options.seconds
    contenders = start(makers)
    outcomes: dict[str, Outcome] = {}
    for number in range(1, options.rounds + 1):
        if number > 1 and time.perf_counter() > end:
            print(f"no time for round {number}", flush=True)
            break
        for name, contender in list(contenders.items()):
            try:
                if number == 1:
                    outcomes[name] = first_turn(contender)
                else:
                    take_turn(contender, outcomes[name])
            except FAILURES as error:
                print(f"{name} is out: {str(error) or 'its process has ended'}", flush=True)
                contenders.pop(name).close()
                outcomes.pop(name, None)
            else:
                speed = outcomes[name].speeds[-1]
                print(f"round {number}: {name} {speed:,.0f} images/s", flush=True)
    for contender in contenders.values():
        contender.close()
    return outcomes


def first_turn(contender: InItsOwnProcess) -> Outcome:
    time.sleep(REFILL)  # what others prepare after their turns, they have then
    free = free_memory()
    contender.ready()
    outcome = Outcome(contender.config, contender.steps_of_a_round)
    outcome.gib = (free - take_turn(contender, outcome)) / 2**30
    return outcome


def start(makers: Makers) -> dict[str, InItsOwnProcess]:
    """All contenders' processes; none is loading any more."""
    plain = dict(os.environ)
    from xmoco import cli  # which sets what a process of xmoco is to find

    assert cli.app
    ours = dict(os.environ)
    contenders = {
        name: InItsOwnProcess(make, plain if name.startswith(RIVALS) else ours)
        for name, make in makers.items()
    }
    for contender in contenders.values():
        contender.loaded()
    return contenders


def take_turn(contender: InItsOwnProcess, outcome: Outcome) -> int:
    """What memory was free then."""
    with contender.turn():
        waited, started = contender.waited, time.perf_counter()
        contender.steps(outcome.steps)
        seconds = time.perf_counter() - started
        waited = contender.waited - waited
        free = free_memory()
    outcome.speeds.append(outcome.steps * outcome.config.train.batch / seconds)
    outcome.waiting.append(waited / seconds)
    return free


def free_memory() -> int:
    """Bytes free on the GPU."""
    return torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else 0


def show(outcomes: dict[str, Outcome], options: argparse.Namespace) -> None:
    """The table, beside the best of another library's contenders."""
    speeds = {name: statistics.median(outcome.speeds) for name, outcome in outcomes.items()}
    rival = max(
        (speed for name, speed in speeds.items() if name.startswith(RIVALS)),
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


def synchronise() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


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
