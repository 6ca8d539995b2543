"""Losses: functions of tensors, one idea per file, and modules for any training loop."""

from xmoco.losses.batch import BatchXMoCoLoss
from xmoco.losses.moco import MoCoLoss
from xmoco.losses.xmoco import XMoCoLoss

__all__ = ["BatchXMoCoLoss", "MoCoLoss", "XMoCoLoss"]
