"""Learning rates of a table's rows: as many trials for each, by images held out of training."""

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
from xmoco.records import Record
from xmoco.tables import drawing, running, tuning
from xmoco.tables.bench import Bench
from xmoco.tables.columns import COLUMNS
from xmoco.tables.definition import Table, read_table
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
    "tuning": {"rates": [0.5, 1.0, 2.0], "epochs": 2, "share": 0.25, "by": "knn200"},
    "rows": [
        {"name": "XMoCo"},
        {"name": "MoCo", "settings": "method=mocov2plus learning_rate=0.1"},
        {"name": "old", "paper_only": True},
    ],
}
OWN = Table.model_validate(TABLE)
TRIED = Asked(data="patterns", held_out=0.25)
FINAL = Asked(data="patterns")


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
    return tuning.with_best_rates(OWN, asked, records, "patterns", 3)


def rates_of(chosen: Table) -> dict[str, float]:
    asked = Asked(data="patterns", seeds=(1,))
    return {one.row.name: one.trial.config.optim.learning_rate for one in plan(chosen, asked)}


def test_trials_are_a_table_of_every_row_and_rate() -> None:
    table, asked = tuning.trials_asked(OWN, Asked(data="patterns", overrides=("batch=32",)))
    assert asked == Asked(data="patterns", held_out=0.25, overrides=("batch=32",))
    planned = plan(table, asked)
    assert [(one.row.name, one.trial.config.optim.learning_rate) for one in planned] == [
        *(("XMoCo, rate × 0.5", 0.03), ("XMoCo, rate × 1", 0.06), ("XMoCo, rate × 2", 0.12)),
        *(("MoCo, rate × 0.5", 0.05), ("MoCo, rate × 1", 0.1), ("MoCo, rate × 2", 0.2)),
    ]
    assert {(one.trial.seed, one.trial.config.train.epochs) for one in planned} == {(1, 2)}
    assert {one.trial.facts["split"] for one in planned} == {HELD_OUT}
    assert (table.columns, table.axis) == (["knn20", "knn200", "time"], None)
    table, asked = tuning.trials_asked(OWN, Asked(data="patterns", epochs=1, rows=("MoCo",)))
    assert {one.row.name.partition(",")[0] for one in plan(table, asked)} == {"MoCo"}
    assert {one.trial.config.train.epochs for one in plan(table, asked)} == {1}


def test_the_best_rate_is_taken_and_of_equal_ones_the_rows_own() -> None:
    records = [
        *(tried(f"XMoCo, rate × {factor}", value) for factor, value in ((0.5, 60), (1, 70))),
        tried("XMoCo, rate × 2", 50),
        tried("XMoCo, rate × 2", 80, seed=2),  # not the seed of trials
        *(tried(f"MoCo, rate × {factor}", 50) for factor in (0.5, 1, 2)),
    ]
    found = by(records)
    assert {name: one.best for name, one in found.tried.items()} == {"XMoCo": 1, "MoCo": 1}
    assert rates_of(found.table) == {"XMoCo": 0.06, "MoCo": 0.1}
    assert not found.waiting
    found = by([tried("MoCo, rate × 0.5", 70), *records])
    assert rates_of(found.table) == {"XMoCo": 0.06, "MoCo": 0.05}
    assert found.table.rows[2] == OWN.rows[2]


def test_a_choice_stays_when_a_trial_is_measured_again() -> None:
    values = {0.5: 50.0, 1: 70.0, 2: 60.0}
    records = [
        tried(f"{name}, rate × {factor}", value)
        for name in ("XMoCo", "MoCo")
        for factor, value in values.items()
    ]
    again = [*records, tried("XMoCo, rate × 2", 80), diverged("XMoCo, rate × 1")]
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
        {"held_out_share": 0.2},
        {"split": "test"},
        {"column": "knn20"},
        {"seed": 2},
    ],
)
def test_records_of_something_else_choose_nothing(other: dict[str, Any]) -> None:
    factors = (0.5, 1, 2)
    found = by([tried(f"XMoCo, rate × {factor}", 90 + factor, **other) for factor in factors])
    assert found.waiting == ["XMoCo", "MoCo"]
    assert rates_of(found.table) == {"XMoCo": 0.06, "MoCo": 0.1}
    own = by([tried(f"XMoCo, rate × {factor}", 90 + factor) for factor in factors])
    assert own.waiting == ["MoCo"]
    assert rates_of(own.table) == {"XMoCo": 0.12, "MoCo": 0.1}


def test_a_row_waits_for_all_of_its_trials() -> None:
    found = by([tried("XMoCo, rate × 2", 60), diverged("XMoCo, rate × 0.5")])
    assert found.waiting == ["XMoCo", "MoCo"]
    assert not found.all_diverged
    assert rates_of(found.table) == {"XMoCo": 0.06, "MoCo": 0.1}


