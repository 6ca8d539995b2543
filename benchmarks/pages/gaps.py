"""What no record tells: so that nobody has to look for it in vain."""

from collections.abc import Iterator

from pages.common import AnyRecord, Place
from pages.comparisons import compared_with, measured_tables
from pages.trials import all_trials
from xmoco.records import read_records
from xmoco.report.circumstances import grouped
from xmoco.tables.definition import table_names


def gaps(place: Place) -> str:
    """A line for everything that a reader may look for and that has not been measured."""
    return "\n".join(f"- {line}" for line in not_measured(place))


def not_measured(place: Place) -> Iterator[str]:
    shown = {name for name, filled in measured_tables(place) if filled.group.split == "test"}
    if missing := [f"`{name}`" for name in table_names() if name not in shown]:
        yield (
            f"The paper's tables {', '.join(missing)}, for each of which "
            "[one command](tables.md) is there."
        )
    runs = judged_trials(place)
    photographs = grouped([r for r in runs if r.work.startswith("imagenette")], compared_with)
    if not any({"xmoco", "mocov2plus"} <= {r.subject for r in alike} for alike in photographs):
        yield (
            "XMoCo as published and MoCo v2+ by the same recipe on photographs: on test images, "
            "MoCo v2+ has been compared with XMoCo+ only."
        )
    small = judged(place, "protocols-cifar10*.jsonl")
    small += [record for record in runs if record.work.startswith("cifar10")]
    if not any(record.subject.startswith("mocov2plus") for record in small):
        yield "MoCo v2+ on CIFAR-10's test images."
    if not place.files("compare-lightly*.jsonl"):
        yield "What XMoCo's ideas are worth in [other libraries' methods](plugin.md)."
    if not any(record.protocol.get("recipe") == "imagenet" for record in judged(place, "*.jsonl")):
        yield "Training on ImageNet, and the recipes for it."
    if not place.files("detect.jsonl"):
        yield "Detection on COCO or PASCAL VOC."
    if not any(len(r.machine.get("gpus", [])) > 1 for r in read(place, "*.jsonl")):
        yield "Training on more than one GPU."


def judged_trials(place: Place) -> list[AnyRecord]:
    return [record for record in all_trials(place) if is_judged(record)]


def judged(place: Place, pattern: str) -> list[AnyRecord]:
    """Accuracies of backbones on test images."""
    return [record for record in read(place, pattern) if is_judged(record)]


def is_judged(record: AnyRecord) -> bool:
    return record.measure.endswith("_top1") and record.protocol.get("split", "test") == "test"


def read(place: Place, pattern: str) -> list[AnyRecord]:
    return [record for file in place.files(pattern) for record in read_records(file, AnyRecord)]
