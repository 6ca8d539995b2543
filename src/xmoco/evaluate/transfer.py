"""Transfer to other images (paper, section on classification of other data sets; spec, section 2).

Frozen: logistic regression on features, its strength chosen on the validation images. End to end:
the backbone is tuned too, over a grid of rates and weight decays. Either way the choice is trained
again on training and validation images together, and judged on the test images once.
"""

import copy
import dataclasses
import re
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from xmoco.data import ImageSet, Unreadable
from xmoco.data.batches import preload
from xmoco.data.fingerprint import content_digest
from xmoco.data.transfer_sets import Metric, TransferSet, open_transfer_set
from xmoco.errors import UserError, nearest
from xmoco.evaluate.classify import CosineProtocol, DivergedError, class_scores, train_classifier
from xmoco.evaluate.evaluation import EvalOptions, Evaluation, Listener, check_seed
from xmoco.evaluate.features import Features
from xmoco.evaluate.grid import GRIDS, Grid, GridFile
from xmoco.evaluate.logistic import STRENGTHS, fit, fit_path
from xmoco.evaluate.metrics import eleven_point_map, mean_per_class, top_k
from xmoco.records import Record

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
    are kept in the folder ``out``, where the same call goes on after an interruption.
    """
    for kind, asked, known in (("mode", mode, MODES), ("grid", grid, GRIDS)):
        if asked not in known:
            raise UserError(
                f"unknown {kind} {asked!r}{nearest(asked, known)}; there are {', '.join(known)}."
            )
    check_seed(seed)
    options = options or EvalOptions()
    if not isinstance(data, TransferSet):
        # Of a path the leading ./ is lost, which tells it from one of the paper's sets.
        source = f"./{data}" if isinstance(data, Path) and not data.is_absolute() else str(data)
        data = open_transfer_set(
            source, root=options.root, download=options.download, metric=metric
        )
    evaluation = Evaluation.open(weights, options, listener)
    if mode == "frozen":
        return _frozen(evaluation, data)
    if out is None:
        method = re.sub(r"[^\w.+-]+", "_", evaluation.weights.card.method)
        out = Path("runs", "transfer", f"{method}-{evaluation.digest}-{grid}")
    return _end_to_end(evaluation, data, GRIDS[grid], seed, Path(out) / data.name)


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
    return _record(
        evaluation,
        images,
        "transfer_frozen",
        judge(model.scores(test.vectors), test.labels),
        evaluation.weights.card.seed,
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
    size, crop_size = evaluation.input.central_size, evaluation.input.size
    file = GridFile.open(
        folder,
        {
            "weights": evaluation.digest,
            "set": images.name,
            "metric": images.metric,
            "images": [
                content_digest(
                    part, evaluation.options.readers, evaluation.on_progress("reading images")
                )
                for part in (images.train, images.validation, images.test)
            ],
            **dataclasses.asdict(grid),
            "seed": seed,
            "size": size,
            **({} if crop_size == size else {"crop_size": crop_size}),
            "precision": evaluation.options.precision,
        },
    )
    train, validation = _kept(evaluation, images.train), _kept(evaluation, images.validation)
    for number, point in enumerate(grid.points, start=1):
        if point not in file.values:
            stage = f"grid point {number} of {len(grid.points)}"
            file.add(
                point,
                _tuned(evaluation, images, grid.protocol(point), train, validation, seed, stage),
            )
        best, value = file.best()
        note = f"best {value:.2f} % (rate {best.rate:.2g}, decay {best.weight_decay:.2g})"
        evaluation.listener.progress("grid", number, len(grid.points), note)
    chosen, value = file.best()
    if value < 0:
        raise UserError(f"no point of the grid {grid.name} could be trained on {images.name}.")
    protocol = grid.protocol(chosen)
    both, test = _kept(evaluation, images.train_and_validation), _kept(evaluation, images.test)
    result = _tuned(evaluation, images, protocol, both, test, seed, "the point chosen")
    if result < 0:
        raise UserError(
            f"the point chosen on {images.name} (rate {chosen.rate:.2g}, weight decay "
            f"{chosen.weight_decay:.2g}) diverged when trained on all images: try another --seed."
        )
    return _record(
        evaluation,
        images,
        "transfer_end_to_end",
        result,
        seed,
        crop_size=crop_size,
        **dataclasses.asdict(protocol) | {"batch": protocol.batch_for(len(both))},
        grid=grid.name,
        rates=len(grid.rates),
        weight_decays=len(grid.weight_decays),
        validation=value,
        precision=evaluation.options.precision,
    )


def _kept(evaluation: Evaluation, images: ImageSet) -> ImageSet:
    """Decoded once and kept on the device, if there is room."""
    broken = Unreadable(len(images))
    kept = preload(
        images,
        evaluation.device,
        readers=evaluation.options.readers,
        unreadable=broken,
        on_progress=evaluation.on_progress("decoding images"),
    )
    evaluation.tell_of(broken)
    return kept


def _tuned(
    evaluation: Evaluation,
    images: TransferSet,
    protocol: CosineProtocol,
    train: ImageSet,
    judged: ImageSet,
    seed: int,
    stage: str,
) -> float:
    """What a copy of the backbone reaches on ``judged`` after training; -1 if its loss exploded."""
    backbone = copy.deepcopy(evaluation.weights.backbone)
    input, device, bf16, readers = (
        evaluation.input,
        evaluation.device,
        evaluation.bf16,
        evaluation.options.readers,
    )
    try:
        head = train_classifier(
            backbone, train, protocol, input=input, device=device, bf16=bf16, seed=seed,
            readers=readers, on_step=evaluation.on_step(stage),
        )  # fmt: skip
    except DivergedError:
        return -1.0
    broken = Unreadable(len(judged))
    scores, labels = class_scores(
        backbone, head, judged, input=input, device=device, bf16=bf16, readers=readers,
        border=False, unreadable=broken, on_progress=evaluation.on_progress("judging"),
    )  # fmt: skip
    evaluation.tell_of(broken)
    return METRICS[images.metric](scores, labels)


def _record(
    evaluation: Evaluation,
    images: TransferSet,
    measure: str,
    value: float,
    seed: int,
    **protocol: object,
) -> Record:
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
        train_images=len(images.train),
        validation_images=len(images.validation),
        judged_images=len(images.test),
    )
