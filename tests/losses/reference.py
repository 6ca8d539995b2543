"""The paper's Algorithm 1 in float64 numpy, written from its text and not from this project's code.

``get_prob``, ``sinkhorn`` and ``loss_terms`` follow the listing line by line, powers of
probabilities and the first division by the sum included. ``Algorithm`` plays its loop with the one
thing the listing leaves out: the label history, as extra rows of the transport (specification,
"The label history"). Banks and history are filled row by row, so that nothing has to be clever.
"""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def softmax(logits: Array) -> Array:
    exponentials: Array = np.exp(logits - logits.max(axis=1, keepdims=True))
    exponentials /= exponentials.sum(axis=1, keepdims=True)
    return exponentials


def get_prob(q: Array, k: Array, bank: Array, tau: float) -> Array:
    l_pos = (q * k).sum(axis=1, keepdims=True)
    l_neg = q @ bank.T
    return softmax(np.concatenate([l_pos, l_neg], axis=1) / tau)


def sinkhorn(out: Array, lam: float, xi: float, niters: int, history: Array | None = None) -> Array:
    """Equations 11 and 12. ``history`` (M − N, K) are past probabilities over the negatives."""
    negatives = out[:, 1:] if history is None else np.concatenate([out[:, 1:], history])
    M, K = negatives.shape
    Y = ((negatives / M) ** lam).T
    Y = Y / Y.sum()
    for _ in range(niters):
        Y = Y / (Y.sum(axis=1, keepdims=True) * K)
        Y = Y / (Y.sum(axis=0, keepdims=True) * M)
    Y = np.concatenate([xi * np.ones((1, M)), ((1 - xi) * M) * Y])
    return Y.T[: len(out)]


def cross_entropy(target: Array, prediction: Array) -> float:
    return float(-(target * np.log(prediction)).sum(axis=1).mean())


def loss_terms(Ps: Array, Pt: Array, Ys: Array, Yt: Array) -> dict[str, float]:
    """The four terms of L with the brackets it obviously means; equation 13."""
    return {
        "labels_source": cross_entropy(Ys, Pt),
        "labels_target": cross_entropy(Yt, Ps),
        "consistency_source": cross_entropy(Ps, Pt),
        "consistency_target": cross_entropy(Pt, Ps),
    }


@dataclass
class Algorithm:
    """The loop of Algorithm 1 from the features on: loss, then enqueue and dequeue."""

    Ks: Array
    Kt: Array
    tau: float
    lam: float
    xi: float
    niters: int
    history: str = "none"
    enqueued: int = 0
    past_s: dict[int, Array] = field(default_factory=dict)  # by slot
    past_t: dict[int, Array] = field(default_factory=dict)

    def step(self, qs: Array, qt: Array, ks: Array, kt: Array) -> dict[str, float]:
        Ps = get_prob(qs, kt, self.Kt, self.tau)
        Pt = get_prob(qt, ks, self.Ks, self.tau)
        Ys = self.labels(Ps, self.past_s, self.Kt)
        Yt = self.labels(Pt, self.past_t, self.Ks)
        terms = loss_terms(Ps, Pt, Ys, Yt)
        for n in range(len(qs)):
            slot = self.enqueued % len(self.Ks)
            self.Ks[slot], self.Kt[slot] = ks[n], kt[n]
            if self.history == "queries":
                self.past_s[slot], self.past_t[slot] = qs[n], qt[n]
            elif self.history == "probabilities":
                self.past_s[slot], self.past_t[slot] = Ps[n, 1:], Pt[n, 1:]
            self.enqueued += 1
        return terms

    def labels(self, P: Array, past: dict[int, Array], bank: Array) -> Array:
        if len(past) < len(bank):
            return sinkhorn(P, self.lam, self.xi, self.niters)
        if self.history == "probabilities":
            rows = np.stack([past[slot] for slot in range(len(bank))])
        else:
            rows = np.stack([self.as_past(past[slot], slot, bank) for slot in range(len(bank))])
        return sinkhorn(P, self.lam, self.xi, self.niters, rows)

    def as_past(self, q: Array, slot: int, bank: Array) -> Array:
        """A past query's own key, its positive, sits in the bank: in the softmax, no negative."""
        others = np.delete(bank, slot, axis=0)
        P = get_prob(q[None], bank[slot][None], others, self.tau)
        return np.insert(P[0, 1:], slot, 0.0)
