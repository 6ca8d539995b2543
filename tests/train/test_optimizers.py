"""Optimisers against plain transcriptions and PyTorch's own; which parameters they treat how."""

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.testing import assert_close

from xmoco.config.optimizers import AdamWConfig, LARSConfig, OptimConfig, SGDConfig
from xmoco.data import Batch
from xmoco.fabric import Fabric
from xmoco.schedules import Clock, HalfCosine
from xmoco.task import Moment, ParamGroup, StepOutput, Task
from xmoco.train.optimizers import LARS, build_optimizer, never_decayed
from xmoco.train.step import build_stepper

CPU = torch.device("cpu")
SHAPES = ((5, 4), (3, 2, 3, 3), (4, 6), (7,), (6,), ())
"""The first three are a layer's weights, the others norms and biases."""


def parameters(seed: int = 0, dtype: torch.dtype = torch.float64) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [
        nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype))
        for shape in SHAPES
    ]


def gradients(step: int, shapes: Sequence[tuple[int, ...]] = SHAPES) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1000 + step)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def take(optimizer: Optimizer, weights: Sequence[nn.Parameter], step: int) -> None:
    for weight, gradient in zip(weights, gradients(step), strict=True):
        weight.grad = gradient.to(weight.dtype)
    optimizer.step()


@pytest.mark.parametrize("settings", [SGDConfig(), LARSConfig(), AdamWConfig()])
@pytest.mark.parametrize("apart", [True, False])
def test_tokens_and_positions_decay_only_where_norms_and_biases_do(
    settings: OptimConfig, apart: bool
) -> None:
    timm = pytest.importorskip("timm")
    model = nn.Sequential(timm.create_model("test_vit", num_classes=0))
    named = {model[0].pos_embed, model[0].cls_token}
    assert never_decayed(model) == named
    assert never_decayed(nn.Linear(2, 3)) == set()
    settings = settings.model_copy(update={"decay_norms_and_biases": not apart})
    optimizer = build_optimizer(settings, [ParamGroup(list(model.parameters()))], CPU, named)
    still = {
        p for group in optimizer.param_groups if not group["weight_decay"] for p in group["params"]
    }
    vectors = {p for p in model.parameters() if p.ndim <= 1}
    assert still == (vectors | named if apart else set())


# --- LARS -------------------------------------------------------------------------------------


def lars_by_hand(
    weights: Sequence[np.ndarray],
    steps: Sequence[Sequence[np.ndarray | None]],
    rates: Sequence[float],
    *,
    momentum: float,
    decay: float,
    trust: float,
    adapt: bool,
    clip: bool = False,
) -> list[np.ndarray]:
    """You, Gitman & Ginsburg's algorithm, one layer and step at a time; with ``clip``, that of LARC
    and of solo-learn's LARS, which leaves decay out where nothing is adapted."""
    ends = []
    for layer, start in enumerate(weights):
        weight, velocity = start.copy(), np.zeros_like(start)
        for gradient, rate in zip((step[layer] for step in steps), rates, strict=True):
            if gradient is None:
                continue
            change = gradient + decay * weight
            own, slope, moved = (np.sqrt((x**2).sum()) for x in (weight, gradient, change))
            if adapt and clip:
                if own > 0 and slope > 0:
                    share = trust * own / (slope + decay * own + 1e-8)
                    change = change * min(share / rate, 1)
                else:
                    change = gradient
            elif adapt and own > 0 and moved > 0:
                change = change * (trust * own / moved)
            velocity = momentum * velocity + change
            weight = weight - rate * velocity
        ends.append(weight)
    return ends


