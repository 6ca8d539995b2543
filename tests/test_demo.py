"""The demonstration, shrunk to seconds: four rows, and where to go from there."""

from pathlib import Path

import pytest

from helpers import Outcome, assert_done, make_images, no_pictures, run_cli, write_recipe
from xmoco import demo
from xmoco.pretraining import RunResult, pretrain


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
    assert "xmoco pretrain --recipe demo --data" in table


def test_the_demo_compares_and_says_what_is_next(shrunk: Path) -> None:
    outcome = run_cli("demo")
    assert_tells_all(outcome, "runs/demo")
    for method in ("mocov2plus", "xmoco"):
        assert (shrunk / "runs" / "demo" / method / "backbone.safetensors").is_file()
    # What it recommends works, on the images it was trained on here.
    assert_done(run_cli("evaluate", "knn", "runs/demo/xmoco", shrunk / "images"))
    # A second demo does not touch the first.
    assert_tells_all(run_cli("demo"), "runs/demo-2")


def test_a_folder_can_be_chosen_and_is_not_overwritten(shrunk: Path) -> None:
    accuracy = demo.run_demo(Path("mine"))
    assert accuracy.keys() == {"raw pixels", "untrained", "mocov2plus", "xmoco"}
    assert all(0 <= value <= 100 for value in accuracy.values())
    outcome = run_cli("demo", "--out", "mine")
    assert outcome.status == 2
    assert "mine/mocov2plus already holds a run" in outcome.stderr
