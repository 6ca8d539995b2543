"""The loop itself: what it tells, when it saves, and that accumulation is what it says."""

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from helpers import make_images, write_recipe
from xmoco.config import Config
from xmoco.data import Batches, open_images
from xmoco.errors import UserError
from xmoco.methods import Method, build_method
from xmoco.methods.base import MomentumMethod
from xmoco.pretraining import identity_of, peak_rate, prepare_training, same_identity
from xmoco.settings import load_config
from xmoco.train import loop
from xmoco.train.callback import Callback
from xmoco.train.engine import build_fabric
from xmoco.train.loop import Training
from xmoco.train.run_folder import RunFolder


class Notes(Callback):
    def __init__(self) -> None:
        self.steps: list[int] = []
        self.values: dict[int, dict[str, float]] = {}
        self.epochs: list[tuple[int, int]] = []

    def on_step(self, step: int) -> None:
        self.steps.append(step)

    def on_values(self, step: int, epoch: float, values: Mapping[str, float]) -> None:
        assert epoch == step / 4
        self.values[step] = dict(values)

    def on_epoch(self, epoch: int, step: int) -> None:
        self.epochs.append((epoch, step))


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    images = make_images(tmp_path / "images", each=16)
    return write_recipe(tmp_path / "fast.yaml", images)


def new_training(
    recipe: Path, *changes: str, build: Callable[[Config], Method] = build_method
) -> Training:
    """4 steps per epoch."""
    config = load_config(recipe, changes)
    images = open_images(config.data, "train")
    assert images is not None
    folder = recipe.parent / "run"
    folder.mkdir(exist_ok=True)
    training = prepare_training(config, build_fabric(config.run), images, RunFolder(folder), build)
    training.identity = identity_of(config, "the same")
    training.same_identity = same_identity
    return training


def rate(training: Training, step: int) -> float:
    return training.plan.learning_rate(training.clock(step))


def test_everything_is_told_in_order(recipe: Path) -> None:
    training, notes = new_training(recipe, "epochs=3", "log_every=5"), Notes()
    training.train(notes)
    assert notes.steps == list(range(1, 13))
    assert list(notes.values) == [5, 10, 12]
    assert notes.epochs == [(1, 4), (2, 8), (3, 12)]
    for step, values in notes.values.items():
        assert values["learning_rate"] == rate(training, step - 1)
    assert training.step == training.total_steps == 12
    training.train(notes)  # nothing left to do
    assert len(notes.steps) == 12


def test_logged_losses_are_averages(recipe: Path) -> None:
    every, fourth = Notes(), Notes()
    new_training(recipe, "log_every=1").train(every)
    new_training(recipe, "log_every=4").train(fourth)
    for step in (4, 8):
        for name in ("loss", "loss/labels_source", "loss/consistency_target"):
            mean = sum(every.values[s][name] for s in range(step - 3, step + 1)) / 4
            assert fourth.values[step][name] == pytest.approx(mean, rel=1e-5)


