"""Features of whole image sets from a frozen backbone."""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from xmoco.config import ViewsConfig
from xmoco.data import Batch, ImageSet, in_order
from xmoco.data.views import central

BATCH = 256


class Features(NamedTuple):
    """What was seen of a set, in its order."""

    vectors: Tensor
    """float32 (n, d) on the device, of unit length."""
    labels: Tensor | None
    """int64 (n,) on the CPU, of the images really seen: an unreadable one is replaced by the next,
    which may be of another class."""


def backbone_features(
    backbone: nn.Module,
    images: ImageSet,
    views: ViewsConfig,
    device: torch.device,
    readers: int = 8,
) -> Features:
    """Features of the central views, the backbone in eval mode.

    The backbone is left in the mode it was found in.
    """

    def see(batch: Batch) -> Tensor:
        features: Tensor = backbone(central(batch.images, batch.sizes, views.size, views))
        return features.float()

    was_training = backbone.training
    backbone.eval()
    try:
        return _features(see, images, device, readers)
    finally:
        backbone.train(was_training)


def pixel_features(
    images: ImageSet, views: ViewsConfig, device: torch.device, readers: int = 8
) -> Features:
    """Raw pixels of the central views, at 32 px: what no learning at all gives."""
    side = min(views.size, 32)

    def see(batch: Batch) -> Tensor:
        return central(batch.images, batch.sizes, side, views).flatten(1)

    return _features(see, images, device, readers)


@torch.no_grad()
def _features(
    see: Callable[[Batch], Tensor], images: ImageSet, device: torch.device, readers: int
) -> Features:
    vectors, labels = [], []
    for batch in in_order(images, BATCH, device, readers=readers):
        vectors.append(F.normalize(see(batch), dim=1))
        if batch.labels is not None:
            labels.append(batch.labels)
    return Features(torch.cat(vectors), torch.cat(labels) if labels else None)
