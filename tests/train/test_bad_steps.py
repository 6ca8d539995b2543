"""Losses that are no numbers or out of all proportion: which step, and what is left of the run."""

import math
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from helpers import be_process, free_port, make_images, run_two, write_recipe
from xmoco.checkpoints import load_checkpoint
from xmoco.data import open_images
from xmoco.distributed import consolidate_state_dict
from xmoco.errors import UserError
from xmoco.methods.base import Method
from xmoco.nn.batchnorm import SplitStatistics
from xmoco.pretraining import prepare_training
from xmoco.settings import load_config
from xmoco.task import StepOutput
from xmoco.train import bad_steps
from xmoco.train.bad_steps import FEW, SPIKE, BadStep, DivergedError, LossWatch, WayBack, too_many
from xmoco.train.callback import Callback
from xmoco.train.engine import build_fabric
from xmoco.train.loop import Training
from xmoco.train.run_folder import RunFolder

NAN, INF = math.nan, math.inf


def watch(*losses: float, level: float | None = None) -> BadStep | None:
    fabric = Mock(world_size=1)
    losses_watched = LossWatch(fabric, level)
    for step, loss in enumerate(losses, start=5):
        losses_watched.add(step, torch.tensor(loss))
    return losses_watched.look()


def test_the_first_bad_loss_is_found_by_its_step() -> None:
    assert watch() is None
    assert watch(1.0, 2.0, 3.0) is None
    for bad in (NAN, INF, -INF):
        found = watch(1.0, bad, 3.0, NAN)
        assert found is not None
        assert found.step == 6
        assert "NaN or infinite at step 6" in str(found)


def test_a_spike_is_told_from_those_before() -> None:
    assert watch(1e30) is None  # nobody knows better yet
    assert watch(5000.0, level=8.0) is None
    assert watch(8.0, -9000.0, level=8.0) == BadStep(6, -9000.0)
    assert watch(SPIKE + 1, level=0.001) is not None
    assert watch(SPIKE - 1, level=0.001) is None  # small losses may well grow
    assert str(BadStep(6, 9000.0)) == "the loss jumped to 9000 at step 6"


def test_the_level_is_that_of_the_last_good_loss() -> None:
    losses = LossWatch(Mock(world_size=1))
    for step, (loss, level) in enumerate([(2.0, 2.0), (-4.0, 4.0), (NAN, 4.0), (6.0, 6.0)]):
        losses.add(2 * step, torch.tensor(1.0))
        losses.add(2 * step + 1, torch.tensor(loss))
        if losses.look() is None:
            losses.note_level()
        assert losses.level == level


def test_only_few_steps_may_be_left_out() -> None:
    assert not too_many(FEW, steps=20)
    assert too_many(FEW + 1, steps=20)
    assert not too_many(50, steps=5000)
    assert too_many(51, steps=5000)


# In a run

EPOCH = 4  # steps


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    images = make_images(tmp_path / "images", each=8)
    train = {"epochs": 2, "batch": 8, "log_every": 3}
    return write_recipe(tmp_path / "fast.yaml", images, train=train, monitor={"knn_every": 0})


def new_training(recipe: Path, *changes: str) -> Training:
    config = load_config(recipe, changes)
    images = open_images(config.data, "train")
    assert images is not None
    folder = recipe.parent / "run"
    folder.mkdir(exist_ok=True)
    fabric = build_fabric(config.run)
    fabric.launch()
    return prepare_training(config, fabric, images, RunFolder(folder))


def spoil(
    monkeypatch: pytest.MonkeyPatch, training: Training, losses: dict[int, float]
) -> list[int]:
    """At some steps the loss is another, and so are the weights and all that is remembered."""
    taken: list[int] = []
    real = training.stepper.take

    def take(*arguments: Any, **options: Any) -> StepOutput:
        step = real(*arguments, **options)
        taken.append(training.step)
        if training.step not in losses:
            return step
        with torch.no_grad():
            for value in (*training.task.parameters(), *training.task.buffers()):
                value.fill_(7)
        for state in training.optimizer.state.values():
            state["momentum_buffer"].fill_(NAN)
        return step._replace(loss=torch.full_like(step.loss, losses[training.step]))

    monkeypatch.setattr(training.stepper, "take", take)
    return taken


class Notes(Callback):
    def __init__(self) -> None:
        self.notes: list[str] = []
        self.values: list[int] = []
        self.epochs: list[int] = []

    def on_values(self, step: int, *_: Any) -> None:
        self.values.append(step)

    def on_epoch(self, epoch: int, *_: Any) -> None:
        self.epochs.append(epoch)

    def on_note(self, text: str) -> None:
        self.notes.append(text)


