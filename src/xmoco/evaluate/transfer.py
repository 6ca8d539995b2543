"""Transfer to other images (paper, section on classification of other data sets; spec, section 2).

Frozen: logistic regression on features, its strength chosen on the validation images. End to end:
the backbone is tuned too, over a grid of rates and weight decays. Either way the choice is trained
again on training and validation images together, and judged on the test images once.
"""

import copy
import dataclasses
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from xmoco.data import ImageSet, Unreadable
from xmoco.data.batches import preload
from xmoco.data.fingerprint import content_digest
from xmoco.data.transfer_sets import Metric, TransferSet, open_transfer_set
from xmoco.errors import UserError, nearest
from xmoco.evaluate.classify import train_classifier
from xmoco.evaluate.evaluation import (
    LEFT_OUT,
    REPLACED,
    EvalOptions,
    Evaluation,
    Listener,
    check_seed,
    tell_what_is_passed_over,
)
from xmoco.evaluate.features import Features, unreadable_fact
from xmoco.evaluate.grid import GRIDS, Grid, GridFile, Point
from xmoco.evaluate.logistic import ITERATIONS_ALONE, STRENGTHS, fit, fit_path
from xmoco.evaluate.metrics import eleven_point_map, mean_per_class, top_k
from xmoco.records import Record
from xmoco.train.bad_steps import DivergedError
from xmoco.train.engine import on_first
from xmoco.train.run_folder import RunFolder

MODES = ("frozen", "end-to-end")

METRICS: dict[Metric, Callable[[Tensor, Tensor], float]] = {
    "top-1": lambda scores, labels: top_k(scores, labels, 1),
    "mean per class": mean_per_class,
    "11-point mAP": eleven_point_map,
}


def evaluate_transfer(
    weights: str | Path,
    data: str | Path | TransferSet,
    *,
    mode: str = "frozen",
    grid: str = "paper",
    metric: str | None = None,
    seed: int = 0,
    out: str | Path | None = None,
    options: EvalOptions | None = None,
    listener: Listener | None = None,
) -> Record:
    """How well a backbone serves for other images, by the protocol of the set.

    ``data`` is one of the paper's ten sets by name (``xmoco.data.transfer_sets.TRANSFER_SETS``) or
    labelled images of one's own. ``grid`` and ``out`` concern the end-to-end mode: finished points
    are kept in the folder ``out``, where the same call goes on after an interruption, also in the
    middle of a point.
    """
    for kind, asked, known in (("mode", mode, MODES), ("grid", grid, GRIDS)):
        if asked not in known:
            raise UserError(
                f"unknown {kind} {asked!r}{nearest(asked, known)}; there are {', '.join(known)}."
            )
    check_seed(seed)
    options = options or EvalOptions()
    if mode == "frozen":
        options.expect_one_process("frozen transfer")
    if not isinstance(data, TransferSet):
        # Of a path the leading ./ is lost, which tells it from one of the paper's sets.
        source = f"./{data}" if isinstance(data, Path) and not data.is_absolute() else str(data)
        data = open_transfer_set(
            source, root=options.root, download=options.download, metric=metric
        )
    evaluation = Evaluation.open(weights, options, listener)
    tell_what_is_passed_over(data.train, evaluation.listener)
    if mode == "frozen":
        return _frozen(evaluation, data)
    if out is None:
        method = re.sub(r"[^\w.+-]+", "_", evaluation.weights.card.method)
        out = Path("runs", "transfer", f"{method}-{evaluation.digest}-{grid}")
    with evaluation.together():
        return _end_to_end(evaluation, data, GRIDS[grid], seed, Path(out).expanduser() / data.name)


