# mypy: disable-error-code="import-untyped, import-not-found"
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Views as Triton kernels: what views.py does operation by operation, in one launch (with blur, 3).

On a GPU a small view costs next to nothing to compute; its time goes into starting kernels and into
trips to memory between them. So one programme makes one view from beginning to end: it reads the
uint8 image, keeps a block of pixels in registers while it crops, flips, jitters and normalises, and
writes each value once. Contrast alone needs more than the pixel itself, the view's mean luma; for
it the programme goes over the view twice rather than keep the first pass's result somewhere.

Blur looks at neighbours, hence comes afterwards: along the lines, then along the columns, and only
for the views that need it. These come first, so that the first so many programmes are theirs.

Values are those of the plain version but for rounding. Import this only where Triton is installed.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from xmoco.data import colour

# A programme's share at a time: two pixels a thread, or eight values of a view to be blurred. Then
# a thread needs at most 64 registers, and 32 warps fit a multiprocessor.
PIXELS, PIXEL_WARPS = 512, 8
VALUES, VALUE_WARPS = 4096, 16

# Kernels see constants only in this form.
CONTRAST = tl.constexpr(colour.CONTRAST)
SATURATION = tl.constexpr(colour.SATURATION)
HUE = tl.constexpr(colour.HUE)
LUMA_RED, LUMA_GREEN, LUMA_BLUE = map(tl.constexpr, colour.LUMA.tolist())


def render(
    images: Tensor,
    views: Tensor,
    *,
    places: Tensor,
    boxes: Tensor,
    flips: Tensor,
    turns: Tensor,
    kinds: Tensor,
    strengths: Tensor,
    matrices: Tensor,
    offsets: Tensor,
    sigmas: Tensor,
    blurred: int,
    side: int,
) -> None:
    """Fill ``views`` (n, 3, size, size), channels-last, from uint8 ``images`` (m, 3, H, W).

    Row i of the other tensors, all float32 and on the images' device, tells how to make view number
    ``places[i]``, which is one of image ``places[i]`` modulo m. ``boxes`` (n, 4) are top, left,
    height and width. ``kinds`` and ``strengths`` (n, 4) of jitter come in order; ``turns`` (n, 2)
    tells how many come before contrast, and how many there are. ``matrices`` (n, 3, 3) and
    ``offsets`` (n, 3) change colours at last. The first ``blurred`` rows are blurred, by a kernel
    of ``side`` pixels and their ``sigmas``.
    """
    images = images.contiguous()
    count, size = len(views), views.shape[-1]
    sharp = images.new_empty((blurred, size, size, 3), dtype=torch.float32)
    with torch.cuda.device_of(images):
        _render_kernel[(count,)](
            images, views, sharp,
            places, boxes, flips, turns, kinds, strengths, matrices, offsets,
            len(images), *images.shape[2:], blurred,
            SIZE=size, BLOCK=PIXELS, num_warps=PIXEL_WARPS, enable_fp_fusion=True,
        )  # fmt: skip
        if blurred:
            halfway = torch.empty_like(sharp)
            slots = torch.arange(blurred, device=images.device)
            grid = (triton.cdiv(3 * size**2, VALUES), blurred)
            for source, target, targets, stride in (
                (sharp, halfway, slots, 3),
                (halfway, views, places, 3 * size),
            ):
                _blur_kernel[grid](
                    source, target, targets, sigmas,
                    HALF=side // 2, STRIDE=stride, SIZE=size, BLOCK=VALUES,
                    num_warps=VALUE_WARPS, enable_fp_fusion=True,
                )  # fmt: skip


