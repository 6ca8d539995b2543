"""Views against torchvision's transforms, one sample at a time and with the same parameters."""

import dataclasses
import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as F

from xmoco.config import AugmentationConfig, InputConfig
from xmoco.data import resample
from xmoco.data.colour import BRIGHTNESS, CONTRAST, HUE, SATURATION
from xmoco.data.views import (
    ViewGroup,
    ViewParameters,
    blur_side,
    central,
    crop_boxes,
    draw,
    render,
    stacked,
    views_of,
)

# With these, a view is the image itself, from 0 to 1, and every change is switched on by a test.
PLAIN = ViewGroup(
    ("plain",),
    AugmentationConfig(
        crop_scale=(1, 1), crop_ratio=(1, 1), flip=0, jitter=0, grey=0, invert=0, blur=0
    ),
    InputConfig(size=24, mean=(0, 0, 0), std=(1, 1, 1)),
)
BUSY = ViewGroup(
    ("busy",),
    AugmentationConfig(invert=0.3, flip=0.5, grey=0.3, blur=0.5, blur_kernel=71),
    InputConfig(size=20),
)
ADJUST = {
    BRIGHTNESS: F.adjust_brightness,
    CONTRAST: F.adjust_contrast,
    SATURATION: F.adjust_saturation,
    HUE: F.adjust_hue,
}


def changed(group: ViewGroup, **changes: object) -> ViewGroup:
    """With other settings, whether of the augmentation or of the input."""
    of_input = {name: changes.pop(name) for name in list(changes) if name in group.input.__dict__}
    return ViewGroup(
        group.names,
        group.augmentation.model_copy(update=changes),
        group.input.model_copy(update=of_input),
    )


def plain(**changes: object) -> ViewGroup:
    return changed(PLAIN, **changes)


def drawn(
    group: ViewGroup, count: int, seed: int = 0, step: int = 0, view: int = 0
) -> ViewParameters:
    return draw(group.augmentation, count, seed, step, view)


def photos(count: int, height: int = 24, width: int = 24, seed: int = 0) -> Tensor:
    """Smooth colours with noise, saturated spots and exact greys, so that every case occurs."""
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.rand(count, 3, 4, 4, generator=generator)
    smooth = F.resize(coarse, [height, width])
    noise = torch.rand(count, 3, height, width, generator=generator) - 0.5
    images = ((smooth * 1.6 - 0.3 + 0.2 * noise).clamp(0, 1) * 255).to(torch.uint8)
    images[:, :, :2] = images[:, :1, :2]
    return images


def parts(group: ViewGroup) -> tuple[AugmentationConfig, InputConfig]:
    return group.augmentation, group.input


def whole(images: Tensor) -> Tensor:
    return torch.tensor(images.shape[2:]).expand(len(images), 2)


def share(images: Tensor) -> Tensor:
    return images.float() / 255


def reference(image: Tensor, row: ViewParameters, box: list[int], group: ViewGroup) -> Tensor:
    """The whole chain with torchvision, for the one image ``row`` belongs to."""
    view = F.resized_crop(
        share(image), *box, size=[group.input.size, group.input.size], antialias=True
    )
    if row.flip[0]:
        view = F.horizontal_flip(view)
    if row.jitter[0]:
        for kind in row.order[0].tolist():
            view = ADJUST[kind](view, float(row.factors[0, kind]))
    if row.grey[0]:
        view = F.rgb_to_grayscale(view, num_output_channels=3)
    if row.invert[0]:
        view = F.invert(view)
    if row.blur[0]:
        view = F.gaussian_blur(view, [blur_side(group)] * 2, [float(row.sigmas[0])] * 2)
    return F.normalize(view, list(group.input.mean), list(group.input.std))