def _frozen(evaluation: Evaluation, images: TransferSet) -> Record:
    train, validation, test = (
        _on_device(evaluation.features(part, f"{name} images", border=False), evaluation.device)
        for name, part in (
            ("training", images.train),
            ("validation", images.validation),
            ("test", images.test),
        )
    )
    classes = len(images.train.classes or ())
    judge = METRICS[images.metric]
    best, chosen, start = -1.0, STRENGTHS[0], None
    path = fit_path(train.vectors, train.labels, classes)
    for done, (strength, model) in enumerate(path, start=1):
        value = judge(model.scores(validation.vectors), validation.labels)
        if value > best:  # of equals the strongest, which comes first
            best, chosen, start = value, strength, model
        evaluation.listener.progress("strengths", done, len(STRENGTHS), f"best {best:.2f} %")
    vectors = torch.cat([train.vectors, validation.vectors])
    labels = torch.cat([train.labels, validation.labels])
    model = fit(vectors, labels, classes, chosen, start)
    if not model.converged:
        evaluation.listener.say(
            f"the logistic regression of the strength chosen, {chosen:.2g}, was stopped after "
            f"{ITERATIONS_ALONE:,} iterations: with more, the accuracy may be another."
        )
    return _record(
        evaluation,
        images,
        "transfer_frozen",
        judge(model.scores(test.vectors), test.labels),
        evaluation.weights.card.seed,
        {
            name: len(part.labels)
            for name, part in (("train", train), ("validation", validation), ("judged", test))
        },
        name="transfer, frozen",
        strength=chosen,
        strengths=len(STRENGTHS),
        validation=best,
    )


@dataclasses.dataclass(frozen=True)
class _Labelled:
    vectors: Tensor
    labels: Tensor


def _on_device(features: Features, device: torch.device) -> _Labelled:
    assert features.labels is not None, "transfer sets have labels"
    return _Labelled(features.vectors.to(device), features.labels.to(device))


def _end_to_end(
    evaluation: Evaluation, images: TransferSet, grid: Grid, seed: int, folder: Path
) -> Record:
    settings = on_first(evaluation.fabric, lambda: _settings(evaluation, images, grid, seed))
    # Everywhere the file is as the first process, which alone writes it, has left it.
    file = on_first(evaluation.fabric, lambda: GridFile.open(folder, settings))
    search = _Search(evaluation, images, grid, seed, settings, folder)
    file = search.finish(search.try_points(file))
    assert file.result is not None
    chosen, value = file.best()
    protocol, images_learned = grid.protocol(chosen), len(images.train_and_validation)
    return _record(
        evaluation,
        images,
        "transfer_end_to_end",
        file.result,
        seed,
        {"judged": len(images.test) - file.unreadable},
        crop_size=evaluation.input.size,
        **dataclasses.asdict(protocol) | {"batch": protocol.batch_for(images_learned)},
        grid=grid.name,
        rates=len(grid.rates),
        weight_decays=len(grid.weight_decays),
        validation=value,
        precision=evaluation.options.precision,
    )


def _settings(
    evaluation: Evaluation, images: TransferSet, grid: Grid, seed: int
) -> dict[str, object]:
    """All that a search depends on."""
    options, on_progress = evaluation.options, evaluation.on_progress("reading images")
    size, crop_size = evaluation.input.central_size, evaluation.input.size
    return {
        "weights": evaluation.digest,
        "set": images.name,
        "metric": images.metric,
        "images": [
            content_digest(part, options.readers, on_progress)
            for part in (images.train, images.validation, images.test)
        ],
        **dataclasses.asdict(grid),
        "seed": seed,
        "size": size,
        **({} if crop_size == size else {"crop_size": crop_size}),
        **{name: given for name in ("mean", "std") if (given := getattr(options, name))},
        "precision": options.precision,
    }


def _kept(evaluation: Evaluation, images: ImageSet, consequence: str) -> ImageSet:
    """Decoded once and kept on the device, if there is room; the consequence is that of not being
    readable."""
    broken = Unreadable(len(images))
    kept = preload(
        images,
        evaluation.device,
        readers=evaluation.options.readers,
        unreadable=broken,
        on_progress=evaluation.on_progress("decoding images"),
    )
    evaluation.tell_of(broken, consequence)
    return kept