@pytest.mark.parametrize(("at", "loss"), [(0, NAN), (4, INF), (5, 1e9), (7, NAN)])
def test_a_bad_step_ends_the_run_and_is_named(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, at: int, loss: float
) -> None:
    """Whatever the moment: no checkpoint is of after that step, though every step would save."""
    training = new_training(recipe, "checkpoint_minutes=0")
    spoil(monkeypatch, training, {at: loss})
    word = "jumped to 1e\\+09" if loss == 1e9 else "NaN or infinite"
    with pytest.raises(DivergedError, match=rf"the loss .*{word}.* at step {at + 1}; "):
        training.train(Callback())
    saved = training.run.checkpoints.paths()
    assert len(saved) == min(at, 2)
    if saved:
        assert saved[-1].name == f"step-{at:09d}.ckpt"


def take_all_but(training: Training, left_out: set[int], until: int) -> None:
    """One step after the other."""
    training.task.train()
    stream = training.batches.from_step(0)
    while training.step < until:
        if training.step in left_out:
            next(stream)
            training.step += 1
        else:
            training.advance(stream)


@pytest.mark.parametrize(
    ("optimiser", "bad"),
    [
        *(("sgd", bad) for bad in ({0}, {5, 6}, {2, 3, 7})),
        *((optimiser, {0}) for optimiser in ("adamw", "lars")),
    ],
)
def test_left_out_steps_leave_no_trace(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, bad: set[int], optimiser: str
) -> None:
    changes = ("skip_bad_steps=true", f"optim={optimiser}")
    undisturbed = new_training(recipe, *changes)
    take_all_but(undisturbed, bad, until=8)
    expected = undisturbed.task.state_dict()
    training, notes = new_training(recipe, *changes), Notes()
    if optimiser == "sgd":
        taken = spoil(monkeypatch, training, dict.fromkeys(bad, NAN))
    else:
        taken = spoil_loss(monkeypatch, training, bad)
    training.train(notes)
    for name, value in training.task.state_dict().items():
        assert torch.equal(value, expected[name]), name
    assert training.bad_steps.left_out == bad
    assert notes.notes == [
        f"the loss is NaN or infinite at step {step + 1}: that step is skipped"
        for step in sorted(bad)
    ]
    assert notes.values == [3, 6, 8]  # nothing is told twice
    assert notes.epochs == [1, 2]
    assert max(taken.count(step) for step in bad) == 1


