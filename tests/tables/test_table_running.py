"""``xmoco tables run``: what is missing is run once, whatever happens meanwhile."""

import json
import multiprocessing
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from matplotlib.figure import Figure
from safetensors.torch import load_file

from helpers import (
    Outcome,
    assert_done,
    assert_refused,
    make_images,
    run_cli,
    two_splits,
    write_recipe,
)
from xmoco.errors import TRY_AGAIN
from xmoco.evaluate.classify import LINEAR
from xmoco.tables import attempts, bench, drawing, judging, running
from xmoco.tables.definition import read_table
from xmoco.tables.images import Images
from xmoco.tables.plan import Asked, plan
from xmoco.tables.trials import DIVERGED
from xmoco.train.bad_steps import DivergedError
from xmoco.train.callback import Callback
from xmoco.train.loop import Training
from xmoco.train.run_folder import RunFolder

TABLE: dict[str, Any] = {
    "title": "Two rows",
    "about": "for tests",
    "recipe": "fast.yaml",
    "epochs": 1,
    "seeds": [0],
    "columns": ["knn20", "logistic", "bank_memory", "gpu_memory"],
    "axis": "ξ",
    "paper": "ImageNet, ResNet-50",
    "paper_columns": [{"heading": "kNN", "beside": "knn20"}],
    "rows": [
        {"name": "0.5", "settings": "positive_mass=0.5", "paper": [42.5]},
        {"name": "0.9", "settings": "positive_mass=0.9", "paper": [51.4]},
    ],
}


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return two_splits(tmp_path_factory.mktemp("data") / "gratings")


@pytest.fixture(autouse=True)
def here(images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with images, a quick recipe and a table; pictures are left out."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(drawing, "picture", lambda _: Figure((1, 1)))
    write_recipe(tmp_path / "fast.yaml", images, train={"batch": 16, "log_every": 1, "epochs": 1})
    write_table()
    return tmp_path


def write_table(name: str = "two.yaml", **changes: Any) -> None:
    Path(name).write_text(yaml.safe_dump(TABLE | changes))


def run(*arguments: str, name: str = "two.yaml") -> Outcome:
    return run_cli("tables", "run", name, "--out", "out", *arguments)


def records() -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path("out/records.jsonl").read_text().splitlines()]


def figures(found: list[dict[str, Any]]) -> dict[str, float]:
    """By measure; without the training time, which no two runs have in common."""
    return {r["measure"]: r["value"] for r in found if r["measure"] != "train_seconds"}


def trained() -> set[tuple[float, int]]:
    """ξ and seed of all runs that have records."""
    methods = [(r["protocol"]["settings"]["method"], r["seed"]) for r in records()]
    return {(method.get("positive_mass", 0.9), seed) for method, seed in methods}


def cells(name: str = "two") -> dict[str, list[str]]:
    """The lines of the table as it was drawn, by their first cell."""
    lines = Path(f"out/{name}.md").read_text().splitlines()
    rows = [[cell.strip() for cell in line[1:-1].split("|")] for line in lines if line[:1] == "|"]
    return {row[0]: row[1:] for row in rows}


def folders() -> dict[str, Path]:
    """Run folders by row, of seed 0."""
    planned = plan(read_table("two.yaml"), Asked(seeds=(0,)))
    own = Images.open(planned[0].trial.config.data, None).fingerprints
    return {one.row.name: Path("out/runs") / attempts.run_name(one.trial, own) for one in planned}


