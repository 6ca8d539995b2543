"""Weighted k-nearest-neighbour accuracy of frozen features, the paper's quickest judge.

Features are brought to unit length; the k most similar training images vote for their class with
weight exp(similarity / temperature). Of images equally similar at the k-th place, any may vote.

A bank of a million images does not fit beside everything else on a device. It may stay in host
memory: block after block passes over the device, once for all queries, whose k best so far wait
there. While the device compares one block, the next is on its way.
"""

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from xmoco.data.batches import Progress
from xmoco.distributed import own_part, sum_over_processes

QUERIES_AT_ONCE = 1024
BANK_AT_ONCE = 65_536  # a block of similarities takes 256 MiB
WAITING = 2**30
"""Queries and their k best take up to this many bytes of the device; more pass in several rounds,
each over the whole bank. 100,000 queries of 2,048 dimensions fit with k 200."""


def knn_accuracy(
    bank: Tensor,
    bank_labels: Tensor,
    queries: Tensor | None,
    query_labels: Tensor | None,
    *,
    ks: Sequence[int] = (200,),
    temperature: float = 0.1,
    device: torch.device | None = None,
    together: bool = False,
    on_progress: Progress | None = None,
) -> dict[int, float]:
    """Top-1 accuracy in percent for each k.

    Without ``queries`` every image of the bank is judged by all the others (leave one out).
    A k larger than the bank lets the whole bank vote. ``together``, all processes, which have the
    same features, judge a part of them each. Other arguments are as in ``nearest_neighbours``.
    """
    judged = bank_labels if query_labels is None else query_labels
    classes = int(max(bank_labels.max(), judged.max())) + 1
    device = bank.device if device is None else device
    bank_labels, judged = bank_labels.to(device), judged.to(device)
    ks = tuple(dict.fromkeys(ks))  # each counts once, however often it was asked for
    right = dict.fromkeys(ks, 0)
    part = own_part(len(judged)) if together else None
    for first, *found in nearest_neighbours(
        bank, queries, max(ks), device=device, part=part, on_progress=on_progress
    ):
        truths = judged[first : first + len(found[0])]
        parts = (part.split(QUERIES_AT_ONCE) for part in (*found, truths))
        for similarities, neighbours, truth in zip(*parts, strict=True):
            # Relative to the nearest, so that a low temperature does not overflow.
            weights = ((similarities - similarities[:, :1]) / temperature).exp()
            voted = bank_labels[neighbours]
            for k in ks:
                votes = weights.new_zeros(len(voted), classes)
                votes.scatter_add_(1, voted[:, :k], weights[:, :k])
                right[k] += int((votes.argmax(dim=1) == truth).sum())
    counts = torch.tensor(list(right.values()), device=device)
    if together:
        counts = sum_over_processes(counts)
    return {k: 100 * count / len(judged) for k, count in zip(ks, counts.tolist(), strict=True)}


def voters(k: int, bank_images: int, leave_one_out: bool) -> int:
    """How many really vote where ``k`` were asked for: an image does not judge itself."""
    return min(k, bank_images - leave_one_out)


def nearest_neighbours(
    bank: Tensor,
    queries: Tensor | None,
    k: int,
    *,
    device: torch.device | None = None,
    part: range | None = None,
    on_progress: Progress | None = None,
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Rounds of queries: (first query, similarities (n, k), positions in the bank (n, k)).

    Bank and queries may have any length and live anywhere; what is found is on ``device``, where
    all is computed (default: where the bank is). Without queries the bank is compared with itself,
    no image with itself. Of the queries, only a ``part`` may be asked for. ``on_progress`` is told
    the pairs compared and their total.
    """
    leave_one_out = queries is None
    questions = bank if queries is None else queries
    device = bank.device if device is None else device
    k = voters(k, len(bank), leave_one_out)
    # Of each query the device holds its vector and k similarities and positions, 4 + 8 bytes each.
    at_once = max(1, WAITING // (4 * bank.shape[1] + 12 * k))
    part = range(len(questions)) if part is None else part
    for first in range(part.start, part.stop, at_once):
        last = min(first + at_once, part.stop)
        asked = F.normalize(questions[first:last].to(device), dim=1)
        best = torch.full((len(asked), k), -torch.inf, device=device)
        where = torch.zeros(len(asked), k, dtype=torch.int64, device=device)
        compared = 0
        for block in _unit_blocks(bank, device):
            for start in range(0, len(asked), QUERIES_AT_ONCE):
                rows = slice(start, start + QUERIES_AT_ONCE)
                similarities = _similarities(asked[rows], block)
                if leave_one_out:
                    _leave_out_own(similarities, first + start, compared)
                top = similarities.topk(min(k, len(block)), dim=1)
                together = torch.cat([best[rows], top.values], dim=1)
                places = torch.cat([where[rows], top.indices + compared], dim=1)
                best[rows], order = together.topk(k, dim=1)
                where[rows] = places.gather(1, order)
            compared += len(block)
            if on_progress is not None:
                done = (first - part.start) * len(bank) + len(asked) * compared
                on_progress(done, len(part) * len(bank))
        yield first, best, where


def _similarities(queries: Tensor, bank: Tensor) -> Tensor:
    """In full float32, also within autocast; TF32 is off unless a program has asked for it."""
    with torch.autocast(queries.device.type, enabled=False):
        return queries @ bank.T


def _leave_out_own(similarities: Tensor, first_query: int, first_bank: int) -> None:
    """No image is its own neighbour; rows and columns are positions in the same set, from these."""
    offset = first_query - first_bank
    if -len(similarities) < offset < similarities.shape[1]:
        similarities.diagonal(offset).fill_(-torch.inf)


def _unit_blocks(bank: Tensor, device: torch.device) -> Iterator[Tensor]:
    """The bank in blocks on the device, of unit length. A block is valid until the next is asked
    for."""
    blocks = bank.split(BANK_AT_ONCE)
    if device.type != "cuda" or bank.device.type == "cuda":
        for block in blocks:
            yield F.normalize(block.to(device), dim=1)
        return
    # Only from pinned memory, and on a stream of its own, a block travels while others are
    # compared. Two places, here and there, take turns: memory stays bounded however long the bank.
    shape = (2, *blocks[0].shape)
    pinned, landed = torch.empty(shape, pin_memory=True), torch.empty(shape, device=device)
    here, travel = torch.cuda.current_stream(device), torch.cuda.Stream(device)
    travel.wait_stream(here)  # the memory may still be in use by what was computed before
    compared = [torch.cuda.Event(), torch.cuda.Event()]
    for number, block in enumerate(blocks):
        turn = number % 2
        compared[turn].synchronize()  # done with the block before the last, whose place this takes
        sent, arrived = pinned[turn, : len(block)], landed[turn, : len(block)]
        sent.copy_(block)
        with torch.cuda.stream(travel):
            arrived.copy_(sent, non_blocking=True)
        here.wait_stream(travel)
        yield F.normalize(arrived, dim=1, out=arrived)
        compared[turn].record(here)
