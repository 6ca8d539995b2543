"""The demonstration: what learning without labels gives, on a plain CPU, in minutes."""

import itertools
from pathlib import Path

from rich.console import Console
from rich.table import Table

from xmoco.files import write_whole
from xmoco.pretraining import pretrain
from xmoco.report.curves import claims_png, read_history

NAMES = {
    "raw pixels": "raw pixels",
    "untrained": "untrained backbone",
    "mocov2plus": "MoCo v2+",
    "xmoco": "XMoCo",
}


def run_demo(out: Path | None = None) -> dict[str, float]:
    """Train MoCo v2+ and XMoCo by the ``demo`` recipe, each as long; print and return kNN (%)."""
    console = Console()
    folder = out or _new_folder()
    console.print(
        "Two backbones learn from synthetic patterns without labels: first by MoCo v2+, then by "
        "XMoCo, as long each.\n"
    )
    baseline = pretrain("demo", out=folder / "mocov2plus", method="mocov2plus")
    console.print()
    ours = pretrain("demo", out=folder / "xmoco")
    accuracy = baseline.knn | ours.knn
    histories = {
        NAMES["xmoco"]: read_history(ours.folder),
        NAMES["mocov2plus"]: read_history(baseline.folder),
    }
    if (picture := claims_png(histories)) is not None:
        write_whole(folder / "similarities.png", picture)

    console.print("\nkNN accuracy on unseen patterns of ten families, from features of …")
    table = Table(show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for subject, name in NAMES.items():
        style = "bold" if subject == "xmoco" else ""
        table.add_row(name, f"{accuracy[subject]:.1f} %", style=style)
    console.print(table)
    console.print(
        f"trained {baseline.seconds + ours.seconds:.0f} s in all "
        f"(MoCo v2+ {baseline.seconds:.0f} s, XMoCo {ours.seconds:.0f} s)\n\n"
        f"weights  {ours.weights}\n"
        f"report   {ours.report}\n"
        f"picture  {folder / 'similarities.png'}, of what both make of negatives\n\n"
        "What to try next:\n"
        f"  xmoco evaluate knn {ours.folder} patterns\n"
        "  xmoco pretrain --recipe demo --data FOLDER_OF_YOUR_IMAGES --out runs/mine\n"
        "  xmoco settings --recipe demo",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
    return accuracy


def _new_folder() -> Path:
    names = itertools.chain(["demo"], (f"demo-{n}" for n in itertools.count(2)))
    return next(folder for name in names if not (folder := Path("runs") / name).exists())
