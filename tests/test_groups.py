"""Two and four CPU processes train as one: number by number, and counted byte by byte.

Where values are compared batch norm is left out, whose statistics belong to a process. One group of
two and one of four do everything, and the latter goes on where the former stopped.
"""

import math
import os
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from helpers import be_process, free_port, make_images, run_group, write_recipe
from xmoco.config import Config, DataConfig
from xmoco.data import open_images, shards, trees
from xmoco.data.batches import epoch_order
from xmoco.distributed import consolidate_state_dict
from xmoco.errors import UserError
from xmoco.evaluate.monitor import Monitor
from xmoco.methods import Method, build_method
from xmoco.pretraining import prepare_training
from xmoco.settings import load_config
from xmoco.train.callback import Callback
from xmoco.train.engine import build_fabric
from xmoco.train.loop import Training
from xmoco.train.run_folder import RunFolder

SWAV = (
    "method=swav prototypes=8 freeze_prototypes_epochs=0.25 queue_length=50 queue_from_epoch=0 "
    "local_crops=2 local_size=8"
)
KINDS = {
    "queries": "history=queries",
    "probabilities": "history=probabilities",
    "in two parts": "accumulate=2",
    "simclr": "method=simclr",
    "swav": SWAV,
    "small views": "weak_keys=true local_crops=2 local_size=8",
}
GROUPS = {2: list(KINDS), 4: ["queries", "in two parts", "swav"]}
"""What each group plays. Four processes on two cores are slow."""
RINGS = {
    **{"queries": 4, "probabilities": 4, "in two parts": 4, "simclr": 0, "swav": 2},
    "small views": 4,
}
"""Tensors that a method remembers past batches in."""
CHAIN = {
    "without norms": "",
    "plain": "batch_norm=plain",
    "split": "batch_norm=split batch_norm_groups=2",
    "shuffled": "batch_norm=shuffled",
}
"""Runs that two begin, four go on with and, unless keys are shuffled, one ends."""
STOPS = (3, 6, 8)
TRAFFIC = {
    "queries": "",
    "probabilities": "history=probabilities",
    "in two parts": "accumulate=2",
    "bf16": "precision=bf16",
    "swav": f"{SWAV} batch_norm=plain queue_length=48",
}
COUNTED = {2: list(TRAFFIC), 4: ["queries", "swav"]}
BATCH, SIDE, WIDTH, BANK = 16, 16, 16, 48


def without_batch_norm(module: nn.Module) -> None:
    for name, child in module.named_children():
        if isinstance(child, nn.BatchNorm1d | nn.BatchNorm2d):
            setattr(module, name, nn.Identity())
        else:
            without_batch_norm(child)


def built(config: Config) -> Method:
    method = build_method(config)
    without_batch_norm(method)
    return method


def settings(folder: Path, changes: str, devices: int) -> Config:
    return load_config(
        folder / "fast.yaml", [*changes.split(), f"devices={devices}", "readers=1", "device=cpu"]
    )


def new_training(config: Config, run: Path, build: Any = built) -> Training:
    fabric = build_fabric(config.run)
    fabric.launch()
    images = open_images(config.data, "train")
    assert images is not None
    run.mkdir(parents=True, exist_ok=True)
    return prepare_training(config, fabric, images, RunFolder(run), build)


class Watching(Callback):
    """Notes which images every step shows."""

    def __init__(self, training: Training) -> None:
        self.shown: list[torch.Tensor] = []
        inputs = training.inputs

        def watched(batch: Any, step: int) -> Any:
            self.shown.append(batch.indices)
            return inputs(batch, step)

        training.inputs = watched  # type: ignore[method-assign]