# --- operations, one by one -------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(data=st.data(), height=st.integers(1, 90), width=st.integers(1, 90), flip=st.booleans())
def test_crop_resize_and_flip_equal_torchvision(
    data: st.DataObject, height: int, width: int, flip: bool
) -> None:
    size = data.draw(st.sampled_from((8, 17, 32)))
    group = plain(size=size, crop_scale=(0.05, 1.0), crop_ratio=(0.3, 3.0), flip=float(flip))
    images = photos(3, height, width)
    parameters = drawn(group, 3, seed=data.draw(st.integers(0, 99)), step=0, view=0)
    boxes = crop_boxes(parameters, whole(images).numpy(), group.augmentation.crop_ratio)
    views = render(images, whole(images), parameters, group)
    for image, box, view in zip(images, boxes.tolist(), views, strict=True):
        expected = F.resized_crop(share(image), *box, size=[size, size], antialias=True)
        if flip:
            expected = F.horizontal_flip(expected)
        assert_close(view, expected, atol=1e-5, rtol=0)


def test_a_whole_image_of_the_right_size_is_left_alone() -> None:
    images = photos(4)
    views = render(images, whole(images), drawn(PLAIN, 4), PLAIN)
    assert_close(views, share(images), atol=1e-6, rtol=0)


@pytest.mark.parametrize(("length", "resized"), [(450, 401), (450, 448), (3000, 224), (200, 999)])
def test_weights_are_right_even_at_the_far_end_of_a_photograph(length: int, resized: int) -> None:
    start, canvas = 7, length + 20
    arguments = [torch.tensor([float(number)]) for number in (start, length, resized)]
    weights = resample.triangle_weights(*arguments, torch.arange(resized).float()[None], canvas)
    centres = start + (np.arange(resized)[:, None] + 0.5) * length / resized
    distance = np.abs(np.arange(canvas) + 0.5 - centres)
    expected = (1 - distance / max(1, length / resized)).clip(min=0)
    expected[:, :start] = expected[:, start + length :] = 0
    expected /= expected.sum(axis=1, keepdims=True)
    assert np.abs(weights[0].numpy() - expected).max() < 3e-7


@pytest.mark.parametrize("kind", [BRIGHTNESS, CONTRAST, SATURATION, HUE])
def test_each_jitter_equals_torchvision(kind: int) -> None:
    names = ("brightness", "contrast", "saturation", "hue")
    reach = dict.fromkeys(names, 0.0)
    reach[names[kind]] = 0.5 if kind == HUE else 1.0
    group = plain(jitter=1.0, **reach)
    images = photos(16)
    parameters = drawn(group, 16)
    views = render(images, whole(images), parameters, group)
    for image, factor, view in zip(images, parameters.factors[:, kind], views, strict=True):
        assert_close(view, ADJUST[kind](share(image), float(factor)), atol=5e-6, rtol=0)
    assert (views - share(images)).abs().mean() > 0.02


