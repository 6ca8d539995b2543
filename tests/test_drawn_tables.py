"""Tables of README.md and docs/: what records become."""

import importlib
import json
import math
import re
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xmoco.data.subset import HELD_OUT
from xmoco.errors import UserError
from xmoco.evaluate.classify import FINETUNE, LINEAR
from xmoco.evaluate.grid import GRIDS
from xmoco.records import Measured, Record, append_records
from xmoco.settings import load_config, recipe_names
from xmoco.tables.definition import read_table
from xmoco.tables.plan import Asked, plan
from xmoco.tables.trials import DIVERGED, PART, recipe_digest
from xmoco.tables.tuning import trials_asked

NAMES = (
    *(
        "accuracy",
        "chance",
        "cluster",
        "common",
        "comparisons",
        "effort",
        "faults",
        "front",
        "gaps",
        "gpu_tests",
        "plain",
    ),
    *("recipes", "speed"),
)


@pytest.fixture(scope="module")
def pages(benchmarks: None) -> Any:
    """The modules that draw them."""
    return SimpleNamespace(**{name: importlib.import_module(f"pages.{name}") for name in NAMES})


@pytest.fixture
def place(pages: Any, tmp_path: Path) -> Any:
    """Records in a temporary folder, shown on a page in the root."""
    return pages.common.Place(tmp_path)


def rows_of(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("|")]


# Learning


def knn(subject: str, value: float, epoch: int, **protocol: Any) -> Record:
    settings = {"data": "folder pets (train)", "split": "test", "size": 64, "k": 20}
    sizes = {"temperature": 0.1, "bank_images": 3000, "judged_images": 1000, "epoch": epoch}
    return Record(
        "knn_top1",
        value,
        "%",
        subject,
        "pets-resnet18-2ep",
        settings | sizes | protocol,
        seed=7,
        commit="0123456789ab",
        versions={"torch": "2.11.0"},
        machine={"processor": "Abacus", "threads": 2},
        time="2026-01-02T03:04:05Z",
    )


def learning(pages: Any, place: Any, *records: Record) -> str:
    file = place.results / "recipe-pets.jsonl"
    file.unlink(missing_ok=True)
    append_records(file, records)
    return str(pages.accuracy.learning_tables(place, "recipe-*.jsonl"))


def test_a_training_judged_by_other_sizes_than_its_baselines_names_them(
    pages: Any, place: Any
) -> None:
    text = learning(
        pages, place, knn("raw pixels", 10.04, 0, size=32), knn("xmoco", 44.44, 2, size=48)
    )
    assert rows_of(text)[2:] == [
        "| raw pixels, 32 px | 10.0 % |",
        "| XMoCo, 2 epochs, 48 px | 44.4 % |",
    ]


def test_tables_hold_the_last_records_and_their_protocol(pages: Any, place: Any) -> None:
    text = learning(
        pages,
        place,
        knn("raw pixels", 10.04, 0),
        knn("xmoco", 33.3, 1, run_seconds=61.6),
        knn("xmoco", 11.1, 2, run_seconds=99.9),
        knn("xmoco", 44.44, 2, run_seconds=61.6),  # measured again
    )
    assert rows_of(text)[2:] == [
        "| raw pixels | 10.0 % |",
        "| XMoCo, 1 epoch | 33.3 % |",
        "| XMoCo, 2 epochs | 44.4 % |",
    ]
    for fact in (
        "Training time: XMoCo 62 s.",
        "One seed (7);",
        "folder pets;",
        "1,000 test images, kNN among 3,000 training images",
        "k = 20, temperature 0.1",
        "Abacus, 2 threads",
        "torch 2.11.0",
        "commit 0123456789ab",
        "2026-01-02.",
        "(recipe-pets.jsonl)",
    ):
        assert fact in text, fact


def test_of_a_long_training_the_quarters_are_shown(pages: Any, place: Any) -> None:
    records = [knn("untrained", 1.0, 0)]
    records += [knn("xmoco", epoch / 10, epoch) for epoch in range(7, 205, 7)]
    records += [knn("mocov2plus", 7.7, 50)]  # not finished yet
    rows = [row.split("|")[1].strip() for row in rows_of(learning(pages, place, *records))[2:]]
    assert rows == [
        "untrained backbone",
        *(f"XMoCo, {epochs} epochs" for epochs in (49, 98, 147, 203)),
        "MoCo v2+, 50 epochs",
    ]


def test_the_time_of_a_run_tells_how_often_knn_was_in_it(pages: Any, place: Any) -> None:
    for every, words in ((1, "every epoch."), (50, "every 50 epochs.")):
        settings = f"monitor:\n  knn_every: {every}\n"
        text = learning(pages, place, knn("xmoco", 44, 2, run_seconds=61.6, settings=settings))
        assert f"XMoCo 62 s, including kNN {words}" in text


def test_methods_are_compared_if_they_were_measured(pages: Any, place: Any) -> None:
    assert pages.accuracy.methods_table(place) == ""
    values = {"byol": (17, 80), "swav": (16, 95)}, {"swav": (15, 90)}  # once more
    for measured in values:
        for method, (before, after) in measured.items():
            pair = [knn("untrained", before, 0), knn(method, after, 6)]
            append_records(place.results / "methods.jsonl", pair)
    text = pages.accuracy.methods_table(place)
    assert rows_of(text) == [
        "| method | kNN top-1, 6 epochs |",
        "| --- | ---: |",
        "| SwAV | 90.0 % |",
        "| BYOL | 80.0 % |",
    ]
    assert "Untrained: 15.0 % or 17.0 %." in text
    append_records(
        place.results / "methods.jsonl", [knn("untrained", 15, 0), knn("jcl", 60, epoch=7)]
    )
    assert rows_of(pages.accuracy.methods_table(place))[-2:] == [
        "| BYOL, 6 epochs | 80.0 % |",
        "| JCL, 7 epochs | 60.0 % |",
    ]


def test_a_record_that_a_table_cannot_show_is_named(pages: Any, place: Any) -> None:
    with pytest.raises(UserError, match=r"recipe-pets\.jsonl, line 2: protocol\.k = '20' must be"):
        learning(pages, place, knn("xmoco", 1, 1), knn("xmoco", 1, 1, k="20"))


# Protocols


def protocol_record(
    measure: str, value: float, subject: str, work: str = "pets-resnet18", **protocol: Any
) -> Record:
    """As ``Evaluation.record`` makes them."""
    epoch = {"xmoco": 200, "supervised": 40, "untrained": 0}[subject]
    shared = {"data": "archive pets.tar (train)", "backbone": "resnet18", "size": 32}
    shared |= {"epoch": epoch, "split": "test", "judged_images": 1500}
    if measure == "knn_top1":
        shared |= {"temperature": 0.1, "bank_images": 6000}
    if measure.startswith("linear"):
        shared |= {"label_fraction": 1.0}
    return Record(measure, value, "%", subject, work, shared | protocol, seed=0)


