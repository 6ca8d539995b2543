"""How steps scale over processes: measured here, counted in bytes, and predicted for clusters.

    python benchmarks/scaling.py                              # on this machine's CPU or GPUs
    python benchmarks/scaling.py --processes 1 2 4 8 --recipe imagenet --batch 512
    python benchmarks/scaling.py --predict-only               # from the recorded speed of one GPU

Weak scaling gives every process the same number of images, strong scaling shares one batch out.
Each run counts what a process sends in a step (``traffic.py``) and checks that against the model:

    gradients   2·4·P·(W−1)/W      summed over W processes, while the backward pass goes on
    images      2·n·3·s²·b·(W−1)/W of the two views, s px wide, b bytes a number, to be shuffled
    keys        2·n·d·4·(W−1)/W    back from there, and 2·n·d·4·(W−1) for the banks
    sums        2·2·K·4·(W−1)/W    for each of Sinkhorn's rounds

A step then takes the time of its n images on one device, plus bytes over bandwidth and latencies of
what has to be waited for: images, keys and sums, and of the gradients what does not fit behind the
backward pass, which is half of a step (of f forward and backward, and of g forward). On the machine
at hand, bandwidth and latency are measured, and so prediction and measurement are compared. For
clusters they are stated: see ``NETWORKS``. The records go to benchmarks/results.
"""

import argparse
import json
import math
import os
import socket
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from pages.common import AnyRecord
from recipe import RESULTS
from traffic import Traffic
from xmoco.config import Config
from xmoco.config.methods import XMoCoConfig
from xmoco.data import ArrayImages
from xmoco.methods import Method, build_method
from xmoco.pretraining import prepare_training
from xmoco.records import Record, append_records, read_records
from xmoco.settings import load_config
from xmoco.train.engine import build_fabric, choose_device
from xmoco.train.run_folder import RunFolder

WARM_UP, STEPS = 4, 12
NUMBER = 4
"""Bytes of float32."""
BACKWARD = 0.5
"""Share of a step, behind which gradients travel."""
GPUS_PER_MACHINE = 8
CLUSTERS = (8, 64, 512)


@dataclass(frozen=True)
class Network:
    """What a process has of it."""

    bandwidth: float  # bytes a second, each way
    latency: float  # seconds of a collective operation among two; more take log2 as many

    def seconds(self, sent: float, calls: int, world: int) -> float:
        return sent / self.bandwidth + calls * self.latency * math.log2(world)


NETWORKS = {
    "within a machine": Network(360e9, 10e-6),  # NVLink 4: 450 GB/s a GPU, of which 80 %
    "between machines": Network(40e9, 15e-6),  # InfiniBand NDR: 400 Gbit/s a GPU, of which 80 %
}


@dataclass(frozen=True)
class Sizes:
    """All that the traffic of a step depends on."""

    batch: int
    world: int
    parameters: int
    side: int
    width: int
    bank: int
    rounds: int
    pixel_bytes: int

    @classmethod
    def of(cls, config: Config, world: int, parameters: int, bf16: bool) -> "Sizes":
        method = config.method
        assert isinstance(method, XMoCoConfig)
        return cls(
            config.train.batch,
            world,
            parameters,
            config.input.size,
            config.model.feature_size,
            method.bank_length,
            method.sinkhorn_iterations,
            2 if bf16 else NUMBER,
        )

    def sent(self) -> dict[str, float]:
        """Bytes that a process sends in a step, by what they are."""
        share, others = self.batch / self.world, (self.world - 1) / self.world
        keys = 2 * share * self.width * NUMBER
        # Sums are shared out over whole columns.
        columns = math.ceil(self.bank / self.world) * self.world
        first, later = (2 * 2 * count * NUMBER * others for count in (columns, self.bank))
        return {
            "gradients": 2 * NUMBER * self.parameters * others,
            "images": 2 * share * 3 * self.side**2 * self.pixel_bytes * others,
            "keys": keys * others + keys * (self.world - 1),
            "sums": first + (self.rounds - 1) * later,
        }

    def calls(self) -> int:
        """Collective operations that are waited for: images, keys back, keys to all, sums."""
        return 2 + 2 + 1 + 2 * (self.rounds + 1)


