"""How fast xmoco trains, beside lightly and beside what the encoder alone would allow.

    python benchmarks/speed.py cifar10 --data cifar10.tar
    python benchmarks/speed.py photographs            # writes JPEG files of 500×375 to train on
    python benchmarks/speed.py demo                   # on the CPU

The participants take turns, a few steps each; the median round counts. All train the same network
on the same images with views of the same settings. Each has a process of its own, since threads,
memory and how xmoco starts up are part of its own speed and not the others'. On a GPU the baselines
are lightly, if it is installed, and ``encoder only``: the compiled network with nothing around it,
forward and backward for the queries, forward for the keys, as a CUDA graph. On the CPU the baseline
is plain PyTorch with views from torchvision's transforms in a DataLoader; ``our step`` is the same
with xmoco's start-up and steps, so that what is left between it and xmoco are the views.
``--beside`` adds xmoco as it is in another checkout, to tell whether a change made it slower.
``--stages`` also tells where the time of a step goes, its stages one after the other.
"""

import argparse
import contextlib
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from baselines import Ours, Participant, Workload
from decode import write_photographs
from own_process import FAILURES, Elsewhere, InAnotherCheckout, InItsOwnProcess
from recipe import RESULTS
from xmoco.config import Config
from xmoco.methods.mocov2plus import MoCoV2Plus
from xmoco.methods.xmoco import XMoCo
from xmoco.records import Record, append_records
from xmoco.train.loop import Training

BASELINES = ("lightly", "torchvision")
"""How the names of other libraries' participants begin."""
BESIDE = "xmoco ("
"""How the names of other checkouts begin."""
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
    parser.add_argument("--only", nargs="*", help="some of the participants")
    parser.add_argument(
        "--beside", type=Path, metavar="CHECKOUT", help="xmoco of this checkout takes part too"
    )
    parser.add_argument("--stages", action="store_true", help="where the time of a step goes")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        benchmark(options, Path(folder))


def benchmark(options: argparse.Namespace, folder: Path) -> None:
    on_cpu = options.work == "demo"
    workload = demo_workload(folder) if on_cpu else gpu_workload(options, folder)
    makers = on_the_cpu(workload) if on_cpu else on_a_gpu(workload)
    participants = start({name: makers[name] for name in options.only or makers})
    if options.beside is not None:
        participants |= start_beside(options.beside, workload)
    show(run_rounds(participants, options), options)
    if options.stages:
        torch.backends.cudnn.benchmark = True
        show_stages(stage_times(workload.xmoco()), workload.config(), options)
        if not on_cpu:
            # The two beside each other tell what XMoCo's loss takes more, whatever images cost.
            moco = workload.xmoco("method=mocov2plus")
            show_stages(stage_times(moco), moco.config, options)


Makers = dict[str, Callable[[], Participant]]
Participants = dict[str, Elsewhere]


def demo_workload(folder: Path) -> Workload:
    return Workload("demo", ("device=cpu", "epochs=1000"), folder)


def on_the_cpu(workload: Workload) -> Makers:
    makers: Makers = {"xmoco": workload.xmoco}
    for workers in (0, 1, 2):
        name = f"torchvision, {workers} workers"
        makers[name] = partial(workload.torchvision, workers)
        makers[f"our step, {name}"] = partial(workload.torchvision, workers, our_step=True)
    return makers


def gpu_workload(options: argparse.Namespace, folder: Path) -> Workload:
    overrides = (f"batch={options.batch}", "precision=bf16", "device=cuda", "epochs=1000")
    if options.work == "cifar10":
        return Workload("cifar10", overrides, folder, options.data).with_pixels()
    photographs = folder / "photographs"
    photographs.mkdir()
    write_photographs(photographs, options.photographs)
    # As a set that is too large for the device.
    return Workload("imagenet", (*overrides, "preload_gib=0"), folder, str(photographs))


def on_a_gpu(workload: Workload) -> Makers:
    makers: Makers = {
        "xmoco": workload.xmoco,
        "xmoco, K 65,536": partial(workload.xmoco, "bank_length=65536"),
        "mocov2plus": partial(workload.xmoco, "method=mocov2plus"),
        "without a loss": workload.without_loss,
        "encoder only": workload.encoder_only,
    }
    if lightly_version() is None:
        print("lightly is not installed and takes no part", flush=True)
        return makers
    makers["lightly"] = partial(workload.lightly, tuned=True)
    makers["lightly, compiled"] = partial(workload.lightly, tuned=True, compiled=True)
    makers["lightly (its defaults)"] = workload.lightly
    return makers


@dataclass
class Outcome:
    """What the rounds of a participant told."""

    config: Config
    steps: int
    graphed: bool
    speeds: list[float] = field(default_factory=list)
    waiting: list[float] = field(default_factory=list)
    gib: float = 0.0


