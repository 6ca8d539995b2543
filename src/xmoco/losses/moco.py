"""The symmetric loss of MoCo v2+ as a module that owns its banks."""

from xmoco.losses.xmoco import XMoCoLoss


class MoCoLoss(XMoCoLoss):
    """InfoNCE of source queries against target keys and the other way round, over two banks: what
    XMoCo's loss is without its two ideas.

    Args:
        feature_size: length d of queries and keys.
        bank_length: keys K in each bank.
        temperature: τ.
    """

    def __init__(
        self, feature_size: int = 128, bank_length: int = 4096, temperature: float = 0.2
    ) -> None:
        super().__init__(
            feature_size, bank_length, temperature, label_weight=0.0, consistency_weight=0.0
        )
