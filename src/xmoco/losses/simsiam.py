"""SimSiam's loss: a prediction of one side points where the other side does."""

import torch
import torch.nn.functional as F
from torch import Tensor

from xmoco.losses.similarity import precise


def negative_cosine(prediction: Tensor, target: Tensor) -> Tensor:
    """Mean over rows of −cos(p, z), from 1 to −1; no gradient through the target."""
    with torch.autocast(prediction.device.type, enabled=False):
        p, z = precise(prediction), precise(target.detach())
        return -F.cosine_similarity(p, z.to(p.dtype), dim=1).mean()
