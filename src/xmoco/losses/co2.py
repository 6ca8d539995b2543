"""CO2: a query and its key should be as similar to each of the negatives."""

from torch import Tensor

from xmoco.losses.contrast import Contrast, Similarities, similarities


def disagreement(P: Contrast, temperature: float) -> Tensor:
    """½·(KL(T‖Q) + KL(Q‖T)), mean over rows; Q and T are the softmaxes of queries and of their
    keys over the negatives, at a temperature of their own. No gradient through T."""
    told = similarities(P.keys, P.bank, temperature)
    return symmetric_divergence(P.among_negatives(temperature), told.log_p)


def symmetric_divergence(Q: Similarities, log_target: Tensor) -> Tensor:
    """½·(KL(T‖Q) + KL(Q‖T)), mean over rows."""
    gap = Q.log_p - log_target
    value = 0.5 * ((Q.log_p.exp() - log_target.exp()) * gap).sum(dim=1).mean()
    # By the logits: Q − T from the first divergence, Q·(gap − its mean by Q) from the second.
    centred = gap.detach() - (Q.p * gap.detach()).sum(dim=1, keepdim=True)
    return Q.pulled(value, 0.5 * (Q.p - log_target.exp() + Q.p * centred))
