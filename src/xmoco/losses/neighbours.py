"""Losses of methods whose targets are a key and its nearest neighbours in a bank of past keys."""

import torch
import torch.nn.functional as F
from torch import Tensor

from xmoco.losses.prediction import prediction_loss
from xmoco.losses.similarity import precise
from xmoco.schedules import Value


@torch.no_grad()
def nearest(keys: Tensor, bank: Tensor, count: int) -> Tensor:
    """The ``count`` rows of the bank (K, d) that point most nearly where each key (N, d) does, as
    they stand there: (N, count, d), the nearest first."""
    keys, rows = precise(keys), precise(bank)
    with torch.autocast(keys.device.type, enabled=False):
        similarities = keys @ F.normalize(rows, dim=1).to(keys.dtype).T
        return rows[similarities.topk(count, dim=1).indices]


def mean_shift(predictions: Tensor, neighbours: Tensor) -> Tensor:
    """MSF: mean over rows and their neighbours u of 2 − 2·cos(p, u)."""
    return prediction_loss(predictions[:, None], neighbours)


def mixed_neighbours(predictions: Tensor, keys: Tensor, neighbours: Tensor, share: Value) -> Tensor:
    """MNN: the same for mixtures λ·u + (1 − λ)·k of neighbours and key, where λ is ``share``."""
    keys, neighbours = precise(keys.detach())[:, None], precise(neighbours)
    if isinstance(share, Tensor):
        share = share.to(neighbours.dtype)
    return mean_shift(predictions, keys + share * (neighbours - keys))
