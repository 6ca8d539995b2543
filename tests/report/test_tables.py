"""Transfer tables: the paper's figures and marks are the paper's; measured rows come from records.

Markdown is read back by markdown-it, the pictures by their texts' places.
"""

import io
import json
import re
from collections.abc import Iterator, Sequence
from html import unescape
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from matplotlib.figure import Figure
from PIL import Image

from xmoco.data.trees import printable
from xmoco.errors import UserError
from xmoco.evaluate.grid import GRIDS
from xmoco.records import Record, append_records
from xmoco.report import tables
from xmoco.report.tables import (
    PAPER_PROTOCOLS,
    Cell,
    Column,
    Mode,
    Row,
    Setting,
    Table,
    draw_transfer,
    read_transfer,
    transfer_tables,
)

PAPER = Path(__file__).parents[3] / "shared" / "paper" / "xmoco.tex"
PAPER_LABELS: dict[Mode, str] = {
    "frozen": "tab:frozen_logistic_regression",
    "end to end": "tab:classification_end_to_end",
}
# Where the paper's own marks break its rule: of Flowers it underlines the third instead of the
# second; the others equal a second that is underlined, and are not.
DEVIATIONS: dict[tuple[str, str, str], str | None] = {
    ("frozen", "SwAV+UTOA", "CIFAR10"): None,
    ("frozen", "SwAV+UTOA", "Flowers"): None,
    ("frozen", "XMoCo", "Flowers"): "second",
    ("end to end", "SimCLR-v1", "CIFAR10"): None,
    ("end to end", "SwAV+UTOA", "VOC2007"): None,
}


def record(
    value: float = 80.0,
    subject: str = "xmoco",
    *,
    measure: str = "transfer_frozen",
    set: str = "Pets",
    metric: str = "mean per class",
    backbone: str = "resnet50",
    epoch: int = 200,
    size: int = 224,
    crop_size: int | None = None,
    data: str = "pets (train)",
    name: str = "transfer, frozen",
    digest: str | None = None,
    labelled: bool | None = None,
    seed: int = 0,
) -> Record:
    protocol = {
        "data": data,
        "backbone": backbone,
        "size": size,
        "epoch": epoch,
        "name": name,
        "set": set,
        "metric": metric,
        "judged_images": 3669,
    }
    told = {"crop_size": crop_size, "digest": digest, "labelled": labelled}
    protocol |= {fact: value for fact, value in told.items() if value is not None}
    return Record(measure, value, "%", subject, "pets-resnet50", protocol, seed)


def small(value: float, subject: str = "xmoco", **details: Any) -> Record:
    return record(value, subject, **{"backbone": "resnet18", "size": 32} | details)


def end_to_end(value: float, subject: str = "xmoco", **details: Any) -> Record:
    name = "transfer, end to end (small grid)"
    return record(value, subject, **{"measure": "transfer_end_to_end", "name": name} | details)


def file_of(folder: Path, records: Sequence[Record], name: str = "records.jsonl") -> Path:
    path = folder / name
    append_records(path, records)
    return path


