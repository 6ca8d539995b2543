"""The Triton kernel against whole matrices in float64: on CUDA where there is some, else run by
Triton's interpreter on the CPU.

Triton decides at import whether to interpret, so two processes of their own do the work and leave
what they found in files. This module imports no more than they need.
"""

import importlib.metadata
import importlib.util
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close

from xmoco.losses import XMoCoLoss, soft_labels, streamed
from xmoco.losses.metrics import label_metrics, similarity_metrics

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
VERSION = importlib.metadata.version("triton") if importlib.util.find_spec("triton") else None
pytestmark = [
    pytest.mark.gpu(elsewhere=True),
    pytest.mark.skipif(VERSION is None, reason="Triton is not installed"),
    pytest.mark.skipif(
        DEVICE == "cpu" and (VERSION or "") < "3.7" and np.__version__ >= "2.4",
        reason="this Triton's interpreter is older than this numpy",
    ),
]

# A similarity of float16 features errs by this much at the very worst: twice half a unit in the
# last place of every product, and Σ|q·k| ≤ 1 for unit vectors. Typically it is fifty times less.
WORST = 2.0**-10

# rows, columns, features: one tile, whole tiles, a bit more or less, several parts, smaller tiles
SHAPES = [(5, 3, 2), (128, 64, 16), (129, 65, 17), (40, 700, 32), (300, 30, 200), (20, 20, 512)]
SUMS = [(5.0, False), (200.0, True)]  # as for normalisers, and as for the sharpest of kernels


