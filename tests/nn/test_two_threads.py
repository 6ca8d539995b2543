"""Two halves of the CPU do what one after the other would, value by value and bit by bit."""

import copy
import os
import threading
import weakref
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from helpers import TINY_SPLIT
from xmoco.config import Config
from xmoco.config.methods import (
    BYOLConfig,
    MethodConfig,
    MoCoV2PlusConfig,
    SimCLRConfig,
    SimSiamConfig,
    SwAVConfig,
    XMoCoConfig,
)
from xmoco.methods import Method, build_method
from xmoco.methods.base import MomentumMethod
from xmoco.nn.two_threads import both, has_halves, with_parallel_backward
from xmoco.schedules import Clock, ScheduledValues

CLOCK = Clock(step=40, total_steps=100, steps_per_epoch=10)


@pytest.fixture
def four_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


def test_both_run_at_the_same_time() -> None:
    meeting = threading.Barrier(2)  # which neither passes alone
    places = both(lambda: meeting.wait(timeout=10), lambda: meeting.wait(timeout=10))
    assert sorted(places) == [0, 1]


@pytest.mark.usefixtures("four_threads")
def test_each_has_half_of_the_threads_and_others_keep_theirs() -> None:
    assert has_halves()
    assert both(torch.get_num_threads, torch.get_num_threads) == (2, 2)
    assert torch.get_num_threads() == 4
    found: list[int] = []
    newcomer = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
    newcomer.start()
    newcomer.join()
    assert found == [4]
    assert both(torch.get_num_threads, torch.get_num_threads) == (2, 2)


def test_an_odd_number_of_threads_has_no_halves() -> None:
    before = torch.get_num_threads()
    for threads, halves in ((1, False), (3, False), (2, True)):
        torch.set_num_threads(threads)
        assert has_halves() is halves
    torch.set_num_threads(before)


def test_gradients_and_precision_are_the_callers() -> None:
    a, b = torch.randn(2, 4, 4).unbind()

    def settings() -> tuple[bool, torch.dtype]:
        return torch.is_grad_enabled(), (a @ b).dtype

    assert both(settings, settings) == ((True, torch.float32),) * 2
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert both(settings, settings) == ((False, torch.bfloat16),) * 2
    assert both(settings, settings) == ((True, torch.float32),) * 2


@pytest.mark.parametrize("place", [0, 1])
def test_an_error_of_either_comes_out(place: int) -> None:
    def fail() -> None:
        raise ValueError("no such thing")

    works = [lambda: None, lambda: None]
    works[place] = fail
    with pytest.raises(ValueError, match="no such thing"):
        both(*works)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes do not fork here")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_has_halves_of_its_own() -> None:
    both(int, int)
    child = os.fork()
    if child == 0:
        os._exit(both(lambda: 3, lambda: 4) != (3, 4))
    assert os.waitpid(child, 0)[1] == 0


def test_gradients_of_both_passes_add_up() -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()
    reference = copy.deepcopy(network)
    x, y = torch.randn(2, 6, 5, dtype=torch.float64).unbind()

    def loss(first: Tensor, second: Tensor) -> Tensor:
        return (first * second.exp()).sum() + second.square().sum()

    loss(reference(x), reference(y)).backward()
    outputs = both(lambda: network(x), lambda: network(y))
    loss(*with_parallel_backward(outputs, network.parameters())).backward()
    for mine, wanted in zip(network.parameters(), reference.parameters(), strict=True):
        assert_close(mine.grad, wanted.grad)


def test_passes_are_forgotten_once_gone_back_through() -> None:
    weight = torch.ones(3, requires_grad=True)
    first, second = weight * 2, weight * 3
    passes = [weakref.ref(first), weakref.ref(second)]
    outputs = with_parallel_backward((first, second), [weight])
    del first, second
    loss = torch.stack(outputs).sum()
    assert all(output() is not None for output in passes)
    loss.backward()
    assert all(output() is None for output in passes)


def built(settings: MethodConfig, batch_norm: str = "split") -> Method:
    torch.manual_seed(0)
    model = TINY_SPLIT.model_copy(update={"batch_norm": batch_norm})
    return build_method(Config(model=model, method=settings))


def test_parameters_may_be_frozen() -> None:
    method = built(XMoCoConfig(bank_length=24))
    method.run.two_threads = True
    frozen = method.encoder.backbone.conv1.weight.requires_grad_(False)
    at = ScheduledValues(method.schedules()).at(CLOCK)
    method(torch.randn(2, 16, 3, 8, 8).unbind(), at).loss.backward()
    assert frozen.grad is None
    assert all(p.grad is not None for p in method.encoder.parameters() if p is not frozen)


def trained(method: Method, steps: int) -> list[float]:
    learned = [p for p in method.parameters() if p.requires_grad]
    optimiser = torch.optim.SGD(learned, lr=0.05, momentum=0.9)
    generator = torch.Generator().manual_seed(1)
    at, losses = ScheduledValues(method.schedules()).at(CLOCK), []
    for _ in range(steps):
        loss = method(torch.randn(2, 16, 3, 8, 8, generator=generator).unbind(), at).loss
        loss.backward()
        assert all(p.grad is not None for p in learned)
        method.before_update(at)
        optimiser.step()
        optimiser.zero_grad()
        method.after_update(at)
        losses.append(loss.item())
    return losses


METHODS: dict[str, MethodConfig] = {
    "xmoco": XMoCoConfig(bank_length=24, key_momentum=0.9),
    "a predictor": XMoCoConfig(bank_length=24, key_momentum=0.9, predictor_hidden=12),
    "mocov2plus": MoCoV2PlusConfig(bank_length=24),
    "simclr": SimCLRConfig(),
    "byol": BYOLConfig(predictor_hidden=12),
    "swav": SwAVConfig(prototypes=7, queue_length=24),
    "simsiam": SimSiamConfig(predictor_hidden=12),
}


@pytest.mark.parametrize("groups", ["split", "plain"])
@pytest.mark.parametrize("name", METHODS)
def test_training_is_the_same_bit_for_bit(name: str, groups: str) -> None:
    """Where either way has one thread for an operation, so that sums add up in the same order."""
    one_by_one = built(METHODS[name], groups)
    in_two = copy.deepcopy(one_by_one)
    in_two.run.two_threads = True
    assert trained(in_two, 6) == trained(one_by_one, 6)
    states = (in_two.state_dict(), one_by_one.state_dict())
    for key, value in states[1].items():
        if isinstance(value, Tensor):
            assert torch.equal(states[0][key], value), key


def test_without_gradients_nothing_is_kept_for_them() -> None:
    method = built(XMoCoConfig(bank_length=24))
    assert isinstance(method, MomentumMethod)
    method.run.two_threads = True
    views = torch.randn(2, 8, 3, 8, 8).unbind()
    with torch.no_grad():
        queries, keys = method.queries_and_keys(views, views)
    assert not any(features.requires_grad for features in (*queries, *keys))


@pytest.mark.usefixtures("four_threads")
@pytest.mark.parametrize("name", METHODS)
def test_a_cpu_run_uses_two_threads_where_there_are_halves(name: str) -> None:
    method = built(METHODS[name])
    assert not method.run.two_threads
    method.optimize_for(torch.device("cpu"))
    assert method.run.two_threads