def test_what_is_missing_is_run_and_drawn_and_nothing_twice() -> None:
    outcome = run()
    assert_done(outcome)
    assert "2 runs, 2 to be trained" in outcome.stdout
    before = Path("out/records.jsonl").read_bytes()
    assert trained() == {(0.5, 0), (0.9, 0)}
    heading, first = cells()["ξ"], cells()["0.5"]
    assert heading == [
        "kNN (k = 20)",
        "logistic regression",
        "banks and history",
        "seeds",
        "paper: kNN",
    ]
    knn = next(r for r in records() if r["measure"] == "knn_top1")
    assert first[0] == f"{knn['value']:.1f} %"
    assert first[3:] == ["one", "42.5 %"]
    assert "All figures are from one seed" in Path("out/two.md").read_text()
    memory = next(r for r in records() if r["measure"] == "bank_memory")
    assert memory["value"] == 4 * 64 * 16 * 4 / 2**20  # banks and past queries, of either side
    facts = knn["protocol"]
    assert (facts["data"], facts["split"], facts["k"]) == ("folder gratings (train)", "test", 20)
    assert (facts["train_images"], facts["judged_images"], facts["size"]) == (48, 48, 16)
    assert (facts["recipe"], facts["changes"]) == ("fast", "positive_mass=0.5")
    assert knn["versions"]
    assert knn["machine"]
    for folder in folders().values():
        assert not (folder / "checkpoints").exists()
        assert load_file(folder / "backbone.safetensors")
        assert (folder / "metrics.jsonl").read_text()

    again = run()
    assert "2 runs, 0 to be trained" in again.stdout
    assert Path("out/records.jsonl").read_bytes() == before

    assert_done(run("--seeds", "0,1", "--row", "0.9"))  # other rows are drawn as they are
    assert trained() == {(0.5, 0), (0.9, 0), (0.9, 1)}
    values = [
        r["value"]
        for r in records()
        if r["measure"] == "knn_top1" and "0.9" in r["protocol"]["changes"]
    ]
    mean, deviation = sum(values) / 2, abs(values[0] - values[1]) / 2**0.5
    assert cells()["0.9"][0] == f"{mean:.1f} ± {deviation:.1f} %"
    assert (cells()["0.9"][3], cells()["0.5"][3]) == ("2", "one")


def test_records_that_cannot_be_written_are_told_before_the_training() -> None:
    assert_refused(run("--records", "fast.yaml/records.jsonl"), "could not write fast.yaml/")
    assert not Path("out/runs").exists()


def test_tables_share_the_runs_they_have_in_common() -> None:
    assert_done(run("--row", "0.9"))
    rows = [{"name": "default", "settings": "bank_length=64"}, {"name": "2", "settings": "batch=8"}]
    write_table("other.yaml", rows=rows, axis=None)
    outcome = run("--dry-run", name="other.yaml")
    assert "2 runs, 1 to be trained\nmissing:\n  2, seed 0\n" in outcome.stdout
    assert cells("other")["default"][0] == cells()["0.9"][0]
    assert cells("other")["2"][0] == "–"
    shown = ["knn20", "parameters", "time"]  # which the first table does not show
    write_table("told.yaml", rows=rows, axis=None, columns=shown)
    outcome = run("--dry-run", name="told.yaml")
    assert "2 runs, 1 to be trained\nmissing:\n  2, seed 0\n" in outcome.stdout
    assert "2 runs, 2 to be" in run("--dry-run", "--epochs", "2").stdout
    assert "2 runs, 2 to be" in run("--dry-run", "--held-out").stdout
    assert "2 runs, 2 to be" in run("--dry-run", "hue=0.3").stdout


