"""A run that is killed or stopped at any moment, and resumed, ends as if nothing had happened."""

import os
import random
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from helpers import (
    assert_done,
    assert_refused,
    assert_same_end,
    checkpoints,
    knn_records,
    logged_steps,
    make_images,
    metrics,
    no_pictures,
    run_cli,
    start_cli,
    two_splits,
    wait_until,
    write_recipe,
)
from xmoco import pretraining
from xmoco.asked import Asked
from xmoco.checkpoints import Checkpoints
from xmoco.errors import TRY_AGAIN
from xmoco.run_logger import RunLogger
from xmoco.settings import load_config, read_config

METHODS = ["xmoco", "mocov2plus"]


@pytest.fixture(autouse=True)
def quick() -> Iterator[None]:
    with no_pictures():
        yield


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """3 epochs of 8 steps; the banks and the history are full after 4."""
    monkeypatch.chdir(tmp_path)
    images = make_images(tmp_path / "images")
    # A checkpoint every few hundredths of a second: kills hit the writing of one, too.
    train = {"epochs": 3, "log_every": 3, "checkpoint_minutes": 0.0005}
    return write_recipe(tmp_path / "fast.yaml", images, train=train)


def assert_complete(run: Path, method: str) -> None:
    """Nothing is missing in the metrics, and nothing is there twice."""
    assert logged_steps(run) == [3, 6, 9, 12, 15, 18, 21, 24]
    trained = [(method, epoch) for epoch in (1, 2, 3)]
    assert knn_records(run) == [("raw pixels", 0), ("untrained", 0), *trained]
    assert not list(run.rglob("*.part"))
    assert len(checkpoints(run)) == 2


def wait_for_checkpoints(run: Path, count: int, process: BaseProcess) -> None:
    """Until there are so many new ones; two are kept, so no more can be waited for."""
    before = checkpoints(run)
    wait_until(lambda: len(set(checkpoints(run)) - set(before)) >= count or not process.is_alive())


@pytest.mark.parametrize("method", METHODS)
def test_killed_at_random_moments(recipe: Path, tmp_path: Path, method: str) -> None:
    chance = random.Random(f"kill {method}")
    whole, killed, said = tmp_path / "whole", tmp_path / "killed", tmp_path / "said.txt"
    assert_done(run_cli("pretrain", "--recipe", recipe, "--out", whole, f"method={method}"))

    process = start_cli("pretrain", "-r", recipe, "--out", killed, f"method={method}", said=said)
    wait_until(lambda: (killed / "config.yaml").exists() or not process.is_alive())
    kills = 0
    while kills < 7:
        time.sleep(chance.uniform(0, 0.15))
        process.kill()
        process.join()
        if process.exitcode == 0:
            break
        assert process.exitcode == -signal.SIGKILL, said.read_text()
        kills += 1
        process = start_cli("pretrain", "--resume", "--out", killed, said=said)
        wait_for_checkpoints(killed, chance.randrange(3), process)
    process.join(60)
    assert process.exitcode == 0, said.read_text()
    assert kills >= 2
    assert "Traceback" not in said.read_text()
    assert_same_end(killed, whole)
    assert_complete(killed, method)
    curves = [
        {line["step"]: line["values"]["loss"] for line in metrics(run) if "values" in line}
        for run in (killed, whole)
    ]
    assert curves[0].keys() == curves[1].keys()


def test_killed_before_anything_was_saved(recipe: Path, tmp_path: Path) -> None:
    whole, killed, said = tmp_path / "whole", tmp_path / "killed", tmp_path / "said.txt"
    rarely = "checkpoint_minutes=10"
    assert_done(run_cli("pretrain", "--recipe", recipe, "--out", whole, rarely))
    process = start_cli("pretrain", "-r", recipe, "--out", killed, rarely, said=said)
    wait_until(lambda: (killed / "metrics.jsonl").exists())
    process.kill()
    process.join()
    assert_done(run_cli("pretrain", "--resume", "--out", killed))
    assert_same_end(killed, whole)
    assert_complete(killed, "xmoco")


