"""InfoNCE over crossed similarities: the loss of MoCo, symmetric in MoCo v2+."""

from torch import Tensor


def infonce(log_probabilities: Tensor) -> Tensor:
    """Mean of −log P(positive); cross entropy with one-hot labels on column 0."""
    return -log_probabilities[:, 0].mean()
