"""The loss of XMoCo (paper, equation 13) as a module for any training loop."""

from typing import Literal, get_args

import torch
from torch import Tensor

from xmoco.distributed import own_share
from xmoco.losses.bank import PairedRing
from xmoco.losses.consistency import consistency
from xmoco.losses.gauges import label_gauges, similarity_gauges
from xmoco.losses.labels import soft_labels
from xmoco.losses.moco import MoCoLoss
from xmoco.losses.similarity import cross_entropy, past_similarities

History = Literal["queries", "probabilities", "none"]


class XMoCoLoss(MoCoLoss):
    """Four cross entropies over two banks: swapped soft labels and cross-similarity consistency.

    Call it with the unit-length features of both views from the encoder (q_s, q_t) and from the
    momentum encoder (k_s, k_t). It owns the banks and the label history; all of it is in
    ``state_dict``. Inside DistributedDataParallel the banks and the balancing span all processes.

    Example::

        criterion = XMoCoLoss(feature_size=128, bank_length=4096)
        loss, terms = criterion(q_s, q_t, k_s, k_t)
        loss.backward()

    Args:
        feature_size: length d of queries and keys.
        bank_length: keys K in each bank.
        temperature: τ, divides similarities before the softmax.
        sharpness: λ, how closely the soft labels follow the similarities.
        positive_mass: ξ, the share of a label given to the positive; 1 makes labels one-hot.
        iterations: rounds of Sinkhorn balancing.
        history: what joins the balancing once K of it are known, since a batch has fewer samples
            than the banks have peers: past ``queries``, compared anew with today's bank (K·d
            numbers a side), past ``probabilities`` as in the paper (K² a side), or ``none``.
    """

    def __init__(
        self,
        feature_size: int = 128,
        bank_length: int = 4096,
        temperature: float = 0.2,
        sharpness: float = 2.0,
        positive_mass: float = 0.9,
        iterations: int = 3,
        history: History = "queries",
    ) -> None:
        if history not in get_args(History):
            raise ValueError(f"history is {history!r}, expected one of {get_args(History)}")
        if not 0 < positive_mass <= 1 or sharpness <= 0 or iterations < 1:
            raise ValueError(
                f"positive_mass {positive_mass} must be in (0, 1], sharpness {sharpness} above 0, "
                f"iterations {iterations} at least 1"
            )
        super().__init__(feature_size, bank_length, temperature)
        self.sharpness = sharpness
        self.positive_mass = positive_mass
        self.iterations = iterations
        self.history_kind = history
        widths = {"queries": feature_size, "probabilities": bank_length}
        self.history = None if history == "none" else PairedRing(bank_length, widths[history])

    def forward(
        self, q_s: Tensor, q_t: Tensor, k_s: Tensor, k_t: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss and its four terms; then, unless the module is in eval mode, the keys enter the
        banks and the history moves on.

        A term is named after the side that tells: ``labels_source`` is CE(Y_s, P_t).
        """
        log_p_s, log_p_t = self.similarities(q_s, q_t, k_s, k_t)
        y_s, y_t = self.labels(log_p_s, log_p_t)
        terms = {
            "labels_source": cross_entropy(y_s, log_p_t),
            "labels_target": cross_entropy(y_t, log_p_s),
            "consistency_source": consistency(log_p_s, log_p_t),
            "consistency_target": consistency(log_p_t, log_p_s),
        }
        if self.training:
            self.banks.enter(k_s, k_t)
            if self.history_kind == "queries" and self.history is not None:
                self.history.enter(q_s, q_t)
            elif self.history is not None:
                self.history.enter(log_p_s[:, 1:], log_p_t[:, 1:])
        return torch.stack(list(terms.values())).sum(), terms

    def labels(self, log_p_s: Tensor, log_p_t: Tensor) -> tuple[Tensor, Tensor]:
        """Soft labels Y_s from P_s and Y_t from P_t."""
        past_s, past_t = self._past()
        settings = {"positive_mass": self.positive_mass, "sharpness": self.sharpness}
        return (
            soft_labels(log_p_s, history=past_s, iterations=self.iterations, **settings),
            soft_labels(log_p_t, history=past_t, iterations=self.iterations, **settings),
        )

    @torch.no_grad()
    def gauges(self, q_s: Tensor, q_t: Tensor, k_s: Tensor, k_t: Tensor) -> dict[str, Tensor]:
        log_p_s, log_p_t = self.similarities(q_s, q_t, k_s, k_t)
        y_s, y_t = self.labels(log_p_s, log_p_t)
        return similarity_gauges(log_p_s, log_p_t) | label_gauges(y_s, y_t)

    def _past(self) -> tuple[Tensor | None, Tensor | None]:
        """Past samples' log P over the negatives, this process's share; none until K are known."""
        if self.history is None or self.history.fill < 1:
            return None, None
        past_s, past_t = own_share(self.history.source), own_share(self.history.target)
        if self.history_kind == "probabilities":
            return past_s, past_t
        slots = own_share(torch.arange(self.history.length, device=past_s.device))
        return (
            past_similarities(past_s, slots, self.banks.target, self.temperature),
            past_similarities(past_t, slots, self.banks.source, self.temperature),
        )
