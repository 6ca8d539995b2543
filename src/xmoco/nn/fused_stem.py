# mypy: disable-error-code="import-untyped, no-untyped-def", allow-untyped-decorators
"""The stem of a ResNet, 7 × 7 convolution and 3 × 3 max pooling of stride 2, for CUDA.

Both work on the largest activations of the network, and the usual kernels leave much of the GPU
idle there: three channels do not fill a tensor core, and pooling is far from the memory's speed.

A convolution of stride 2 over an image is one of stride 1 over its 2 × 2 blocks, of which each is a
pixel with four times the channels. So images are cut into blocks, with the border of zeros that the
convolution asks for, and 12 channels are filled up to 16; the 7 × 7 weights, with a row and a
column of zeros before them, become 4 × 4 over the blocks. The sums are the same, of the same
products.

Pooling remembers which of a window's nine values was the largest, one byte each. On the way back
every 2 × 2 block of inputs gathers what it gets from the four windows that reach into it: nothing
is added by several threads, and the same input gives the same bits.

Import this only where Triton is installed. ``nn/blocks.py`` chooses between this and plain torch.
"""

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

# Values of a tile and warps: eight values a thread, 16 bytes in bf16.
TILE, WARPS = 2048, 8
BLOCK_CHANNELS = 16
"""Of an image cut into 2 × 2 blocks: 12, and zeros up to what a tensor core takes at a time."""


