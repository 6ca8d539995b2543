"""How many trials on held-out images every method has had: a comparison is worth no more."""

import re
from collections.abc import Iterator
from typing import NamedTuple

from pages.common import SUBJECTS, AnyRecord, Place
from pages.trials import all_trials, the_run
from xmoco.data.subset import HELD_OUT
from xmoco.records import read_records
from xmoco.report.circumstances import grouped, markdown_table


class Trial(NamedTuple):
    recipe: str
    data: str
    method: str
    epochs: int


def effort_table(place: Place) -> str:
    """A row for every method on every set of images, the most epochs first."""
    rows = [
        [f"`{recipe}`", data, method, str(len(own)), f"{sum(t.epochs for t in own):,}"]
        for (recipe, data), of_recipe in _by(trials(place), 2)
        for (*_, method), own in sorted(
            _by(of_recipe, 3), key=lambda one: -sum(trial.epochs for trial in one[1])
        )
    ]
    if not rows:
        return ""
    headings = ["recipe", "images", "method", "trials", "epochs in all"]
    return "\n\n".join(
        (
            "Settings were chosen by these trials on images held out of the training set; those "
            "that diverged count. XMoCo counts with XMoCo+, MoCo v2+ with what was added to it. "
            "Methods with more trials had more chances to find good settings.",
            markdown_table(headings, "lllrr", rows),
        )
    )


def method_of(record: AnyRecord) -> str:
    """Without what may be added to it: a setting that was found for one suits the other."""
    return SUBJECTS.get(record.subject.partition("+")[0], record.subject)


def _by(found: list[Trial], length: int) -> list[tuple[tuple[str, ...], list[Trial]]]:
    groups: dict[tuple[str, ...], list[Trial]] = {}
    for trial in found:
        groups.setdefault(tuple(map(str, trial[:length])), []).append(trial)
    return sorted(groups.items())


def trials(place: Place) -> list[Trial]:
    return [*_compared(place), *_tuned(place)]


def _compared(place: Place) -> Iterator[Trial]:
    records = [r for r in all_trials(place) if r.protocol.get("split") == HELD_OUT]
    for run in grouped(records, the_run):
        facts = run[0].protocol
        work = re.sub(r"-(resnet\d+|tiny)-\d+ep$", "", run[0].work)
        yield Trial(facts["recipe"], f"`{work}`", method_of(run[0]), facts["epochs"])


def _tuned(place: Place) -> Iterator[Trial]:
    """Of former days, whose archives held the images held out; every change is a trial."""
    records: list[AnyRecord] = []
    for file in place.files("tuning.jsonl"):
        records += read_records(file, AnyRecord, {"knn_top1"})
    for run in grouped(records, lambda r: (r.work, str(sorted(r.protocol.items())), r.seed)):
        facts = run[0].protocol
        recipe = run[0].work.removeprefix("tuning-")
        yield Trial(recipe, f"`{facts['data']}`", method_of(run[0]), facts["epochs"])