@pytest.mark.parametrize(
    "changes",
    [
        [],
        ["method=mocov2plus"],
        ["history=probabilities", "preload_gib=0"],
        ["batch_norm=split", "batch_norm_groups=4", "accumulate=2"],
        ["bank_length=50", "warmup_epochs=1.5", "knn_images=40"],
        ["key_momentum_end=1.0", "consistency_warmup_epochs=2", "optim=lars"],
        ["method=simclr", "optim=adamw"],
        ["method=byol", "predictor_hidden=16"],
        ["method=simsiam", "predictor_hidden=16"],
        ["method=instdisc"],
        [
            "method=swav",
            "prototypes=8",
            "queue_length=40",
            "queue_from_epoch=1",
            "local_crops=2",
            "local_size=8",
        ],
    ],
    ids=lambda changes: " ".join(changes) or "plain",
)
def test_stopped_in_the_middle_of_an_epoch(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: list[str]
) -> None:
    """Stopped twice: while the bank fills and when it is full."""
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    changes = ["checkpoint_minutes=10", *changes]
    assert_done(run_cli("pretrain", "--recipe", recipe, "--out", whole, *changes))

    on_step = RunLogger.on_step

    def stopping(self: RunLogger, step: int) -> None:
        on_step(self, step)
        if step in (2, 13) and step not in seen:
            seen.add(step)
            os.kill(os.getpid(), signal.SIGTERM)

    seen: set[int] = set()
    monkeypatch.setattr(RunLogger, "on_step", stopping)
    outcome = run_cli("pretrain", "--recipe", recipe, "--out", stopped, *changes)
    assert outcome.status == TRY_AGAIN
    assert outcome.stderr.count("\n") == 1
    assert "stopped by SIGTERM after step 2 of 24" in outcome.stderr
    assert f"xmoco pretrain --resume --out {stopped}" in outcome.stderr
    outcome = run_cli("pretrain", "--resume", "--out", stopped)
    assert outcome.status == TRY_AGAIN
    assert "stopped by SIGTERM after step 13 of 24" in outcome.stderr
    assert "resuming after step 2 (epoch 0.2)" in outcome.stdout
    assert_done(run_cli("pretrain", "--resume", "--out", stopped))
    assert_same_end(stopped, whole)
    method = read_config(whole / "config.yaml").method.name
    assert logged_steps(stopped) == logged_steps(whole)
    assert knn_records(stopped) == knn_records(whole)
    assert (method, 3) in knn_records(stopped)


