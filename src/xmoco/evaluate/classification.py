"""Judging weights on labelled images by kNN, linear classification and fine-tuning, as records."""

import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from xmoco.data import ImageSet
from xmoco.data.fingerprint import content_digest
from xmoco.data.sources import source_name
from xmoco.data.subset import HELD_OUT, held_out_to_judge, labelled_share
from xmoco.errors import UserError, nearest
from xmoco.evaluate.classify import (
    FINETUNE,
    LINEAR,
    Classifier,
    EpochProtocol,
    train_classifier,
)
from xmoco.evaluate.evaluation import (
    EvalOptions,
    Evaluation,
    Judged,
    Listener,
    check_seed,
    labelled_splits,
)
from xmoco.evaluate.features import unreadable_fact
from xmoco.evaluate.knn import knn_accuracy, voters
from xmoco.evaluate.metrics import mean_per_class, top_k
from xmoco.nn.architectures import timm_name
from xmoco.nn.backbone_files import LONGEST_METHOD
from xmoco.nn.classifier_files import FILE, ClassifierCard, save_classifier
from xmoco.records import Record
from xmoco.settings import read_text, read_yaml
from xmoco.text import printable, shortened
from xmoco.train.engine import on_first
from xmoco.train.run_folder import RunFolder, plain

FEW_STEPS = 10
"""In an epoch of so few the rates of linear classifiers, which are high, do not settle."""


def evaluate_knn(
    weights: str | Path,
    data: str | Path,
    *,
    ks: int | Sequence[int] = (10, 20, 100, 200),
    temperature: float = 0.1,
    options: EvalOptions | None = None,
    listener: Listener | None = None,
) -> list[Record]:
    """Weighted kNN accuracy of frozen features: test images judged by training images.

    Where the data has no test split, every image is judged by all the others. ``weights`` are what
    ``load_backbone`` takes.
    """
    ks = (ks,) if isinstance(ks, int) else ks
    if any(not isinstance(k, int) for k in ks):
        raise UserError(f"k must be whole numbers, not {', '.join(map(shortened, ks))}.")
    if min(ks, default=0) < 1 or not 0 < temperature < math.inf:
        raise UserError("k must be at least 1, and the temperature above 0.")
    options = options or EvalOptions()
    options.expect_one_process("kNN")
    evaluation = Evaluation.open(weights, options, listener)
    train, test = labelled_splits(data, evaluation.options, evaluation.listener)
    bank = evaluation.features(train, "training images")
    asked = None if test is None else evaluation.features(test, "test images")
    assert bank.labels is not None
    if test is None:
        _tell_of_single_images(evaluation, train, bank.labels)
    bank_images, judged_images = len(bank.places), len((asked or bank).places)
    most = voters(max(ks), bank_images, leave_one_out=test is None)
    if limited := [f"{k:,}" for k in sorted(set(ks)) if k > most]:
        evaluation.listener.say(
            f"only {most:,} images can vote: for k = {' and '.join(limited)} these are all."
        )
    accuracies = knn_accuracy(
        bank.vectors,
        bank.labels,
        None if asked is None else asked.vectors,
        None if asked is None else asked.labels,
        ks=ks,
        temperature=temperature,
        device=evaluation.device,
        on_progress=evaluation.on_progress("neighbours"),
    )
    return [
        evaluation.record(
            "knn_top1",
            accuracy,
            train,
            source_name(data),
            split="leave one out" if test is None else "test",
            judged=(test or train).name,
            features="backbone",
            k=k,
            voters=voters(k, bank_images, leave_one_out=test is None),
            temperature=temperature,
            bank_images=bank_images,
            judged_images=judged_images,
            **unreadable_fact(
                len(train) + (0 if test is None else len(test)),
                bank_images + (0 if test is None else judged_images),
            ),
        )
        for k, accuracy in accuracies.items()
    ]