@settings(deadline=None, max_examples=40)
@given(
    momentum=st.sampled_from((0.0, 0.9)),
    decay=st.sampled_from((0.0, 0.1)),
    trust=st.sampled_from((0.001, 0.2)),
    clip=st.booleans(),
    adapt=st.booleans(),
    seed=st.integers(0, 99),
    as_tensor=st.booleans(),
)
def test_lars_is_its_algorithm(
    momentum: float,
    decay: float,
    trust: float,
    clip: bool,
    adapt: bool,
    seed: int,
    as_tensor: bool,
) -> None:
    """Layers of zeros, gradients of zeros, layers without gradients; rates that change."""
    weights = parameters(seed)
    with torch.no_grad():
        weights[1].zero_()
    rates = [0.5, 0.1, 2.0, 0.7, 0.3]
    steps: list[list[Tensor | None]] = []
    for step in range(5):
        given_ones: list[Tensor | None] = list(gradients(100 * seed + step))
        given_ones[2] = torch.zeros(SHAPES[2], dtype=torch.float64)
        if step == 0:
            given_ones[1] = torch.zeros(SHAPES[1], dtype=torch.float64)
        if step in (1, 3):
            given_ones[0] = None
        steps.append(given_ones)
    expected = lars_by_hand(
        [weight.detach().numpy().copy() for weight in weights],
        [[None if g is None else g.numpy() for g in step] for step in steps],
        rates,
        momentum=momentum,
        decay=decay,
        trust=trust,
        clip=clip,
        adapt=adapt,
    )
    optimizer = LARS(
        weights, 1.0, momentum=momentum, weight_decay=decay, trust=trust, clip=clip, adapt=adapt
    )
    for rate, given_ones in zip(rates, steps, strict=True):
        for weight, gradient in zip(weights, given_ones, strict=True):
            weight.grad = None if gradient is None else gradient.clone()
        optimizer.param_groups[0]["lr"] = torch.tensor(rate) if as_tensor else rate
        optimizer.step()
    for weight, end in zip(weights, expected, strict=True):
        rounding = 1e-6 if as_tensor else 1e-12  # rates on the device are of single precision
        np.testing.assert_allclose(weight.detach(), end, rtol=rounding, atol=rounding)


@pytest.mark.parametrize("everywhere", [True, False])
def test_lars_adapts_to_norms_and_biases_where_these_decay(everywhere: bool) -> None:
    """As SwAV's program does to all; the others' leave them alone."""
    weights = parameters()
    settings = LARSConfig(
        weight_decay=0.1, trust=0.02, sgd_momentum=0.8, decay_norms_and_biases=everywhere
    )
    optimizer = build_optimizer(settings, [ParamGroup(weights)], CPU)
    starts = [weight.detach().numpy().copy() for weight in weights]
    steps = [[g.numpy() for g in gradients(step)] for step in range(4)]
    for step in range(4):
        for group in optimizer.param_groups:
            group["lr"] = 0.3
        take(optimizer, weights, step)
    for members, adapt in ((slice(0, 3), True), (slice(3, 6), everywhere)):
        expected = lars_by_hand(
            starts[members],
            [step[members] for step in steps],
            [0.3] * 4,
            momentum=0.8,
            decay=0.1 if adapt else 0.0,
            trust=0.02,
            adapt=adapt,
        )
        for weight, end in zip(weights[members], expected, strict=True):
            np.testing.assert_allclose(weight.detach(), end, rtol=1e-12)


def test_lars_gives_back_what_its_closure_does() -> None:
    (weight, *_) = parameters()
    optimizer = LARS([weight], 0.1)

    def closure() -> float:
        optimizer.zero_grad()
        loss = (weight**2).sum()
        loss.backward()
        return float(loss.detach())

    before = float((weight.detach() ** 2).sum())
    assert optimizer.step(closure) == before
    assert float((weight.detach() ** 2).sum()) < before


# --- PyTorch's own ----------------------------------------------------------------------------


def torch_sgd(weights: list[nn.Parameter]) -> Optimizer:
    return torch.optim.SGD(weights, 0.2, momentum=0.8, weight_decay=0.05, fused=False)


def torch_nesterov(weights: list[nn.Parameter]) -> Optimizer:
    return torch.optim.SGD(weights, 0.2, momentum=0.8, weight_decay=0.05, nesterov=True)


def torch_adamw(weights: list[nn.Parameter]) -> Optimizer:
    return torch.optim.AdamW(weights, 0.2, betas=(0.8, 0.95), weight_decay=0.05, fused=False)


OWN = {
    "sgd": (SGDConfig(learning_rate=0.2, sgd_momentum=0.8, weight_decay=0.05), torch_sgd),
    "nesterov": (
        SGDConfig(learning_rate=0.2, sgd_momentum=0.8, weight_decay=0.05, nesterov=True),
        torch_nesterov,
    ),
    "adamw": (AdamWConfig(learning_rate=0.2, betas=(0.8, 0.95), weight_decay=0.05), torch_adamw),
}


