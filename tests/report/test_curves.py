"""Curves are drawn from whatever a run folder holds, on scales that do not flatter."""

import json
import math
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import matplotlib
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from xmoco.errors import UserError
from xmoco.report import curves
from xmoco.report.curves import DARK, LIGHT, claims_png, draw_curves, draw_panel, panel_svg, to_png
from xmoco.report.history import Series, read_history
from xmoco.report.panels import Panel, claim_panels, panels

XMOCO = "method: {name: xmoco, bank_length: 1024}\n"


def training(step: int, **values: float) -> dict[str, Any]:
    return {"step": step, "epoch": step / 10, "time": "2026-11-15T05:40:12Z", "values": values}


def knn(subject: str, epoch: int, value: float, k: int = 200) -> dict[str, Any]:
    protocol = {"epoch": epoch, "k": k, "features": "backbone"}
    return {
        "measure": "knn_top1",
        "value": value,
        "unit": "%",
        "subject": subject,
        "protocol": protocol,
        "seed": 0,
    }


def folder(path: Path, *lines: dict[str, Any], levels: dict[str, float] | None = None) -> Path:
    (path / "config.yaml").write_text(XMOCO)
    if levels is not None:
        method = {"title": "XMoCo", "reference_levels": levels}
        (path / "environment.json").write_text(json.dumps({"method": method}))
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def titles(run: Path) -> list[str]:
    return [panel.title for panel in panels(read_history(run))]


def test_a_folder_without_metrics_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has no metrics\.jsonl"):
        draw_curves(tmp_path)


def test_a_resumed_run_counts_repeated_steps_once_and_the_later_line_wins(tmp_path: Path) -> None:
    run = folder(
        tmp_path,
        *(training(step, loss=9.0) for step in (10, 20, 30)),
        *(training(step, loss=float(step)) for step in (20, 30, 40)),
    )
    assert read_history(run).training["loss"] == Series([1, 2, 3, 4], [9, 20, 30, 40])


def test_half_a_line_left_by_a_kill_is_passed_over(tmp_path: Path) -> None:
    run = folder(tmp_path, training(10, loss=3.0))
    with (run / "metrics.jsonl").open("a") as metrics:
        metrics.write('{"step": 20, "epoch": 2.0, "val')
    assert read_history(run).training["loss"] == Series([1.0], [3.0])


def test_panels_follow_what_was_logged(tmp_path: Path) -> None:
    mocov2plus = {"loss": 6.0, "loss/source": 3.0, "loss/target": 3.0, "learning_rate": 0.1}
    run = folder(tmp_path, training(10, **mocov2plus, odd_gauge=4.0))
    assert titles(run) == ["Loss", "Terms of the loss", "Learning rate", "odd gauge"]


def test_levels_are_the_method_s_and_held_against_single_terms(tmp_path: Path) -> None:
    levels = {"chance": math.log(1025), "collapse": 4.0}
    run = folder(tmp_path, training(10, **{"loss": 6.0, "loss/source": 3.0}), levels=levels)
    total, terms = panels(read_history(run))
    assert total.levels == {}
    assert terms.levels == levels


def test_a_loss_without_terms_is_itself_held_against_the_levels(tmp_path: Path) -> None:
    run = folder(tmp_path, training(10, loss=6.0), levels={"chance": 6.9})
    assert panels(read_history(run))[0].levels == {"chance": 6.9}


@pytest.mark.parametrize("levels", [None, {}])
def test_no_levels_where_the_method_named_none(
    tmp_path: Path, levels: dict[str, float] | None
) -> None:
    run = folder(tmp_path, training(10, loss=6.0), levels=levels)
    assert panels(read_history(run))[0].levels == {}


def test_knn_shows_the_run_as_a_curve_and_others_as_levels(tmp_path: Path) -> None:
    run = folder(
        tmp_path,
        knn("raw pixels", 0, 25.0),
        knn("untrained", 0, 20.0),
        knn("xmoco", 1, 40.0),
        knn("xmoco", 2, 60.0),
        knn("xmoco", 2, 99.0, k=10),  # another protocol: does not compare
    )
    (panel,) = panels(read_history(run))
    assert panel.curves == {"xmoco": Series([1, 2], [40, 60])}
    assert panel.levels == {"raw pixels": 25.0, "untrained": 20.0}


@pytest.mark.parametrize(
    ("line", "low", "high"),
    [
        (knn("xmoco", 1, 64.0), 0, 100),
        (training(10, positive_probability=0.2), 0, 1),
        (training(10, waiting=0.02), 0, 100),
        (training(10, **{"fill/queue": 0.5}), 0, 100),
        (training(10, images_per_second=1500.0), 0, 1500),
        (training(10, consistency_gap=-0.5), -0.5, 0),
    ],
)
def test_scales_are_honest(tmp_path: Path, line: dict[str, Any], low: float, high: float) -> None:
    (axes,) = draw_curves(folder(tmp_path, line)).axes
    bottom, top = axes.get_ylim()
    assert bottom <= low
    assert top >= high