def judged(subject: str, value: float) -> list[Record]:
    """What benchmarks/protocols.py appends for a backbone, in its order."""
    birds: dict[str, Any] = {"work": "birds-resnet18", "set": "birds", "judged_images": 99}
    birds |= {"data": "folder birds (train), 80 % kept", "metric": "mean per class"}
    knn = [protocol_record("knn_top1", value + k / 100, subject, k=k) for k in (10, 20, 100, 200)]
    frozen = protocol_record("transfer_frozen", value, subject, name="transfer, frozen", **birds)
    tuned = [
        protocol_record(
            f"finetune_top{k}", value + k, subject, **asdict(FINETUNE), label_fraction=fraction
        )
        for fraction in (0.01, 0.1, 1.0)
        for k in (1, 5)
    ]
    grid = GRIDS["small"]
    name = grid.protocol(grid.points[0]).name
    end_to_end = protocol_record("transfer_end_to_end", value, subject, name=name, **birds)
    linear = [
        protocol_record(f"linear_top{k}", value + k, subject, **asdict(LINEAR[preset]))
        for preset in ("paper", "moco")
        for k in (1, 5)
    ]
    return [*knn, frozen, *tuned, end_to_end, *linear]


def test_protocols_are_rows_and_backbones_columns(pages: Any, place: Any) -> None:
    file = place.results / "protocols-pets-resnet18.jsonl"
    append_records(file, judged("untrained", 10))
    append_records(file, judged("supervised", 50.04)[:4])
    append_records(file, judged("xmoco", 30))
    append_records(file, judged("xmoco", 40))  # measured again
    text = pages.accuracy.protocols_tables(place)
    heading, _, *rows = rows_of(text)
    assert (
        heading == "| protocol | XMoCo, 200 epochs | supervised, 40 epochs | untrained backbone |"
    )
    assert rows == [
        "| kNN (k = 20) | 40.2 % | 50.2 % | 10.2 % |",
        "| kNN (k = 200) | 42.0 % | 52.0 % | 12.0 % |",
        "| linear (paper) | 41.0 % | – | 11.0 % |",
        "| linear (MoCo) | 41.0 % | – | 11.0 % |",
        "| fine-tune, 1 % of the labels | 41.0 % | – | 11.0 % |",
        "| fine-tune, 10 % of the labels | 41.0 % | – | 11.0 % |",
        "| fine-tune, 100 % of the labels | 41.0 % | – | 11.0 % |",
        "| transfer to birds, frozen, mean per class | 40.0 % | – | 10.0 % |",
        "| transfer to birds, end to end (small grid), mean per class | 40.0 % | – | 10.0 % |",
    ]
    assert "archive pets.tar, 1,500 test images / folder birds, 99 test images;" in text
    assert "images of 32 px" in text
    assert pages.plain.other_tables(place) == ""


def test_images_of_several_sizes_have_columns_of_their_own(pages: Any, place: Any) -> None:
    file = place.results / "protocols-pets-resnet18.jsonl"
    moco = {"name": "linear (MoCo)", "size": 48, "crop_size": 32}
    large = protocol_record("linear_top1", 50, "xmoco", **moco)
    small = protocol_record("linear_top1", 45, "xmoco", **moco | {"size": 32})
    neighbours = protocol_record("knn_top1", 30, "xmoco", k=200, size=48)
    append_records(file, [large, small, neighbours])
    append_records(file, [*judged("xmoco", 40)[:4], *judged("untrained", 10)[:4]])
    text = pages.accuracy.protocols_tables(place)
    heading, _, *rows = rows_of(text)
    assert heading == (
        "| protocol | XMoCo, 200 epochs, 32 px | XMoCo, 200 epochs, 48 px "
        "| untrained backbone, 32 px |"
    )
    assert rows == [
        "| kNN (k = 20) | 40.2 % | – | 10.2 % |",
        "| kNN (k = 200) | 42.0 % | 30.0 % | 12.0 % |",
        "| linear (MoCo) | 45.0 % | 50.0 % | – |",
    ]
    assert "images of 48 px / images of 32 px; crops of 32 px;" in text


def test_crops_of_several_sizes_have_rows_of_their_own(pages: Any, place: Any) -> None:
    file = place.results / "protocols-pets-resnet18.jsonl"
    for value, crops in ((40, 32), (50, 48)):
        facts = {"name": "linear (MoCo)", "size": 48, "crop_size": crops}
        append_records(file, [protocol_record("linear_top1", value, "xmoco", **facts)])
    assert rows_of(pages.accuracy.protocols_tables(place))[2:] == [
        "| linear (MoCo), crops of 32 px | 40.0 % |",
        "| linear (MoCo), crops of 48 px | 50.0 % |",
    ]


def test_different_weights_of_one_name_have_columns_of_their_own(pages: Any, place: Any) -> None:
    file = place.results / "protocols-pets-resnet18.jsonl"
    for value, digest in ((40, "aaaaaaaaaaaa"), (50, "bbbbbbbbbbbb")):
        record = protocol_record("knn_top1", value, "xmoco", k=200, digest=digest)
        append_records(file, [record])
    append_records(file, [protocol_record("knn_top1", 10, "untrained", k=200)])
    heading, _, row = rows_of(pages.accuracy.protocols_tables(place))
    names = "XMoCo, 200 epochs (aaaaaa) | XMoCo, 200 epochs (bbbbbb) | untrained backbone"
    assert heading == f"| protocol | {names} |"
    assert row == "| kNN (k = 200) | 40.0 % | 50.0 % | 10.0 % |"


def test_of_changed_recipes_shared_protocols_are_shown(pages: Any, place: Any) -> None:
    file = place.results / "changed-recipes.jsonl"
    append_records(file, [knn("untrained", 5, 0, changes="batch=1")])
    for changes, value in (("batch=1", 10), ("batch=2", 20)):
        append_records(file, [knn("xmoco", value, 2, changes=changes)])
    append_records(file, [protocol_record("knn_top1", 30, "xmoco", k=200, changes="batch=1")])
    assert rows_of(pages.accuracy.changed_recipes_table(place)) == [
        "| changes | kNN (k = 20) |",
        "| --- | ---: |",
        "| `batch=1` | 10.0 % |",
        "| `batch=2` | 20.0 % |",
    ]


def test_sizes_of_images_are_rows_and_the_best_are_bold(pages: Any, place: Any) -> None:
    assert pages.accuracy.eval_size_table(place) == ""
    file = place.results / "eval-size.jsonl"
    for digest, values in (("ca49508e0cac", (70, 75, 74)), ("ffffffffffff", (80, 80.04, 60))):
        for size, value in zip((40, 32, 48), values, strict=True):
            facts = {"data": "pets", "split": "validation", "backbone": "resnet18", "epoch": 9}
            facts |= {"trained_size": 32, "size": size, "digest": digest, "knn_k": 200}
            append_records(file, [Record("knn_top1", value, "%", "xmoco", "sizes", facts, 0)])
    assert rows_of(pages.accuracy.eval_size_table(place)) == [
        "| evaluated at | kNN (k = 200), rate 0.06 | kNN (k = 200), weights ffffff |",
        "| ---: | ---: | ---: |",
        "| 32 px | **75.0 %** | **80.0 %** |",
        "| 40 px | 70.0 % | **80.0 %** |",
        "| 48 px | 74.0 % | 60.0 % |",
    ]


