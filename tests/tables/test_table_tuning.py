"""Settings of a table's rows: as many trials for each, by images held out of training."""

import json
import multiprocessing
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from matplotlib.figure import Figure

from helpers import Outcome, assert_done, assert_refused, run_cli, two_splits, write_recipe
from xmoco.data.subset import HELD_OUT
from xmoco.errors import UserError
from xmoco.records import Record
from xmoco.tables import drawing, running, tuning
from xmoco.tables.bench import Bench
from xmoco.tables.columns import COLUMNS
from xmoco.tables.definition import Changes, Table, Tuning, read_table
from xmoco.tables.drawing import notes
from xmoco.tables.filling import Group, fill, fill_all
from xmoco.tables.plan import Asked, plan
from xmoco.tables.trials import DIVERGED, Kept, Trial

TABLE: dict[str, Any] = {
    "title": "Two methods",
    "about": "for tests",
    "recipe": "demo",
    "settings": "learning_rate=0.06",
    "epochs": 3,
    "seeds": [1, 2],
    "columns": ["knn20", "knn200", "time"],
    "tuning": {
        "tries": [{"rate": 0.5}, {"rate": 2.0}],
        "number": 3,
        "epochs": 2,
        "share": 0.25,
        "by": "knn200",
    },
    "rows": [
        {"name": "XMoCo"},
        {"name": "MoCo", "settings": "method=mocov2plus learning_rate=0.1"},
        {"name": "old", "paper_only": True},
    ],
}
OWN = Table.model_validate(TABLE)
TRIED = Asked(data="patterns", held_out=0.25)
FINAL = Asked(data="patterns")
SLOWER, USUAL, FASTER = TRIES = (Changes(rate=0.5), Changes(), Changes(rate=2.0))


def tried(name: str, value: float, seed: int = 1, column: str = "knn200", **facts: Any) -> Kept:
    """The record of a trial, of which facts may be others."""
    asked = Asked(data="patterns", held_out=0.25, rows=(name,), seeds=(seed,))
    (one,) = plan(tuning.trial_table(OWN, OWN.epochs), asked)
    shown = COLUMNS[column]
    return Kept(
        measure=shown.measure,
        value=value,
        unit="%",
        subject=one.trial.subject,
        work=one.trial.work,
        protocol={**one.trial.facts, "k": shown.k, "data": "patterns (train)", "size": 32}
        | {"train_images": 60, "judged_images": 15}
        | facts,
        seed=seed,
        machine={"processor": "Abacus", "threads": 2},
        versions={"torch": "2.11.0"},
        time="2026-01-02T03:04:05Z",
    )


def diverged(name: str) -> Kept:
    """The record of a trial that ended so."""
    return tried(name, 7, k=None).model_copy(update={"measure": DIVERGED, "unit": "step"})


def by(records: list[Kept], asked: Asked = FINAL) -> tuning.Tuned:
    return tuning.with_best_settings(OWN, asked, records, "patterns", 3)


def rates_of(chosen: Table) -> dict[str, float]:
    asked = Asked(data="patterns", seeds=(1,))
    return {one.row.name: one.trial.config.optim.learning_rate for one in plan(chosen, asked)}


def test_trials_are_a_table_of_every_row_and_rate() -> None:
    table, asked = tuning.trials_asked(OWN, Asked(data="patterns", overrides=("hue=0.3",)))
    assert asked == Asked(data="patterns", held_out=0.25, overrides=("hue=0.3",))
    planned = plan(table, asked)
    assert [(one.row.name, one.trial.config.optim.learning_rate) for one in planned] == [
        *(("XMoCo, own settings", 0.06), ("XMoCo, rate × 0.5", 0.03), ("XMoCo, rate × 2", 0.12)),
        *(("MoCo, own settings", 0.1), ("MoCo, rate × 0.5", 0.05), ("MoCo, rate × 2", 0.2)),
    ]
    assert {(one.trial.seed, one.trial.config.train.epochs) for one in planned} == {(1, 2)}
    assert {one.trial.facts["split"] for one in planned} == {HELD_OUT}
    assert (table.columns, table.axis) == (["knn20", "knn200", "time"], None)
    table, asked = tuning.trials_asked(OWN, Asked(data="patterns", epochs=1, rows=("MoCo",)))
    assert {one.row.name.partition(",")[0] for one in plan(table, asked)} == {"MoCo"}
    assert {one.trial.config.train.epochs for one in plan(table, asked)} == {1}


