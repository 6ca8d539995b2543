"""benchmarks/compare.py: entries × seeds of a recipe, trained once each; mean ± deviation."""

import importlib
import json
import shutil
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import yaml

from helpers import assert_done, make_images, run_cli, two_splits, write_recipe
from xmoco.config import RunConfig
from xmoco.data.imagesets import ArrayImages
from xmoco.errors import TRY_AGAIN, Interrupted
from xmoco.evaluate.classify import LINEAR
from xmoco.evaluate.features import Features
from xmoco.evaluate.logistic import fit
from xmoco.settings import load_config
from xmoco.tables.bench import Bench
from xmoco.tables.images import Images
from xmoco.tables.judging import Judge
from xmoco.tables.trials import DIVERGED, known_records, recipe_digest
from xmoco.train.bad_steps import DivergedError
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


def batches(records: list[dict[str, Any]]) -> set[int]:
    """Of the entries in these tests."""
    return {r["protocol"]["settings"]["train"]["batch"] for r in records}


def test_every_entry_and_seed_is_trained_once(
    compare: Compare, capsys: pytest.CaptureFixture[str]
) -> None:
    entries = ("ours:", "moco: method=mocov2plus")
    records = compare(*entries, "--seeds", "0", "1")
    runs = {(r["subject"], r["seed"]) for r in records}
    assert runs == {(name, seed) for name in ("xmoco", "mocov2plus") for seed in (0, 1)}
    told = {"train_seconds", "bank_memory", "backbone_parameters"}
    assert {r["measure"] for r in records} == {"knn_top1", "logistic_top1", *told}
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
    """Also if what was interrupted goes on without being watched."""
    arguments = ("ours: log_every=1", "--held-out", "--epochs", "2")
    judged = Judge.knn

    def fails_the_second_time(self: Judge, *settings: Any, **k: int) -> float:
        monkeypatch.setattr(Judge, "knn", fails)
        return judged(self, *settings, **k)

    def fails(*_: Any, **__: Any) -> float:
        raise RuntimeError("the machine went away")

    monkeypatch.setattr(Judge, "knn", fails_the_second_time)
    with pytest.raises(SystemExit, match="not measured"):
        compare(*arguments, "--watch", "1")
    assert "went away" in capsys.readouterr().err
    monkeypatch.setattr(Judge, "knn", judged)
    first, *others = compare(*arguments, "--watch", "1")  # goes on
    one, two = first["protocol"]["curve"]
    assert (one["epoch"], two["epoch"]) == (1, 2)
    assert two["knn"] == pytest.approx(first["value"], abs=1e-3)
    assert one["step"] == one["told_at_step"] < two["step"]
    assert one["loss"] > 0
    assert {r["protocol"]["watched_every"] for r in (first, *others)} == {1}
    assert not any("curve" in r["protocol"] for r in others)


