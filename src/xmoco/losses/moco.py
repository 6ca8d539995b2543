"""The symmetric loss of MoCo v2+ as a module that owns its banks."""

from torch import Tensor, nn

from xmoco.losses.bank import KeyBanks
from xmoco.losses.contrast import Contrast, checked_temperature, crossed


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
        self.temperature = checked_temperature(temperature)
        self.banks = KeyBanks(bank_length, feature_size)

    def forward(
        self, q_s: Tensor, q_t: Tensor, k_s: Tensor, k_t: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss and its two terms, for unit-length features (N, d).

        The keys then enter the banks, unless the module is in eval mode.
        """
        P_s, P_t = self.similarities(q_s, q_t, k_s, k_t)
        terms = symmetric_infonce(P_s, P_t)
        if self.training:
            self.banks.enqueue(k_s, k_t)
        return terms["source"] + terms["target"], terms

    def similarities(
        self, q_s: Tensor, q_t: Tensor, k_s: Tensor, k_t: Tensor
    ) -> tuple[Contrast, Contrast]:
        """P_s and P_t over the banks."""
        return crossed(q_s, q_t, k_s, k_t, self.banks, self.temperature, self.plain)


def symmetric_infonce(P_s: Contrast, P_t: Contrast) -> dict[str, Tensor]:
    return {"source": P_s.infonce(), "target": P_t.infonce()}