def test_steps_left_out_count_in_later_sessions(
    recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or the limit would begin anew whenever a run is resumed."""
    long = ("epochs=20", "log_every=1")
    training, early = new_training(recipe, "skip_bad_steps=true", *long), set(range(FEW))
    training.bad_steps.left_out, training.step = early, FEW + 2
    training.save()
    resumed = new_training(recipe, "skip_bad_steps=true", *long)
    assert resumed.restore()
    assert resumed.bad_steps.left_out == early
    spoil(monkeypatch, resumed, {FEW + 3: NAN})
    with pytest.raises(DivergedError, match=f"{FEW + 1} steps were skipped already"):
        resumed.train(Callback())
    without = new_training(recipe, *long)  # a session that shall not skip any
    assert without.restore()
    assert not any(without.bad_steps.skips(step) for step in early)


@pytest.mark.parametrize("damage", [7, ["3"], [-1], [8], None])
def test_steps_left_out_that_cannot_be_are_refused(recipe: Path, damage: object) -> None:
    training = new_training(recipe)
    training.save()
    (path,) = training.run.checkpoints.paths()
    state = load_checkpoint(path)
    del state["left_out"]  # as of runs before there were such
    training.run.checkpoints.save(0, state)
    assert new_training(recipe).restore()
    training.run.checkpoints.save(0, state | {"left_out": damage})
    with pytest.raises(UserError, match="belongs to another configuration"):
        new_training(recipe).restore()


def test_what_was_recorded_is_forgotten_with_a_bad_step(
    recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph replays what was done when a memory was full, and it may not be so any more."""
    training = new_training(recipe, "skip_bad_steps=true")
    forgotten = []
    monkeypatch.setattr(training.stepper, "forget_graph", lambda: forgotten.append(training.step))
    spoil(monkeypatch, training, {4: NAN})
    training.train(Callback())
    assert forgotten == [4]


def test_views_stay_stacked_after_a_step_is_left_out(
    recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, whose way to run encoders a CPU takes as well. The way back is to before the
    first step, when encoders were prepared for one view at once."""
    real = Method.optimize_for
    monkeypatch.setattr(Method, "optimize_for", lambda task, _: real(task, torch.device("cuda")))
    undisturbed = new_training(recipe)
    take_all_but(undisturbed, {1}, until=8)
    training = new_training(recipe, "skip_bad_steps=true")
    spoil(monkeypatch, training, {1: NAN})
    training.train(Callback())
    assert training.bad_steps.left_out == {1}
    norms = [norm for norm in training.task.modules() if isinstance(norm, SplitStatistics)]
    assert {norm.views for norm in norms} == {2}
    expected = undisturbed.task.state_dict()
    for name, value in training.task.state_dict().items():
        assert torch.equal(value, expected[name]), name


def test_there_is_one_copy_of_what_is_good_at_a_time(
    recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies take the memory of all weights each."""
    copies: list[weakref.ref[WayBack]] = []
    alive: list[int] = []

    class Counted(WayBack):
        def __init__(self, *state: Any) -> None:
            alive.append(sum(copy() is not None for copy in copies))
            super().__init__(*state)
            copies.append(weakref.ref(self))

    monkeypatch.setattr("xmoco.train.bad_steps.WayBack", Counted)
    training = new_training(recipe, "skip_bad_steps=true")
    spoil(monkeypatch, training, {5: NAN})
    training.train(Callback())
    assert training.bad_steps.left_out == {5}
    assert alive == [0] * len(copies)
    assert len(copies) == 5  # at the start, of steps 3, 4 and 8, and of 6 taken again


def spoil_loss(monkeypatch: pytest.MonkeyPatch, training: Training, bad: set[int]) -> list[int]:
    taken: list[int] = []
    real = training.stepper.take

    def take(*arguments: Any, **options: Any) -> StepOutput:
        step = real(*arguments, **options)
        taken.append(training.step)
        return step._replace(loss=step.loss * NAN) if training.step in bad else step

    monkeypatch.setattr(training.stepper, "take", take)
    return taken


def test_a_gradient_that_is_no_number_is_blamed_on_its_own_step(
    recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its loss still was one; those of all later steps would not be."""
    undisturbed = new_training(recipe)
    take_all_but(undisturbed, {4}, until=8)
    training, notes = new_training(recipe, "skip_bad_steps=true"), Notes()
    real = training.task.before_update

    def before_update(at: Any) -> None:
        if training.step == 4:
            next(training.task.parameters()).grad[0] = NAN  # type: ignore[index]
        real(at)

    monkeypatch.setattr(training.task, "before_update", before_update)
    training.train(notes)
    assert notes.notes == ["the loss is NaN or infinite at step 5: that step is skipped"]
    for name, value in undisturbed.task.state_dict().items():
        assert torch.equal(training.task.state_dict()[name], value), name


def test_where_all_steps_are_bad_the_run_ends(
    recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = new_training(recipe, "skip_bad_steps=true", "epochs=20", "log_every=1")
    spoil(monkeypatch, training, dict.fromkeys(range(3, 80), NAN))
    with pytest.raises(DivergedError, match=f"{FEW + 1} steps were skipped already"):
        training.train(Callback())


def test_losses_are_looked_at_where_the_log_is_silent(
    recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bad_steps, "MOST_UNSEEN", 2)
    training = new_training(recipe, "log_every=1000", "epochs=200")
    spoil(monkeypatch, training, {1: NAN})
    with pytest.raises(DivergedError, match="at step 2;"):
        training.train(Callback())
    assert training.step == 2


def test_the_device_is_not_asked_at_every_step(
    recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[int] = []
    real: Callable[[LossWatch], BadStep | None] = LossWatch.look
    training = new_training(recipe)

    def look(self: LossWatch) -> BadStep | None:
        looks.append(training.step)
        return real(self)

    monkeypatch.setattr(LossWatch, "look", look)
    training.train(Callback())
    assert looks == [3, 4, 6, 8]  # the log's and those at the end of epochs


def test_too_little_memory_says_what_to_lower(
    recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = new_training(recipe)
    training.save()

    def take(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has …")

    monkeypatch.setattr(training.stepper, "take", take)
    words = (
        r"ran out of memory after step 0 \(CUDA out of memory\): lower batch \(8 now\) or size "
        r"\(16 now\), or raise accumulate \(1 now\).*; the last good checkpoint is "
    )
    with pytest.raises(UserError, match=words):
        training.train(Callback())


def leave_out_in_two(rank: int, recipe: Path, port: int) -> None:
    """One process meets the bad loss; both go back, also with what they share out, and are as if
    there had been no such step."""
    be_process(rank, port)
    changes = ("devices=2", "skip_bad_steps=true", "bank_length=40")
    bad = {0, 5}
    undisturbed = new_training(recipe, *changes)
    take_all_but(undisturbed, bad, until=8)
    training = new_training(recipe, *changes)
    real = training.stepper.take

    def take(*given: Any, **options: Any) -> StepOutput:
        step = real(*given, **options)
        if training.step in bad and rank == 1:
            return step._replace(loss=step.loss * NAN)
        return step

    training.stepper.take = take  # type: ignore[method-assign]
    training.train(Callback())
    assert training.bad_steps.left_out == bad
    for one in (undisturbed, training):
        consolidate_state_dict(one.task)
    expected = undisturbed.task.state_dict() if rank == 0 else {}
    for name, value in expected.items():
        assert torch.equal(training.task.state_dict()[name], value), name
    assert torch.equal(*(next(one.task.parameters()) for one in (undisturbed, training)))
    torch.distributed.destroy_process_group()


def test_two_processes_leave_the_same_step_out(recipe: Path) -> None:
    run_two(leave_out_in_two, recipe, free_port())
