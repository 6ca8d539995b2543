"""Our losses are torchvision's, where nothing is left to chance; the C4 head is what it says."""

import copy
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close
from torchvision.models.detection._utils import BoxCoder, Matcher
from torchvision.models.detection.roi_heads import project_masks_on_boxes
from torchvision.ops import box_iou, roi_align

from xmoco.detect.boxes import decode, encode, overlaps
from xmoco.detect.losses import IGNORE, Targets, detector_losses, matched, sampled
from xmoco.detect.masks import runs_of_bitmap
from xmoco.detect.models import DESIGNS, build_detector
from xmoco.detect.run_lengths import RunLengths
from xmoco.nn.backbones import build_resnet

SIZES = ((96, 80), (64, 96))
CANVAS = 96


def boxes(generator: torch.Generator, count: int, height: int, width: int) -> Tensor:
    corners = torch.rand(count, 2, generator=generator) * torch.tensor([width - 30, height - 30])
    sides = 10 + 20 * torch.rand(count, 2, generator=generator)
    return torch.cat([corners, corners + sides], dim=1)


@pytest.fixture
def truth() -> list[dict[str, Tensor]]:
    """As torchvision wants it: three objects in the first image, one in the second."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for (height, width), count in zip(SIZES, (3, 1), strict=True):
        box = boxes(generator, count, height, width)
        y, x = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
        left, top, right, bottom = (side[:, None, None] for side in box.unbind(1))
        inside = (x >= left) & (x < right) & (y >= top) & (y < bottom) & ((x + y) % 9 > 1)
        labels = torch.randint(1, 4, (count,), generator=generator)
        found.append({"boxes": box, "labels": labels, "masks": inside.to(torch.uint8)})
    return found


def padded(truth: list[dict[str, Tensor]]) -> Targets:
    most = max(len(one["boxes"]) for one in truth)
    return Targets(
        torch.tensor(SIZES, dtype=torch.float32),
        torch.stack(
            [nn.functional.pad(t["boxes"], (0, 0, 0, most - len(t["boxes"]))) for t in truth]
        ),
        torch.stack([nn.functional.pad(t["labels"], (0, most - len(t["labels"]))) for t in truth]),
    )


def detector(name: str) -> Any:
    """A small one that takes every anchor and every proposal, so that nothing is drawn."""
    torch.manual_seed(0)
    model: Any = build_detector(
        name,
        build_resnet("tiny"),
        3,
        size=CANVAS,
        mean=(0.0, 0.0, 0.0),
        std=(1.0, 1.0, 1.0),
    )
    for layer in model.modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):  # heads begin so small that all is zero
            layer.weight.data *= 3
    if DESIGNS[name].two_stages:
        for sampler in (model.rpn.fg_bg_sampler, model.roi_heads.fg_bg_sampler):
            sampler.batch_size_per_image, sampler.positive_fraction = 100_000, 0.5
        model.rpn._pre_nms_top_n = {"training": 100}
        model.rpn._post_nms_top_n = {"training": 30}
    return model.train()


NAMES = {
    "loss_objectness": "objectness",
    "loss_rpn_box_reg": "proposal boxes",
    "loss_classifier": "classes",
    "loss_box_reg": "boxes",
    "loss_mask": "masks",
    "classification": "classes",
    "bbox_regression": "boxes",
}


@pytest.mark.parametrize("name", DESIGNS)
def test_losses_and_gradients_are_torchvisions(name: str, truth: list[dict[str, Tensor]]) -> None:
    design = DESIGNS[name]
    ours = detector(name)
    if design.masks and not design.pyramid:
        # torchvision would send positives through the shared head again, with statistics of their
        # own; without statistics of a batch both ways are one.
        for norm in ours.modules():
            if isinstance(norm, nn.BatchNorm2d):
                norm.eval()
    theirs = copy.deepcopy(ours)
    theirs.transform.resize = lambda image, target=None: (image, target)
    generator = torch.Generator().manual_seed(2)
    images = [torch.rand(3, *size, generator=generator) for size in SIZES]
    canvas = torch.zeros(2, 3, CANVAS, CANVAS)
    for place, image in zip(canvas, images, strict=True):
        place[:, : image.shape[1], : image.shape[2]] = image

    def masks(image: Tensor, box: Tensor, thing: Tensor, side: int) -> Tensor:
        rows = [
            project_masks_on_boxes(truth[int(i)]["masks"], b[None], t[None], side)
            for i, b, t in zip(image, box, thing, strict=True)
        ]
        return torch.cat(rows)

    found = detector_losses(ours, canvas, padded(truth), masks if design.masks else None)
    targets = (
        truth if design.masks else [{key: one[key] for key in ("boxes", "labels")} for one in truth]
    )
    expected = {NAMES[key]: value for key, value in theirs(images, targets).items()}
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert value > 1e-4, key
        assert_close(found[key], value, rtol=1e-4, atol=1e-6, msg=lambda m, key=key: f"{key}: {m}")
    sum(found.values()).backward()
    sum(expected.values()).backward()
    for (part, own), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert own.grad is not None, part
        assert_close(own.grad, other.grad, rtol=2e-3, atol=2e-4, msg=lambda m, p=part: f"{p}: {m}")


def half_masks(image: Tensor, _box: Tensor, _thing: Tensor, side: int) -> Tensor:
    return torch.full((len(image), side, side), 0.5, device=image.device)


def on_gpu(name: str, truth: list[dict[str, Tensor]]) -> tuple[Any, Tensor, Targets]:
    images = torch.rand(2, 3, CANVAS, CANVAS, generator=torch.Generator().manual_seed(2))
    targets = Targets(*(part.cuda() for part in padded(truth)))
    return detector(name).cuda(), images.cuda(), targets


@pytest.mark.gpu
@pytest.mark.parametrize("name", DESIGNS)
def test_a_gpu_finds_the_same_losses(name: str, truth: list[dict[str, Tensor]]) -> None:
    """With the kernels of suppression among what it does."""
    masks = half_masks if DESIGNS[name].masks else None
    model, images, targets = on_gpu(name, truth)
    expected = detector_losses(detector(name), images.cpu(), padded(truth), masks)
    with torch.backends.cudnn.flags(allow_tf32=False):
        found = detector_losses(model, images, targets, masks)
    for key, value in expected.items():
        assert_close(found[key].cpu(), value, rtol=1e-2, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("name", DESIGNS)
def test_a_gpu_is_waited_for_once_a_step_at_most(name: str, truth: list[dict[str, Tensor]]) -> None:
    model, images, targets = on_gpu(name, truth)
    masks = half_masks if DESIGNS[name].masks else None
    for _ in range(2):  # the first time, libraries set themselves up
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                sum(detector_losses(model, images, targets, masks).values()).backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    waits = [warning for warning in told if "synchronizing" in str(warning.message)]
    assert len(waits) <= DESIGNS[name].two_stages, [str(warning.message) for warning in waits]


@pytest.mark.parametrize("low_quality", [True, False])
def test_boxes_are_matched_as_by_torchvision(
    low_quality: bool, truth: list[dict[str, Tensor]]
) -> None:
    generator = torch.Generator().manual_seed(3)
    reference = torch.cat([boxes(generator, 200, 96, 96), truth[0]["boxes"] + 1, truth[0]["boxes"]])
    matcher = Matcher(0.6, 0.3, allow_low_quality_matches=low_quality)
    found = matched(reference, padded(truth), matcher)
    for image, one in enumerate(truth):
        expected = matcher(box_iou(one["boxes"], reference))
        positive = expected >= 0
        assert {-2, -1} <= set(expected.tolist()) or low_quality
        assert torch.equal(found.state[image] == 1, positive)
        assert torch.equal(found.state[image] == IGNORE, expected == Matcher.BETWEEN_THRESHOLDS)
        assert torch.equal(found.objects[image][positive], expected[positive])


def test_codes_are_torchvisions() -> None:
    generator = torch.Generator().manual_seed(4)
    some, others = (boxes(generator, 50, 300, 200) for _ in range(2))
    weights = (10.0, 10.0, 5.0, 5.0)
    assert_close(encode(some, others, weights), BoxCoder(weights).encode_single(some, others))
    codes = torch.randn(50, 4, generator=generator) * 3
    plain = BoxCoder((1.0, 1.0, 1.0, 1.0))
    assert_close(decode(codes, others), plain.decode_single(codes, others))
    assert_close(overlaps(some, others), box_iou(some, others))


def test_samples_are_drawn_as_asked_for() -> None:
    class Sampler:
        batch_size_per_image, positive_fraction = 8, 0.25

    state = torch.tensor([[1] * 5 + [0] * 20 + [-1] * 5, [1] + [0] * 3 + [-1] * 26])
    torch.manual_seed(0)
    counts = torch.zeros_like(state)
    for _ in range(300):
        sample = sampled(state, Sampler())
        assert sample.drawn.sum(1).tolist() == [8, 4]
        for row, (rows, drawn) in enumerate(zip(sample.rows, sample.drawn, strict=True)):
            chosen = rows[drawn]
            assert len(chosen.unique()) == len(chosen)
            assert (state[row, rows[: sample.positives]][drawn[: sample.positives]] == 1).all()
            assert (state[row, rows[sample.positives :]][drawn[sample.positives :]] == 0).all()
            counts[row, chosen] += 1
    assert counts[1, :4].tolist() == [300] * 4
    share = counts[0] / 300
    assert_close(share[:5], torch.full((5,), 2 / 5), rtol=0, atol=0.12)
    assert_close(share[5:25], torch.full((20,), 6 / 20), rtol=0, atol=0.12)


def test_the_c4_head_is_the_last_stage_and_a_norm() -> None:
    """A direct transcription: regions of 14 × 14 from stride 16, layer4, batch norm, mean, linear;
    masks from the same features by a transposed convolution."""
    torch.manual_seed(0)
    backbone = build_resnet("resnet18")
    model: Any = build_detector(
        "mask-rcnn-c4", backbone, 3, size=128, mean=(0.5,) * 3, std=(0.2,) * 3
    )
    model.eval()
    heads = model.roi_heads
    norm = heads.box_head.norm
    norm.running_mean.uniform_(-1, 1)
    norm.running_var.uniform_(0.5, 2)
    nn.init.uniform_(norm.weight, 0.5, 2)
    features = torch.randn(1, 256, 8, 8)
    box = torch.tensor([[10.0, 20.0, 90.0, 70.0], [0.0, 0.0, 30.0, 120.0]])
    regions = roi_align(features, [box], (14, 14), 1 / 16, sampling_ratio=0)
    last = backbone.layer4(regions)
    assert last.shape == (2, 512, 7, 7)
    deviation = (norm.running_var + norm.eps).sqrt()
    shape = (1, -1, 1, 1)
    last = (last - norm.running_mean.view(shape)) / deviation.view(shape)
    last = last * norm.weight.view(shape) + norm.bias.view(shape)
    pooled = last.flatten(2).mean(2)
    predictor = heads.box_predictor
    scores = pooled @ predictor.cls_score.weight.T + predictor.cls_score.bias
    codes = pooled @ predictor.bbox_pred.weight.T + predictor.bbox_pred.bias
    found = heads.box_head(heads.box_roi_pool({"0": features}, [box], [(128, 128)]))
    for own, expected in zip(heads.box_predictor(found), (scores, codes), strict=True):
        assert_close(own, expected, rtol=1e-4, atol=1e-5)
    up, logits = heads.mask_predictor.conv5_mask, heads.mask_predictor.mask_fcn_logits
    drawn = nn.functional.conv_transpose2d(last, up.weight, up.bias, stride=2).relu()
    drawn = nn.functional.conv2d(drawn, logits.weight, logits.bias)
    assert drawn.shape == (2, 4, 14, 14)
    inner = heads.mask_head(heads.mask_roi_pool({"0": features}, [box], [(128, 128)]))
    assert_close(heads.mask_predictor(inner), drawn, rtol=1e-4, atol=1e-5)
    names = [key for key in model.state_dict() if "layer4" in key or "res5" in key]
    assert names
    assert all(key.startswith("roi_heads.box_head.res5.") for key in names), "kept once"
    assert model.rpn._pre_nms_top_n["testing"] == 6000
    assert model.rpn._post_nms_top_n["testing"] == 1000


def test_masks_are_looked_up_as_they_are_drawn() -> None:
    rng = np.random.default_rng(0)
    sizes = np.array([[30, 40], [17, 23], [30, 40]])
    bitmaps = [rng.random(size) < 0.5 for size in sizes]
    store = RunLengths.of([runs_of_bitmap(b) for b in bitmaps], sizes)
    masks = torch.tensor([2, 0, 1])
    x, y = torch.rand(3, 200) * 45 - 2, torch.rand(3, 200) * 33 - 2
    found = store.at(masks, x, y)
    for row, number in enumerate(masks.tolist()):
        height, width = sizes[number]
        column = x[row].floor().long().clamp(0, width - 1)
        line = y[row].floor().long().clamp(0, height - 1)
        assert torch.equal(found[row], torch.from_numpy(bitmaps[number])[line, column])


def test_mask_targets_are_torchvisions_but_for_the_outline() -> None:
    y, x = np.mgrid[:120, :160]
    disc = (x - 80) ** 2 + (y - 60) ** 2 < 45**2
    store = RunLengths.of([runs_of_bitmap(disc)], np.array([[120, 160]]))
    box = torch.tensor([[33.0, 12.0, 131.0, 110.0], [60.0, 20.0, 150.0, 60.0]])
    ours = store.inside(torch.zeros(2, dtype=torch.int64), box, 28)
    masks = torch.from_numpy(disc).to(torch.uint8)[None]
    theirs = project_masks_on_boxes(masks, box, torch.zeros(2, dtype=torch.int64), 28)
    assert (ours - theirs).abs().mean() < 0.02
    assert ((ours > 0.5) == (theirs > 0.5)).float().mean() > 0.97
