"""Two processes with half a batch each compute what one computes with the whole.

One pair of processes runs every scenario and leaves what it found in files: starting them is what
takes time. This module imports no more than they need.
"""

from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close

from xmoco import distributed
from xmoco.losses import MoCoLoss, XMoCoLoss
from xmoco.losses.barlowtwins import cross_correlation, redundancy_reduction
from xmoco.losses.ntxent import nt_xent
from xmoco.losses.soft_labels import History
from xmoco.losses.swav import codes
from xmoco.losses.vicreg import variance_and_covariance
from xmoco.nn.batchnorm import keys_in_other_processes

D, K, BATCH, STEPS = 6, 9, 4, 5  # after two steps of 4 images the history of 9 is not full yet
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


def play(kind: str, rank: int, world: int) -> dict[str, Any]:
    """All steps of this process: its terms, its queries' gradients, and the state at the end."""
    criterion = build(kind)
    share = slice(rank * BATCH // world, (rank + 1) * BATCH // world)
    terms, gradients = [], []
    for features in batches():
        q_s, q_t, k_s, k_t = features[:, share].clone()
        queries = torch.stack([q_s, q_t]).requires_grad_()
        loss, found = criterion(*queries, k_s, k_t)
        loss.backward()
        assert queries.grad is not None
        terms.append(torch.stack([loss.detach(), *found.values()]).detach())
        gradients.append(queries.grad)
    return {
        "terms": torch.stack(terms),
        "gradients": torch.stack(gradients),
        "state": criterion.state_dict(),
    }


def contrast_views(rank: int, world: int) -> dict[str, Tensor]:
    """NT-Xent of this process's share of a batch; the gradients of its views and of an encoder."""
    share = slice(rank * BATCH // world, (rank + 1) * BATCH // world)
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
    share = slice(rank * BATCH // world, (rank + 1) * BATCH // world)
    z = batches()[0][:2, share].clone().requires_grad_()
    terms = [*redundancy_reduction(cross_correlation(*z)), *variance_and_covariance(*z)]
    gradients = torch.autograd.grad(terms[0] + 2 * terms[1] + 3 * terms[2] + 4 * terms[3], z)
    return {"terms": torch.stack(terms).detach(), "gradients": gradients[0]}


def balance_codes(rank: int, world: int) -> dict[str, Tensor]:
    """SwAV's codes of this process's share, without a queue, with an idle one, and with one."""
    share = slice(rank * BATCH // world, (rank + 1) * BATCH // world)
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


def process(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder / 'meeting'}", rank=rank, world_size=2
    )
    images = 2.0 ** torch.arange(8)[:, None]
    rows = torch.tensor([[0.0, 900.0, -torch.inf], [1.0, -900.0, 5.0]])[rank:][:1]
    found = {kind: play(kind, rank, 2) for kind in KINDS} | {
        "keys": keys_in_other_processes(WitnessOfItsBatch(), images[4 * rank : 4 * rank + 4]),
        "nt_xent": contrast_views(rank, 2),
        "codes": balance_codes(rank, 2),
        "redundancies": redundancies(rank, 2),
        "gathered": distributed.gather(torch.tensor([[rank, 10]])),
        "summed": distributed.logsumexp_over_rows(rows),
        "share": distributed.own_share(torch.arange(5)),
    }
    if rank == 0:  # or it would wait for the other, which is not asked
        with distributed.alone():
            found["alone"] = play("queries", 0, 1)["terms"]
    torch.save(found, folder / f"{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("processes")
    torch.multiprocessing.spawn(process, args=(folder,), nprocs=2)
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


def test_a_process_may_be_alone_for_a_while(both: list[dict[str, Any]]) -> None:
    assert torch.equal(both[0]["alone"], play("queries", 0, 1)["terms"])
    assert distributed.processes() == 1


@pytest.mark.parametrize("kind", KINDS)
def test_banks_and_history_are_those_of_one_process(both: list[dict[str, Any]], kind: str) -> None:
    expected = play(kind, 0, 1)["state"]
    for found in both:
        assert found[kind]["state"].keys() == expected.keys()
        for name, value in expected.items():
            if kind == "probabilities" and name.startswith("soft_labels.history"):
                assert_close(found[kind]["state"][name], value)  # products of fewer rows round
            else:
                assert torch.equal(found[kind]["state"][name], value), name
    for name in expected:
        assert torch.equal(both[0][kind]["state"][name], both[1][kind]["state"][name])


@pytest.mark.parametrize("kind", KINDS)
def test_terms_and_gradients_average_to_those_of_one_process(
    both: list[dict[str, Any]], kind: str
) -> None:
    """As DistributedDataParallel averages: a rank's gradient counts half."""
    expected = play(kind, 0, 1)
    first, second = (found[kind] for found in both)
    assert_close((first["terms"] + second["terms"]) / 2, expected["terms"], rtol=0, atol=1e-9)
    gradients = torch.cat([first["gradients"], second["gradients"]], dim=2) / 2
    assert_close(gradients, expected["gradients"], rtol=0, atol=1e-9)


def test_labels_are_balanced_over_both(both: list[dict[str, Any]]) -> None:
    """Were each process to balance alone, its label terms would be others."""
    q_s, q_t, k_s, k_t = batches()[0][:, : BATCH // 2]
    _, alone = build("none")(q_s, q_t, k_s, k_t)
    _, labels_source, *_ = both[0]["none"]["terms"][0]
    assert not torch.isclose(labels_source, alone["labels_source"], rtol=1e-3)


def test_views_meet_those_of_both_and_gradients_flow_back_to_both(
    both: list[dict[str, Any]],
) -> None:
    """As DistributedDataParallel averages: a rank's gradient counts half."""
    expected = contrast_views(0, 1)
    first, second = (found["nt_xent"] for found in both)
    assert_close((first["loss"] + second["loss"]) / 2, expected["loss"], rtol=0, atol=1e-12)
    gradients = torch.cat([first["gradients"], second["gradients"]], dim=1) / 2
    assert_close(gradients, expected["gradients"], rtol=0, atol=1e-12)
    assert_close((first["encoder"] + second["encoder"]) / 2, expected["encoder"])


def test_correlations_are_of_both_and_gradients_flow_back_to_both(
    both: list[dict[str, Any]],
) -> None:
    """Either process has the whole loss; as gradients are averaged, each counts half."""
    expected = redundancies(0, 1)
    for found in both:
        assert_close(found["redundancies"]["terms"], expected["terms"], rtol=0, atol=1e-12)
    gradients = torch.cat([found["redundancies"]["gradients"] for found in both], dim=1) / 2
    assert_close(gradients, expected["gradients"], rtol=0, atol=1e-12)


@pytest.mark.parametrize("queue", ["alone", "idle", "queue"])
def test_codes_are_balanced_over_both(both: list[dict[str, Any]], queue: str) -> None:
    expected = balance_codes(0, 1)
    found = torch.cat([found["codes"][queue] for found in both])
    assert_close(found, expected[queue], rtol=0, atol=1e-12)
    assert_close(expected["idle"], expected["alone"])
    assert not torch.allclose(expected["queue"], expected["alone"], rtol=1e-3)


def test_keys_come_back_in_order_from_another_process(both: list[dict[str, Any]]) -> None:
    images = 2.0 ** torch.arange(8)
    for rank, found in enumerate(both):
        assert torch.equal(found["keys"][:, 0], images[4 * rank : 4 * rank + 4])
        company = [images[0::2].sum(), images[1::2].sum()] * 2
        assert torch.equal(found["keys"][:, 1], torch.stack(company))


def test_what_processes_tell_each_other(both: list[dict[str, Any]]) -> None:
    for rank, found in enumerate(both):
        assert torch.equal(found["gathered"], torch.tensor([[0, 10], [1, 10]]))
        assert_close(found["summed"], torch.tensor([1.31326169, 900.0, 5.0]))
        assert torch.equal(found["share"], torch.arange(5)[rank::2])


def test_one_process_talks_to_itself() -> None:
    rows = torch.randn(4, 3, requires_grad=True)
    assert distributed.processes() == 1
    assert distributed.rank() == 0
    assert torch.equal(distributed.gather(rows), rows)
    assert not distributed.gather(rows).requires_grad
    assert torch.equal(distributed.own_share(rows), rows)
    assert_close(distributed.logsumexp_over_rows(rows), rows.detach().logsumexp(dim=0))
    keys = keys_in_other_processes(WitnessOfItsBatch(), torch.arange(4.0)[:, None])
    assert torch.equal(keys[:, 0], torch.arange(4.0))
