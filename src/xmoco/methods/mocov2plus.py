"""MoCo v2+: symmetric InfoNCE over two banks, the baseline that XMoCo extends."""

from collections.abc import Sequence

from torch import Tensor

from xmoco.config import Config, MoCoV2PlusConfig
from xmoco.losses.bank import KeyBanks
from xmoco.losses.metrics import feature_metrics, similarity_metrics
from xmoco.losses.moco import MoCoLoss, symmetric_infonce
from xmoco.methods.base import BankMethod
from xmoco.task import StepOutput, Values


class MoCoV2Plus(BankMethod):
    title = "MoCo v2+"

    def __init__(self, config: Config) -> None:
        settings = config.method
        assert isinstance(settings, MoCoV2PlusConfig)
        loss = MoCoLoss(config.model.feature_size, settings.bank_length, settings.temperature)
        super().__init__(config)
        self.loss = loss

    @property
    def banks(self) -> KeyBanks:
        return self.loss.banks

    def forward(
        self, views: Sequence[Tensor], at: Values, with_metrics: bool = False
    ) -> StepOutput:
        (q_s, q_t), (k_s, k_t) = self.contrasted(views)
        P_s, P_t = self.loss.similarities(q_s, q_t, k_s, k_t)
        terms = symmetric_infonce(P_s, P_t)
        metrics = {}
        if with_metrics:
            metrics = feature_metrics(q_s) | similarity_metrics(P_s.log_p, P_t.log_p)
        if self.training:
            self.banks.enqueue(k_s, k_t)
        return StepOutput(terms["source"] + terms["target"], terms, metrics)
