"""Soft labels by optimal transport (paper, equations 7 to 12; step 5 of the method)."""

import torch
from torch import Tensor

from xmoco.losses.sinkhorn import peer_scaling


@torch.no_grad()
def soft_labels(
    log_probabilities: Tensor,
    *,
    positive_mass: float,
    sharpness: float,
    iterations: int,
    history: Tensor | None = None,
) -> Tensor:
    """Labels Y of shape (N, 1+K): column 0 is ξ, rows sum to one, and over all samples every
    negative peer gets the same total.

    ``log_probabilities`` (N, 1+K) are this batch's crossed similarities. ``history`` (M, K) are
    log probabilities of past samples over the negatives: with fewer samples than peers the equal
    totals are out of reach, so past samples take part in the balancing, but get no labels.

    The kernel is P^λ with P's own normalisation: λ·S/τ alone has the same limit, but after few
    rounds it is another plan, since peers are balanced first and then weigh samples differently.
    """
    negatives = log_probabilities[:, 1:]
    rows = negatives.clone() if history is None else torch.cat([negatives, history])
    peers = peer_scaling(rows.mul_(sharpness), iterations)
    return balanced_labels(
        log_probabilities, peers, positive_mass=positive_mass, sharpness=sharpness
    )


@torch.no_grad()
def balanced_labels(
    log_probabilities: Tensor, peers: Tensor, *, positive_mass: float, sharpness: float
) -> Tensor:
    """Labels from the scaling log β of the negative peers, shape (K,), that balances them."""
    shares = (sharpness * log_probabilities[:, 1:] + peers).softmax(dim=1)
    positive = torch.full_like(shares[:, :1], positive_mass)
    return torch.cat([positive, (1 - positive_mass) * shares], dim=1)
