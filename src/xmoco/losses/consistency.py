"""Cross-similarity consistency (paper, section III-C; the last two terms of step 6)."""

from torch import Tensor

from xmoco.losses.contrast import Contrast


def consistency(P_s: Contrast, P_t: Contrast, p_s: Tensor, p_t: Tensor) -> dict[str, Tensor]:
    """CE(sg p_s, P_t) and CE(sg p_t, P_s), each named after the side that tells.

    Whatever two views are taken, an image should be as similar to each other image: the
    similarities of one side predict the other's. In the paper p are the probabilities of P.
    """
    return {
        "consistency_source": P_t.cross_entropy(p_s),
        "consistency_target": P_s.cross_entropy(p_t),
    }
