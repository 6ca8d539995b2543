"""Methods: one file each. The training loop knows only ``Method`` and ``build_method``."""

from xmoco.config import MoCoV2PlusConfig, ModelConfig, XMoCoConfig
from xmoco.methods.base import Method, StepOutput
from xmoco.methods.mocov2plus import MoCoV2Plus
from xmoco.methods.xmoco import XMoCo

__all__ = ["Method", "StepOutput", "build_method"]


def build_method(model: ModelConfig, settings: XMoCoConfig | MoCoV2PlusConfig) -> Method:
    match settings:
        case XMoCoConfig():
            return XMoCo(model, settings)
        case MoCoV2PlusConfig():
            return MoCoV2Plus(model, settings)
