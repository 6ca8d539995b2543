"""UOTA: weights of views, the smaller the less a view is like the others of its image."""

from collections.abc import Sequence

import torch
from torch import Tensor

from xmoco.distributed import logsumexp_over_rows, processes, sum_over_processes
from xmoco.losses.similarity import precise

RIDGE = 1e-8


@torch.no_grad()
def view_weights(features: Sequence[Tensor], temperature: float) -> list[Tensor]:
    """One (N,) for every view; the mean over all views of all processes is 1.

    A view's features are compared with the mean of its image's first two views by Mahalanobis'
    distance, whose covariance is that of all such differences (equations 9 to 11 of the paper).
    """
    device = features[0].device.type
    # With fewer images than features the covariance has an inverse only thanks to the ridge, which
    # float32 hardly sees. MPS has nothing wider.
    wide = torch.float32 if device == "mps" else torch.float64
    with torch.autocast(device, enabled=False):
        z = torch.stack([view.detach().to(wide) for view in features])
        apart = (z - z[:2].mean(dim=0)).flatten(0, 1)
        count = len(apart) * processes()
        covariance = sum_over_processes(apart.T @ apart) / count
        covariance.diagonal().add_(RIDGE)
        inverse, _ = torch.linalg.inv_ex(covariance)
        distances = (apart @ inverse * apart).sum(dim=1) / temperature
        log_total = logsumexp_over_rows(-distances[:, None])
        weights = count * (-distances - log_total).exp()
    return list(weights.to(precise(features[0]).dtype).chunk(len(features)))