def test_an_interrupted_run_goes_on_where_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ("--epochs", "2", "--row", "0.9")

    def weights() -> dict[str, torch.Tensor]:
        (path,) = Path("out").rglob("*.safetensors")
        return load_file(path)

    assert_done(run(*arguments))
    whole, whole_weights = figures(records()), weights()
    Path("out").rename("whole")

    def stopping(_: Any, step: int) -> None:
        if step == 4:
            signal.raise_signal(signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(running._Shown, "on_step", stopping)
        outcome = run(*arguments)
    assert outcome.status == TRY_AGAIN
    assert "stopped by SIGTERM after step 4 of 6; everything is saved" in outcome.stderr
    assert "Resume with: xmoco tables run two.yaml --out out --epochs 2" in outcome.stderr
    assert records() == []
    steps: list[int] = []
    with monkeypatch.context() as patch:
        patch.setattr(running._Shown, "on_step", lambda _, step: steps.append(step))
        assert_done(run(*arguments))
    assert steps == [5, 6]
    assert figures(records()) == whole
    assert all(torch.equal(tensor, whole_weights[name]) for name, tensor in weights().items())


def test_what_fails_is_a_gap_and_the_rest_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        {"name": "diverges", "settings": "learning_rate=9e15 weight_decay=1e9"},
        {"name": "too large", "settings": "batch=512", "paper": [50.0]},
        {"name": "breaks", "settings": "hue=0.3"},
        {"name": "large", "settings": "hue=0.4"},
        {"name": "good"},
    ]
    write_table(rows=rows)
    knn = judging.knn_accuracy
    fails: list[Exception] = [RuntimeError("a kernel fell over\nin C"), torch.OutOfMemoryError()]

    def failing(*arguments: Any, **named: Any) -> Any:
        if fails:
            raise fails.pop(0)
        return knn(*arguments, **named)

    monkeypatch.setattr(judging, "knn_accuracy", failing)
    outcome = run()
    assert_refused(
        outcome,
        "3 of 5 runs failed and are gaps in the table",
        "too large, seed 0: folder gratings (train) has 48 images, too few for a batch of 512",
        "breaks, seed 0: a kernel fell over (all about it is in",
        "large, seed 0: the device has too little memory for it",
        "The same command tries them again.",
        "Gaps in the table, as training diverged: diverges, seed 0, at step",
    )
    log = next(path for path in Path("out").rglob("train.log") if "fell over" in path.read_text())
    assert "Traceback" in log.read_text()
    assert "table    out/two.md" in outcome.stdout
    assert cells()["too large"] == [*"–––", "–", "50.0 %"]
    assert cells()["good"][3] == "one"
    text = Path("out/two.md").read_text()
    assert "- large, seed 0 failed: the device has too little memory for it.\n" in text
    assert "Training diverged: diverges, seed 0, at step" in text
    (end,) = (r for r in records() if r["measure"] == DIVERGED)
    assert end["protocol"]["changes"] == "learning_rate=9e15 weight_decay=1e9"
    assert end["unit"] == "step"

    outcome = run()  # those two were bad luck
    assert "5 runs, 3 to be trained" in outcome.stdout
    assert_refused(outcome, "1 of 5 runs failed", "as training diverged: diverges, seed 0")
    assert cells()["breaks"][3] == "one"


def test_what_diverged_is_tried_again_in_another_way_only() -> None:
    write_table(rows=[{"name": "bad", "settings": "learning_rate=9e15"}, {"name": "good"}])
    assert_refused(run(), "as training diverged: bad, seed 0, at step", "skip_bad_steps=true")
    before = Path("out/records.jsonl").read_bytes()
    assert_refused(run("--row", "bad"), "bad, seed 0, at step")
    assert_done(run("--row", "good"))  # the other is not asked for
    assert Path("out/records.jsonl").read_bytes() == before
    assert "Training diverged: bad, seed 0" in Path("out/two.md").read_text()
    assert_done(run("--row", "bad", "--dry-run"))  # which does no more than tell
    assert_refused(run("--row", "bad", "precision=fp32"), "bad, seed 0, at step")  # as before
    assert Path("out/records.jsonl").read_bytes() == before


def test_a_row_measured_after_all_is_no_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    write_table(rows=[{"name": "bad", "settings": "hue=0.3"}, {"name": "good"}], columns=["knn20"])
    trained = bench.Bench._train

    def diverging(self: bench.Bench, training: Training, *rest: Any) -> Any:
        if training.run.path.name in bad and not training.plan.skip_bad_steps:
            raise DivergedError("the loss is NaN", step=2)
        return trained(self, training, *rest)

    bad = [folders()["bad"].name]
    monkeypatch.setattr(bench.Bench, "_train", diverging)
    assert_refused(run(), "as training diverged: bad, seed 0, at step 2")
    outcome = run("--row", "bad", "skip_bad_steps=true")
    assert_done(outcome)
    assert "1 run, 1 to be trained" in outcome.stdout
    assert len([*Path("out/runs").iterdir()]) == 3, "each has a folder of its own"
    assert_done(run())
    assert cells()["bad"][1] == "one"
    text = Path("out/two.md").read_text()
    assert "diverged" not in text
    assert "Trained with skip_bad_steps=true: bad." in text


