"""What a step of a detector sees, in which order, at which rate; and its batch norms afterwards."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scenes import write_scenes
from torch import Tensor, nn
from torch.testing import assert_close

from xmoco.data import ArrayImages, Batch, Batches
from xmoco.detect.courses import COURSES, course_of
from xmoco.detect.detector_files import (
    DetectorCard,
    load_detector,
    read_detector,
    save_detector,
)
from xmoco.detect.frames import Draw, drawn, framed, scaled
from xmoco.detect.models import build_detector
from xmoco.detect.objects import DetectionSet, Objects
from xmoco.detect.sources import open_detection
from xmoco.detect.task import DetectorTask
from xmoco.detect.training import batches_of_one_shape, make_batch_norms_precise
from xmoco.errors import UserError
from xmoco.fabric import Fabric
from xmoco.nn.backbones import build_resnet
from xmoco.schedules import Clock
from xmoco.task import Moment
from xmoco.train.loop import Training
from xmoco.train.optimizers import build_optimizer
from xmoco.train.run_folder import RunFolder

PLAIN = {"mean": (0.0, 0.0, 0.0), "std": (1.0, 1.0, 1.0)}
CPU = torch.device("cpu")


def moment(step: int, rows: Any = slice(None), batch: int = 8) -> Moment:
    return Moment(seed=0, step=step, batch=batch, rows=rows)


def test_chance_is_a_function_of_the_step() -> None:
    sizes = (40, 50, 60)
    draws = [drawn(moment(step), sizes) for step in range(200)]
    assert {draw.size for draw in draws} == set(sizes)
    assert 0.4 < torch.stack([draw.flips for draw in draws]).float().mean() < 0.6
    again = drawn(moment(7), sizes)
    assert again.size == draws[7].size
    assert torch.equal(again.flips, draws[7].flips)
    share = drawn(moment(7, np.array([1, 5])), sizes)
    assert share.size == again.size, "all processes draw the same"
    assert torch.equal(share.flips, again.flips[[1, 5]])


def test_images_are_brought_to_size_as_by_torchvision() -> None:
    """Of several sizes on one canvas, some mirrored."""
    sizes = torch.tensor([[30, 40], [60, 20], [30, 40]])
    images = torch.randint(0, 256, (3, 3, 60, 40), dtype=torch.uint8)
    batch = Batch(images, sizes, torch.arange(3), None)
    flips = torch.tensor([False, True, True])
    mean, std = (0.4, 0.5, 0.6), (0.2, 0.3, 0.25)
    model: Any = build_detector(
        "faster-rcnn-fpn", build_resnet("tiny"), 2, size=48, mean=mean, std=std
    )
    found = framed(batch, Draw(48, flips), model.transform.max_size, mean, std)
    pictures = []
    for image, (high, wide), flip in zip(images, sizes.tolist(), flips.tolist(), strict=True):
        own = image[:, :high, :wide].float() / 255
        pictures.append(own.flip(-1) if flip else own)
    expected, _ = model.transform.eval()(pictures)
    assert found.sizes.tolist() == [list(size) for size in expected.image_sizes]
    assert found.sizes.tolist() == [[48, 64], [80, 26], [48, 64]]
    assert_close(found.images, expected.tensors, rtol=1e-5, atol=1e-5)


@given(st.lists(st.tuples(st.integers(1, 500), st.integers(1, 500)), min_size=1, max_size=5))
def test_no_side_is_too_long(sizes: list[tuple[int, int]]) -> None:
    found = scaled(torch.tensor(sizes), 48, 80)
    assert (found.amin(1) <= 48).all()
    assert (found.amax(1) <= 80).all()
    assert (found >= 1).all()


def one_picture(box: tuple[int, int, int, int], size: tuple[int, int]) -> DetectionSet:
    """A white rectangle on black, which has a mask too."""
    height, width = size
    left, top, right, bottom = box
    pixels = torch.zeros(2, 3, height, width, dtype=torch.uint8)
    pixels[:, :, top:bottom, left:right] = 255
    bitmap = pixels[0, 0].numpy() > 0
    from xmoco.detect.masks import runs_of_bitmap

    objects = Objects(
        np.array([0, 1]),
        np.array([box, box], dtype=float),
        np.array([1, 0]),
        np.zeros(2, dtype=bool),
        np.ones(2),
        (runs_of_bitmap(bitmap),) * 2,
    )
    sizes = np.array([size, size])
    return DetectionSet(ArrayImages("one", pixels), sizes, objects, ("a", "b"), "coco")


def small_task(data: DetectionSet, sizes: tuple[int, ...] = (64, 96)) -> DetectorTask:
    torch.manual_seed(0)
    detector = build_detector("mask-rcnn-c4", build_resnet("tiny"), 2, size=96, **PLAIN)
    return DetectorTask("a detector", detector, data, sizes, masks=True)


@pytest.mark.parametrize("shrunk", [1, 2])
def test_boxes_and_masks_go_with_their_images(shrunk: int) -> None:
    """At every step, the white rectangle is where the box is, and the mask within it all on."""
    data = one_picture((10, 6, 30, 26), (40, 60))
    task = small_task(data)
    assert isinstance(data.images, ArrayImages)
    pixels = data.images.pixels[:, :, ::shrunk, ::shrunk]
    sizes = torch.tensor(pixels.shape[2:]).expand(2, 2)
    batch = Batch(pixels, sizes, torch.arange(2), None)
    seen = set()
    for step in range(12):
        inputs = task.inputs(batch, moment(step, batch=2))
        images, _, boxes, labels, _, _ = inputs
        assert labels.tolist() == [[2], [1]]
        for row in range(2):
            left, top, right, bottom = boxes[row, 0].tolist()
            white = (images[row, 0] > 0.5).nonzero()
            seen.add((round(left), round(right)))
            expected = torch.tensor([top, left, bottom - 1, right - 1])
            assert_close(
                torch.cat([white.amin(0), white.amax(0)]).float(), expected, atol=1.5, rtol=0
            )
        drawn_masks = masks_of(task, inputs, boxes[:, 0])
        assert (drawn_masks > 0.99).all()
        wider = boxes[:, 0] + torch.tensor([-8.0, 0, 0, 0])
        assert (masks_of(task, inputs, wider)[:, :, 0] < 0.5).all(), "left of it, all is off"
    assert len(seen) == 4, "two sizes, mirrored or not"


def masks_of(task: DetectorTask, inputs: Any, boxes: Tensor) -> Tensor:
    """What ``forward`` makes of the masks inside a box of each image."""
    asked: list[Tensor] = []

    def losses(_model: Any, _images: Tensor, _targets: Any, masks: Any) -> dict[str, Tensor]:
        zeros = torch.zeros(len(boxes), dtype=torch.int64)
        asked.append(masks(torch.arange(len(boxes)), boxes, zeros, 6))
        return {"none": torch.zeros(())}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("xmoco.detect.task.detector_losses", losses)
        task(inputs, {})
    return asked[0]


def test_images_with_fewer_objects_are_filled_up() -> None:
    data = one_picture((10, 6, 30, 26), (40, 60))
    more = data.objects.chosen(np.array([0, 0, 1]))
    task = small_task(replace(data, objects=more))
    assert isinstance(data.images, ArrayImages)
    batch = Batch(data.images.pixels, torch.tensor([[40, 60]] * 2), torch.arange(2), None)
    _, _, boxes, labels, _, _ = task.inputs(batch, moment(0, batch=2))
    assert labels.tolist() == [[2, 2], [1, 0]]
    assert (boxes[1, 1] == 0).all()


shapes = st.lists(st.sampled_from([(50, 100), (100, 100), (100, 50)]), min_size=4, max_size=40)


@settings(max_examples=40)
@given(shapes, st.integers(1, 4), st.integers(0, 3))
def test_batches_are_of_one_shape(sizes: list[tuple[int, int]], batch: int, epoch: int) -> None:
    count = len(sizes)
    blank = ArrayImages("blank", torch.zeros(count, 3, 1, 1, dtype=torch.uint8))
    nothing = np.zeros(0, dtype=np.int64)
    objects = Objects(nothing, np.zeros((0, 4)), nothing, nothing > 0, np.zeros(0), None)
    data = DetectionSet(blank, np.array(sizes), objects, ("a",), "coco")
    order = batches_of_one_shape(data, batch)
    found = order(count, 5, epoch)
    assert sorted(found.tolist()) == list(range(count)), "every image once"
    assert torch.equal(found, order(count, 5, epoch))
    whole = [set(map(tuple, data.sizes[part.numpy()].tolist())) for part in found.split(batch)]
    mixed = sum(len(kinds) > 1 for kinds in whole[: count // batch])
    assert mixed <= 2, "only what is left over of three shapes"


def test_rates() -> None:
    course = COURSES["voc-24k"]
    rate = [course.learning_rate(Clock(step, course.steps, 100)) for step in range(course.steps)]
    assert rate[0] == pytest.approx(0.02 * 0.001)
    assert rate[50] == pytest.approx(0.02 * (0.001 * 0.5 + 0.5))
    assert rate[100] == rate[17_999] == 0.02
    assert rate[18_000] == rate[21_999] == pytest.approx(0.002)
    assert rate[22_000] == rate[-1] == pytest.approx(0.0002)
    assert COURSES["voc-24k"].sizes[0] == 480
    assert COURSES["1x"].sizes == (640, 672, 704, 736, 768, 800)


def test_norms_do_not_decay_and_biases_do() -> None:
    """As by Detectron2's WEIGHT_DECAY_NORM of 0."""
    task = small_task(one_picture((10, 6, 30, 26), (40, 60)))
    task.optimize_for(CPU)
    optimizer = build_optimizer(COURSES["1x"].plan(0).optim, task.param_groups(), CPU)
    decays = {p: part["weight_decay"] for part in optimizer.param_groups for p in part["params"]}
    named = dict(task.detector.named_parameters())
    assert decays.keys() == set(named.values()), "nothing is left out"
    norm: Any = task.detector.get_submodule("roi_heads.box_head.norm")
    assert decays[norm.weight] == decays[norm.bias] == 0
    assert decays[named["backbone.bn1.weight"]] == 0
    assert decays[named["backbone.conv1.weight"]] == 1e-4
    assert decays[named["rpn.head.cls_logits.bias"]] == 1e-4


