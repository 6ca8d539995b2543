"""The losses of torchvision's detectors, for whole batches and almost without waiting.

torchvision goes through the images of a batch one by one and asks the device for numbers at every
turn. Here anchors and regions of all images are matched, sampled and weighed at once. What is
computed is the same: where nothing is left to chance, the tests find torchvision's own losses. The
host waits for the device once in a step of a two-stage detector: to learn how many regions there
are of each level.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torchvision.ops import MultiScaleRoIAlign, roi_align, sigmoid_focal_loss

from xmoco.detect.boxes import areas, clipped, decode, encode, overlaps
from xmoco.detect.frames import sent
from xmoco.detect.models import Shared
from xmoco.detect.suppression import suppressed

BETA = 1 / 9  # where smooth L1 turns from a parabola into a line
IGNORE, BACKGROUND = -1, 0

MaskTargets = Callable[[Tensor, Tensor, Tensor, int], Tensor]
"""Masks (p, side, side) of objects inside boxes (p, 4): image numbers, boxes, objects, side."""


class Targets(NamedTuple):
    """What is in the images of a batch."""

    sizes: Tensor
    """float (n, 2): height and width of each image, in the top left corner of its canvas."""
    boxes: Tensor
    """float (n, m, 4), in pixels of the canvas."""
    labels: Tensor
    """int64 (n, m): 1 and more; 0 where an image has fewer objects than m."""


def detector_losses(
    model: Any, images: Tensor, targets: Targets, masks: MaskTargets | None = None
) -> dict[str, Tensor]:
    """By name; ``images`` (n, 3, H, W) are normalised, H and W multiples of 32."""
    features = model.backbone(images)
    levels = [features] if isinstance(features, Tensor) else list(features.values())
    if not hasattr(model, "rpn"):
        return _one_stage(model, images, levels, targets)
    proposals, there, losses = _proposals(model.rpn, images, levels, targets)
    return losses | _regions(model.roi_heads, images, levels, proposals, there, targets, masks)


def anchors_of(generator: Any, images: Tensor, levels: list[Tensor]) -> list[Tensor]:
    """The anchors (k, 4) of each level, in float32 whatever the features are in."""
    generator.set_cell_anchors(torch.float32, images.device)
    grids = [level.shape[-2:] for level in levels]
    height, width = images.shape[-2:]
    strides = [(height // high, width // wide) for high, wide in grids]
    found: list[Tensor] = generator.grid_anchors(grids, strides)
    return found


class Matches(NamedTuple):
    state: Tensor
    """(n, k): 1 where a reference box belongs to an object, 0 to none, -1 if it is between."""
    objects: Tensor
    """(n, k): which of the image's objects it overlaps most."""


def matched(reference: Tensor, targets: Targets, matcher: Any) -> Matches:
    """What torchvision's ``Matcher`` finds for reference boxes (k, 4) or (n, k, 4)."""
    there = targets.labels > 0
    share = overlaps(targets.boxes, reference).where(there[..., None], -1.0)
    best, objects = share.max(dim=1)
    state = torch.full_like(objects, IGNORE)
    state = state.masked_fill(best < matcher.low_threshold, BACKGROUND)
    state = state.masked_fill(best >= matcher.high_threshold, 1)
    if matcher.allow_low_quality_matches:
        # No object goes without: those that overlap it most are its own, however little.
        most = share.amax(dim=2, keepdim=True)
        state = state.masked_fill(((share == most) & (most > 0)).any(dim=1), 1)
    return Matches(state, objects)


class Sample(NamedTuple):
    """Rows drawn at random, positives first; as many columns whatever there is to draw from."""

    rows: Tensor
    """(n, s)"""
    drawn: Tensor
    """bool (n, s): what is not was there only to fill the row."""
    positives: int
    """So many columns are for positives."""


def sampled(state: Tensor, sampler: Any) -> Sample:
    """As torchvision's sampler: a share of positives at most, the rest background."""
    count = sampler.batch_size_per_image
    chance = torch.rand(state.shape, device=state.device)
    limit = min(int(count * sampler.positive_fraction), state.shape[1])
    positive, rows = chance.where(state == 1, -1.0).topk(limit, dim=1)
    ours = positive >= 0
    negative, others = chance.where(state == 0, -1.0).topk(min(count, state.shape[1]), dim=1)
    place = torch.arange(negative.shape[1], device=state.device)
    theirs = (negative >= 0) & (place < count - ours.sum(dim=1, keepdim=True))
    return Sample(torch.cat([rows, others], 1), torch.cat([ours, theirs], 1), limit)


