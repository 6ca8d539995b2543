"""Cross-similarity consistency (paper, section III-C; the last two terms of step 6)."""

from torch import Tensor

from xmoco.losses.contrast import Contrast


def consistency(P_s: Contrast, P_t: Contrast, T_s: Contrast, T_t: Contrast) -> dict[str, Tensor]:
    """CE(sg T_s, P_t) and CE(sg T_t, P_s), each named after the side that tells.

    Whatever two views are taken, an image should be as similar to each other image: the
    similarities of one side predict the other's. In the paper T is P.
    """
    return {
        "consistency_source": P_t.cross_entropy(T_s.p),
        "consistency_target": P_s.cross_entropy(T_t.p),
    }
