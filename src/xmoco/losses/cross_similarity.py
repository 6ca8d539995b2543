"""XMoCo's two ideas, for whoever compares both sides of an image with negatives (steps 5 and 6)."""

from typing import Literal, get_args

import torch
from torch import Tensor, nn

from xmoco.losses.consistency import consistency
from xmoco.losses.contrast import Contrast, contrast
from xmoco.losses.soft_labels import SoftLabels
from xmoco.schedules import Value, scaled

Teacher = Literal["queries", "keys"]


class CrossSimilarity(nn.Module):
    """Soft labels in place of one-hot ones, and consistency, each with a weight of its own.

    What is compared is P_s and P_t, the similarities of both sides, whose columns belong to the
    same images: column 0 is an image's own key, the others are negatives.

    Args:
        soft_labels: makes the labels; none leaves InfoNCE.
        consistency_weight: of the consistency terms; 0 leaves them out.
        teacher: whose similarities labels and consistency are told by: those of the ``queries``, as
            in the paper, or of the ``keys`` to the other keys.
    """

    # The reference, for tests and benchmarks: autograd, over matrices that are all in memory.
    plain = False

    def __init__(
        self,
        soft_labels: SoftLabels | None,
        consistency_weight: float = 1.0,
        teacher: Teacher = "queries",
    ) -> None:
        super().__init__()
        if teacher not in get_args(Teacher):
            raise ValueError(f"teacher is {teacher!r}, expected one of {get_args(Teacher)}")
        if consistency_weight < 0:
            raise ValueError(f"consistency_weight {consistency_weight} must be at least 0")
        self.soft_labels = soft_labels
        self.consistency_weight = consistency_weight
        self.teacher = teacher

    def compare(
        self, P_s: Contrast, P_t: Contrast, consistency_weight: Value | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss and its terms; then, unless the module is in eval mode, the label history moves
        on.

        A term is named after the side that tells: ``labels_source`` is CE(Y_s, P_t). Those of
        InfoNCE, which nobody tells, are ``contrast_source`` and ``contrast_target`` after the
        queries.
        """
        T_s, T_t = self.teachers(P_s, P_t)
        Y_s, Y_t = self.labels(T_s, T_t)
        loss, terms = self.cross_entropies(P_s, P_t, T_s.p, T_t.p, Y_s, Y_t, consistency_weight)
        if self.training:
            self.remember(T_s, T_t)
        return loss, terms

    def teachers(self, P_s: Contrast, P_t: Contrast) -> tuple[Contrast, Contrast]:
        """What labels and consistency are made from: P themselves, or the keys' similarities."""
        if self.teacher == "queries":
            return P_s, P_t
        k_s, k_t = P_t.keys, P_s.keys  # source queries met target keys
        with torch.no_grad():
            return (
                contrast(k_s, k_t, P_s.bank, P_s.temperature),
                contrast(k_t, k_s, P_t.bank, P_t.temperature),
            )

    def labels(
        self, T_s: Contrast, T_t: Contrast, positive_mass: Value | None = None
    ) -> tuple[Tensor, Tensor] | tuple[None, None]:
        """Soft labels Y_s from T_s and Y_t from T_t (step 5); none where they are one-hot. ξ may be
        another at every step."""
        if self.soft_labels is None:
            return None, None
        Y_s, Y_t = self.soft_labels(T_s, T_t, self.plain, positive_mass)
        return Y_s, Y_t

    def cross_entropies(
        self,
        P_s: Contrast,
        P_t: Contrast,
        p_s: Tensor,
        p_t: Tensor,
        Y_s: Tensor | None,
        Y_t: Tensor | None,
        consistency_weight: Value | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The weighted sum of the terms, and each by itself (step 6).

        Targets are the teachers' probabilities p and the labels Y, with a row for every one of P.
        The weight may be another at every step; terms whose own weight is 0 are left out.
        """
        weight = self.consistency_weight if consistency_weight is None else consistency_weight
        if Y_s is None or Y_t is None:
            terms = {"contrast_source": P_s.infonce(), "contrast_target": P_t.infonce()}
        else:
            terms = {
                "labels_source": P_t.cross_entropy(Y_s),
                "labels_target": P_s.cross_entropy(Y_t),
            }
        parts = list(terms.values())
        if self.consistency_weight > 0:
            agreement = consistency(P_s, P_t, p_s, p_t)
            terms |= agreement
            parts += [scaled(term, weight) for term in agreement.values()]
        return torch.stack(parts).sum(), terms

    def labels_among(
        self, q_s: Tensor, k_s: Tensor, k_t: Tensor, temperature: float
    ) -> Tensor | None:
        """How source queries share out the labels' mass among each other's images, as
        ``SoftLabels.among`` does; nothing where negatives have no share in labels."""
        if self.soft_labels is None or self.soft_labels.positive_mass == 1:
            return None
        told_by = k_s if self.teacher == "keys" else q_s
        return self.soft_labels.among(told_by, k_t, temperature)

    def remember(self, T_s: Contrast, T_t: Contrast) -> None:
        """The label history moves on."""
        if self.soft_labels is not None:
            self.soft_labels.remember(T_s, T_t)
