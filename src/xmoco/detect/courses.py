"""How long a detector is trained, with which rates, and on images of which sizes.

The paper's settings, which are MoCo's, which are Detectron2's: 16 images a step, rate 0.02 (0.01
for RetinaNet), warm-up over 100 steps, a tenth of the rate after each milestone, no weight decay of
norms.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from xmoco.config.optimizers import SGDConfig
from xmoco.detect.models import design_of
from xmoco.errors import UserError, nearest
from xmoco.schedules import Clock
from xmoco.train.loop import Plan

BATCH = 16
RATE = {True: 0.02, False: 0.01}  # of two stages, of one; per 16 images
FIRST_SHARE = 0.001  # of the rate, with which the warm-up begins
NORM_DECAY = 0.0  # the weight decay of norms
DECAY = 0.1
COCO_SIZES = tuple(range(640, 801, 32))
VOC_SIZES = tuple(range(480, 801, 32))
SIZES = range(32, 1025)  # that may be asked for


@dataclass(frozen=True)
class Course:
    """Steps of SGD, and what they are taken on."""

    name: str
    steps: int
    milestones: tuple[int, ...]
    sizes: tuple[int, ...] = COCO_SIZES
    """Lengths of an image's shorter side in training; the last one is for testing, too."""
    warmup: int = 100
    precise: int = 200
    """Batches from which the statistics of batch norms are computed anew before testing."""
    batch: int = BATCH
    rate: float = RATE[True]
    weight_decay: float = 1e-4
    """Of all but norms."""
    momentum: float = 0.9

    @property
    def test_size(self) -> int:
        return self.sizes[-1]

    @property
    def protocol(self) -> dict[str, Any]:
        """As records tell it."""
        return {
            "schedule": self.name,
            "size": self.test_size,
            "train_sizes": list(self.sizes),
            "steps": self.steps,
            "batch": self.batch,
            "rate": self.rate,
            "weight_decay": self.weight_decay,
            "norm_weight_decay": NORM_DECAY,
            "milestones": list(self.milestones),
            "warmup": self.warmup,
            "precise_batches": self.precise,
        }

    def learning_rate(self, clock: Clock) -> float:
        begun = min(1.0, clock.step / self.warmup) if self.warmup else 1.0
        warm = FIRST_SHARE * (1 - begun) + begun
        return self.rate * warm * DECAY ** sum(clock.step >= m for m in self.milestones)

    def plan(self, seed: int) -> Plan:
        optim = SGDConfig(
            learning_rate=self.rate, sgd_momentum=self.momentum, weight_decay=self.weight_decay
        )
        return Plan(
            batch=self.batch,
            total_steps=self.steps,
            seed=seed,
            optim=optim,
            peak_rate=self.rate,
            learning_rate=self.learning_rate,
        )


COURSES: Mapping[str, Course] = {
    course.name: course
    for course in (
        Course("1x", 90_000, (60_000, 80_000)),
        Course("2x", 180_000, (120_000, 160_000)),
        Course("3x", 270_000, (210_000, 250_000)),
        Course("voc-12k", 12_000, (8_000, 10_000), VOC_SIZES),
        Course("voc-24k", 24_000, (18_000, 22_000), VOC_SIZES),
    )
}


def course_of(
    schedule: str, model: str, *, images: int, batch: int = BATCH, size: int | None = None
) -> Course:
    """A course by name, or of ``N-steps``, for so many images in batches of ``batch``.

    The rate is in proportion to the batch. ``size`` is the shorter side of images in testing;
    sizes in training are in the same proportion to it as ever.
    """
    course = COURSES.get(schedule) or _of_steps(schedule)
    if batch < 1:
        raise UserError(f"batch={batch} is too small: give at least 1.")
    if size is not None and size not in SIZES:
        raise UserError(f"size={size} is not a whole number from {SIZES[0]} to {SIZES[-1]}.")
    sizes = course.sizes
    if size is not None:
        sizes = tuple(round(side * size / course.test_size) for side in course.sizes)
    taken = min(batch, images)
    rate = RATE[design_of(model).two_stages] * taken / BATCH
    return replace(course, sizes=sizes, batch=taken, rate=rate)


def _of_steps(schedule: str) -> Course:
    """So many steps, in the proportions of 1x, but the warm-up at most a tenth."""
    match = re.fullmatch(r"([1-9]\d*)(-steps)?", schedule)
    if match is None:
        known = ", ".join(COURSES)
        raise UserError(
            f"unknown schedule {schedule!r}{nearest(schedule, COURSES)}; there are {known}, and a "
            "number of steps such as 500-steps."
        )
    steps, usual = int(match[1]), COURSES["1x"]
    return replace(
        usual,
        name=f"{steps}-steps",
        steps=steps,
        milestones=tuple(round(m * steps / usual.steps) for m in usual.milestones),
        warmup=min(usual.warmup, steps // 10),
        precise=min(usual.precise, -(-steps // 10)),
    )