def test_courses_for_fewer_images() -> None:
    course = course_of("900", "retinanet-fpn", images=6, size=400)
    assert (course.name, course.steps, course.milestones) == ("900-steps", 900, (600, 800))
    assert (course.batch, course.rate) == (6, pytest.approx(0.01 * 6 / 16))
    assert course.sizes == (320, 336, 352, 368, 384, 400)
    assert course_of("2x", "mask-rcnn-c4", images=10**5, batch=8).rate == pytest.approx(0.01)


def test_precise_statistics_are_the_mean_over_batches(tmp_path: Path) -> None:
    train, _ = open_detection(write_scenes(tmp_path / "scenes"))
    task = small_task(train.to_learn_from(), (64,))
    course = replace(course_of("4", "mask-rcnn-c4", images=4, batch=2), sizes=(64,))
    fabric = Fabric(accelerator="cpu", devices=1)
    batches = Batches(train.images, batch=2, seed=0, device=CPU)
    (tmp_path / "run").mkdir()
    training = Training(course.plan(0), fabric, task, batches, RunFolder(tmp_path / "run"), {})
    norm = task.detector.get_submodule("backbone.bn1")
    assert isinstance(norm, nn.BatchNorm2d)
    seen: list[Tensor] = []
    norm.register_forward_hook(lambda _module, inputs, _output: seen.append(inputs[0].detach()))
    weights = {name: value.clone() for name, value in task.named_parameters()}
    make_batch_norms_precise(training, 3)
    assert len(seen) == 3
    assert not torch.equal(seen[0], seen[1])
    means = torch.stack([x.mean((0, 2, 3)) for x in seen]).mean(0)
    variances = torch.stack([x.transpose(0, 1).flatten(1).var(1) for x in seen]).mean(0)
    assert_close(norm.running_mean, means)
    assert_close(norm.running_var, variances)
    assert norm.momentum == 0.1
    assert training.step == 0
    assert all(torch.equal(value, weights[name]) for name, value in task.named_parameters())
    first = norm.running_mean.clone()
    make_batch_norms_precise(training, 3)
    assert torch.equal(norm.running_mean, first), "they are the same every time"