def test_features_that_are_no_numbers_are_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """kNN would make an accuracy of them: that of chance, or of one class."""
    trained = bench.Bench._train

    def broken(self: bench.Bench, training: Training, *rest: Any) -> Any:
        found = trained(self, training, *rest)
        norm = next(m for m in training.task.modules() if isinstance(m, torch.nn.BatchNorm2d))
        assert norm.running_var is not None
        norm.running_var.fill_(torch.nan)
        return found

    monkeypatch.setattr(bench.Bench, "_train", broken)
    write_table(columns=["knn20"])
    assert_refused(run("--row", "0.9"), "as training diverged: 0.9, seed 0, at step 3")
    assert [(r["measure"], r["value"]) for r in records()] == [(DIVERGED, 3)]


def test_images_that_are_shrunk_are_other_images() -> None:
    for split in ("train", "val"):
        make_images(Path("photos", split), each=12, side=48)
    arguments = ("--row", "0.9", "--data", "photos")
    assert_done(run(*arguments))
    assert "0 to be trained" in run(*arguments, "preload_gib=0").stdout
    assert "1 run, 1 to be trained" in run(*arguments, "short_side=32").stdout
    first, second = (r["value"] for r in records() if r["measure"] == "logistic_top1")
    assert first != second


def test_precisions_that_differ_are_told() -> None:
    write_table(columns=["knn20"])
    assert_done(run("--row", "0.5", "precision=bf16"))
    assert_done(run())
    assert (
        "Trained in different precisions, so that times do not compare. bf16: 0.5; fp32: 0.9."
    ) in Path("out/two.md").read_text()


def test_what_was_trained_can_be_measured_further(monkeypatch: pytest.MonkeyPatch) -> None:
    """By its weights, which stay when its records are there."""
    write_table(columns=["knn20"])
    assert_done(run("--row", "0.9"))
    before = records()
    monkeypatch.setattr(bench.Bench, "_train", lambda *_: pytest.fail("trained again"))
    write_table(columns=["knn20", "logistic", "bank_memory"])
    monkeypatch.setattr(bench, "commit", lambda: "another")
    outcome = run("--row", "0.9")
    assert_done(outcome)
    added = records()[len(before) :]
    assert not any("trained_by" in r["protocol"] for r in before)
    assert f"trained before, by commit {before[0]['commit']} on" in Path("out/two.md").read_text()
    assert {r["protocol"]["trained_by"]["commit"] for r in added} == {before[0]["commit"]}
    assert [r["measure"] for r in added] == ["logistic_top1"]  # and nothing else
    assert cells()["0.9"][1].endswith(" %")


def test_images_of_the_same_name_are_not_taken_for_these() -> None:
    two_splits(Path("others") / "gratings", each=13)
    assert_done(run("--row", "0.9"))
    assert "48 training" in Path("out/two.md").read_text()
    outcome = run("--row", "0.9", "--data", "others/gratings")
    assert_done(outcome)
    assert "1 run, 1 to be trained" in outcome.stdout
    assert "52 training" in Path("out/two.md").read_text()
    assert "0 to be trained" in run("--row", "0.9", "--data", "others/gratings").stdout
    assert "0 to be trained" in run("--row", "0.9").stdout
    assert "48 training" in Path("out/two.md").read_text()


@pytest.mark.parametrize("changed", ["labels", "test images"])
def test_images_are_told_apart_by_labels_and_by_test_images(changed: str) -> None:
    first, others = two_splits(Path("one") / "set"), two_splits(Path("other") / "set")
    if changed == "labels":
        for split in ("train", "val"):
            (others / split / "class3").rename(others / split / "class4")
    else:
        for image in sorted((others / "val").rglob("*.*"))[::2]:
            image.unlink()
    assert_done(run("--row", "0.9", "--data", str(first)))
    assert "1 run, 1 to be trained" in run("--row", "0.9", "--data", str(others)).stdout
    assert "0 to be trained" in run("--row", "0.9", "--data", str(first)).stdout


