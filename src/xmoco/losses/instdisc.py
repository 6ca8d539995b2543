"""Instance discrimination: every image is a class of its own, known by what it looked like last."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from xmoco.distributed import gather
from xmoco.losses.contrast import Contrast
from xmoco.losses.ntxent import NO_CANDIDATE
from xmoco.losses.similarity import precise


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


def slot_contrast(
    features: Tensor, positions: Tensor, slots: Tensor, temperature: float
) -> Contrast:
    """P (N, 1 + images) of an image's own slot, and of all slots, among which its own is none.

    The gradient is known beforehand, so slots may change before it is asked for.
    """
    with torch.no_grad(), torch.autocast(features.device.type, enabled=False):
        z = precise(features)
        rows = slots.to(z.dtype)
        own = rows[positions]
        logits = torch.cat([(z * own).sum(dim=1, keepdim=True), z @ rows.T], dim=1) / temperature
        logits.scatter_(1, 1 + positions[:, None], NO_CANDIDATE)
        return Contrast(features, slots, temperature, logits.log_softmax(dim=1), own)
