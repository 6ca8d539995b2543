"""One side's queries against keys, and cross entropies whose gradient is known beforehand.

A target whose rows sum to one, and which carries no gradient, pulls the logits by P − target. So
the gradient of the queries, N·d numbers, is known as soon as P is. Autograd would keep several
matrices of N×(1+K) for its backward pass, and copies of the banks, which change before it.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from xmoco.losses.bank import KeyBanks
from xmoco.losses.infonce import infonce
from xmoco.losses.similarity import (
    bank_similarities,
    cross_entropy,
    crossed_similarities,
    precise,
)


@dataclass
class Similarities:
    """log P and P (N, K): how similar queries are to the keys of a bank.

    Where autograd already follows log P, its cross entropies are left to it.
    """

    queries: Tensor
    bank: Tensor
    temperature: float
    log_p: Tensor
    p: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.p = self.log_p.detach().exp()

    def cross_entropy(self, target: Tensor) -> Tensor:
        """Mean over rows of CE(target, P)."""
        return self.pulled(cross_entropy(target, self.log_p), self.p - target)

    def pulled(self, value: Tensor, excess: Tensor) -> Tensor:
        """``value``, a mean over rows, with its gradient by the queries.

        ``excess`` (of the shape of P) are the derivatives of the rows by their logits, for cross
        entropies P − target.
        """
        if self.log_p.requires_grad or not torch.is_grad_enabled():
            return value
        with torch.no_grad(), torch.autocast(excess.device.type, enabled=False):
            gradient = self._gradient(excess) / (len(excess) * self.temperature)
        return with_gradient(self.queries, value, gradient)

    def _gradient(self, excess: Tensor) -> Tensor:
        return excess @ self.bank.to(excess.dtype)


@dataclass
class Contrast(Similarities):
    """With a positive in front: log P and P (N, 1+K) are the similarities to one's own key and to
    those of a bank."""

    keys: Tensor

    def infonce(self) -> Tensor:
        """The cross entropy with one-hot targets on the positives."""
        excess = self.p.clone()
        excess[:, 0] -= 1
        return self.pulled(infonce(self.log_p), excess)

    def among_negatives(self, temperature: float) -> Similarities:
        """The same without the positives, at another temperature."""
        with torch.set_grad_enabled(self.log_p.requires_grad):
            logits = self.log_p[:, 1:] * (self.temperature / temperature)  # up to a row's constant
            log_p = logits.log_softmax(dim=1)
        return Similarities(self.queries, self.bank, temperature, log_p)

    def _gradient(self, excess: Tensor) -> Tensor:
        gradient = excess[:, 1:] @ self.bank.to(excess.dtype)
        gradient += excess[:, :1] * self.keys.to(excess.dtype)
        return gradient


def checked_temperature(temperature: float) -> float:
    if temperature <= 0:
        raise ValueError(f"temperature {temperature} must be above 0")
    return temperature


def contrast_both_sides(
    q_s: Tensor,
    q_t: Tensor,
    k_s: Tensor,
    k_t: Tensor,
    banks: KeyBanks,
    temperature: float,
    plain: bool = False,
) -> tuple[Contrast, Contrast]:
    """P_s of source queries over target keys, and P_t the other way round (step 4).

    ``plain`` is the reference, for tests and benchmarks: autograd follows. It gets copies of the
    banks, which change before it is run.
    """
    expected = (len(q_s), banks.source.shape[1])
    for name, features in {"q_s": q_s, "q_t": q_t, "k_s": k_s, "k_t": k_t}.items():
        if features.shape != expected:
            raise ValueError(
                f"{name} has shape {tuple(features.shape)}, expected {expected}: one row per "
                "image of the batch, as long as feature_size."
            )
    return (
        contrast(q_s, k_t, banks.target, temperature, plain),
        contrast(q_t, k_s, banks.source, temperature, plain),
    )


def contrast(
    queries: Tensor, keys: Tensor, bank: Tensor, temperature: float, plain: bool = False
) -> Contrast:
    """Queries over their keys and a bank; ``plain`` as in ``contrast_both_sides``."""
    followed = plain and torch.is_grad_enabled()
    if followed:
        bank = bank.clone()
    with torch.set_grad_enabled(followed):
        log_p = crossed_similarities(queries, keys, bank, temperature)
    return Contrast(queries, bank, temperature, log_p, keys)


def similarities(queries: Tensor, bank: Tensor, temperature: float) -> Similarities:
    """Queries over a bank alone."""
    log_p = bank_similarities(queries, bank, temperature)
    return Similarities(queries, bank, temperature, log_p)


def with_gradient(queries: Tensor, value: Tensor, gradient: Tensor) -> Tensor:
    """``value``, for which autograd finds this gradient by the queries."""
    result: Tensor = _KnownGradient.apply(precise(queries), value, gradient)
    return result


class _KnownGradient(torch.autograd.Function):
    """A number with the gradient that autograd is to find for it."""

    @staticmethod
    def forward(ctx: Any, _queries: Tensor, value: Tensor, gradient: Tensor) -> Tensor:
        ctx.save_for_backward(gradient)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, outer: Tensor) -> tuple[Tensor, None, None]:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # create_graph=True
            raise RuntimeError("these losses have no second derivatives; set plain = True for them")
        (gradient,) = ctx.saved_tensors
        return outer * gradient, None, None