def test_every_order_of_jitter_is_followed() -> None:
    group = plain(jitter=1.0)
    images = photos(24)
    parameters = dataclasses.replace(
        drawn(group, 24), order=np.array(list(itertools.permutations(range(4))))
    )
    views = render(images, whole(images), parameters, group)
    for index, view in enumerate(views):
        expected = share(images[index])
        for kind in parameters.order[index].tolist():
            expected = ADJUST[kind](expected, float(parameters.factors[index, kind]))
        assert_close(view, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("turn", "colour", "expected"),
    [
        (1 / 3, (255, 0, 0), (0, 1, 0)),
        (-1 / 3, (255, 0, 0), (0, 0, 1)),
        (0.5, (255, 0, 0), (0, 1, 1)),
        (-0.5, (255, 255, 0), (0, 0, 1)),
        (0.25, (0, 0, 0), (0, 0, 0)),
        (0.25, (255, 255, 255), (1, 1, 1)),
    ],
)
def test_hue_turns_pure_colours(
    turn: float, colour: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    group = plain(jitter=1.0, brightness=0.0, contrast=0.0, saturation=0.0)
    images = torch.tensor(colour, dtype=torch.uint8)[None, :, None, None].repeat(1, 1, 24, 24)
    parameters = dataclasses.replace(drawn(group, 1), factors=np.array([[1.0, 1.0, 1.0, turn]]))
    view = render(images, whole(images), parameters, group)
    assert_close(view[0, :, 5, 5], torch.tensor(expected).float(), atol=5e-6, rtol=0)


def test_grey_inversion_and_normalisation_equal_torchvision() -> None:
    images = photos(3)
    mean, std = (0.485, 0.456, 0.406), (0.228, 0.224, 0.225)

    def view(**changes: object) -> Tensor:
        group = plain(**changes)
        return render(images, whole(images), drawn(group, 3), group)

    grey = F.rgb_to_grayscale(share(images), num_output_channels=3)
    assert_close(view(grey=1.0), grey, atol=1e-6, rtol=0)
    assert_close(view(invert=1.0), F.invert(share(images)), atol=1e-6, rtol=0)
    normalised = F.normalize(share(images), list(mean), list(std))
    assert_close(view(mean=mean, std=std), normalised, atol=5e-6, rtol=0)


@pytest.mark.parametrize("kernel", [3, 71, 223])
def test_blur_equals_torchvision(kernel: int) -> None:
    group = plain(blur=1.0, blur_kernel=kernel, blur_sigma=(0.1, 4.0))
    images = photos(8)
    parameters = drawn(group, 8)
    views = render(images, whole(images), parameters, group)
    side = blur_side(group)
    for image, sigma, view in zip(images, parameters.sigmas, views, strict=True):
        expected = F.gaussian_blur(share(image), [side, side], [float(sigma)] * 2)
        assert_close(view, expected, atol=5e-6, rtol=0)


@pytest.mark.parametrize(
    ("size", "kernel", "side"),
    [(224, 23, 23), (112, 23, 11), (448, 23, 47), (32, 23, 3), (8, 1, 3), (8, 999, 15)],
)
def test_blur_kernel_scales_with_the_view(size: int, kernel: int, side: int) -> None:
    assert blur_side(plain(size=size, blur_kernel=kernel)) == side


# --- the whole chain --------------------------------------------------------------------------


@pytest.mark.parametrize("size", [20, 48])
def test_the_whole_chain_equals_torchvision_on_images_of_many_sizes(size: int) -> None:
    group = changed(BUSY, size=size)
    count = 48
    canvas = photos(count, 70, 60)
    generator = torch.Generator().manual_seed(1)
    sizes = torch.stack(
        [torch.randint(5, side + 1, (count,), generator=generator) for side in (70, 60)], dim=1
    )
    parameters = drawn(group, count, seed=3, step=4, view=1)
    boxes = crop_boxes(parameters, sizes.numpy(), group.augmentation.crop_ratio).tolist()
    views = render(canvas, sizes, parameters, group)
    assert views.shape == (count, 3, size, size)
    assert views.dtype == torch.float32
    for index in range(count):
        height, width = sizes[index].tolist()
        image, row = canvas[index, :, :height, :width], parameters[index : index + 1]
        expected = reference(image, row, boxes[index], group)
        # Normalisation divides by about 0.22, so this is 1e-5 of the range from black to white.
        assert_close(views[index], expected, atol=4.5e-5, rtol=0)


def test_what_lies_beyond_an_image_is_never_seen() -> None:
    images = photos(12, 30, 26)
    sizes = whole(images)
    parameters = drawn(BUSY, 12)
    alone = render(images, sizes, parameters, BUSY)
    for filling in (0, 255):
        canvas = torch.full((12, 3, 50, 41), filling, dtype=torch.uint8)
        canvas[:, :, :30, :26] = images
        assert_close(render(canvas, sizes, parameters, BUSY), alone, atol=2e-6, rtol=0)
        middles = central(canvas, sizes, 64, BUSY.input)
        assert_close(middles, central(images, sizes, 64, BUSY.input), atol=2e-6, rtol=0)


def test_a_process_renders_its_slice_of_the_global_batch() -> None:
    images = photos(12)
    parameters = drawn(BUSY, 12)
    together = render(images, whole(images), parameters, BUSY)
    for processes in (2, 3, 12):
        own = 12 // processes
        slices = [slice(rank * own, (rank + 1) * own) for rank in range(processes)]
        parts = [render(images[s], whole(images[s]), parameters[s], BUSY) for s in slices]
        assert_close(torch.cat(parts), together, atol=2e-6, rtol=0)


def test_several_views_of_every_image_at_once() -> None:
    images = photos(6)
    parts = [drawn(BUSY, 6, 0, 0, view) for view in range(3)]
    together = render(images, whole(images), stacked(*parts), BUSY)
    apart = [render(images, whole(images), part, BUSY) for part in parts]
    assert torch.equal(together, torch.cat(apart))


def test_the_views_of_a_step_are_those_of_its_groups_one_after_the_other() -> None:
    """Each group has its size and augmentation; a view's numbers follow from its place alone."""
    images = photos(6)
    groups = [ViewGroup(("weak", "too"), *parts(PLAIN)), ViewGroup(("a", "b", "c"), *parts(BUSY))]
    views = views_of(images, whole(images), groups, seed=3, step=7, batch=6)
    assert [view.shape[-1] for view in views] == [24, 24, 20, 20, 20]
    for number, (view, group) in enumerate(zip(views, [PLAIN] * 2 + [BUSY] * 3, strict=True)):
        expected = render(images, whole(images), drawn(group, 6, 3, 7, number), group)
        assert_close(view, expected, atol=2e-6, rtol=0)


@pytest.mark.parametrize("rows", [slice(4, 8), np.array([1, 2, 7, 11])])
def test_a_process_makes_its_rows_of_the_step_s_views(rows: slice | np.ndarray) -> None:
    images = photos(12)
    group = ViewGroup(("a", "b"), *parts(BUSY))
    place = {"seed": 0, "step": 5, "batch": 12}
    together = views_of(images, whole(images), [group], **place)
    own = views_of(images[rows], whole(images)[rows], [group], **place, rows=rows)
    for ours, everyone_s in zip(own, together, strict=True):
        assert_close(ours, everyone_s[rows], atol=2e-6, rtol=0)


def test_views_are_channels_last_and_of_the_type_asked_for() -> None:
    images = photos(4)
    parameters = drawn(BUSY, 4)
    views = render(images, whole(images), parameters, BUSY)
    rounded = render(images, whole(images), parameters, BUSY, dtype=torch.bfloat16)
    assert torch.equal(rounded, views.bfloat16())
    for each in (views, rounded):
        assert each.is_contiguous(memory_format=torch.channels_last)


def test_a_view_does_not_depend_on_its_neighbours() -> None:
    images, others = photos(8), photos(8, seed=1)
    others[3] = images[3]
    parameters = drawn(BUSY, 8)
    views = render(images, whole(images), parameters, BUSY)
    changed = render(others, whole(others), parameters, BUSY)
    assert_close(views[3], changed[3], atol=2e-6, rtol=0)
    assert not torch.allclose(views[2], changed[2], atol=1e-2)


def test_large_canvases_are_resampled_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    images = photos(7)
    parameters = drawn(BUSY, 7)
    at_once = render(images, whole(images), parameters, BUSY)
    monkeypatch.setattr(resample, "PART", 3 * images[0].numel())
    assert_close(render(images, whole(images), parameters, BUSY), at_once, atol=2e-6, rtol=0)


def test_images_are_not_changed_and_views_carry_no_gradient() -> None:
    images = photos(4)
    before = images.clone()
    views = render(images, whole(images), drawn(BUSY, 4), BUSY)
    assert torch.equal(images, before)
    assert not views.requires_grad


def test_mixed_precision_around_it_changes_nothing() -> None:
    images = photos(4)
    parameters = drawn(BUSY, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        views = render(images, whole(images), parameters, BUSY)
        middles = central(images, whole(images), 20, BUSY.input)
    assert torch.equal(views, render(images, whole(images), parameters, BUSY))
    assert torch.equal(middles, central(images, whole(images), 20, BUSY.input))


@pytest.mark.parametrize(("sizes", "rows"), [(4, 1), (4, 6), (4, 0), (3, 4)])
def test_counts_must_agree(sizes: int, rows: int) -> None:
    images = photos(4)
    with pytest.raises(ValueError, match=f"4 images, {sizes} sizes and {rows} parameters"):
        render(images, whole(images)[:sizes], drawn(BUSY, rows), BUSY)


@pytest.mark.gpu
def test_on_cuda_it_is_the_same_and_never_waits() -> None:
    images = photos(64, 70, 60)
    parameters = drawn(BUSY, 64)
    on_device = images.cuda()
    render(on_device, whole(images), parameters, BUSY)  # lets libraries set themselves up
    torch.cuda.set_sync_debug_mode("error")
    try:
        views = render(on_device, whole(images), parameters, BUSY)
        middles = central(on_device, whole(images), 64, BUSY.input)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert_close(views.cpu(), render(images, whole(images), parameters, BUSY), atol=4.5e-5, rtol=0)
    assert_close(middles.cpu(), central(images, whole(images), 64, BUSY.input), atol=4.5e-5, rtol=0)


# --- the random numbers -----------------------------------------------------------------------


def test_the_same_place_gives_the_same_numbers() -> None:
    for one, other in zip(
        drawn(BUSY, 9, 5, 6, 1).columns, drawn(BUSY, 9, 5, 6, 1).columns, strict=True
    ):
        assert np.array_equal(one, other)


def test_other_seeds_steps_and_views_are_unrelated() -> None:
    places = [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 0), (0, 1, 1), (2**40, 0, 0)]
    areas = np.stack([drawn(BUSY, 2000, *place).areas.ravel() for place in places])
    correlation = np.corrcoef(areas) - np.eye(len(places))
    assert np.abs(correlation).max() < 5 / np.sqrt(areas.shape[1])


def test_a_slice_takes_the_same_rows_of_everything() -> None:
    parameters = drawn(BUSY, 10)
    part = parameters[4:7]
    assert len(part) == 3
    for all_rows, rows in zip(parameters.columns, part.columns, strict=True):
        assert np.array_equal(all_rows[4:7], rows)


@pytest.mark.parametrize("name", ["flip", "jitter", "grey", "invert", "blur"])
def test_chances_hold_and_reach_never_and_always(name: str) -> None:
    for chance in (0.0, 0.3, 1.0):
        flags = getattr(drawn(plain(**{name: chance}), 4000), name)
        assert flags.mean() == pytest.approx(chance, abs=0.0 if chance in (0, 1) else 0.04)


def test_numbers_are_spread_as_configured() -> None:
    augmentation = AugmentationConfig(hue=0.1, saturation=0.3, brightness=0.0)
    parameters = draw(augmentation, 6000, 0, 0, 0)
    for kind, (low, high) in enumerate([(1, 1), (0.2, 1.8), (0.7, 1.3), (-0.1, 0.1)]):
        factors = parameters.factors[:, kind]
        assert factors.min() >= low
        assert factors.max() <= high
        # A uniform distribution's mean and deviation.
        assert factors.mean() == pytest.approx((low + high) / 2, abs=0.02 * (high - low))
        assert factors.std() == pytest.approx((high - low) / 12**0.5, rel=0.03)
    assert parameters.sigmas.min() >= 0.1
    assert parameters.sigmas.max() <= 2.0
    assert parameters.sigmas.mean() == pytest.approx(1.05, abs=0.03)


def test_all_orders_of_jitter_are_equally_frequent() -> None:
    orders, counts = np.unique(drawn(BUSY, 24_000).order, axis=0, return_counts=True)
    assert len(orders) == 24
    assert np.abs(counts - 1000).max() < 150


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.tuples(st.integers(1, 700), st.integers(1, 700)), min_size=1, max_size=20),
    low=st.floats(0.01, 1),
    ratio=st.tuples(st.floats(0.1, 1), st.floats(1, 10)),
    seed=st.integers(0, 10**6),
)
def test_crop_boxes_always_lie_inside_the_image(
    sizes: list[tuple[int, int]], low: float, ratio: tuple[float, float], seed: int
) -> None:
    augmentation = AugmentationConfig(crop_scale=(low, 1.0), crop_ratio=ratio)
    real = np.array(sizes)
    boxes = crop_boxes(draw(augmentation, len(sizes), seed, 0, 0), real, ratio)
    corner, extent = boxes[:, :2], boxes[:, 2:]
    assert (corner >= 0).all()
    assert (extent >= 1).all()
    assert (corner + extent <= real).all()