def test_the_best_rate_is_taken_and_of_equal_ones_the_rows_own() -> None:
    records = [
        *(tried("XMoCo, rate × 0.5", 60), tried("XMoCo, own settings", 70)),
        tried("XMoCo, rate × 2", 50),
        tried("XMoCo, rate × 2", 80, seed=2),  # not the seed of trials
        *(tried(f"MoCo, {one}", 50) for one in TRIES),
    ]
    found = by(records)
    assert {name: one.best for name, one in found.tried.items()} == {"XMoCo": USUAL, "MoCo": USUAL}
    assert rates_of(found.table) == {"XMoCo": 0.06, "MoCo": 0.1}
    assert not found.waiting
    found = by([tried("MoCo, rate × 0.5", 70), *records])
    assert rates_of(found.table) == {"XMoCo": 0.06, "MoCo": 0.05}
    assert found.table.rows[2] == OWN.rows[2]


def test_a_choice_stays_when_a_trial_is_measured_again() -> None:
    values = {SLOWER: 50.0, USUAL: 70.0, FASTER: 60.0}
    records = [
        tried(f"{name}, {one}", value)
        for name in ("XMoCo", "MoCo")
        for one, value in values.items()
    ]
    again = [*records, tried("XMoCo, rate × 2", 80), diverged("XMoCo, own settings")]
    assert by(again) == by(records)
    # Nor when what diverged is trained with bad steps left out.
    records[2] = diverged("XMoCo, rate × 2")
    assert by([*records, tried("XMoCo, rate × 2", 80)]) == by(records)
    assert rates_of(by(records).table)["XMoCo"] == 0.06


@pytest.mark.parametrize(
    "other",
    [
        {"source": "others"},
        {"epochs": 1},
        {"size": 48},
        {"held_out_share": 0.2},
        {"split": "test"},
        {"column": "knn20"},
        {"seed": 2},
    ],
)
def test_records_of_something_else_choose_nothing(other: dict[str, Any]) -> None:
    found = by([tried(f"XMoCo, {one}", 90 + one.rate, **other) for one in TRIES])
    assert found.waiting == ["XMoCo", "MoCo"]
    assert rates_of(found.table) == {"XMoCo": 0.06, "MoCo": 0.1}
    own = by([tried(f"XMoCo, {one}", 90 + one.rate) for one in TRIES])
    assert own.waiting == ["MoCo"]
    assert rates_of(own.table) == {"XMoCo": 0.12, "MoCo": 0.1}


def test_a_row_waits_for_all_of_its_trials() -> None:
    found = by([tried("XMoCo, rate × 2", 60), diverged("XMoCo, rate × 0.5")])
    assert found.waiting == ["XMoCo", "MoCo"]
    assert not found.all_diverged
    assert rates_of(found.table) == {"XMoCo": 0.06, "MoCo": 0.1}


def test_what_diverged_is_tried_but_not_chosen() -> None:
    records = [
        *(
            tried("XMoCo, rate × 0.5", 60),
            diverged("XMoCo, own settings"),
            diverged("XMoCo, rate × 2"),
        ),
        *(diverged(f"MoCo, {one}") for one in TRIES),
    ]
    found = by(records)
    assert not found.waiting
    assert found.all_diverged == ["MoCo"]
    assert rates_of(found.table) == {"XMoCo": 0.03, "MoCo": 0.1}
    assert not by(records, TRIED).all_diverged


@pytest.mark.parametrize(
    "asked",
    [
        TRIED,
        *(Asked(overrides=(given,)) for given in ("learning_rate=1", "optim.learning_rate = 1")),
        Asked(overrides=("train.batch=32",)),
    ],
)
def test_trials_themselves_and_what_is_given_are_not_tuned(asked: Asked) -> None:
    assert not tuning.is_tuned(OWN, asked)
    found = by([tried("XMoCo, rate × 2", 60)], asked)
    assert found.table == OWN
    assert not found.waiting
    assert tuning.is_tuned(OWN, Asked(data="patterns", overrides=("hue=0.3",)))


