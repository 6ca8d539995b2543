"""Barlow Twins: the features of two views correlate one by one, and not with each other."""

import torch
from torch import Tensor

from xmoco.distributed import gather_with_gradient
from xmoco.losses.similarity import precise

EPSILON = 1e-5
"""Added to variances, as batch norm does."""


def cross_correlation(z_s: Tensor, z_t: Tensor) -> Tensor:
    """C (d, d): how feature i of one side correlates with feature j of the other, over the batch
    of all processes and with gradients through all of it."""
    together = torch.cat([precise(z_s), precise(z_t)], dim=1)
    with torch.autocast(together.device.type, enabled=False):
        everyones = gather_with_gradient(together)
        centred = everyones - everyones.mean(dim=0)
        deviation = (centred.square().mean(dim=0) + EPSILON).sqrt()
        a, b = (centred / deviation).chunk(2, dim=1)
        return a.T @ b / len(everyones)


def redundancy_reduction(correlation: Tensor) -> tuple[Tensor, Tensor]:
    """Σ(1 − C_ii)², which asks for the same feature in both views, and Σ_{i≠j} C_ij², which asks
    for different features."""
    own = correlation.diagonal()
    return (1 - own).square().sum(), correlation.square().sum() - own.square().sum()
