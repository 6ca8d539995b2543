"""Features of whole image sets from a frozen backbone."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from xmoco.config import ViewsConfig
from xmoco.data import ImageSet, in_order
from xmoco.data.views import central

BATCH = 256


@torch.no_grad()
def backbone_features(
    backbone: nn.Module,
    images: ImageSet,
    views: ViewsConfig,
    device: torch.device,
    readers: int = 8,
) -> Tensor:
    """Unit-length features (n, d) of the central views, in float32, the backbone in eval mode.

    The backbone is left in the mode it was found in.
    """
    was_training = backbone.training
    backbone.eval()
    try:
        blocks = [
            F.normalize(
                backbone(central(batch.images, batch.sizes, views.size, views)).float(), dim=1
            )
            for batch in in_order(images, BATCH, device, readers=readers)
        ]
    finally:
        backbone.train(was_training)
    return torch.cat(blocks)


@torch.no_grad()
def pixel_features(
    images: ImageSet, views: ViewsConfig, device: torch.device, readers: int = 8
) -> Tensor:
    """Unit-length raw pixels of the central views, at 32 px: what no learning at all gives."""
    side = min(views.size, 32)
    blocks = [
        F.normalize(central(batch.images, batch.sizes, side, views).flatten(1), dim=1)
        for batch in in_order(images, BATCH, device, readers=readers)
    ]
    return torch.cat(blocks)
