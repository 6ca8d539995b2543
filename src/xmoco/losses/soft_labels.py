"""Soft labels by optimal transport (paper, equations 7 to 12; step 5 of the method)."""

from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from xmoco.losses.bank import SharedRing
from xmoco.losses.contrast import Contrast
from xmoco.losses.similarity import past_similarities
from xmoco.losses.sinkhorn import column_scaling
from xmoco.losses.streamed import can_stream, streamed_column_scaling
from xmoco.schedules import Value

History = Literal["queries", "probabilities", "none"]


class SoftLabels(nn.Module):
    """Labels Y_s from P_s and Y_t from P_t; owns the label history.

    Any method that contrasts two sides over banks whose slots belong together can use it.

    Args:
        feature_size: length d of queries.
        bank_length: negatives K of either side.
        sharpness: λ, how closely the labels follow the similarities.
        positive_mass: ξ, the share of a label given to the positive; 1 makes labels one-hot.
        iterations: rounds of Sinkhorn balancing.
        history: what joins the balancing once K of it are known, since a batch has fewer samples
            than the banks have keys: past ``queries``, compared anew with today's bank (K·d
            numbers a side), past ``probabilities`` as in the paper (K² a side), or ``none``.
    """

    def __init__(
        self,
        feature_size: int,
        bank_length: int,
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
        super().__init__()
        self.sharpness = sharpness
        self.positive_mass = positive_mass
        self.iterations = iterations
        self.history_kind = history
        widths = {"queries": feature_size, "probabilities": bank_length}
        self.history = None if history == "none" else SharedRing(bank_length, widths[history])

    @torch.no_grad()
    def forward(
        self,
        P_s: Contrast,
        P_t: Contrast,
        plain: bool = False,
        positive_mass: Value | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Past queries are streamed where that is possible, unless ``plain``. ξ may be another at
        every step."""
        if not plain and self.history_kind == "queries" and can_stream(P_s.queries):
            columns_s, columns_t = self._streamed(P_s, P_t)
        else:
            columns_s, columns_t = self._balanced(P_s, "source"), self._balanced(P_t, "target")
        mass = self.positive_mass if positive_mass is None else positive_mass
        return self._labels(P_s.log_p, columns_s, mass), self._labels(P_t.log_p, columns_t, mass)

    @torch.no_grad()
    def among(self, queries: Tensor, keys: Tensor, temperature: float) -> Tensor:
        """How the images of a batch would share out the labels' mass among each other.

        Row i of (N, N) sums to one and has nothing for i itself, whose key is its positive. For
        whoever wants to look at labels: as many samples as negatives, and no history.
        """
        slots = torch.arange(len(queries), device=queries.device)
        kernel = self.sharpness * past_similarities(queries, slots, keys, temperature)
        return (kernel + column_scaling(kernel, self.iterations)).softmax(dim=1)

    def remember(self, P_s: Contrast, P_t: Contrast) -> None:
        """This batch joins the history."""
        if self.history is None:
            return
        if self.history_kind == "queries":
            self.history.enqueue(P_s.queries, P_t.queries)
        else:
            self.history.enqueue(P_s.log_p[:, 1:], P_t.log_p[:, 1:])

    def _labels(self, log_p: Tensor, columns: Tensor, mass: Value) -> Tensor:
        return balanced_labels(log_p, columns, positive_mass=mass, sharpness=self.sharpness)

    def _balanced(self, P: Contrast, side: Literal["source", "target"]) -> Tensor:
        past, counts = None, None
        if self.history is not None and self.history.full:
            past, counts = self._past(self.history, P, side), self.history.counts
        return negatives_scaling(
            P.log_p,
            sharpness=self.sharpness,
            iterations=self.iterations,
            history=past,
            history_counts=counts,
        )

    def _past(self, history: SharedRing, P: Contrast, side: Literal["source", "target"]) -> Tensor:
        """Past samples' log P over the negatives, this process's share."""
        past = history.own_rows[0 if side == "source" else 1]
        if self.history_kind == "probabilities":
            return past
        return past_similarities(past, history.slots, P.bank, P.temperature)

    def _streamed(self, P_s: Contrast, P_t: Contrast) -> Tensor:
        assert self.history is not None
        return streamed_column_scaling(
            queries=torch.stack([P_s.queries, P_t.queries]),
            keys=torch.stack([P_s.keys, P_t.keys]),
            banks=torch.stack([P_s.bank, P_t.bank]),
            past=torch.stack(self.history.own_rows),
            past_slots=self.history.slots,
            past_counts=self.history.counts,
            temperature=P_s.temperature,
            sharpness=self.sharpness,
            iterations=self.iterations,
        )


def weighted_soft_labels(
    weight: float,
    feature_size: int,
    bank_length: int,
    sharpness: float,
    positive_mass: float,
    iterations: int,
    history: History,
) -> SoftLabels | None:
    """Soft labels of a share ``weight``, the rest being one-hot; none where all is."""
    if not 0 <= weight <= 1:
        raise ValueError(f"label_weight {weight} must be from 0 to 1")
    if weight == 0:
        return None
    mass = weighted_mass(weight, positive_mass)
    return SoftLabels(feature_size, bank_length, sharpness, mass, iterations, history)


def weighted_mass(weight: float, positive_mass: float) -> float:
    """One-hot labels of weight 1−w beside soft ones of weight w are soft ones of a larger ξ."""
    return 1 - weight * (1 - positive_mass) if weight < 1 else positive_mass


@torch.no_grad()
def soft_labels(
    log_probabilities: Tensor,
    *,
    positive_mass: float,
    sharpness: float,
    iterations: int,
    history: Tensor | None = None,
) -> Tensor:
    """Labels Y of shape (N, 1+K): column 0 is ξ, rows sum to one, and over all samples every
    negative gets the same total.

    ``log_probabilities`` (N, 1+K) are this batch's crossed similarities. ``history`` (M, K) are
    log probabilities of past samples over the negatives: with fewer samples than negatives the
    equal totals are out of reach, so past samples take part in the balancing, but get no labels.
    """
    columns = negatives_scaling(
        log_probabilities, sharpness=sharpness, iterations=iterations, history=history
    )
    return balanced_labels(
        log_probabilities, columns, positive_mass=positive_mass, sharpness=sharpness
    )


@torch.no_grad()
def negatives_scaling(
    log_probabilities: Tensor,
    *,
    sharpness: float,
    iterations: int,
    history: Tensor | None = None,
    history_counts: Tensor | None = None,
) -> Tensor:
    """log β of the negatives, shape (K,), that gives each the same total.

    ``history_counts`` (M,) tells which rows of the history take part; without it, all do.

    The kernel is P^λ with P's own normalisation: λ·S/τ alone has the same limit, but after few
    rounds it is another plan, since negatives are balanced first and then weigh samples
    differently.
    """
    negatives = log_probabilities[:, 1:]
    if history is None:
        return column_scaling(negatives * sharpness, iterations)
    rows, takes_part = torch.cat([negatives, history]).mul_(sharpness), None
    if history_counts is not None and history_counts.dim():
        takes_part = F.pad(history_counts, (len(negatives), 0), value=True)
    return column_scaling(rows, iterations, takes_part)


@torch.no_grad()
def balanced_labels(
    log_probabilities: Tensor, columns: Tensor, *, positive_mass: Value, sharpness: float
) -> Tensor:
    """Labels from the scaling log β of the negatives, shape (K,), that balances them."""
    shares = (sharpness * log_probabilities[:, 1:] + columns).softmax(dim=1)
    positive = torch.zeros_like(shares[:, :1]) + positive_mass
    return torch.cat([positive, (1 - positive_mass) * shares], dim=1)
