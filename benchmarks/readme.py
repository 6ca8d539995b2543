"""Write what no hand should: the tables of README.md and of the pages in docs/, and the picture.

    python benchmarks/readme.py                       # the tables, from recipes and records
    python benchmarks/readme.py --picture runs/demo   # also the pictures, from a run of the demo

A part of a page stands between ``<!-- name:begin -->`` and ``<!-- name:end -->``; the rest is left
alone. A test fails when a table no longer agrees with what it is made from.
"""

import argparse
import io
import json
import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from torch import Tensor

from pages.accuracy import (
    changed_recipes_table,
    eval_size_table,
    learning_tables,
    methods_table,
    protocols_tables,
    tuning_tables,
)
from pages.chance import chance
from pages.cluster import scaling_tables, shards_table
from pages.common import ROOT, Place
from pages.comparisons import comparison_tables, paper_tables
from pages.detection import (
    detection_tables,
    judging_tables,
    overfit_tables,
    training_tables,
)
from pages.effort import effort_table
from pages.faults import faults_table
from pages.front import headline, results_in_brief, speed_in_brief
from pages.gaps import gaps
from pages.gpu_tests import gpu_tests
from pages.plain import QUESTIONS, answer, other_tables
from pages.recipes import evaluation_protocols, list_of_tables, recipes_table
from pages.speed import speed_bounds, speed_tables
from xmoco import load_backbone
from xmoco.data.patterns import patterns
from xmoco.data.sources import open_images
from xmoco.demo import NAMES
from xmoco.evaluate.features import backbone_features
from xmoco.evaluate.knn import nearest_neighbours
from xmoco.report.curves import LIGHT, claims_png, draw_panel
from xmoco.report.history import read_history
from xmoco.report.panels import Panel
from xmoco.report.sheets import WRONG
from xmoco.train.run_folder import RunFolder

DOCS = ROOT / "docs"
RESULTS = ROOT / "benchmarks" / "results"
NEIGHBOURS = 8
SHOWN = "accuracies"
"""The key of a picture's text."""
GAP = 0.06  # around a picture, as a share of its cell


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--picture", type=Path, metavar="RUNS", help="the folder of a demo")
    options = parser.parse_args()
    for page in pages():
        text = page.read_text(encoding="utf-8")
        page.write_text(up_to_date(text, page), encoding="utf-8")
    print(f"wrote the tables of {', '.join(str(page.relative_to(ROOT)) for page in pages())}")
    if options.picture is not None:
        for name, draw in PICTURES.items():
            picture = of_few_colours(draw(options.picture), last_accuracies(options.picture))
            (DOCS / name).write_bytes(picture)
            print(f"wrote {DOCS / name}, {len(picture) / 1000:.0f} kB")


def pages() -> list[Path]:
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def up_to_date(text: str, page: Path, results: Path = RESULTS) -> str:
    """The page as it should be: all generated parts made anew."""
    place = Place(results, "" if page.parent == ROOT else "../")

    def made_anew(part: re.Match[str]) -> str:
        content = PARTS[part["name"]](place)
        lines = [part["begin"], *([content] if content else []), part["end"]]
        return "\n".join(lines)

    return GENERATED.sub(made_anew, text)


PARTS: dict[str, Callable[[Place], str]] = {
    "headline": headline,
    "results-in-brief": results_in_brief,
    "speed-in-brief": speed_in_brief,
    "recipes": recipes_table,
    "tables": list_of_tables,
    "evaluation-protocols": evaluation_protocols,
    "chance": chance,
    "gaps": gaps,
    "effort": effort_table,
    "demo": partial(learning_tables, pattern="demo.jsonl"),
    "learning": partial(learning_tables, pattern="recipe-*.jsonl"),
    "methods": methods_table,
    "protocols": protocols_tables,
    "changed-recipes": changed_recipes_table,
    "eval-size": eval_size_table,
    "tuning": tuning_tables,
    "comparisons": comparison_tables,
    "paper-tables": paper_tables,
    "detection": detection_tables,
    "detection-speed": training_tables,
    "detection-overfit": overfit_tables,
    "judging": judging_tables,
    "speed": speed_tables,
    "speed-bounds": speed_bounds,
    "scaling": scaling_tables,
    "shards": shards_table,
    **{name: partial(answer, question=question) for name, question in QUESTIONS.items()},
    "others": other_tables,
    "faults": faults_table,
    "gpu-tests": gpu_tests,
}
GENERATED = re.compile(
    r"(?P<begin><!-- (?P<name>[\w-]+):begin -->)\n.*?(?P<end><!-- (?P=name):end -->)", re.DOTALL
)


