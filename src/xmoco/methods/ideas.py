"""XMoCo's two ideas in other methods: none of it unless their settings ask for it."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from xmoco.config.shared import BankIdeasConfig, ConsistencyConfig, IdeasConfig
from xmoco.losses.contrast import Contrast
from xmoco.losses.cross_similarity import CrossSimilarity
from xmoco.losses.soft_labels import weighted_soft_labels
from xmoco.methods.base import named
from xmoco.schedules import Schedule, warmed_up
from xmoco.task import Values


def build_ideas(
    settings: IdeasConfig, feature_size: int = 0, bank_length: int = 0
) -> CrossSimilarity | None:
    """What compares both sides instead of InfoNCE. The lengths are those of a label history, which
    only a method with banks can have."""
    if not settings.added:
        return None
    labels = weighted_soft_labels(
        settings.label_weight,
        feature_size,
        bank_length,
        settings.sharpness,
        settings.positive_mass,
        settings.sinkhorn_iterations,
        settings.history if isinstance(settings, BankIdeasConfig) else "none",
    )
    return CrossSimilarity(labels, settings.consistency_weight)


def loss_and_terms(
    ideas: CrossSimilarity | None, contrasts: Sequence[Contrast], at: Values
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss and its terms: InfoNCE of every direction, or what the ideas make of both."""
    if ideas is None:
        losses = [P.infonce() for P in contrasts]
        return torch.stack(losses).sum(), named("contrast", losses)
    P_s, P_t = contrasts
    return ideas.compare(P_s, P_t, at["consistency_weight"])


def ideas_schedules(settings: ConsistencyConfig) -> Mapping[str, Schedule]:
    weight, epochs = settings.consistency_weight, settings.consistency_warmup_epochs
    return {"consistency_weight": warmed_up(weight, epochs)} if settings.added else {}
