"""``report.html``: a run on one page, in one file that opens anywhere.

Pictures are embedded, nothing is fetched and nothing is executed (the page's own security policy
forbids both), and it follows the reader's light or dark screen. Everything that came from outside
(names, paths, configuration) is escaped.
"""

import base64
import statistics
from collections.abc import Iterable, Mapping
from html import escape
from pathlib import Path

from xmoco.files import write_whole
from xmoco.methods import METHODS
from xmoco.report.curves import panel_svg
from xmoco.report.history import History, read_history
from xmoco.report.panels import Panel, panels

TORCHVISION_BACKBONES = ("resnet18", "resnet34", "resnet50", "resnet101", "resnet152")

LEARN_CLASSES = [
    settings.model_fields["name"].default
    for settings, method in METHODS.items()
    if method.uses_labels
]

STYLE = """
:root { color-scheme: light dark; --ink: #23262b; --soft: #666c75; --line: #e3e5e8; --paper: #fff;
  --ground: #f6f7f8; --accent: #0072b2; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e6e9; --soft: #9aa1ab; --line: #373b42;
  --paper: #1b1e23; --ground: #121417; --accent: #56b4e9; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--ground); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif; }
main { max-width: 70rem; margin: 0 auto; padding: 2.5rem 1.25rem 4rem; }
h1 { font-size: 1.9rem; line-height: 1.2; margin: 0; letter-spacing: -.01em; }
h2 { font-size: 1.2rem; margin: 2.75rem 0 .75rem; }
p { max-width: 44rem; margin: .5rem 0; }
.soft { color: var(--soft); }
.lead { font-size: 1.15rem; margin: 1.25rem 0; }
table { border-collapse: collapse; width: 100%; max-width: 44rem;
  font-variant-numeric: tabular-nums; }
th, td { text-align: left; font-weight: inherit; padding: .4rem .75rem .4rem 0;
  border-bottom: 1px solid var(--line); overflow-wrap: anywhere; }
th { color: var(--soft); width: 30%; }
.own, .own th { font-weight: 650; color: var(--ink); }
.classes { max-width: 60rem; }
.classes th, .classes td { width: auto; }
.classes th.number { text-align: right; }
.classes .bar { min-width: 8rem; }
.number { width: 5rem; text-align: right; white-space: nowrap; }
.bar div { height: .6rem; border-radius: .3rem; background: var(--line); overflow: hidden; }
.bar span { display: block; height: 100%; background: var(--soft); }
.own .bar span { background: var(--accent); }
.grid { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(20rem, 100%), 1fr));
  gap: 1rem; }
.card { background: var(--paper); border: 1px solid var(--line); border-radius: .6rem;
  padding: .75rem; overflow-x: auto; }
.card p { font-size: .85rem; line-height: 1.45; margin: .5rem .25rem 0; }
.card img { display: block; width: 100%; height: auto; }
.sheet img { min-width: 36rem; max-width: 60rem; margin: 0 auto; }
pre { background: var(--paper); border: 1px solid var(--line); border-radius: .6rem; padding: 1rem;
  overflow-x: auto; margin: .75rem 0;
  font: .85rem/1.5 ui-monospace, "SF Mono", Menlo, Consolas, monospace; }
summary { cursor: pointer; color: var(--accent); }
"""


def write_report(
    run: Path,
    *,
    views_png: bytes | None,
    neighbours_png: bytes | None,
    negatives_png: bytes | None = None,
    summary: Mapping[str, str],
) -> Path:
    """Writes ``report.html`` into the run folder, whole or not at all, and returns its path.

    ``summary`` gives rows for the table of facts, such as the time it took.
    """
    history = read_history(run)
    title = _title(history)
    sections = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="soft">run {escape(run.resolve().name)}</p>',
        _results(history),
        _facts(history, summary),
        curves(panels(history)),
        sheet("Views", _about_views(history), views_png),
        sheet("Nearest neighbours", _about_neighbours(history), neighbours_png),
        sheet("Negatives", _about_negatives(history), negatives_png),
        _weights(history, run),
        details("Configuration", read_text(run / "config.yaml")),
        details("Environment", read_text(run / "environment.json")),
    ]
    return write_page(run, title, sections)


def write_page(run: Path, title: str, sections: Iterable[str]) -> Path:
    """Writes ``report.html`` of sections that are html already, and returns its path."""
    page = f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<title>{escape(title)}</title>
