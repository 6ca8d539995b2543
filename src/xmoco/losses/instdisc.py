"""Instance discrimination: every image is a class of its own, known by what it looked like last."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from xmoco.distributed import gather
from xmoco.losses.contrast import similarities


class Slots(nn.Module):
    """A unit vector for every image of a set; at first a random one."""

    rows: Tensor

    def __init__(self, images: int, feature_size: int) -> None:
        super().__init__()
        self.register_buffer("rows", F.normalize(torch.randn(images, feature_size), dim=1))

    @torch.no_grad()
    def update(self, positions: Tensor, features: Tensor, momentum: float) -> None:
        """v ← m·v + (1 − m)·z of unit length again, for the images of all processes."""
        positions, features = gather(positions), gather(features).to(self.rows.dtype)
        # One that stands in for unreadable ones may be here twice: its first look counts, lest
        # processes disagree.
        first = (positions[:, None] == positions).int().argmax(dim=1)
        moved = torch.lerp(features[first], self.rows[positions], momentum)
        self.rows[positions] = F.normalize(moved, dim=1)


def instance_loss(features: Tensor, positions: Tensor, slots: Tensor, temperature: float) -> Tensor:
    """Mean over rows of −log softmax of the image's own slot among those of all images.

    The gradient is known beforehand, so slots may change before it is asked for.
    """
    P = similarities(features, slots, temperature)
    own = positions[:, None]
    excess = P.p.scatter_add(1, own, P.p.new_full(own.shape, -1))
    return P.pulled(-P.log_p.gather(1, own).mean(), excess)
