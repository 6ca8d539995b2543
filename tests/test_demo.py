"""The demonstration, shrunk to seconds: four rows, and where to go from there."""

import signal
from pathlib import Path
from typing import Any

import pytest

from helpers import (
    Outcome,
    assert_done,
    assert_refused,
    logged_steps,
    make_images,
    no_pictures,
    run_cli,
    write_recipe,
)
from xmoco import demo
from xmoco.pretraining import RunResult, pretrain
from xmoco.train.loop import Training

METRICS = "metrics.jsonl"


@pytest.fixture
def shrunk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The demo trains by the quick recipe, and draws nothing."""
    monkeypatch.chdir(tmp_path)
    write_recipe(tmp_path / "fast.yaml", make_images(tmp_path / "images"), train={"epochs": 1})

    def quick(recipe: str, **settings: object) -> RunResult:
        assert recipe == "demo"
        with no_pictures():
            return pretrain(tmp_path / "fast.yaml", **settings)

    monkeypatch.setattr(demo, "pretrain", quick)
    return tmp_path


def assert_tells_all(outcome: Outcome, folder: str) -> None:
    assert_done(outcome)
    table = outcome.stdout[outcome.stdout.index("kNN accuracy on unseen patterns") :]
    rows = ["raw pixels", "untrained backbone", "MoCo v2+", "XMoCo"]
    assert [table.index(row) for row in rows] == sorted(table.index(row) for row in rows)
    assert table.count(" % ") == 4
    assert f"weights  {folder}/xmoco/backbone.safetensors" in table
    assert f"report   {folder}/xmoco/report.html" in table
    assert f"picture  {folder}/similarities.png" in table
    assert Path(folder, "similarities.png").read_bytes().startswith(b"\x89PNG")
    assert f"xmoco evaluate knn {folder}/xmoco patterns" in table
    # The demo's toy network and 32 px would be of no use to photographs.
    assert "xmoco pretrain --data FOLDER_OF_YOUR_IMAGES --out" in table


def test_the_demo_compares_and_says_what_is_next(shrunk: Path) -> None:
    outcome = run_cli("demo")
    assert_tells_all(outcome, "runs/demo")
    for method in ("mocov2plus", "xmoco"):
        assert (shrunk / "runs" / "demo" / method / "backbone.safetensors").is_file()
    # What it recommends works, on the images it was trained on here.
    assert_done(run_cli("evaluate", "knn", "runs/demo/xmoco", shrunk / "images"))


def test_a_complete_demo_is_shown_again_and_not_trained(shrunk: Path) -> None:
    assert_tells_all(run_cli("demo"), "runs/demo")
    before = halves(shrunk / "runs" / "demo")
    again = run_cli("demo")
    assert_tells_all(again, "runs/demo")
    assert "holds a complete demo: nothing is trained again" in again.stdout
    assert halves(shrunk / "runs" / "demo") == before
    assert not (shrunk / "runs" / "demo-2").exists()


def halves(folder: Path) -> list[tuple[bytes, ...]]:
    """What both runs learnt, and what they measured at which time."""
    return [
        tuple((folder / name / file).read_bytes() for file in ("backbone.safetensors", METRICS))
        for name in demo.HALVES
    ]


@pytest.mark.parametrize("half", demo.HALVES)
def test_an_interrupted_demo_goes_on_by_the_same_command(
    shrunk: Path, monkeypatch: pytest.MonkeyPatch, half: str
) -> None:
    folder = shrunk / "a demo"
    with monkeypatch.context() as patch:
        interrupt_in(patch, half)
        stopped = run_cli("demo", "--out", "a demo")
    assert stopped.status == 130
    assert f"while {demo.NAMES[half]} was training; everything is saved" in stopped.stderr
    assert "Resume with: xmoco demo --out 'a demo'" in stopped.stderr
    first = (folder / "mocov2plus" / METRICS).read_bytes()

    outcome = run_cli("demo", "--out", "a demo")
    assert_tells_all(outcome, "a demo")
    assert "holds a demo that was interrupted" in outcome.stdout
    assert "resuming after step 1" in outcome.stdout
    if half == "xmoco":  # what was finished is kept
        assert (folder / "mocov2plus" / METRICS).read_bytes() == first
    assert logged_steps(folder / "mocov2plus") == logged_steps(folder / "xmoco")


def interrupt_in(patch: pytest.MonkeyPatch, half: str) -> None:
    """Ctrl-C after the first step of this run."""
    advance = Training.advance

    def interrupted(training: Training, *given: Any, **options: Any) -> Any:
        if training.run.path.name == half:
            signal.raise_signal(signal.SIGINT)
        return advance(training, *given, **options)

    patch.setattr(Training, "advance", interrupted)


@pytest.mark.parametrize("name", [".", "mocov2plus"])
def test_a_folder_that_holds_another_run_is_refused(shrunk: Path, name: str) -> None:
    run = shrunk / "mine" / name
    run.mkdir(parents=True)
    write_recipe(run / "config.yaml", shrunk / "images", optim={"learning_rate": 9})
    outcome = run_cli("demo", "--out", "mine")
    assert_refused(outcome, "mine", "another" if name != "." else "already holds a run", "--out")
    assert [path.name for path in run.iterdir()] == ["config.yaml"]


def test_a_folder_of_anything_else_is_refused(shrunk: Path) -> None:
    outcome = run_cli("demo", "--out", "images")
    assert_refused(outcome, "images already exists: choose another folder with --out")


def test_the_usual_folder_is_another_where_it_holds_another_run(shrunk: Path) -> None:
    other = shrunk / "runs" / "demo"
    other.mkdir(parents=True)
    assert demo.run_demo().keys() == {"raw pixels", "untrained", "mocov2plus", "xmoco"}
    assert (shrunk / "runs" / "demo-2" / "xmoco").is_dir()
    assert not [*other.iterdir()]


def test_accuracies_are_returned(shrunk: Path) -> None:
    accuracy = demo.run_demo(Path("mine"))
    assert accuracy.keys() == {"raw pixels", "untrained", "mocov2plus", "xmoco"}
    assert all(0 <= value <= 100 for value in accuracy.values())
