"""Cross entropy with labels, for classifiers."""

import torch
import torch.nn.functional as F
from torch import Tensor

from xmoco.losses.similarity import precise


def label_loss(scores: Tensor, labels: Tensor) -> Tensor:
    """Of scores (N, classes): the cross entropy with labels (N,) or, where an image may be of
    several classes and labels are truth values (N, classes), the binary one of each class."""
    with torch.autocast(scores.device.type, enabled=False):
        scores = precise(scores)
        if labels.ndim == 2:
            return F.binary_cross_entropy_with_logits(scores, labels.to(scores.dtype))
        return F.cross_entropy(scores, labels)