@dataclasses.dataclass(frozen=True)
class _Search:
    """A search over a grid. Every point is trained in a folder of its own until it is done."""

    evaluation: Evaluation
    images: TransferSet
    grid: Grid
    seed: int
    settings: dict[str, object]
    folder: Path

    def try_points(self, file: GridFile) -> GridFile:
        """Those that are not done yet, each judged on the validation images."""
        evaluation, points = self.evaluation, self.grid.points
        train = _kept(evaluation, self.images.train, REPLACED)
        validation = _kept(evaluation, self.images.validation, LEFT_OUT)
        for number, point in enumerate(points, start=1):
            place = self.folder / str(point)
            if point not in file.values:
                stage = f"grid point {number} of {len(points)}"
                value, _ = self._reached(point, train, validation, place, stage)
                file = on_first(evaluation.fabric, partial(file.add, point, value))
            self._remove(place)
            best, value = file.best()
            note = f"best {value:.2f} % (rate {best.rate:.2g}, decay {best.weight_decay:.2g})"
            evaluation.listener.progress("grid", number, len(points), note)
        return file

    def finish(self, file: GridFile) -> GridFile:
        """The best point, trained on training and validation images and judged on the test's."""
        evaluation, images = self.evaluation, self.images
        chosen, value = file.best()
        if value < 0:
            raise UserError(
                f"no point of the grid {self.grid.name} could be trained on {images.name}."
            )
        place = self.folder / f"chosen-{chosen}"
        if file.result is None:
            both = _kept(evaluation, images.train_and_validation, REPLACED)
            test = _kept(evaluation, images.test, LEFT_OUT)
            result, judged = self._reached(chosen, both, test, place, "the point chosen")
            if result < 0:
                self._remove(place)
                raise UserError(
                    f"the point chosen on {images.name} (rate {chosen.rate:.2g}, weight decay "
                    f"{chosen.weight_decay:.2g}) diverged when trained on all images: try another "
                    "--seed."
                )
            file = on_first(evaluation.fabric, partial(file.finish, result, len(test) - judged))
        self._remove(place)
        return file

    def _remove(self, place: Path) -> None:
        """What is noted in the file needs its checkpoints no more."""
        on_first(self.evaluation.fabric, lambda: shutil.rmtree(place, ignore_errors=True))

    def _reached(
        self, point: Point, train: ImageSet, judged: ImageSet, place: Path, stage: str
    ) -> tuple[float, int]:
        """What a copy of the backbone reaches on ``judged`` after training, and of how many images
        that could be read; -1 if its loss exploded."""
        evaluation, protocol = self.evaluation, self.grid.protocol(point)
        try:
            classifier = train_classifier(
                copy.deepcopy(evaluation.weights.backbone),
                train,
                protocol,
                place,
                self.settings | dataclasses.asdict(protocol),
                input=evaluation.input,
                fabric=evaluation.fabric,
                seed=self.seed,
                readers=evaluation.options.readers,
                command=evaluation.options.command,
                on_step=evaluation.on_step(stage),
                say=evaluation.listener.say,
            )
        except DivergedError:
            return -1.0, len(judged)
        evaluation.tell_of(RunFolder(place).unreadable())

        def judge() -> tuple[float, int]:
            scores, labels, places = evaluation.scores(classifier, judged, border=False)
            return METRICS[self.images.metric](scores, labels), len(places)

        return on_first(evaluation.fabric, judge)


def _record(
    evaluation: Evaluation,
    images: TransferSet,
    measure: str,
    value: float,
    seed: int,
    used: dict[str, int],
    **protocol: Any,
) -> Record:
    """``used`` are how many images of a part could be read and were; of others, all."""
    parts = {"train": images.train, "validation": images.validation, "judged": images.test}
    counts = {name: len(part) for name, part in parts.items()}
    return evaluation.record(
        measure,
        value,
        images.train,
        images.name.lower(),
        seed,
        split="test",
        judged=images.test.name,
        set=images.name,
        metric=images.metric,
        **protocol,
        **{f"{name}_images": count for name, count in (counts | used).items()},
        **unreadable_fact(sum(counts.values()), sum((counts | used).values())),
    )
