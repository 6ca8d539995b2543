"""benchmarks/tune.py: trials are judged on held-out images, kept, and never mistaken for others."""

import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from helpers import make_images, no_pictures, write_recipe
from xmoco.errors import UserError
from xmoco.settings import load_config

Tune = Callable[..., list[dict[str, Any]]]


@pytest.fixture(scope="module")
def program(benchmarks: None) -> ModuleType:
    return importlib.import_module("tune")


@pytest.fixture
def tune(program: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tune:
    """Calls the program with a quick recipe; gives all records there are then."""
    monkeypatch.chdir(tmp_path)
    write_recipe(tmp_path / "fast.yaml", "patterns")
    images = make_images(tmp_path / "made")
    for split in ("train", "val"):
        (tmp_path / "a" / "tuning").mkdir(parents=True, exist_ok=True)
        (tmp_path / "a" / "tuning" / split).symlink_to(images)

    def call(*trials: str, data: str = "a/tuning", epochs: int = 1) -> list[dict[str, Any]]:
        fixed = ["--runs", "runs", "--results", ".", "--data", data, "--epochs", str(epochs)]
        monkeypatch.setattr(sys, "argv", ["tune.py", "fast.yaml", *fixed, *trials])
        with no_pictures():
            program.main()
        return [json.loads(line) for line in Path("tuning.jsonl").read_text().splitlines()]

    return call


def trained(folder: Path) -> int:
    return len(list((folder / "runs").iterdir()))


def test_a_trial_is_trained_and_recorded_once(tune: Tune, tmp_path: Path) -> None:
    records = tune("none", "batch=8 seed=5")
    assert [record["measure"] for record in records] == ["knn_top1", "logistic_top1"] * 2
    assert [record["protocol"]["changes"] for record in records[::2]] == ["none", "batch=8 seed=5"]
    assert [record["seed"] for record in records[::2]] == [0, 5]
    assert all(0 <= record["value"] <= 100 for record in records)
    assert trained(tmp_path) == 2
    assert tune("batch=8 seed=5", "none") == records
    assert trained(tmp_path) == 2


def test_the_epochs_are_those_of_all_trials(tune: Tune, tmp_path: Path) -> None:
    records = tune("epochs=3")
    (run,) = (tmp_path / "runs").iterdir()
    assert records[0]["protocol"]["epochs"] == 1
    assert "epochs: 1" in (run / "config.yaml").read_text()


def test_a_finished_run_is_judged_without_training(tune: Tune, tmp_path: Path) -> None:
    records = tune("none")
    (weights,) = (tmp_path / "runs").glob("*/backbone.safetensors")
    before = weights.read_bytes()
    (tmp_path / "tuning.jsonl").unlink()
    assert [r["value"] for r in tune("none")] == [r["value"] for r in records]
    assert weights.read_bytes() == before
    assert trained(tmp_path) == 1


def test_a_run_of_other_images_is_not_taken_for_this_one(tune: Tune, tmp_path: Path) -> None:
    tune("none")
    (tmp_path / "tuning.jsonl").unlink()
    (tmp_path / "b").mkdir()
    (tmp_path / "a" / "tuning").rename(tmp_path / "b" / "tuning")
    first = min((tmp_path / "b" / "tuning" / "train").rglob("*.png"))
    first.rename(first.with_name("another.png"))
    with pytest.raises(UserError, match="belongs to other settings or images"):
        tune("none", data="b/tuning")


def test_mistakes_are_told_before_anything_is_trained(tune: Tune, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="unknown key 'rate'"):
        tune("none", "rate=3")
    with pytest.raises(SystemExit, match="no images to judge by"):
        tune("none", data="made")
    assert not (tmp_path / "runs").exists()


def test_one_backbone_at_several_sizes(
    tune: Tune, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = [record["value"] for record in tune("none")]
    (run,) = (tmp_path / "runs").iterdir()

    def judge_at(*sizes: str, data: str = "a/tuning") -> list[dict[str, Any]]:
        arguments = [str(run), *sizes, "--data", data, "--results", "."]
        monkeypatch.setattr(sys, "argv", ["eval_size.py", *arguments])
        importlib.import_module("eval_size").main()
        return [json.loads(line) for line in Path("eval-size.jsonl").read_text().splitlines()]

    with pytest.raises(UserError, match="4 px are too small"):
        judge_at("16", "4")
    with pytest.raises(SystemExit, match="no images to judge by"):
        judge_at("16", data="made")
    records = judge_at("16", "24")
    assert [record["protocol"]["size"] for record in records] == [16, 16, 24, 24]
    assert {record["protocol"]["trained_size"] for record in records} == {16}
    assert [record["measure"] for record in records] == ["knn_top1", "logistic_top1"] * 2
    # The recipe's own size gives what the trial was judged by.
    assert [record["value"] for record in records[:2]] == expected


def test_settings_at_their_defaults_leave_trials_what_they_were(program: ModuleType) -> None:
    """A setting that did not exist when a trial was recorded has its default since."""
    usual = program.digest(load_config("demo"))
    assert program.digest(load_config("demo", ["predictor_hidden=0"])) == usual  # the default
    assert program.digest(load_config("demo", ["predictor_hidden=8"])) != usual
    assert program.digest(load_config("demo", ["eval_size=40"])) != usual