def predicted(compute: float, sizes: Sizes, network: Network) -> float:
    """Seconds of a step, whose images take ``compute`` on one device."""
    if sizes.world == 1:
        return compute
    sent = sizes.sent()
    gradients = network.seconds(sent.pop("gradients"), 1, sizes.world)
    waited = network.seconds(sum(sent.values()), sizes.calls(), sizes.world)
    return compute + waited + max(0.0, gradients - BACKWARD * compute)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--recipe", default="demo")
    parser.add_argument("--batch", type=int, default=128, help="images a step, of strong scaling")
    parser.add_argument("--each", type=int, default=64, help="images a process, of weak scaling")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--predict-only", action="store_true")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    records = predictions(RESULTS)
    if not options.predict_only:
        records = [*measurements(options), *records]
    path = options.results / "scaling.jsonl"
    append_records(path, records)
    table = Table(title="Milliseconds of a step")
    for heading in ("work", "who", "step", "predicted", "sent a step"):
        table.add_column(heading, justify="left" if heading in ("work", "who") else "right")
    for record in records:
        guess = record.protocol.get("predicted_ms")
        table.add_row(
            record.work,
            record.subject,
            f"{record.value:,.1f} ms" if guess is not None else "",
            f"{record.value if guess is None else guess:,.1f} ms",
            f"{record.protocol['sent_mb']:,.2f} MB",
        )
    console = Console()
    console.print(table)
    console.print(f"records in {path}")


# Measured


def measurements(options: argparse.Namespace) -> list[Record]:
    device = choose_device(options.device)
    plans = {
        "strong": dict.fromkeys(options.processes, options.batch),
        "weak": {world: options.each * world for world in options.processes},
    }
    alone: dict[int, float] = {}
    records = []
    for kind, batches in plans.items():
        for world, batch in batches.items():
            share = batch // world
            if share not in alone:
                alone[share] = run(options.recipe, share, 1, device)["seconds"]
            found = (
                run(options.recipe, batch, world, device)
                if world > 1
                else {"seconds": alone[share], "sent": 0.0, "network": None}
            )
            guess = alone[share]
            if world > 1:
                guess = predicted(alone[share], found["sizes"], found["network"])
            protocol = {
                "recipe": options.recipe,
                "batch": batch,
                "processes": world,
                "device": device,
                "predicted_ms": round(1000 * guess, 2),
                "alone_ms": round(1000 * alone[share], 2),
                "sent_mb": round(found["sent"] / 1e6, 4),
                "images_per_second": round(batch / found["seconds"]),
            }
            if found["network"] is not None:
                network = found["network"]
                protocol["bandwidth_mb_per_second"] = round(network.bandwidth / 1e6)
                protocol["latency_us"] = round(1e6 * network.latency)
            who = "1 process" if world == 1 else f"{world} processes"
            work = f"scaling-{kind}-{options.recipe}"
            value = 1000 * found["seconds"]
            records.append(Record("step_ms", value, "ms", who, work, protocol, 0))
    return records


