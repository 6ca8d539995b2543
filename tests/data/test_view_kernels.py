"""The kernels against the plain version, which test_views.py holds against torchvision.

They run on the GPU where there is one. Elsewhere Triton's interpreter runs them, slowly, on small
views: see test_interpreted_kernels.py.
"""

import dataclasses
import itertools
import os

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from xmoco.config import AugmentationConfig, InputConfig
from xmoco.data.views import (
    ViewGroup,
    ViewParameters,
    draw,
    render,
    render_fused,
    render_plain,
    stacked,
)

pytest.importorskip("triton")

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
ON_CUDA = torch.cuda.is_available() and not INTERPRETED
DEVICE = "cuda" if ON_CUDA else "cpu"

# Neither mean nor deviation, so that tolerances are in shares of the range from black to white.
RAW = {"mean": (0, 0, 0), "std": (1, 1, 1)}
TOLERANCE = 2e-5
BUSIEST = AugmentationConfig(invert=0.3, grey=0.3, blur=0.5, blur_kernel=71)


def group(
    augmentation: AugmentationConfig = BUSIEST, size: int = 12, **changes: object
) -> ViewGroup:
    return ViewGroup(
        ("view",), augmentation.model_copy(update=changes), InputConfig(size=size, **RAW)
    )


BUSY = group()


def drawn(views: ViewGroup, count: int, seed: int = 0, view: int = 0) -> ViewParameters:
    return draw(views.augmentation, count, seed, 0, view)


def photos(count: int, height: int, width: int, seed: int = 0) -> Tensor:
    """Strong colours and noise; every other image starts with rows of exact grey."""
    generator = torch.Generator().manual_seed(seed)
    base = torch.rand(count, 3, 1, 1, generator=generator)
    noise = torch.rand(count, 3, height, width, generator=generator)
    images = ((1.4 * base + 0.8 * noise - 0.6).clamp(0, 1) * 255).to(torch.uint8)
    images[::2, :, : height // 3] = images[::2, :1, : height // 3]
    return images


def whole(images: Tensor) -> Tensor:
    return torch.tensor(images.shape[2:]).expand(len(images), 2)


def assert_fused_is_plain(images: Tensor, sizes: Tensor, *args: object) -> None:
    fused = render_fused(images.to(DEVICE), sizes, *args)
    plain = render_plain(images.to(DEVICE), sizes, *args)
    assert fused.stride() == plain.stride()
    # A turn of the hue has jumps (a grey has no hue), but what it makes of a colour has none: near
    # grey the hue counts for little. So the tolerance holds for every pixel.
    assert_close(fused, plain, atol=TOLERANCE, rtol=0)


@pytest.mark.gpu
@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    height=st.integers(1, 60),
    width=st.integers(1, 60),
    size=st.sampled_from((8, 11, 16)),
    ratio=st.sampled_from(((3 / 4, 4 / 3), (0.1, 10.0))),
    seed=st.integers(0, 99),
)
def test_views_of_images_of_all_sizes(
    height: int, width: int, size: int, ratio: tuple[float, float], seed: int
) -> None:
    views = group(size=size, crop_scale=(0.02, 1.0), crop_ratio=ratio)
    images = photos(2, height, width, seed)
    assert_fused_is_plain(images, whole(images), drawn(views, 2, seed), views)


@pytest.mark.gpu
def test_every_order_of_jitter() -> None:
    views = group(AugmentationConfig(jitter=1.0, hue=0.5, blur=0.0), size=8)
    images = photos(24, 10, 12)
    parameters = dataclasses.replace(
        drawn(views, 24), order=np.array(list(itertools.permutations(range(4))))
    )
    assert_fused_is_plain(images, whole(images), parameters, views)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["flip", "jitter", "grey", "invert", "blur"])
@pytest.mark.parametrize("chance", [0.0, 1.0])
def test_for_all_or_for_none(name: str, chance: float) -> None:
    views = group(size=8, **{name: chance})
    images = photos(3, 9, 13)
    assert_fused_is_plain(images, whole(images), drawn(views, 3), views)


@pytest.mark.gpu
@pytest.mark.parametrize("size", [24, 48])
def test_views_larger_than_a_programmes_share(size: int) -> None:
    views = group(size=size)
    images = photos(3, 40, 50)
    assert_fused_is_plain(images, whole(images), drawn(views, 3), views)


@pytest.mark.gpu
@pytest.mark.parametrize(("kernel", "sigma"), [(1, 0.1), (71, 2.0), (9999, 5.0)])
def test_blur_up_to_the_widest_kernel(kernel: int, sigma: float) -> None:
    views = group(blur=1.0, blur_kernel=kernel, blur_sigma=(sigma, sigma))
    images = photos(3, 20, 20)
    assert_fused_is_plain(images, whole(images), drawn(views, 3), views)


@pytest.mark.gpu
def test_what_lies_beyond_an_image_is_never_seen() -> None:
    images = photos(4, 13, 17)
    parameters = drawn(BUSY, 4)
    alone = render_fused(images.to(DEVICE), whole(images), parameters, BUSY)
    canvas = torch.full((4, 3, 20, 30), 255, dtype=torch.uint8)
    canvas[:, :, :13, :17] = images
    assert torch.equal(render_fused(canvas.to(DEVICE), whole(images), parameters, BUSY), alone)
    assert_fused_is_plain(canvas, whole(images), parameters, BUSY)


@pytest.mark.gpu
def test_images_that_do_not_lie_one_after_the_other() -> None:
    strip = photos(3, 12, 40)
    images = strip[:, :, :, 5:17]
    parameters = drawn(BUSY, 3)
    part = render_fused(images.to(DEVICE), whole(images), parameters, BUSY)
    copy = render_fused(images.contiguous().to(DEVICE), whole(images), parameters, BUSY)
    assert torch.equal(part, copy)


@pytest.mark.gpu
def test_two_views_of_every_image_at_once() -> None:
    images = photos(5, 20, 14)
    parts = [drawn(BUSY, 5, view=view) for view in (0, 1)]
    both = render_fused(images.to(DEVICE), whole(images), stacked(*parts), BUSY)
    for one, part in zip(both.chunk(2), parts, strict=True):
        assert torch.equal(one, render_fused(images.to(DEVICE), whole(images), part, BUSY))


@pytest.mark.gpu
def test_in_bfloat16_only_the_result_is_rounded() -> None:
    images = photos(4, 20, 14)
    arguments = (images.to(DEVICE), whole(images), drawn(BUSY, 4), BUSY)
    exact, rounded = render_fused(*arguments), render_fused(*arguments, torch.bfloat16)
    assert rounded.dtype == torch.bfloat16
    # Eight bits of which the last is rounded; the interpreter cuts it off.
    assert_close(rounded.float(), exact, atol=1e-6, rtol=2.0 ** (-7 if INTERPRETED else -8))


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED, reason="takes the interpreter too long")
def test_photographs_on_cuda() -> None:
    views = group(AugmentationConfig(), size=224)
    canvas = photos(16, 375, 500)
    sizes = torch.stack((torch.randint(100, 376, (16,)), torch.randint(100, 501, (16,))), dim=1)
    assert_fused_is_plain(canvas, sizes, drawn(views, 16), views)


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED, reason="takes the interpreter too long")
def test_cuda_takes_the_kernels() -> None:
    images = photos(4, 20, 14).cuda()
    arguments = (images, whole(images), drawn(BUSY, 4), BUSY)
    assert torch.equal(render(*arguments), render_fused(*arguments))
