"""Tables as they are drawn: means and deviations, the paper's figures, gaps and honest scales."""

import csv
import io
import statistics
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import kendalltau

from xmoco.report.curves import to_png
from xmoco.tables.columns import COLUMNS
from xmoco.tables.definition import Table, read_table, table_names
from xmoco.tables.drawing import agreements, csv_text, markdown, notes, page, unequal
from xmoco.tables.filling import Cell, Filled, Group, Line, fill, fill_all
from xmoco.tables.plan import Asked, plan
from xmoco.tables.plotting import picture
from xmoco.tables.trials import Kept

TABLE = Table.model_validate(
    {
        "title": "ξ",
        "about": "a few",
        "recipe": "demo",
        "epochs": 3,
        "seeds": [0],
        "columns": ["knn20", "time", "gpu_memory"],
        "axis": "ξ",
        "paper": "ImageNet, ResNet-50",
        "paper_columns": [
            {"heading": "kNN", "beside": "knn20"},
            {"heading": "memory", "unit": "GB"},
        ],
        "rows": [
            {"name": "0.5", "settings": "positive_mass=0.5", "paper": [42.5, 4.0]},
            {"name": "0.7", "settings": "positive_mass=0.7", "paper": [47.0, None]},
            {"name": "0.9", "settings": "positive_mass=0.9"},
            {"name": "7", "paper_only": True, "paper": [44.5, 6.5]},
        ],
    }
)


def record(name: str, column: str, value: float, seed: int = 0, **facts: Any) -> Kept:
    """Of a row of the table."""
    (one,) = plan(TABLE, Asked(data="patterns", rows=(name,), seeds=(seed,)))
    shown = COLUMNS[column]
    protocol = {**one.trial.facts, **one.trial.told, "data": "patterns (train)", "size": 32}
    protocol |= {"train_images": 6000, "judged_images": 1500} | facts
    return Kept(
        measure=shown.measure,
        value=value,
        unit=shown.unit,
        subject=one.trial.subject,
        work=one.trial.work,
        protocol=protocol | ({} if shown.k is None else {"k": shown.k}),
        seed=seed,
        machine={"processor": "Abacus", "threads": 2},
        versions={"torch": "2.11.0"},
        time="2026-01-02T03:04:05Z",
    )


GROUP = Group("patterns", 3, "test", None)
RECORDS = [
    record("0.5", "knn20", 99.0),
    record("0.5", "knn20", 50.0),  # measured again
    record("0.5", "knn20", 52.0, seed=1),
    record("0.5", "time", 1234.4),
    record("0.9", "knn20", 60.04),
    record("0.9", "knn20", 1.0, epochs=4),
    record("0.9", "knn20", 2.0, split="validation, held out of the training images"),
]


@pytest.fixture
def filled() -> Filled:
    return fill(TABLE, RECORDS, GROUP)


def test_cells_are_means_with_deviations_and_gaps(filled: Filled) -> None:
    assert markdown(filled).splitlines() == [
        "| ξ | kNN (k = 20) | training time | seeds | paper: kNN | paper: memory |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
        "| 0.5 | 51.0 ± 1.4 % | 1,234 s (seeds: one) | 2 | 42.5 % | 4 GB |",
        "| 0.7 | – | – | – | 47.0 % | – |",
        "| 0.9 | 60.0 % | – | one | – | – |",
        "| 7 | – | – | – | 44.5 % | 6.5 GB |",
    ]
    assert [line.row.name for line in filled.measured_only().lines] == ["0.5", "0.9", "7"]


def test_a_page_tells_how_its_figures_came_about(filled: Filled) -> None:
    text = page(filled, {"0.7, seed 0": "it diverged"})
    for words in (
        "# ξ\n\nTrained on patterns for 3 epochs, evaluated on test images.\n\n| ξ |",
        "\n- 0.7, seed 0 failed: it diverged.\n",
        "± is the standard deviation over seeds.",
        "Seeds 0, 1; patterns (6,000 training, 1,500 evaluation images); evaluated at 32 px;",
        "Abacus, 2 threads",
        "torch 2.11.0; 2026-01-02.",
        "Paper: ImageNet, ResNet-50.",
    ):
        assert words in text, words
    one = fill(TABLE, RECORDS[4:5], GROUP)
    assert "All figures are from one seed" in " ".join(notes(one))
    nothing = fill(TABLE, [], GROUP)
    assert notes(nothing) == ["Paper: ImageNet, ResNet-50."]


def test_figures_of_fewer_seeds_are_not_taken_for_more(filled: Filled) -> None:
    """0.5 has two seeds, of which one was timed; 0.9 has one."""
    assert "| 0.5 | 51.0 ± 1.4 % | 1,234 s (seeds: one) | 2 |" in markdown(filled)
    words = "seeds. Figures without ± are from one seed: differences below 3 points may be chance."
    assert words in " ".join(notes(filled))  # by 1,500 images
    both = fill(TABLE, RECORDS[:3], GROUP)
    assert "one seed" not in " ".join(notes(both))


def compared(*rows: dict[str, Any]) -> Filled:
    """A table of methods in which every row came out better than the one before, in the paper
    worse."""
    own = Table.model_validate(
        TABLE.model_dump(exclude={"axis"})
        | {"rows": [row | {"paper": [50.0 - place, None]} for place, row in enumerate(rows)]}
    )
    column = own.measured[0]
    return Filled(
        own,
        GROUP,
        [
            Line(line.row, {column: Cell({0: 40.0 + place})}, line.trial)
            for place, line in enumerate(fill(own, [], GROUP).lines)
        ],
        [],
    )