<style>{STYLE}</style>
</head>
<body>
<main>
{"".join(sections)}
</main>
</body>
</html>
"""
    report = run / "report.html"
    write_whole(report, page.encode("utf-8", errors="replace"))
    return report


def _title(history: History) -> str:
    source = str(history.config.get("data", {}).get("source", "unknown data"))
    data = Path(source).name or source
    backbone = history.config.get("model", {}).get("backbone", "unknown backbone")
    return f"{history.named(history.method)} on {data}, {backbone}"


def _results(history: History) -> str:
    """kNN beside its baselines: a sentence, a table with bars, and how it was measured."""
    knn = history.knn()
    if not knn:
        return f'<p class="lead">{_why_no_knn(history)}</p>'
    rows = "".join(
        f"<tr{' class=own' if subject == history.method else ''}>"
        f"<th>{escape(history.named(subject))}</th>"
        f'<td class="number">{value:.1f} %</td>'
        f'<td class="bar"><div><span style="width: {value:.1f}%"></span></div></td></tr>'
        for subject, value in ((subject, series.values[-1]) for subject, series in knn.items())
    )
    return f"""
<p class="lead">{escape(_sentence(history))}</p>
<table>{rows}</table>
<p class="soft">{escape(_protocol(history))}</p>"""


def _why_no_knn(history: History) -> str:
    if history.setting("monitor", "knn_every") == 0:
        return "No kNN accuracy was measured, as knn_every is 0."
    return "No kNN accuracy was measured: it needs images of which each has one known class."


def _sentence(history: History) -> str:
    knn = history.knn()
    baselines = [
        f"{series.values[-1]:.1f} % ({subject})"
        for subject, series in knn.items()
        if subject != history.method
    ]
    own = knn.get(history.method)
    if own is None:
        return f"Before training, kNN accuracy is {' and '.join(baselines)}."
    beside = f", against {' and '.join(baselines)}" if baselines else ""
    best = max(own.values)
    epoch = own.epochs[own.values.index(best)]
    peak = f" The best was {best:.1f} % after epoch {epoch:g}." if best > own.values[-1] else ""
    epochs = "1 epoch" if own.epochs[-1] == 1 else f"{own.epochs[-1]:g} epochs"
    return (
        f"After {epochs} a kNN classifier on the learnt features is right for "
        f"{own.values[-1]:.1f} % of the {_judged(history)} images{beside}.{peak}"
    )


def _judged(history: History) -> str:
    alone = history.knn_records()[-1]["protocol"].get("split") == "leave one out"
    return "training" if alone else "test"


PROTOCOL = {
    "judged_images": "evaluated on {} images",
    "bank_images": "neighbours among {} training images",
    "data": "taken from {}",
    "started_from": "training started from {}",
    "features": "features from the {}",
    "size": "images of {} px",
    "k": "k = {}",
    "voters": "of which {} vote",
    "temperature": "temperature {}",
}
"""How it is said what a record's protocol says."""
NOT_TOLD = ("epoch", "step", "split")  # the sentence above tells of them


def _protocol(history: History) -> str:
    record = history.knn_records()[-1]
    protocol = {name: value for name, value in record["protocol"].items() if name not in NOT_TOLD}
    if protocol.get("voters") == protocol.get("k"):
        protocol.pop("voters", None)
    known = [name for name in PROTOCOL if name in protocol]
    told = [PROTOCOL[name].format(_amount(protocol[name])) for name in known]
    told += [f"{_words(name)} {protocol[name]}" for name in protocol if name not in PROTOCOL]
    return f"kNN top-1, {', '.join(told)}; seed {record.get('seed', 'unknown')}."


def _amount(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)


def _words(name: str) -> str:
    return name.replace("_", " ")


def _facts(history: History, summary: Mapping[str, str]) -> str:
    facts = dict(summary)
    speed = history.training.get("images_per_second")
    if speed:
        facts.setdefault("Speed", f"{statistics.median(speed.values):,.0f} images/s (median)")
    return f"<h2>The run</h2>{table(facts.items())}" if facts else ""


def table(rows: Iterable[tuple[str, str]]) -> str:
    cells = (f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in rows)
    return f"<table>{''.join(cells)}</table>"


def curves(found: Iterable[Panel]) -> str:
    cards = "".join(
        f'<div class="card">{_picture(panel)}{_about_panel(panel)}</div>' for panel in found
    )
    content = f'<div class="grid">{cards}</div>' if cards else "<p>Nothing was logged yet.</p>"
    return f"<h2>Curves</h2>{content}"


