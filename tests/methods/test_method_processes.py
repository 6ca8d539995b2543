"""Two processes with half a batch each take the steps of one with the whole: every method.

Batch norm, whose statistics belong to a process, is left out; whole runs of some methods are in
tests/test_groups.py.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing import assert_close
from toys import BATCH, IDEAS, METHODS, PLAIN, built, trainable, values, views_for

from helpers import run_two
from xmoco.distributed import consolidate_state_dict

STEPS = 4  # memories of 24 are full after two
KINDS = METHODS | {f"{name} with ideas": settings for name, settings in IDEAS.items()}
WHOLE = {"barlowtwins"}
"""Their loss is that of the whole batch in every process; others' is of a process's images."""


def without_batch_norm(module: nn.Module) -> None:
    for name, child in module.named_children():
        if isinstance(child, nn.BatchNorm1d | nn.BatchNorm2d):
            setattr(module, name, nn.Identity())
        else:
            without_batch_norm(child)


def play(name: str, rank: int, world: int) -> dict[str, Any]:
    """The first steps of a method on this process's share of the images."""
    method = built(KINDS[name], PLAIN)
    without_batch_norm(method)
    optimiser = torch.optim.SGD(trainable(method).values(), lr=0.05)
    share = slice(rank * BATCH // world, (rank + 1) * BATCH // world)
    losses = []
    for step in range(STEPS):
        at = values(method, 4 * step)  # an epoch each
        loss = method([view[share] for view in views_for(method, step)], at).loss
        optimiser.zero_grad()
        loss.backward()
        for parameter in trainable(method).values():
            assert parameter.grad is not None
            if world > 1:  # what DistributedDataParallel does
                dist.all_reduce(parameter.grad)
                parameter.grad /= world
        method.before_update(at)
        optimiser.step()
        method.after_update(at)
        losses.append(loss.detach())
    consolidate_state_dict(method)
    return {
        "losses": torch.stack(losses),
        "parameters": {key: value.detach() for key, value in method.named_parameters()},
        "state": method.state_dict() if rank == 0 else None,
    }


def process(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder / 'meeting'}", rank=rank, world_size=2
    )
    torch.save({name: play(name, rank, 2) for name in KINDS}, folder / f"{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("processes")
    run_two(process, folder)
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize("name", KINDS)
def test_steps_are_those_of_one_process(both: list[dict[str, Any]], name: str) -> None:
    first, second, alone = both[0][name], both[1][name], play(name, 0, 1)
    assert_close((first["losses"] + second["losses"]) / 2, alone["losses"], rtol=1e-4, atol=1e-4)
    assert torch.equal(first["losses"], second["losses"]) == (name in WHOLE)
    start = built(KINDS[name], PLAIN).state_dict()
    moved = 0.0
    for key, value in first["parameters"].items():
        assert torch.equal(value, second["parameters"][key]), key
    for key, value in alone["state"].items():
        assert_close(first["state"][key], value, rtol=1e-3, atol=1e-5)
        moved += (value - start[key]).norm() if value.is_floating_point() else 0
    assert moved > 0.1