def test_what_diverged_is_tried_but_not_chosen() -> None:
    records = [
        *(tried("XMoCo, rate × 0.5", 60), diverged("XMoCo, rate × 1"), diverged("XMoCo, rate × 2")),
        *(diverged(f"MoCo, rate × {factor}") for factor in (0.5, 1, 2)),
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
        *(Asked(overrides=(rate,)) for rate in ("learning_rate=1", "optim.learning_rate = 1")),
    ],
)
def test_trials_themselves_and_a_given_rate_are_not_tuned(asked: Asked) -> None:
    assert not tuning.is_tuned(OWN, asked)
    found = by([tried("XMoCo, rate × 2", 60)], asked)
    assert found.table == OWN
    assert not found.waiting
    assert tuning.is_tuned(OWN, Asked(data="patterns", overrides=("batch=32",)))


def test_a_drawn_table_has_the_rows_with_their_best_rates_and_says_so() -> None:
    trials = [tried(f"XMoCo, rate × {f}", 50 + f) for f in (0.5, 1, 2)]
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
        "Learning rates are the best of 3 for every row (its own × 0.5, 1, 2), by kNN (k = 200) on "
        "a held-out 25 % of the training images after 2 epochs: × 2 for all."
    ) in told
    shown = fill(tuning.trial_table(OWN, 3), records, Group("patterns", 2, HELD_OUT, 0.25))
    assert [bool(line.cells) for line in shown.lines] == [True] * 3 + [False] * 3
    assert "earning rates are" not in " ".join(notes(shown))


def test_rows_that_diverged_are_named_below_the_table() -> None:
    group = Group("patterns", 2, HELD_OUT, 0.25)
    filled = fill(tuning.trial_table(OWN, 3), [diverged("MoCo, rate × 2")], group)
    assert not any(line.cells for line in filled.lines)
    assert "Training diverged: MoCo, rate × 2, seed 1, at step 7." in notes(filled)


def test_how_rates_were_chosen_is_told_by_rows() -> None:
    rates = OWN.tuning
    assert rates is not None
    tried = {
        "a": tuning.Tried({0.5: 1, 1: 3, 2: 2}, [], []),
        "b": tuning.Tried({0.5: 1, 1: 2, 2: 3}, [], []),
        "c": tuning.Tried({0.5: 1, 1: 2}, [2], []),
        "d": tuning.Tried({0.5: 1}, [], [1, 2]),
        "e": tuning.Tried({}, [0.5, 1, 2], []),
    }
    assert tuning.choice_told(rates, tried, ["a", "b", "c", "d"], epochs=9).endswith(
        " after 2 epochs: × 2 for b; × 1 for all others. "
        "The lowest or highest was the best for: b. Rates that diverged in trials: c × 2. "
        "With their own learning rates, as trials are missing: d. "
        "Not trained, as all of their trials diverged: e. With --row and learning_rate=… they are, "
        "without trials."
    )
    told = tuning.choice_told(rates, tried, ["b", "e"], epochs=9)  # e was trained before
    assert "With their own learning rates, as all trials diverged: e." in told
    assert "Not trained" not in told
    assert "after 1 epoch: × 2 for all." in tuning.choice_told(rates, tried, ["b"], epochs=1)
    del tried["e"]
    assert tuning.choice_told(rates, tried, ["d"], epochs=9) == (
        "With their own learning rates, as trials are missing: d."
    )
    assert tuning.choice_told(rates, tried, [], epochs=9) == ""


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"rates": [1.0]}, "at least 2 items"),
        ({"rates": [1.0, 1.0000001]}, "a rate is given twice"),
        ({"rates": [1.0, 0.0]}, "greater than 0"),
        ({"rates": [1.0, 2.0], "share": 1.0}, "less than 1"),
        ({"rates": [1.0, 2.0], "by": "knn2"}, "unknown column 'knn2'"),
        ({"rates": [1.0, 2.0], "by": "time"}, "time is no accuracy"),
        ({"rates": [1.0, 2.0], "by": "logistic"}, "logistic, by which rates are to be chosen"),
    ],
)
def test_what_cannot_be_tuned_is_told(wrong: dict[str, Any], said: str, tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(TABLE | {"tuning": {"epochs": 2} | wrong}))
    assert_refused(run_cli("tables", "run", str(tmp_path / "own.yaml")), said)


# From images to the table


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with images, a quick recipe and a table of two rates."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(drawing, "picture", lambda _: Figure((1, 1)))
    images = two_splits(tmp_path / "gratings")
    write_recipe(tmp_path / "fast.yaml", images, train={"batch": 16, "log_every": 1, "epochs": 1})
    write_table(rates=[1.0, 4.0])
    return tmp_path


def write_table(rates: list[float]) -> None:
    own = {"recipe": "fast.yaml", "settings": "", "epochs": 1, "seeds": [0], "columns": ["knn20"]}
    own |= {"tuning": {"rates": rates, "epochs": 1, "by": "knn20"}, "rows": TABLE["rows"]}
    Path("own.yaml").write_text(yaml.safe_dump(TABLE | own))


