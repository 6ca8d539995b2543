"""Batch norm that does not tell a query which key is its own.

Query and key of an image would be normalised by the same companions, a short cut for the contrast.
MoCo shuffles keys between processes; inside one process, statistics of groups do the same job.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from xmoco.distributed import exchange, processes, rank


@contextmanager
def running_statistics_kept(module: nn.Module) -> Iterator[None]:
    """Batches are normalised by their own statistics as ever, but leave no mark on the running
    ones."""
    norms = [
        layer for layer in module.modules() if isinstance(layer, nn.modules.batchnorm._NormBase)
    ]
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.momentum = 0.0
    try:
        yield
    finally:
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum


class SplitStatistics(nn.modules.batchnorm._BatchNorm):
    """In training, samples i, i+g, i+2g … share statistics: g groups. Else ordinary batch norm.

    A batch may be several ``views`` stacked: then each is treated as a batch of its own, and they
    move the running statistics one after the other. Parameters and running statistics are named
    and shaped like the ordinary layer's and mean the same, so the weights load straight into
    torchvision.
    """

    views = 1

    def __init__(self, features: int, groups: int, **options: Any) -> None:
        super().__init__(features, **options)
        self.groups = groups

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return super().forward(x)
        self._check(x)
        views = [self._normalise_view(view) for view in x.chunk(self.views)]
        return views[0] if len(views) == 1 else torch.cat(views)

    def _check(self, x: Tensor) -> None:
        members, left = divmod(len(x), self.views * self.groups)
        if left or members * x.shape[2:].numel() < 2:
            raise ValueError(
                f"batch norm needs {self.views} × {self.groups} equal groups with at least two "
                f"values a channel, but the batch is {tuple(x.shape)}."
            )

    def _normalise_view(self, x: Tensor) -> Tensor:
        groups, (samples, channels) = self.groups, x.shape[:2]
        mean, var = self.running_mean, self.running_var
        assert mean is not None
        assert var is not None
        assert self.momentum is not None
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        if groups == 1:
            return F.batch_norm(x, mean, var, self.weight, self.bias, True, self.momentum, self.eps)
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
        return normalised.view(x.shape)


class SplitBatchNorm1d(SplitStatistics, nn.BatchNorm1d):
    pass


class SplitBatchNorm2d(SplitStatistics, nn.BatchNorm2d):
    pass


def split_statistics(module: nn.Module, groups: int) -> nn.Module:
    """Replace every ordinary batch norm inside ``module`` by its split form, in place."""
    kinds = {nn.BatchNorm1d: SplitBatchNorm1d, nn.BatchNorm2d: SplitBatchNorm2d}
    for name, child in module.named_children():
        if isinstance(child, nn.BatchNorm1d | nn.BatchNorm2d) and type(child) in kinds:
            split = kinds[type(child)](
                child.num_features, groups, eps=child.eps, momentum=child.momentum
            )
            split.load_state_dict(child.state_dict())
            split.to(child.weight).train(child.training)
            for parameter, own in zip(split.parameters(), child.parameters(), strict=True):
                parameter.requires_grad_(own.requires_grad)
            setattr(module, name, split)
        else:
            split_statistics(child, groups)
    return module


def stack_views(module: nn.Module, views: int) -> None:
    """Prepare ``module`` for batches of so many views stacked, in place."""
    split_statistics(module, groups=1)
    for norm in module.modules():
        if isinstance(norm, SplitStatistics):
            norm.views = views


def unknown_norms(module: nn.Module) -> list[str]:
    """Kinds of layers inside ``module`` that take statistics of a batch but cannot be split."""
    ours = (SplitStatistics, nn.SyncBatchNorm)
    return [
        type(norm).__name__
        for norm in module.modules()
        if isinstance(norm, nn.modules.batchnorm._BatchNorm)
        and not isinstance(norm, ours)
        and type(norm) not in (nn.BatchNorm1d, nn.BatchNorm2d)
    ]


def keys_in_split_groups(encoder: nn.Module, images: Tensor, groups: int, views: int = 1) -> Tensor:
    """Encode so that an image's group differs from the one it had as a query.

    Queries i, i+g, i+2g … form a group; here neighbours do. Order within a batch is random
    already, so a fixed rearrangement serves as well as a random one. Stacked ``views`` are
    rearranged each in its place.
    """
    members = len(images) // (views * groups)
    return _transposed(encoder(_transposed(images, groups, members)), members, groups)


def keys_in_other_processes(encoder: nn.Module, images: Tensor, views: int = 1) -> Tensor:
    """Encode in another process than the query's (ShuffleBN): of all images of a view, each process
    takes every W-th. Each image travels once, in the precision it is computed with, and its key
    back."""
    if processes() == 1:
        return _features(encoder, images)
    if torch.is_autocast_enabled(images.device.type):
        images = images.to(torch.get_autocast_dtype(images.device.type))
    way = _way(processes(), rank(), len(images) // views, views, images.device)
    arrived = exchange(images[way.leaving], way.sent, way.received)
    keys = _features(encoder, arrived[way.by_view])
    returned = exchange(keys[way.by_process], way.received, way.sent)
    return returned[way.home]


class _Way(NamedTuple):
    """Where the images of a process go: number G over all processes, of any view, to G mod W."""

    sent: list[int]
    received: list[int]
    """Images to each process, and from each."""
    leaving: Tensor
    """The order in which images are sent: by process, then by view."""
    by_view: Tensor
    """Of images in the order in which they arrive, those of a view together."""
    by_process: Tensor
    home: Tensor
    """What undoes the other two orders."""


@cache
def _way(processes: int, rank: int, count: int, views: int, device: torch.device) -> _Way:
    goes_to = torch.arange(processes * count).view(processes, count) % processes
    counts = torch.stack([(goes_to == process).sum(dim=1) for process in range(processes)])
    sent, received = counts[:, rank], counts[rank]
    rows = torch.arange(views * count).view(views, count)
    leaving = torch.cat([rows[:, goes_to[rank] == other].flatten() for other in range(processes)])
    view_of_each = [torch.arange(views).repeat_interleave(int(number)) for number in received]
    by_view = torch.cat(view_of_each).argsort(stable=True)
    orders = leaving, by_view, by_view.argsort(), leaving.argsort()
    return _Way(
        (views * sent).tolist(), (views * received).tolist(), *(o.to(device) for o in orders)
    )


def _features(encoder: nn.Module, images: Tensor) -> Tensor:
    features: Tensor = encoder(images)
    return features


def _transposed(rows: Tensor, blocks: int, length: int) -> Tensor:
    """Read ``blocks`` blocks of ``length`` rows column-wise: the first of each, the second …

    The next blocks follow in the same way.
    """
    order = torch.arange(len(rows), device=rows.device)
    order = order.view(-1, blocks, length).transpose(1, 2).flatten()
    return rows[order]  # which keeps channels last, where a reshape would not