def unit_rows(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return F.normalize(torch.randn(*shape, generator=generator), dim=-1).to(DEVICE)


def operands(rows: int, columns: int, features: int) -> dict[str, Tensor]:
    """Two sides; a quarter of the columns is somebody's own, one has no weight at all."""
    addend = torch.randn(2, columns, generator=torch.Generator().manual_seed(3))
    addend[:, columns // 2] = -torch.inf
    return {
        "rows": unit_rows(2, rows, features, seed=1),
        "columns": unit_rows(2, columns, features, seed=2),
        "row_slots": torch.arange(rows, device=DEVICE) * 2,
        "column_slots": torch.arange(columns, device=DEVICE) // 2,
        "addend": addend.to(DEVICE),
    }


def by_kernel(shape: tuple[int, int, int], scale: float, skip_own: bool) -> Tensor:
    given = operands(*shape)
    parts = streamed._logsumexp(
        streamed._Tiles(given["rows"], given["row_slots"]),
        streamed._Tiles(given["columns"], given["column_slots"]),
        given["addend"],
        scale,
        skip_own,
    )
    return parts.logsumexp(dim=0)


def by_hand(shape: tuple[int, int, int], scale: float, skip_own: bool) -> Tensor:
    given = operands(*shape)
    exponents = scale * given["rows"].double() @ given["columns"].double().mT
    exponents += given["addend"][:, None]
    if skip_own:
        own = given["row_slots"][:, None] == given["column_slots"]
        exponents = exponents.masked_fill(own, -torch.inf)
    return exponents.logsumexp(dim=2)


def play(
    N: int, K: int, d: int, is_plain: bool, share: slice = slice(None), **options: Any
) -> dict[str, Tensor]:
    """Steps until the history has joined and wrapped around: terms, gradients, the last metrics."""
    torch.manual_seed(0)
    criterion = XMoCoLoss(d, K, **options).to(DEVICE)
    criterion.plain = is_plain
    terms, gradients = [], []
    for step in range(2 * K // N + 2):
        images = unit_rows(1, N, d, seed=step)
        features = F.normalize(images + 0.7 * unit_rows(4, N, d, seed=100 + step), dim=-1)
        q_s, q_t, k_s, k_t = features[:, share]
        queries = torch.stack([q_s, q_t]).requires_grad_()
        loss, found = criterion(*queries, k_s, k_t)
        loss.backward()
        assert queries.grad is not None
        terms.append(torch.stack([loss.detach(), *found.values()]).detach())
        gradients.append(queries.grad)
    P_s, P_t = criterion.similarities(q_s, q_t, k_s, k_t)
    Y_s, Y_t = criterion.labels(P_s, P_t)
    assert Y_s is not None
    assert Y_t is not None
    metrics = similarity_metrics(P_s.log_p, P_t.log_p) | label_metrics(Y_s, Y_t)
    return {
        "terms": torch.stack(terms),
        "gradients": torch.stack(gradients),
        "metrics": torch.stack(list(metrics.values())),
    }


def course(is_plain: bool) -> Tensor:
    """The losses of thirty steps of a linear encoder that learns to see through noise."""
    torch.manual_seed(0)
    criterion = XMoCoLoss(16, 96, iterations=2).to(DEVICE)
    encoder = nn.Linear(24, 16).to(DEVICE)
    criterion.plain = is_plain
    losses = []
    for _ in range(30):
        images = torch.randn(32, 24)
        q_s, q_t, k_s, k_t = (
            F.normalize(encoder((images + 0.3 * torch.randn_like(images)).to(DEVICE)), dim=1)
            for _ in range(4)
        )
        loss, _ = criterion(q_s, q_t, k_s.detach(), k_t.detach())
        gradients = torch.autograd.grad(loss, list(encoder.parameters()))
        with torch.no_grad():  # an optimiser would take seconds to import
            for parameter, gradient in zip(encoder.parameters(), gradients, strict=True):
                parameter -= 0.2 * gradient
        losses.append(loss.detach())
    return torch.stack(losses)


# N, K, d and the settings of the loss
PLAYS: dict[str, dict[str, Any]] = {
    "ordinary": {"N": 48, "K": 100, "d": 16},
    "batch longer than the bank": {"N": 40, "K": 17, "d": 6},
    "one round": {"N": 16, "K": 30, "d": 8, "iterations": 1},
    "sharp": {"N": 25, "K": 40, "d": 16, "temperature": 0.05, "sharpness": 10.0},
}
TOGETHER: dict[str, Any] = {"N": 24, "K": 41, "d": 8}


def process(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    vars(soft_labels)["can_stream"] = lambda _: True
    found: dict[str, Any] = {}
    if rank == 0:
        found["sums"] = [
            by_kernel(shape, scale, skip_own) for shape in SHAPES for scale, skip_own in SUMS
        ]
        found["course"] = course(is_plain=False)
    else:
        found["plays"] = {name: play(is_plain=False, **given) for name, given in PLAYS.items()}
    dist.init_process_group(
        "gloo", init_method=f"file://{folder / 'meeting'}", rank=rank, world_size=2
    )
    half = slice(rank * TOGETHER["N"] // 2, (rank + 1) * TOGETHER["N"] // 2)
    found["together"] = play(is_plain=False, share=half, **TOGETHER)
    torch.save(found, folder / f"{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("streamed")
    with pytest.MonkeyPatch.context() as patch:
        if DEVICE == "cpu":
            patch.setenv("TRITON_INTERPRET", "1")
        patch.setenv("PYTHONWARNINGS", "ignore::RuntimeWarning")  # numpy's, at log2(0)
        torch.multiprocessing.spawn(process, args=(folder,), nprocs=2)
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


def test_the_kernels_sums_are_those_of_whole_matrices(both: list[dict[str, Any]]) -> None:
    found = iter(both[0]["sums"])
    for shape in SHAPES:
        for scale, skip_own in SUMS:
            expected = by_hand(shape, scale, skip_own)
            assert_close(next(found).double(), expected, rtol=1e-6, atol=scale * WORST)


@pytest.mark.parametrize("name", sorted(PLAYS))
def test_terms_gradients_and_metrics_are_the_plain_ones(
    both: list[dict[str, Any]], name: str
) -> None:
    """A label errs by λ/τ times its similarity, and weighs 1 − ξ of a term."""
    given = PLAYS[name]
    found, expected = both[1]["plays"][name], play(is_plain=True, **given)
    scale = given.get("sharpness", 2.0) / given.get("temperature", 0.2)
    assert_close(found["terms"], expected["terms"], rtol=0, atol=0.1 * scale * WORST)
    largest = expected["gradients"].abs().max().item()
    assert_close(found["gradients"], expected["gradients"], rtol=0, atol=largest * scale * WORST)
    assert_close(found["metrics"], expected["metrics"], rtol=0, atol=scale * WORST)


def test_training_takes_the_same_course(both: list[dict[str, Any]]) -> None:
    found, expected = both[0]["course"], course(is_plain=True)
    assert expected[-1] < expected[5]
    assert_close(found, expected, rtol=0, atol=2e-3)
    assert (found - expected).std() < 5e-4


def test_two_processes_balance_as_one(both: list[dict[str, Any]]) -> None:
    """As DistributedDataParallel averages: a rank's gradient counts half."""
    expected = play(is_plain=True, **TOGETHER)
    first, second = (found["together"] for found in both)
    assert_close((first["terms"] + second["terms"]) / 2, expected["terms"], rtol=0, atol=1e-3)
    gradients = torch.cat([first["gradients"], second["gradients"]], dim=2) / 2
    largest = expected["gradients"].abs().max().item()
    assert_close(gradients, expected["gradients"], rtol=0, atol=0.01 * largest)


def test_the_bound_on_a_similarity_holds_and_is_seldom_approached() -> None:
    q, k = unit_rows(2000, 128, seed=5), unit_rows(2000, 128, seed=6)
    errors = (q.half().double() @ k.half().double().T - q.double() @ k.double().T).abs()
    assert errors.max() < WORST / 4
    assert math.sqrt(errors.square().mean()) < 3e-5