def stem_convolution(images: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """As ``conv2d(images, weight, stride=2, padding=3)`` of type ``dtype``, for ``weight``
    (n, 3, 7, 7), images of even sides, and without a gradient for them."""
    outputs, channels = weight.shape[:2]
    blocks = F.pad(weight, (1, 0, 1, 0)).view(outputs, channels, 4, 2, 4, 2)
    blocks = blocks.permute(0, 1, 3, 5, 2, 4).reshape(outputs, 4 * channels, 4, 4)
    blocks = F.pad(blocks, (0, 0, 0, 0, 0, BLOCK_CHANNELS - 4 * channels))
    blocks = blocks.to(dtype, memory_format=torch.channels_last)
    return F.conv2d(_in_blocks(images, dtype), blocks)


def max_pool(x: Tensor) -> Tensor:
    """As ``max_pool2d(x, kernel_size=3, stride=2, padding=1)``."""
    pooled: Tensor = _max_pool(x.contiguous(memory_format=torch.channels_last))[0]
    return pooled


@torch.library.custom_op("xmoco::in_blocks", mutates_args=())
def _in_blocks(images: Tensor, dtype: torch.dtype) -> Tensor:
    """(n, 16, H/2 + 3, W/2 + 3): blocks of 2 × 2 pixels, two of zeros before and one after them.
    Channel 4c + 2i + j of a block is channel c of its pixel (i, j)."""
    out = _empty_blocks(images, dtype)
    rows = out.numel() // BLOCK_CHANNELS
    height = TILE // BLOCK_CHANNELS
    with torch.cuda.device_of(images):
        _in_blocks_kernel[(triton.cdiv(rows, height),)](
            images, out, rows, *images.shape[1:], *images.stride(),
            height, BLOCK_CHANNELS, num_warps=WARPS,
        )  # fmt: skip
    return out


@_in_blocks.register_fake
def _(images: Tensor, dtype: torch.dtype) -> Tensor:
    return _empty_blocks(images, dtype)


def _empty_blocks(images: Tensor, dtype: torch.dtype) -> Tensor:
    samples, _, height, width = images.shape
    shape = (samples, BLOCK_CHANNELS, height // 2 + 3, width // 2 + 3)
    return _empty(shape, images.device, dtype)


@triton.jit
def _in_blocks_kernel(
    images, out, rows, channels, height, width,
    of_sample, of_channel, of_line, of_column,
    ROWS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    lines, columns = height // 2 + 3, width // 2 + 3
    sample, line, column = row // (lines * columns), row // columns % lines, row % columns
    part = tl.arange(0, CHANNELS)[None, :]
    y = 2 * (line[:, None] - 2) + part // 2 % 2
    x = 2 * (column[:, None] - 2) + part % 2
    inside = (y >= 0) & (y < height) & (x >= 0) & (x < width) & (part // 4 < channels)
    place = sample[:, None] * of_sample + part // 4 * of_channel + y * of_line + x * of_column
    value = tl.load(images + place, inside & (row < rows)[:, None], other=0)
    tl.store(out + row[:, None] * CHANNELS + part, value, (row < rows)[:, None])


@torch.library.custom_op("xmoco::max_pool", mutates_args=())
def _max_pool(x: Tensor) -> tuple[Tensor, Tensor]:
    """The largest of every window, and which of its nine values that is."""
    pooled, places = _empty_pooled(x)
    grid, tile = _tiles(pooled)
    with torch.cuda.device_of(x):
        _max_pool_kernel[grid](x, pooled, places, *_sizes(x), *tile, num_warps=WARPS)
    return pooled, places


@_max_pool.register_fake
def _(x: Tensor) -> tuple[Tensor, Tensor]:
    return _empty_pooled(x)


def _empty_pooled(x: Tensor) -> tuple[Tensor, Tensor]:
    shape = (*x.shape[:2], *((side + 1) // 2 for side in x.shape[2:]))
    pooled = _empty(shape, x.device, x.dtype)
    return pooled, torch.empty_like(pooled, dtype=torch.uint8)


def _tiles(pooled: Tensor) -> tuple[tuple[int, int], tuple[int, int]]:
    """The grid, and the shape of a programme's share: windows × channels."""
    channels = pooled.shape[1]
    width = min(64, triton.next_power_of_2(channels))
    windows = TILE // width
    return (triton.cdiv(pooled.numel() // channels, windows), triton.cdiv(channels, width)), (
        windows,
        width,
    )


def _sizes(x: Tensor) -> tuple[int, int, int, int]:
    return len(x), x.shape[1], x.shape[2], x.shape[3]


@triton.jit
def _window(samples, channels, height, width, WINDOWS: tl.constexpr, WIDTH: tl.constexpr):
    """A programme's windows: sample, line and column of each, its channels, and which exist."""
    lines, columns = (height + 1) // 2, (width + 1) // 2
    window = tl.program_id(0).to(tl.int64) * WINDOWS + tl.arange(0, WINDOWS)
    sample, line, column = window // (lines * columns), window // columns % lines, window % columns
    channel = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)[None, :]
    there = (sample < samples)[:, None] & (channel < channels)
    return sample[:, None], line[:, None], column[:, None], channel, there


@triton.jit
def _max_pool_kernel(
    x, pooled, places, samples, channels, height, width,
    WINDOWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    sample, line, column, channel, there = _window(samples, channels, height, width, WINDOWS, WIDTH)
    largest = tl.full((WINDOWS, WIDTH), float("-inf"), tl.float32)
    # The first that exists, should all be -inf.
    which = tl.zeros((WINDOWS, WIDTH), tl.int32) + tl.where(line == 0, 3, 0)
    which += tl.where(column == 0, 1, 0)
    for k in tl.static_range(9):
        i, j = 2 * line - 1 + k // 3, 2 * column - 1 + k % 3
        inside = there & (i >= 0) & (i < height) & (j >= 0) & (j < width)
        place = ((sample * height + i) * width + j) * channels + channel
        value = tl.load(x + place, inside, other=float("-inf")).to(tl.float32)
        larger = (value > largest) | (value != value)  # NaN wins, as in torch
        largest = tl.where(larger, value, largest)
        which = tl.where(larger, k, which)
    lines, columns = (height + 1) // 2, (width + 1) // 2
    place = ((sample * lines + line) * columns + column) * channels + channel
    tl.store(pooled + place, largest, there)
    tl.store(places + place, which, there)


@torch.library.custom_op("xmoco::max_pool_backward", mutates_args=())
def _max_pool_backward(d_pooled: Tensor, places: Tensor, height: int, width: int) -> Tensor:
    dx = _empty_unpooled(d_pooled, height, width)
    grid, tile = _tiles(d_pooled)
    with torch.cuda.device_of(d_pooled):
        _max_pool_backward_kernel[grid](d_pooled, places, dx, *_sizes(dx), *tile, num_warps=WARPS)
    return dx


@_max_pool_backward.register_fake
def _(d_pooled: Tensor, _places: Tensor, height: int, width: int) -> Tensor:
    return _empty_unpooled(d_pooled, height, width)


def _empty_unpooled(d_pooled: Tensor, height: int, width: int) -> Tensor:
    shape = (*d_pooled.shape[:2], height, width)
    return _empty(shape, d_pooled.device, d_pooled.dtype)


def _empty(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=device, memory_format=torch.channels_last)


@triton.jit
def _share(
    d_pooled, places, sample, line, column, channel, there, lines, columns, channels,
    DOWN: tl.constexpr, RIGHT: tl.constexpr,
):  # fmt: skip
    """The gradient of a window's result, and which of its values it belongs to."""
    there = there & (line + DOWN < lines) & (column + RIGHT < columns)
    place = ((sample * lines + line + DOWN) * columns + column + RIGHT) * channels + channel
    gradient = tl.load(d_pooled + place, there, other=0).to(tl.float32)
    return gradient, tl.load(places + place, there, other=9)


@triton.jit
def _max_pool_backward_kernel(
    d_pooled, places, dx, samples, channels, height, width,
    WINDOWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Window (l, c) has block (l, c) of inputs at its lower right; the windows to the right, below
    and below right reach into the block, too. Values of a window are numbered line by line."""
    sample, line, column, channel, there = _window(samples, channels, height, width, WINDOWS, WIDTH)
    lines, columns = (height + 1) // 2, (width + 1) // 2
    at = (d_pooled, places, sample, line, column, channel, there, lines, columns, channels)
    own, own_which = _share(*at, 0, 0)
    right, right_which = _share(*at, 0, 1)
    below, below_which = _share(*at, 1, 0)
    beyond, beyond_which = _share(*at, 1, 1)
    upper_left = tl.where(own_which == 4, own, 0)
    upper_right = tl.where(own_which == 5, own, 0) + tl.where(right_which == 3, right, 0)
    lower_left = tl.where(own_which == 7, own, 0) + tl.where(below_which == 1, below, 0)
    lower_right = tl.where(own_which == 8, own, 0) + tl.where(right_which == 6, right, 0)
    lower_right += tl.where(below_which == 2, below, 0) + tl.where(beyond_which == 0, beyond, 0)
    place = ((sample * height + 2 * line) * width + 2 * column) * channels + channel
    in_line, in_column = 2 * line + 1 < height, 2 * column + 1 < width
    tl.store(dx + place, upper_left, there)
    tl.store(dx + place + channels, upper_right, there & in_column)
    tl.store(dx + place + width * channels, lower_left, there & in_line)
    tl.store(dx + place + (width + 1) * channels, lower_right, there & in_line & in_column)


def _remember(ctx: Any, inputs: tuple[Tensor], output: tuple[Tensor, Tensor]) -> None:
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(output[1])
    ctx.size = inputs[0].shape[2:]


def _backward(ctx: Any, d_pooled: Tensor, _: Tensor) -> Tensor:
    (places,) = ctx.saved_tensors
    d_pooled = d_pooled.contiguous(memory_format=torch.channels_last)
    dx: Tensor = _max_pool_backward(d_pooled, places, *ctx.size)
    return dx


_max_pool.register_autograd(_backward, setup_context=_remember)
