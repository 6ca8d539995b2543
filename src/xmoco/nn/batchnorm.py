"""Batch norm that does not tell a query which key is its own.

Query and key of an image would be normalised by the same companions, a short cut for the contrast.
MoCo shuffles keys between processes; inside one process, statistics of groups do the same job.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from xmoco.distributed import gather, own_share, processes, rank


class _SplitStatistics(nn.modules.batchnorm._BatchNorm):
    """In training, samples i, i+g, i+2g … share statistics: g groups. Else ordinary batch norm.

    Parameters and running statistics are named and shaped like the ordinary layer's and mean the
    same, so the weights load straight into torchvision.
    """

    def __init__(self, features: int, groups: int, **options: Any) -> None:
        super().__init__(features, **options)
        self.groups = groups

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return super().forward(x)
        groups, (samples, channels) = self.groups, x.shape[:2]
        mean, var = self.running_mean, self.running_var
        assert mean is not None
        assert var is not None
        assert self.momentum is not None
        means, variances = mean.repeat(groups), var.repeat(groups)
        normalised = F.batch_norm(
            x.reshape(samples // groups, groups * channels, *x.shape[2:]),
            means,
            variances,
            self.weight.repeat(groups),
            self.bias.repeat(groups),
            True,
            self.momentum,
            self.eps,
        )
        with torch.no_grad():
            mean.copy_(means.view(groups, channels).mean(dim=0))
            var.copy_(variances.view(groups, channels).mean(dim=0))
            if self.num_batches_tracked is not None:
                self.num_batches_tracked.add_(1)
        return normalised.view(x.shape)


class SplitBatchNorm1d(_SplitStatistics, nn.BatchNorm1d):
    pass


class SplitBatchNorm2d(_SplitStatistics, nn.BatchNorm2d):
    pass


def split_statistics(module: nn.Module, groups: int) -> nn.Module:
    """Replace every batch norm inside ``module`` by its split form, in place."""
    kinds = {nn.BatchNorm1d: SplitBatchNorm1d, nn.BatchNorm2d: SplitBatchNorm2d}
    for name, child in module.named_children():
        if isinstance(child, nn.BatchNorm1d | nn.BatchNorm2d) and type(child) in kinds:
            split = kinds[type(child)](
                child.num_features, groups, eps=child.eps, momentum=child.momentum
            )
            split.load_state_dict(child.state_dict())
            split.train(child.training)
            setattr(module, name, split)
        else:
            split_statistics(child, groups)
    return module


def keys_in_split_groups(encoder: nn.Module, images: Tensor, groups: int) -> Tensor:
    """Encode so that an image's group differs from the one it had as a query.

    Queries i, i+g, i+2g … form a group; here neighbours do. Order within a batch is random
    already, so a fixed rearrangement serves as well as a random one.
    """
    rearranged = _transposed(images, groups, len(images) // groups)
    return _transposed(encoder(rearranged), len(images) // groups, groups)


def keys_in_other_processes(encoder: nn.Module, images: Tensor) -> Tensor:
    """Encode in another process than the query's (ShuffleBN): each takes every W-th image."""
    keys = gather(encoder(own_share(gather(images))))
    here = slice(rank() * len(images), (rank() + 1) * len(images))
    return _transposed(keys, processes(), len(images))[here]


def _transposed(rows: Tensor, blocks: int, length: int) -> Tensor:
    """Read ``blocks`` blocks of ``length`` rows column-wise: the first of each, the second …"""
    return rows.view(blocks, length, *rows.shape[1:]).transpose(0, 1).reshape(rows.shape)