def test_shares_are_shown_in_percent(tmp_path: Path) -> None:
    (panel,) = panels(read_history(folder(tmp_path, training(10, waiting=0.25))))
    assert panel.unit == "%"
    assert panel.curves["waiting"].values == [25.0]


def test_how_full_a_memory_is_names_the_memory(tmp_path: Path) -> None:
    (panel,) = panels(read_history(folder(tmp_path, training(10, **{"fill/queue": 0.25}))))
    assert (panel.title, panel.unit) == ("Filling of the queue", "%")
    assert panel.curves["fill/queue"].values == [25.0]


def test_every_panel_names_its_axes_and_a_single_point_is_visible(tmp_path: Path) -> None:
    run = folder(tmp_path, training(10, loss=6.0, effective_rank=5.0), knn("xmoco", 1, 50.0))
    for axes in draw_curves(run).axes:
        assert axes.get_xlabel() == "epoch"
        assert axes.get_ylabel()
        assert axes.get_title(loc="left")
        assert axes.lines[0].get_marker() == "o"
        assert axes.get_xlim()[0] <= 0 < axes.get_xlim()[1]  # it is seen how far into the run


def test_a_run_that_measured_nothing_says_so(tmp_path: Path) -> None:
    figure = draw_curves(folder(tmp_path))
    assert not figure.axes
    assert figure.texts[0].get_text() == "nothing measured yet"


def test_drawing_leaves_global_settings_alone(tmp_path: Path) -> None:
    before = dict(matplotlib.rcParams)
    png = to_png(draw_curves(folder(tmp_path, training(10, loss=6.0))))
    assert png.startswith(b"\x89PNG")
    assert dict(matplotlib.rcParams) == before


def test_a_name_with_dollar_signs_is_not_read_as_mathematics(tmp_path: Path) -> None:
    name = r"$\nonsense{$"
    run = folder(tmp_path, training(10, **{name: 1.0}), knn("xmoco", 1, 5.0), knn(name, 0, 1.0))
    assert to_png(draw_curves(run)).startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "name",
    ["by soft label", "a name as long as may", "a method whose name is long and has many words"],
)
def test_legends_hide_nothing(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """They stand below the axes and within the picture, and the axes of a page are all as large."""
    drawn: list[Axes] = []

    def keep(axes: Axes, panel: Panel, theme: Any) -> None:
        draw_panel(axes, panel, theme)
        drawn.append(axes)

    monkeypatch.setattr(curves, "draw_panel", keep)
    series = Series([1, 2], [3, 2])
    for lines in (1, 2, 6):
        named = {f"{name} {line}": series for line in range(lines - 1)}
        panel_svg(Panel("Loss", "nats", {name: series, **named}, {"chance": 2.5}))
        axes = drawn[-1]
        assert axes.figure is not None
        axes.figure.canvas.draw()
        legend = axes.get_legend()
        assert legend is not None
        area, label = legend.get_window_extent(), axes.xaxis.label.get_window_extent()
        assert 0 <= area.y0 < area.y1 <= label.y0
        assert 0 <= area.x0 < area.x1 <= axes.figure.bbox.width
    panel_svg(Panel("Loss", "nats", {name: series}))
    assert drawn[-1].get_legend() is None
    width, height = zip(*(axes.get_window_extent().size for axes in drawn), strict=True)
    assert width == pytest.approx([width[0]] * len(drawn))
    assert height == pytest.approx([height[0]] * len(drawn))


def test_a_panel_follows_the_screen() -> None:
    """Every colour of it has a name, which the two themes give their own."""
    svg = panel_svg(Panel("Loss", "nats", {"loss": Series([1, 2], [3, 2])}))
    rules = ElementTree.fromstring(svg).findtext(".//{*}style") or ""
    light, dark = rules.split("@media (prefers-color-scheme: dark)")
    for theme, said in ((LIGHT, light), (DARK, dark)):
        assert all(colour in said for colour in theme.colours)
    assert not re.findall("#[0-9a-f]{6}", svg.replace(rules, ""))


@pytest.mark.parametrize("style", ["fill", "stroke", "font-family"])
def test_what_looks_like_a_style_in_a_name_is_left_in_it(style: str) -> None:
    named = f"run {LIGHT.colours[0]}, {style}: {LIGHT.colours[0]}; more"
    svg = panel_svg(Panel("Loss", "nats", {named: Series([1], [3]), "loss": Series([1], [2])}))
    assert named in "".join(ElementTree.fromstring(svg).itertext())


@pytest.mark.filterwarnings("ignore:Glyph")
@given(st.text(alphabet=st.characters(), min_size=1, max_size=12))
@example("\ud800")  # fonts have no glyph for half of a pair
@example("\udcff")  # a byte of a file name that is not UTF-8
@example("\x00\n")
@example("Name")
@example(r"$\nonsense{$")
@example("_name")
@settings(max_examples=25, deadline=None)
def test_any_name_can_be_in_a_panel(name: str) -> None:
    """As a curve's, a level's, a title or a unit."""
    svg = panel_svg(Panel(name, name, {name: Series([1], [3])}, {name: 2.0}))
    words = "".join(ElementTree.fromstring(svg.encode()).itertext())
    if name.replace("_", "a").isalpha() and name.isascii():
        assert words.count(name) >= 4


numbers = st.floats(-1e6, 1e6) | st.just(math.nan)


@settings(max_examples=15, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 50), numbers), max_size=8))
def test_any_history_can_be_drawn(
    tmp_path_factory: pytest.TempPathFactory, points: list[tuple[int, float]]
) -> None:
    run = folder(
        tmp_path_factory.mktemp("run"), *(training(step, loss=value) for step, value in points)
    )
    figure = draw_curves(run)
    figure.canvas.draw()
    assert len(figure.axes) == min(1, len(points))


