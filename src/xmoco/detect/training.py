"""Trains a detector in a run folder, and leaves it there as a file."""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from xmoco.data.batches import Order, epoch_order
from xmoco.detect.courses import Course
from xmoco.detect.detector_files import FILE, DetectorCard, read_detector, save_detector
from xmoco.detect.objects import DetectionSet
from xmoco.detect.task import DetectorTask
from xmoco.errors import UserError
from xmoco.fabric import Fabric
from xmoco.train.engine import on_first
from xmoco.train.in_folder import OnStep, StepReporter, train_in_folder
from xmoco.train.loop import Training

LOOKS = 10
"""How often a detector is judged on the way, about, unless told otherwise."""
SHAPES = 2 ** np.linspace(-1, 1, 7)
"""Between which shapes, as width over height, images are put into batches of their own."""

Judge = Callable[[nn.Module], Mapping[str, float]]
"""Values by name of a detector as it is."""


def train_detector(
    detector: nn.Module,
    data: DetectionSet,
    course: Course,
    card: DetectorCard,
    folder: Path,
    settings: Mapping[str, Any],
    *,
    masks: bool,
    fabric: Fabric,
    seed: int,
    readers: int = 8,
    command: str = "the same call",
    judge: Judge,
    looks: int = LOOKS,
    on_step: OnStep | None = None,
    say: Callable[[str], None] | None = None,
) -> "Trained":
    """The detector after the course, in eval mode, with statistics of batch norms computed anew.

    ``data`` is all to be learnt from. The same call goes on where it was interrupted, and finds a
    finished detector again. ``judge`` is asked about ``looks`` times on the way.
    """
    if course.batch % fabric.world_size:
        raise UserError(
            f"batches of {course.batch} images cannot be shared equally by {fabric.world_size} "
            "processes: change --batch or --devices."
        )
    if course.batch < 2 * fabric.world_size:
        raise UserError("batch norm needs at least two images at once: give a larger --batch.")
    # The number of regions changes with every step: cuDNN would never be done with trying.
    torch.backends.cudnn.benchmark = False
    task = DetectorTask(card.model, detector, data, course.sizes, masks)
    training = train_in_folder(
        task,
        data.images,
        lambda _: course.plan(seed),
        folder,
        settings,
        what="detector",
        batch=course.batch,
        seed=seed,
        fabric=fabric,
        order=batches_of_one_shape(data, course.batch),
        readers=readers,
        command=command,
        say=say,
        reporter=lambda training: _Judged(training, on_step, judge, looks),
    )
    if on_first(fabric, lambda: (folder / FILE).is_file()):
        finished, _ = read_detector(folder)
        return Trained(finished.to(fabric.device), training.seconds)
    make_batch_norms_precise(training, course.precise)
    on_first(fabric, lambda: save_detector(detector, card, folder / FILE))
    return Trained(detector.eval(), training.seconds)


class Trained(NamedTuple):
    detector: nn.Module
    seconds: float
    """Of all sessions; looks on the way are among them, precise batch norm is not."""


class _Judged(StepReporter):
    """Has the detector judged now and then, at the end of an epoch."""

    def __init__(
        self, training: Training, on_step: OnStep | None, judge: Judge, looks: int
    ) -> None:
        super().__init__(training, on_step)
        self.judge = judge
        epochs = training.total_steps / training.steps_per_epoch
        self.every = math.ceil(epochs / looks) if looks else None

    def on_epoch(self, epoch: int, step: int) -> None:
        if not self.every or epoch % self.every or step == self.training.total_steps:
            return
        task = self.training.task
        assert isinstance(task, DetectorTask)
        values = self.judge(task.detector)
        self.training.run.add_values(step, epoch, values)


def make_batch_norms_precise(training: Training, batches: int) -> None:
    """The running statistics become the mean over batches of training images.

    Those left by training are of weights that were still moving, and of few images.
    """
    with mean_statistics(training.task) as weigh:
        training.look_on(batches, weigh)


@contextmanager
def mean_statistics(module: nn.Module) -> Iterator[Callable[[int], None]]:
    """Running statistics become the mean over the batches that pass meanwhile; the number of each,
    from 1, is to be told before it."""
    norms = [norm for norm in module.modules() if isinstance(norm, nn.modules.batchnorm._BatchNorm)]
    before = [norm.momentum for norm in norms]

    def weigh(number: int) -> None:
        for norm in norms:
            norm.momentum = 1 / number  # the first counts wholly, the n-th as much as all before

    try:
        yield weigh
    finally:
        for norm, momentum in zip(norms, before, strict=True):
            norm.momentum = momentum


def batches_of_one_shape(data: DetectionSet, batch: int) -> Order:
    """Wide images together, and tall ones: a canvas that suits both is mostly padding.

    What is left over of each shape makes the last batches, which are shuffled among the others.
    """
    height, width = data.sizes.T
    shapes = np.digitize(width / height, SHAPES)

    def order(images: int, seed: int, epoch: int) -> Tensor:
        shuffled = epoch_order(images, seed, epoch)
        shape = shapes[shuffled.numpy()]
        whole, rest = [], []
        for kind in np.unique(shape):
            members = shuffled[torch.from_numpy(shape == kind)]
            used = len(members) - len(members) % batch
            whole += members[:used].split(batch)
            rest.append(members[used:])
        left = torch.cat(rest)
        used = len(left) - len(left) % batch
        whole += left[:used].split(batch)
        places = epoch_order(len(whole), seed + 1, epoch)
        return torch.cat([*(whole[place] for place in places.tolist()), left[used:]])

    return order
