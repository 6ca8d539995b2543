"""Crossed similarities (paper, equations 2 and 3; step 4 of the method).

The source query meets target keys and the other way round: column 0 is the image's own key, the
positive; columns 1 … K are the bank's, the negatives. All arithmetic is float32 (float64 stays
float64), whatever the precision of the features or of the surrounding autocast.
"""

import torch
from torch import Tensor


def crossed_similarities(queries: Tensor, keys: Tensor, bank: Tensor, temperature: float) -> Tensor:
    """log P of shape (N, 1+K): log softmax of ``[q·k | q·B] / τ`` for unit-length rows.

    Gradients reach the queries only. Logarithms, not probabilities, are what the cross entropies
    and the transport need, and they do not underflow.
    """
    queries = precise(queries)
    keys, bank = keys.detach().to(queries.dtype), bank.detach().to(queries.dtype)
    with torch.autocast(queries.device.type, enabled=False):
        positive = (queries * keys).sum(dim=1, keepdim=True)
        negatives = queries @ bank.T
        return torch.cat([positive, negatives], dim=1).div(temperature).log_softmax(dim=1)


@torch.no_grad()
def bank_similarities(queries: Tensor, bank: Tensor, temperature: float) -> Tensor:
    """log P of shape (N, K): the same over a bank alone, without positives or gradients."""
    queries = precise(queries)
    with torch.autocast(queries.device.type, enabled=False):
        return (queries @ bank.to(queries.dtype).T).div_(temperature).log_softmax(dim=1)


@torch.no_grad()
def past_similarities(queries: Tensor, slots: Tensor, bank: Tensor, temperature: float) -> Tensor:
    """log P of past queries over today's bank, of shape (M, K).

    By now the bank holds each past query's own key, in slot ``slots[i]`` (both enqueued together).
    It is that query's positive: it shares in the normalisation, but as a negative it counts −inf.
    """
    log_p = bank_similarities(queries, bank, temperature)
    return log_p.scatter_(1, slots[:, None], -torch.inf)


def cross_entropy(target: Tensor, log_prediction: Tensor) -> Tensor:
    """Mean over rows of −Σ target · log prediction. The target is taken as given: no gradient."""
    return -(target.detach() * log_prediction).sum(dim=1).mean()


def precise(features: Tensor) -> Tensor:
    return features if features.dtype == torch.float64 else features.float()