def test_any_checkpoint_is_a_good_start(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also an older one, when the last is lost; metrics of repeated steps are not kept twice."""
    whole, other = tmp_path / "whole", tmp_path / "other"
    assert_done(run_cli("pretrain", "--recipe", recipe, "--out", whole))
    assert_done(run_cli("pretrain", "--recipe", recipe, "--out", other))
    checkpoints(other)[-1].unlink()
    with (other / "metrics.jsonl").open("a") as file:
        file.write('{"step": 99, "val')  # cut off when the run was killed
    assert_done(run_cli("pretrain", "--resume", "--out", other))
    assert_same_end(other, whole)
    assert_complete(other, "xmoco")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_to_a_real_process(recipe: Path, tmp_path: Path, number: signal.Signals) -> None:
    """It saves, says how to go on, and what it says works."""
    command = [sys.executable, "-m", "xmoco", "pretrain", "--recipe", "fast.yaml"]
    changes = ["epochs=500", "knn_every=0", "checkpoint_minutes=10"]
    process = subprocess.Popen(
        [*command, "--out", "run", *changes],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    run = tmp_path / "run"
    wait_until(lambda: (run / "metrics.jsonl").exists() and logged_steps(run)[-1:] > [10])
    process.send_signal(number)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == (130 if number == signal.SIGINT else TRY_AGAIN)
    assert errors.count("\n") == 1
    assert errors.startswith(f"xmoco: stopped by {number.name} after step ")
    assert "Traceback" not in errors
    offered = errors.rpartition("Resume with: ")[2].split()
    assert offered == ["xmoco", "pretrain", "--resume", "--out", "run"]
    (step,) = (int(path.stem.removeprefix("step-")) for path in checkpoints(run)[-1:])
    assert f"after step {step} of 4000" in errors

    # The command as offered, in this process, until it has taken a few more steps.
    def enough(self: RunLogger, now: int) -> None:
        if now == step + 3:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunLogger, "on_step", enough)
        outcome = run_cli(*offered[1:])
    assert outcome.status == TRY_AGAIN
    assert f"stopped by SIGTERM after step {step + 3} of 4000" in outcome.stderr


def test_a_second_signal_does_not_wait(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever presses Ctrl-C twice wants out now; the last checkpoint is still good."""
    save = Checkpoints.save

    def interrupted_save(self: Checkpoints, step: int, state: dict[str, object]) -> Path:
        if step == 5:
            os.kill(os.getpid(), signal.SIGINT)
        return save(self, step, state)

    def press(self: RunLogger, step: int) -> None:
        if step == 5:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(Checkpoints, "save", interrupted_save)
    monkeypatch.setattr(RunLogger, "on_step", press)
    outcome = run_cli("pretrain", "--recipe", recipe, "--out", "run", "checkpoint_minutes=10")
    assert outcome.status == 130
    assert "Traceback" not in outcome.stderr
    assert not list((tmp_path / "run").rglob("*.part"))
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    assert_done(run_cli("pretrain", "--resume", "--out", "run"))


def test_images_may_lie_elsewhere_when_a_run_goes_on(recipe: Path, tmp_path: Path) -> None:
    """On a cluster they often do; what may change besides is what changes no weights."""
    whole, moved = tmp_path / "whole", tmp_path / "moved"
    for run in (whole, moved):
        assert_done(run_cli("pretrain", "--recipe", recipe, "--out", run))
    for checkpoint in checkpoints(moved)[1:]:  # as if it had been killed before
        checkpoint.unlink()
    (moved / "backbone.safetensors").unlink()
    (tmp_path / "images").rename(tmp_path / "scratch")
    resume = ("pretrain", "--resume", "--out", moved)
    assert_refused(run_cli(*resume), "images")
    assert_refused(run_cli(*resume, "--data", "scratch", "epochs=4"), "train.epochs: 3 → 4")
    assert_done(run_cli(*resume, "--data", "scratch", "log_every=4", "preload_gib=0"))
    assert_same_end(moved, whole)
    works = {line["work"] for line in metrics(moved) if "measure" in line}
    assert len(works) == 1, "its records are of one run"


def test_the_command_offered_knows_where_the_images_are_now(tmp_path: Path) -> None:
    config = load_config("demo", ["source=/scratch/photos", "log_every=7", "devices=2"])
    own = load_config("demo", ["source=/home/photos", "log_every=9"])
    command = pretraining._resume_command(tmp_path, config, own)
    assert command == (
        f"xmoco pretrain --resume --out {tmp_path} devices=2 --data /scratch/photos log_every=7"
    )


def test_tensorboard_shows_every_step_of_a_resumed_run_once(recipe: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert_done(run_cli("pretrain", "--recipe", recipe, "--out", run, "log_every=1"))
    for checkpoint in checkpoints(run)[1:]:  # as if it had been killed before
        checkpoint.unlink()
    (left,) = checkpoints(run)
    assert int(left.stem.removeprefix("step-")) in logged_steps(run)
    assert_done(run_cli("pretrain", "--resume", "--out", run))
    events = EventAccumulator(str(run), purge_orphaned_data=True).Reload()
    shown = [point.step for point in events.Scalars("loss")]
    assert shown == logged_steps(run)


def test_the_command_offered_knows_how_this_session_runs(tmp_path: Path) -> None:
    session = ["devices=1", "precision=fp32", "skip_bad_steps=true", "readers=2", "wandb=null"]
    config = load_config("demo", session)
    own = load_config("demo", ["devices=2", "wandb=photos", "device=cpu", "readers=2"])
    command = shlex.split(pretraining._resume_command(tmp_path, config, own))
    asked = Asked.of(None, command[5:], {}, data=None, weights=None)
    assert command[5:] == [
        *("device=auto", "devices=1", "precision=fp32", "skip_bad_steps=true", "wandb=null")
    ]
    assert asked.config("demo").run == config.run.model_copy(update={"readers": 8})


def test_other_test_images_are_warned_of(recipe: Path, tmp_path: Path) -> None:
    two = two_splits(tmp_path / "two")
    run = tmp_path / "run"
    assert_done(run_cli("pretrain", "-r", recipe, "--data", two, "--out", run))
    resume = ("pretrain", "--resume", "--out", run)
    outcome = run_cli(*resume)
    assert_done(outcome)
    assert "test images are others" not in outcome.stdout
    first = min((two / "val").rglob("*.png"))
    first.rename(first.with_name("another.png"))
    outcome = run_cli(*resume)
    assert_done(outcome)
    assert "warning: the test images are others than before" in outcome.stdout


def test_other_images_are_refused_wherever_they_lie(recipe: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert_done(run_cli("pretrain", "--recipe", recipe, "--out", run))
    others = make_images(tmp_path / "others", each=20)
    outcome = run_cli("pretrain", "--resume", "--out", run, "--data", others)
    assert_refused(outcome, "belongs to other settings or images")