def test_a_drawn_table_has_the_rows_with_their_best_rates_and_says_so() -> None:
    trials = [tried(f"XMoCo, {one}", 50 + one.rate) for one in TRIES]
    (one,) = plan(by(trials).table, Asked(data="patterns", rows=("XMoCo",), seeds=(1,)))
    final = tried("XMoCo, rate × 2", 77, **one.trial.facts)
    final.protocol.pop("held_out_share")
    group = Group("patterns", 3, "test", None)
    records = [*trials, final]
    # On held-out images the rows are as they are, which is one of the trials.
    held_out, filled = fill_all(OWN, records)
    assert held_out.group == Group("patterns", 2, HELD_OUT, 0.25)
    assert held_out.lines[0].cells[COLUMNS["knn200"]].mean == 51
    assert filled.group == group
    assert filled.lines[0].cells[COLUMNS["knn200"]].mean == 77
    told = " ".join(notes(filled.measured_only()))
    assert (
        "Batch and learning rate are the best of 3 tries for every row, its own among them, by kNN "
        "(k = 200) on a held-out 25 % of the training images after 2 epochs: rate × 2 for all."
    ) in told
    shown = fill(tuning.trial_table(OWN, 3), records, Group("patterns", 2, HELD_OUT, 0.25))
    assert [bool(line.cells) for line in shown.lines] == [True] * 3 + [False] * 3
    assert "learning rate are" not in " ".join(notes(shown))


def test_rows_that_diverged_are_named_below_the_table() -> None:
    group = Group("patterns", 2, HELD_OUT, 0.25)
    filled = fill(tuning.trial_table(OWN, 3), [diverged("MoCo, rate × 2")], group)
    assert not any(line.cells for line in filled.lines)
    assert "Training diverged: MoCo, rate × 2, seed 1, at step 7." in notes(filled)


def test_how_settings_were_chosen_is_told_by_rows() -> None:
    how = OWN.tuning
    assert how is not None
    tried = {
        "a": tuning.Tried({SLOWER: 1, USUAL: 3, FASTER: 2}, [], []),
        "b": tuning.Tried({SLOWER: 1, USUAL: 2, FASTER: 3}, [], []),
        "c": tuning.Tried({SLOWER: 1, USUAL: 2}, [FASTER], []),
        "d": tuning.Tried({SLOWER: 1}, [], [USUAL, FASTER]),
        "e": tuning.Tried({}, [*TRIES], []),
    }
    assert tuning.choice_told(how, tried, ["a", "b", "c", "d"], epochs=9).endswith(
        " after 2 epochs: rate × 2 for b; own settings for all others. "
        "Diverged in trials: c, rate × 2. "
        "With their own settings, as trials are missing: d. "
        "Not trained, as all of their trials diverged: e. With --row and learning_rate=… they are, "
        "without trials."
    )
    told = tuning.choice_told(how, tried, ["b", "e"], epochs=9)  # e was trained before
    assert "With their own settings, as all trials diverged: e." in told
    assert "Not trained" not in told
    assert "after 1 epoch: rate × 2 for all." in tuning.choice_told(how, tried, ["b"], epochs=1)
    del tried["e"]
    assert tuning.choice_told(how, tried, ["d"], epochs=9) == (
        "With their own settings, as trials are missing: d."
    )
    assert tuning.choice_told(how, tried, [], epochs=9) == ""


