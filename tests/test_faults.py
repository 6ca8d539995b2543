"""What goes wrong on clusters and laptops, caused on purpose: nothing is lost, and what can be
the same in the end is the same, bit for bit."""

import functools
import os
import shutil
import signal
import stat
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers import (
    assert_done,
    assert_refused,
    assert_same_end,
    be_process,
    checkpoints,
    free_port,
    logged_steps,
    make_images,
    metrics,
    no_pictures,
    run_cli,
    run_two,
    start_cli,
    wait_until,
    write_recipe,
)
from xmoco import pretraining
from xmoco.checkpoints import BackgroundSaver, Checkpoints
from xmoco.data import open_images
from xmoco.errors import TRY_AGAIN, Interrupted
from xmoco.nn.weights import load_weights
from xmoco.pretraining import prepare_training
from xmoco.run_logger import RunLogger
from xmoco.settings import load_config
from xmoco.train.callback import Callback
from xmoco.train.engine import build_fabric
from xmoco.train.loop import Training
from xmoco.train.run_folder import RunFolder


@pytest.fixture(autouse=True)
def quick() -> Iterator[None]:
    with no_pictures():
        yield


@pytest.fixture
def images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """64 of them, of which 3 may be unreadable."""
    monkeypatch.chdir(tmp_path)
    return make_images(tmp_path / "images", each=16)


@pytest.fixture
def recipe(tmp_path: Path, images: Path) -> Path:
    return write(tmp_path, images)


def write(folder: Path, images: Path) -> Path:
    """3 epochs of 4 steps, of images that are read while training."""
    return write_recipe(
        folder / "fast.yaml",
        images,
        data={"source": str(images), "preload_gib": 0.0},
        train={"epochs": 3, "batch": 16, "log_every": 2, "checkpoint_minutes": 0},
        monitor={"knn_every": 0},
    )


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run as it is without any faults."""
    folder = tmp_path_factory.mktemp("undisturbed")
    recipe = write(folder, make_images(folder / "images", each=16))
    with no_pictures():
        assert_done(run_cli("pretrain", "--recipe", recipe, "--out", folder / "whole"))
    return folder / "whole"


def at_step(patch: pytest.MonkeyPatch, step: int, action: Callable[[], object]) -> None:
    """Something happens when so many steps are done, once."""
    real, done = RunLogger.on_step, threading.Event()

    def on_step(self: RunLogger, now: int) -> None:
        real(self, now)
        if now == step and not done.is_set():
            done.set()
            action()

    patch.setattr(RunLogger, "on_step", on_step)


# The last checkpoint


def stopped(recipe: Path, run: Path, step: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        at_step(patch, step, lambda: os.kill(os.getpid(), signal.SIGTERM))
        outcome = run_cli("pretrain", "--recipe", recipe, "--out", run)
    assert outcome.status == TRY_AGAIN


@pytest.mark.parametrize("harm", ["damaged", "missing"])
def test_where_the_last_checkpoint_is_lost_the_one_before_serves(
    recipe: Path, whole: Path, tmp_path: Path, harm: str
) -> None:
    run = tmp_path / "run"
    stopped(recipe, run, 7)
    before, last = checkpoints(run)
    if harm == "missing":
        last.unlink()
    else:
        content = bytearray(last.read_bytes())
        content[len(content) // 2] ^= 1
        last.write_bytes(content)
    report = load_weights(run).report  # the same holds for who judges an unfinished run
    assert any(f"{last.name} is {harm}" in note for note in report.notes)
    outcome = run_cli("pretrain", "--resume", "--out", run)
    assert_done(outcome)
    assert f"warning: {last.name} is {harm}; going on from {before.name}" in outcome.stdout
    assert "resuming after step 6 " in outcome.stdout
    assert_same_end(run, whole)
    assert logged_steps(run) == logged_steps(whole)
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == [
        "newest",
        "step-000000011.ckpt",
        "step-000000012.ckpt",
    ]


def test_a_checkpoint_is_written_while_training_goes_on(
    recipe: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that takes long to write keeps no step waiting, and is of its own step."""
    run, steps = tmp_path / "run", []
    real, go_on = Checkpoints.save, threading.Event()

    def slow(self: Checkpoints, step: int, state: dict[str, Any]) -> Path:
        if step == 4:
            assert go_on.wait(60)
        return real(self, step, state)

    on_step = RunLogger.on_step

    def count(self: RunLogger, step: int) -> None:
        on_step(self, step)
        steps.append(step)
        if step == 7:
            go_on.set()

    monkeypatch.setattr(Checkpoints, "save", slow)
    monkeypatch.setattr(RunLogger, "on_step", count)
    outcome = run_cli("pretrain", "--recipe", recipe, "--out", run, "checkpoint_minutes=1000")
    assert_done(outcome)
    assert steps == list(range(1, 13))
    assert_same_end(run, whole)