def _tell_of_single_images(evaluation: Evaluation, images: ImageSet, labels: Tensor) -> None:
    counts = Counter(labels.tolist())
    single = [name for label, name in enumerate(images.classes or ()) if counts[label] == 1]
    if single:
        more = f" and {len(single) - 1} more" if len(single) > 1 else ""
        evaluation.listener.say(
            f"{images.name} has a single image of class {single[0]}{more}: no other image can vote "
            "for it, so it counts as wrong."
        )


def evaluate_linear(
    weights: str | Path,
    data: str | Path,
    *,
    preset: str = "paper",
    epochs: int | None = None,
    batch: int | None = None,
    head_rate: float | None = None,
    held_out: float | None = None,
    seed: int = 0,
    out: str | Path | None = None,
    options: EvalOptions | None = None,
    listener: Listener | None = None,
) -> list[Record]:
    """Top-1, top-5 and mean per-class accuracy of a linear classifier on the frozen backbone.

    Presets are the paper's settings and MoCo's. Other ``epochs``, another ``batch`` or rate of the
    classifier (``head_rate``) make a protocol of another name.
    Of images without a test split, ``held_out`` is the share of every class that is not trained on
    but judged by: see ``xmoco.data.subset.held_out``.
    It is trained in the run folder ``out``, by default one under ``runs/evaluate`` for just these
    weights and settings: the same call goes on there after an interruption, and finds a finished
    classifier again.
    """
    if preset not in LINEAR:
        raise UserError(
            f"unknown preset {preset!r}{nearest(preset, LINEAR)}; there are {', '.join(LINEAR)}."
        )
    _expect_possible(epochs, batch, head_rate=head_rate)
    protocol = LINEAR[preset].changed(epochs, batch, head_rate)
    evaluation = Evaluation.open(weights, options, listener)
    with evaluation.together():
        return _classify("linear", evaluation, data, protocol, 1.0, held_out, seed, out)


def evaluate_finetune(
    weights: str | Path,
    data: str | Path,
    *,
    fraction: float = 1.0,
    epochs: int | None = None,
    batch: int | None = None,
    head_rate: float | None = None,
    backbone_rate: float | None = None,
    held_out: float | None = None,
    seed: int = 0,
    out: str | Path | None = None,
    options: EvalOptions | None = None,
    listener: Listener | None = None,
) -> list[Record]:
    """Top-1, top-5 and mean per-class accuracy after fine-tuning end to end on a share of the
    labels.

    Which images a share holds is a fixed rule: see ``xmoco.data.subset.labelled_share``. Everything
    else is as for ``evaluate_linear``.
    """
    _expect_possible(epochs, batch, head_rate=head_rate, backbone_rate=backbone_rate)
    protocol = FINETUNE.changed(epochs, batch, head_rate, backbone_rate)
    evaluation = Evaluation.open(weights, options, listener)
    with evaluation.together():
        return _classify("finetune", evaluation, data, protocol, fraction, held_out, seed, out)


def _expect_possible(epochs: int | None, batch: int | None, **rates: float | None) -> None:
    """What is given in place of a protocol's own."""
    for name, count in (("epochs", epochs), ("batch", batch)):
        if count is not None and not isinstance(count, int):
            raise UserError(f"{name}={shortened(count)} is no whole number.")
    if epochs is not None and epochs < 1:
        raise UserError(f"{epochs} epochs are too few: give at least 1.")
    if batch is not None and batch < 2:
        raise UserError(f"batches of {batch} are too small: give at least 2 images.")
    for name, rate in rates.items():
        if rate is not None and not 0 < rate < math.inf:
            raise UserError(f"{name}={rate:g} is no learning rate: give a number above 0.")