def play(folder: Path, kind: str, world: int) -> dict[str, Any]:
    """The first step by hand, for its gradients; then a whole run of 8 steps by the loop."""
    config = settings(folder, KINDS[kind], world)
    run = folder / str(world) / kind
    training = new_training(config, run)
    inputs = training.inputs(next(training.batches.from_step(0)), 0)
    first_part = [view.chunk(training.plan.accumulate)[0] for view in inputs]
    step = training.stepper.model(first_part, training.stepper.values.at(training.clock(0)))
    training.fabric.backward(step.loss)
    encoder = training.task.encoder
    found = {
        "terms": torch.stack([step.loss, *step.terms.values()]).detach(),
        "gradients": {name: p.grad.clone() for name, p in encoder.named_parameters()},
        "rings": rings(training),
    }
    training = new_training(config, run)
    watching = Watching(training)
    training.train(watching)
    return found | {
        "trained": {name: p.detach() for name, p in training.task.named_parameters()},
        "trained rings": rings(training),
        "rows": torch.from_numpy(training.batches.rows),
        "shown": watching.shown,
    }


def rings(training: Training) -> dict[str, torch.Tensor]:
    """Both banks and the history or a queue, as the first process has them."""
    consolidate_state_dict(training.task)
    if not training.fabric.is_global_zero:
        return {}
    return {
        name: value.clone()
        for name, value in training.task.state_dict().items()
        if name.endswith((".source", ".target"))
    }


def go_on(folder: Path, name: str, world: int, first: int, last: int) -> list[torch.Tensor]:
    """Take the steps from ``first`` to ``last`` of a run that others may have begun."""
    config = settings(folder, CHAIN[name], world)
    build = built if name == "without norms" else build_method
    training = new_training(config, folder / "chain" / name, build)
    assert training.restore() == (first > 0)
    assert training.step == first
    watching = Watching(training)
    stream = training.batches.from_step(first)
    for _ in range(first, last):
        training.advance(stream)
    stream.close()
    training.save()
    training.fabric.barrier()
    return watching.shown


def judge(folder: Path, world: int) -> dict[str, float]:
    """What the monitor says; other processes than the first have other running statistics."""
    config = settings(folder, "", world)
    training = new_training(config, folder / str(world) / "judged", build_method)
    assert isinstance(training.task, Method)
    backbone = training.task.encoder.backbone
    for buffer in backbone.buffers():
        buffer += training.fabric.global_rank
    train, test = (open_images(config.data, split) for split in ("train", "test"))
    assert train is not None
    found = {}
    for name, other in (("split", test), ("leave one out", None)):
        monitor = Monitor(config, "work", train, other, torch.device("cpu"))
        found[name] = monitor.initial(backbone).value
        found[f"{name}, raw"] = monitor.raw_pixels().value
    return found


def traffic(folder: Path, name: str, world: int) -> dict[str, float]:
    """Bytes that this process sends in a step when all memories are full."""
    sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
    from traffic import Traffic

    changes = f"batch_norm=shuffled bank_length={BANK} {TRAFFIC[name]}"
    if "swav" in changes:
        changes = TRAFFIC[name]
    training = new_training(
        settings(folder, changes, world), folder / str(world) / f"counted {name}", build_method
    )
    stream = training.batches.from_step(0)
    for _ in range(5):
        training.advance(stream)
    with Traffic() as counted:
        training.advance(stream)
    stream.close()
    learned = sum(p.numel() for p in training.task.parameters() if p.requires_grad)
    return {"bytes": counted.bytes, "learned": learned}


def listing(folder: Path) -> dict[str, Any]:
    """What a process finds in a folder, an archive, shards and a broken archive; who looked."""
    looked = []

    def watched(function: Any) -> Any:
        def watching(*given: Any) -> Any:
            looked.append(function.__name__)
            return function(*given)

        return watching

    names = {"images": 128, "images.tar": 4, "shards": 4}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        patch.setattr(trees, "_files_below", watched(trees._files_below))
        patch.setattr(trees, "_places", watched(trees._places))
        patch.setattr(shards, "scanned", watched(shards.scanned))
        found = {
            name: open_images(DataConfig(source=str(folder / name)), "train") for name in names
        }
        try:
            open_images(DataConfig(source=str(folder / "broken.tar")), "train")
            mistake = ""
        except UserError as error:
            mistake = str(error)
    return {
        "looked": looked,
        "mistake": mistake,
        "found": {
            name: [images.where(n) for n in range(len(images))]
            for name, images in found.items()
            if images is not None
        },
    }