def test_a_run_that_was_watched_says_so_whoever_goes_on_with_it(
    compare: Compare, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("the machine went away")

    with monkeypatch.context() as patch:
        patch.setattr(Judge, "judged", broken)
        with pytest.raises(SystemExit, match="not measured"):
            compare("ours:", "--held-out", "--watch", "1")
    first, *_ = compare("ours:", "--held-out")
    assert first["protocol"]["watched_every"] == 1
    assert [point["epoch"] for point in first["protocol"]["curve"]] == [1]


def test_what_fails_at_once_stops_nobody_and_further_sizes_are_recorded(
    compare: Compare,
    program: ModuleType,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What cannot be trained does not stop the others, though they come later."""

    def one_after_the_other(work: Callable[..., None], arguments: Sequence[Any]) -> int:
        for own in arguments:
            work(*own)
        return 0

    monkeypatch.setattr(program, "in_processes", one_after_the_other)
    entries = ("huge: batch=4096", "large: batch=2048", "ours:")
    with pytest.raises(SystemExit, match="not measured"):
        compare(*entries, "--at-once", "2", "--sizes", "24")
    said = capsys.readouterr().err
    assert "huge [batch=4096] seed 0 failed: " in said
    assert "too few for a batch of 2048" in said
    records = compare("ours:")  # which is there already
    assert {r["subject"] for r in records} == {"xmoco"}
    assert {r["protocol"].get("size") for r in records} == {16, 24, None}


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


def test_a_linear_classifier_for_every_seed_asked_for(
    compare: Compare, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = LINEAR["moco"].changed(epochs=1)
    monkeypatch.setitem(LINEAR, "moco", short)
    records = compare("ours:", "--seeds", "0", "1", "--linear")
    linear = [r for r in records if r["measure"] == "linear_top1"]
    assert [r["seed"] for r in linear] == [0, 1]
    assert linear[0]["protocol"]["name"] == short.name


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("method=mocov2plus",), "not of the form"),
        ((" : batch=8",), "not of the form"),
        (("ours: seed=3",), "give --seeds instead of seed=3"),
        (("ours: train.epochs=3",), "give --epochs instead of train.epochs=3"),
        (("ours: source=x",), "give --data instead of source=x"),
        (("ours: bank=3",), "unknown key 'bank'"),
        (("a: hue=0.3 batch=8", "b: batch=8 hue=0.3"), "b .* is the same training as a "),
        (("ours:", "half: precision=bf16"), "half .* is the same training as ours "),
        (("ours:", "--results", "fast.yaml"), "could not write fast.yaml/"),
        (("ours:", "--mps"), "--mps needs --at-once"),
        (("ours:", "--watch", "1"), "test images are looked at once"),
        (("ours:", "small: short_side=32"), "has other images than ours"),
        (("ours:", "--data", "gone"), "there is no folder or archive"),
    ],
)
def test_mistakes_are_told_before_anything_is_trained(
    compare: Compare, arguments: tuple[str, ...], said: str, tmp_path: Path
) -> None:
    with pytest.raises(SystemExit, match=said):
        compare(*arguments)
    assert not [*tmp_path.glob("runs"), *tmp_path.glob("*.jsonl")]


def test_numbers_below_one_are_no_options(
    compare: Compare, capsys: pytest.CaptureFixture[str]
) -> None:
    for option in ("--watch", "--epochs", "--at-once", "--sizes"):
        with pytest.raises(SystemExit):
            compare("ours:", option, "0")
        assert "no whole number of at least 1" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        compare("ours:", "--held-out", "--share", "1")
    assert "'1' is not between 0 and 1" in capsys.readouterr().err


def test_what_cannot_be_trained_does_not_stop_the_others(
    compare: Compare, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever goes wrong, when judging too; what was trained is judged by the next call."""
    judged, calls = Judge.judged, []

    def too_large_once(*arguments: Any, **named: Any) -> Any:
        calls.append(arguments)
        if len(calls) == 1:
            raise torch.OutOfMemoryError
        return judged(*arguments, **named)

    monkeypatch.setattr(Judge, "judged", too_large_once)
    with pytest.raises(SystemExit, match="not measured"):
        compare("huge: batch=4096", "ours:", "other: batch=8")
    said = capsys.readouterr().err
    assert "huge [batch=4096] seed 0 failed: " in said
    assert "ours [] seed 0 failed: the device has too little memory for it" in said
    monkeypatch.setattr(Training, "advance", lambda *_: pytest.fail("trained again"))
    records = compare("ours:", "other: batch=8")
    assert batches(records) == {16, 8}


def test_what_diverges_is_recorded_told_and_not_trained_again(
    compare: Compare, capsys: pytest.CaptureFixture[str]
) -> None:
    entries = ("bad: learning_rate=9e15 weight_decay=1e9", "ours:")
    records = compare(*entries)
    said = capsys.readouterr().out
    assert "bad [learning_rate=9e15 weight_decay=1e9] seed 0 diverged, at step" in said
    (end,) = (r for r in records if r["measure"] == DIVERGED)
    assert (end["measure"], end["unit"]) == (DIVERGED, "step")
    assert compare(*entries) == records


def test_a_linear_classifier_that_diverges_is_no_accuracy(
    compare: Compare, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def diverging(*_: Any, **__: Any) -> Any:
        raise DivergedError("the loss is NaN", step=7)

    monkeypatch.setattr("xmoco.tables.judging.train_classifier", diverging)
    compare("ours:", "--linear")
    said = capsys.readouterr().out
    assert "ours [] seed 0 diverged, its linear classifier, at step 7" in said
    assert "7.00" not in said


def test_images_of_the_same_name_are_told_apart(compare: Compare, tmp_path: Path) -> None:
    two_splits(tmp_path / "others" / "set", each=13)
    records = compare("ours:")
    assert len(compare("ours:", "--data", "others/set")) == 2 * len(records)
    assert len(compare("ours:")) == 2 * len(records)


def test_what_another_call_works_on_is_left_to_it(
    compare: Compare, program: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    claimed: list[Any] = []
    attempt = program.attempt

    def late(wanted: Any, books: Any, *rest: Any, **named: Any) -> Any:
        """Another call takes the run just before this one."""
        if claimed:
            return attempt(wanted, books, *rest, **named)
        claimed.append(books.claimed(wanted.trial))
        with claimed[0] as run:
            assert run is not None
            return attempt(wanted, books, *rest, **named)

    monkeypatch.setattr(program, "attempt", late)
    with pytest.raises(SystemExit, match=r"or as another call does: ours \[\] seed 0"):
        compare("ours:", "other: batch=8")
    assert batches(compare("other: batch=8")) == {8}
    assert batches(compare("ours:", "other: batch=8")) == {16, 8}


def test_a_stopped_run_goes_on(
    compare: Compare, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    saved = Judge.judged

    def stopped(*_: Any, **__: Any) -> None:
        raise Interrupted(signal.SIGTERM, "after step 1 of 3", "")

    monkeypatch.setattr(Judge, "judged", stopped)
    with pytest.raises(SystemExit) as end:
        compare("ours:", "--runs", "kept")
    assert end.value.code == TRY_AGAIN
    assert len([*(tmp_path / "kept").iterdir()]) == 1
    monkeypatch.setattr(Judge, "judged", saved)
    monkeypatch.setattr(Training, "advance", lambda *_: pytest.fail("trained again"))
    assert {r["seed"] for r in compare("ours:", "--runs", "kept")} == {0}


def test_more_can_be_measured_of_what_was_trained(
    compare: Compare, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = compare("ours:")
    monkeypatch.setitem(LINEAR, "moco", LINEAR["moco"].changed(epochs=1))
    monkeypatch.setattr(Bench, "_train", lambda *_: pytest.fail("trained again"))
    (added,) = compare("ours:", "--linear")[len(before) :]
    assert added["measure"] == "linear_top1"
    assert added["protocol"]["train_seconds"] == before[0]["protocol"]["train_seconds"]


def test_what_has_records_only_is_not_trained_for_more(
    compare: Compare, capsys: pytest.CaptureFixture[str]
) -> None:
    before = compare("ours:")
    shutil.rmtree("runs")
    assert compare("ours:", "--linear") == before
    assert "ours [] seed 0 has records, but no weights in runs" in capsys.readouterr().out


def test_precisions_of_one_call_are_those_asked_for(compare: Compare, tmp_path: Path) -> None:
    records = compare("ours:", "half: precision=bf16 batch=8")
    told = {
        (r["protocol"]["settings"]["train"]["batch"], r["protocol"]["numerics"]["precision"])
        for r in records
    }
    assert told == {(16, "fp32"), (8, "bf16")}
    assert len(compare("half: batch=8 precision=bf16")) == len(records)


def test_tables_and_comparisons_share_runs_and_records(
    compare: Compare, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table: dict[str, Any] = {"title": "Shared", "about": "for tests", "recipe": "fast.yaml"}
    table |= {"epochs": 1, "seeds": [0], "columns": ["knn20", "knn200", "logistic"]}
    table["rows"] = [
        {"name": "XMoCo", "settings": "hue=0.3 brightness=0.2"},
        {"name": "MoCo v2+", "settings": "method=mocov2plus"},
    ]
    (tmp_path / "shared.yaml").write_text(yaml.safe_dump(table))
    records = compare("any name: brightness=0.2 hue=0.3", "--runs", "out/runs", "--sizes", "24")
    command = ["tables", "run", "shared.yaml", "--data", "set", "--out", "out"]
    command += ["--records", "tables.jsonl", "--records", "compare-fast.jsonl"]
    outcome = run_cli(*command)
    assert_done(outcome)
    assert "2 runs, 1 to be trained" in outcome.stdout
    own = next(
        r["value"]
        for r in records
        if r["protocol"].get("k") == 20 and r["protocol"].get("size") == 16
    )
    text = (tmp_path / "out" / "shared.md").read_text()
    assert f"| XMoCo | {own:.1f} % |" in text
    monkeypatch.setattr(Bench, "_train", lambda *_: pytest.fail("trained again"))
    both = len([*records, *(tmp_path / "tables.jsonl").read_text().splitlines()])
    assert len(compare("moco: method=mocov2plus", "--runs", "out/runs")) == both


def test_old_records_count_where_the_same_is_wanted(compare: Compare, tmp_path: Path) -> None:
    """They told the settings of a run in its last record only, and names in place of methods."""
    records = compare("ours: batch=8")
    config = load_config("fast.yaml", ["batch=8", "epochs=1"], {"source": "set"})
    whole = config.model_dump(mode="json", exclude={"run", "data", "monitor"})
    former = [r for r in records if r["measure"].endswith("_top1")]
    for record in former:
        record["subject"] = "any name"
        for fact in ("source", "settings", "train_fingerprint", "test_fingerprint", "numerics"):
            del record["protocol"][fact]
    former[-1]["protocol"]["settings"] = whole
    lines = "".join(json.dumps(record) + "\n" for record in former)
    (tmp_path / "compare-fast.jsonl").write_text(lines)
    assert compare("another: batch=8") == former
    chosen = next(r for r in former if r["measure"] == "logistic_top1")["protocol"]
    del chosen["strength_chosen_on"]  # by the images that were judged, then
    (tmp_path / "compare-fast.jsonl").write_text("".join(json.dumps(r) + "\n" for r in former))
    assert [r.measure for r in known_records(tmp_path / "compare-fast.jsonl")] == ["knn_top1"] * 2
    whole["train"]["epochs"] = 7  # not what the records are of
    (tmp_path / "compare-fast.jsonl").write_text("".join(json.dumps(r) + "\n" for r in former))
    kept = known_records(tmp_path / "compare-fast.jsonl")
    assert {record.subject for record in kept} == {"any name"}


def test_methods_have_kept_runs_and_digests_of_their_own(compare: Compare, tmp_path: Path) -> None:
    """Though both have all their settings at the defaults."""
    compare("ours:", "moco: method=mocov2plus", "--runs", "kept")
    assert len(list((tmp_path / "kept").iterdir())) == 2
    methods = [load_config("demo", [f"method={name}"]) for name in ("xmoco", "mocov2plus", "moco")]
    assert len({recipe_digest(config) for config in methods}) == 3
    assert recipe_digest(load_config("demo")) == recipe_digest(methods[0])


def test_the_penalty_is_not_chosen_by_the_images_that_are_judged(monkeypatch: Any) -> None:
    """Labels of judged images that are wrong change what is found, not the penalty."""
    torch.manual_seed(0)
    labels = torch.arange(60) % 3
    vectors = torch.randn(60, 8) + 2 * torch.nn.functional.one_hot(labels, 8)
    images = ArrayImages("noise", torch.zeros(60, 3, 2, 2, dtype=torch.uint8), labels, tuple("abc"))
    judge = Judge(build_fabric(RunConfig(device="cpu")), Images(images, images, {}))
    places = torch.arange(60)
    strengths = []

    def noted(*arguments: Any) -> Any:
        strengths.append(arguments[-1])
        return fit(*arguments)

    monkeypatch.setattr("xmoco.tables.judging.fit", noted)
    bank = Features(vectors, labels, places)
    right = judge._logistic(bank, Features(vectors, labels, places))
    wrong = judge._logistic(bank, Features(vectors, (labels + 1) % 3, places))
    assert right > 80
    assert wrong < 20
    assert strengths[0] == strengths[1]
