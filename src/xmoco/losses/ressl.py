"""ReSSL: a query is as similar to past keys as its own key is; there is no positive."""

from torch import Tensor

from xmoco.losses.contrast import similarities


def relational_loss(
    queries: Tensor, keys: Tensor, bank: Tensor, *, temperature: float, key_temperature: float
) -> Tensor:
    """Mean over rows of CE(softmax(k·B/τ_k), softmax(q·B/τ)); gradients reach the queries only."""
    target = similarities(keys, bank, key_temperature).p
    return similarities(queries, bank, temperature).cross_entropy(target)