def _taken(values: Tensor, rows: Tensor) -> Tensor:
    """The rows (n, s) of ``values`` (n, k) or (n, k, c)."""
    if values.ndim == 2:
        return values.gather(1, rows)
    return values.gather(1, rows[..., None].expand(-1, -1, values.shape[2]))


def _flat(maps: list[Tensor], columns: int) -> list[Tensor]:
    """Maps (n, a · columns, h, w) as (n, h · w · a, columns), as anchors are ordered."""
    return [m.permute(0, 2, 3, 1).reshape(len(m), -1, columns).float() for m in maps]


def _proposals(
    rpn: Any, images: Tensor, levels: list[Tensor], targets: Targets
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Boxes (n, p, 4) that may hold something, which of them are there (n, p), and the losses."""
    scores, codes = rpn.head(levels)
    scores, codes = [s[..., 0] for s in _flat(scores, 1)], _flat(codes, 4)
    anchors = anchors_of(rpn.anchor_generator, images, levels)
    with torch.no_grad():
        found = _best_of_levels(rpn, scores, codes, anchors, targets.sizes)
    every_anchor, score, code = torch.cat(anchors), torch.cat(scores, 1), torch.cat(codes, 1)
    with torch.no_grad():
        state, objects = matched(every_anchor, targets, rpn.proposal_matcher)
        sample = sampled(state, rpn.fg_bg_sampler)
        rows = sample.rows[:, : sample.positives]
        wanted = encode(_taken(targets.boxes, _taken(objects, rows)), every_anchor[rows])
        count = sample.drawn.sum()
    right = torch.zeros_like(sample.rows, dtype=torch.float32)
    right[:, : sample.positives] = 1
    each = F.binary_cross_entropy_with_logits(_taken(score, sample.rows), right, reduction="none")
    own = sample.drawn[:, : sample.positives, None]
    distance = F.smooth_l1_loss(_taken(code, rows), wanted, beta=BETA, reduction="none")
    return *found, {
        "objectness": each.where(sample.drawn, 0.0).sum() / count,
        "proposal boxes": distance.where(own, 0.0).sum() / count,
    }


def _best_of_levels(
    rpn: Any, scores: list[Tensor], codes: list[Tensor], anchors: list[Tensor], sizes: Tensor
) -> tuple[Tensor, Tensor]:
    """Of every level the best, without those that overlap a better one; then the best of all."""
    boxes, values, kept = [], [], []
    for score, code, anchor in zip(scores, codes, anchors, strict=True):
        value, rows = score.topk(min(rpn.pre_nms_top_n(), score.shape[1]), dim=1)  # best first
        box = clipped(decode(_taken(code, rows), anchor[rows]), sizes)
        boxes.append(box)
        values.append(value)
        kept.append(((box[..., 2:] - box[..., :2]) >= rpn.min_size).all(-1))
    kept = suppressed(boxes, kept, rpn.nms_thresh)
    value = torch.cat(values, 1).masked_fill(~torch.cat(kept, 1), -torch.inf)
    value, rows = value.topk(min(rpn.post_nms_top_n(), value.shape[1]), dim=1)
    return _taken(torch.cat(boxes, 1), rows), value > -torch.inf


class Regions(NamedTuple):
    """Regions to learn from, ordered by the level they are cut out of, positives first."""

    images: Tensor
    boxes: Tensor
    labels: Tensor
    objects: Tensor
    """(r,): which of the image's objects each region belongs to."""
    counts: list[tuple[int, int]]
    """Of each level: all, and positives among them."""

    @property
    def positives(self) -> list[slice]:
        """Where they are, level by level."""
        ends = torch.tensor([0, *(every for every, _ in self.counts)]).cumsum(0).tolist()
        return [slice(e, e + own) for e, (_, own) in zip(ends, self.counts, strict=False)]


@torch.no_grad()
def regions_to_learn_from(
    heads: Any, proposals: Tensor, there: Tensor, targets: Targets, strides: list[int]
) -> Regions:
    """Some proposals and objects of each image, each with the object it belongs to."""
    levels = len(strides)
    boxes = torch.cat([proposals, targets.boxes], 1)
    there = torch.cat([there, targets.labels > 0], 1)
    state, objects = matched(boxes, targets, heads.proposal_matcher)
    state = state.masked_fill(~there, IGNORE)
    sample = sampled(state, heads.fg_bg_sampler)
    box, thing = _taken(boxes, sample.rows), _taken(objects, sample.rows)
    positive = torch.zeros_like(sample.drawn)
    positive[:, : sample.positives] = True
    level = _level(heads.box_roi_pool, box, strides)
    # Sorted by these, what was not drawn comes last.
    group = (2 * level + ~positive).masked_fill(~sample.drawn, 2 * levels).flatten()
    order = group.sort(stable=True).indices
    sizes = (group[:, None] == torch.arange(2 * levels, device=group.device)).sum(0)
    counted = sizes.tolist()  # the host waits here
    counts = [(own + rest, own) for own, rest in zip(counted[::2], counted[1::2], strict=True)]
    order = order[: sum(counted)]
    return Regions(
        order // box.shape[1],
        box.flatten(0, 1)[order],
        (_taken(targets.labels, thing) * positive).flatten()[order],
        thing.flatten()[order],
        counts,
    )


def _level(pool: MultiScaleRoIAlign, boxes: Tensor, strides: list[int]) -> Tensor:
    """From which level a box is cut out: the larger the coarser (equation 1 of the FPN paper)."""
    finest, coarsest = (round(math.log2(stride)) for stride in (strides[0], strides[-1]))
    scale = areas(boxes).sqrt() / pool.canonical_scale
    level = torch.floor(pool.canonical_level + scale.log2() + 1e-6)
    return level.clamp(finest, coarsest).long() - finest


def _cut_out(
    pool: Any, levels: list[Tensor], canvas: int, images: Tensor, boxes: Tensor, counts: list[int]
) -> Tensor:
    """The features of boxes that are ordered by level."""
    rois = torch.cat([images[:, None].to(boxes.dtype), boxes], 1)
    parts = [
        roi_align(level, part, pool.output_size, level.shape[-2] / canvas, pool.sampling_ratio)
        for level, part in zip(levels, rois.split(counts), strict=False)
    ]
    return torch.cat(parts)


def _regions(
    heads: Any,
    images: Tensor,
    levels: list[Tensor],
    proposals: Tensor,
    there: Tensor,
    targets: Targets,
    masks: MaskTargets | None,
) -> dict[str, Tensor]:
    # Once for boxes and masks: regions are cut out in float32, channels apart.
    levels = [m.float().contiguous() for m in levels[: len(heads.box_roi_pool.featmap_names)]]
    canvas = images.shape[-2]
    strides = [round(canvas / level.shape[-2]) for level in levels]
    found = regions_to_learn_from(heads, proposals, there, targets, strides)
    every = [count for count, _ in found.counts]
    features = heads.box_head(
        _cut_out(heads.box_roi_pool, levels, canvas, found.images, found.boxes, every)
    )
    scores, codes = heads.box_predictor(features)
    own = torch.cat([torch.arange(p.start, p.stop) for p in found.positives])
    own = sent(own, images.device)
    image, box, label, thing = (
        values[own] for values in (found.images, found.boxes, found.labels, found.objects)
    )
    wanted = encode(targets.boxes[image, thing], box, heads.box_coder.weights)
    code = codes.float().view(len(codes), -1, 4)[own, label]
    losses = {
        "classes": F.cross_entropy(scores.float(), found.labels),
        "boxes": F.smooth_l1_loss(code, wanted, beta=BETA, reduction="sum") / len(found.labels),
    }
    if masks is None:
        return losses
    if isinstance(heads.mask_head, Shared):  # what the box head made of them serves again
        inner = features[own]
    else:
        positives = [count for _, count in found.counts]
        inner = heads.mask_head(
            _cut_out(heads.mask_roi_pool, levels, canvas, image, box, positives)
        )
    drawn = heads.mask_predictor(inner).float()
    drawn = drawn[torch.arange(len(label), device=label.device), label]
    expected = masks(image, box, thing, drawn.shape[-1])
    return losses | {"masks": F.binary_cross_entropy_with_logits(drawn, expected)}


def _one_stage(
    model: Any, images: Tensor, levels: list[Tensor], targets: Targets
) -> dict[str, Tensor]:
    """RetinaNet's: the mean over images of sums over anchors, each over the image's positives."""
    outputs: Mapping[str, Tensor] = model.head(levels)
    scores, codes = outputs["cls_logits"].float(), outputs["bbox_regression"].float()
    with torch.no_grad():
        anchors = torch.cat(anchors_of(model.anchor_generator, images, levels))
        state, objects = matched(anchors, targets, model.proposal_matcher)
        positive = state == 1
        label = _taken(targets.labels, objects) * positive
        right = torch.zeros_like(scores)
        right.scatter_(2, label[..., None], positive[..., None].to(scores.dtype))
        count = positive.sum(1).clamp(min=1)
        wanted = encode(_taken(targets.boxes, objects), anchors)
    each = sigmoid_focal_loss(scores, right, reduction="none").sum(-1)
    distance = (codes - wanted).abs().sum(-1)
    return {
        "classes": (each.where(state != IGNORE, 0.0).sum(1) / count).mean(),
        "boxes": (distance.where(positive, 0.0).sum(1) / count).mean(),
    }
