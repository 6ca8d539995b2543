"""The demonstration: what learning without labels gives, on a plain CPU, in minutes."""

import itertools
import shlex
from pathlib import Path

from rich.console import Console
from rich.table import Table

from xmoco.errors import Interrupted
from xmoco.files import write_whole
from xmoco.pretraining import RunResult, pretrain
from xmoco.report.curves import claims_png
from xmoco.report.history import read_history
from xmoco.train.run_folder import RunFolder

NAMES = {
    "raw pixels": "raw pixels",
    "untrained": "untrained backbone",
    "mocov2plus": "MoCo v2+",
    "xmoco": "XMoCo",
}
HALVES = ("mocov2plus", "xmoco")
"""The folders of the two runs, in the order in which they are trained."""


def run_demo(out: Path | None = None) -> dict[str, float]:
    """Train MoCo v2+ and XMoCo by the ``demo`` recipe, each as long; print and return kNN (%).

    A demo that was interrupted in this folder goes on; one that is complete is shown again.
    """
    console = Console()
    folder = out or _usual_folder()
    begun = _holds_demo(folder)
    if not begun:
        RunFolder.refuse_existing(folder)
    console.print(
        "Two backbones learn from synthetic patterns without labels: first by MoCo v2+, then by "
        "XMoCo, as long each.\n"
    )
    if begun:
        console.print(_going_on(folder), markup=False, highlight=False, soft_wrap=True)
    baseline = _half(folder, HALVES[0], method="mocov2plus")
    console.print()
    ours = _half(folder, HALVES[1])
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
        "  xmoco pretrain --data FOLDER_OF_YOUR_IMAGES --out runs/mine\n"
        "  xmoco settings --recipe demo",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
    return accuracy


def _half(folder: Path, name: str, **settings: str) -> RunResult:
    run = folder / name
    try:
        return pretrain("demo", out=run, resume=_holds_run(run), **settings)
    except Interrupted as stop:  # to resume the run alone would finish half of the demo
        way_on = shlex.join(["xmoco", "demo", "--out", str(folder)])
        where = f"while {NAMES[name]} was training"
        raise Interrupted(stop.signal_number, where, way_on) from None


def _going_on(folder: Path) -> str:
    if all((folder / name / "report.html").is_file() for name in HALVES):
        return (
            f"{folder} holds a complete demo: nothing is trained again, and its results follow. "
            "For a new demo, choose another folder with --out.\n"
        )
    return f"{folder} holds a demo that was interrupted: it goes on where it was.\n"


def _holds_demo(folder: Path) -> bool:
    """Whether a demo was begun here, and nothing else: it begins with this half."""
    return _holds_run(folder / HALVES[0]) and not _holds_run(folder)


def _holds_run(folder: Path) -> bool:
    return (folder / "config.yaml").is_file()


def _usual_folder() -> Path:
    """The first that holds a demo, or nothing at all."""
    names = itertools.chain(["demo"], (f"demo-{n}" for n in itertools.count(2)))
    folders = (Path("runs") / name for name in names)
    return next(folder for folder in folders if _holds_demo(folder) or not folder.exists())
