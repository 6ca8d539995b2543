"""BYOL's loss: a prediction of one side points where the other side's target does."""

import torch
import torch.nn.functional as F
from torch import Tensor

from xmoco.losses.similarity import precise


def prediction_loss(prediction: Tensor, target: Tensor) -> Tensor:
    """Mean over rows of ‖p/|p| − k/|k|‖² = 2 − 2·cos(p, k); no gradient through the target.

    Rows are the last dimension; those before it may be broadcast.
    """
    with torch.autocast(prediction.device.type, enabled=False):
        p, k = precise(prediction), precise(target.detach())
        return 2 - 2 * F.cosine_similarity(p, k.to(p.dtype), dim=-1).mean()
