"""XMoCo's two ideas in other methods: none of it unless their settings ask for it."""

from collections.abc import Mapping

from xmoco.config import BankIdeasConfig, ConsistencyConfig, IdeasConfig
from xmoco.losses.cross_similarity import CrossSimilarity
from xmoco.losses.soft_labels import weighted_soft_labels
from xmoco.schedules import Schedule, warmed_up


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


def ideas_schedules(settings: ConsistencyConfig) -> Mapping[str, Schedule]:
    weight, epochs = settings.consistency_weight, settings.consistency_warmup_epochs
    return {"consistency_weight": warmed_up(weight, epochs)} if settings.added else {}
