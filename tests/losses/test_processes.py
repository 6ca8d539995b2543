"""Processes with a share of a batch each compute what one computes with the whole.

One group of two and one of four run every scenario and leave what they found in files: starting
them is what takes time.
"""

from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close

from helpers import run_group
from xmoco import distributed
from xmoco.distributed import consolidate_state_dict
from xmoco.losses import MoCoLoss, XMoCoLoss
from xmoco.losses.bank import SharedRing
from xmoco.losses.barlowtwins import cross_correlation, redundancy_reduction
from xmoco.losses.ntxent import nt_xent
from xmoco.losses.sinkhorn import column_scaling
from xmoco.losses.soft_labels import History
from xmoco.losses.swav import codes
from xmoco.losses.vicreg import variance_and_covariance
from xmoco.nn.batchnorm import keys_in_other_processes

D, K, BATCH, STEPS = 6, 9, 4, 6  # after two steps of 4 images the history of 9 is not full yet
HALF = 4  # steps, after which it is, and has begun to forget
KINDS = ["queries", "probabilities", "none", "moco"]


def build(kind: str) -> MoCoLoss | XMoCoLoss:
    torch.manual_seed(0)
    if kind == "moco":
        return MoCoLoss(D, K).double()
    return XMoCoLoss(D, K, history=cast(History, kind)).double()


def batches() -> list[Tensor]:
    """Per step an image's q_s, q_t, k_s, k_t, of shape (4, BATCH, D)."""
    generator = torch.Generator().manual_seed(1)
    return [
        F.normalize(torch.randn(4, BATCH, D, dtype=torch.float64, generator=generator), dim=2)
        for _ in range(STEPS)
    ]


