"""The loss of XMoCo (paper, equation 13) as a module for any training loop."""

from torch import Tensor

from xmoco.losses.bank import KeyBanks
from xmoco.losses.contrast import Contrast, checked_temperature, contrast_both_sides
from xmoco.losses.cross_similarity import CrossSimilarity, Teacher
from xmoco.losses.soft_labels import History, weighted_soft_labels


class XMoCoLoss(CrossSimilarity):
    """Four cross entropies over two banks: swapped soft labels and cross-similarity consistency.

    Call it with the unit-length features of both views from the encoder (q_s, q_t) and from the
    momentum encoder (k_s, k_t). It owns the banks and the label history; all of it is in
    ``state_dict``. Inside DistributedDataParallel the banks and the balancing span all processes,
    and the history is shared out among them: call ``xmoco.distributed.consolidate_state_dict`` on
    all before the first asks for ``state_dict``.

    Example::

        criterion = XMoCoLoss(feature_size=128, bank_length=4096)
        loss, terms = criterion(q_s, q_t, k_s, k_t)
        loss.backward()

    Args:
        feature_size: length d of queries and keys.
        bank_length: keys K in each bank.
        temperature: τ, divides similarities before the softmax.
        sharpness, positive_mass, iterations, history: of the soft labels, see ``SoftLabels``.
        label_weight: share of the soft labels, the rest being one-hot: at 0 they are InfoNCE's.
        consistency_weight, teacher: see ``CrossSimilarity``.
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
        label_weight: float = 1.0,
        consistency_weight: float = 1.0,
        teacher: Teacher = "queries",
    ) -> None:
        labels = weighted_soft_labels(
            label_weight, feature_size, bank_length, sharpness, positive_mass, iterations, history
        )
        super().__init__(labels, consistency_weight, teacher)
        self.temperature = checked_temperature(temperature)
        self.banks = KeyBanks(bank_length, feature_size)

    def forward(
        self, q_s: Tensor, q_t: Tensor, k_s: Tensor, k_t: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss and its terms, see ``compare``; then, unless the module is in eval mode, the
        keys enter the banks and the history moves on."""
        return self.compare(*self.similarities(q_s, q_t, k_s, k_t))

    def similarities(
        self, q_s: Tensor, q_t: Tensor, k_s: Tensor, k_t: Tensor
    ) -> tuple[Contrast, Contrast]:
        """P_s and P_t (step 4)."""
        return contrast_both_sides(q_s, q_t, k_s, k_t, self.banks, self.temperature, self.plain)

    def remember(self, T_s: Contrast, T_t: Contrast) -> None:
        """The keys enter the banks, and the history moves on (step 7)."""
        self.banks.enqueue(T_t.keys, T_s.keys)  # source queries met target keys
        super().remember(T_s, T_t)