def process(rank: int, world: int, folder: Path, port: int) -> None:
    be_process(rank, port)
    build_fabric(settings(folder, "", world).run).launch()
    found = {
        "listing": listing(folder),
        "played": {kind: play(folder, kind, world) for kind in GROUPS[world]},
        "chain": {name: go_on(folder, name, world, *STEPS_OF[world]) for name in CHAIN},
        "judged": judge(folder, world),
        "traffic": {name: traffic(folder, name, world) for name in COUNTED[world]},
    }
    torch.save(found, folder / f"{world}-{rank}.pt")
    torch.distributed.destroy_process_group()


STEPS_OF = {2: (0, STOPS[0]), 4: (STOPS[0], STOPS[1]), 1: (STOPS[1], STOPS[2])}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("groups")
    make_images(folder / "images" / "train")
    make_images(folder / "images" / "test", each=9)
    # 8 steps of 16 images: the history of 50 joins at the fifth, and rings wrap around.
    method = {"bank_length": 50, "key_momentum": 0.9}
    write_recipe(folder / "fast.yaml", folder / "images", train={"epochs": 1}, method=method)
    (folder / "shards").mkdir()
    pictures = sorted((folder / "images" / "train").rglob("*.png"))[:4]
    for archive in (folder / "images.tar", folder / "shards" / "0.tar", folder / "broken.tar"):
        with tarfile.open(archive, "w") as file:
            for picture in pictures:
                file.add(picture, picture.name)
    os.truncate(folder / "broken.tar", 1000)
    return folder


@pytest.fixture(scope="module")
def groups(place: Path) -> dict[int, list[dict[str, Any]]]:
    """What every process of every group found."""
    for world in GROUPS:
        run_group(world, process, world, place, free_port())
    return {
        world: [torch.load(place / f"{world}-{rank}.pt") for rank in range(world)]
        for world in GROUPS
    }


@pytest.fixture(scope="module")
def alone(place: Path) -> dict[str, dict[str, Any]]:
    return {kind: play(place, kind, 1) for kind in KINDS}


PLAYED = [(world, kind) for world, kinds in GROUPS.items() for kind in kinds]


def of(groups: Any, world: int, kind: str) -> list[dict[str, Any]]:
    return [found["played"][kind] for found in groups[world]]


@pytest.mark.parametrize(("world", "kind"), PLAYED)
def test_the_first_step_is_that_of_one_process(
    groups: Any, alone: Any, world: int, kind: str
) -> None:
    first, *others = found = of(groups, world, kind)
    terms = torch.stack([one["terms"] for one in found]).mean(dim=0)
    assert_close(terms, alone[kind]["terms"], rtol=0, atol=1e-5)
    assert not torch.equal(first["terms"], others[0]["terms"])  # each has its own images
    gradients = alone[kind]["gradients"]
    assert sum(gradient.norm() for gradient in gradients.values()) > 0.1
    for name, gradient in gradients.items():
        for other in others:
            assert torch.equal(first["gradients"][name], other["gradients"][name])
        assert_close(first["gradients"][name], gradient, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("world", "kind"), PLAYED)
