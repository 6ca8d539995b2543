"""The loss of XMoCo (paper, equation 13) as a module for any training loop."""

from typing import Literal, get_args

import torch
from torch import Tensor

from xmoco.distributed import own_share
from xmoco.losses.bank import PairedRing
from xmoco.losses.contrast import Contrast
from xmoco.losses.labels import balanced_labels, soft_labels
from xmoco.losses.metrics import label_metrics, similarity_metrics
from xmoco.losses.moco import MoCoLoss
from xmoco.losses.similarity import past_similarities
from xmoco.losses.streamed import can_stream, streamed_peer_scaling

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
        source, target = self.contrasts(q_s, q_t, k_s, k_t)
        y_s, y_t = self._labels_of(source, target)
        terms = {
            "labels_source": target.cross_entropy(y_s),
            "labels_target": source.cross_entropy(y_t),
            # Whatever two views are taken, an image should be as similar to each other image: the
            # similarities of one side predict the other's (section III-C).
            "consistency_source": target.cross_entropy(source.p),
            "consistency_target": source.cross_entropy(target.p),
        }
        if self.training:
            self.banks.enqueue(k_s, k_t)
            if self.history_kind == "queries" and self.history is not None:
                self.history.enqueue(q_s, q_t)
            elif self.history is not None:
                self.history.enqueue(source.log_p[:, 1:], target.log_p[:, 1:])
        return torch.stack(list(terms.values())).sum(), terms

    def labels(self, log_p_s: Tensor, log_p_t: Tensor) -> tuple[Tensor, Tensor]:
        """Soft labels Y_s from P_s and Y_t from P_t."""
        settings = {"positive_mass": self.positive_mass, "sharpness": self.sharpness}
        return (
            soft_labels(
                log_p_s, history=self._past("source"), iterations=self.iterations, **settings
            ),
            soft_labels(
                log_p_t, history=self._past("target"), iterations=self.iterations, **settings
            ),
        )

    @torch.no_grad()
    def metrics(self, q_s: Tensor, q_t: Tensor, k_s: Tensor, k_t: Tensor) -> dict[str, Tensor]:
        source, target = self.contrasts(q_s, q_t, k_s, k_t)
        labels = self._labels_of(source, target)
        return similarity_metrics(source.log_p, target.log_p) | label_metrics(*labels)

    def _labels_of(self, source: Contrast, target: Contrast) -> tuple[Tensor, Tensor]:
        """The labels, with past queries streamed where that is possible."""
        streams = self.history_kind == "queries" and not self.plain and can_stream(source.queries)
        if self.history is None or not streams:
            return self.labels(source.log_p, target.log_p)
        peers_s, peers_t = streamed_peer_scaling(
            queries=torch.stack([source.queries, target.queries]),
            keys=torch.stack([source.keys, target.keys]),
            banks=torch.stack([source.bank, target.bank]),
            past=torch.stack([own_share(self.history.source), own_share(self.history.target)]),
            past_slots=own_share(torch.arange(self.history.length, device=source.bank.device)),
            past_counts=self.history.enqueued >= self.history.length,
            temperature=self.temperature,
            sharpness=self.sharpness,
            iterations=self.iterations,
        )
        settings = {"positive_mass": self.positive_mass, "sharpness": self.sharpness}
        return (
            balanced_labels(source.log_p, peers_s, **settings),
            balanced_labels(target.log_p, peers_t, **settings),
        )

    def _past(self, side: Literal["source", "target"]) -> Tensor | None:
        """Past samples' log P over the negatives, this process's share; none until K are known."""
        if self.history is None or not self.history.full:
            return None
        if side == "source":
            past, bank = own_share(self.history.source), self.banks.target
        else:
            past, bank = own_share(self.history.target), self.banks.source
        if self.history_kind == "probabilities":
            return past
        slots = own_share(torch.arange(self.history.length, device=past.device))
        return past_similarities(past, slots, bank, self.temperature)