def share_of(rank: int, world: int) -> slice:
    return slice(rank * BATCH // world, (rank + 1) * BATCH // world)


def play(
    kind: str,
    rank: int,
    world: int,
    steps: slice = slice(None),
    state: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Some steps of this process, from a state or the beginning: its terms, its queries' gradients,
    and the state at the end, which the first process has."""
    criterion = build(kind)
    if state is not None:
        criterion.load_state_dict(state)
    terms, gradients = [], []
    for features in batches()[steps]:
        q_s, q_t, k_s, k_t = features[:, share_of(rank, world)].clone()
        queries = torch.stack([q_s, q_t]).requires_grad_()
        loss, found = criterion(*queries, k_s, k_t)
        loss.backward()
        assert queries.grad is not None
        terms.append(torch.stack([loss.detach(), *found.values()]).detach())
        gradients.append(queries.grad)
    consolidate_state_dict(criterion)
    return {
        "terms": torch.stack(terms),
        "gradients": torch.stack(gradients),
        "banks": criterion.banks.state_dict(),
        "state": criterion.state_dict() if rank == 0 else None,
        "held": sum(len(part.source) for part in criterion.modules() if type(part) is SharedRing),
    }


def contrast_views(rank: int, world: int) -> dict[str, Tensor]:
    """NT-Xent of this process's share of a batch; the gradients of its views and of an encoder."""
    share = share_of(rank, world)
    views, images = batches()[0][:2, share].clone(), batches()[1][:2, share]
    encoder = torch.linspace(-1, 1, D * D, dtype=torch.float64).sin().view(D, D).requires_grad_()
    views.requires_grad_()
    loss = nt_xent(*views, 0.5)
    (loss + nt_xent(*F.normalize(images @ encoder, dim=2), 0.5)).backward()
    assert views.grad is not None
    assert encoder.grad is not None
    return {"loss": loss.detach(), "gradients": views.grad, "encoder": encoder.grad}


def redundancies(rank: int, world: int) -> dict[str, Tensor]:
    """Barlow Twins' and VICReg's terms of this process's share; the gradients of its features."""
    z = batches()[0][:2, share_of(rank, world)].clone().requires_grad_()
    terms = [*redundancy_reduction(cross_correlation(*z)), *variance_and_covariance(*z)]
    gradients = torch.autograd.grad(terms[0] + 2 * terms[1] + 3 * terms[2] + 4 * terms[3], z)
    return {"terms": torch.stack(terms).detach(), "gradients": gradients[0]}


def balance_codes(rank: int, world: int) -> dict[str, Tensor]:
    """SwAV's codes of this process's share, without a queue, with an idle one, and with one."""
    share = share_of(rank, world)
    scores, past, *_ = batches()[0]
    options: dict[str, Any] = {"epsilon": 0.1, "iterations": 3}
    queued = distributed.own_share(past)
    return {"alone": codes(scores[share], **options)} | {
        name: codes(scores[share], past_scores=queued, past_counts=torch.tensor(counts), **options)
        for name, counts in (("idle", False), ("queue", True))
    }


class WitnessOfItsBatch(nn.Module):
    """Tells an image by its first column, and by the second who was encoded with it."""

    def forward(self, images: Tensor) -> Tensor:
        return torch.stack([images[:, 0], images[:, 0].sum().expand(len(images))], dim=1)


def kernel() -> Tensor:
    """Of Sinkhorn's, with values beyond the range of exponentials; of a column the first process
    has nothing."""
    rows = 300 * torch.randn(12, 7, generator=torch.Generator().manual_seed(3)).double()
    rows[:3, 2] = -torch.inf
    return rows


def ring_of(rank: int, world: int) -> dict[str, Any]:
    """A ring through batches of several sizes: what is held here, and what comes together."""
    ring, number = SharedRing(7, 1), 0
    for count in (1, 2, 2, 3, 1):
        rows = torch.arange(number, number + world * count)[:, None].float()
        own = rows[rank * count : (rank + 1) * count]
        ring.enqueue(own, -own)
        number += world * count
    held = ring.source[ring.counts, 0]
    unasked = ""
    if world > 1:
        try:
            ring.state_dict()
        except RuntimeError as error:
            unasked = str(error)
    ring.consolidate()
    state = ring.state_dict() if rank == 0 else None
    return {"held": held, "slots": ring.slots[ring.counts], "state": state, "unasked": unasked}


def process(rank: int, world: int, folder: Path, states: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder / 'meeting'}", rank=rank, world_size=world
    )
    images = 2.0 ** torch.arange(2 * 4)[:, None]
    count = len(images) // world
    own = images[rank * count : (rank + 1) * count]
    rows = torch.tensor([[0.0, 900.0, -torch.inf], [1.0, -900.0, 5.0]])[rank % 2 :][:1]
    found = {kind: play(kind, rank, world) for kind in KINDS} | {
        "resumed": {
            kind: play(kind, rank, world, slice(HALF, None), state)
            for kind, state in states.items()
        },
        "keys": keys_in_other_processes(WitnessOfItsBatch(), own),
        "stacked keys": keys_in_other_processes(WitnessOfItsBatch(), torch.cat([own, 1 / own]), 2),
        "nt_xent": contrast_views(rank, world),
        "codes": balance_codes(rank, world),
        "redundancies": redundancies(rank, world),
        "scaling": column_scaling(kernel()[rank * 12 // world : (rank + 1) * 12 // world], 4),
        "many rounds": column_scaling(kernel()[rank * 12 // world : (rank + 1) * 12 // world], 30),
        "ring": ring_of(rank, world),
        "gathered": distributed.gather(torch.tensor([[rank, 10]])),
        "summed": distributed.logsumexp_over_rows(rows),
        "share": distributed.own_share(torch.arange(5)),
    }
    if rank == 0:  # or it would wait for the others, which are not asked
        with distributed.alone():
            found["alone"] = play("queries", 0, 1)["terms"]
    torch.save(found, folder / f"{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def states() -> dict[str, Any]:
    """Where one process is after some steps."""
    return {kind: play(kind, 0, 1, slice(HALF))["state"] for kind in KINDS}


@pytest.fixture(scope="module", params=[2, 4])
def all_of(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, states: dict[str, Any]
) -> list[dict[str, Any]]:
    """What the processes of a group found."""
    folder = tmp_path_factory.mktemp("processes")
    run_group(request.param, process, request.param, folder, states)
    return [torch.load(folder / f"{rank}.pt") for rank in range(request.param)]


Found = list[dict[str, Any]]


def test_a_process_may_be_alone_for_a_while(all_of: Found) -> None:
    assert torch.equal(all_of[0]["alone"], play("queries", 0, 1)["terms"])
    assert distributed.processes() == 1


@pytest.mark.parametrize("kind", KINDS)
def test_banks_and_history_are_those_of_one_process(all_of: Found, kind: str) -> None:
    expected = play(kind, 0, 1)
    state = all_of[0][kind]["state"]
    assert state.keys() == expected["state"].keys()
    for name, value in expected["state"].items():
        if kind == "probabilities" and name.startswith("soft_labels.history"):
            assert_close(state[name], value)  # products of fewer rows round
        else:
            assert torch.equal(state[name], value), name
    for found in all_of:
        for name, value in expected["banks"].items():
            assert torch.equal(found[kind]["banks"][name], value), name


@pytest.mark.parametrize("kind", KINDS)
def test_a_process_holds_its_share_of_the_history(all_of: Found, kind: str) -> None:
    """And room for a batch, since not all forget at the same moment."""
    room = K // len(all_of) + BATCH // len(all_of) if kind in ("queries", "probabilities") else 0
    assert [found[kind]["held"] for found in all_of] == [room] * len(all_of)


@pytest.mark.parametrize("begun", ["in as many", "in one"])
@pytest.mark.parametrize("kind", KINDS)
def test_terms_and_gradients_average_to_those_of_one_process(
    all_of: Found, kind: str, begun: str
) -> None:
    """As DistributedDataParallel averages: a rank's gradient counts as its share."""
    expected, found = play(kind, 0, 1), [found[kind] for found in all_of]
    if begun == "in one":
        expected = {name: expected[name][HALF:] for name in ("terms", "gradients")}
        found = [found["resumed"][kind] for found in all_of]
    world = len(all_of)
    terms = torch.stack([one["terms"] for one in found]).mean(dim=0)
    assert_close(terms, expected["terms"], rtol=0, atol=1e-9)
    gradients = torch.cat([one["gradients"] for one in found], dim=2) / world
    assert_close(gradients, expected["gradients"], rtol=0, atol=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_one_process_goes_on_where_several_were(all_of: Found, kind: str) -> None:
    ended, expected = all_of[0][kind]["state"], play(kind, 0, 1)["state"]
    once_more = slice(0, 2)
    found = play(kind, 0, 1, once_more, ended)["terms"]
    assert_close(found, play(kind, 0, 1, once_more, expected)["terms"], rtol=0, atol=1e-9)


def test_labels_are_balanced_over_all(all_of: Found) -> None:
    """Were each process to balance alone, its label terms would be others."""
    q_s, q_t, k_s, k_t = batches()[0][:, share_of(0, len(all_of))]
    _, alone = build("none")(q_s, q_t, k_s, k_t)
    _, labels_source, *_ = all_of[0]["none"]["terms"][0]
    assert not torch.isclose(labels_source, alone["labels_source"], rtol=1e-3)


def test_views_meet_those_of_all_and_gradients_flow_back_to_all(all_of: Found) -> None:
    """As DistributedDataParallel averages: a rank's gradient counts as its share."""
    expected, found = contrast_views(0, 1), [found["nt_xent"] for found in all_of]
    losses = torch.stack([one["loss"] for one in found])
    assert_close(losses.mean(), expected["loss"], rtol=0, atol=1e-12)
    gradients = torch.cat([one["gradients"] for one in found], dim=1) / len(all_of)
    assert_close(gradients, expected["gradients"], rtol=0, atol=1e-12)
    assert_close(torch.stack([one["encoder"] for one in found]).mean(dim=0), expected["encoder"])


def test_correlations_are_of_all_and_gradients_flow_back_to_all(all_of: Found) -> None:
    """Every process has the whole loss; as gradients are averaged, each counts as its share."""
    expected = redundancies(0, 1)
    for found in all_of:
        assert_close(found["redundancies"]["terms"], expected["terms"], rtol=0, atol=1e-12)
    gradients = [found["redundancies"]["gradients"] for found in all_of]
    whole = torch.cat(gradients, dim=1) / len(all_of)
    assert_close(whole, expected["gradients"], rtol=0, atol=1e-12)


@pytest.mark.parametrize("queue", ["alone", "idle", "queue"])
def test_codes_are_balanced_over_all(all_of: Found, queue: str) -> None:
    expected = balance_codes(0, 1)
    found = torch.cat([found["codes"][queue] for found in all_of])
    assert_close(found, expected[queue], rtol=0, atol=1e-12)
    assert_close(expected["idle"], expected["alone"])
    assert not torch.allclose(expected["queue"], expected["alone"], rtol=1e-3)


@pytest.mark.parametrize(("rounds", "iterations"), [("scaling", 4), ("many rounds", 30)])
def test_samples_of_all_are_balanced_as_one(all_of: Found, rounds: str, iterations: int) -> None:
    for found in all_of:
        assert torch.equal(found[rounds], all_of[0][rounds])
    assert_close(all_of[0][rounds], column_scaling(kernel(), iterations))


def test_a_ring_of_several_is_the_ring_of_one(all_of: Found) -> None:
    """Batches of all sizes, of which the largest come late: who holds a row does not matter."""
    world, newest = len(all_of), 9 * len(all_of)
    kept = torch.arange(newest - 7, newest).float()
    held = torch.cat([found["ring"]["held"] for found in all_of])
    assert torch.equal(held.sort().values, kept)
    slots = torch.cat([found["ring"]["slots"] for found in all_of])
    assert torch.equal(slots.float(), held % 7)
    state = all_of[0]["ring"]["state"]
    assert torch.equal(state["source"][(kept % 7).long(), 0], kept)
    assert torch.equal(state["target"], -state["source"])
    assert state["_extra_state"] == newest
    assert [found["ring"]["state"] for found in all_of[1:]] == [None] * (world - 1)
    assert all("consolidate_state_dict" in found["ring"]["unasked"] for found in all_of)


def test_keys_come_back_in_order_from_another_process(all_of: Found) -> None:
    images, world = 2.0 ** torch.arange(8), len(all_of)
    company = torch.stack([images[rank::world].sum() for rank in range(world)])
    count = len(images) // world
    for rank, found in enumerate(all_of):
        own = slice(rank * count, (rank + 1) * count)
        assert torch.equal(found["keys"][:, 0], images[own])
        assert torch.equal(found["keys"][:, 1], company.repeat(count)[own])


def test_stacked_views_travel_together(all_of: Found) -> None:
    images, world = 2.0 ** torch.arange(8), len(all_of)
    both = torch.stack([images, 1 / images])
    company = torch.stack([both[:, rank::world].sum() for rank in range(world)])
    count = len(images) // world
    for rank, found in enumerate(all_of):
        own = slice(rank * count, (rank + 1) * count)
        assert torch.equal(found["stacked keys"][:, 0], both[:, own].flatten())
        assert_close(found["stacked keys"][:, 1], company.repeat(count)[own].repeat(2))


def test_what_processes_tell_each_other(all_of: Found) -> None:
    world = len(all_of)
    for rank, found in enumerate(all_of):
        assert torch.equal(found["gathered"], torch.tensor([[other, 10] for other in range(world)]))
        twice = torch.tensor(world / 2).log()
        assert_close(found["summed"], torch.tensor([1.31326169, 900.0, 5.0]) + twice)
        assert torch.equal(found["share"], torch.arange(5)[rank::world])


def test_one_process_talks_to_itself() -> None:
    rows = torch.randn(4, 3, requires_grad=True)
    assert distributed.processes() == 1
    assert distributed.rank() == 0
    assert torch.equal(distributed.gather(rows), rows)
    assert torch.equal(distributed.exchange(rows, [4], [4]), rows)
    assert not distributed.gather(rows).requires_grad
    assert torch.equal(distributed.own_share(rows), rows)
    assert_close(distributed.logsumexp_over_rows(rows), rows.detach().logsumexp(dim=0))
    keys = keys_in_other_processes(WitnessOfItsBatch(), torch.arange(4.0)[:, None])
    assert torch.equal(keys[:, 0], torch.arange(4.0))