@pytest.mark.parametrize(("height", "width"), [(32, 32), (375, 500), (60, 150), (9, 7)])
def test_crops_are_distributed_as_torchvisions(height: int, width: int) -> None:
    augmentation = AugmentationConfig()
    count = 3000
    parameters = draw(augmentation, count, 0, 0, 0)
    ours = crop_boxes(parameters, np.tile((height, width), (count, 1)), augmentation.crop_ratio)
    torch.manual_seed(0)
    transform = v2.RandomResizedCrop(
        8, scale=augmentation.crop_scale, ratio=augmentation.crop_ratio
    )
    image = torch.empty(3, height, width)
    drawn = [transform.make_params([image]) for _ in range(count)]
    theirs = np.array([[d["top"], d["left"], d["height"], d["width"]] for d in drawn])
    assert (ours.min(axis=0) - theirs.min(axis=0)).max() <= 0.06 * max(height, width)
    tolerance = 5 * theirs.std(axis=0) * (2 / count) ** 0.5 + 1e-9
    assert (np.abs(ours.mean(axis=0) - theirs.mean(axis=0)) <= tolerance).all()
    assert ours.std(axis=0) == pytest.approx(theirs.std(axis=0), rel=0.08, abs=1e-9)


@pytest.mark.parametrize(
    ("height", "width", "box"),
    [(10, 400, [0, 193, 10, 13]), (400, 10, [193, 0, 13, 10])],
)
def test_an_image_too_long_for_any_try_is_cropped_in_its_middle(
    height: int, width: int, box: list[int]
) -> None:
    augmentation = AugmentationConfig(crop_scale=(0.9, 1.0))
    boxes = crop_boxes(
        draw(augmentation, 5, 0, 0, 0), np.tile((height, width), (5, 1)), (3 / 4, 4 / 3)
    )
    assert boxes.tolist() == [box] * 5