def test_the_weights_that_sizes_were_tried_with_are_those_of_the_trials(pages: Any) -> None:
    """Their names say so; records only have digests."""
    results = pages.common.ROOT / "benchmarks" / "results"
    for digest, name in pages.accuracy.WEIGHTS.items():
        values = {}
        for file in ("eval-size", "tuning"):
            for line in (results / f"{file}.jsonl").read_text("utf-8").splitlines():
                record = json.loads(line)
                facts = record["protocol"]
                own = facts.get("digest", "").startswith(digest) and facts["size"] == 32
                rate = re.search(r"learning_rate=(\S+)", facts.get("changes", ""))
                trial = facts.get("epochs") == 200 and f"rate {rate[1] if rate else 0.12}" == name
                if record["measure"] == "knn_top1" and (own or trial):
                    values[file] = record["value"]
        assert len(values) == 2
        assert values["eval-size"] == pytest.approx(values["tuning"]), name


def test_trials_are_ranked_without_what_all_have_in_common(pages: Any, place: Any) -> None:
    file = place.results / "tuning.jsonl"
    for changes, value in (("batch=1 hue=0.1", 70), ("batch=1", 72), ("batch=1 size=9", 71)):
        facts = {"recipe": "ab", "data": "pets", "split": "held out", "epochs": 9, "knn_k": 200}
        facts |= {"changes": changes}
        for measure, more in (("knn_top1", 0), ("logistic_top1", 5)):
            found = Record(measure, value + more, "%", "xmoco", "tuning", facts, 0)
            append_records(file, [found])
    text = pages.accuracy.tuning_tables(place)
    assert text.startswith("**9 epochs; recipe ab; pets**\n\n")
    assert rows_of(text) == [
        "| overrides | kNN (k = 200) | logistic regression |",
        "| --- | ---: | ---: |",
        "| – | 72.0 % | 77.0 % |",
        "| `size=9` | 71.0 % | 76.0 % |",
        "| `hue=0.1` | 70.0 % | 75.0 % |",
    ]
    assert "All have `batch=1`. All trials are of XMoCo. One seed (0); held out;" in text


def test_recipes_as_they_are_have_no_overrides(pages: Any) -> None:
    told, own = pages.common.common_overrides(["none", "batch=1"])
    assert (told, own) == ("", {"none": "", "batch=1": "`batch=1`"})


def test_trials_stand_apart_from_comparisons_and_have_no_column_of_one_seed(
    pages: Any, place: Any
) -> None:
    facts = {"size": 64, "k": 20, "changes": "", "recipe_digest": "ab"}
    for name, split in (("compare", "test"), ("trials", "validation")):
        found = Record("knn_top1", 50, "%", "xmoco", "pets", facts | {"split": split}, 0)
        append_records(place.results / f"{name}-pets.jsonl", [found])
    first, second = pages.comparisons.comparison_tables(place).split("## Tuning trials on held-out")
    assert first.startswith("## Comparisons on test images")
    for part in (first, second):
        assert rows_of(part)[0] == "| method | kNN (k = 20) |"


def test_a_former_name_of_re_encoded_images_tells_that_they_are(pages: Any) -> None:
    told = "images re-encoded as JPEG of quality 75; "
    for work in ("imagenette-resnet18-200ep", "imagenette-128-q75-resnet18-200ep"):
        assert pages.front.recoded(work) == told
    assert pages.front.recoded("imagenette2-resnet18-200ep") == ""


def test_comparisons_are_means_over_seeds(pages: Any, place: Any) -> None:
    assert pages.comparisons.comparison_tables(place) == ""

    def trial(subject: str, changes: str, value: float, seed: int, k: int = 20) -> Record:
        facts = {"split": "test", "size": 128, "k": k, "changes": changes, "recipe_digest": "ab"}
        return Record("knn_top1", value, "%", subject, "pets-resnet18-9ep", facts, seed)

    trials = [
        trial("xmoco", "batch=128 hue=0.1", 99, 0),
        trial("xmoco", "batch=128 hue=0.1", 70, 0),  # again
        trial("xmoco", "batch=128 hue=0.1", 72, 1),
        trial("xmoco+", "batch=128 hue=0.1 teacher=keys", 75, 0),
        trial("xmoco+", "batch=128 hue=0.1 teacher=keys", 74, 0, k=200),
    ]
    append_records(place.results / "compare-pets.jsonl", trials)
    text = pages.comparisons.comparison_tables(place)
    assert "**`pets`, ResNet-18, 9 epochs, evaluated at 128 px on test images; recipe ab**" in text
    assert rows_of(text) == [
        "| method | overrides | kNN (k = 20) | kNN (k = 200) | seeds |",
        "| --- | --- | ---: | ---: | ---: |",
        "| XMoCo+ | `teacher=keys` | 75.0 % | 74.0 % | 1 |",  # the best first
        "| XMoCo |  | 71.0 ± 1.4 % | – | 2 |",
    ]
    assert text.startswith("## Comparisons on test images\n\n")
    assert "## Tuning trials" not in text
    assert "All have `batch=128 hue=0.1`. Seeds 0, 1;" in text


def test_sizes_and_times_of_a_comparison_are_told(pages: Any, place: Any) -> None:
    """Of runs that shared a GPU the time is no measure of speed, and that is said."""

    def trial(seed: int, size: int, seconds: float, value: float, **others: Any) -> Record:
        facts = {"split": "test", "size": size, "k": 20, "changes": "", "recipe_digest": "ab"}
        facts |= {"train_seconds": seconds} | others
        when = f"2026-01-0{1 + seed}T00:00:00Z"
        work = "pets-resnet18-9ep"
        return Record("knn_top1", value, "%", "xmoco", work, facts, seed, time=when)

    alone = [trial(seed, size, 60.0 * (1 + seed), 70 + seed) for seed in (0, 1) for size in (96, 8)]
    append_records(place.results / "compare-pets.jsonl", alone)
    text = pages.comparisons.comparison_tables(place)
    assert "**`pets`, ResNet-18, 9 epochs, evaluated on test images; recipe ab**" in text
    assert rows_of(text) == [
        "| method | training time | evaluated at | kNN (k = 20) | seeds |",
        "| --- | ---: | ---: | ---: | ---: |",
        "| XMoCo | 1.5 min | 96 px | 70.5 ± 0.7 % | 2 |",
        "| XMoCo | 1.5 min | 8 px | 70.5 ± 0.7 % | 2 |",
    ]
    file = place.results / "compare-pets.jsonl"
    append_records(file, [trial(2, 8, 900.0, 70, runs_at_once=3)])
    assert "| XMoCo | 1.5 min | 8 px |" in pages.comparisons.comparison_tables(
        place
    )  # of those alone
    append_records(file, [trial(0, 4, 900.0, 70, runs_at_once=3)])
    text = pages.comparisons.comparison_tables(place)
    assert "| 15.0 min† | 4 px |" in text
    assert "\n\n† 3 runs shared the GPU. Seeds" in text
    assert "‡" not in text
    append_records(file, [trial(0, 2, 900.0, 70, watched_every=40)])
    text = pages.comparisons.comparison_tables(place)
    assert "| 15.0 min‡ | 2 px |" in text
    assert " ‡ Including evaluations during training. Seeds" in text


