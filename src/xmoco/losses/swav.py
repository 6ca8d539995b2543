"""SwAV: balanced codes of one view over prototypes, told from the other views."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from xmoco.losses.similarity import cross_entropy, precise
from xmoco.losses.sinkhorn import column_scaling


@torch.no_grad()
def codes(
    scores: Tensor,
    *,
    epsilon: float,
    iterations: int,
    past_scores: Tensor | None = None,
    past_counts: Tensor | None = None,
) -> Tensor:
    """Codes Q (N, K) of scores (N, K) of unit vectors on K prototypes: rows sum to one and, over
    all samples of all processes, every prototype gets the same total.

    ``past_scores`` (M, K) of earlier images join the balancing, where ``past_counts`` (a truth
    value, or one for each, on the device so that no step waits for it) says so; they get no codes.
    """
    kernel = precise(scores) / epsilon
    if past_scores is None or past_counts is None:
        columns = column_scaling(kernel, iterations)
    else:
        rows = torch.cat([kernel, precise(past_scores) / epsilon])
        counts = past_counts.expand(len(past_scores))
        takes_part = F.pad(counts, (len(kernel), 0), value=True)
        columns = column_scaling(rows, iterations, takes_part=takes_part)
    return (kernel + columns).softmax(dim=1)


def swapped_prediction(
    scores: Sequence[Tensor],
    targets: Sequence[Tensor],
    temperature: float,
    weights: Sequence[Tensor] | None = None,
) -> Tensor:
    """Mean over the full views, whose codes are ``targets``, of the mean cross entropy with which
    each of the other views (full and small, by ``scores``) tells their codes.

    ``weights``, (N,) for every view, say how much the one that tells counts.
    """
    with torch.autocast(scores[0].device.type, enabled=False):
        log_p = [(precise(score) / temperature).log_softmax(dim=1) for score in scores]
        losses = [
            cross_entropy(target if weights is None else target * weights[view][:, None], other)
            for full, target in enumerate(targets)
            for view, other in enumerate(log_p)
            if view != full
        ]
        return torch.stack(losses).mean()
