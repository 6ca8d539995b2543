"""The loss of XMoCo (paper, equation 13) as a module for any training loop."""

from typing import Literal, get_args

import torch
from torch import Tensor, nn

from xmoco.losses.bank import KeyBanks
from xmoco.losses.consistency import consistency
from xmoco.losses.contrast import Contrast, checked_temperature, crossed
from xmoco.losses.soft_labels import History, SoftLabels
from xmoco.schedules import Value, scaled

Teacher = Literal["queries", "keys"]


class XMoCoLoss(nn.Module):
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
        sharpness, positive_mass, iterations, history: of the soft labels, see ``SoftLabels``.
        label_weight: share of the soft labels, the rest being one-hot: at 0 they are InfoNCE's.
        consistency_weight: of the consistency terms; 0 leaves them out.
        teacher: whose similarities labels and consistency are told by: those of the ``queries``, as
            in the paper, or of the ``keys`` to the other keys.
    """

    # The reference, for tests and benchmarks: autograd, over matrices that are all in memory.
    plain = False

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
        super().__init__()
        if teacher not in get_args(Teacher):
            raise ValueError(f"teacher is {teacher!r}, expected one of {get_args(Teacher)}")
        if not 0 <= label_weight <= 1 or consistency_weight < 0:
            raise ValueError(
                f"label_weight {label_weight} must be from 0 to 1, "
                f"consistency_weight {consistency_weight} at least 0"
            )
        self.temperature = checked_temperature(temperature)
        self.label_weight = label_weight
        self.teacher = teacher
        self.consistency_weight = consistency_weight
        self.banks = KeyBanks(bank_length, feature_size)
        # One-hot labels of weight 1−w beside soft ones of weight w are soft ones of a larger ξ.
        mass = 1 - label_weight * (1 - positive_mass) if label_weight < 1 else positive_mass
        self.soft_labels = (
            SoftLabels(feature_size, bank_length, sharpness, mass, iterations, history)
            if label_weight > 0
            else None
        )

    def forward(
        self, q_s: Tensor, q_t: Tensor, k_s: Tensor, k_t: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss and its terms; then, unless the module is in eval mode, the keys enter the
        banks and the history moves on.

        A term is named after the side that tells: ``labels_source`` is CE(Y_s, P_t).
        """
        P_s, P_t = self.similarities(q_s, q_t, k_s, k_t)
        T_s, T_t = self.teachers(P_s, P_t)
        Y_s, Y_t = self.labels(T_s, T_t)
        loss, terms = self.cross_entropies(P_s, P_t, T_s, T_t, Y_s, Y_t)
        if self.training:
            self.remember(T_s, T_t)
        return loss, terms

    def similarities(
        self, q_s: Tensor, q_t: Tensor, k_s: Tensor, k_t: Tensor
    ) -> tuple[Contrast, Contrast]:
        """P_s and P_t (step 4)."""
        return crossed(q_s, q_t, k_s, k_t, self.banks, self.temperature, self.plain)

    def teachers(self, P_s: Contrast, P_t: Contrast) -> tuple[Contrast, Contrast]:
        """What labels and consistency are made from: P themselves, or the keys' similarities."""
        if self.teacher == "queries":
            return P_s, P_t
        k_s, k_t = P_t.keys, P_s.keys  # source queries met target keys
        with torch.no_grad():
            return crossed(k_s, k_t, k_s, k_t, self.banks, self.temperature)

    def labels(self, T_s: Contrast, T_t: Contrast) -> tuple[Tensor, Tensor] | tuple[None, None]:
        """Soft labels Y_s from T_s and Y_t from T_t (step 5); none where they are one-hot."""
        return (None, None) if self.soft_labels is None else self.soft_labels(T_s, T_t, self.plain)

    def cross_entropies(
        self,
        P_s: Contrast,
        P_t: Contrast,
        T_s: Contrast,
        T_t: Contrast,
        Y_s: Tensor | None,
        Y_t: Tensor | None,
        consistency_weight: Value | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The weighted sum of the terms, and each by itself (step 6).

        The weight may be another at every step; terms whose own weight is 0 are left out.
        """
        weight = self.consistency_weight if consistency_weight is None else consistency_weight
        terms = {
            "labels_source": P_t.infonce() if Y_s is None else P_t.cross_entropy(Y_s),
            "labels_target": P_s.infonce() if Y_t is None else P_s.cross_entropy(Y_t),
        }
        parts = list(terms.values())
        if self.consistency_weight > 0:
            agreement = consistency(P_s, P_t, T_s, T_t)
            terms |= agreement
            parts += [scaled(term, weight) for term in agreement.values()]
        return torch.stack(parts).sum(), terms

    def remember(self, T_s: Contrast, T_t: Contrast) -> None:
        """The keys enter the banks, and the history moves on (step 7)."""
        self.banks.enqueue(T_t.keys, T_s.keys)  # source queries met target keys
        if self.soft_labels is not None:
            self.soft_labels.remember(T_s, T_t)