@pytest.mark.parametrize("name", OWN)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sgd_and_adamw_are_pytorch_s_own(name: str, dtype: torch.dtype) -> None:
    config, own = OWN[name]
    ours, theirs = parameters(dtype=dtype), parameters(dtype=dtype)
    optimizer = build_optimizer(config, [ParamGroup(ours)], CPU)
    assert len(optimizer.param_groups) == 1  # as ever: in one group where all decay alike
    expected = own(theirs)
    for step in range(5):
        take(optimizer, ours, step)
        take(expected, theirs, step)
    assert_close(ours, theirs)


# --- who decays, and at which rate -------------------------------------------------------------

KINDS: list[OptimConfig] = [
    SGDConfig(weight_decay=0.1),
    LARSConfig(weight_decay=0.1, trust=0.02),
    AdamWConfig(weight_decay=0.1),
]


@pytest.mark.parametrize("settings", KINDS, ids=lambda settings: settings.name)
@pytest.mark.parametrize("all_decay", [True, False])
def test_norms_and_biases_decay_only_where_asked(settings: OptimConfig, all_decay: bool) -> None:
    """With gradients of zero, decay is all that moves a weight."""
    settings = settings.model_copy(update={"decay_norms_and_biases": all_decay})
    weights = parameters()
    before = [weight.detach().clone() for weight in weights]
    optimizer = build_optimizer(settings, [ParamGroup(weights)], CPU)
    for group in optimizer.param_groups:
        group["lr"] = 0.5
    for weight in weights:
        weight.grad = torch.zeros_like(weight)
    optimizer.step()
    layers = 1 - 0.5 * (0.02 if settings.name == "lars" else 0.1)
    others = layers if all_decay else 1
    for weight, start in zip(weights, before, strict=True):
        assert_close(weight.detach(), start * (layers if weight.ndim > 1 else others))


@pytest.mark.parametrize("settings", KINDS, ids=lambda settings: settings.name)
def test_every_parameter_is_in_one_group_with_its_rate(settings: OptimConfig) -> None:
    first, second = parameters(0), parameters(1)
    apart = settings.model_copy(update={"decay_norms_and_biases": False})
    groups = [ParamGroup(first), ParamGroup(second[:3], rate_factor=10.0), ParamGroup([])]
    optimizer = build_optimizer(apart, groups, CPU)
    found = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    assert len(found) == sum(len(group["params"]) for group in optimizer.param_groups) == 9
    for weight in first:
        assert found[id(weight)]["rate_factor"] == 1
        assert found[id(weight)]["weight_decay"] == (0.1 if weight.ndim > 1 else 0)
    assert all(found[id(weight)]["rate_factor"] == 10 for weight in second[:3])


@pytest.mark.parametrize("settings", KINDS, ids=lambda settings: settings.name)
def test_a_group_may_be_exempt_from_decay(settings: OptimConfig) -> None:
    groups = [ParamGroup(parameters(0)), ParamGroup(parameters(1), decays=False)]
    decaying, exempt = build_optimizer(settings, groups, CPU).param_groups
    assert (decaying["weight_decay"], exempt["weight_decay"]) == (0.1, 0)


@pytest.mark.parametrize("settings", KINDS, ids=lambda settings: settings.name)
def test_what_an_optimiser_remembers_can_be_restored(settings: OptimConfig) -> None:
    ours, other = parameters(), parameters()
    optimizer = build_optimizer(settings, [ParamGroup(ours)], CPU)
    for step in range(3):
        take(optimizer, ours, step)
    fresh = build_optimizer(settings, [ParamGroup(other)], CPU)
    with torch.no_grad():
        for weight, value in zip(other, ours, strict=True):
            weight.copy_(value)
    fresh.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    take(optimizer, ours, 3)
    take(fresh, other, 3)
    for weight, value in zip(other, ours, strict=True):
        assert torch.equal(weight, value)


# --- the stepper ------------------------------------------------------------------------------