def test_tables_stand_beside_the_paper(pages: Any, place: Any) -> None:
    assert pages.comparisons.paper_tables(place) == ""

    def measured(one: Any, value: float, **changed: Any) -> Record:
        facts = {**one.trial.facts, **one.trial.told, "data": "archive pets.tar (train)", "k": 200}
        facts |= {"size": 160, "train_images": 90, "judged_images": 10} | changed
        subject, work, seed = one.trial.subject, one.trial.work, one.trial.seed
        return Record("knn_top1", value, "%", subject, work, facts, seed)

    runs = plan(read_table("xi"), Asked(data="pets", seeds=(0, 1), rows=("0.5", "0.9")))
    records = [measured(one, value) for one, value in zip(runs, (70, 75, 72, 75), strict=True)]
    records.append(measured(runs[0], 11, settings={"method": {"name": "older"}}))
    append_records(place.results / "tables.jsonl", records)
    text = pages.comparisons.paper_tables(place)
    assert "### ξ, the share of a soft label given to the positive" in text
    assert "Trained on pets for 60 epochs, evaluated on test images." in text
    assert rows_of(text)[:4] == [
        "| ξ | kNN (k = 200) | seeds | paper: kNN (k = 200) |",
        "| --- | ---: | ---: | ---: |",
        "| 0.5 | 71.0 ± 1.4 % | 2 | 42.5 % |",
        "| 0.9 | 75.0 ± 0.0 % | 2 | 51.4 % |",
    ]
    assert "Not measured yet: 0.6, 0.7, 0.8, 1.0. By kNN (k = 200), 1 of 1 pairs" in text
    assert "**With earlier settings: pets-resnet18-60ep**" in text
    assert "11.0 %" in rows_of(text)[-1]
    assert pages.plain.other_tables(place) == ""


def test_tables_with_trials_and_others_have_each_their_own_runs(pages: Any, place: Any) -> None:
    """The rows of some tables are trials of another one's, and trials are rows on held-out images:
    each is shown once, where it belongs."""
    table = read_table("main")
    tried, asked = trials_asked(table, Asked(data="pets"))
    tries = ("own settings", "rate × 2", "rate × 0.5")
    names = [f"{row}, {one}" for row in ("XMoCo", "MoCo v2+") for one in tries]

    def measured(one: Any, value: float) -> Record:
        facts = {**one.trial.facts, **one.trial.told, "data": "archive pets.tar (train)", "k": 20}
        facts |= {"size": 160, "train_images": 90, "judged_images": 10}
        subject, work, seed = one.trial.subject, one.trial.work, one.trial.seed
        return Record("knn_top1", value, "%", subject, work, facts, seed)

    trials = plan(tried, replace(asked, rows=tuple(names)))
    finals = plan(table, Asked(data="pets", seeds=(0,), rows=("XMoCo", "MoCo v2+")))
    values = (62, 61, 60, 65, 64, 63, 66, 67)  # the rows' own settings are the best
    records = [measured(*pair) for pair in zip((*trials, *finals), values, strict=True)]
    append_records(place.results / "tables.jsonl", records)
    text = pages.comparisons.paper_tables(place)
    headings = [line for line in text.splitlines() if line.startswith("###")]
    assert headings == ["### Comparison of methods: trials", "### Comparison of methods"]
    assert text.count("evaluated on test images") == 1
    first, second = text.split("### Comparison of methods\n")
    assert [f"| {name} |" in first for name in names] == [True] * 6
    assert "| MoCo v2+ | 67.0 % |" in second


def test_trials_of_a_shortened_table_and_rows_on_held_out_images(pages: Any, place: Any) -> None:
    """Trials take no more epochs than the table; another table's rows may be as long as they."""

    def measured(one: Any, value: float) -> Record:
        facts = {**one.trial.facts, **one.trial.told, "data": "archive pets.tar (train)", "k": 20}
        facts |= {"size": 160, "train_images": 90, "judged_images": 10}
        subject, work, seed = one.trial.subject, one.trial.work, one.trial.seed
        return Record("knn_top1", value, "%", subject, work, facts, seed)

    tried, asked = trials_asked(read_table("main"), Asked(data="pets", epochs=20, rows=("XMoCo",)))
    rows = Asked(data="pets", epochs=40, held_out=0.2, rows=("0.5", "0.6"))
    runs = [*plan(tried, asked), *plan(read_table("xi"), rows)]
    records = [measured(one, value) for value, one in enumerate(runs, 60)]
    append_records(place.results / "tables.jsonl", records)
    text = pages.comparisons.paper_tables(place)
    headings = [line for line in text.splitlines() if line.startswith("###")]
    assert headings == [
        "### Comparison of methods: trials",
        "### ξ, the share of a soft label given to the positive",
    ]
    assert "Trained on pets for 20 epochs, evaluated on a held-out 20 %" in text
    assert "With earlier settings" not in text


def test_what_diverged_is_told_below_a_comparison(pages: Any, place: Any) -> None:
    facts = {"split": "test", "changes": "", "recipe_digest": "ab"}
    judged = facts | {"size": 64, "k": 20, "train_seconds": 60.0}

    def record(measure: str, value: float, seed: int, facts: dict[str, Any]) -> Record:
        unit = "step" if measure == DIVERGED else "%"
        return Record(measure, value, unit, "xmoco", "pets-resnet18-9ep", facts, seed)

    lost = record(DIVERGED, 7, 1, facts | {"changes": "learning_rate=9"})
    file = place.results / "compare-pets.jsonl"
    append_records(file, [lost])
    text = pages.comparisons.comparison_tables(place)
    assert "Training diverged: XMoCo `learning_rate=9`, seed 1, at step 7." in text
    assert rows_of(text) == []
    append_records(file, [record("knn_top1", 80, 0, judged)])
    append_records(file, [record(DIVERGED, 5, 0, judged | {PART: "linear_top1"})])
    text = pages.comparisons.comparison_tables(place)
    assert rows_of(text)[0] == "| method | training time | kNN (k = 20) |"
    assert "80.0 %" in rows_of(text)[2]
    assert "seed 1, at step 7; XMoCo, seed 0, its linear classifier, at step 5." in text
    assert pages.front.of_photographs(place, 9) == []


def test_the_headline_tells_size_seed_and_time(pages: Any, place: Any) -> None:
    assert pages.front.headline(place) == ""
    run = Record(
        **asdict(knn("xmoco", 80, 200, run_seconds=408.0))
        | {"machine": {"gpus": ["Loom"], "processor": "Abacus", "threads": 2}}
    )
    append_records(place.results / "recipe-cifar10-resnet18-200ep.jsonl", [run])
    moco = {"name": "linear (MoCo)", "crop_size": 32}
    found = [
        protocol_record("linear_top1", 88.8, "xmoco", **moco),
        protocol_record("linear_top1", 91.2, "xmoco", **moco | {"size": 48}),
    ]
    append_records(place.results / "protocols-cifar10-resnet18.jsonl", found)
    text = pages.front.headline(place)
    assert (
        "CIFAR-10: the recipe `cifar10` trains a ResNet-18 in 7 minutes on one Loom; linear" in text
    )
    assert "is 91.2 % (one seed (0); evaluated at 48 px, 88.8 % at 32 px)" in text
    assert rows_of(pages.front.results_in_brief(place)) == [
        "| backbone | linear top-1 (MoCo's protocol) |",
        "| --- | ---: |",
        "| XMoCo, 200 epochs, 32 px | 88.8 % |",
        "| XMoCo, 200 epochs, 48 px | 91.2 % |",
    ]