def run_rounds(participants: Participants, options: argparse.Namespace) -> dict[str, Outcome]:
    """Alternate. Participants are made in the first round, and the memory of each is what the GPU
    has less at the end of its first turn than before it was made. Who fails is out."""
    for participant in participants.values():
        participant.loaded()  # none is loading any more when the first one begins
    end = time.perf_counter() + options.seconds
    outcomes: dict[str, Outcome] = {}
    for number in range(1, options.rounds + 1):
        if number > 1 and time.perf_counter() > end:
            print(f"no time for round {number}", flush=True)
            break
        for name, participant in list(participants.items()):
            try:
                if number == 1:
                    outcomes[name] = first_turn(participant)
                else:
                    take_turn(participant, outcomes[name])
            except FAILURES as error:
                print(f"{name} is out: {str(error) or 'its process has ended'}", flush=True)
                participants.pop(name).close()
                outcomes.pop(name, None)
            else:
                speed = outcomes[name].speeds[-1]
                print(f"round {number}: {name} {speed:,.0f} images/s", flush=True)
    for participant in participants.values():
        participant.close()
    return outcomes


def first_turn(participant: Elsewhere) -> Outcome:
    time.sleep(REFILL)  # what others prepare after their turns, they have then
    free = free_memory()
    participant.ready()
    outcome = Outcome(participant.config, participant.steps_of_a_round, participant.graphed)
    outcome.gib = (free - take_turn(participant, outcome)) / 2**30
    return outcome


def start(makers: Makers) -> Participants:
    """A process for each."""
    plain = dict(os.environ)
    from xmoco import cli  # which sets what a process of xmoco is to find

    assert cli.app
    ours = dict(os.environ)
    return {
        name: InItsOwnProcess(make, plain if name.startswith(BASELINES) else ours)
        for name, make in makers.items()
    }


def start_beside(checkout: Path, workload: Workload) -> Participants:
    """xmoco of another checkout, by the name of its folder."""
    checkout = checkout.resolve()
    if not (checkout / "src" / "xmoco").is_dir():
        raise SystemExit(f"{checkout} is no checkout of xmoco: it has no src/xmoco.")
    name = f"{BESIDE}{checkout.name})"
    return {name: InAnotherCheckout(checkout, workload, os.environ)}


def take_turn(participant: Elsewhere, outcome: Outcome) -> int:
    """What memory was free then."""
    with participant.turn():
        waited, started = participant.waited, time.perf_counter()
        participant.steps(outcome.steps)
        seconds = time.perf_counter() - started
        waited = participant.waited - waited
        free = free_memory()
    outcome.speeds.append(outcome.steps * outcome.config.train.batch / seconds)
    outcome.waiting.append(waited / seconds)
    return free


def free_memory() -> int:
    """Bytes free on the GPU."""
    return torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else 0


def show(outcomes: dict[str, Outcome], options: argparse.Namespace) -> None:
    """The table, beside the best of another library's."""
    speeds = {name: statistics.median(outcome.speeds) for name, outcome in outcomes.items()}
    baseline = max(
        (speed for name, speed in speeds.items() if name.startswith(BASELINES)),
        default=None,
    )
    table = Table(title=f"images per second: {options.work}")
    for heading in ("", "images/s", "× best baseline", "GPU memory, GiB", "waiting"):
        table.add_column(heading, justify="left" if heading == "" else "right")
    records = []
    for name, outcome in outcomes.items():
        waiting = statistics.median(outcome.waiting)
        times = None if baseline is None else speeds[name] / baseline
        table.add_row(
            name,
            f"{speeds[name]:,.0f}",
            "" if times is None else f"{times:.2f}",
            f"{outcome.gib:.1f}" if outcome.gib else "",
            f"{waiting:.1%}",
        )
        told = record(
            "images_per_second",
            speeds[name],
            "images/s",
            name,
            outcome.config,
            options,
            baseline=lightly_version() if name.startswith("lightly") else None,
            files=options.photographs if options.work == "photographs" else None,
            rounds=[round(value) for value in outcome.speeds],
            steps=outcome.steps,
            graph=outcome.graphed,
            waiting=round(waiting, 4),
            gpu_memory_gib=round(outcome.gib, 2) or None,
            times_baseline=None if times is None else round(times, 3),
        )
        # What is in another checkout is of no commit of this one.
        records.append(replace(told, commit=None) if name.startswith(BESIDE) else told)
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
            "size": config.input.size,
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
            views = training.inputs(batch, training.step)
        rounds.append(watch.times | _parts_of_a_step(training, views))
    return {name: statistics.median(r[name] for r in rounds) for name in rounds[0]}


def _parts_of_a_step(training: Training, views: Sequence[Tensor]) -> dict[str, float]:
    watch, method, optimizer = _Watch(), training.task, training.optimizer
    assert isinstance(method, XMoCo | MoCoV2Plus)
    at = training.stepper.values.at(training.clock(training.step))
    device = training.fabric.device.type
    precision = torch.autocast(device, torch.bfloat16, enabled=device == "cuda")
    with precision, watch("encoder, forward"):
        q_s, q_t = method.run.encode(method.encoder, views)
    with precision, watch("momentum encoder"):
        k_s, k_t = method.run.encode_keys(method.momentum_encoder, views)
    with watch("loss"):
        loss, _ = method.loss(q_s, q_t, k_s, k_t)
    with watch("backward"):
        loss.backward()
    with watch("optimiser"):
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    with watch("momentum update"):
        method.after_update(at)
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
