"""Metrics that tell learning from collapse, for logs and plots; none of them enters a loss."""

import torch
from torch import Tensor


@torch.no_grad()
def feature_metrics(features: Tensor) -> dict[str, Tensor]:
    """How widely unit-length features spread: both fall towards 0 and 1 when the network collapses.

    ``feature_spread`` is the root of the total variance: 1 for features all over the sphere.
    ``effective_rank`` is the exponential of the entropy of the covariance's eigenvalues.
    """
    centred = features.float() - features.float().mean(dim=0)
    # Where features are no longer numbers, it is the loss that says so, not a failing metric.
    eigenvalues = torch.linalg.svdvals(centred.nan_to_num()).square()
    shares = eigenvalues / eigenvalues.sum().clamp_min(1e-12)
    return {
        "feature_spread": centred.square().sum(dim=1).mean().sqrt(),
        "effective_rank": torch.special.entr(shares).sum().exp(),
    }


@torch.no_grad()
def similarity_metrics(log_p_s: Tensor, log_p_t: Tensor) -> dict[str, Tensor]:
    """``positive_probability`` P(positive), and ``consistency_gap``, how much the two sides differ:
    the total variation between P_s and P_t, from 0 (the same) to 1."""
    p_s, p_t = log_p_s.exp(), log_p_t.exp()
    return {
        "positive_probability": (p_s[:, 0] + p_t[:, 0]).mean() / 2,
        "consistency_gap": (p_s - p_t).abs().sum(dim=1).mean() / 2,
    }


@torch.no_grad()
def label_metrics(y_s: Tensor, y_t: Tensor) -> dict[str, Tensor]:
    """``label_entropy`` in nats: 0 for one-hot labels."""
    entropy = torch.special.entr(y_s).sum(dim=1) + torch.special.entr(y_t).sum(dim=1)
    return {"label_entropy": entropy.mean() / 2}