def test_every_row_has_as_many_tries_whatever_its_own_batch() -> None:
    """Where the batch to be tried is its own, another try takes the place."""
    tries = [{"batch": 128}, {"batch": 128, "rate": 2.0}, {"rate": 2.0}, {"rate": 0.5}]
    how = Tuning.model_validate({"tries": tries, "number": 3, "epochs": 1})
    assert [*map(str, how.of(256))] == ["own settings", "batch 128", "batch 128, rate × 2"]
    assert [*map(str, how.of(128))] == ["own settings", "rate × 2", "rate × 0.5"]
    more = how.model_copy(update={"number": 4})
    with pytest.raises(UserError, match="only 3 different tries for a row with a batch of 128"):
        more.of(128)
    rows = [{"name": "large", "settings": "batch=256"}, {"name": "own", "settings": "batch=128"}]
    table = Table.model_validate(TABLE | {"tuning": how.model_dump(), "rows": rows})
    planned = plan(*tuning.trials_asked(table, Asked(data="patterns")))
    settings = [
        (one.trial.config.train.batch, one.trial.config.optim.learning_rate) for one in planned
    ]
    assert settings == [
        (256, 0.06),
        (128, 0.06),
        (128, 0.12),
        (128, 0.06),
        (128, 0.12),
        (128, 0.03),
    ]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"number": 1}, "greater than or equal to 2"),
        ({"tries": [{"rate": 1.0}]}, "only 1 different tries for a row with a batch of 64"),
        ({"tries": [{"rate": 0.0}]}, "greater than 0"),
        ({"tries": [{"rates": 2.0}]}, "unknown key tuning.tries.0.rates"),
        ({"share": 1.0}, "less than 1"),
        ({"by": "knn2"}, "unknown column 'knn2'"),
        ({"by": "time"}, "time is no accuracy"),
        ({"by": "logistic"}, "logistic, by which settings are to be chosen"),
    ],
)
def test_what_cannot_be_tuned_is_told(wrong: dict[str, Any], said: str, tmp_path: Path) -> None:
    usual = {"tries": [{"rate": 2.0}], "number": 2, "epochs": 2}
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(TABLE | {"tuning": usual | wrong}))
    assert_refused(run_cli("tables", "run", str(tmp_path / "own.yaml")), said)


# From images to the table


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with images, a quick recipe and a table of two rates."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(drawing, "picture", lambda _: Figure((1, 1)))
    images = two_splits(tmp_path / "gratings")
    write_recipe(tmp_path / "fast.yaml", images, train={"batch": 16, "log_every": 1, "epochs": 1})
    write_table()
    return tmp_path


def write_table(rate: float = 4.0, settings: str = "") -> None:
    tuned = {"tries": [{"rate": rate}], "number": 2, "epochs": 1, "by": "knn20"}
    own = {
        "recipe": "fast.yaml",
        "settings": settings,
        "epochs": 1,
        "seeds": [0],
        "columns": ["knn20"],
    }
    own |= {"tuning": tuned, "rows": TABLE["rows"]}
    Path("own.yaml").write_text(yaml.safe_dump(TABLE | own))


def run(*arguments: str) -> Outcome:
    return run_cli("tables", "run", "own.yaml", "--out", "out", *arguments)


def knn() -> list[dict[str, Any]]:
    lines = Path("out/records.jsonl").read_text().splitlines()
    return [r for r in map(json.loads, lines) if r["measure"] == "knn_top1"]


def test_rates_are_tried_first_and_the_best_is_trained(here: Path) -> None:
    outcome = run()
    assert_done(outcome)
    assert "Two methods: trials: 4 runs, 4 to be trained" in outcome.stdout
    assert "2 runs, 0 to be trained, 2 when their settings are chosen" in outcome.stdout
    # Row by row, so that a table that ends early has some of them whole.
    assert [r["protocol"]["split"] for r in knn()] == [HELD_OUT, HELD_OUT, "test"] * 2
    trials = [r for r in knn() if r["protocol"]["split"] == HELD_OUT]
    for final in (r for r in knn() if r["protocol"]["split"] == "test"):
        own = [r for r in trials if r["subject"] == final["subject"]]
        assert len(own) == 2
        best = max(own, key=lambda r: r["value"])  # of equal ones the first, the row's own
        assert final["protocol"]["settings"]["optim"] == best["protocol"]["settings"]["optim"]
    for name, endings in (("own", {".md", ".csv", ".png"}), ("own-trials", {".md", ".csv"})):
        assert {file.suffix for file in Path("out").glob(f"{name}.*")} == endings
    assert "learning rate are the best of 2 tries for every row" in Path("out/own.md").read_text()
    before = Path("out/records.jsonl").read_bytes()
    again = run()
    assert_done(again)
    assert "4 runs, 0 to be trained" in again.stdout
    assert Path("out/records.jsonl").read_bytes() == before


