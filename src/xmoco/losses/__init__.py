"""Losses: functions of tensors, one idea per file, and the two modules that own banks."""

from xmoco.losses.moco import MoCoLoss
from xmoco.losses.xmoco import XMoCoLoss

__all__ = ["MoCoLoss", "XMoCoLoss"]
