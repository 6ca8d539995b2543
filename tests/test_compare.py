"""benchmarks/compare.py: entries × seeds of a recipe, trained once each; mean ± deviation."""

import importlib
import json
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from helpers import make_images, write_recipe
from xmoco.config import RunConfig
from xmoco.data.imagesets import ArrayImages
from xmoco.errors import TRY_AGAIN, Interrupted
from xmoco.evaluate.classify import LINEAR
from xmoco.evaluate.features import Features
from xmoco.evaluate.logistic import fit
from xmoco.settings import load_config
from xmoco.tables.bench import Bench, Images
from xmoco.train.engine import build_fabric
from xmoco.train.loop import Training

Compare = Callable[..., list[dict[str, Any]]]


@pytest.fixture(scope="module")
def program(benchmarks: None) -> ModuleType:
    return importlib.import_module("compare")


@pytest.fixture
def compare(program: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Compare:
    """Calls the program with a quick recipe; gives all records there are then."""
    monkeypatch.chdir(tmp_path)
    write_recipe(tmp_path / "fast.yaml", "patterns")
    images = make_images(tmp_path / "made")
    for split in ("train", "val"):
        (tmp_path / "set").mkdir(exist_ok=True)
        (tmp_path / "set" / split).symlink_to(images)

    def call(*arguments: str) -> list[dict[str, Any]]:
        fixed = ["fast.yaml", "--data", "set", "--results", ".", "--epochs", "1"]
        monkeypatch.setattr(sys, "argv", ["compare.py", *fixed, *arguments])
        program.main()
        return [
            json.loads(line)
            for file in sorted(tmp_path.glob("*.jsonl"))
            for line in file.read_text().splitlines()
        ]

    return call


def test_every_entry_and_seed_is_trained_once(
    compare: Compare, capsys: pytest.CaptureFixture[str]
) -> None:
    entries = ("ours:", "moco: method=mocov2plus")
    records = compare(*entries, "--seeds", "0", "1")
    runs = {(r["subject"], r["seed"]) for r in records}
    assert runs == {(name, seed) for name in ("ours", "moco") for seed in (0, 1)}
    assert {r["measure"] for r in records} == {"knn_top1", "logistic_top1"}
    assert {r["protocol"].get("k") for r in records} == {20, 200, None}
    assert all(r["protocol"]["split"] == "test" for r in records)
    assert "±" in capsys.readouterr().out
    assert compare(*entries, "--seeds", "0", "1") == records
    assert len(compare(*entries, "--seeds", "2")) == len(records) * 3 // 2


def test_trials_look_at_held_out_training_images_only(compare: Compare, tmp_path: Path) -> None:
    records = compare("ours:", "--held-out")
    assert {r["protocol"]["split"] for r in records} == {
        "validation, held out of the training images"
    }
    assert (tmp_path / "trials-fast.jsonl").exists()
    assert not (tmp_path / "compare-fast.jsonl").exists()


def test_watched_runs_keep_their_course(
    compare: Compare, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ("ours: log_every=1", "--held-out", "--watch", "1", "--runs", "kept")
    judged = Bench.knn

    def fails_the_second_time(self: Bench, *settings: Any, **k: int) -> float:
        monkeypatch.setattr(Bench, "knn", fails)
        return judged(self, *settings, **k)

    def fails(*_: Any, **__: Any) -> float:
        raise RuntimeError("the machine went away")

    monkeypatch.setattr(Bench, "knn", fails_the_second_time)
    with pytest.raises(RuntimeError, match="went away"):
        compare(*arguments, "--epochs", "2")
    monkeypatch.setattr(Bench, "knn", judged)
    first, *others = compare(*arguments, "--epochs", "2")  # goes on
    one, two = first["protocol"]["curve"]
    assert (one["epoch"], two["epoch"]) == (1, 2)
    assert two["knn"] == pytest.approx(first["value"], abs=1e-3)
    assert one["step"] < two["step"]
    assert one["loss"] > 0
    assert {r["protocol"]["watched_every"] for r in (first, *others)} == {1}
    for mistake, words in (
        ("1", "test images are looked at once"),
        ("0", "no whole number of at least 1"),
    ):
        with pytest.raises(SystemExit):
            compare("ours:", "--watch", mistake)
        assert words in capsys.readouterr().err


def test_runs_at_once_and_further_sizes_are_recorded(
    compare: Compare,
    program: ModuleType,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What cannot be trained does not stop the others, though they come later."""

    def one_after_the_other(work: Callable[..., None], arguments: Sequence[Any]) -> int:
        endings = []
        for own in arguments:
            with pytest.raises(SystemExit) as end:
                work(*own)
            endings.append(end.value.code)
        assert endings == [2, 0]  # the second finds nothing left
        return 1

    monkeypatch.setattr(program, "in_processes", one_after_the_other)
    entries = ("huge: batch=4096", "large: batch=2048", "ours:")
    with pytest.raises(SystemExit, match="not everything could be trained"):
        compare(*entries, "--at-once", "2", "--beside", "1", "--sizes", "24")
    said = capsys.readouterr().err
    assert "huge, seed 0: " in said
    assert "too few for a batch of 2048" in said
    records = compare("ours:")  # which is there already
    assert {r["subject"] for r in records} == {"ours"}
    assert {r["protocol"]["size"] for r in records} == {16, 24}
    assert {r["protocol"]["runs_at_once"] for r in records} == {3}


def test_processes_that_fail_are_counted(benchmarks: None) -> None:
    at_once = importlib.import_module("at_once")
    assert at_once.in_processes(sys.exit, [(0,), (3,), (0,)]) == 1


def test_who_is_asked_to_stop_stops_its_processes(benchmarks: None) -> None:
    at_once = importlib.import_module("at_once")
    before, started = signal.getsignal(signal.SIGTERM), time.monotonic()
    program = "import os, time; os.kill(os.getppid(), 15); time.sleep(60)"
    with pytest.raises(SystemExit):
        at_once.in_processes(exec, [(program,)])
    assert time.monotonic() - started < 30
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_linear_classifier_for_the_last_seed(
    compare: Compare, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = LINEAR["moco"].shortened(1)
    monkeypatch.setitem(LINEAR, "moco", short)
    records = compare("ours:", "--seeds", "0", "1", "--linear")
    linear = [r for r in records if r["measure"] == "linear_top1"]
    assert [r["seed"] for r in linear] == [1]
    assert linear[0]["protocol"]["name"] == short.name


def test_mistakes_are_told_before_anything_is_trained(
    compare: Compare, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="not of the form"):
        compare("method=mocov2plus")
    with pytest.raises(Exception, match="unknown key 'bank'"):
        compare("ours: bank=3")
    with pytest.raises(SystemExit):
        compare("ours:", "--mps")
    assert "--mps needs --at-once" in capsys.readouterr().err


def test_what_cannot_be_trained_does_not_stop_the_others(
    compare: Compare, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with pytest.raises(SystemExit, match="not everything could be trained"):
        compare("huge: batch=4096", "ours:")
    assert "huge, seed 0: " in capsys.readouterr().err
    assert '"subject": "ours"' in (tmp_path / "compare-fast.jsonl").read_text()


def test_a_stopped_run_goes_on(
    compare: Compare, program: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    judged = Bench._judged

    def fails(*arguments: Any) -> None:
        raise RuntimeError("the machine went away")

    monkeypatch.setattr(Bench, "_judged", fails)
    with pytest.raises(RuntimeError, match="went away"):
        compare("ours:", "--runs", "kept")
    (run,) = (tmp_path / "kept").iterdir()
    assert list((run / "checkpoints").iterdir())
    monkeypatch.setattr(Bench, "_judged", judged)
    monkeypatch.setattr(Training, "advance", fails)  # no step is taken twice
    assert {r["seed"] for r in compare("ours:", "--runs", "kept")} == {0}


@pytest.mark.parametrize(
    ("runs", "told"), [(("--runs", "kept"), "goes on"), ((), "lost: --runs would")]
)
def test_one_that_is_asked_to_stop_says_what_is_kept(
    compare: Compare,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    runs: tuple[str, ...],
    told: str,
) -> None:
    def stopped(*_: Any, **__: Any) -> None:
        raise Interrupted(signal.SIGTERM, "after step 1 of 3", "")

    monkeypatch.setattr(Bench, "attempt", stopped)
    with pytest.raises(SystemExit) as end:
        compare("--held-out", *runs, "xmoco:")
    assert end.value.code == TRY_AGAIN
    assert told in capsys.readouterr().err


def test_methods_have_kept_runs_and_digests_of_their_own(compare: Compare, tmp_path: Path) -> None:
    """Though both have all their settings at the defaults."""
    compare("ours:", "moco: method=mocov2plus", "--runs", "kept")
    assert len(list((tmp_path / "kept").iterdir())) == 2
    digest = importlib.import_module("tune").digest
    methods = [load_config("demo", [f"method={name}"]) for name in ("xmoco", "mocov2plus", "moco")]
    assert len({digest(config) for config in methods}) == 3
    assert digest(load_config("demo")) == digest(methods[0])


def test_the_penalty_is_not_chosen_by_the_images_that_are_judged(monkeypatch: Any) -> None:
    """Labels of judged images that are wrong change what is found, not the penalty."""
    torch.manual_seed(0)
    labels = torch.arange(60) % 3
    vectors = torch.randn(60, 8) + 2 * torch.nn.functional.one_hot(labels, 8)
    images = ArrayImages("noise", torch.zeros(60, 3, 2, 2, dtype=torch.uint8), labels, tuple("abc"))
    bench = Bench(build_fabric(RunConfig(device="cpu")), Images(images, images, ""))
    strengths = []

    def noted(*arguments: Any) -> Any:
        strengths.append(arguments[-1])
        return fit(*arguments)

    monkeypatch.setattr("xmoco.tables.bench.fit", noted)
    bank = Features(vectors, labels)
    right = bench._logistic(bank, Features(vectors, labels))
    wrong = bench._logistic(bank, Features(vectors, (labels + 1) % 3))
    assert right > 80
    assert wrong < 20
    assert strengths[0] == strengths[1]