def die_in_writing(count: int) -> None:
    """Lets this process be killed when that file is half written."""
    real, written = os.fsync, []

    def fsync(descriptor: int) -> None:
        if stat.S_ISREG(os.fstat(descriptor).st_mode):  # and no folder
            written.append(descriptor)
        if len(written) == count:
            os.ftruncate(descriptor, os.fstat(descriptor).st_size // 2)
            os.kill(os.getpid(), signal.SIGKILL)
        real(descriptor)

    os.fsync = fsync


@pytest.mark.parametrize("count", [3, 7])  # the first checkpoint, and the third
def test_killed_in_the_middle_of_a_checkpoint(
    recipe: Path, whole: Path, tmp_path: Path, count: int
) -> None:
    run, said = tmp_path / "run", tmp_path / "said.txt"
    death = functools.partial(die_in_writing, count)
    process = start_cli("pretrain", "-r", recipe, "--out", run, said=said, prepare=death)
    process.join(60)
    assert process.exitcode == -signal.SIGKILL, said.read_text()
    left = [path for path in run.rglob("*") if path.name.endswith(".part")]
    assert left
    newest = Checkpoints(run / "checkpoints").newest_whole()
    assert newest.notes == []
    outcome = run_cli("pretrain", "--resume", "--out", run)
    assert_done(outcome)
    assert ("resuming after step 2 " in outcome.stdout) == (count == 7)
    assert_same_end(run, whole)
    assert not list((run / "checkpoints").glob(".*"))


# Signals


def test_a_machine_is_taken_away(recipe: Path, whole: Path, tmp_path: Path) -> None:
    """Saved at that very step; the status asks to be started again; nothing is done twice."""
    run, steps = tmp_path / "run", []
    signals = {3: signal.SIGUSR1, 8: signal.SIGTERM, 12: signal.SIGTERM}  # 12 is the last one
    on_step = RunLogger.on_step
    with pytest.MonkeyPatch.context() as patch:

        def count(self: RunLogger, step: int) -> None:
            on_step(self, step)
            steps.append(step)
            if len(steps) in signals:
                os.kill(os.getpid(), signals[len(steps)])

        patch.setattr(RunLogger, "on_step", count)
        outcomes = [run_cli("pretrain", "--recipe", recipe, "--out", run, "checkpoint_minutes=9")]
        while outcomes[-1].status == TRY_AGAIN:
            outcomes.append(run_cli("pretrain", "--resume", "--out", run))
    assert [outcome.status for outcome in outcomes] == [TRY_AGAIN, TRY_AGAIN, TRY_AGAIN, 0]
    for (step, number), outcome in zip(signals.items(), outcomes, strict=False):
        assert f"stopped by {number.name} after step {step} of 12; everything is" in outcome.stderr
    assert steps == list(range(1, 13))
    assert_same_end(run, whole)


@pytest.mark.parametrize("late", [(RunLogger, "on_epoch"), (BackgroundSaver, "finish")])
def test_who_asks_at_the_very_end_is_heard(
    recipe: Path, whole: Path, tmp_path: Path, late: tuple[type, str]
) -> None:
    """While the last epoch is judged, or saved: a program with several runs begins no other."""
    run, real = tmp_path / "run", getattr(*late)

    def asking(self: Any, *when: int) -> None:
        real(self, *when)
        if when[1:] == (12,) or [*run.glob("checkpoints/*12.ckpt")]:  # the last step
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(*late, asking)
        outcome = run_cli("pretrain", "--recipe", recipe, "--out", run)
    assert outcome.status == TRY_AGAIN
    assert "stopped by SIGTERM after step 12 of 12; everything is saved" in outcome.stderr
    assert_done(run_cli("pretrain", "--resume", "--out", run))
    assert_same_end(run, whole)


def stop_in_two(rank: int, recipe: Path, port: int) -> None:
    """One of them is told so; both save and stop, at the next step where they talk."""
    be_process(rank, port)
    config = load_config(recipe, ["devices=2", "checkpoint_minutes=9"])
    fabric = build_fabric(config.run)
    fabric.launch()
    images = open_images(config.data, "train")
    assert images is not None
    training = prepare_training(config, fabric, images, RunFolder(recipe.parent))
    advance = training.advance

    def signalled(*given: Any, **options: Any) -> Any:
        output = advance(*given, **options)
        if rank == 1 and training.step == 2:
            os.kill(os.getpid(), signal.SIGUSR1)
        return output

    training.advance = signalled  # type: ignore[method-assign]
    with pytest.raises(Interrupted, match="stopped by SIGUSR1 after step 4 of 12"):
        training.train(Callback())
    (saved,) = training.run.checkpoints.paths()
    assert saved.name == "step-000000004.ckpt"
    torch.distributed.destroy_process_group()


def test_two_processes_stop_together(recipe: Path) -> None:
    run_two(stop_in_two, recipe, free_port())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_before_anything_has_begun(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    def opening(*_: object) -> None:
        signal.raise_signal(number)

    monkeypatch.setattr(pretraining, "open_images", opening)
    outcome = run_cli("pretrain", "--recipe", recipe, "--out", tmp_path / "run")
    assert outcome.status == TRY_AGAIN
    assert outcome.stderr.startswith("xmoco: stopped")
    assert outcome.stderr.count("\n") == 1
    assert not (tmp_path / "run").exists()


# Data


def lose(images: Path) -> None:
    images.rename(images.with_name("away"))


def cut(images: Path) -> None:
    shutil.copytree(images, images.with_name("away"))
    for path in images.rglob("*.png"):
        os.truncate(path, 40)


@pytest.mark.parametrize("harm", [lose, cut])
def test_images_vanish_or_go_bad(
    recipe: Path,
    whole: Path,
    images: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    harm: Callable[[Path], None],
) -> None:
    """The run saves itself, says what to do, and goes on to the same end when they are back."""
    run = tmp_path / "run"
    at_step(monkeypatch, 2, lambda: harm(images))
    outcome = run_cli("pretrain", "--recipe", recipe, "--out", run)
    assert_refused(
        outcome,
        "of 64 images cannot be read, which is more than the 3 that may be",
        "The run is saved after step ",
        f"when they are back, go on with: xmoco pretrain --resume --out {run}",
    )
    shutil.rmtree(images, ignore_errors=True)
    images.with_name("away").rename(images)
    step = int(checkpoints(run)[-1].stem.removeprefix("step-"))
    assert f"saved after step {step};" in outcome.stderr
    assert 2 <= step <= 6  # those that were read already
    outcome = run_cli("pretrain", "--resume", "--out", run)
    assert_done(outcome)
    assert f"resuming after step {step} " in outcome.stdout
    assert_same_end(run, whole)
    assert not (run / "unreadable.txt").exists()


def test_one_image_of_many_is_replaced_and_named(tmp_path: Path, recipe: Path) -> None:
    many = make_images(tmp_path / "many", each=25)
    lost = many / "class1" / "003.png"
    with pytest.MonkeyPatch.context() as patch:
        at_step(patch, 1, lost.unlink)
        outcome = run_cli("pretrain", "-r", recipe, "--data", many, "--out", tmp_path / "run")
    assert_done(outcome)
    assert str(lost) in (tmp_path / "run" / "unreadable.txt").read_text()


# A loss that is no number


def spoil_at(patch: pytest.MonkeyPatch, step: int) -> None:
    advance = Training.advance

    def spoilt(self: Training, *given: Any, **options: Any) -> Any:
        output = advance(self, *given, **options)
        return output._replace(loss=output.loss * torch.nan) if self.step == step else output

    patch.setattr(Training, "advance", spoilt)


def test_a_run_that_diverged_goes_on_without_the_step(recipe: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    with pytest.MonkeyPatch.context() as patch:
        spoil_at(patch, 7)
        outcome = run_cli("pretrain", "--recipe", recipe, "--out", run)
        words = "NaN or infinite at step 7", "step-000000006.ckpt", "skip_bad_steps=true"
        assert_refused(outcome, *words)
        assert_refused(run_cli("pretrain", "--resume", "--out", run), *words)
        outcome = run_cli("pretrain", "--resume", "--out", run, "--skip-bad-steps")
    assert_done(outcome)
    assert "the loss is NaN or infinite at step 7: that step is skipped" in outcome.stdout
    assert logged_steps(run) == [2, 4, 6, 8, 10, 12]
    assert all(torch.isfinite(torch.tensor(line["values"]["loss"])) for line in metrics(run))


# Memory


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried …"), "the device ran out of memory"),
        (MemoryError(), "the machine ran out of memory (more was wanted)"),
        (
            RuntimeError(f"DefaultCPUAllocator: you tried to allocate {2**35} bytes."),
            "the machine ran out of memory (32.0 GiB more were wanted)",
        ),
    ],
)
def test_memory_runs_out_before_training(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, words: str
) -> None:
    def opening(*_: object) -> None:
        raise error

    monkeypatch.setattr(pretraining, "open_images", opening)
    # One of several, where other errors of torch mean that another process is gone.
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    outcome = run_cli("pretrain", "--recipe", recipe)
    assert_refused(outcome, words, "lower batch, size or preload_gib, or raise accumulate")


# Two runs, and the time of day


def test_a_second_run_in_the_same_folder_is_refused(recipe: Path, tmp_path: Path) -> None:
    run, said = tmp_path / "run", tmp_path / "said.txt"
    first = start_cli("pretrain", "-r", recipe, "--out", run, "epochs=60", said=said)
    wait_until(lambda: checkpoints(run) or not first.is_alive())
    assert_refused(run_cli("pretrain", "--resume", "--out", run), "another process is training")
    assert_refused(run_cli("pretrain", "-r", recipe, "--out", run), "already holds a run")
    assert first.is_alive(), said.read_text()
    first.terminate()
    first.join(60)
    assert first.exitcode == TRY_AGAIN, said.read_text()


def test_the_clock_jumps(
    recipe: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A day forwards, two days back: neither what is trained nor what is told depends on it."""
    jumps = iter(range(10**9))

    def jumping() -> float:
        return 1.8e9 + (86_400 if next(jumps) % 3 else -172_800)

    monkeypatch.setattr(time, "time", jumping)
    run = tmp_path / "run"
    outcome = run_cli("pretrain", "--recipe", recipe, "--out", run)
    assert_done(outcome)
    assert_same_end(run, whole)
    assert all(0 < line["values"]["images_per_second"] < 1e6 for line in metrics(run))
    assert all(0 <= line["values"]["waiting"] <= 1 for line in metrics(run))
    (last,) = outcome.stdout.split(" elapsed")[-2].split("·")[-1:]
    assert last.strip().startswith("0:0")