def _classify(
    measure: str,
    evaluation: Evaluation,
    data: str | Path,
    protocol: EpochProtocol,
    fraction: float,
    held_out: float | None,
    seed: int,
    out: str | Path | None,
) -> list[Record]:
    check_seed(seed)
    train, test = labelled_splits(data, evaluation.options, evaluation.listener)
    if held_out is not None:
        if test is not None:
            raise UserError(f"{train.name} has a test split already: leave out --held-out.")
        train, test = held_out_to_judge(train, held_out)
    elif test is None:
        raise UserError(
            f"{train.name} has no test split: put the images into train/ and val/ folders, or hold "
            "out a share of every class with --held-out 0.2."
        )
    if fraction != 1:
        train = labelled_share(train, fraction)
    settings = _settings(evaluation, train, protocol, seed)
    name = f"{evaluation.weights.card.method}-{evaluation.digest}-{source_name(data)}"
    folder = _default_folder(name, settings) if out is None else Path(out).expanduser()
    _expect_same_course(folder, settings)
    # Whoever cannot train here need not read how it would go.
    on_first(evaluation.fabric, lambda: RunFolder.holds(folder, settings))
    steps = len(train) // protocol.batch_for(len(train))
    if protocol.frozen and steps < FEW_STEPS:
        evaluation.listener.say(
            f"the {len(train):,} training images make {steps} "
            f"{'step' if steps == 1 else 'steps'} per epoch, too few for {protocol.name} with its "
            f"learning rate of {protocol.head_rate:g}: the accuracy may be far too low. For small "
            "sets rather use `xmoco evaluate finetune`, whose batch shrinks, or `transfer`; or "
            "give a smaller batch and a lower rate with --batch and --head-rate."
        )
    classifier = train_classifier(
        evaluation.weights.backbone,
        train,
        protocol,
        folder,
        settings,
        input=evaluation.input,
        fabric=evaluation.fabric,
        seed=seed,
        readers=evaluation.options.readers,
        command=evaluation.options.command,
        on_step=evaluation.on_step(protocol.name.partition(", ")[0]),
        say=evaluation.listener.say,
    )
    evaluation.tell_of(RunFolder(folder).unreadable())

    def judge() -> list[Record]:
        judged = evaluation.scores(classifier, test)
        records = [
            evaluation.record(
                f"{measure}_{what}",
                value,
                train,
                source_name(data),
                seed,
                RunFolder(folder).environment().get("processes"),
                **(
                    {"split": "test"}
                    if held_out is None
                    else {"split": HELD_OUT, "held_out_share": held_out}
                ),
                judged=test.name,
                crop_size=evaluation.input.size,
                **asdict(protocol) | {"batch": protocol.batch_for(len(train))},
                label_fraction=fraction,
                train_images=len(train),
                judged_images=len(judged.places),
                **unreadable_fact(len(test), len(judged.places)),
                precision=evaluation.options.precision,
            )
            for what, value in {
                "top1": top_k(judged.scores, judged.labels, 1),
                "top5": top_k(judged.scores, judged.labels, 5),
                "mean_per_class": mean_per_class(judged.scores, judged.labels),
            }.items()
        ]
        RunFolder(folder).add_new(records)
        # Only now: whatever goes wrong with files, what was measured is recorded.
        _keep(classifier, evaluation, train, seed, folder)
        _report(evaluation, folder, records[0], judged, train, test)
        return records

    return on_first(evaluation.fabric, judge)


def _keep(
    classifier: Classifier, evaluation: Evaluation, train: ImageSet, seed: int, folder: Path
) -> None:
    """As a file, which ``load_classifier`` reads; written anew, as it may be judged at another
    size now."""
    file, own, input = folder / FILE, evaluation.weights.card, evaluation.input
    protocol = classifier.protocol
    tuned = own.method if protocol.frozen else f"{own.method}, {protocol.name} on {train.name}"
    # What a transformer knows of places is of the size it was built for.
    size = own.size if timm_name(own.backbone) else input.size
    backbone_card = replace(
        own,
        method=printable(tuned)[:LONGEST_METHOD],
        size=size,
        eval_size=None if input.central_size == size else input.central_size,
        mean=input.mean,
        std=input.std,
    )
    try:
        card = ClassifierCard(
            classes=tuple(map(printable, train.classes or ())),
            protocol=protocol.name,
            data=printable(train.name),
            seed=seed,
        )
        save_classifier(classifier.backbone, classifier.head, card, backbone_card, file)
    except UserError as error:
        evaluation.listener.say(f"the classifier cannot be kept as a file: {error}")
    else:
        RunFolder(folder).checkpoints.keep_newest()
        evaluation.listener.say(f"the classifier is kept in {file}; `xmoco classify` applies it.")