def test_an_interrupted_run_is_not_in_the_way_of_others_images(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Which have the same name."""
    two_splits(Path("others") / "gratings", each=13)

    def stopping(_: Any, step: int) -> None:
        if step == 2:
            signal.raise_signal(signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(running._Shown, "on_step", stopping)
        assert run("--row", "0.9").status == TRY_AGAIN
    assert_done(run("--row", "0.9", "--data", "others/gratings"))
    outcome = run("--row", "0.9")
    assert_done(outcome)
    assert [r["protocol"]["train_images"] for r in records() if r["measure"] == "knn_top1"] == [
        52,
        48,
    ]


def test_a_table_is_drawn_without_its_images() -> None:
    assert_done(run("--row", "0.9"))
    outcome = run("--row", "0.9", "--dry-run", "--data", "gone/gratings")
    assert_done(outcome)
    assert "1 run, 0 to be trained" in outcome.stdout
    assert "Nothing could be trained now: there is no folder or archive" in outcome.stdout
    assert_refused(run("--row", "0.9", "--data", "gone/gratings"), "there is no folder or archive")


def test_half_finished_records_are_made_whole() -> None:
    assert_done(run())
    file, before = Path("out/records.jsonl"), records()
    lines = file.read_text().splitlines(keepends=True)
    whole = len(lines) // 2 + 1
    # Of the last run only one record got as far as the disk, and half of another.
    file.write_text("".join(lines[:whole]) + lines[whole][:50])
    outcome = run()
    assert_done(outcome)
    assert "2 runs, 1 to be trained" in outcome.stdout
    again = records()
    assert [r["value"] for r in again[:whole]] == [r["value"] for r in before[:whole]]
    assert figures(again[whole - 1 :]) == figures(before[whole - 1 :])
    assert cells()["0.9"][3] == "one"  # what was measured twice counts once


def test_other_circumstances_have_files_of_their_own() -> None:
    """Or the table that is asked for next would replace the one that took hours."""
    assert_done(run("--row", "0.9"))
    before = Path("out/two.md").read_bytes()
    for arguments, name in (
        (["--epochs", "2"], "two-2ep"),
        (["--held-out"], "two-held-out-20"),
        (["hue=0.3"], "two-hue_0.3"),
    ):
        assert_done(run("--row", "0.9", *arguments))
        assert Path(f"out/{name}.md").exists()
    assert_done(run("--dry-run", "--epochs", "1", "device=cpu"))  # which is the table's own
    assert_done(run("--dry-run", "--data", "gone"))  # of which nothing is known
    assert Path("out/two.md").read_bytes() == before
    assert_done(run("--dry-run", "--epochs", "3"))
    assert not Path("out/two-3ep.md").exists()


def test_rows_are_trained_in_the_precision_they_ask_for() -> None:
    rows = [{"name": "a", "settings": "hue=0.3 precision=bf16"}, {"name": "b"}]
    write_table(rows=rows, columns=["knn20"])
    fabrics: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        prepare = bench.prepare_training

        def noted(config: Any, fabric: Any, *rest: Any, **named: Any) -> Any:
            fabrics.append(str(fabric._precision.precision))
            return prepare(config, fabric, *rest, **named)

        patch.setattr(bench, "prepare_training", noted)
        assert_done(run())
    assert fabrics == ["bf16-mixed", "32-true"]


def test_rows_that_are_the_same_training_are_refused() -> None:
    write_table(rows=[{"name": "a", "settings": "batch=16"}, {"name": "b"}])
    said = "row b is the same training as row a"
    assert_refused(run(), said)
    write_table()
    assert_refused(run("positive_mass=0.7"), "row 0.9 is the same training as row 0.5")
    assert not Path("out").exists()
    assert_done(run("positive_mass=0.7", "--row", "0.9"))


def test_epochs_are_timed_without_the_first_of_a_session(monkeypatch: pytest.MonkeyPatch) -> None:
    """In which kernels are compiled: the first run of a table would be the slowest."""
    # The second epoch takes 1 s, the third 2 s; what is evaluated after each takes 5.
    clock = iter([105.0, 106.0, 111.0, 113.0, 118.0])
    course = bench.Course()
    noted = bench._Noted(Callback(), course, lambda: 2)
    with monkeypatch.context() as patch:
        patch.setattr(bench.time, "perf_counter", lambda: next(clock))
        for epoch in (1, 2, 3):
            noted.on_epoch(epoch, step=3 * epoch)
    assert course == bench.Course([1.0, 2.0], runs_at_once=2)
    assert course.told() == {"epoch_seconds": 1.5, "runs_at_once": 2}
    assert bench.steady_seconds({"train_seconds": 60.0, "course": {"epoch_seconds": 2}}, 10) == 20
    assert bench.steady_seconds({"train_seconds": 60.0}, 10) == 60
    write_table(columns=["time"], paper_columns=[], rows=[{"name": "0.9"}])
    assert_done(run("--epochs", "3"))
    (record,) = (r for r in records() if r["measure"] == "train_seconds")
    facts = record["protocol"]
    assert record["value"] == pytest.approx(3 * facts["epoch_seconds"])
    assert 0 < record["value"] < 3 * facts["train_seconds"]


def test_damaged_records_are_named_and_left_alone() -> None:
    assert_done(run("--row", "0.9"))
    file = Path("out/records.jsonl")
    damaged = "not json\n" + file.read_text()
    file.write_text(damaged)
    assert_refused(run(), "out/records.jsonl, line 1 is not json")
    assert file.read_text() == damaged


def test_what_another_process_works_on_is_left_to_it() -> None:
    folder = folders()["0.9"]
    busy = RunFolder.create(folder, "{}")
    busy.lock()
    outcome = run()
    assert_done(outcome)
    assert "in work by another process: 0.9, seed 0." in outcome.stdout
    assert trained() == {(0.5, 0)}
    assert cells()["0.9"][0] == "–"
    busy.unlock()
    assert_done(run())
    assert trained() == {(0.5, 0), (0.9, 0)}


def test_a_run_that_its_process_left_is_a_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several processes one may be killed: the first tells of what is missing then."""
    monkeypatch.setattr(running, "_on_devices", lambda *_: {})
    assert_refused(run("--devices", "2"), "2 of 2 runs failed", "did not finish it")
    assert cells()["0.5"][0] == "–"


def test_two_processes_share_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "PROCESSES", multiprocessing.get_context("forkserver"))
    assert_done(run("--devices", "2", "--seeds", "0,1"))
    assert trained() == {(xi, seed) for xi in (0.5, 0.9) for seed in (0, 1)}
    assert [r["measure"] for r in records()].count("knn_top1") == 4  # none was run twice


