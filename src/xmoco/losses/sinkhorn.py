"""Sinkhorn balancing in log space (paper, equations 10 and 11).

The transport plan is diag(α) · P^λ · diag(β). Rows are samples, columns are negative peers; each
round first gives every peer the same total, then every sample, so that samples end exact. The plan
is never formed here: it follows from the column scaling alone, as a softmax over each row of
``λ·log P + log β`` (the samples' scaling is that softmax's normaliser).
"""

from collections.abc import Callable

import torch
from torch import Tensor

from xmoco.distributed import logsumexp_over_rows


@torch.no_grad()
def peer_scaling(
    log_kernel: Tensor,
    iterations: int,
    over_rows: Callable[[Tensor], Tensor] = logsumexp_over_rows,
) -> Tensor:
    """log β of shape (K,) for a kernel of shape (M, K), up to a constant that no plan depends on.

    ``over_rows`` sums a column over all samples, which may live in several processes. Entries may
    be −inf (a peer that a sample must not choose) as long as no row or column is all −inf.
    """
    samples = log_kernel.new_zeros(log_kernel.shape[0], 1)
    for _ in range(iterations):
        peers = -over_rows(log_kernel + samples)
        samples = -(log_kernel + peers).logsumexp(dim=1, keepdim=True)
    return peers