def card(**changes: Any) -> DetectorCard:
    given: dict[str, Any] = {
        "model": "faster-rcnn-c4", "backbone": "tiny", "stem": "imagenet",
        "categories": ("cat", "dog"), "size": 64, "method": "xmoco", "schedule": "1x",
        "data": "pictures", "seed": 0, **PLAIN,
    }  # fmt: skip
    return DetectorCard(**given | changes)


def test_detectors_there_and_back(tmp_path: Path) -> None:
    torch.manual_seed(0)
    detector = card().built().eval()
    file = tmp_path / "detector.safetensors"
    save_detector(detector, card(), file)
    for place in (file, tmp_path):
        found: Any = load_detector(place)
        assert not found.training
        assert found.categories == ("cat", "dog")
        image = torch.rand(3, 60, 80)
        with torch.no_grad():
            ours, theirs = found([image])[0], detector([image])[0]
        assert len(ours["boxes"])
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("start", [None, "torchvision:resnet50"])
def test_a_detectors_file_says_what_its_backbone_started_from(
    start: str | None, tmp_path: Path
) -> None:
    file = tmp_path / "detector.safetensors"
    save_detector(card().built(), card(started_from=start), file)
    assert read_detector(file)[1] == card(started_from=start)


def test_files_that_hold_no_detector(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    with pytest.raises(UserError, match=r"no detector at .*detector.safetensors: give .*\.$"):
        load_detector(tmp_path)
    file = tmp_path / "detector.safetensors"
    file.write_bytes(b"nothing")
    with pytest.raises(UserError, match=r"is damaged or no safetensors file\.$"):
        load_detector(file)
    save_file({"a": torch.zeros(1)}, file)
    with pytest.raises(UserError, match=r"holds no detector of xmoco: .*\.$"):
        load_detector(file)
    save_detector(card().built(), card(model="yolo"), file)
    with pytest.raises(UserError, match=r"holds a yolo, which this xmoco does not know\.$"):
        load_detector(file)
    save_detector(card().built(), card(categories=("cat",)), file)
    with pytest.raises(UserError, match=r"does not fit the faster-rcnn-c4 it says it holds\.$"):
        load_detector(file)
    save_file({"a": torch.zeros(1)}, file, metadata={"xmoco-detector": '{"model": 3}'})
    with pytest.raises(UserError, match=r"a header that this xmoco does not know\.$"):
        load_detector(file)
