"""Weighted k-nearest-neighbour accuracy of frozen features, the paper's quickest judge.

Features have unit length; the k most similar training images vote for their class with weight
exp(similarity / temperature).
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

QUERIES_AT_ONCE = 1024
BANK_AT_ONCE = 65_536  # a block of similarities takes 256 MiB


def knn_accuracy(
    bank: Tensor,
    bank_labels: Tensor,
    queries: Tensor | None,
    query_labels: Tensor | None,
    *,
    ks: Sequence[int] = (200,),
    temperature: float = 0.1,
) -> dict[int, float]:
    """Top-1 accuracy in percent for each k.

    Without ``queries`` every image of the bank is judged by all the others (leave one out).
    A k larger than the bank lets the whole bank vote.
    """
    judged = bank_labels if query_labels is None else query_labels
    classes = int(max(bank_labels.max(), judged.max())) + 1
    right = dict.fromkeys(ks, 0)
    for first, similarities, neighbours in nearest_neighbours(bank, queries, max(ks)):
        # Relative to the nearest, so that a low temperature does not overflow.
        weights = ((similarities - similarities[:, :1]) / temperature).exp()
        voted = bank_labels.to(neighbours.device)[neighbours]
        truth = judged[first : first + len(voted)].to(voted.device)
        for k in ks:
            votes = weights.new_zeros(len(voted), classes)
            votes.scatter_add_(1, voted[:, :k], weights[:, :k])
            right[k] += int((votes.argmax(dim=1) == truth).sum())
    return {k: 100 * count / len(judged) for k, count in right.items()}


def voters(k: int, bank_images: int, alone: bool) -> int:
    """How many really vote where ``k`` were asked for; alone, an image does not judge itself."""
    return min(k, bank_images - alone)


def nearest_neighbours(
    bank: Tensor, queries: Tensor | None, k: int
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Blocks of queries: (first query, similarities (n, k), positions in the bank (n, k)).

    Both sides are taken in blocks, so memory stays bounded however large they are. Without queries
    the bank is compared with itself, no image with itself.
    """
    alone = queries is None
    questions = bank if queries is None else queries
    k = voters(k, len(bank), alone)
    for first in range(0, len(questions), QUERIES_AT_ONCE):
        block = questions[first : first + QUERIES_AT_ONCE]
        best = block.new_empty(len(block), 0)
        where = torch.empty(len(block), 0, dtype=torch.long, device=block.device)
        for start in range(0, len(bank), BANK_AT_ONCE):
            part = bank[start : start + BANK_AT_ONCE].to(block.device)
            similarities = block @ part.T
            if alone:
                own = torch.arange(first, first + len(block), device=block.device) - start
                inside = (own >= 0) & (own < len(part))
                similarities[inside, own[inside]] = -torch.inf
            top = similarities.topk(min(k, len(part)), dim=1)
            best = torch.cat([best, top.values], dim=1)
            where = torch.cat([where, top.indices + start], dim=1)
            if start > 0:  # the best of this block among the best so far
                best, order = best.topk(min(k, best.shape[1]), dim=1)
                where = where.gather(1, order)
        yield first, best, where
