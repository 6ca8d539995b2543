"""Cross-similarity consistency (paper, section III-C; the last two terms of its equation 13)."""

from torch import Tensor

from xmoco.losses.similarity import cross_entropy


def consistency(log_told: Tensor, log_follower: Tensor) -> Tensor:
    """CE(sg P_told, P_follower): the similarities of one side's view predict the other's.

    Whatever two views are taken, an image should be as similar to each other image.
    """
    return cross_entropy(log_told.detach().exp(), log_follower)
