"""The symmetric loss of MoCo v2+ as a module that owns its banks."""

import torch
from torch import Tensor, nn

from xmoco.losses.bank import KeyBanks
from xmoco.losses.contrast import Contrast
from xmoco.losses.metrics import similarity_metrics
from xmoco.losses.similarity import crossed_similarities


class MoCoLoss(nn.Module):
    """InfoNCE of source queries against target keys and the other way round, over two banks.

    Args:
        feature_size: length d of queries and keys.
        bank_length: keys K in each bank.
        temperature: τ.
    """

    # The reference, for tests and benchmarks: autograd, over matrices that are all in memory.
    plain = False

    def __init__(
        self, feature_size: int = 128, bank_length: int = 4096, temperature: float = 0.2
    ) -> None:
        super().__init__()
        if bank_length < 2 or temperature <= 0:
            raise ValueError(
                f"bank_length {bank_length} must be at least 2, temperature {temperature} above 0"
            )
        self.temperature = temperature
        self.banks = KeyBanks(bank_length, feature_size)

    def forward(
        self, q_s: Tensor, q_t: Tensor, k_s: Tensor, k_t: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss and its two terms, for unit-length features (N, d).

        The keys then enter the banks, unless the module is in eval mode.
        """
        source, target = self.contrasts(q_s, q_t, k_s, k_t)
        terms = {"source": source.infonce(), "target": target.infonce()}
        if self.training:
            self.banks.enqueue(k_s, k_t)
        return terms["source"] + terms["target"], terms

    def contrasts(
        self, q_s: Tensor, q_t: Tensor, k_s: Tensor, k_t: Tensor
    ) -> tuple[Contrast, Contrast]:
        """The source and the target side."""
        with torch.set_grad_enabled(self.plain and torch.is_grad_enabled()):
            log_p_s, log_p_t = self.similarities(q_s, q_t, k_s, k_t)
        return (
            Contrast(q_s, k_t, self.banks.target, self.temperature, log_p_s),
            Contrast(q_t, k_s, self.banks.source, self.temperature, log_p_t),
        )

    def similarities(
        self, q_s: Tensor, q_t: Tensor, k_s: Tensor, k_t: Tensor
    ) -> tuple[Tensor, Tensor]:
        """log P_s and log P_t. Autograd gets copies of the banks: they change before it is run."""
        expected = (len(q_s), self.banks.source.shape[1])
        for name, features in {"q_s": q_s, "q_t": q_t, "k_s": k_s, "k_t": k_t}.items():
            if features.shape != expected:
                raise ValueError(
                    f"{name} has shape {tuple(features.shape)}, expected {expected}: one row per "
                    "image of the batch, as long as feature_size."
                )
        bank_s, bank_t = self.banks.source, self.banks.target
        if torch.is_grad_enabled():
            bank_s, bank_t = bank_s.clone(), bank_t.clone()
        return (
            crossed_similarities(q_s, k_t, bank_t, self.temperature),
            crossed_similarities(q_t, k_s, bank_s, self.temperature),
        )

    @torch.no_grad()
    def metrics(self, q_s: Tensor, q_t: Tensor, k_s: Tensor, k_t: Tensor) -> dict[str, Tensor]:
        """What a log wants to know of this batch; changes nothing. Call it before ``forward``."""
        return similarity_metrics(*self.similarities(q_s, q_t, k_s, k_t))
