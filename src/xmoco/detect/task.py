"""A detector in training: a task for the one loop."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from xmoco.data import Batch
from xmoco.detect.frames import drawn, framed, sent
from xmoco.detect.losses import Targets, detector_losses
from xmoco.detect.objects import DetectionSet
from xmoco.detect.run_lengths import RunLengths
from xmoco.distributed import processes
from xmoco.errors import UserError
from xmoco.nn.batchnorm import split_statistics
from xmoco.nn.blocks import fuse_layers
from xmoco.task import Moment, ParamGroup, StepOutput, Task, Values


def norms_apart(module: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Parameters of norms, which do not decay in Detectron2, and all others, biases among them."""
    norms = {
        parameter
        for layer in module.modules()
        if isinstance(layer, nn.modules.batchnorm._NormBase)
        for parameter in layer.parameters(recurse=False)
    }
    learning = [parameter for parameter in module.parameters() if parameter.requires_grad]
    return [p for p in learning if p in norms], [p for p in learning if p not in norms]


class DetectorTask(Task):
    """Trains a detector on images in random sizes, half of them mirrored.

    All that is known of the images' objects is kept on the device.
    """

    capturable = False  # images, and how many regions there are of each level, vary in size

    def __init__(
        self,
        title: str,
        detector: nn.Module,
        data: DetectionSet,
        sizes: tuple[int, ...],
        masks: bool = False,
    ) -> None:
        super().__init__()
        self.title = title
        self.detector = detector
        self.data = data
        self.sizes = sizes
        transform: Any = detector.transform
        self.longest: int = transform.max_size
        self.mean, self.std = tuple(transform.image_mean), tuple(transform.image_std)
        objects = data.objects
        heights = data.sizes[objects.images]
        inside = np.minimum(objects.boxes.clip(min=0), np.tile(heights[:, ::-1], 2))
        self.boxes = torch.from_numpy(inside).float()
        self.labels = torch.from_numpy(objects.labels) + 1
        self.masks: RunLengths | None = None
        if masks:
            if objects.masks is None:
                raise UserError(
                    f"{title} learns masks, and not every object of {data.name} has one: choose a "
                    "faster-rcnn, or add them."
                )
            self.masks = RunLengths.of(objects.masks, heights)
        # Where the objects of each image begin, and how many they are.
        self.counts = np.bincount(objects.images, minlength=len(data))
        self.starts = self.counts.cumsum() - self.counts

    def param_groups(self) -> list[ParamGroup]:
        norms, others = norms_apart(self)
        return [ParamGroup(others), ParamGroup(norms, decays=False)]

    def optimize_for(self, device: torch.device) -> None:
        self.boxes, self.labels = self.boxes.to(device), self.labels.to(device)
        if self.masks is not None:
            self.masks = self.masks.to(device)
        if device.type == "cuda":
            if processes() > 1:
                nn.SyncBatchNorm.convert_sync_batchnorm(self.detector)
            else:
                split_statistics(self.detector, groups=1)
            fuse_layers(self.detector)

    def inputs(self, batch: Batch, moment: Moment) -> Sequence[Tensor]:
        """Images, their sizes, boxes, labels, the objects' numbers, and how to find the way back
        from an image to the original."""
        self._check_sizes(batch)
        device = batch.images.device
        frames = framed(batch, drawn(moment, self.sizes), self.longest, self.mean, self.std)
        shown = batch.indices.numpy()
        counts, most = self.counts[shown], int(self.counts[shown].max())
        place = np.arange(most)
        there = place < counts[:, None]
        rows = np.where(there, self.starts[shown, None] + place, 0)
        # Pixels of the frame per pixel of the original, both ways; where the mirror stands.
        scale = frames.sizes.numpy() / self.data.sizes[shown]
        mirror = np.where(frames.flips.numpy(), frames.sizes.numpy()[:, 1], 0)
        numbers = np.column_stack([scale[:, ::-1], mirror]).astype(np.float32)
        objects, present, way, sizes = (
            sent(torch.from_numpy(array), device)
            for array in (rows, there, numbers, frames.sizes.numpy().astype(np.float32))
        )
        boxes = _into_frames(self.boxes[objects], way) * present[..., None]
        return [frames.images, sizes, boxes, self.labels[objects] * present, objects, way]

    def _check_sizes(self, batch: Batch) -> None:
        """Images must be what their annotations are about, though perhaps shrunk."""
        told = self.data.sizes[batch.indices.numpy()]
        shares = batch.sizes.numpy() / told
        wrong = np.flatnonzero(abs(shares[:, 0] - shares[:, 1]) > (1 / told).sum(axis=1))
        if len(wrong):
            (height, width), (high, wide) = batch.sizes[wrong[0]].tolist(), told[wrong[0]]
            where = self.data.images.where(int(batch.indices[wrong[0]]))
            raise UserError(
                f"{where} is of {width} × {height} pixels, but its annotations are for "
                f"{wide} × {high}."
            )

    def forward(
        self,
        inputs: Sequence[Tensor],
        at: Values,  # noqa: ARG002
        with_metrics: bool = False,  # noqa: ARG002
    ) -> StepOutput:
        images, sizes, boxes, labels, objects, way = inputs

        def masks_inside(image: Tensor, box: Tensor, thing: Tensor, side: int) -> Tensor:
            assert self.masks is not None
            original = _out_of_frames(box[:, None], way[image])[:, 0]
            drawn = self.masks.inside(objects[image, thing], original, side)
            mirrored = (way[image, 2] > 0)[:, None, None]
            return drawn.flip(-1).where(mirrored, drawn)

        losses = detector_losses(
            self.detector,
            images,
            Targets(sizes, boxes, labels),
            None if self.masks is None else masks_inside,
        )
        return StepOutput(torch.stack([*losses.values()]).sum(), losses, {})


def _into_frames(boxes: Tensor, way: Tensor) -> Tensor:
    """Boxes (n, m, 4) of the original as they are in the frame: scaled and, perhaps, mirrored."""
    scale, mirror = way[:, None, :2].repeat(1, 1, 2), way[:, None, 2]
    left, top, right, bottom = (boxes * scale).unbind(-1)
    swapped = torch.stack([mirror - right, top, mirror - left, bottom], dim=-1)
    return swapped.where(mirror[..., None] > 0, torch.stack([left, top, right, bottom], dim=-1))


def _out_of_frames(boxes: Tensor, way: Tensor) -> Tensor:
    """The inverse."""
    scale, mirror = way[:, None, :2].repeat(1, 1, 2), way[:, None, 2]
    left, top, right, bottom = boxes.unbind(-1)
    swapped = torch.stack([mirror - right, top, mirror - left, bottom], dim=-1)
    return swapped.where(mirror[..., None] > 0, boxes) / scale