def _report(
    evaluation: Evaluation,
    folder: Path,
    record: Record,
    judged: Judged,
    train: ImageSet,
    test: ImageSet,
) -> None:
    # Imported here because it takes half a second, which nobody need wait for before this.
    from xmoco.report.classifier import Verdicts, write_classifier_report

    protocol, card = record.protocol, evaluation.weights.card
    rates = {"classifier": protocol["head_rate"], "backbone": protocol["backbone_rate"]}
    share = protocol["label_fraction"]
    facts = {
        "Backbone": f"{card.method}, {card.backbone}"
        + (", frozen" if not protocol["backbone_rate"] else ""),
        "Trained on": f"{train.name}: {len(train):,} images"
        + (f", {share:.3g} of each class" if share != 1 else ""),
        "Judged on": f"{test.name}: {len(judged.places):,} images of {protocol['size']} px",
        "Course": f"{protocol['epochs']} epochs, batches of {protocol['batch']}, crops of "
        f"{protocol['crop_size']} px",
        "Learning rates": ", ".join(f"{what} {rate:g}" for what, rate in rates.items() if rate),
        "Seed": str(record.seed),
    }
    report = write_classifier_report(
        folder,
        f"{protocol['name']} on {train.name}",
        Verdicts(judged.scores.cpu(), judged.labels.cpu(), judged.places, train.classes or ()),
        test,
        evaluation.input,
        facts,
    )
    evaluation.listener.say(f"the report is {report}")


def _settings(
    evaluation: Evaluation, train: ImageSet, protocol: EpochProtocol, seed: int
) -> dict[str, Any]:
    """All that a classifier depends on, however and wherever it is judged."""
    readers, on_progress = evaluation.options.readers, evaluation.on_progress("reading images")
    return plain(
        {
            **asdict(protocol) | {"batch": protocol.batch_for(len(train))},
            "weights": evaluation.digest,
            "images": on_first(
                evaluation.fabric, lambda: content_digest(train, readers, on_progress)
            ),
            "crop_size": evaluation.input.size,
            "mean": evaluation.input.mean,
            "std": evaluation.input.std,
            "precision": evaluation.options.precision,
            "seed": seed,
        }
    )


def _expect_same_course(folder: Path, settings: Mapping[str, Any]) -> None:
    """What was changed of it is in its name, too, but whoever did should read of that alone."""
    try:
        before = read_yaml(read_text(folder / "config.yaml"), "it")
    except UserError:  # there is none; or whoever needs it tells what is wrong
        return
    if not isinstance(before, Mapping):
        return
    then, now = (str(one.get("name")).partition(", ")[0] for one in (before, settings))
    for name in ("epochs", "batch", "head_rate", "backbone_rate") if then == now else ():
        if before.get(name) != settings[name]:
            raise UserError(
                f"{folder} was begun with other settings: {name} was "
                f"{shortened(before.get(name))} and is {settings[name]} now. Go on as it was "
                "begun, or give another folder with --out."
            )


def _default_folder(name: str, settings: Mapping[str, Any]) -> Path:
    """Other settings are another folder, so that nobody has to find names."""
    digest = hashlib.blake2b(json.dumps(settings).encode(), digest_size=4).hexdigest()
    words = f"{name}-{settings['name']}-seed{settings['seed']}-{digest}"
    return Path("runs", "evaluate", re.sub(r"[^\w.+-]+", "_", words))