def measured(measure: str, *values: float) -> list[dict[str, Any]]:
    return [
        {"measure": measure, "value": value, "subject": "xmoco", "protocol": {"epoch": epoch}}
        for epoch, value in enumerate(values)
    ]


def test_claims_have_panels_with_what_they_are_to_be_compared_with(tmp_path: Path) -> None:
    run = folder(
        tmp_path,
        *measured("similarity_gap", 0.1, 0.2),
        *measured("similarity_gap_unrelated", 0.1, 0.4),
        *measured("similarity_evenness", 0.9, 0.8),
        *measured("label_evenness", 1.0, 1.0),
        *measured("similar_of_own_class", 10.0, 30.0),
        *measured("labelled_of_own_class", 11.0, 40.0),
        *measured("any_of_own_class", 9.5, 9.5),
    )
    gap, evenness, own_class = panels(read_history(run))
    assert gap.title == "|q_s·B_t − q_t·B_s|"
    assert gap.curves["two views of an image"] == Series([0, 1], [0.1, 0.2])
    assert gap.curves["views of two images"].values == [0.1, 0.4]
    assert 0 in gap.includes
    assert set(evenness.curves) == {"similarities", "soft labels"}
    assert evenness.includes == (0, 1)
    assert own_class.curves["by soft label"].values == [11.0, 40.0]
    assert (own_class.levels, own_class.includes) == ({"chance": 9.5}, (0, 100))


def test_claims_of_two_runs_stand_in_the_same_panels(tmp_path: Path) -> None:
    runs = {}
    for name, gap in (("XMoCo", 0.1), ("MoCo v2+", 0.3)):
        (tmp_path / name).mkdir()
        runs[name] = read_history(folder(tmp_path / name, *measured("similarity_gap", gap)))
    (panel,) = claim_panels(runs)
    assert {name: series.values for name, series in panel.curves.items()} == {
        "XMoCo, two views of an image": [0.1],
        "MoCo v2+, two views of an image": [0.3],
    }
    picture = claims_png(runs)
    assert picture is not None
    assert picture.startswith(b"\x89PNG")
    assert claims_png({}) is None


def test_a_method_has_one_colour_in_all_pictures(tmp_path: Path) -> None:
    """That of its kNN curve beside the other's, too; its curves differ in style."""
    runs = {}
    for name in ("XMoCo", "MoCo v2+"):
        (tmp_path / name).mkdir()
        lines = [*measured("similarity_gap", 0.1), *measured("similarity_gap_unrelated", 0.3)]
        runs[name] = read_history(folder(tmp_path / name, *lines))
    knn_panel = Panel("kNN accuracy", "%", dict.fromkeys(runs, Series([1], [50])))
    (claims,) = claim_panels(runs)
    drawn: dict[str, set[str]] = {}
    looks = []
    for panel in (knn_panel, claims):
        axes = Figure().add_subplot()
        draw_panel(axes, panel, LIGHT)
        for name, line in zip(panel.curves, axes.lines, strict=True):
            drawn.setdefault(name.partition(",")[0], set()).add(line.get_color())
            looks.append((panel, line.get_color(), line.get_linestyle()))
    assert drawn == {"XMoCo": {LIGHT.curves[0]}, "MoCo v2+": {LIGHT.curves[1]}}
    assert len({(id(panel), *look) for panel, *look in looks}) == len(looks)
