"""Optimisers by their settings. Every rate is a multiple of the one scheduled rate."""

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, cast, overload

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from xmoco.config.optimizers import AdamWConfig, LARSConfig, OptimConfig, SGDConfig
from xmoco.task import ParamGroup


def build_optimizer(
    settings: OptimConfig,
    groups: Sequence[ParamGroup],
    device: torch.device,
    exempt: Collection[nn.Parameter] = (),
) -> Optimizer:
    """Each group has a ``rate_factor``, by which the loop multiplies the scheduled rate, or the
    peak of it where it is not ``scheduled``. ``exempt`` do not decay where norms and biases do
    not."""
    parts = _with_decay(groups, settings, exempt)
    fused = device.type in ("cpu", "cuda")
    match settings:
        case SGDConfig():
            return torch.optim.SGD(
                parts,
                settings.learning_rate,
                momentum=settings.sgd_momentum,
                nesterov=settings.nesterov,
                fused=fused,
            )
        case LARSConfig():
            return LARS(
                parts,
                settings.learning_rate,
                momentum=settings.sgd_momentum,
                trust=settings.trust,
                clip=settings.clip,
            )
        case AdamWConfig():
            return torch.optim.AdamW(
                parts,
                settings.learning_rate,
                betas=settings.betas,
                fused=fused,
                capturable=device.type == "cuda",
            )


def never_decayed(task: nn.Module) -> set[nn.Parameter]:
    """Tokens, positions and the like, of more than one dimension, that backbones of timm name."""
    found = set()
    for module in task.modules():
        names: Callable[[], Collection[str]] | None = getattr(module, "no_weight_decay", None)
        if names is not None:
            own = dict(module.named_parameters())
            found |= {own[name] for name in names() if name in own}
    return found


MEMORY: dict[type[Optimizer], frozenset[str]] = {
    torch.optim.SGD: frozenset({"momentum_buffer"}),
    torch.optim.AdamW: frozenset({"step", "exp_avg", "exp_avg_sq"}),
}
"""What an optimiser remembers of each parameter; LARS as SGD."""


def remembers_rightly(optimizer: Optimizer) -> bool:
    """Whether all it remembers, from a file perhaps, is of its kind and of the parameters'
    shapes: the optimiser itself would find out in the middle of a step."""
    kinds = (MEMORY[kind] for kind in MEMORY if isinstance(optimizer, kind))
    names = next(kinds, MEMORY[torch.optim.SGD])
    return all(
        isinstance(parameter, Tensor)
        and state.keys() in (set(), names)
        and all(isinstance(value, Tensor) for value in state.values())
        and all(value.shape in ((), parameter.shape) for value in state.values())
        for parameter, state in optimizer.state.items()
    )


def _with_decay(
    groups: Sequence[ParamGroup], settings: OptimConfig, exempt: Collection[nn.Parameter]
) -> list[dict[str, Any]]:
    """The groups, cut in two where norms and biases (tensors of one dimension) do not decay.

    To those LARS does not adapt its steps either, as in SimCLR's, BYOL's and Barlow Twins'
    programs; SwAV's does both to all.
    """
    apart, spared = not settings.decay_norms_and_biases, set(exempt)
    parts: list[dict[str, Any]] = []
    for parameters, factor, scheduled, decays in groups:
        matrices = [p for p in parameters if not apart or (p.ndim > 1 and p not in spared)]
        vectors = [p for p in parameters if apart and (p.ndim <= 1 or p in spared)]
        for members, decay, adapt in (
            (matrices, settings.weight_decay if decays else 0.0, True),
            (vectors, 0.0, False),
        ):
            if members:
                part = {"params": members, "weight_decay": decay, "rate_factor": factor}
                part["scheduled"] = scheduled
                parts.append(part | ({"adapt": adapt} if isinstance(settings, LARSConfig) else {}))
    return parts


class LARS(Optimizer):
    """SGD with momentum whose step for every layer is a share of the layer's own length.

    In a group that adapts, the decayed gradient g + w·p of a layer is multiplied with
    ``trust`` · ‖p‖ / ‖g + w·p‖ (1 where either is 0) before it enters the momentum, as in Barlow
    Twins' and MoCo v3's programs. With ``clip`` the layer's own rate is
    ``trust`` · ‖p‖ / (‖g‖ + w‖p‖ + ε) or, if that is less, the given one, as in LARC and in
    solo-learn's LARS; a layer without a gradient does not decay either. Rates may be numbers on the
    device, for CUDA graphs.
    """

    EPSILON = 1e-8
    """That is added to the denominator with ``clip``."""

    def __init__(
        self,
        params: Iterable[dict[str, Any]] | Iterable[Tensor],
        lr: float,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust: float = 0.001,
        clip: bool = False,
        adapt: bool = True,
    ) -> None:
        defaults = {
            "lr": lr, "momentum": momentum, "weight_decay": weight_decay, "trust": trust,
            "clip": clip, "adapt": adapt,
        }  # fmt: skip
        super().__init__(params, defaults)

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            weights: list[Tensor] = [p for p in group["params"] if p.grad is not None]
            if not weights:
                continue
            gradients = [cast(Tensor, p.grad) for p in weights]
            decay = torch._foreach_mul(weights, group["weight_decay"])
            steps = list(torch._foreach_add(gradients, list(decay)))
            if group["adapt"]:
                shares = (
                    self._clipped_shares(weights, gradients, group)
                    if group["clip"]
                    else self._shares(weights, steps, group["trust"])
                )
                torch._foreach_mul_(steps, shares)
            buffers = []
            for weight in weights:
                state = self.state[weight]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(weight)
                buffers.append(state["momentum_buffer"])
            torch._foreach_mul_(buffers, group["momentum"])
            torch._foreach_add_(buffers, steps)
            torch._foreach_sub_(weights, torch._foreach_mul(buffers, group["lr"]))
        return loss

    @staticmethod
    def _shares(weights: list[Tensor], steps: list[Tensor], trust: float) -> list[Tensor]:
        lengths, moves = torch._foreach_norm(weights), torch._foreach_norm(steps)
        return [
            torch.where((length > 0) & (move > 0), trust * length / move, 1.0)
            for length, move in zip(lengths, moves, strict=True)
        ]

    @classmethod
    def _clipped_shares(
        cls, weights: list[Tensor], gradients: list[Tensor], group: dict[str, Any]
    ) -> list[Tensor]:
        trust, decay, rate = group["trust"], group["weight_decay"], group["lr"]
        lengths, slopes = torch._foreach_norm(weights), torch._foreach_norm(gradients)
        shares = []
        for length, slope in zip(lengths, slopes, strict=True):
            share = trust * length / (slope + decay * length + cls.EPSILON)
            clipped = torch.where(slope > 0, (share / rate).clamp(max=1), 0.0)
            shares.append(torch.where(length > 0, clipped, 1.0))
        return shares
