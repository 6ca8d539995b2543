"""What no record tells: so that nobody has to look for it in vain."""

from collections.abc import Iterator

from pages.common import AnyRecord, Place
from pages.comparisons import compared_with
from xmoco.records import read_records
from xmoco.report.circumstances import grouped


def gaps(place: Place) -> str:
    """A line for everything that a reader may look for and that has not been measured."""
    return "\n".join(f"- {line}" for line in not_measured(place))


def not_measured(place: Place) -> Iterator[str]:
    if not place.files("tables*.jsonl"):
        yield "The paper's tables at small scale, for which [one command](tables.md) is there."
    photographs = grouped(judged(place, "compare-imagenette*.jsonl"), compared_with)
    if not any({"xmoco", "mocov2plus"} <= {r.subject for r in alike} for alike in photographs):
        yield (
            "XMoCo as published and MoCo v2+ by the same recipe on photographs: on test images, "
            "MoCo v2+ has been compared with XMoCo+ only."
        )
    small = judged(place, "protocols-cifar10*.jsonl") + judged(place, "compare-cifar10*.jsonl")
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


def judged(place: Place, pattern: str) -> list[AnyRecord]:
    """Accuracies of backbones on test images."""
    return [
        record
        for record in read(place, pattern)
        if record.measure.endswith("_top1") and record.protocol.get("split", "test") == "test"
    ]


def read(place: Place, pattern: str) -> list[AnyRecord]:
    return [record for file in place.files(pattern) for record in read_records(file, AnyRecord)]
