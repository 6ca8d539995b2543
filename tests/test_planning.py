"""What a run will be is said before it starts, and chosen where nobody says it."""

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from helpers import assert_done, assert_refused, make_images, no_pictures, run_cli
from xmoco.auto import Situation
from xmoco.config import Config
from xmoco.errors import UserError
from xmoco.planning import show_plan


@pytest.fixture(autouse=True)
def known_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not that of this machine, lest choices depend on it."""
    monkeypatch.setattr("xmoco.planning.images_per_second", on_a_slow_cpu)


def on_a_slow_cpu(config: Config, _: torch.device) -> float:
    return 200.0 if config.model.backbone == "tiny" else 0.1


def test_auto_says_what_it_chose_and_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    images = make_images(tmp_path / "photos", each=40)
    config = show_plan(data=images, overrides=["device=cpu", "batch=20"])
    said = capsys.readouterr().out
    assert config.model.backbone == "tiny"
    assert "backbone=tiny: trains 200 images/s on this CPU" in said
    assert "epochs=400" in said
    assert "batch=" not in said.partition("steps will take")[0]  # asked for, not chosen
    assert config.train.batch == 20
    assert config.method.model_dump()["bank_length"] == 80  # half of the images
    assert "steps will take about" in said
    assert not (tmp_path / "runs").exists()


def test_auto_tells_of_views_that_suit_a_gpu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("xmoco.planning.look_at", lambda *_: Situation(9_469, 70, "cuda"))
    images = make_images(tmp_path / "photos", each=40)
    show_plan(data=images, overrides=["device=cpu"])
    said = capsys.readouterr().out
    assert "  eval_size=96: crops show things larger than whole images do" in said
    views = "2 of 64 px and 2 weak ones of 64 px and 4 of 32 px, judged by central ones of 96 px"
    assert views in said
    show_plan(data=images, overrides=["device=cpu", "eval_size=64", "local_crops=0"])
    said = capsys.readouterr().out
    assert "eval_size" not in said  # asked for, not chosen
    assert "4 of 32 px" not in said


@pytest.mark.parametrize("method", ["simclr", "swav", "mocov2plus", "supervised"])
def test_auto_chooses_for_every_method(tmp_path: Path, method: str) -> None:
    """What a method does not have is not chosen for it."""
    images = make_images(tmp_path / "photos", each=40)
    config = show_plan(data=images, overrides=["device=cpu", f"method={method}"])
    assert config.method.name == method
    assert config.method.model_dump().get("local_crops", 0) == 0


def test_a_plan_of_a_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    config = show_plan("demo", overrides=["device=cpu", "epochs=2"])
    said = capsys.readouterr().out
    assert "recipe auto" not in said
    assert config.train.epochs == 2
    assert "steps will take about" in said


@pytest.mark.parametrize(
    ("setting", "views"),
    [
        ("weak_keys=true", "2 of 32 px and 2 weak ones of 32 px"),
        ("method=ressl", "1 of 32 px and 1 weak one of 32 px"),
    ],
)
def test_weak_views_are_called_so(
    setting: str, views: str, capsys: pytest.CaptureFixture[str]
) -> None:
    show_plan("demo", overrides=["device=cpu", setting])
    assert f"random views of an image: {views}\n" in capsys.readouterr().out


def test_auto_takes_a_method_without_banks(tmp_path: Path) -> None:
    images = make_images(tmp_path / "photos", each=40)
    config = show_plan(data=images, overrides=["device=cpu", "method=simclr"])
    assert config.method.name == "simclr"


def test_auto_wants_images() -> None:
    with pytest.raises(UserError, match="say with --data where the images are"):
        show_plan(overrides=["device=cpu"])


def test_mistakes_are_found_before_images_are_looked_at(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="unknown key 'epoch'"):
        show_plan(data=tmp_path / "nowhere", overrides=["epoch=3"])


def test_a_run_by_auto_keeps_what_was_chosen(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    images = make_images(tmp_path / "photos", each=20)
    arguments = ["pretrain", "--data", str(images), "--out", "run", "device=cpu", "epochs=1"]
    with no_pictures():
        outcome = run_cli(*arguments)
    assert_done(outcome)
    assert "recipe auto: begins with" in outcome.stdout
    settings = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert settings["model"]["backbone"] == "tiny"
    assert settings["train"]["epochs"] == 1
    with no_pictures():
        again = run_cli("pretrain", "--resume", "--out", "run")
    assert_done(again)
    assert "this run is complete" in again.stdout


def test_a_dry_run_does_nothing(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    outcome = run_cli("pretrain", "--recipe", "demo", "--dry-run", "device=cpu")
    assert_done(outcome)
    assert list(tmp_path.iterdir()) == []
    outcome = run_cli("pretrain", "--recipe", "demo", "--dry-run", "--out", "run")
    assert_refused(outcome, "--dry-run does nothing")


def test_settings_of_a_head_that_is_not_there_are_told_to_do_nothing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    show_plan("demo", overrides=["device=cpu", "method=supervised", "head_layers=3"])
    assert "head_layers, head_hidden and feature_size do nothing" in capsys.readouterr().out
    show_plan("demo", overrides=["device=cpu", "head_layers=3"])
    assert "do nothing" not in capsys.readouterr().out