def test_speed_is_that_of_training_without_pauses(
    recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock that knows: a step takes a second, half of it waiting; an epoch's end a hundred,
    and a checkpoint a thousand."""
    training = new_training(recipe, "epochs=4", "log_every=5", "checkpoint_minutes=0")
    clock, waited = [0.0], [0.0]

    def taking(seconds: float, function: Callable[..., Any]) -> Callable[..., Any]:
        def slow(*arguments: Any, **options: Any) -> Any:
            clock[0] += seconds
            waited[0] += seconds / 2
            return function(*arguments, **options)

        return slow

    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(Batches, "waited", property(lambda _: waited[0]))
    monkeypatch.setattr(training, "advance", taking(1, training.advance))
    monkeypatch.setattr(training, "begin_saving", taking(1000, training.begin_saving))
    notes = Notes()
    monkeypatch.setattr(notes, "on_epoch", taking(100, notes.on_epoch))
    training.train(notes)
    assert list(notes.values) == [5, 10, 15, 16]
    for values in notes.values.values():
        assert values["images_per_second"] == pytest.approx(training.plan.batch)
        assert values["waiting"] == pytest.approx(0.5)


@pytest.mark.parametrize("threads", [1, 2])
def test_on_a_cpu_memory_is_kept_and_halves_run_at_once(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    keep_memory = Mock()
    monkeypatch.setattr("xmoco.train.engine.keep_memory", keep_memory)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    training = new_training(recipe)
    torch.set_num_threads(before)
    keep_memory.assert_called_once_with()
    assert training.task.run.two_threads == (threads == 2)
    assert training.optimizer.param_groups[0]["fused"]


def test_a_run_with_halves_at_once_is_the_same(recipe: Path) -> None:
    before = torch.get_num_threads()
    runs = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        training = new_training(recipe, "epochs=2", "accumulate=2")
        training.train(Callback())
        runs.append(training)
    torch.set_num_threads(before)
    plain, at_once = (run.task.state_dict() for run in runs)
    assert [run.task.run.two_threads for run in runs] == [False, True]
    for name, value in plain.items():
        assert_close(at_once[name], value, msg=name)


def test_the_optimiser_uses_the_schedule(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    training = new_training(recipe, "epochs=2", "warmup_epochs=0.5", "cosine_offset=0.0")
    used: list[float] = []
    training.optimizer.register_step_post_hook(
        lambda optimizer, *_: used.append(optimizer.param_groups[0]["lr"])
    )
    training.train(Callback())
    peak = 0.0675 * 16 / 256
    assert peak_rate(load_config(recipe)) == pytest.approx(peak)
    assert used == [rate(training, step) for step in range(8)]
    assert used[:3] == pytest.approx([peak / 2, peak, peak])
    assert 0 < used[-1] < used[-2] < peak


def test_momentum_keys_and_momentum_encoder_get_no_gradient(recipe: Path) -> None:
    training = new_training(recipe)
    learned = {id(p) for group in training.optimizer.param_groups for p in group["params"]}
    names = {name for name, p in training.task.named_parameters() if id(p) in learned}
    assert names == {f"encoder.{name}" for name, _ in training.task.encoder.named_parameters()}


def test_accumulated_gradients_are_the_mean_over_parts(recipe: Path) -> None:
    """By hand, part after part, as the loop does it."""
    training = new_training(recipe, "accumulate=2", "method=mocov2plus")
    by_hand = new_training(recipe, "method=mocov2plus")
    assert_close(dict(training.task.named_parameters()), dict(by_hand.task.named_parameters()))
    gradients: list[list[torch.Tensor]] = []
    training.optimizer.register_step_pre_hook(
        lambda optimizer, *_: gradients.append(
            [p.grad.clone() for p in optimizer.param_groups[0]["params"]]
        )
    )
    batch = next(training.batches.from_step(0))
    training.task.train()
    step = training.advance(iter([batch]))
    by_hand.task.train()
    x_s, x_t = by_hand.inputs(batch, 0)
    at = by_hand.stepper.values.at(by_hand.clock(0))
    losses = []
    for part in (slice(0, 8), slice(8, 16)):
        loss = by_hand.task([x_s[part], x_t[part]], at).loss
        (loss / 2).backward()
        losses.append(loss.detach())
    expected = [p.grad for p in by_hand.task.encoder.parameters()]
    assert_close(gradients[0], expected)
    assert_close(step.loss, torch.stack(losses).mean())


def test_views_of_a_step_are_a_function_of_it(recipe: Path) -> None:
    one, other = new_training(recipe), new_training(recipe)
    batch = next(one.batches.from_step(3))
    for first, second in zip(one.inputs(batch, 3), other.inputs(batch, 3), strict=True):
        assert torch.equal(first, second)
    x_s, x_t = one.inputs(batch, 3)
    assert x_s.shape == (16, 3, 16, 16)
    assert not torch.equal(x_s, x_t)
    assert not torch.equal(x_s, one.inputs(batch, 4)[0])


def test_saving_and_restoring(recipe: Path) -> None:
    training = new_training(recipe)
    assert not training.restore()
    training.train(Callback())
    fresh = new_training(recipe)
    assert fresh.restore()
    assert (fresh.step, fresh.seconds) == (8, training.seconds)
    trained, restored = training.task.state_dict(), fresh.task.state_dict()
    assert all(torch.equal(value, restored[name]) for name, value in trained.items())


def with_dropout(config: Config) -> Method:
    method = build_method(config)
    assert isinstance(method, MomentumMethod)
    for encoder in (method.encoder, method.momentum_encoder):
        encoder.add_module("head", nn.Sequential(encoder.get_submodule("head"), nn.Dropout(0.5)))
    return method


def test_what_layers_draw_is_a_function_of_the_step(recipe: Path) -> None:
    """As in models of timm with stochastic depth: resuming knows of no state of chance."""
    begun = new_training(recipe, build=with_dropout)
    stream = begun.batches.from_step(0)
    losses = [float(begun.advance(stream).loss) for _ in range(3)]
    begun.save()
    resumed, whole = (new_training(recipe, build=with_dropout) for _ in range(2))
    assert resumed.restore()
    for training in (resumed, whole):
        torch.rand(training.step + 1)  # others draw, too
        training.train(Callback())
    expected = whole.task.state_dict()
    for name, value in resumed.task.state_dict().items():
        assert torch.equal(value, expected[name]), name
    again = new_training(recipe, build=with_dropout)
    again.step = 1  # the same weights and images, but another step
    assert float(again.advance(begun.batches.from_step(0)).loss) != losses[0]


def test_an_optimiser_of_another_device_is_restored_without_its_settings(recipe: Path) -> None:
    """On a GPU it is fused, and its rate a number on the device."""
    training = new_training(recipe)
    training.train(Callback())
    for group in training.optimizer.param_groups:
        group |= {"fused": True, "lr": torch.tensor(0.5)}
    training.save()
    fresh = new_training(recipe)
    before = [group | {"params": None} for group in fresh.optimizer.param_groups]
    assert fresh.restore()
    assert [group | {"params": None} for group in fresh.optimizer.param_groups] == before
    (ours, *_), (theirs, *_) = (
        [s["momentum_buffer"] for s in t.optimizer.state.values()] for t in (fresh, training)
    )
    assert torch.equal(ours, theirs)


def test_a_checkpoint_from_before_there_was_a_setting(recipe: Path) -> None:
    training = new_training(recipe)
    training.save()
    path = training.run.checkpoints.latest()
    assert path is not None
    state = torch.load(path)
    del state["identity"]["settings"]["input"]["eval_size"]
    torch.save(state, path)
    assert new_training(recipe).restore()

    state["identity"]["settings"]["input"]["size"] += 8
    torch.save(state, path)
    with pytest.raises(UserError, match="belongs to other settings"):
        new_training(recipe).restore()


def test_restoring_another_model(recipe: Path) -> None:
    new_training(recipe).save()
    other = new_training(recipe, "feature_size=8")
    with pytest.raises(UserError, match="belongs to other settings"):
        other.restore()
    other.same_identity = lambda *_: True
    with pytest.raises(UserError, match="belongs to another configuration"):
        other.restore()


def test_weights_that_are_no_numbers_are_not_saved(recipe: Path) -> None:
    training = new_training(recipe)
    training.save()
    training.step = 3
    with torch.no_grad():
        training.task.encoder.backbone.conv1.weight[0, 0, 0, 0] = torch.nan
    with pytest.raises(UserError, match="NaN or infinite at step 3"):
        training.save()
    (path,) = training.run.checkpoints.paths()
    assert path.name == "step-000000000.ckpt"


@pytest.mark.parametrize("spoilt", ["loss", "parameter"])
def test_a_loss_that_is_no_number_stops_the_run(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, spoilt: str
) -> None:
    training = new_training(recipe, "log_every=2", "epochs=1")
    advance = Training.advance

    def spoil(self: Training, *arguments: Any, **options: Any) -> Any:
        step = advance(self, *arguments, **options)
        if self.step == 2 and spoilt == "loss":
            return step._replace(loss=step.loss * torch.nan)
        if self.step == 2:
            with torch.no_grad():
                next(self.task.encoder.parameters()).fill_(torch.inf)
        return step

    monkeypatch.setattr(Training, "advance", spoil)
    words = "loss is NaN or infinite at step 2;" if spoilt == "loss" else "NaN or infinite"
    with pytest.raises(UserError, match=words):
        training.train(Callback())
    assert training.step <= 4
    assert training.run.checkpoints.paths() == []


class TestSaveClock:
    """Epoch ends are saved unless that would take more than a small share of the time."""

    def clock(self, monkeypatch: pytest.MonkeyPatch, interval: float) -> tuple[Any, list[float]]:
        now = [0.0]
        monkeypatch.setattr(loop.time, "perf_counter", lambda: now[0])
        return loop.SaveClock(interval), now

    def test_by_time(self, monkeypatch: pytest.MonkeyPatch) -> None:
        clock, now = self.clock(monkeypatch, 60)
        saver = SimpleNamespace(busy=True, seconds=9.0)
        now[0] = 59
        assert not clock.due(False, saver)
        now[0] = 60
        assert clock.due(False, saver)
        clock.restart()
        assert not clock.due(False, saver)

    def test_by_epoch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        clock, now = self.clock(monkeypatch, 60)
        saver = SimpleNamespace(busy=False, seconds=0.0)
        now[0] = 1
        assert clock.due(True, saver)  # what saving takes is not known yet
        saver.seconds = 0.5
        now[0] = 10
        assert not clock.due(True, saver)  # 0.5 of 10 seconds is more than 2 %
        now[0] = 30
        assert clock.due(True, saver)
        assert not clock.due(False, saver)
        saver.busy = True
        assert not clock.due(True, saver)