class Slopes(Task):
    """Every weight has the gradient 1, so it moves by its rate; it notes what happens when."""

    title = "slopes"

    def __init__(self) -> None:
        super().__init__()
        self.slow = nn.Parameter(torch.zeros(2, 2))
        self.fast = nn.Parameter(torch.zeros(3))
        self.steady = nn.Parameter(torch.zeros(1))
        self.notes: list[tuple[str, float, Any]] = []

    def inputs(self, batch: Batch, moment: Moment) -> Sequence[Tensor]:
        raise NotImplementedError

    def forward(
        self,
        inputs: Sequence[Tensor],
        at: Mapping[str, Any],
        with_metrics: bool = False,
    ) -> StepOutput:
        self.notes.append(("forward", at["weight"], len(inputs[0])))
        loss = (self.slow.sum() + self.fast.sum() + self.steady.sum()) * inputs[0].mean()
        return StepOutput(loss, {}, {"loss twice": 2 * loss.detach()} if with_metrics else {})

    def schedules(self) -> dict[str, Callable[[Clock], float]]:
        return {"weight": HalfCosine(0.0, 1.0)}

    def param_groups(self) -> list[ParamGroup]:
        return [
            ParamGroup([self.slow]),
            ParamGroup([self.fast], rate_factor=10.0),
            ParamGroup([self.steady], rate_factor=0.5, scheduled=False),
        ]

    def before_update(self, at: Mapping[str, Any]) -> None:
        self.notes.append(("before", at["weight"], self.slow.grad is not None))

    def after_update(self, at: Mapping[str, Any]) -> None:
        self.notes.append(("after", at["weight"], float(self.slow.detach()[0, 0])))


@pytest.mark.parametrize("parts", [1, 2])
def test_a_step_honours_rate_factors_schedules_and_hooks(parts: int) -> None:
    fabric = Fabric(accelerator="cpu", devices=1)
    task = Slopes()
    plain = SGDConfig(sgd_momentum=0.0, weight_decay=0.0)
    optimizer = build_optimizer(plain, task.param_groups(), CPU)
    model, optimizer = fabric.setup(task, optimizer)
    rate = HalfCosine(0.4, 0.0)
    stepper = build_stepper(fabric, model, task, optimizer, rate, 0.6, parts)
    moved = 0.0
    for step in range(3):
        clock = Clock(step, 4, 2)
        told = stepper([torch.ones(4, 1)], clock, with_metrics=step == 1)
        assert bool(told.metrics) == (step == 1)
        moved += rate(clock)
        rates = [group["lr"] for group in optimizer.param_groups]
        assert rates == [rate(clock), 10 * rate(clock), 0.3]
        assert_close(task.slow.detach(), torch.full((2, 2), -moved))
        assert_close(task.fast.detach(), torch.full((3,), -10 * moved))
        assert_close(task.steady.detach(), torch.tensor([-0.3 * (step + 1)]))
        weight = HalfCosine(0.0, 1.0)(clock)
        assert task.notes == [
            *[("forward", weight, 4 // parts)] * parts,
            ("before", weight, True),
            ("after", weight, pytest.approx(-moved)),
        ]
        task.notes.clear()
    assert task.slow.grad is None


def test_a_task_may_want_another_rate_than_the_scheduled_one() -> None:
    """From some step on, as UOTA; a rate that is not scheduled stays."""

    class Hurried(Slopes):
        def rate_factor(self, clock: Clock) -> float:
            return 3.0 if clock.step else 1.0

    fabric, task, rate = Fabric(accelerator="cpu", devices=1), Hurried(), HalfCosine(0.4, 0.0)
    optimizer = build_optimizer(SGDConfig(), task.param_groups(), CPU)
    model, optimizer = fabric.setup(task, optimizer)
    stepper = build_stepper(fabric, model, task, optimizer, rate, 0.6, 1)
    for step, factor in ((0, 1.0), (1, 3.0), (2, 3.0)):
        clock = Clock(step, 4, 2)
        stepper([torch.ones(4, 1)], clock)
        rates = [group["lr"] for group in optimizer.param_groups]
        assert rates == pytest.approx([factor * rate(clock), 10 * factor * rate(clock), 0.3])
        assert stepper.scheduled_rate(clock) == factor * rate(clock)
