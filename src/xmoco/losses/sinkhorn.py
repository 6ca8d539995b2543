"""Sinkhorn balancing (paper, equations 10 and 11).

The transport plan is diag(α) · P^λ · diag(β). Rows are samples, columns are what they choose among:
negatives here, prototypes in SwAV. Each round first gives every column the same total, then every
sample, so that samples end exact. Only log β is returned: the plan follows from it, as a softmax
over each row of ``λ·log P + log β`` (the samples' scaling is that softmax's normaliser).
"""

import torch
from torch import Tensor

from xmoco.distributed import logsumexp_over_rows, sum_over_processes

FEW_ROUNDS = 20


@torch.no_grad()
def column_scaling(log_kernel: Tensor, iterations: int, takes_part: Tensor | None = None) -> Tensor:
    """log β of shape (K,) for a kernel of shape (M, K), up to a constant that no plan depends on.

    The samples may live in several processes, each of which gives its own. Entries may be −inf (a
    column that a sample must not choose) as long as no row or column is all −inf. ``takes_part``
    (M,) leaves samples out, without asking the device for how many.

    The first round is taken in log space, since powers of probabilities underflow. It leaves a plan
    whose every row has an entry of at least 1/K and whose every column one of at least 1/(M·K), as
    does each later round: those can scale the plan itself, without exponentials. Only over very
    many rounds may entries matter again that had underflowed: those stay in log space.
    """

    def balanced(kernel: Tensor) -> Tensor:
        if takes_part is not None:
            kernel = kernel.masked_fill(~takes_part[:, None], -torch.inf)
        return -logsumexp_over_rows(kernel)

    columns = balanced(log_kernel)
    if iterations > FEW_ROUNDS:
        for _ in range(iterations - 1):
            samples = -(log_kernel + columns).logsumexp(dim=1, keepdim=True)
            columns = balanced(log_kernel + samples)
        return columns
    plan = (log_kernel + columns).softmax(dim=1)
    for _ in range(iterations - 1):
        counted = plan if takes_part is None else plan * takes_part[:, None]
        correction = -sum_over_processes(counted.sum(dim=0)).log()
        plan *= correction.exp()
        plan /= plan.sum(dim=1, keepdim=True)
        columns = columns + correction
    return columns
