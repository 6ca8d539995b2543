"""MoCo v2+: symmetric InfoNCE over two banks, the baseline that XMoCo extends."""

from xmoco.methods.xmoco import XMoCo


class MoCoV2Plus(XMoCo):
    """XMoCo without its two ideas, which are settings that are off here unless asked for."""

    title = "MoCo v2+"