class Rendered:
    """A Markdown table as a reader sees it: texts and html of its cells."""

    def __init__(self, markdown: str) -> None:
        html = MarkdownIt("commonmark").enable("table").render(markdown)
        lines = re.findall(r"<tr>(.*?)</tr>", html, re.DOTALL)
        grid = [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", line, re.DOTALL) for line in lines]
        self.html = html
        self.heads = [tuple(map(unescape, head.split("<br>"))) for head in grid[0][1:]]
        self.lines = {unescape(line[0]): line[1:] for line in grid[1:]}  # later rows win
        self.order = [unescape(line[0]) for line in grid[1:]]

    def cell(self, label: str, name: str) -> str:
        columns = [head[0] for head in self.heads]
        return self.lines[label][columns.index(name)]


def render(folder: Path, *records: Record, mode: Mode = "frozen") -> Rendered:
    file = folder / "records.jsonl"
    file.unlink(missing_ok=True)
    append_records(file, records)
    return Rendered(transfer_tables(read_transfer([file]))[mode])


XMOCO, XMOCO_SMALL = "XMoCo, ResNet-50, 200 epochs", "XMoCo, ResNet-18, 200 epochs"


# The paper's rows


def paper_cells(mode: Mode) -> Iterator[tuple[str, str, float, str | None]]:
    """Method, set, value and mark of every cell, read from the paper's source."""
    found = re.findall(r"\\begin\{table\*\}.*?\\end\{table\*\}", PAPER.read_text(), re.DOTALL)
    (table,) = (text for text in found if PAPER_LABELS[mode] in text)
    lines = [
        [cell.replace(r"\hline", "").strip() for cell in line.split("&")]
        for line in table.split(r"\\")
    ]
    lines = [line for line in lines if len(line) == 11]
    sets = lines[0][1:]
    for method, *cells in lines[1:]:
        name = re.sub(r"\\cite\{.*?\}|\(ours\)|[{}*]", "", method).strip()
        for column, cell in zip(sets, cells, strict=True):
            (value,) = re.findall(r"\d+\.\d", cell)
            mark = "best" if "textbf" in cell else "second" if "itabold" in cell else None
            yield name, column, float(value), mark


def drawn_cells(rendered: Rendered) -> dict[tuple[str, str], tuple[float, str | None]]:
    """Value and mark of the paper's cells as rendered."""
    marks = {"strong": "best", "u": "second"}
    found = {}
    for label in rendered.order[1:19]:
        for (name, _), cell in zip(rendered.heads, rendered.lines[label], strict=True):
            tag = re.match(r"<(\w+)>", cell)
            value = float(re.sub(r"<.*?>", "", cell))
            found[label, name] = value, marks[tag[1]] if tag else None
    return found


@pytest.mark.skipif(not PAPER.is_file(), reason="the paper's source is not here")
@pytest.mark.parametrize("mode", ["frozen", "end to end"])
def test_figures_and_marks_are_the_papers(mode: Mode, tmp_path: Path) -> None:
    rendered = render(tmp_path, small(50), end_to_end(50), mode=mode)
    drawn = drawn_cells(rendered)
    paper = {(method, name): (value, mark) for method, name, value, mark in paper_cells(mode)}
    assert list(drawn) == list(paper)  # in the paper's order
    assert len(paper) == 18 * 10
    assert {cell: value for cell, (value, _) in drawn.items()} == {
        cell: value for cell, (value, _) in paper.items()
    }
    otherwise = {(mode, *cell): mark for cell, (_, mark) in paper.items() if mark != drawn[cell][1]}
    assert otherwise == {cell: mark for cell, mark in DEVIATIONS.items() if cell[0] == mode}


def test_different_weights_of_one_seed_have_rows_of_their_own(tmp_path: Path) -> None:
    rendered = render(
        tmp_path,
        record(10, digest="aaaaaa111111"),
        record(20, digest="bbbbbb222222"),
        record(25, digest="bbbbbb222222"),  # measured again
        record(30, digest="aaaaaa111111", set="Flowers"),
        small(50, digest="cccccc333333"),
        small(52, digest="dddddd444444", seed=1),
    )
    first, second = (f"{XMOCO} ({digest})" for digest in ("aaaaaa", "bbbbbb"))
    assert XMOCO not in rendered.lines
    assert [rendered.cell(row, "Pets") for row in (first, second)] == ["10.0", "25.0"]
    assert [rendered.cell(row, "Flowers")[:4] for row in (first, second)] == ["30.0", "–"]
    assert rendered.cell(XMOCO_SMALL, "Pets").startswith("51.0 ± ")  # seeds of one method
    # An older record, which does not tell its weights, is of the same row.
    assert render(tmp_path, record(10), record(20, digest="a")).cell(XMOCO, "Pets") == "20.0"


def test_a_few_cells_known_by_heart(tmp_path: Path) -> None:
    rendered = render(tmp_path, small(50))
    assert rendered.cell("XMoCo", "Aircraft") == "<strong>62.9</strong>"
    assert rendered.cell("BarlowT", "Aircraft") == "<u>57.0</u>"
    assert rendered.cell("SwAV", "CIFAR10") == rendered.cell("DeepCluster-v2", "CIFAR10")
    assert rendered.cell("SwAV", "CIFAR10") == "<u>94.0</u>"
    assert rendered.cell("Supervised", "Pets") == "91.5"  # the best, but it learnt from labels
    assert rendered.heads == [
        ("Aircraft", "mean per class"),
        ("Caltech101", "mean per class"),
        ("Cars", "top-1"),
        ("CIFAR10", "top-1"),
        ("CIFAR100", "top-1"),
        ("DTD", "top-1"),
        ("Flowers", "mean per class"),
        ("Pets", "mean per class"),
        ("SUN397", "top-1"),
        ("VOC2007", "11-point mAP"),
    ]


def test_the_papers_protocols_have_the_names_that_evaluation_gives() -> None:
    grid = GRIDS["paper"]
    assert grid.protocol(grid.points[0]).name == PAPER_PROTOCOLS["end to end"]


# Measured rows


def test_measured_rows_stand_in_blocks_after_the_papers(tmp_path: Path) -> None:
    rendered = render(
        tmp_path,
        small(60, epoch=1),
        record(89.0),
        small(20, "untrained", epoch=0),
        small(55, "mocov2plus"),
        small(70, "supervised"),
        record(92.0, "torchvision:resnet50", epoch=0),
        record(50, "simclr", backbone="resnet50w2", epoch=0),
    )
    assert rendered.order[0] == "<em>Paper: ResNet-50, 224 px</em>"
    assert rendered.order[18:] == [
        "XMoCo",
        "<em>Measured: ResNet-18, 32 px; transfer, frozen</em>",
        "XMoCo, ResNet-18, 1 epoch",
        "untrained, ResNet-18",
        "MoCo v2+, ResNet-18, 200 epochs",
        "Supervised, ResNet-18, 200 epochs",
        "<em>Measured: ResNet-50, 224 px; transfer, frozen</em>",
        XMOCO,
        "torchvision:resnet50, ResNet-50",
        "<em>Measured: ResNet-50w2, 224 px; transfer, frozen</em>",
        "SimCLR, ResNet-50w2",
    ]
    assert rendered.cell(XMOCO, "Aircraft") == "–"
    assert "Rows compare fully only with the same backbone and images." in rendered.html
    assert "Pets – pets (train)" in rendered.html


def test_seeds_are_averaged(tmp_path: Path) -> None:
    values = [60.13, 61.2, 59.87]
    rendered = render(tmp_path, *(small(value, seed=i) for i, value in enumerate(values)))
    expected = f"{np.mean(values):.1f} ± {np.std(values, ddof=1):.1f}"
    assert rendered.cell(XMOCO_SMALL, "Pets") == expected


def test_of_a_seed_measured_again_the_last_counts(tmp_path: Path) -> None:
    rendered = render(tmp_path, small(60), small(70, seed=1), small(62), small(72, seed=1))
    assert rendered.cell(XMOCO_SMALL, "Pets") == "67.0 ± 7.1"
    assert render(tmp_path, small(60), small(62)).cell(XMOCO_SMALL, "Pets") == "62.0"


def test_no_mean_mixes_images(tmp_path: Path) -> None:
    rendered = render(tmp_path, small(60, data="old"), small(70, seed=1, data="new"))
    assert rendered.cell(XMOCO_SMALL, "Pets") == "70.0"
    assert "Pets – new." in rendered.html
    assert "– old" not in rendered.html


def test_rows_are_of_one_method_epochs_and_setting(tmp_path: Path) -> None:
    rendered = render(tmp_path, small(60), small(61, epoch=100), small(62, size=64))
    assert rendered.order[-5:] == [
        "<em>Measured: ResNet-18, 32 px; transfer, frozen</em>",
        XMOCO_SMALL,
        "XMoCo, ResNet-18, 100 epochs",
        "<em>Measured: ResNet-18, 64 px; transfer, frozen</em>",
        XMOCO_SMALL,
    ]


def test_rows_of_other_crops_do_not_compare(tmp_path: Path) -> None:
    rendered = render(
        tmp_path,
        small(60, size=48),
        small(61, size=48, crop_size=32, seed=1),
        small(62, size=48, crop_size=48, seed=2),
    )
    assert rendered.order[-4:] == [
        "<em>Measured: ResNet-18, 48 px; transfer, frozen</em>",
        XMOCO_SMALL,
        "<em>Measured: ResNet-18, 48 px (trained on 32 px); transfer, frozen</em>",
        XMOCO_SMALL,
    ]
    assert "61.0 ± 1.4" in rendered.html  # the two of the same crops


def test_sets_of_ones_own_and_other_metrics_are_further_columns(tmp_path: Path) -> None:
    own = small(75, set="fruit", metric="top-1", data="folder fruit")
    rendered = render(tmp_path, small(60), own, small(80, metric="top-1"))
    assert rendered.heads[10:] == [("fruit", "top-1"), ("Pets", "top-1")]
    assert rendered.lines["BYOL"][10:] == ["–", "–"]
    assert rendered.lines[XMOCO_SMALL][7:] == ["60.0", "–", "–", "75.0", "80.0"]


def test_records_of_several_files_meet_in_one_table(tmp_path: Path) -> None:
    files = [
        file_of(tmp_path, [small(60)], "a.jsonl"),
        file_of(tmp_path, [small(62, seed=1)], "b.jsonl"),
    ]
    rendered = Rendered(transfer_tables(read_transfer(files))["frozen"])
    assert rendered.cell(XMOCO_SMALL, "Pets") == "61.0 ± 1.4"


# Best and second


def test_same_setting_competes_with_the_paper(tmp_path: Path) -> None:
    rendered = render(tmp_path, record(89.6), record(95, "supervised"))
    assert rendered.cell(XMOCO, "Pets") == "<strong>89.6</strong>"
    assert rendered.cell("XMoCo", "Pets") == "<u>89.5</u>"
    assert rendered.cell("DeepCluster-v2", "Pets") == "89.4"


@pytest.mark.parametrize(
    "other",
    [
        record(99, backbone="resnet18"),
        record(99, size=32),
        record(99, name="transfer, frozen (shortened)"),
        record(99, "supervised"),
        record(99, "torchvision:resnet50"),
        record(99, metric="top-1"),
    ],
)
def test_other_settings_and_labelled_backbones_do_not(other: Record, tmp_path: Path) -> None:
    rendered = render(tmp_path, other)
    assert rendered.cell("XMoCo", "Pets") == "<strong>89.5</strong>"
    assert "99.0" in rendered.lines[rendered.order[-1]]  # a lone row has no mark


def test_a_classifier_competes_with_nobody_whatever_its_file_is_called(tmp_path: Path) -> None:
    rendered = render(
        tmp_path, small(50, "a"), small(40, "b"), small(90, "resnet18-f37072fd.pth", labelled=True)
    )
    cells = [rendered.lines[label][7] for label in rendered.order[-3:]]
    assert cells == ["<strong>50.0</strong>", "<u>40.0</u>", "90.0"]


def test_equal_figures_have_equal_marks(tmp_path: Path) -> None:
    rendered = render(
        tmp_path,
        small(60.04, "a"),
        small(59.96, "b"),
        small(50.0, "c"),
        small(49.96, "d"),
        small(40.0, "e"),
    )
    cells = [rendered.lines[label][7] for label in rendered.order[-5:]]
    best, second = "<strong>60.0</strong>", "<u>50.0</u>"
    assert cells == [best, best, second, second, "40.0"]


TENTHS = st.integers(0, 12).map(lambda tenths: tenths / 10)
ROWS = st.lists(st.tuples(TENTHS, st.booleans(), st.sampled_from([32, 224])), max_size=8)


@given(ROWS)
def test_marks_follow_the_rule(drawn: list[tuple[float, bool, int]]) -> None:
    column = Column("Pets", "top-1")
    rows = [
        Row(str(i), Setting("resnet18", size, "transfer"), True, labelled, {column: Cell(value)})
        for i, (value, labelled, size) in enumerate(drawn)
    ]
    table = Table("title", [column], rows, [])
    for row, (value, labelled, size) in zip(rows, drawn, strict=True):
        compared = [other for other, learnt, of_size in drawn if not learnt and of_size == size]
        better = {other for other in compared if other > value}
        expected = None
        if not labelled and len(compared) > 1:
            expected = {0: "best", 1: "second"}.get(len(better))
        assert table.mark(row, column) == expected


# Markdown


@settings(deadline=None, max_examples=60)
@given(st.text(min_size=1, max_size=12).map(str.strip).filter(bool))
def test_any_name_stands_for_itself(name: str) -> None:
    fields = json.loads(small(60, name, set=name, data=name, backbone=name).json())
    markdown = transfer_tables([tables.Transfer.model_validate(fields)])["frozen"]
    shown = printable(name)
    rendered = Rendered(markdown)
    assert [head[0] for head in rendered.heads[10:]] == ([] if shown == "Pets" else [shown])
    assert rendered.order[-1].startswith(f"{tables.METHOD_NAMES.get(shown, shown)}, ")
    assert len(rendered.lines[rendered.order[-1]]) == 11
    assert f"{shown} – {shown}." in unescape(rendered.html)


# Files


def test_modes_with_records_are_drawn(tmp_path: Path) -> None:
    file = file_of(tmp_path, [small(60), end_to_end(70)])
    out = tmp_path / "deep" / "out"
    stems = ("transfer-frozen", "transfer-end-to-end")
    expected = [out / f"{stem}{suffix}" for stem in stems for suffix in (".md", ".png")]
    assert draw_transfer([file], out) == expected
    assert sorted(out.iterdir()) == sorted(expected)
    text = expected[2].read_text(encoding="utf-8")
    assert text == transfer_tables(read_transfer([file]))["end to end"]
    assert "| 70.0 |" in text

    only = file_of(tmp_path, [small(60)], "only.jsonl")
    assert len(draw_transfer([only], tmp_path / "only")) == 2
    assert draw_transfer([file], tmp_path / "asked", mode="end to end")[0].name == expected[2].name
    assert len(list((tmp_path / "asked").iterdir())) == 2


def test_drawn_files_are_drawn_again(tmp_path: Path) -> None:
    file = file_of(tmp_path, [small(60)])
    markdown, _ = draw_transfer([file], tmp_path)
    append_records(file, [small(65)])
    draw_transfer([file], tmp_path)
    assert "| 65.0 |" in markdown.read_text()


def test_other_lines_are_passed_over(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    training = {"step": 3, "epoch": 0.5, "time": "2026-11-15T05:40:12Z", "values": {"loss": 1.0}}
    knn = Record("knn_top1", 60.0, "%", "xmoco", "pets", {"k": 20}, 0)
    lines = [json.dumps(training), "", knn.json(), small(60).json()]
    file.write_text("\n".join(lines))
    assert [found.value for found in read_transfer([file])] == [60]


def changed(**fields: Any) -> str:
    """A record with other values; None for a field of the protocol leaves it out."""
    content = json.loads(small(60).json())
    protocol = content["protocol"] | fields.pop("protocol", {})
    kept = {key: value for key, value in protocol.items() if value is not None}
    return json.dumps(content | {"protocol": kept} | fields)


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("{", "line 2 is not json"),
        ("[" * 100_000, "line 2 is not json"),
        ("3", "line 2 holds no record"),
        ('["measure"]', "line 2 holds no record"),
        ('{"value": 3}', "line 2 holds no record"),
        ('{"measure": 3}', "line 2 holds no record"),
        (changed(protocol={"set": None}), r"line 2: the record lacks protocol\.set"),
        (changed(protocol={"set": " "}), r"line 2: protocol\.set = ' ' "),
        (changed(protocol={"set": "\ud800"}), r"line 2: protocol\.set = '\\ud800' "),
        (changed(protocol={"size": "32"}), r"line 2: protocol\.size = '32' must be a valid int"),
        (changed(protocol={"epoch": -1}), r"line 2: protocol\.epoch = -1 must be greater than"),
        (changed(value="60"), "line 2: value = '60' must be a valid number"),
        (changed(value=101), "line 2: value = 101 must be less than or equal to 100"),
        (changed(value=float("nan")), "line 2: value = nan must be"),
        (changed(seed=None), "line 2: seed = None must be a valid integer"),
    ],
)
def test_a_bad_line_is_named(line: str, sentence: str, tmp_path: Path) -> None:
    file = tmp_path / "bad.jsonl"
    file.write_text(small(60).json() + "\n" + line + "\n")
    with pytest.raises(UserError, match=rf"bad\.jsonl, {sentence}"):
        draw_transfer([file], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no file of records at .*missing\.jsonl"):
        draw_transfer([tmp_path / "missing.jsonl"], tmp_path / "out")
    with pytest.raises(UserError, match=r"cannot read .*directory"):
        draw_transfer([tmp_path], tmp_path / "out")
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\xff")
    with pytest.raises(UserError, match=r"picture\.png is not a text file"):
        draw_transfer([tmp_path / "picture.png"], tmp_path / "out")


def test_without_records_the_command_that_makes_them_is_told(tmp_path: Path) -> None:
    knn = Record("knn_top1", 60.0, "%", "xmoco", "pets", {"k": 20}, 0)
    other = file_of(tmp_path, [knn], "other.jsonl")
    command = "`xmoco evaluate transfer WEIGHTS SET --records FILE`"
    with pytest.raises(UserError, match=rf"no records of transfer in .*other\.jsonl.*{command}"):
        draw_transfer([other], tmp_path / "out")
    frozen = file_of(tmp_path, [small(60)], "frozen.jsonl")
    with pytest.raises(UserError, match=r"transfer end to end in .* SET --mode end-to-end --rec"):
        draw_transfer([frozen], tmp_path / "out", mode="end to end")
    assert not (tmp_path / "out").exists()


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    file = file_of(tmp_path, [small(60)])
    with pytest.raises(UserError, match="cannot make the folder"):
        draw_transfer([file], file)


# Pictures


def drawn_figure(folder: Path, monkeypatch: pytest.MonkeyPatch, *records: Record) -> Figure:
    kept: list[Figure] = []

    def keep(figure: Figure) -> bytes:
        kept.append(figure)
        return b""

    monkeypatch.setattr(tables, "to_png", keep)
    draw_transfer([file_of(folder, records)], folder)
    return kept[0]


MANY = [
    *(small(60 + i, seed=i) for i in range(3)),
    small(50, "mocov2plus"),
    small(48, "a method with a name that is longer than any method should ever have"),
    small(75, set="all the $fruit$ of the garden and _some_ of the forest", metric="top-1"),
    small(33, set="中文", metric="top-1", data="a long name " * 40),
    record(89.6),
]


@pytest.mark.filterwarnings("ignore:Glyph")  # matplotlib's font has no Chinese letters
def test_nothing_overlaps_in_the_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figure = drawn_figure(tmp_path, monkeypatch, *MANY)
    texts = figure.axes[0].texts
    boxes = [text.get_window_extent() for text in texts]
    for (one, box), (other, box_of_other) in combinations(zip(texts, boxes, strict=True), 2):
        assert not box.overlaps(box_of_other), f"{one.get_text()!r} and {other.get_text()!r}"
    width, height = figure.bbox.width, figure.bbox.height
    for box in boxes:
        assert 0 < box.x0 < box.x1 < width
        assert 0 < box.y0 < box.y1 < height


@pytest.mark.filterwarnings("ignore:Glyph")
def test_the_picture_shows_what_the_markdown_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    axes = drawn_figure(tmp_path, monkeypatch, *MANY).axes[0]
    html = render(tmp_path, *MANY).html
    bold = [text.get_text() for text in axes.texts if text.get_weight() == "bold"]
    figures = [text for text in bold if re.fullmatch(r"[\d.]+( ± [\d.]+)?", text)]
    assert figures == re.findall(r"<strong>(.*?)</strong>", html)
    rules = 1 + 3  # below the heads and each block
    assert len(axes.lines) - rules == html.count("<u>")
    assert sum(text.get_text() == "–" for text in axes.texts) == html.count(">–<")
    assert len(axes.patches) == 4  # measured rows


def test_the_picture_is_a_png_of_readable_size(tmp_path: Path) -> None:
    _, picture = draw_transfer([file_of(tmp_path, [small(60)])], tmp_path)
    with Image.open(io.BytesIO(picture.read_bytes())) as image:
        assert image.format == "PNG"
        assert 1500 < image.width < 2500
        assert 1200 < image.height < 1800
        pixels = np.asarray(image.convert("RGB")).reshape(-1, 3)
    blueish = (pixels[:, 2] > pixels[:, 0]) & (pixels[:, 0] > 200)
    assert 0.01 < blueish.mean() < 0.1  # the one measured row is tinted
