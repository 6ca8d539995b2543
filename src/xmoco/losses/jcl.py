"""JCL: InfoNCE with endlessly many positive keys, drawn from a Gaussian around a few."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from xmoco.losses.contrast import Contrast
from xmoco.losses.similarity import precise
from xmoco.schedules import Value, scaled


@dataclass
class GaussianContrast(Contrast):
    """P whose positives' logits are (q·k̄ + (λ/2τ)·qᵀΣq) / τ. As the keys of these stand
    k̄ + (λ/2τ)·Σq; what pulls a query is k̄ + (λ/τ)·Σq."""

    pull: Tensor

    def _gradient(self, excess: Tensor) -> Tensor:
        return excess[:, 1:] @ self.bank.to(excess.dtype) + excess[:, :1] * self.pull


def gaussian_contrast(
    queries: Tensor, keys: Sequence[Tensor], bank: Tensor, temperature: float, weight: Value
) -> tuple[GaussianContrast, Tensor]:
    """P of queries over the Gaussians of their keys (M views of N images) and a bank, and the
    penalty: the mean of (λ/2τ²)·qᵀΣq, Σ being the covariance of an image's keys, λ ``weight``."""
    q = precise(queries)
    with torch.autocast(q.device.type, enabled=False):
        drawn = torch.stack([key.detach().to(q.dtype) for key in keys])
        mean = drawn.mean(dim=0)
        apart = drawn - mean
        along = (apart * q).sum(dim=2, keepdim=True)  # (M, N, 1); its mean square is qᵀΣq
        penalty = scaled(along.square().mean(dim=(0, 2)).mean() / (2 * temperature**2), weight)
        with torch.no_grad():
            spread = scaled((apart * along).mean(dim=0), weight) / temperature  # (λ/τ)·Σq
            positives = mean + spread / 2
            logits = torch.cat(
                [(q * positives).sum(dim=1, keepdim=True), q @ bank.to(q.dtype).T], dim=1
            )
            log_p = (logits / temperature).log_softmax(dim=1)
    P = GaussianContrast(queries, bank, temperature, log_p, positives, mean + spread)
    return P, penalty