def test_the_headline_tells_who_is_ahead_on_photographs(pages: Any, place: Any) -> None:
    work = "imagenette-q75-resnet18-200ep"
    current = recipe_digest(load_config("imagenette"))
    facts = {"recipe": "imagenette", "recipe_digest": current, "changes": "", "split": "test"}
    input = {"size": 96, "eval_size": 128}
    facts |= {"epochs": 200, "size": 128, "k": 20}
    facts["settings"] = {"method": {"weak_keys": True}, "input": input}

    def add(subject: str, *values: float, seed: int = 0, day: int = 3, **changed: Any) -> str:
        """What the page says then; values are of one seed after the other."""
        records = [
            Record("knn_top1", value, "%", subject, work, facts | changed, number)
            for number, value in enumerate(values, seed)
        ]
        when = {"time": f"2026-01-0{day}T00:00:00Z"}
        append_records(
            place.results / "compare-imagenette.jsonl",
            [Record(**asdict(record) | when) for record in records],
        )
        return str(pages.front.headline(place))

    assert add("xmoco+", 85, 86) == ""  # nobody to compare with
    held_out = "validation, held out of the training images"
    for other in ({"k": 200}, {"split": held_out}, {"size": 64}, {"recipe_digest": "old"}):
        assert add("mocov2plus", 99, 99, day=2, **other) == ""
    few = add("mocov2plus", 87)
    assert "of 87.0 % with MoCo v2+ (one seed (0)), 85.5 ± 0.7 % with XMoCo+ (seeds 0, 1;" in few
    text = add("mocov2plus", 88, seed=1)
    assert "- Imagenette, 200 epochs of the recipe `imagenette`: kNN top-1 (k = 20) of " in text
    assert "(seeds 0, 1; images re-encoded as JPEG of quality 75; evaluated at 128 px" in text
    ahead = "of 87.5 ± 0.7 % with MoCo v2+, 85.5 ± 0.7 % with XMoCo+ (seeds"
    assert ahead in text
    tried = [
        Record("knn_top1", 1, "%", one, "w", facts | {"split": held_out, "changes": changes}, 0)
        for one, changes in (("xmoco+", ""), ("xmoco", "batch=8"), ("mocov2plus", ""))
    ]
    append_records(place.results / "trials-imagenette.jsonl", tried)
    told = "px; trials of settings on held-out images: 3 of MoCo v2+, 2 of XMoCo)"
    assert told in pages.front.headline(place)
    rivals = add("mocov2plus", 89, 90, changes="batch=8")  # a better one, added later
    told = "of 89.5 ± 0.7 % with MoCo v2+ `batch=8`, 87.5 ± 0.7 % with MoCo v2+, 85.5 ± 0.7 % with"
    assert told in rivals
    last = add("xmoco", 95, 95, settings={"method": {"weak_keys": False}, "input": input})
    assert "of 95.0 ± 0.0 % with XMoCo, 89.5 ± 0.7 % with MoCo" in last
    simclr = add("simclr", 96, 96, settings={"method": {"name": "simclr"}, "input": input})
    assert "of 96.0 ± 0.0 % with SimCLR" in simclr
    assert "held-out images: 0 of SimCLR, 2 of XMoCo, 3 of MoCo v2+)" in simclr
    assert add("simclr", 99, 99, day=4, size=160) == simclr  # judged besides
    for rival in ("xmoco+", "mocov2plus+small views"):
        former = add(rival, 50, 51, day=5, recipe_digest="older")
    assert "200 epochs of an earlier recipe `imagenette`: kNN" in former
    assert "50.5 ± 0.7 % with MoCo v2+ with small views" in former
    for rival in ("xmoco+", "mocov2plus"):
        gone = add(rival, 52, 53, day=6, recipe="mine.yaml", recipe_digest="gone")
    assert "200 epochs of an earlier recipe `mine.yaml`: kNN" in gone


def test_the_headline_tells_of_the_newest_long_run(pages: Any, place: Any) -> None:
    def run(changes: str, day: int, subject: str = "xmoco+", **values: float) -> None:
        facts = {"recipe": "imagenette", "recipe_digest": "d", "changes": changes, "k": 20}
        facts |= {"split": "test", "epochs": 800, "train_seconds": 240.0}
        sizes = [int(size.removeprefix("at")) for size in values]
        told = {"settings": {"input": {"size": sizes[0], "eval_size": sizes[-1]}}}
        records = [
            Record("knn_top1", value, "%", subject, "w-q9", facts | {"size": size} | told, 0)
            for size, value in zip(sizes, values.values(), strict=True)
        ]
        when = {"time": f"2026-01-0{day}T00:00:00Z"}
        append_records(
            place.results / "compare-imagenette.jsonl",
            [Record(**asdict(record) | when) for record in records],
        )

    run("", 2, at96=88, at160=89)
    run("batch=8", 1, at96=98, at160=99)
    run("", 3, "mocov2plus", at96=98, at160=99)
    text = pages.front.headline(place)
    assert "- Imagenette, 800 epochs: kNN top-1 (k = 20) of 89.0 % with XMoCo+ (one seed" in text
    assert "(0); images re-encoded as JPEG of quality 9; evaluated at 160 px; training" in text
    assert "training time 4.0 min)." in text


def test_trials_are_counted_by_method_and_images(pages: Any, place: Any) -> None:
    assert pages.effort.effort_table(place) == ""

    def trial(subject: str, changes: str, epochs: int, split: str = HELD_OUT) -> None:
        facts = {"recipe": "imagenette", "recipe_digest": "d", "changes": changes}
        facts |= {"split": split, "epochs": epochs, "k": 20, "size": 64}
        work = f"pets-resnet18-{epochs}ep"
        found = [Record("knn_top1", 1, "%", subject, work, facts | {"k": k}, 0) for k in (20, 200)]
        append_records(place.results / "trials-pets.jsonl", found)

    for changes, epochs in (("", 40), ("batch=8", 40), ("batch=8", 400)):
        trial("xmoco+", changes, epochs)
    trial("xmoco", "", 60)
    trial("mocov2plus+weak keys", "", 40)
    trial("mocov2plus", "", 40, split="test")
    assert rows_of(pages.effort.effort_table(place))[2:] == [
        "| `imagenette` | `pets` | XMoCo | 4 | 540 |",
        "| `imagenette` | `pets` | MoCo v2+ | 1 | 40 |",
    ]


def test_times_of_runs_that_overlapped_are_marked(pages: Any, place: Any) -> None:
    """By when their first records were made, and how long they had trained until then."""

    def trial(changes: str, minutes: int, seconds: float, day: int = 1, **others: Any) -> None:
        facts = {"split": "test", "size": 8, "k": 20, "changes": changes, "recipe_digest": "ab"}
        facts |= {"train_seconds": seconds} | others
        when = f"2026-01-0{day}T10:{minutes:02d}:00Z"
        made = Record("knn_top1", 50, "%", "xmoco", "pets-resnet18-9ep", facts, 0, time=when)
        append_records(place.results / "compare-pets.jsonl", [made])

    trial("batch=1", 10, 240.0)
    trial("batch=2", 15, 240.0)  # begins when the first is over
    trial("batch=3", 30, 300.0)
    trial("batch=4", 32, 300.0)
    trial("batch=4", 33, 300.0)  # measured again, or more of it
    trial("batch=5", 10, 480.0, day=2, epoch_seconds=30.0, epochs=10)
    text = pages.comparisons.comparison_tables(place)
    times = {row.split("`")[1]: row.split(" | ")[2] for row in rows_of(text)[2:]}
    assert times == {
        **{"batch=1": "4.0 min", "batch=2": "4.0 min", "batch=5": "5.0 min"},
        **{"batch=3": "5.0 min†", "batch=4": "5.0 min†"},
    }
    told = "† Other runs trained on the same machine meanwhile, by the times of their records."
    assert told in text


