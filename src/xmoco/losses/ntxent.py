"""NT-Xent: every view names its partner among all other views of the batch (SimCLR).

Once as a whole, and once as the similarities of both sides, which XMoCo's ideas compare.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from xmoco.distributed import gather_with_gradient, rank
from xmoco.losses.contrast import Contrast
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


NO_CANDIDATE = -1e9
"""A logit that is −∞ to a softmax, but makes 0 when multiplied by 0."""


def batch_contrasts(z_s: Tensor, z_t: Tensor, temperature: float) -> tuple[Contrast, Contrast]:
    """P_s and P_t (N, 1 + 2·N·W) of the views of a batch: InfoNCE of both, halved, is NT-Xent.

    Column 0 is the partner. Then come all images' views of the other side and all of one's own, so
    that a column belongs to the same image in P_s and in P_t; an image's own are no candidates.
    """
    z_s, z_t = precise(z_s), precise(z_t)
    with torch.autocast(z_s.device.type, enabled=False):
        everyones = gather_with_gradient(torch.stack([z_s, z_t], dim=1))
        all_s, all_t = everyones.unbind(dim=1)
        if len(all_s) < 2:
            raise ValueError("a batch needs at least two images: the others are the negatives")
        columns = torch.arange(len(all_s), device=z_s.device)
        own = columns == columns[rank() * len(z_s) :][: len(z_s), None]

        def side(own_side: Tensor, partner: Tensor, others: Tensor, alike: Tensor) -> Contrast:
            positive = (own_side * partner).sum(dim=1, keepdim=True) / temperature
            negatives = [
                (own_side @ candidates.T / temperature).masked_fill(own, NO_CANDIDATE)
                for candidates in (others, alike)
            ]
            log_p = torch.cat([positive, *negatives], dim=1).log_softmax(dim=1)
            bank = torch.cat([others, alike])
            return Contrast(own_side, bank, temperature, log_p, partner)

        return side(z_s, z_t, all_t, all_s), side(z_t, z_s, all_s, all_t)
