"""Weights & Biases beside our own logs: what it is told, and what is wrong with it."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from helpers import assert_done, assert_refused, make_images, metrics, no_pictures, run_cli
from helpers import write_recipe as write_fast_recipe


class LibraryError(Exception):
    pass


class Library(SimpleNamespace):
    """What of the library is used, writing down what it is told."""

    Error = LibraryError

    def __init__(self, logged_in: bool = True, refusal: str | None = None) -> None:
        super().__init__()
        self.logged_in, self.refusal = logged_in, refusal
        self.runs: list[dict[str, Any]] = []
        self.logged: list[tuple[int, dict[str, float]]] = []
        self.ends: list[int] = []

    def login(self, *, prompt: bool) -> bool:
        assert not prompt, "nobody may be there to answer"
        return self.logged_in

    def init(self, **given: Any) -> Any:
        if self.refusal is not None:
            raise LibraryError(self.refusal)
        self.runs.append(given)
        return SimpleNamespace(
            url="https://wandb.example/cats",
            offline=False,
            log=lambda values, step: self.logged.append((step, values)),
            finish=lambda exit_code: self.ends.append(exit_code),
        )

    @staticmethod
    def Settings(**settings: Any) -> dict[str, Any]:  # noqa: N802
        return settings


@pytest.fixture
def recipe(tmp_path: Path) -> Iterator[Path]:
    with no_pictures():
        yield write_fast_recipe(tmp_path / "fast.yaml", make_images(tmp_path / "gratings"))


def use(library: Library | None, patch: pytest.MonkeyPatch) -> None:
    patch.setitem(sys.modules, "wandb", library)
    patch.delenv("WANDB_MODE", raising=False)


def test_everything_that_is_logged_goes_there_too(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = Library()
    use(library, monkeypatch)
    run = tmp_path / "run"
    outcome = run_cli("pretrain", "--recipe", recipe, "--out", run, "wandb=cats")
    assert_done(outcome)
    assert "logged to Weights & Biases: https://wandb.example/cats" in outcome.stdout
    (given,) = library.runs
    assert (given["project"], given["name"], given["dir"]) == ("cats", "run", run)
    assert (given["tags"], given["config"]["method"]["name"]) == (["xmoco"], "xmoco")
    json.dumps(given["config"])  # as it is sent
    lines = metrics(run)
    values = [(line["step"], line["values"]) for line in lines if "values" in line]
    assert [one for one in library.logged if "loss" in one[1]] == values
    knn = {
        (line["protocol"]["step"], f"knn/{line['subject']}"): line["value"]
        for line in lines
        if line.get("measure") == "knn_top1"
    }
    told = {(step, name): v for step, found in library.logged for name, v in found.items()}
    assert knn
    assert knn.items() <= told.items()
    assert library.ends == [0]


def test_a_resumed_run_goes_on_in_the_same_log(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = Library()
    use(library, monkeypatch)
    for name in ("one", "two"):
        run = ("--out", tmp_path / name)
        assert_done(run_cli("pretrain", "--recipe", recipe, *run, "wandb=cats"))
        # Finished as it is, nothing is trained, and nothing logged.
        assert_done(run_cli("pretrain", "--resume", *run, "wandb=cats"))
        (tmp_path / name / "checkpoints" / "newest").unlink()
        for checkpoint in sorted((tmp_path / name / "checkpoints").glob("step*"))[1:]:
            checkpoint.unlink()
        assert_done(run_cli("pretrain", "--resume", *run, "wandb=cats"))
    first, again, other, _ = (given["id"] for given in library.runs)
    assert first == again != other
    assert {given["resume"] for given in library.runs} == {"allow"}


def test_without_an_account_nothing_is_begun(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ("pretrain", "--recipe", recipe, "--out", tmp_path / "run", "wandb=cats")
    use(Library(logged_in=False), monkeypatch)
    assert_refused(run_cli(*command), "wandb=cats needs an account: log in with `wandb login`")
    use(None, monkeypatch)  # not installed
    assert_refused(run_cli(*command), "pip install xmoco[wandb]")
    assert not (tmp_path / "run").exists()
    # Nor is anything measured.
    monkeypatch.setattr("xmoco.planning.images_per_second", None)
    images = make_images(tmp_path / "photos", each=5)
    outcome = run_cli("pretrain", "--data", images, "device=cpu", "wandb=cats")
    assert_refused(outcome, "pip install xmoco[wandb]")
    assert outcome.stdout == ""


def test_what_the_library_refuses_is_told_in_a_sentence(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(Library(refusal="project cats not found.\nmore of it"), monkeypatch)
    outcome = run_cli("pretrain", "--recipe", recipe, "--out", tmp_path / "run", "wandb=cats")
    assert_refused(outcome, "wandb=cats cannot be logged to (project cats not found): log in")


def test_the_library_itself_keeps_a_log_without_a_network(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    outcome = run_cli("pretrain", "--recipe", recipe, "--out", tmp_path / "run", "wandb=cats")
    assert_done(outcome)
    (kept,) = (tmp_path / "run" / "wandb").glob("offline-run-*/run-*.wandb")
    assert b"images_per_second" in kept.read_bytes()
    assert f"`wandb sync {kept.parent}`" in outcome.stdout.replace("\n", "")