def demo_picture(runs: Path) -> bytes:
    """kNN over epochs beside the baselines, and what the XMoCo backbone finds alike."""
    figure = Figure(figsize=(11, 5.4), facecolor=LIGHT.paper, layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.05))
    draw_panel(left, knn_panel(runs), LIGHT)
    left.set_ylim(0, 100)
    draw_neighbours(right, runs / "xmoco")
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=120, facecolor=figure.get_facecolor())
    return picture.getvalue()


def similarities_picture(runs: Path) -> bytes:
    """What XMoCo and MoCo v2+ make of negatives."""
    histories = {NAMES[method]: read_history(runs / method) for method in ("xmoco", "mocov2plus")}
    picture = claims_png(histories)
    assert picture is not None
    return picture


PICTURES: dict[str, Callable[[Path], bytes]] = {
    "demo.png": demo_picture,
    "similarities.png": similarities_picture,
}


def of_few_colours(picture: bytes, shown: Mapping[str, float]) -> bytes:
    """256 are enough for them, and take a third of the space. The file holds what was ``shown``: a
    test compares it with the records."""
    small = io.BytesIO()
    drawn = Image.open(io.BytesIO(picture)).convert("RGB")
    told = PngInfo()
    told.add_text(SHOWN, json.dumps(shown))
    drawn.quantize(256).save(small, format="png", optimize=True, pnginfo=told)
    return small.getvalue()


def last_accuracies(runs: Path) -> dict[str, float]:
    """What kNN said of both backbones when their runs were over."""
    return {
        method: read_history(runs / method).knn()[method].values[-1]
        for method in ("xmoco", "mocov2plus")
    }


def knn_panel(runs: Path) -> Panel:
    """Both runs' kNN curves, each from its own records; the baselines are those of XMoCo's run."""
    curves = {
        NAMES[method]: read_history(runs / method).knn()[method]
        for method in ("xmoco", "mocov2plus")
    }
    measured = read_history(runs / "xmoco").knn()
    levels = {NAMES[name]: measured[name].values[-1] for name in ("raw pixels", "untrained")}
    return Panel("kNN accuracy on unseen patterns", "top-1, %", curves, levels, (0, 100))


def draw_neighbours(axes: Axes, run: Path) -> None:
    """The first test image of every family, and its nearest neighbours among training images."""
    train_images, train_labels, families = patterns("train")
    test_images, test_labels, _ = patterns("test")
    queries = torch.stack(
        [(test_labels == label).nonzero()[0, 0] for label in range(len(families))]
    )
    found = neighbours_of(queries, run)
    for row, query in enumerate(queries):
        axes.text(
            -0.1, row + 0.5, families[row], color=LIGHT.ink, fontsize=9, ha="right", va="center"
        )
        show(axes, 0, row, test_images[query])
        for rank, position in enumerate(found[row].tolist()):
            column = rank + 1.3
            show(axes, column, row, train_images[position])
            if train_labels[position] != row:
                corner = (column + GAP, row + GAP)
                frame = Rectangle(corner, 1 - 2 * GAP, 1 - 2 * GAP, fill=False)
                frame.set(edgecolor=WRONG, linewidth=2, linestyle=":")
                axes.add_patch(frame)
    axes.set(xlim=(0, NEIGHBOURS + 1.3), ylim=(len(families), 0), aspect="equal")
    axes.set_axis_off()
    title: dict[str, Any] = {"color": LIGHT.ink, "fontsize": 9, "va": "bottom"}
    axes.text(0.5, -0.1, "query", ha="center", **title)
    axes.text(1.33, -0.1, "nearest training images (dotted: another family)", **title)


def neighbours_of(queries: Tensor, run: Path) -> Tensor:
    """Positions of the training images nearest to test images, for the backbone of a run."""
    config, cpu = RunFolder(run).config(), torch.device("cpu")
    backbone = load_backbone(run)
    train, test = (
        backbone_features(backbone, images, config.input, cpu, config.run.readers).vectors
        for images in (open_images(config.data, "train"), open_images(config.data, "test"))
        if images is not None
    )
    _, _, positions = next(iter(nearest_neighbours(train, test[queries], NEIGHBOURS)))
    return positions


def show(axes: Axes, column: float, row: float, image: Tensor) -> None:
    extent = (column + GAP, column + 1 - GAP, row + 1 - GAP, row + GAP)
    axes.imshow(image.permute(1, 2, 0).numpy(), extent=extent, interpolation="nearest")


if __name__ == "__main__":
    main()
