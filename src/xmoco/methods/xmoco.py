"""XMoCo: momentum contrast with two banks, soft labels by optimal transport, and consistency.

The steps are numbered as in the paper's algorithm 1. The four-term loss, which owns the banks and
the label history, stands alone in ``losses/xmoco.py``.
"""

from torch import Tensor

from xmoco.config import ModelConfig, XMoCoConfig
from xmoco.losses import XMoCoLoss
from xmoco.methods.base import MomentumMethod, StepOutput


class XMoCo(MomentumMethod):
    def __init__(self, model: ModelConfig, settings: XMoCoConfig) -> None:
        loss = XMoCoLoss(
            feature_size=model.feature_size,
            bank_length=settings.bank_length,
            temperature=settings.temperature,
            sharpness=settings.sharpness,
            positive_mass=settings.positive_mass,
            iterations=settings.sinkhorn_iterations,
            history=settings.history,
        )
        super().__init__(model, settings, loss)

    def forward(self, x_s: Tensor, x_t: Tensor, with_metrics: bool = False) -> StepOutput:
        # 1. Two random views of every image come in: source x_s and target x_t.
        # 2. The encoder f gives queries; the momentum encoder g gives keys, without gradient.
        q_s, q_t, k_s, k_t = self.features(x_s, x_t)
        # 3. Two banks hold the last K keys of either side; slot j of both is the same image.
        # 4. P_s = softmax([q_s·k_t | q_s·B_t] / τ) and P_t = softmax([q_t·k_s | q_t·B_s] / τ).
        # 5. Soft labels: Y_s from P_s, Y_t from P_t, balanced over the banks by Sinkhorn.
        # 6. CE(Y_s, P_t) + CE(Y_t, P_s) + CE(sg P_s, P_t) + CE(sg P_t, P_s).
        return self.contrast(q_s, q_t, k_s, k_t, with_metrics)

    def after_step(self) -> None:
        # 7. After the SGD step on f: g ← m·g + (1−m)·f. (The keys have entered the banks with the
        #    loss, which knew its gradient by then: the order makes no difference to the next step.)
        super().after_step()
