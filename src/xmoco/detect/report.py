"""``report.html`` of a detector: its AP, curves, and what it sees in validation images."""

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

import torch
from torch import Tensor, nn

from xmoco.data.subset import some_positions, taken
from xmoco.detect.detector_files import FILE, DetectorCard
from xmoco.detect.drawing import drawn, enlarged, framed
from xmoco.detect.metrics import PLURALS, TITLES, Judged
from xmoco.detect.objects import DetectionSet
from xmoco.detect.prediction import MASK_THRESHOLD, looked_at
from xmoco.records import Record
from xmoco.report.history import Series
from xmoco.report.page import curves, details, read_text, sheet, table, write_page
from xmoco.report.panels import Panel
from xmoco.report.sheets import pictures_sheet
from xmoco.train.run_folder import RunFolder

SHOWN = 8  # pictures
JUDGED_ON_THE_WAY = 500  # images, at most
SURE = 0.5  # the score from which detections are drawn
LARGE = 400  # pixels of a picture's shorter side, lest writing on it be too small
THRESHOLDS = (0.5, 0.75, 0.9)

AP_NAMES = {"ap": "AP", "ap50": "AP50", "ap75": "AP75"}
AP_MEANING = (
    "The last value is of all validation images, after precise batch norm. Those before are of at "
    f"most {JUDGED_ON_THE_WAY} of them, with the running statistics of training: part of the last "
    "step up or down may be due to that."
)


def write_detection_report(
    run: Path,
    card: DetectorCard,
    records: Sequence[Record],
    judged: Mapping[str, Judged],
    pictures: bytes,
) -> Path:
    """``judged`` has the curves of boxes and, perhaps, masks; ``pictures`` are a sheet, as PNG."""
    title = f"{records[0].protocol['name']} on {card.data}, {card.method} {card.backbone}"
    measured = [(_heading(record), f"{record.value:.1f} %") for record in records]
    panels = [*_over_steps(run, records), *_precision(judged)]
    sections = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="soft">run {escape(run.resolve().name)}</p>',
        f"<h2>Average precision</h2>{table(measured)}",
        f"<h2>The run</h2>{table(_facts(card, records[0]))}",
        curves(panels),
        sheet(
            "Detections",
            "White frames: objects as annotated. Coloured: what the detector finds with a score of "
            f"at least {SURE:g}; where there are none, it is less sure of all it sees.",
            pictures,
        ),
        _how_to_load(run),
        details("Configuration", read_text(run / "config.yaml")),
        details("Environment", read_text(run / "environment.json")),
    ]
    return write_page(run, title, sections)


def _heading(record: Record) -> str:
    kind, _, measure = record.measure.partition("_")
    return f"{TITLES[measure]}, {PLURALS[kind]} ({record.protocol['metric']})"


def _facts(card: DetectorCard, record: Record) -> list[tuple[str, str]]:
    protocol = record.protocol
    start = f", which started from {card.started_from}" if card.started_from else ""
    return [
        ("Backbone", f"{card.backbone}, {card.method}{start}"),
        ("Schedule", f"{card.schedule}: {protocol['steps']:,} steps of {protocol['batch']} images"),
        ("Trained on", f"{card.data}: {protocol['train_images']:,} images with objects"),
        ("Judged on", f"{protocol['judged']}: {protocol['judged_images']:,} images"),
        ("Categories", f"{protocol['categories']:,}"),
        ("Shorter side", f"{protocol['size']} px; in training {_sizes(protocol['train_sizes'])}"),
        ("Seed", str(record.seed)),
    ]


def _sizes(sizes: Sequence[int]) -> str:
    return f"{sizes[0]} to {sizes[-1]} px" if len(sizes) > 1 else f"{sizes[0]} px"