def run(*arguments: str) -> Outcome:
    return run_cli("tables", "run", "own.yaml", "--out", "out", *arguments)


def knn() -> list[dict[str, Any]]:
    lines = Path("out/records.jsonl").read_text().splitlines()
    return [r for r in map(json.loads, lines) if r["measure"] == "knn_top1"]


def test_rates_are_tried_first_and_the_best_is_trained(here: Path) -> None:
    outcome = run()
    assert_done(outcome)
    assert "Two methods: learning rates: 4 runs, 4 to be trained" in outcome.stdout
    assert "2 runs, 0 to be trained, 2 when their learning rates are chosen" in outcome.stdout
    # Row by row, so that a table that ends early has some of them whole.
    assert [r["protocol"]["split"] for r in knn()] == [HELD_OUT, HELD_OUT, "test"] * 2
    trials = [r for r in knn() if r["protocol"]["split"] == HELD_OUT]
    for final in (r for r in knn() if r["protocol"]["split"] == "test"):
        own = [r for r in trials if r["subject"] == final["subject"]]
        assert len(own) == 2
        best = max(own, key=lambda r: r["value"])  # of equal ones the first, the row's own
        assert final["protocol"]["settings"]["optim"] == best["protocol"]["settings"]["optim"]
    for name, endings in (("own", {".md", ".csv", ".png"}), ("own-rates", {".md", ".csv"})):
        assert {file.suffix for file in Path("out").glob(f"{name}.*")} == endings
    assert "Learning rates are the best of 2 for every row" in Path("out/own.md").read_text()
    before = Path("out/records.jsonl").read_bytes()
    again = run()
    assert_done(again)
    assert "4 runs, 0 to be trained" in again.stdout
    assert Path("out/records.jsonl").read_bytes() == before


def test_a_rate_that_diverges_is_tried_and_told(here: Path) -> None:
    write_table(rates=[1.0, 1e16])
    outcome = run("--row", "XMoCo")
    assert_done(outcome)
    assert "XMoCo, rate × 1e+16, seed 0 diverged at step" in outcome.stdout
    trial, final = knn()
    assert [r["protocol"]["split"] for r in (trial, final)] == [HELD_OUT, "test"]
    assert final["protocol"]["settings"]["optim"] == trial["protocol"]["settings"]["optim"]
    text = Path("out/own.md").read_text()
    assert "× 1 for all." in text
    assert "Rates that diverged in trials: XMoCo × 1e+16." in text
    assert "Training diverged: XMoCo, rate × 1e+16, seed 0" in Path("out/own-rates.md").read_text()
    before = Path("out/records.jsonl").read_bytes()
    assert_done(run("--row", "XMoCo"))
    assert Path("out/records.jsonl").read_bytes() == before


def test_a_row_whose_trials_all_diverge_is_not_trained(here: Path) -> None:
    write_table(rates=[1e15, 1e16])
    outcome = run("--row", "XMoCo")
    told = "Not trained, as all of their trials diverged: XMoCo."
    assert_refused(outcome, told)
    assert knn() == []
    assert told in Path("out/own.md").read_text()


def test_a_row_with_a_trial_that_failed_waits(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Bench.attempt

    def broken(bench: Bench, trial: Trial, *rest: Any, **more: Any) -> list[Record]:
        if trial.config.optim.learning_rate > 0.2:
            raise torch.OutOfMemoryError
        return whole(bench, trial, *rest, **more)

    monkeypatch.setattr(Bench, "attempt", broken)
    outcome = run()
    assert_refused(outcome, "2 of 4 runs failed and are gaps in the table (XMoCo, rate × 4, seed 0")
    assert "2 runs, 0 to be trained, 2 when their learning rates are chosen" in outcome.stdout
    assert [r["protocol"]["split"] for r in knn()] == [HELD_OUT, HELD_OUT]


def test_a_dry_run_tells_what_is_still_to_be_chosen(here: Path) -> None:
    outcome = run("--dry-run")
    assert_done(outcome)
    assert "missing:\n  XMoCo, rate × 1, seed 0\n" in outcome.stdout
    assert "2 runs, 0 to be trained, 2 when their learning rates are chosen" in outcome.stdout


def test_on_held_out_images_the_rows_are_as_they_are(here: Path) -> None:
    outcome = run("--held-out", "--dry-run")
    assert_done(outcome)
    assert "Two methods: 2 runs, 2 to be trained" in outcome.stdout
    assert "learning rates" not in outcome.stdout
    assert not Path("out/own-rates.md").exists()


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
    assert "learning rates: 2 runs, 0 to be trained" in outcome.stdout
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
    assert len(planned) == len(table.trained) * len(table.tuning.rates)
    identities = [one.trial.identity for one in planned]
    assert all(identities.count(identity) == 1 for identity in identities)
