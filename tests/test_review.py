"""Mistakes that were found by attacking the program, each once more."""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers import (
    assert_done,
    assert_refused,
    fingerprint,
    make_images,
    no_pictures,
    run_cli,
    write_recipe,
)


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    make_images(tmp_path / "images")
    with no_pictures():
        yield write_recipe(tmp_path / "fast.yaml", tmp_path / "images")


@pytest.fixture
def begun(recipe: Path, tmp_path: Path) -> Path:
    assert_done(run_cli("pretrain", "--recipe", recipe, "--out", "run"))
    return tmp_path / "run"


def test_resume_refuses_other_images(begun: Path, tmp_path: Path) -> None:
    before = fingerprint(begun)
    shutil.rmtree(tmp_path / "images" / "class3")
    outcome = run_cli("pretrain", "--resume", "--out", begun)
    assert_refused(outcome, "other settings or images")
    assert fingerprint(begun) == before


def test_resume_refuses_an_edited_configuration(begun: Path) -> None:
    file = begun / "config.yaml"
    file.write_text(file.read_text().replace("epochs: 2", "epochs: 3"))
    assert_refused(run_cli("pretrain", "--resume", "--out", begun), "other settings or images")


def test_resume_works_from_another_folder(
    begun: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    assert_done(run_cli("pretrain", "--resume", "--out", "../run"))


def test_a_run_folder_has_one_master(begun: Path) -> None:
    import fcntl

    with (begun / "config.yaml").open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        outcome = run_cli("pretrain", "--resume", "--out", begun)
    assert_refused(outcome, "another process is training")
    assert_done(run_cli("pretrain", "--resume", "--out", begun))


def test_one_image_at_a_time_is_refused(recipe: Path, tmp_path: Path) -> None:
    outcome = run_cli("pretrain", "--recipe", recipe, "--out", "run", "batch=2", "accumulate=2")
    assert_refused(outcome, "at least two images")
    assert not (tmp_path / "run").exists()


def test_a_broken_test_split_leaves_nothing_behind(tmp_path: Path, recipe: Path) -> None:
    make_images(tmp_path / "both" / "train")
    make_images(tmp_path / "both" / "val", each=8)
    for broken in (tmp_path / "both" / "val" / "class0").iterdir():
        broken.write_bytes(b"broken")
    outcome = run_cli("pretrain", "--recipe", recipe, "--data", "both", "--out", "run")
    assert_refused(outcome, "cannot be read", "val/class0/000.png")
    assert not (tmp_path / "run").exists()


def test_unreadable_images_are_named_even_when_they_end_the_run(
    tmp_path: Path, recipe: Path
) -> None:
    """Streamed, since images of other sizes come late: the run has begun by then."""
    for broken in sorted((tmp_path / "images" / "class3").iterdir())[:5]:
        broken.write_bytes(b"broken")
    command = ("pretrain", "--recipe", recipe, "--out", "run", "preload_gib=0", "knn_every=0")
    assert_refused(run_cli(*command), "cannot be read")
    assert "class3" in (tmp_path / "run" / "unreadable.txt").read_text()


def test_names_that_are_no_text(tmp_path: Path, recipe: Path) -> None:
    odd = tmp_path / "odd\u2028name"
    make_images(odd, each=8)
    assert_done(run_cli("pretrain", "--recipe", recipe, "--data", odd, "--out", "run"))
    for line in (tmp_path / "run" / "metrics.jsonl").read_text().split("\n")[:-1]:
        json.loads(line)
    assert_done(run_cli("pretrain", "--resume", "--out", "run"))
    unspeakable = tmp_path / os.fsdecode(b"odd\xff")
    assert_refused(run_cli("pretrain", "--data", unspeakable, "--out", "other"), "data.source")


def test_a_run_folder_is_as_private_as_the_user_wants(recipe: Path, tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        assert_done(run_cli("pretrain", "--recipe", recipe, "--out", "run", "epochs=1"))
    finally:
        os.umask(before)
    assert (tmp_path / "run").stat().st_mode & 0o777 == 0o700
