"""NT-Xent: every view names its partner among all other views of the batch (SimCLR)."""

import torch
import torch.nn.functional as F
from torch import Tensor

from xmoco.distributed import gather_with_gradient, rank
from xmoco.losses.similarity import precise


def nt_xent(z_s: Tensor, z_t: Tensor, temperature: float) -> Tensor:
    """Mean over the views (N a side, unit length) of −log softmax of the partner's similarity.

    The candidates are the other 2N·W − 1 views of all W processes, with gradients through all.
    """
    count, own = len(z_s), torch.cat([precise(z_s), precise(z_t)])
    with torch.autocast(own.device.type, enabled=False):
        everyones = gather_with_gradient(own)  # of each process its N source, then N target views
        logits = own @ everyones.T / temperature
        rows = torch.arange(2 * count, device=own.device)
        first = rank() * 2 * count
        # A view is no candidate for itself. Filled, not added: the diagonal has no gradient.
        itself = torch.arange(len(everyones), device=own.device) == first + rows[:, None]
        partner = first + (rows + count) % (2 * count)
        return F.cross_entropy(logits.masked_fill(itself, -torch.inf), partner)