def test_differences_that_may_be_chance_follow_from_records(pages: Any, place: Any) -> None:
    assert pages.chance.chance(place) == ""
    facts = {"split": "test", "size": 8, "k": 20, "changes": "", "recipe_digest": "ab"}
    for images, values in ((10_000, (50, 52)), (1_500, (60,))):
        work = f"w{images}"
        append_records(
            place.results / "compare-pets.jsonl",
            [
                Record("knn_top1", v, "%", "xmoco", work, facts | {"judged_images": images}, seed)
                for seed, v in enumerate(values)
            ],
        )
    assert pages.chance.chance(place) == (
        "**Nearly all results are from a single seed**: differences may be chance below 1 point "
        "with 10,000 evaluation images, below 3 points with 1,500 evaluation images. Where several "
        "seeds were trained, kNN accuracies had standard deviations of 1.4 to 1.4 points over them."
    )


def test_a_figure_of_fewer_seeds_than_its_row_says_so(pages: Any, place: Any) -> None:
    facts = {"recipe_digest": "d", "changes": "", "size": 128, "split": "test"}
    found = [Record("knn_top1", 80, "%", "xmoco", "w", facts | {"k": 20}, seed) for seed in (0, 1)]
    found.append(Record("linear_top1", 81, "%", "xmoco", "w", facts, 1))
    append_records(place.results / "compare-imagenette.jsonl", found)
    row = rows_of(pages.comparisons.comparison_tables(place))[-1]
    assert row == "| XMoCo | 80.0 ± 0.0 % | 81.0 % (1 seed) | 2 |"


def test_what_test_images_chose_is_not_shown(pages: Any, place: Any) -> None:
    facts = {"recipe_digest": "d", "changes": "", "size": 128, "strengths": [1, 2]}

    def measured(value: float, **changed: Any) -> Record:
        return Record("logistic_top1", value, "%", "xmoco", "pets", facts | changed, 0)

    chosen = {"split": "test", "strength_chosen_on": "others"}
    records = [measured(91, split="test"), measured(81, **chosen), measured(71, split="validation")]
    append_records(place.results / "compare-pets.jsonl", records)
    text = pages.comparisons.comparison_tables(place)
    assert "91.0 %" not in text
    assert "81.0 %" in text
    assert "71.0 %" in text


# Recipes, protocols, gaps


def test_every_recipe_has_its_place(pages: Any, place: Any) -> None:
    own, others, told = pages.recipes.recipes_table(place).split("\n\n")
    assert "| `demo` | `patterns` | `tiny`, 32 px | 6 | 64 |" in rows_of(own)
    assert re.findall(r"^\| `(\w+)`", own, re.MULTILINE) == [
        *("demo", "cifar10", "imagenette", "imagenet")
    ]
    assert "| BYOL | `byol` | 200 × 256 | `byol-imagenet` | 1,000 × 4,096 |" in rows_of(others)
    assert "| MoCo v1 | `mocov1` | 200 × 512 | `mocov1-imagenet` | 200 × 256 |" in rows_of(others)
    assert "| Supervised | `supervised` (`resnet18`, 32 px) | " in others
    assert "for CIFAR-10 train `resnet18`, 32 px, evaluated at 48 px; those for ImageNet" in told
    shown = re.findall(r"`([\w-]+)`(?= \|| \()", own + others)
    assert set(recipe_names()) <= set(shown)


def test_protocols_of_evaluation_are_those_in_force(pages: Any, place: Any) -> None:
    text = pages.recipes.evaluation_protocols(place)
    assert rows_of(text)[2:] == [
        "| linear (paper) | 512 | 60 | 0.0001 | 100 epochs | × 0.1 after 60 and 80 epochs |",
        "| linear (MoCo) | 256 | 30 | 0 | 100 epochs | × 0.1 after 60 and 80 epochs |",
        "| fine-tune | 256 | classifier 0.2, backbone 0.01 | 0 | 20 epochs "
        "| × 0.2 after 12 and 16 epochs |",
        "| transfer, end to end (`--grid paper`) | 64 | one of 10 from 0.0001 to 0.1 "
        "| one of 11 from 0 to 0.001 | 5,000 steps | cosine to 0 |",
        "| transfer, end to end (`--grid small`) | 64 | one of 3 from 0.001 to 0.1 "
        "| one of 2 from 0 to 0.0001 | 1,000 steps | cosine to 0 |",
    ]
    assert "momentum 0.9 " in text
    assert "(8 to 100 % of the area)" in text


def test_what_was_not_measured_is_told_until_it_is(pages: Any, place: Any) -> None:
    def told() -> str:
        return str(pages.gaps.gaps(place))

    def add(
        file: str,
        subject: str = "xmoco",
        split: str = "test",
        digest: str = "one",
        **machine: Any,
    ) -> str:
        facts = {"split": split, "recipe": "imagenet" if file == "recipe-imagenet" else "other"}
        facts |= {"recipe_digest": digest, "size": "64"}
        work = f"{file.partition('-')[2]}-w"
        record = Record("knn_top1", 50, "%", subject, work, facts, 0, machine=machine)
        append_records(place.results / f"{file}.jsonl", [record])
        return told()

    lines = told().splitlines()
    assert len(lines) == 7
    assert all(line.startswith("- ") for line in lines)
    assert "The paper's tables `backbones`, `bank`" in told()
    (one,) = plan(read_table("xi"), Asked(data="pets", rows=("0.6",)))
    facts = {**one.trial.facts, **one.trial.told, "k": 20, "size": 160}
    found = Record("knn_top1", 50, "%", one.trial.subject, one.trial.work, facts, 0)
    append_records(place.results / "tables.jsonl", [found])
    assert "The paper's tables `backbones`" in told()
    assert "`xi`" not in told()
    assert "with XMoCo+ only" in add("compare-imagenette", "mocov2plus")
    assert "with XMoCo+ only" in add("compare-imagenette", "xmoco", split="validation")
    assert "with XMoCo+ only" in add("compare-imagenette", "xmoco", digest="another")
    assert "with XMoCo+ only" not in add("compare-imagenette", "xmoco")
    assert "other libraries' methods" not in add("compare-lightly", "lightly's MoCo")
    assert "MoCo v2+ on CIFAR-10" in add("protocols-cifar10", "xmoco")
    assert "MoCo v2+ on CIFAR-10" not in add("protocols-cifar10", "mocov2plus")
    assert "ImageNet" in told()
    assert "ImageNet" not in add("recipe-imagenet")
    assert "COCO" in told()
    assert "COCO" not in add("detect")
    assert "GPU" in add("one", gpus=["Loom"])
    assert add("several", gpus=["Loom", "Loom"]).count("\n") == 0  # all but some tables


