"""``xmoco evaluate detect``: a detector is tuned on a backbone, and its AP is the record."""

import copy
import hashlib
import json
import re
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from xmoco.data import Unreadable
from xmoco.data.fingerprint import content_digest
from xmoco.data.sources import source_name
from xmoco.data.subset import some_positions
from xmoco.detect.courses import BATCH, Course, course_of
from xmoco.detect.detector_files import DetectorCard
from xmoco.detect.masks import hotcoco
from xmoco.detect.metrics import (
    PLURALS,
    TITLES,
    Detections,
    Judged,
    judge_coco,
    judge_voc,
)
from xmoco.detect.models import Design, build_detector, design_of
from xmoco.detect.objects import DetectionSet, some_of
from xmoco.detect.prediction import predicted
from xmoco.detect.report import (
    JUDGED_ON_THE_WAY,
    picture_detections,
    write_detection_report,
)
from xmoco.detect.sources import open_detection
from xmoco.detect.training import LOOKS, train_detector
from xmoco.errors import UserError
from xmoco.evaluate.evaluation import EvalOptions, Evaluation, Listener, check_seed
from xmoco.nn.backbones import build_backbone
from xmoco.nn.named_models import SCRATCH
from xmoco.records import Record
from xmoco.train.engine import on_first
from xmoco.train.run_folder import RunFolder, plain


@dataclass(frozen=True)
class Verdict:
    """What was judged, by whose rules, and how it came out."""

    kind: str  # box or mask
    metric: str
    judged: Judged


def evaluate_detect(
    weights: str | Path,
    data: str | Path,
    *,
    model: str,
    schedule: str,
    seeds: Sequence[int] = (0,),
    batch: int = BATCH,
    looks: int = LOOKS,
    out: str | Path | None = None,
    options: EvalOptions | None = None,
    listener: Listener | None = None,
) -> list[Record]:
    """Average precision of a detector on the backbone, tuned on the images of ``data``, all layers.

    ``data`` is a folder or an archive in COCO's, VOC's or YOLO's layout. One detector is trained
    for each seed, in a run folder under ``out``; the same call goes on there after an interruption,
    and finds finished detectors again. ``weights`` may also be ``scratch:resnet50``. About
    ``looks`` times on the way AP is measured on some validation images.
    """
    design = design_of(model)
    if not seeds:
        raise UserError("give at least one seed.")
    for seed in seeds:
        check_seed(seed)
    if looks < 0:
        raise UserError(f"looks={looks} is too few: give how often, or 0 for never.")
    hotcoco()  # if it is not there, that is better known now than after the training
    options = options or EvalOptions()
    course = course_of(schedule, model, images=batch, batch=batch, size=options.size)
    evaluation = Evaluation.open(weights, options, listener)
    train, test = open_detection(data, short_side=course.test_size)
    _tell_of_dropped(evaluation, train, test)
    learnt = train.to_learn_from()
    if design.masks and test.objects.masks is None:
        raise UserError(f"{model} draws masks, and not every object of {test.name} has one.")
    course = course_of(schedule, model, images=len(learnt), batch=batch, size=options.size)
    job = _Job(evaluation, model, design, course, learnt, test, source_name(data), looks)
    images = job.images_digest()
    records: list[Record] = []
    for seed in seeds:
        settings = job.settings(seed, images)
        folder = job.folder(settings, out, alone=len(seeds) == 1)
        records += job.run(seed, folder, settings)
    return records


def summary(records: Sequence[Record]) -> list[tuple[str, str, float, float | None]]:
    """Kind and metric, measure, mean over seeds and, of several, their standard deviation."""
    values: dict[tuple[str, str], list[float]] = {}
    for record in records:
        kind, _, measure = record.measure.partition("_")
        key = f"{kind}, {record.protocol['metric']}", TITLES[measure]
        values.setdefault(key, []).append(record.value)
    return [
        (
            *key,
            statistics.fmean(found),
            statistics.stdev(found) if len(found) > 1 else None,
        )
        for key, found in values.items()
    ]


def _tell_of_dropped(evaluation: Evaluation, *sets: DetectionSet) -> None:
    for data in sets:
        if data.dropped:
            count = "1 box" if len(data.dropped) == 1 else f"{len(data.dropped):,} boxes"
            evaluation.listener.say(
                f"{count} of {data.name} with no area inside the image left out: "
                f"{some_of(data.dropped)}."
            )


def verdicts(data: DetectionSet, found: Detections, masks: bool) -> list[Verdict]:
    """By the official evaluation of the set."""
    if data.rules == "voc":
        return [
            Verdict("box", "VOC, 11 points", judge_voc(data, found)),
            Verdict("box", "VOC, area", judge_voc(data, found, eleven_points=False)),
        ]
    boxes = [Verdict("box", "COCO", judge_coco(data, found, "boxes"))]
    return boxes + ([Verdict("mask", "COCO", judge_coco(data, found, "masks"))] if masks else [])


def _first_of_each_kind(results: Sequence[Verdict]) -> dict[str, Judged]:
    """Of VOC's two metrics, that with 11 points."""
    found: dict[str, Judged] = {}
    for result in results:
        found.setdefault(result.kind, result.judged)
    return found