@pytest.mark.parametrize("when", ["rings", "trained rings"])
def test_banks_history_and_queue_are_those_of_one_process(
    groups: Any, alone: Any, world: int, kind: str, when: str
) -> None:
    found, expected = of(groups, world, kind)[0][when], alone[kind][when]
    assert len(expected) == RINGS[kind]
    assert found.keys() == expected.keys()
    for name, ring in expected.items():
        assert_close(found[name], ring, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(("world", "kind"), PLAYED)
def test_a_whole_run_is_that_of_one_process(groups: Any, alone: Any, world: int, kind: str) -> None:
    first, *others = of(groups, world, kind)
    for name, expected in alone[kind]["trained"].items():
        for other in others:
            assert torch.equal(first["trained"][name], other["trained"][name])
        assert_close(first["trained"][name], expected, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(("world", "kind"), PLAYED)
def test_images_come_in_the_order_of_one_process(
    groups: Any, alone: Any, world: int, kind: str
) -> None:
    """And each in one process only."""
    order = epoch_order(128, seed=0, epoch=0)
    assert torch.equal(torch.cat(alone[kind]["shown"]), order)
    found = of(groups, world, kind)
    assert torch.equal(torch.cat([one["rows"] for one in found]).sort().values, torch.arange(BATCH))
    for one in found:
        for step, shown in enumerate(one["shown"]):
            assert torch.equal(shown, order[step * BATCH + one["rows"]])


@pytest.mark.parametrize("name", CHAIN)
def test_a_run_goes_on_with_the_same_images_in_other_numbers_of_processes(
    groups: Any, place: Path, name: str
) -> None:
    order = epoch_order(128, seed=0, epoch=0)
    for world in GROUPS:
        first, last = STEPS_OF[world]
        parts = [torch.stack(found["chain"][name]) for found in groups[world]]
        assert torch.equal(
            torch.cat(parts, dim=1), order[first * BATCH : last * BATCH].view(-1, BATCH)
        )
    if name != "shuffled":
        ended = go_on(place, name, 1, *STEPS_OF[1])
        assert torch.equal(torch.cat(ended), order[STOPS[1] * BATCH : STOPS[2] * BATCH])


def test_two_then_four_then_one_train_as_one(groups: Any, alone: Any, place: Path) -> None:
    """After the test above, whose last stretch is this one's."""
    training = new_training(settings(place, "", 1), place / "chain" / "without norms")
    assert training.restore()
    if training.step < STOPS[2]:
        go_on(place, "without norms", 1, *STEPS_OF[1])
        assert training.restore()
    for name, expected in alone["queries"]["trained"].items():
        found = dict(training.task.named_parameters())[name]
        assert_close(found.detach(), expected, rtol=1e-3, atol=1e-5)
    for name, ring in rings(training).items():
        assert_close(ring, alone["queries"]["trained rings"][name], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("world", GROUPS)
def test_one_process_lists_for_all_of_its_machine(groups: Any, place: Path, world: int) -> None:
    first, *others = (found["listing"] for found in groups[world])
    expected = listing(place)
    indexed = world == 2  # the first to come: others find the index
    looked = ["_files_below", "_places", *["_files_below"] * 2, *["scanned"] * indexed, "_places"]
    assert first["looked"] == looked
    assert "broken.tar is neither a folder nor a whole tar archive" in expected["mistake"]
    for other in (first, *others):
        assert other["found"] == expected["found"]
        assert other["mistake"] == expected["mistake"]
    assert [other["looked"] for other in others] == [[]] * (world - 1)


@pytest.mark.parametrize("world", GROUPS)
def test_the_monitor_of_all_says_what_that_of_one_does(
    groups: Any, place: Path, world: int
) -> None:
    expected = judge(place, 1)
    assert len(set(expected.values())) > 1
    for found in groups[world]:
        assert found["judged"] == expected


@pytest.mark.parametrize(
    ("world", "name"), [(world, name) for world, names in COUNTED.items() for name in names]
)
def test_nothing_is_sent_but_what_must_be(groups: Any, world: int, name: str) -> None:
    """Gradients; of shuffled keys the images there and the keys back; keys for the banks; one sum
    for each column of Sinkhorn's, side and round. Each by the way that moves least."""
    share, rounds = BATCH // world, 3
    others = (world - 1) / world
    number = 4  # bytes
    for found in groups[world]:
        gradients = 2 * number * found["traffic"][name]["learned"] * others
        pixels = 2 * share * 3 * SIDE**2 * (2 if name == "bf16" else number) * others
        returned = 2 * share * WIDTH * number * others
        banks = 2 * share * WIDTH * number * (world - 1)
        sums = rounds * 2 * (2 * BANK * number) * others
        expected = gradients + pixels + returned + banks + sums
        if name == "in two parts":
            expected += sums
        if name == "swav":  # which has no keys, and a queue that stays where it is
            expected = gradients + rounds * 2 * (2 * 8 * number) * others
        assert math.isclose(found["traffic"][name]["bytes"], expected), (world, name)