def test_unequal_effort_is_told() -> None:
    xmoco = {"name": "XMoCo", "settings": "batch=32"}
    swav = {"name": "SwAV", "settings": "method=swav local_crops=4 local_size=16"}
    simclr, byol = ({"name": name, "settings": f"method={name}"} for name in ("simclr", "byol"))
    assert list(unequal(compared(xmoco | {"settings": ""}, simclr, byol))) == []
    larger = byol | {"settings": "method=byol eval_size=48"}
    assert list(unequal(compared(xmoco, swav, simclr, larger))) == [
        "Views per image: 2 of 32 px and 4 of 16 px for SwAV; 2 of 32 px for all others.",
        "Batch size: 32 for XMoCo; 64 for all others.",
        "Evaluation size: 48 px for byol; 32 px for all others.",
    ]


def test_who_learns_labels_is_not_among_those_compared() -> None:
    rows = [{"name": name, "settings": f"method={name}"} for name in ("supervised", "byol", "mnn")]
    told = " ".join(notes(compared(*rows)))
    assert "0 of 1 pairs of rows are ranked as in the paper (kNN);" in told
    assert "the best row is mnn here, byol in the paper." in told


def test_groups_are_told_apart() -> None:
    held = "validation, held out of the training images"
    assert [filled.group for filled in fill_all(TABLE, RECORDS)] == [
        GROUP,
        GROUP._replace(epochs=4),
        GROUP._replace(split=held),
    ]
    shown = fill(TABLE, RECORDS, GROUP._replace(epochs=4))
    assert [record.value for record in shown.records] == [1.0]
    words = str(GROUP._replace(split=held, held_out_share=0.25, epochs=1))
    told = "trained on patterns for 1 epoch, evaluated on a held-out 25 % of the training images"
    assert words == told


def test_every_number_has_a_cell_in_the_csv(filled: Filled) -> None:
    rows = list(csv.DictReader(io.StringIO(csv_text(filled))))
    first = rows[0]
    assert first["ξ"] == "0.5"
    assert float(first["kNN (k = 20) (%) mean"]) == 51.0
    assert float(first["kNN (k = 20) (%) deviation"]) == pytest.approx(np.std([50, 52], ddof=1))
    assert first["kNN (k = 20) (%) seeds"] == "2"
    assert float(first["paper: memory (GB)"]) == 4.0
    assert (rows[1]["kNN (k = 20) (%) mean"], rows[1]["kNN (k = 20) (%) seeds"]) == ("", "0")
    assert rows[1]["paper: memory (GB)"] == ""


figures = st.lists(st.floats(0, 100).map(lambda f: round(f, 1)), min_size=2, max_size=7)


@settings(max_examples=30, deadline=None)
@given(figures, st.data())
def test_agreement_is_kendalls(paper: list[float], data: st.DataObject) -> None:
    """τ is the share of pairs in the same order less the share of those in the other."""
    unique = dict.fromkeys(paper)
    values = data.draw(st.permutations([10.0 + place for place in range(len(unique))]))
    rows = [
        {"name": str(place), "settings": f"positive_mass=0.{place + 1}", "paper": [figure, None]}
        for place, figure in enumerate(unique)
    ]
    own = Table.model_validate(TABLE.model_dump() | {"rows": rows})
    cells = fill(own, [], GROUP)
    column = own.measured[0]
    lines = [
        Line(line.row, {column: Cell({0: value})})
        for line, value in zip(cells.lines, values, strict=True)
    ]
    told = list(agreements(Filled(own, GROUP, lines, [])))
    pairs = len(values) * (len(values) - 1) // 2
    if not pairs:
        assert told == []
        return
    same = round((kendalltau(list(unique), values).statistic + 1) / 2 * pairs)
    assert f"By kNN (k = 20), {same} of {pairs} pairs of rows are ranked as in the paper" in told[0]
    best, there = int(np.argmax(values)), int(np.argmax(list(unique)))
    assert told[0].endswith(f"the best row is {best} here, {there} in the paper.")


def test_the_picture_has_labels_and_honest_scales(filled: Filled) -> None:
    figure = picture(filled)
    panels = {axes.get_title(loc="left"): axes for axes in figure.axes}
    assert list(panels) == [
        "measured",
        "paper, ImageNet",
        "measured: training time",
        "paper, ImageNet: memory",
    ]
    spans = []
    for title in ("measured", "paper, ImageNet"):
        low, high = panels[title].get_ylim()
        spans.append(high - low)
        assert low >= 0
        assert high <= 100
        assert panels[title].get_ylabel() == "accuracy, %"
    assert spans[0] == pytest.approx(spans[1])  # a point is as high in either
    assert panels["measured: training time"].get_ylim()[0] == 0
    assert panels["measured: training time"].get_ylabel() == "s"
    for axes in figure.axes:
        assert axes.get_xlabel() == "ξ"
        assert [tick.get_text() for tick in axes.get_xticklabels()] == ["0.5", "0.7", "0.9", "7"]
    low, high = panels["measured"].get_ylim()
    deviation = statistics.stdev([50.0, 52.0])
    assert low <= 51 - deviation
    assert high >= 60.04
    assert to_png(figure).startswith(b"\x89PNG")


def test_a_picture_of_nothing_says_so() -> None:
    own = Table.model_validate(
        TABLE.model_dump() | {"paper_columns": [], "rows": [{"name": "$a_b$"}]}
    )
    figure = picture(fill(own, [], GROUP))
    assert figure.axes == []
    assert figure.get_supxlabel() == "nothing measured yet"


@pytest.mark.parametrize("name", table_names())
def test_the_papers_figures_of_every_table_can_be_drawn(name: str) -> None:
    own = read_table(name)
    shown = fill(own, [], GROUP)
    assert bool(picture(shown).axes) == bool(own.paper_columns)
    assert markdown(shown).count("\n") == len(own.rows) + 1