def test_a_rate_that_diverges_is_tried_and_told(here: Path) -> None:
    write_table(rate=1e16)
    outcome = run("--row", "XMoCo")
    assert_done(outcome)
    assert "XMoCo, rate × 1e+16, seed 0 diverged at step" in outcome.stdout
    trial, final = knn()
    assert [r["protocol"]["split"] for r in (trial, final)] == [HELD_OUT, "test"]
    assert final["protocol"]["settings"]["optim"] == trial["protocol"]["settings"]["optim"]
    text = Path("out/own.md").read_text()
    assert "own settings for all." in text
    assert "Diverged in trials: XMoCo, rate × 1e+16." in text
    assert "Training diverged: XMoCo, rate × 1e+16, seed 0" in Path("out/own-trials.md").read_text()
    before = Path("out/records.jsonl").read_bytes()
    assert_done(run("--row", "XMoCo"))
    assert Path("out/records.jsonl").read_bytes() == before


def test_a_row_whose_trials_all_diverge_is_not_trained(here: Path) -> None:
    write_table(rate=10.0, settings="learning_rate=9e14")
    outcome = run("--row", "XMoCo")
    told = "Not trained, as all of their trials diverged: XMoCo."
    assert_refused(outcome, told)
    assert knn() == []
    assert told in Path("out/own.md").read_text()


def test_a_row_with_a_trial_that_failed_waits(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Bench.measure

    def broken(bench: Bench, trial: Trial, *rest: Any, **more: Any) -> list[Record]:
        if trial.config.optim.learning_rate > 0.2:
            raise torch.OutOfMemoryError
        return whole(bench, trial, *rest, **more)

    monkeypatch.setattr(Bench, "measure", broken)
    outcome = run()
    assert_refused(outcome, "2 of 4 runs failed and are gaps in the table (XMoCo, rate × 4, seed 0")
    assert "2 runs, 0 to be trained, 2 when their settings are chosen" in outcome.stdout
    assert [r["protocol"]["split"] for r in knn()] == [HELD_OUT, HELD_OUT]


def test_a_dry_run_tells_what_is_still_to_be_chosen(here: Path) -> None:
    outcome = run("--dry-run")
    assert_done(outcome)
    assert "missing:\n  XMoCo, own settings, seed 0\n" in outcome.stdout
    assert "2 runs, 0 to be trained, 2 when their settings are chosen" in outcome.stdout


def test_on_held_out_images_the_rows_are_as_they_are(here: Path) -> None:
    outcome = run("--held-out", "--dry-run")
    assert_done(outcome)
    assert "Two methods: 2 runs, 2 to be trained" in outcome.stdout
    assert "trials" not in outcome.stdout
    assert not Path("out/own-trials.md").exists()


def test_a_trial_of_a_rows_own_rate_is_the_run_on_held_out_images(here: Path) -> None:
    assert_done(run("--row", "XMoCo"))
    before = Path("out/records.jsonl").read_bytes()
    again = run("--row", "XMoCo", "--held-out")
    assert_done(again)
    assert "1 run, 0 to be trained" in again.stdout
    assert Path("out/records.jsonl").read_bytes() == before


def test_seeds_are_those_of_the_table_not_of_its_trials(here: Path) -> None:
    assert_done(run("--row", "XMoCo"))
    outcome = run("--row", "XMoCo", "--seeds", "3")
    assert_done(outcome)
    assert "trials: 2 runs, 0 to be trained" in outcome.stdout
    assert [(r["seed"], r["protocol"]["split"]) for r in knn()[2:]] == [(0, "test"), (3, "test")]


def test_two_processes_try_and_train(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "PROCESSES", multiprocessing.get_context("forkserver"))
    outcome = run("--devices", "2")
    assert_done(outcome)
    assert "in work by another" not in outcome.stdout
    assert sorted(r["protocol"]["split"] for r in knn()) == ["test"] * 2 + [HELD_OUT] * 4


def test_images_to_judge_by_are_missed_before_any_trial(here: Path) -> None:
    Path("alone").symlink_to(here / "gratings" / "train")
    assert_refused(run("--data", "alone"), "has no test images", "--held-out")
    assert not Path("out").exists()


def test_the_main_table_gives_every_row_trials_of_its_own() -> None:
    table = read_table("main")
    assert table.tuning is not None
    trials = tuning.trial_table(table, table.epochs)
    planned = plan(trials, Asked(data="patterns"))
    assert len(planned) == len(table.trained) * table.tuning.number
    identities = [one.trial.identity for one in planned]
    assert all(identities.count(identity) == 1 for identity in identities)