def test_places_of_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert [running._Place.of(i, 2, "cuda").cuda_devices for i in range(2)] == ["0", "1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,7")
    assert [running._Place.of(i, 2, "cuda").cuda_devices for i in range(2)] == ["3", "7"]
    threads = max(1, torch.get_num_threads() // 2)
    assert running._Place.of(1, 2, "cpu") == (None, threads)


def test_held_out_images_are_judged_and_test_images_not_read(images: Path) -> None:
    data = Path("set")
    for label in range(4):
        (data / "val" / f"class{label}").mkdir(parents=True)
        (data / "val" / f"class{label}" / "1.png").write_bytes(b"no image")
    (data / "train").symlink_to(images / "train")
    assert_done(run("--data", "set", "--held-out", "--share", "0.25", "--row", "0.9"))
    facts = records()[0]["protocol"]
    assert facts["split"] == "validation, held out of the training images"
    assert (facts["held_out_share"], facts["train_images"], facts["judged_images"]) == (
        0.25,
        36,
        12,
    )
    text = Path("out/two-held-out-25.md").read_text()
    assert "evaluated on a held-out 25 % of the training images" in text


def test_a_linear_classifier_is_a_column(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LINEAR, "moco", LINEAR["moco"].changed(epochs=1))
    write_table(columns=["linear", "parameters", "time"], paper_columns=[], rows=[{"name": "0.9"}])
    assert_done(run("--row", "0.9"))
    found = {r["measure"]: r for r in records()}
    assert found["linear_top1"]["protocol"]["name"] == LINEAR["moco"].name
    tensors = load_file(folders()["0.9"] / "backbone.safetensors")
    parameters = sum(
        t.numel()
        for name, t in tensors.items()
        if not name.split(".")[-1].startswith(("running", "num"))
    )
    assert found["backbone_parameters"]["value"] == parameters / 1e6
    assert found["train_seconds"]["value"] > 0
    assert not [*folders()["0.9"].glob("linear-*")]


def test_a_linear_classifier_that_diverges_costs_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def diverging(*_: Any, **__: Any) -> Any:
        raise DivergedError("the loss is NaN", step=7)

    monkeypatch.setitem(LINEAR, "moco", LINEAR["moco"].changed(epochs=1))
    write_table(columns=["linear", "knn20"], paper_columns=[], rows=[{"name": "0.9"}])
    told = "0.9, seed 0, its linear classifier, at step 7"
    with monkeypatch.context() as patch:
        patch.setattr(judging, "train_classifier", diverging)
        assert_refused(run(), f"Gaps in the table, as training diverged: {told}.")
    before = records()
    assert {"knn_top1", "train_seconds"} <= {r["measure"] for r in before}
    assert cells()["0.9"][0].endswith(" %")
    assert f"Training diverged: {told}." in Path("out/two.md").read_text()
    for arguments in ((), ("skip_bad_steps=true",)):  # which is for the method
        outcome = run(*arguments)
        assert "1 run, 0 to be trained" in outcome.stdout
        assert_refused(outcome, f"Gaps in the table, as training diverged: {told}.\n")
        assert records() == before


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["xii"], ["unknown table 'xii' (did you mean xi?)", "or give a .yaml file"]),
        (["two.yaml", "--seeds", "0;1"], ["--seeds 0;1 are not whole numbers"]),
        (["two.yaml", "--seeds", "-1"], ["not whole numbers"]),
        (["two.yaml", "--devices", "0"], ["--devices 0 is too few"]),
        (["two.yaml", "--share", "1.5"], ["--share 1.5 is not between 0 and 1"]),
        (["two.yaml", "--row", "0.8"], ["there is no row '0.8'"]),
        (["two.yaml", "--epochs", "0"], ["row 0.5: train.epochs = 0"]),
        (["two.yaml", "epochs=2"], ["epochs=2: give --epochs instead"]),
        (["two.yaml", "train.seed=2"], ["train.seed=2: give --seeds instead"]),
        (["two.yaml", "epocs=1"], ["unknown key 'epocs' (did you mean epochs?)"]),
        (["two.yaml", "--data", "gone"], ["there is no folder or archive"]),
        (["none.yaml"], ["all rows are the paper's alone: there is nothing to train"]),
        (["two.yaml", "--data", "alone"], ["has no test images", "--held-out"]),
    ],
)
def test_mistakes_are_told_before_anything_is_trained(
    arguments: list[str], words: list[str], images: Path
) -> None:
    Path("alone").symlink_to(images / "train")
    write_table("none.yaml", rows=[{"name": "0.5", "paper": [42.5], "paper_only": True}])
    assert_refused(run_cli("tables", "run", *arguments, "--out", "out"), *words)
    assert not Path("out").exists()