# --- the view for evaluation ------------------------------------------------------------------


@settings(max_examples=25, deadline=None)
@given(
    height=st.integers(3, 150),
    width=st.integers(3, 150),
    size=st.sampled_from([8, 32, 63, 64, 96]),
    border=st.booleans(),
)
def test_the_central_view_equals_torchvision(
    height: int, width: int, size: int, border: bool
) -> None:
    images = photos(2, height, width)
    cut = border and size >= 64 and (height, width) != (size, size)
    short = round(size * 256 / 224) if cut else size
    transform = v2.Compose(
        [
            v2.Resize(short, antialias=True),
            v2.CenterCrop(size),
            v2.Normalize(list(BUSY.input.mean), list(BUSY.input.std)),
        ]
    )
    middles = central(images, whole(images), size, BUSY.input, border=border)
    assert_close(middles, transform(share(images)), atol=4.5e-5, rtol=0)


@pytest.mark.parametrize("size", [32, 64])
def test_the_central_view_of_an_image_of_that_size_is_the_image(size: int) -> None:
    canvas = photos(2, 100, 90)
    sizes = torch.tensor([[size, size], [100, 90]])
    middles = central(canvas, sizes, size, PLAIN.input)
    assert_close(middles[0], share(canvas[0, :, :size, :size]), atol=1e-6, rtol=0)
    assert_close(middles[1:], central(canvas[1:], sizes[1:], size, PLAIN.input), atol=2e-6, rtol=0)
