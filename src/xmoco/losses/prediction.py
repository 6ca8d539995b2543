"""Losses of methods with a predictor: a prediction of one side points where the other side's target
does. There are no negatives."""

import torch
import torch.nn.functional as F
from torch import Tensor

from xmoco.losses.similarity import precise


def negative_cosine(prediction: Tensor, target: Tensor) -> Tensor:
    """Mean over rows of −cos(p, z), from 1 to −1 (SimSiam); no gradient through the target.

    Rows are the last dimension; those before it may be broadcast.
    """
    with torch.autocast(prediction.device.type, enabled=False):
        p, z = precise(prediction), precise(target.detach())
        return -F.cosine_similarity(p, z.to(p.dtype), dim=-1).mean()


def prediction_loss(prediction: Tensor, target: Tensor) -> Tensor:
    """Mean over rows of ‖p/|p| − z/|z|‖² = 2 − 2·cos(p, z) (BYOL)."""
    return 2 + 2 * negative_cosine(prediction, target)