def test_records_may_lie_elsewhere() -> None:
    assert_done(run("--row", "0.9", "--records", "kept.jsonl"))
    assert not Path("out/records.jsonl").exists()
    assert "2 runs, 1 to be" in run("--dry-run", "--records", "kept.jsonl").stdout


def test_others_may_append_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trial whose records came while this process waited for its folder is not run."""
    assert_done(run("--row", "0.9"))
    kept = Path("out/records.jsonl").read_text()
    Path("out/records.jsonl").unlink()
    claimed = attempts.Books.claimed

    def late(*arguments: Any) -> Any:
        Path("out/records.jsonl").write_text(kept)
        return claimed(*arguments)

    monkeypatch.setattr(attempts.Books, "claimed", late)
    monkeypatch.setattr(bench.Bench, "measure", lambda *_, **__: pytest.fail("trained again"))
    assert_done(run("--row", "0.9"))


@pytest.mark.gpu
def test_a_table_on_a_gpu_measures_its_memory() -> None:
    write_recipe(Path("fast.yaml"), "patterns", run={"device": "cuda"}, train={"batch": 64})
    outcome = run("log_every=50")
    assert_done(outcome)
    images = torch.empty(2**31, dtype=torch.uint8, device="cuda")  # take no part
    assert_done(run("log_every=50", "--seeds", "1", "--row", "0.9"))
    del images
    memory = [r["value"] for r in records() if r["measure"] == "gpu_memory"]
    assert len(memory) == 3
    assert 0 < memory[0] < 2
    assert memory[1] == pytest.approx(memory[0], rel=0.1)  # what the first took was freed
    assert memory[2] == pytest.approx(memory[0], rel=0.1)
