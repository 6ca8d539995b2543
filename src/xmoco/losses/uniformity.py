"""Uniformity (Wang and Isola, equation 18): features lie far from each other and from past keys."""

import math

import torch
from torch import Tensor

from xmoco.distributed import gather, logsumexp_over_rows, processes, rank
from xmoco.losses.contrast import with_gradient
from xmoco.losses.similarity import precise


def uniformity(queries: Tensor, bank: Tensor, sharpness: float) -> Tensor:
    """log of the mean of exp(−t·‖x − y‖²) over all queries x with all keys y of a bank, and over
    all pairs of queries; all of unit length. The queries are those of all processes.

    Like a cross entropy it has a gradient that is known beforehand, see ``contrast.py``: the log of
    a sum pulls by the summands' shares in it.
    """
    q = precise(queries)
    with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
        keys, everyones = bank.to(q.dtype), gather(q)
        columns = torch.arange(len(everyones), device=q.device)
        itself = columns == columns[rank() * len(q) :][: len(q), None]
        # ‖x − y‖² = 2 − 2·x·y
        to_bank = (q @ keys.T - 1) * (2 * sharpness)
        to_batch = ((q @ everyones.T - 1) * (2 * sharpness)).masked_fill_(itself, -torch.inf)
        # A pair of queries is there twice and counts once.
        sums = to_bank.logsumexp(dim=1).logaddexp(to_batch.logsumexp(dim=1) - math.log(2))
        log_sum = logsumexp_over_rows(sums[:, None])
        count = len(everyones)
        value = (log_sum - math.log(count * len(keys) + count * (count - 1) / 2)).squeeze()
        # It moves both queries of a pair. Processes' gradients are averaged, these are parts of
        # one: hence their number.
        pull = (to_bank - log_sum).exp_() @ keys + (to_batch - log_sum).exp_() @ everyones
        pull *= 2 * sharpness * processes()
    return with_gradient(queries, value, pull) if torch.is_grad_enabled() else value
