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
from xmoco.losses.similarity import cross_entropy, crossed_similarities, precise


@dataclass
class Contrast:
    """A side: log P and P (N, 1+K) are the similarities of its queries to their keys and a bank.

    Where autograd already follows log P, its cross entropies are left to it.
    """

    queries: Tensor
    keys: Tensor
    bank: Tensor
    temperature: float
    log_p: Tensor
    p: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.p = self.log_p.detach().exp()

    def cross_entropy(self, target: Tensor) -> Tensor:
        """Mean over rows of CE(target, P)."""
        value = cross_entropy(target, self.log_p)
        return value if self._left_to_autograd else self._pulled(value, self.p - target)

    def infonce(self) -> Tensor:
        """The same for one-hot targets on the positives."""
        value = infonce(self.log_p)
        if self._left_to_autograd:
            return value
        excess = self.p.clone()
        excess[:, 0] -= 1
        return self._pulled(value, excess)

    @property
    def _left_to_autograd(self) -> bool:
        return self.log_p.requires_grad or not torch.is_grad_enabled()

    def _pulled(self, value: Tensor, excess: Tensor) -> Tensor:
        """``value`` with its gradient by the queries, where ``excess`` is P − target."""
        with torch.no_grad(), torch.autocast(excess.device.type, enabled=False):
            gradient = excess[:, 1:] @ self.bank.to(excess.dtype)
            gradient += excess[:, :1] * self.keys.to(excess.dtype)
            gradient /= len(excess) * self.temperature
        result: Tensor = _KnownGradient.apply(precise(self.queries), value, gradient)
        return result


def checked_temperature(temperature: float) -> float:
    if temperature <= 0:
        raise ValueError(f"temperature {temperature} must be above 0")
    return temperature


def crossed(
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
    bank_s, bank_t = banks.source, banks.target
    followed = plain and torch.is_grad_enabled()
    if followed:
        bank_s, bank_t = bank_s.clone(), bank_t.clone()
    with torch.set_grad_enabled(followed):
        log_p_s = crossed_similarities(q_s, k_t, bank_t, temperature)
        log_p_t = crossed_similarities(q_t, k_s, bank_s, temperature)
    return (
        Contrast(q_s, k_t, bank_t, temperature, log_p_s),
        Contrast(q_t, k_s, bank_s, temperature, log_p_t),
    )


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
