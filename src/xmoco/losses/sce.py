"""SCE: a query finds its key, and is as similar to past keys as its own key is."""

import torch
from torch import Tensor

from xmoco.losses.contrast import Contrast, similarities


def soft_contrast(P: Contrast, *, positive_share: float, key_temperature: float) -> Tensor:
    """CE of P with c·(one-hot) + (1−c)·softmax(k·B/τ_k), mean over rows.

    The relations softmax(k·B/τ_k) leave the positive out (the paper's equation 3).
    """
    relations = similarities(P.keys, P.bank, key_temperature).p
    positives = torch.full_like(relations[:, :1], positive_share)
    return P.cross_entropy(torch.cat([positives, (1 - positive_share) * relations], dim=1))