def test_predictions_stand_in_the_order_of_gpus_and_once_each(pages: Any, place: Any) -> None:
    for way, sizes in (("strong", ((64, 4096), (8, 4096))), ("weak", ((8, 512), (64, 4096)))):
        for gpus, batch in sizes:
            facts = {"batch": batch, "of_ideal": 93, "images_per_second": 9, "sent_mb": 1}
            work, value = f"scaling-predicted-{way}", batch / gpus
            made = Record("predicted_step_ms", value, "ms", f"{gpus} GPUs", work, facts, 0)
            append_records(place.results / "scaling.jsonl", [made])
    rows = rows_of(pages.cluster.scaling_tables(place))[2:]
    assert [row.split(" | ")[:3] for row in rows] == [
        ["| 8 GPUs", "weak", "512"],
        ["| 8 GPUs", "strong", "4,096"],
        ["| 64 GPUs", "strong and weak", "4,096"],
    ]


# Speed


def speed_record(subject: str, value: float, times: float | None, **protocol: Any) -> Record:
    facts = {"data": "CIFAR-10", "batch": 512, "size": 32, "bank_length": 4096}
    facts |= {"precision": "bf16", "rounds": [value], "steps": 60, "waiting": 0.0123}
    facts |= {"gpu_memory_gib": 3.21, "times_baseline": times} | protocol
    work = "speed-cifar10-resnet18"
    return Record("images_per_second", value, "images/s", subject, work, facts, seed=0)


def stage_record(stage: str, value: float, subject: str = "xmoco") -> Record:
    facts = {"data": "CIFAR-10", "batch": 512, "size": 32, "bank_length": 4096, "stage": stage}
    return Record("stage_ms", value, "ms", subject, "speed-cifar10-resnet18", facts, seed=0)


def test_speeds_stand_beside_the_best_baseline_and_above_their_stages(
    pages: Any, place: Any
) -> None:
    append_records(
        place.results / "speed.jsonl",
        [
            speed_record("xmoco", 1111, 0.2),
            speed_record("lightly (its defaults)", 2500, 0.5, precision="fp32"),
            speed_record("xmoco", 20000, 4.0, rounds=[1.0, 2.0, 3.0]),
            speed_record("lightly", 5000, 1.0),
            speed_record("xmoco", 21000, None),  # later, beside nobody
            speed_record("xmoco (before)", 20500, None),
            speed_record("mocov2plus", 22000, None),
            *(stage_record(stage, 5.0) for stage in ("images", "gone")),
            *(stage_record(stage, value) for stage, value in (("images", 1.0), ("views", 3.0))),
            stage_record("views", 2.0, "mocov2plus"),
        ],
    )
    text = pages.speed.speed_tables(place)
    assert text.startswith("### ResNet-18, CIFAR-10, 32 px\n")
    assert rows_of(text) == [
        "| program | precision | images/s | × best baseline | GPU memory | waiting |",
        "| --- | --- | ---: | ---: | ---: | ---: |",
        "| XMoCo | bf16 | 20,000 | 4.00 | 3.2 GiB | 1.2 % |",
        "| lightly, defaults | fp32 | 2,500 | 0.50 | 3.2 GiB | 1.2 % |",
        "| lightly, tuned | bf16 | 5,000 | 1.00 | 3.2 GiB | 1.2 % |",
        "| MoCo v2+ | bf16 | 22,000 |  | 3.2 GiB | 1.2 % |",
        "| stage | XMoCo | MoCo v2+ |",
        "| --- | ---: | ---: |",
        "| images | 1.00 ms, 25 % | – |",
        "| views | 3.00 ms, 75 % | 2.00 ms, 100 % |",
    ]
    assert (
        "One seed (0); the median of 3 rounds / one round; CIFAR-10; batch 512; K = 4,096;" in text
    )
    row = rows_of(pages.front.speed_in_brief(place))[-1]
    assert row.startswith("| ResNet-18, CIFAR-10, 32 px, K = 4,096 | ")
    assert row.endswith("| 20,000 | 5,000 (lightly, tuned) | 4.00× | the median of 3 rounds |")


def test_the_encoder_alone_is_shown_where_it_is_a_bound(pages: Any, place: Any) -> None:
    file = place.results / "speed.jsonl"
    append_records(file, [speed_record("xmoco", 200, 2.0), speed_record("encoder only", 100, 1.0)])
    assert "encoder" not in pages.speed.speed_tables(place)
    append_records(file, [speed_record("encoder only", 150, 1.5, graph=True)])
    assert "| encoder only, compiled (upper bound) | bf16 | 150 |" in pages.speed.speed_tables(
        place
    )
    append_records(file, [speed_record("encoder only", 300, 3.0)])
    assert "| encoder only, compiled (upper bound) | bf16 | 300 |" in pages.speed.speed_tables(
        place
    )