def run(recipe: str, batch: int, world: int, device: str) -> dict[str, Any]:
    """Steps of so many processes together."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(
            process, args=(recipe, batch, world, device, port, Path(folder)), nprocs=world
        )
        found: dict[str, Any] = json.loads((Path(folder) / "found.json").read_text())
    if world > 1:
        found["sizes"] = Sizes(**found["sizes"])
        found["network"] = Network(**found["network"])
    return found


def process(
    rank: int, recipe: str, batch: int, world: int, device: str, port: int, folder: Path
) -> None:
    if device == "cpu":
        torch.set_num_threads(1)
    os.environ |= {
        "LOCAL_RANK": str(rank),
        "NODE_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    norm = ["batch_norm=shuffled"] if world > 1 else []
    settings = [f"batch={batch}", f"devices={world}", f"device={device}", "epochs=1000", *norm]
    config = load_config(recipe, settings)
    fabric = build_fabric(config.run)
    fabric.launch()
    training = prepare_training(config, fabric, noise(config), RunFolder(folder))
    stream = training.batches.from_step(0)
    bank = getattr(config.method, "bank_length", batch)
    for _ in range(WARM_UP + math.ceil(bank / batch)):  # memories are full
        training.advance(stream)
    times = []
    for _ in range(STEPS):
        settle(fabric.device)
        if world > 1:
            dist.barrier()
        started = time.perf_counter()
        training.advance(stream)
        settle(fabric.device)
        times.append(time.perf_counter() - started)
    found: dict[str, Any] = {"seconds": median(times)}
    if world > 1:
        with Traffic() as counted:
            training.advance(stream)
        assert isinstance(training.task, Method)
        learned = sum(p.numel() for p in training.task.parameters() if p.requires_grad)
        sizes = Sizes.of(config, world, learned, bf16=fabric.device.type == "cuda")
        expected = sum(sizes.sent().values())
        assert math.isclose(counted.bytes, expected), (counted.bytes, expected)
        found |= {
            "sent": counted.bytes,
            "sizes": vars(sizes),
            "network": vars(measured_network(fabric.device)),
        }
    stream.close()
    if rank == 0:
        (folder / "found.json").write_text(json.dumps(found))
    if world > 1:
        dist.barrier()
        dist.destroy_process_group()


def noise(config: Config) -> ArrayImages:
    """A few batches of images that need no reading: it is steps that are measured."""
    generator = torch.Generator().manual_seed(0)
    shape = (4 * config.train.batch, 3, config.input.size, config.input.size)
    return ArrayImages("noise", torch.randint(256, shape, generator=generator, dtype=torch.uint8))


def measured_network(device: torch.device) -> Network:
    """Of all processes together, by sums of a single number and of many."""

    def seconds(numbers: int) -> float:
        tensor, times = torch.zeros(numbers, device=device), []
        for _ in range(12):
            dist.barrier()
            started = time.perf_counter()
            dist.all_reduce(tensor)
            settle(device)
            times.append(time.perf_counter() - started)
        return median(times)

    world, many = dist.get_world_size(), 2**22
    latency = seconds(1) / math.log2(world)
    sent = 2 * many * NUMBER * (world - 1) / world
    return Network(sent / max(seconds(many) - seconds(1), 1e-9), latency)


def settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# Predicted


def predictions(results: Path) -> list[Record]:
    """Steps of ResNet-50 at 224 px on clusters, from the recorded speed of one GPU."""
    speeds = [
        record
        for record in read_records(results / "speed.jsonl", AnyRecord)
        if (record.work, record.subject) == ("speed-photographs-resnet50", "xmoco")
        and record.measure == "images_per_second"
    ]
    if not speeds:
        return []
    speed = speeds[-1]
    config = load_config("imagenet")
    with torch.device("meta"):
        encoder = build_method(config).encoder
    parameters = sum(parameter.numel() for parameter in encoder.parameters())
    records = []
    for kind, batch_of in (("strong", lambda _: 4096), ("weak", lambda world: 64 * world)):
        for world in CLUSTERS:
            batch = batch_of(world)
            changed = config.model_copy(
                update={"train": config.train.model_copy(update={"batch": batch})}
            )
            sizes = Sizes.of(changed, world, parameters, bf16=True)
            compute = batch / world / speed.value
            where = "within a machine" if world <= GPUS_PER_MACHINE else "between machines"
            network = NETWORKS[where]
            seconds = predicted(compute, sizes, network)
            sent = sizes.sent()
            protocol: Mapping[str, Any] = {
                "recipe": "imagenet",
                "batch": batch,
                "images_per_gpu": batch // world,
                "speed_of_one": round(speed.value),
                "speed_measured_with": speed.protocol["batch"],
                "bandwidth_gb_per_second": network.bandwidth / 1e9,
                "latency_us": 1e6 * network.latency,
                "sent_mb": round(sum(sent.values()) / 1e6, 2),
                "sent_mb_by_kind": {name: round(value / 1e6, 2) for name, value in sent.items()},
                "compute_ms": round(1000 * compute, 2),
                "images_per_second": round(batch / seconds),
                "of_ideal": round(100 * compute / seconds, 1),
            }
            work = f"scaling-predicted-{kind}-imagenet"
            value, who = 1000 * seconds, f"{world} GPUs"
            records.append(Record("predicted_step_ms", value, "ms", who, work, dict(protocol), 0))
    return records


if __name__ == "__main__":
    main()
