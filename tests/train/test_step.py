"""Steps of the optimiser: taken one by one, and replayed as a CUDA graph."""

import sys
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from helpers import TINY_SPLIT
from xmoco.config import Config
from xmoco.config.methods import XMoCoConfig
from xmoco.config.optimizers import SGDConfig
from xmoco.fabric import Fabric
from xmoco.methods import build_method
from xmoco.schedules import Clock, FromEpoch, HalfCosine, Schedule
from xmoco.task import StepOutput
from xmoco.train.optimizers import build_optimizer
from xmoco.train.step import WARM_UP, GraphedStepper, Stepper, build_stepper


@pytest.fixture(autouse=True)
def repeatable() -> Iterator[None]:
    """Two courses are compared here, and cuDNN's usual sums are never the same twice."""
    with torch.backends.cudnn.flags(deterministic=True, allow_tf32=False):
        yield


def falling(clock: Clock) -> float:
    return 0.1 / (1 + clock.step)


def built(
    kind: type[Stepper], device: str, precision: str = "32-true", rate: Schedule = falling
) -> Stepper:
    """Of XMoCo, whose momentum and labels change with the step as the rate does."""
    fabric = Fabric(accelerator=device, devices=1, precision=precision)
    torch.manual_seed(0)
    settings = XMoCoConfig(
        bank_length=48, key_momentum=0.5, key_momentum_end=0.99, positive_mass_end=0.5
    )
    method = build_method(Config(model=TINY_SPLIT, method=settings))
    method.optimize_for(torch.device(device))
    method.train().to(memory_format=torch.channels_last)
    plain = SGDConfig(weight_decay=0.0)
    optimizer = build_optimizer(plain, method.param_groups(), torch.device(device))
    model, optimizer = fabric.setup(method, optimizer)
    return kind(fabric, model, method, optimizer, rate, peak_rate=1.0)


def views(step: int, device: str) -> list[Tensor]:
    generator = torch.Generator().manual_seed(step)
    return list(torch.randn(2, 16, 3, 8, 8, generator=generator).to(device))


def at(step: int) -> Clock:
    return Clock(step, 2 * WARM_UP + 4, 8)


def course(stepper: Stepper, device: str, steps: int, measured: int = -1) -> list[StepOutput]:
    """Steps whose rate and momentum change, one of them measured."""
    return [
        stepper(views(step, device), at(step), with_metrics=step == measured)
        for step in range(steps)
    ]


def test_what_a_step_tells_keeps_nothing_alive() -> None:
    """Autograd's nodes would hold memory, and a graph could not be recorded beside them."""
    step = built(Stepper, "cpu")(views(0, "cpu"), at(0))
    assert not any(value.requires_grad for value in (step.loss, *step.terms.values()))
    assert_close(step.loss, torch.stack(list(step.terms.values())).sum())


def test_rate_and_momentum_are_those_of_the_step() -> None:
    stepper = built(Stepper, "cpu", rate=FromEpoch(1))
    weight = stepper.task.encoder.backbone.conv1.weight
    slow = stepper.task.momentum_encoder.backbone.conv1.weight
    before = weight.clone()
    stepper(views(0, "cpu"), at(0))
    assert torch.equal(weight, before)
    for step in (8, 9):
        slow_before = slow.clone()
        stepper(views(step, "cpu"), at(step))
        assert not torch.equal(weight, before)
        momentum = HalfCosine(0.5, 0.99)(at(step))
        assert_close(slow, momentum * slow_before + (1 - momentum) * weight.detach())


def chosen_for(given: Stepper, parts: int) -> Stepper:
    optimizer = given.optimizer
    return build_stepper(given.fabric, given.model, given.task, optimizer, falling, 1.0, parts)


