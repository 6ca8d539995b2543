"""Which differences between figures may be chance."""

import statistics

from pages.common import AnyRecord, Place
from pages.trials import all_trials, the_run
from xmoco.records import read_records
from xmoco.report.circumstances import grouped, last_of_each
from xmoco.tables.drawing import chance_points


def chance(place: Place) -> str:
    """How far apart figures have to be: by the images judged, and by what other seeds made."""
    records = [r for file in place.files("*.jsonl") for r in read_records(file, AnyRecord)]
    found = [r for r in records if r.measure.endswith("_top1") and "judged_images" in r.protocol]
    if not found:
        return ""
    counts = sorted({record.protocol["judged_images"] for record in found}, reverse=True)
    by_points: dict[int, int] = {}
    for images in counts:
        by_points.setdefault(chance_points(images), images)
    told = ", ".join(
        f"below {points} {'point' if points == 1 else 'points'} with {images:,} evaluation images"
        for points, images in by_points.items()
    )
    spreads = deviations(place)
    over = (
        " Where several seeds were trained, kNN accuracies had standard deviations of "
        f"{min(spreads):.1f} to {max(spreads):.1f} points over them."
        if spreads
        else ""
    )
    return f"**Nearly all results are from a single seed**: differences may be chance {told}.{over}"


def deviations(place: Place) -> list[float]:
    """Over the seeds of every entry and size, by kNN with k = 20."""
    records = [
        r
        for r in all_trials(place)
        if r.measure == "knn_top1" and r.protocol.get("k") == 20 and "changes" in r.protocol
    ]
    entries = grouped(records, lambda r: (*the_run(r)[:2], *the_run(r)[3:], r.protocol["size"]))
    values = [[r.value for r in last_of_each(own, lambda r: r.seed)] for own in entries]
    return [statistics.stdev(own) for own in values if len(own) > 1]