# Canvases differ from batch to batch: the compiler shall not make a kernel for each kind of number.
@triton.jit(do_not_specialize=["count", "height", "width", "blurred"])
def _render_kernel(
    images, views, sharp,
    places, boxes, flips, turns, kinds, strengths, matrices, offsets,
    count, height, width, blurred,
    SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    VALUES: tl.constexpr = 3 * SIZE * SIZE
    row = tl.program_id(0).to(tl.int64)
    place = tl.load(places + row).to(tl.int64)
    image = images + (place % count) * 3 * height * width
    box = boxes + row * 4
    flip = tl.load(flips + row)
    kinds += row * 4
    strengths += row * 4
    turns_before = tl.load(turns + row * 2).to(tl.int32)
    turns_in_all = tl.load(turns + row * 2 + 1).to(tl.int32)

    luma_sums = tl.zeros((BLOCK,), tl.float32)
    if turns_in_all > 0:
        for first in range(0, SIZE * SIZE, BLOCK):
            pixel = first + tl.arange(0, BLOCK)
            red, green, blue = _crop(image, height, width, box, flip, pixel, SIZE)
            red, green, blue = _jitter(red, green, blue, kinds, strengths, turns_before, 0.0)
            luma_sums += tl.where(pixel < SIZE * SIZE, _luma(red, green, blue), 0.0)
    mean = tl.sum(luma_sums) / (SIZE * SIZE)

    for first in range(0, SIZE * SIZE, BLOCK):
        pixel = first + tl.arange(0, BLOCK)
        red, green, blue = _crop(image, height, width, box, flip, pixel, SIZE)
        red, green, blue = _jitter(red, green, blue, kinds, strengths, turns_in_all, mean)
        for channel in tl.static_range(3):
            matrix = matrices + row * 9 + channel * 3
            value = tl.load(matrix) * red
            value += tl.load(matrix + 1) * green
            value += tl.load(matrix + 2) * blue
            value += tl.load(offsets + row * 3 + channel)
            inside = pixel < SIZE * SIZE
            if row < blurred:
                tl.store(sharp + row * VALUES + pixel * 3 + channel, value, inside)
            else:
                tl.store(views + place * VALUES + pixel * 3 + channel, value, inside)


@triton.jit
def _crop(image, height, width, box, flip, pixel, SIZE: tl.constexpr):
    """Some pixels of the box, resized to SIZE × SIZE and perhaps flipped, from 0 to 1.

    Every pixel is the mean of those under its triangle, as in ``resample.triangle_weights``.
    """
    top = tl.load(box).to(tl.int32)
    left = tl.load(box + 1).to(tl.int32)
    tall = tl.load(box + 2).to(tl.int32)
    wide = tl.load(box + 3).to(tl.int32)
    pixel = tl.minimum(pixel, SIZE * SIZE - 1)
    x = pixel % SIZE
    x = tl.where(flip != 0, SIZE - 1 - x, x)
    first_row, row_distance, row_reach = _triangle(pixel // SIZE, tall, SIZE)
    first_column, column_distance, column_reach = _triangle(x, wide, SIZE)
    row_slope, column_slope = 1 / row_reach, 1 / column_reach

    red = tl.zeros(pixel.shape, tl.float32)
    green = tl.zeros(pixel.shape, tl.float32)
    blue = tl.zeros(pixel.shape, tl.float32)
    weights = tl.zeros(pixel.shape, tl.float32)
    for i in range(tl.ceil(2 * row_reach).to(tl.int32)):
        row_weight = tl.maximum(1 - tl.abs(row_distance + i) * row_slope, 0.0)
        row_weight = tl.where(first_row + i < tall, row_weight, 0.0)
        row = tl.minimum(first_row + i, tall - 1)
        line = image + (top + row) * width + left + first_column
        for j in range(tl.ceil(2 * column_reach).to(tl.int32)):
            inside = first_column + j < wide
            weight = tl.maximum(1 - tl.abs(column_distance + j) * column_slope, 0.0)
            weight = tl.where(inside, row_weight * weight, 0.0)
            red += weight * tl.load(line + j, inside, other=0)
            green += weight * tl.load(line + height * width + j, inside, other=0)
            blue += weight * tl.load(line + 2 * height * width + j, inside, other=0)
            weights += weight
    scale = 1 / (255 * weights)
    return red * scale, green * scale, blue * scale


@triton.jit
def _triangle(output, length, SIZE: tl.constexpr):
    """Along one axis: the first pixel under the triangle of an output pixel, how far that pixel's
    centre is from the triangle's (negative: before it), and how far the triangle reaches."""
    reach = tl.maximum(length / SIZE, 1.0)
    # The centre (output + 0.5) · length / SIZE, as a whole and a fraction: nothing is lost.
    doubled = (2 * output + 1) * length
    centre = doubled // (2 * SIZE)
    fraction = (doubled % (2 * SIZE)) / (2.0 * SIZE)
    first = tl.maximum(centre + tl.floor(fraction - reach + 0.5).to(tl.int32), 0)
    return first, (first - centre) + 0.5 - fraction, reach


@triton.jit
def _jitter(red, green, blue, kinds, strengths, turns, mean):
    """The first ``turns`` changes of colour, of a view whose mean luma before contrast is known."""
    for turn in range(turns):
        kind = tl.load(kinds + turn)
        strength = tl.load(strengths + turn)
        if kind == HUE:
            red, green, blue = _turn_hue(red, green, blue, strength)
        else:
            # Others blend: with the mean luma, with the luma of each pixel, or with black.
            other = tl.where(kind == SATURATION, _luma(red, green, blue), 0.0)
            other = (1 - strength) * tl.where(kind == CONTRAST, mean, other)
            red = _between_0_and_1(strength * red + other)
            green = _between_0_and_1(strength * green + other)
            blue = _between_0_and_1(strength * blue + other)
    return red, green, blue


@triton.jit
def _turn_hue(red, green, blue, turn):
    """As ``colour.turn_hue``."""
    highest = tl.maximum(tl.maximum(red, green), blue)
    spread = highest - tl.minimum(tl.minimum(red, green), blue)
    if_not_red = tl.where(highest == green, blue - red + 2 * spread, red - green + 4 * spread)
    sixths = tl.where(highest == red, green - blue, if_not_red)
    hue = sixths / (6 * tl.maximum(spread, 1e-12)) + turn
    red = highest - spread * _hue_share(hue + 11 / 6)
    green = highest - spread * _hue_share(hue + 9 / 6)
    blue = highest - spread * _hue_share(hue + 7 / 6)
    return red, green, blue


@triton.jit
def _hue_share(circles):
    return _between_0_and_1(2 - tl.abs(6 * (circles - tl.floor(circles)) - 2))


@triton.jit
def _luma(red, green, blue):
    return LUMA_RED * red + LUMA_GREEN * green + LUMA_BLUE * blue


@triton.jit
def _between_0_and_1(value):
    return tl.minimum(tl.maximum(value, 0.0), 1.0)


@triton.jit
def _blur_kernel(
    source, target, targets, sigmas,
    HALF: tl.constexpr, STRIDE: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Gaussian blur along one axis, on which neighbours are STRIDE values apart.

    View i of ``source``, with the i-th of the ``sigmas``, becomes ``target[targets[i]]``.
    """
    view = tl.program_id(1).to(tl.int64)
    sigma = tl.load(sigmas + view)
    value = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = value < 3 * SIZE * SIZE
    position = value // STRIDE % SIZE
    line = source + view * (3 * SIZE * SIZE) + (value - position * STRIDE)

    total = tl.zeros((BLOCK,), tl.float32)
    weights = 0.0
    for tap in range(-HALF, HALF + 1):
        weight = tl.exp(-0.5 * (tap / sigma) * (tap / sigma))
        # The image continues beyond its border by reflection.
        read = tl.abs(position + tap)
        read = (SIZE - 1) - tl.abs((SIZE - 1) - read)
        total += weight * tl.load(line + read * STRIDE, inside)
        weights += weight
    place = tl.load(targets + view).to(tl.int64)
    tl.store(target + place * (3 * SIZE * SIZE) + value, total / weights, inside)
