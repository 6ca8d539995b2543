"""VICReg: views agree, every feature varies, and no two features vary together.

As in its authors' program, which differs from their formulas: squared differences are averaged
over features too, and the hinge is the mean of both sides.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from xmoco.distributed import gather_with_gradient
from xmoco.losses.similarity import precise

EPSILON = 1e-4
"""Added to variances: the root has no slope at 0."""


def invariance(z_s: Tensor, z_t: Tensor) -> Tensor:
    """The mean squared difference of two views' features."""
    with torch.autocast(z_s.device.type, enabled=False):
        return F.mse_loss(precise(z_s), precise(z_t))


def variance_and_covariance(z_s: Tensor, z_t: Tensor) -> tuple[Tensor, Tensor]:
    """How far standard deviations stay below 1, mean over features and sides; and the squared
    covariances of different features, by their number, summed over sides.

    Both are of the batch of all processes, with gradients through all of it.
    """
    together = torch.cat([precise(z_s), precise(z_t)], dim=1)
    with torch.autocast(together.device.type, enabled=False):
        everyones = gather_with_gradient(together)
        centred = everyones - everyones.mean(dim=0)
        variances = centred.square().sum(dim=0) / (len(everyones) - 1)
        hinge = F.relu(1 - (variances + EPSILON).sqrt()).mean()
        sides = [_off_diagonal(side) for side in centred.chunk(2, dim=1)]
        return hinge, sides[0] + sides[1]


def _off_diagonal(centred: Tensor) -> Tensor:
    """Σ_{i≠j} Cov_ij² / d."""
    count, features = centred.shape
    covariance = centred.T @ centred / (count - 1)
    return (covariance.square().sum() - covariance.diagonal().square().sum()) / features