def _picture(panel: Panel) -> str:
    last = {name: f"{series.values[-1]:.4g}" for name, series in panel.curves.items()}
    alone = len(last) == 1  # what it is says the title
    end = ", ".join(value if alone else f"{name} {value}" for name, value in last.items())
    text = escape(f"{panel.title} by {panel.along}, {panel.unit}; at the end: {end or 'nothing'}")
    return f'<img src="{_uri(panel_svg(panel).encode(), "svg+xml")}" alt="{text}">'


def _about_panel(panel: Panel) -> str:
    return f'<p class="soft">{escape(panel.meaning)}</p>' if panel.meaning else ""


def _about_views(history: History) -> str:
    should = (
        "the class of an image should be recognised"
        if _learns_classes(history)
        else "random views of an image should be recognised as the same"
    )
    return f"What the network learns from: {should}, whatever the crop and the colours."


def _about_neighbours(history: History) -> str:
    found = (
        "Each row shows a query on the left, then the training images whose features are most "
        "similar to its own, with their cosine similarity."
    )
    marks = _about_marks(history)
    learnt = "learnt" if _learns_classes(history) else "never saw"
    return f"{found} {marks} Training {learnt} the classes." if marks else found


def _about_negatives(history: History) -> str:
    what = "similarities" if history.measured("label_evenness") is None else "soft labels"
    found = (
        "The network learns to tell an image, the query, from others, its negatives. Each row "
        f"shows a query on the left, then the negatives with the largest {what} among a few "
        "training images. The number below says how many times an average negative's share that "
        "is."
    )
    if history.measured("any_of_own_class") is None:
        return found
    return (
        f"{found} A solid frame and ✓ mark negatives of the query's own class, from which a "
        "one-hot label would tell it apart all the same; a dotted frame and ✗ mark those of "
        "another class."
    )


def _about_marks(history: History) -> str:
    """What frames on the sheet mean, unless there are none: where no image has one known class."""
    if history.knn_records():
        known = "A"
    elif history.setting("monitor", "knn_every") == 0:  # so nothing tells whether there are any
        known = "Where classes are known, a"
    else:
        return ""
    return (
        f"{known} solid frame and ✓ mark images of the query's class, a dotted frame and ✗ those "
        "of another."
    )


def _learns_classes(history: History) -> bool:
    return history.setting("method", "name") in LEARN_CLASSES


def sheet(title: str, explanation: str, png: bytes | None) -> str:
    if png is None:
        return ""
    return f"""
<h2>{title}</h2><p>{explanation}</p>
<div class="card sheet"><img src="{_uri(png)}" alt="{title}"></div>"""


def _uri(picture: bytes, kind: str = "png") -> str:
    return f"data:image/{kind};base64," + base64.b64encode(picture).decode("ascii")


def _weights(history: History, run: Path) -> str:
    folder, file = str(run), str(run / "backbone.safetensors")
    ours = f"""import torch
import xmoco
from PIL import Image

backbone = xmoco.load_backbone({folder!r})
transform = xmoco.load_transform({folder!r})  # resize, centre crop and normalise
with torch.no_grad():
    features = backbone(transform(Image.open("cat.jpg"))[None])"""
    return f"""
<h2>Using the weights</h2>
<pre>{escape(ours)}</pre>
{_torchvision_way(history, file)}"""


def _torchvision_way(history: History, file: str) -> str:
    model = history.config.get("model", {})
    if model.get("backbone") not in TORCHVISION_BACKBONES:
        return "<p>torchvision has no backbone of this shape, so xmoco builds it.</p>"
    stem = """
backbone.conv1 = torch.nn.Conv2d(3, 64, 3, padding=1, bias=False)  # the stem for small images
backbone.maxpool = torch.nn.Identity()"""
    theirs = f"""import torch, torchvision
from safetensors.torch import load_file

backbone = torchvision.models.{model["backbone"]}(){stem if model.get("stem") == "cifar" else ""}
backbone.fc = torch.nn.Identity()  # features instead of classes
backbone.load_state_dict(load_file({file!r}))"""
    return f"<p>Or without xmoco:</p><pre>{escape(theirs)}</pre>"


def details(title: str, text: str | None) -> str:
    if text is None:
        return ""
    return f"<h2>{title}</h2><details><summary>show</summary><pre>{escape(text)}</pre></details>"


def read_text(file: Path) -> str | None:
    return file.read_text(encoding="utf-8", errors="replace") if file.is_file() else None