def _over_steps(run: Path, records: Sequence[Record]) -> list[Panel]:
    """AP on the way, with the last at the end; the loss, its terms and the rate."""
    series: dict[str, dict[float, float]] = {}
    for line in RunFolder(run).metrics().lines:
        for name, value in line.entry.get("values", {}).items():
            series.setdefault(name, {})[line.entry["step"]] = value
    for record in reversed(records):  # of VOC's two metrics the first counts
        series.setdefault(record.measure, {})[record.protocol["steps"]] = record.value
    drawable = {
        name: Series(sorted(points), [points[step] for step in sorted(points)])
        for name, points in series.items()
    }
    found = []
    for kind, what in PLURALS.items():
        own = {
            name: drawable[f"{kind}_{measure}"]
            for measure, name in AP_NAMES.items()
            if f"{kind}_{measure}" in drawable
        }
        if own:
            found.append(
                Panel(
                    f"Average precision of {what}",
                    "%",
                    own,
                    includes=(0, 100),
                    along="step",
                    meaning=AP_MEANING if any(len(c.values) > 1 for c in own.values()) else "",
                )
            )
    terms = {
        name.removeprefix("loss/"): values
        for name, values in drawable.items()
        if name.startswith("loss/")
    }
    for title, unit, own in (
        ("Loss", "loss", {name: drawable[name] for name in ("loss",) if name in drawable}),
        ("Terms of the loss", "loss", terms),
        (
            "Learning rate",
            "rate",
            {name: drawable[name] for name in ("learning_rate",) if name in drawable},
        ),
    ):
        if own:
            found.append(Panel(title, unit, own, includes=(0,), along="step"))
    return found


def _precision(judged: Mapping[str, Judged]) -> list[Panel]:
    return [
        Panel(
            f"Precision of {what}",
            "precision, %",
            {
                f"IoU {iou:g}": Series(
                    [100 * r for r in result.recall], [100 * p for p in result.precision[iou]]
                )
                for iou in THRESHOLDS
            },
            includes=(0, 100),
            along="recall, %",
        )
        for what, result in judged.items()
    ]


def picture_detections(
    detector: nn.Module,
    data: DetectionSet,
    device: torch.device,
    columns: int = 2,
    truth: bool = False,
) -> bytes:
    """A sheet of some validation images, always the same, with what is found in them; below it,
    in white, what is there in ``truth``."""
    positions = some_positions(len(data), SHOWN)
    some = taken(data.images, positions)
    found = []
    for sight in looked_at(detector, some, device):
        output = {name: values.cpu() for name, values in sight.output.items()}
        sure = output["scores"] >= SURE
        picture, boxes = enlarged(sight.picture.cpu(), output["boxes"][sure], LARGE)
        masks = output.get("masks")
        if masks is not None:
            masks = masks[sure]
            factor = picture.shape[1] // masks.shape[2]
            masks = masks[:, 0] > MASK_THRESHOLD
            masks = masks.repeat_interleave(factor, 1).repeat_interleave(factor, 2)
        if truth:
            picture = framed(picture, _annotated(data, int(positions[sight.place]), picture))
        found.append(
            drawn(
                picture,
                boxes,
                output["labels"][sure],
                output["scores"][sure],
                data.categories,
                masks,
            )
        )
    return pictures_sheet(found, columns)


def _annotated(data: DetectionSet, image: int, picture: Tensor) -> Tensor:
    """The boxes of an image's objects, in pixels of the picture that shows it."""
    boxes = torch.from_numpy(data.objects.boxes[data.objects.images == image])
    high, wide = (int(side) for side in data.sizes[image])
    return boxes * torch.tensor([picture.shape[2] / wide, picture.shape[1] / high]).repeat(2)


def _how_to_load(run: Path) -> str:
    file = f"{run.resolve().name}/{FILE}"
    code = f"""import torch, xmoco
from PIL import Image
from torchvision.transforms.functional import to_tensor

detector = xmoco.load_detector({file!r})  # a torchvision model
with torch.no_grad():
    (found,) = detector([to_tensor(Image.open("street.jpg").convert("RGB"))])
names = [detector.categories[label - 1] for label in found["labels"]]"""
    return f"<h2>Using the detector</h2><pre>{escape(code)}</pre>"