def test_graphs_are_for_one_gpu() -> None:
    given = built(Stepper, "cpu")
    assert type(chosen_for(given, parts=1)) is Stepper


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("parts", "capturable", "kind"),
    [(1, True, GraphedStepper), (2, True, Stepper), (1, False, Stepper)],
)
def test_graphs_are_for_tasks_that_may_be_recorded(
    parts: int, capturable: bool, kind: type[Stepper]
) -> None:
    given = built(Stepper, "cuda")
    given.task.capturable = capturable
    assert type(chosen_for(given, parts)) is kind


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_graph_takes_the_same_steps(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses, weights, banks and momentum: before, at and after the recording.

    Every step starts from the plain one's state, as training makes roundings grow.
    """
    monkeypatch.setattr("xmoco.train.step.HOST_SHARE", 0.0)  # always record
    plain, graphed = (built(kind, "cuda", precision) for kind in (Stepper, GraphedStepper))
    assert isinstance(graphed, GraphedStepper)
    tolerance = (
        {"rtol": 1e-4, "atol": 1e-4} if precision == "32-true" else {"rtol": 0.01, "atol": 0.01}
    )
    for step in range(2 * WARM_UP + 4):
        if step:
            graphed.task.load_state_dict(plain.task.state_dict())
            pairs = zip(graphed.task.parameters(), plain.task.parameters(), strict=True)
            for ours, theirs in pairs:
                for name, value in plain.optimizer.state.get(theirs, {}).items():
                    graphed.optimizer.state[ours][name].copy_(value)
        measured = step == WARM_UP + 3
        found, expected = (
            stepper(views(step, "cuda"), at(step), measured) for stepper in (graphed, plain)
        )
        assert_close(found.loss, expected.loss, **tolerance)
        assert found.terms.keys() == expected.terms.keys()
        assert_close(torch.stack(list(found.terms.values())).sum(), found.loss)
        assert bool(found.metrics) == bool(expected.metrics) == measured
        for name, value in plain.task.state_dict().items():
            if isinstance(value, Tensor) and value.is_floating_point():
                assert_close(graphed.task.state_dict()[name], value, **tolerance)
    assert graphed.graph is not None
    assert "replayed as a CUDA graph" in graphed.news[0]
    assert plain.task.loss.banks.fill == graphed.task.loss.banks.fill == 1
    assert torch.equal(plain.task.loss.banks.enqueued, graphed.task.loss.banks.enqueued)


def test_another_graph_is_recorded_after_one_is_forgotten() -> None:
    stepper = built(GraphedStepper, "cpu")
    stepper.forget_graph()
    assert stepper.decide_after == WARM_UP  # there was none
    stepper.taken, stepper.decide_after, stepper.graph = 30, sys.maxsize, object()
    stepper.forget_graph()
    assert stepper.graph is None
    assert stepper.decide_after == 30 + WARM_UP


@pytest.mark.gpu
def test_a_graph_recorded_again_takes_the_same_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xmoco.train.step.HOST_SHARE", 0.0)
    plain, graphed = built(Stepper, "cuda"), built(GraphedStepper, "cuda")
    for step in range(3 * WARM_UP):
        if step == WARM_UP + 2:
            assert graphed.graph is not None
            graphed.forget_graph()
        found, expected = (stepper(views(step, "cuda"), at(step)) for stepper in (graphed, plain))
        assert_close(found.loss, expected.loss, rtol=1e-3, atol=1e-3)
    assert graphed.graph is not None


@pytest.mark.gpu
def test_a_slow_gpu_needs_no_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xmoco.train.step.HOST_SHARE", 1e9)
    stepper = built(GraphedStepper, "cuda")
    course(stepper, "cuda", WARM_UP + 2)
    assert stepper.graph is None
    assert "never short of work" in stepper.news[0]


@pytest.mark.gpu
def test_a_graph_waits_for_a_step_that_does_not_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xmoco.train.step.HOST_SHARE", 0.0)
    stepper = built(GraphedStepper, "cuda")
    course(stepper, "cuda", WARM_UP, measured=WARM_UP - 1)
    assert stepper.graph is None
    stepper(views(WARM_UP, "cuda"), at(WARM_UP))
    assert stepper.graph is not None


@pytest.mark.gpu
def test_a_graph_needs_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xmoco.train.step.HOST_SHARE", 0.0)
    monkeypatch.setattr("xmoco.train.step._free_memory", lambda: 1000)
    stepper = built(GraphedStepper, "cuda")
    course(stepper, "cuda", WARM_UP + 2)
    assert stepper.graph is None
    assert "too little memory" in stepper.news[0]


@pytest.mark.gpu
def test_a_graph_that_cannot_be_recorded_is_said_and_done_without(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Refused at its very end, when gradients are in memory that nothing will ever fill."""
    monkeypatch.setattr("xmoco.train.step.HOST_SHARE", 0.0)
    plain, refused = built(Stepper, "cuda"), built(GraphedStepper, "cuda")
    step = refused.optimizer.step

    def refuse(*arguments: object, **options: object) -> object:
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError("no recording today\nfor reasons")
        return step(*arguments, **options)

    monkeypatch.setattr(refused.optimizer, "step", refuse)
    expected, found = (course(stepper, "cuda", WARM_UP + 4) for stepper in (plain, refused))
    assert refused.graph is None
    assert refused.news[0].endswith("cannot be recorded yet (no recording today)")
    for ours, theirs in zip(found, expected, strict=True):
        assert_close(ours.loss, theirs.loss, rtol=1e-3, atol=1e-3)