@dataclass(frozen=True)
class _Job:
    """All that the detectors of several seeds share."""

    evaluation: Evaluation
    model: str
    design: Design
    course: Course
    train: DetectionSet
    test: DetectionSet
    name: str  # of the images
    looks: int

    def images_digest(self) -> str:
        readers = self.evaluation.options.readers
        on_progress = self.evaluation.on_progress("reading images")
        return on_first(
            self.evaluation.fabric,
            lambda: content_digest(self.train.images, readers, on_progress),
        )

    def settings(self, seed: int, images: str) -> dict[str, Any]:
        """All that a detector depends on, however it is judged."""
        evaluation = self.evaluation
        return plain(
            {
                "model": self.model,
                **asdict(self.course),
                "weights": evaluation.digest,
                "images": images,
                "objects": self.train.digest(),
                "mean": evaluation.input.mean,
                "std": evaluation.input.std,
                "precision": evaluation.options.precision,
                "seed": seed,
            }
        )

    def folder(self, settings: Mapping[str, Any], out: str | Path | None, alone: bool) -> Path:
        seed = settings["seed"]
        if out is not None:
            return Path(out) if alone else Path(out) / f"seed-{seed}"
        digest = hashlib.blake2b(json.dumps(settings).encode(), digest_size=4).hexdigest()
        who = f"{self.evaluation.weights.card.method}-{self.evaluation.digest}"
        words = f"{who}-{self.name}-{self.model}-{self.course.name}-seed{seed}-{digest}"
        return Path("runs", "detect", re.sub(r"[^\w.+-]+", "_", words))

    def run(self, seed: int, folder: Path, settings: Mapping[str, Any]) -> list[Record]:
        evaluation, fabric = self.evaluation, self.evaluation.fabric
        name = f"{self.design.title}, seed {seed}"
        detector, training_seconds = train_detector(
            self.detector(seed),
            self.train,
            self.course,
            self.card(seed),
            folder,
            settings,
            masks=self.design.masks,
            fabric=fabric,
            seed=seed,
            readers=evaluation.options.readers,
            command=evaluation.options.command,
            judge=self.on_the_way,
            looks=self.looks,
            on_step=evaluation.on_step(name),
            say=evaluation.listener.say,
        )
        evaluation.tell_of(RunFolder(folder).unreadable())

        def judge() -> list[Record]:
            started = time.perf_counter()
            found = self.found(detector, self.test)
            results = verdicts(self.test, found, self.design.masks)
            seconds = {
                "training_seconds": round(training_seconds, 3),
                "judging_seconds": round(time.perf_counter() - started, 3),
            }
            records = [
                replace(record, protocol=record.protocol | seconds)
                for result in results
                for record in self.records(result, seed, folder)
            ]
            RunFolder(folder).add_new(records)
            self.report(detector, folder, records, results)
            return records

        return on_first(fabric, judge)

    def report(
        self, detector: nn.Module, folder: Path, records: list[Record], results: list[Verdict]
    ) -> None:
        evaluation = self.evaluation
        pictures = picture_detections(detector, self.test, evaluation.device, truth=True)
        firsts = _first_of_each_kind(results)
        judged = {PLURALS[kind]: result for kind, result in firsts.items()}
        card = self.card(records[0].seed)
        report = write_detection_report(folder, card, records, judged, pictures)
        evaluation.listener.say(f"the detector and its report are in {report.parent}.")

    def detector(self, seed: int) -> nn.Module:
        """What training begins with: the backbone as it is, the rest by the seed."""
        card, weights = self.evaluation.weights.card, self.evaluation.weights
        torch.manual_seed(seed)
        if card.method == SCRATCH:
            backbone = build_backbone(card.backbone, card.stem)
        else:
            backbone = copy.deepcopy(weights.backbone)
        backbone.requires_grad_(True)
        detector = build_detector(
            self.model,
            backbone.cpu(),
            len(self.train.categories),
            size=self.course.test_size,
            mean=self.evaluation.input.mean,
            std=self.evaluation.input.std,
        )
        return detector.to(self.evaluation.device)

    def card(self, seed: int) -> DetectorCard:
        own = self.evaluation.weights.card
        return DetectorCard(
            model=self.model,
            backbone=own.backbone,
            stem=own.stem,
            categories=self.train.categories,
            size=self.course.test_size,
            mean=self.evaluation.input.mean,
            std=self.evaluation.input.std,
            method=own.method,
            schedule=self.course.name,
            data=self.train.name,
            seed=seed,
            started_from=own.started_from,
        )

    def found(self, detector: nn.Module, data: DetectionSet) -> Detections:
        broken = Unreadable(len(data))
        detections = predicted(
            detector,
            data,
            self.evaluation.device,
            readers=self.evaluation.options.readers,
            unreadable=broken,
            on_progress=self.evaluation.on_progress("judging"),
        )
        self.evaluation.tell_of(broken)
        return detections

    def on_the_way(self, detector: nn.Module) -> dict[str, float]:
        """AP of some images, for the curves."""
        positions = some_positions(len(self.test), JUDGED_ON_THE_WAY).numpy()
        some = self.test.at(np.asarray(positions))
        results = verdicts(some, self.found(detector, some), self.design.masks)
        return {
            f"{kind}_{measure.lower()}": value
            for kind, judged in _first_of_each_kind(results).items()
            for measure, value in judged.values.items()
            if measure in ("AP", "AP50", "AP75")
        }

    def records(self, verdict: Verdict, seed: int, folder: Path) -> list[Record]:
        return [
            self.evaluation.record(
                f"{verdict.kind}_{measure.lower()}",
                value,
                self.train.images,
                self.name,
                seed,
                RunFolder(folder).environment().get("processes"),
                name=self.design.title,
                model=self.model,
                **self.course.protocol,
                metric=verdict.metric,
                split="test",
                judged=self.test.name,
                categories=len(self.train.categories),
                train_images=len(self.train),
                judged_images=len(self.test),
                precision=self.evaluation.options.precision,
            )
            for measure, value in verdict.judged.values.items()
        ]