def test_what_the_benchmark_measures_can_be_shown(
    pages: Any, place: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    speed = importlib.import_module("speed")
    config = load_config("cifar10", ["batch=512"])
    options = SimpleNamespace(work="cifar10", results=place.results)
    outcomes = {}
    for name, images_per_second in (("xmoco", 20000), ("lightly", 5000)):
        outcomes[name] = outcome = speed.Outcome(config, 60, graphed=False)
        outcome.speeds, outcome.waiting, outcome.gib = [images_per_second], [0.0123], 3.21
    speed.show(outcomes, options)
    speed.show_stages({"images": 1.0, "views": 3.0}, config, options)
    rows = rows_of(pages.speed.speed_tables(place))
    assert "| XMoCo | bf16 | 20,000 | 4.00 | 3.2 GiB | 1.2 % |" in rows
    assert "| views | 3.00 ms, 75 % |" in rows


# Any records


def test_what_became_of_faults_is_told(pages: Any, place: Any) -> None:
    assert pages.faults.faults_table(place) == ""
    facts = {"steps": 400, "faults": 60, "kinds": {"SIGKILL": 60}, "steps_taken_again": 7}
    names = ("differing_tensors", "checkpoints_lost", "steps_repeated", "problems")
    chaos = [
        Record(f"chaos_{name}", value, "", "xmoco", "chaos", facts, 0)
        for value, name in enumerate(names)
    ]
    append_records(place.results / "chaos.jsonl", chaos)
    facts = {"cases": 10_000, "kinds": {"images": 10_000}, "refused": 9000}
    facts |= {"slowest_seconds": 3.2, "most_memory_gib": 0.25}
    fuzz = Record("fuzz_failures", 4, "cases", "xmoco", "fuzz", facts, 0)
    append_records(place.results / "fuzz.jsonl", [fuzz])
    grown = [
        Record("endurance_growth", value, "%", "xmoco", f"endurance-{what}", facts, 0)
        for what, value in (("memory", 1.25), ("files", 0.0))
        for facts in ({"steps": 10_000, "what": what},)
    ]
    append_records(place.results / "endurance.jsonl", grown)
    _, _, chaos_row, fuzz_row, endurance_row = pages.faults.faults_table(place).splitlines()
    assert "400 steps with 60 injected faults of 1 kinds" in chaos_row
    told = "0 tensors differ at the end; 1 checkpoints lost; 2 steps repeated although "
    assert f"{told}checkpointed (7 not yet checkpointed); 3 other problems" in chaos_row
    assert "| 10,000 corrupted or malicious inputs of 1 kinds | 4 tracebacks" in fuzz_row
    assert "memory +1.2 %, files +0.0 %" in endurance_row


def test_the_last_pass_of_the_gpu_tests_is_told(pages: Any, place: Any) -> None:
    assert pages.gpu_tests.gpu_tests(place) == ""
    for passed in (50, 61):
        facts = {"failed": 0, "skipped": 2, "seconds": 94.6}
        found = Record("gpu_tests_passed", passed, "tests", "xmoco", "gpu-tests", facts, 0)
        append_records(place.results / "gpu-tests.jsonl", [found])
    assert pages.gpu_tests.gpu_tests(place).startswith("Last pass: 61 tests, 2 skipped, in 95 s; ")


def test_records_nobody_asks_for_are_shown_as_they_are(pages: Any, place: Any) -> None:
    strange = [
        Record("fluffiness", 12345.6, "hairs", "cat", "fur", {"off": 1e-5}, seed=3),
        Record("weight", 4, "kg", "cat", "fur", {}, seed=3),
        Record("weight", 9, "kg", "dog", "fur", {}, seed=3),
        Record("weight", 8, "kg", "dog", "fur", {}, seed=4),
    ]
    append_records(place.results / "strange.jsonl", strange)
    text = pages.plain.other_tables(place)
    assert text.startswith("## Other records\n\n### strange\n\nfluffiness:\n\n")
    assert "| settings | cat | dog |\n| --- | ---: | ---: |\n" in text
    assert "| seed 3 | 4.000 kg | 9.000 kg |\n| seed 4 | – | 8.000 kg |\n" in text
    assert "12,346 hairs" in text
    assert "Seeds 3, 4;" in text


def test_a_question_tells_rows_apart_by_what_it_names(pages: Any, place: Any) -> None:
    def loss(subject: str, value: float, launch: str, length: int, **protocol: Any) -> Record:
        settings = {"batch": 512, "launch": launch, "bank_length": length, "settings": "x" * 999}
        return Record("loss_ms", value, "ms", subject, "loss", settings | protocol, seed=0)

    records = [
        loss("xmoco", 9, "eager", 4096),
        loss("xmoco", 2, "graph", 4096, off=1e-5),
        loss("mocov2plus", 1, "graph", 4096),
        loss("xmoco", 1.23456, "eager", 4096, values={"a": 1}),  # measured again
    ]
    append_records(place.results / "loss.jsonl", records)
    text = pages.plain.answer(place, pages.plain.QUESTIONS["loss"])
    assert rows_of(text) == [
        "| mode | XMoCo | MoCo v2+ |",
        "| --- | ---: | ---: |",
        "| eager | 1.235 ms | – |",
        "| graph | 2.000 ms | 1.000 ms |",
    ]
    assert "One seed (0); batch 512; K = 4,096;" in text
    assert pages.plain.other_tables(place) == ""


def test_rows_of_the_loss_stand_in_the_order_of_their_banks(pages: Any, place: Any) -> None:
    for launch in ("eager", "graph"):
        for length in (65536, 4096):
            facts = {"bank_length": length, "launch": launch}
            told = Record("loss_ms", 1, "ms", "xmoco", "loss", facts, 0)
            append_records(place.results / "loss.jsonl", [told])
    rows = rows_of(pages.plain.answer(place, pages.plain.QUESTIONS["loss"]))[2:]
    assert [row.split(" | ")[:2] for row in rows] == [
        [f"| {length}", launch] for length in ("4,096", "65,536") for launch in ("eager", "graph")
    ]


def test_what_is_told_above_a_table_is_not_told_below(pages: Any, place: Any) -> None:
    for operation in ("pooling", "queries and keys"):
        facts = {"operation": operation, "shape": "2 × 4 px", "median_of": 5}
        told = Record("encoders_ms", 1, "ms", "xmoco", "encoders", facts, 0)
        append_records(place.results / "encoders.jsonl", [told])
    text = pages.plain.answer(place, pages.plain.QUESTIONS["encoders"])
    assert re.findall(r"\*\*(.*)\*\*", text) == ["Stem pooling", "Both encoders"]
    assert text.count("One seed (0); shape 2 × 4 px; median of 5;") == 2
    assert "operation" not in text


def test_what_a_short_run_spends_besides_training_is_told(pages: Any, place: Any) -> None:
    assert pages.plain.answer(place, pages.plain.QUESTIONS["startup"]) == ""
    for measure, seconds in (("first_run_seconds", 14.4), ("later_run_seconds", 1.2)):
        for stage, more in (("the first step", 0), ("together", 3)):
            facts = {"recipe": "demo", "changes": "", "when": "before the first step"}
            found = Record(measure, seconds + more, "s", "xmoco", "a", facts | {"stage": stage}, 0)
            append_records(place.results / "startup.jsonl", [found])
    text = pages.plain.answer(place, pages.plain.QUESTIONS["startup"])
    assert text.startswith("## Start-up time of short runs\n\nTwo runs, each in its own process")
    assert rows_of(text) == [
        "| stage | first run | later run |",
        "| --- | ---: | ---: |",
        "| the first step | 14.40 s | 1.200 s |",
        "| together | 17.40 s | 4.200 s |",
    ]


short_texts = st.text("abc", min_size=1, max_size=2)
protocols = st.dictionaries(
    st.sampled_from(["data", "k", "launch", "stage", "epoch"]),
    st.one_of(short_texts, st.integers()),  # which look different if they are
)


@given(st.lists(st.tuples(short_texts, short_texts, short_texts, protocols), min_size=1))
def test_any_record_has_its_cell(
    pages: Any, measured: list[tuple[str, str, str, dict[str, Any]]]
) -> None:
    """Of records that measure the same, the last has it."""
    records = [
        Measured[dict[str, Any]](
            measure=measure,
            value=float(number),
            unit="s",
            subject=subject,
            work=work,
            protocol=protocol,
            seed=0,
        )
        for number, (measure, subject, work, protocol) in enumerate(measured, start=1000)
    ]
    text = "\n".join(pages.plain.plain_tables(records, pages.plain.settings_of(records)))
    found = re.findall(r" ([\d,]+) s (?=\|)", text)
    last = {
        (r.work, r.subject, r.measure, json.dumps(r.protocol, sort_keys=True)): r for r in records
    }
    assert sorted(found) == sorted(pages.plain.significant(r.value) for r in last.values())


@given(st.floats(1e-9, 1e9) | st.floats(-1e9, -1e-9))
def test_four_digits_are_enough(pages: Any, value: float) -> None:
    shown = pages.plain.significant(value).replace(",", "")
    assert math.isclose(float(shown), value, rel_tol=5.1e-4)
    assert len(re.sub(r"^-?0\.0*|[-.]", "", shown)) in range(4, 11)


def test_the_bound_is_one_only_where_it_is_one(pages: Any, place: Any) -> None:
    def measured(commit: str, graph: bool, **speeds: float) -> str:
        for name, speed in speeds.items():
            record = speed_record(name.replace("_", " "), speed, None, graph=graph)
            append_records(place.results / "speed.jsonl", [replace(record, commit=commit)])
        return str(pages.speed.speed_bounds(place))

    assert pages.speed.speed_bounds(place) == ""
    assert measured("a", False, xmoco=100.0, encoder_only=80.0) == ""  # launched one by one
    row = "| 90 | 100 | 90.0 % | one round |"
    assert row in measured("b", True, xmoco=90.0, encoder_only=100.0)
    assert row in measured("c", True, xmoco=95.0)  # without the other
