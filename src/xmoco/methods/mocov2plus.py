"""MoCo v2+: symmetric InfoNCE over two banks, the baseline that XMoCo extends."""

from torch import Tensor

from xmoco.config import MoCoV2PlusConfig, ModelConfig
from xmoco.losses import MoCoLoss
from xmoco.methods.base import MomentumMethod, StepOutput


class MoCoV2Plus(MomentumMethod):
    def __init__(self, model: ModelConfig, settings: MoCoV2PlusConfig) -> None:
        loss = MoCoLoss(model.feature_size, settings.bank_length, settings.temperature)
        super().__init__(model, settings, loss)

    def forward(self, x_s: Tensor, x_t: Tensor, with_metrics: bool = False) -> StepOutput:
        q_s, q_t, k_s, k_t = self.features(x_s, x_t)
        return self.contrast(q_s, q_t, k_s, k_t, with_metrics)
