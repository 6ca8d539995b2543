"""Batch norm, residual addition and ReLU as one operation: Triton kernels for CUDA.

Normalising costs hardly any arithmetic; its time is the trips of the activations to memory and
back. So every tensor is visited as seldom as can be. Forward: one visit gathers statistics, one
writes the result. Backward: one visit sums the gradients, one writes that of the input.

An activation is a table of rows (sample, pixel) × channels, channels next to each other in memory:
(N, C, H, W) in channels-last format, or (N, C). ``views`` stacked batches fill it one after the
other; in each, samples i, i+g, i+2g … share statistics: g groups a view, views · g sets in all. A
kernel's programme takes one set, a block of channels and a chunk of the set's rows, walks the
chunk tile by tile, and leaves its sums in a scratch table (set, chunk, channel). A second, small
kernel puts chunks together, in a fixed order: the same input gives the same bits.

Import this, and the kernels in ``fused_norm_kernels.py``, only where Triton is installed.
``nn/blocks.py`` chooses between this and plain torch.
"""

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from xmoco.nn.fused_norm_kernels import (
    finish_gradients_kernel,
    finish_statistics_kernel,
    input_gradient_kernel,
    normalise_kernel,
    statistics_kernel,
    sum_gradients_kernel,
)

# A tile has this many values, spread over this many warps: four loads of 16 bytes a thread in bf16.
TILE, WARPS = 4096, 4
# Widest block of channels; narrower layers take whole rows.
CHANNELS = 128
# Enough programmes to fill a large GPU twice; more would only lengthen the scratch tables.
PROGRAMMES = 1024
# The small kernels read the scratch tables in strips of channels, 32 bytes wide.
STRIP = 8


class _Layout(NamedTuple):
    """How a table is dealt to programmes."""

    channels: int
    pixels: int  # rows of a sample
    samples: int  # of one view
    groups: int  # of one view
    sets: int  # of samples with common statistics: views × groups
    rows: int  # of one set
    steps: int  # tiles a programme walks through
    chunks: int  # of one set's rows
    height: int  # of a tile
    width: int

    @property
    def grid(self) -> tuple[int, int, int]:
        """Channels vary fastest, then sets, so that programmes run through memory in order."""
        return triton.cdiv(self.channels, self.width), self.sets, self.chunks

    @property
    def walk(self) -> tuple[int, ...]:
        """What a kernel must know to find its tiles."""
        return (
            self.channels, self.pixels, self.samples, self.groups, self.rows, self.steps,
            self.height, self.width,
        )  # fmt: skip

    @property
    def strips(self) -> tuple[int]:
        """The grid of the small kernels."""
        return (triton.cdiv(self.channels, STRIP),)

    @property
    def strip(self) -> tuple[int, int, int]:
        """The shape of what one of them reads, rounded up as Triton asks."""
        return triton.next_power_of_2(self.sets), triton.next_power_of_2(self.chunks), STRIP


def _layout(x: Tensor, groups: int, views: int) -> _Layout:
    samples, channels, pixels = len(x) // views, x.shape[1], x.shape[2:].numel()
    sets, rows = views * groups, samples // groups * pixels
    width = min(CHANNELS, triton.next_power_of_2(channels))
    height = TILE // width
    tiles = triton.cdiv(rows, height)
    most = max(1, PROGRAMMES // (sets * triton.cdiv(channels, width)))
    steps = triton.cdiv(tiles, most)
    chunks = triton.cdiv(tiles, steps)
    return _Layout(channels, pixels, samples, groups, sets, rows, steps, chunks, height, width)


def _as_table(x: Tensor) -> Tensor:
    """``x`` with its channels next to each other in memory; no copy where they are already."""
    return x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x.contiguous()


def fused_batch_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    running_mean: Tensor,
    running_var: Tensor,
    batches: Tensor,
    *,
    groups: int,
    views: int,
    relu: bool,
    momentum: float,
    eps: float,
) -> Tensor:
    """ReLU(batch norm of ``x`` + ``residual``) in training; moves the running statistics."""
    x = _as_table(x)
    residual = None if residual is None else _as_table(residual)
    mean, scale = _statistics(
        x.detach(), running_mean, running_var, batches, groups, views, momentum, eps
    )
    result: Tensor = _normalise(x, residual, weight, bias, mean, scale, groups, views, relu)
    return result


@torch.library.custom_op(
    "xmoco::batch_statistics", mutates_args=("running_mean", "running_var", "batches")
)
def _statistics(
    x: Tensor,
    running_mean: Tensor,
    running_var: Tensor,
    batches: Tensor,
    groups: int,
    views: int,
    momentum: float,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Mean and 1/deviation of every set; moves the running statistics."""
    layout = _layout(x, groups, views)
    parts = x.new_empty((2, layout.sets, layout.chunks, layout.channels), dtype=torch.float32)
    mean, scale = _empty_statistics(x, groups, views)
    with torch.cuda.device_of(x):
        statistics_kernel[layout.grid](x, *parts, *layout.walk, num_warps=WARPS)
        finish_statistics_kernel[layout.strips](
            *parts, mean, scale, running_mean, running_var, batches,
            layout.channels, groups, layout.sets, layout.rows,
            layout.steps * layout.height, layout.chunks, momentum, eps,
            views, *layout.strip, num_warps=WARPS,
        )  # fmt: skip
    return mean, scale


@_statistics.register_fake
def _(
    x: Tensor, _mean: Tensor, _var: Tensor, _batches: Tensor, groups: int, views: int, *_: float
) -> tuple[Tensor, Tensor]:
    return _empty_statistics(x, groups, views)


def _empty_statistics(x: Tensor, groups: int, views: int) -> tuple[Tensor, Tensor]:
    shape = (views * groups, x.shape[1])
    return x.new_empty(shape, dtype=torch.float32), x.new_empty(shape, dtype=torch.float32)


@torch.library.custom_op("xmoco::normalise", mutates_args=())
def _normalise(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    mean: Tensor,
    scale: Tensor,
    groups: int,
    views: int,
    relu: bool,
) -> Tensor:
    """The result. Its gradient for ``x`` counts ``mean`` and ``scale`` as functions of ``x``."""
    layout = _layout(x, groups, views)
    y = torch.empty_like(x)
    with torch.cuda.device_of(x):
        normalise_kernel[layout.grid](
            x, x if residual is None else residual, y, weight, bias, mean, scale,
            *layout.walk, residual is not None, relu, num_warps=WARPS,
        )  # fmt: skip
    return y


@_normalise.register_fake
def _(x: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("xmoco::normalise_backward", mutates_args=())
def _normalise_backward(
    dy: Tensor,
    x: Tensor,
    y: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    mean: Tensor,
    scale: Tensor,
    groups: int,
    views: int,
    relu: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, residual, weight and bias. ``y`` is given where there was a residual."""
    layout = _layout(x, groups, views)
    residual = y is not None
    parts = x.new_empty((2, layout.sets, layout.chunks, layout.channels), dtype=torch.float32)
    sums = x.new_empty((2, layout.sets, layout.channels), dtype=torch.float32)
    dx, d_residual, d_weight, d_bias = _empty_gradients(x, y, weight, bias)
    with torch.cuda.device_of(x):
        sum_gradients_kernel[layout.grid](
            dy, x, y if residual else x, d_residual, weight, bias, mean, scale, *parts,
            *layout.walk, residual, relu, num_warps=WARPS,
        )  # fmt: skip
        finish_gradients_kernel[layout.strips](
            *parts, *sums, d_weight, d_bias,
            layout.channels, layout.sets, layout.chunks, *layout.strip, num_warps=WARPS,
        )  # fmt: skip
        # The residual's gradient has gone through the ReLU already.
        input_gradient_kernel[layout.grid](
            d_residual if residual else dy, x, dx, weight, bias, mean, scale, *sums,
            *layout.walk, relu and not residual, num_warps=WARPS,
        )  # fmt: skip
    return dx, d_residual, d_weight, d_bias


@_normalise_backward.register_fake
def _(
    _dy: Tensor, x: Tensor, y: Tensor | None, weight: Tensor, bias: Tensor, *_: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _empty_gradients(x, y, weight, bias)


def _empty_gradients(
    x: Tensor, y: Tensor | None, weight: Tensor, bias: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    d_residual = x.new_empty(0) if y is None else torch.empty_like(x)
    return torch.empty_like(x), d_residual, torch.empty_like(weight), torch.empty_like(bias)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, residual, weight, bias, mean, scale, *ctx.settings = inputs
    # Without a residual, x alone tells where the ReLU let through.
    ctx.save_for_backward(x, None if residual is None else output, weight, bias, mean, scale)


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    x, y, *rest = ctx.saved_tensors
    dx, d_residual, d_weight, d_bias = _normalise_backward(
        _as_table(dy), x, y, *rest, *ctx.settings
    )
    nothing = [None] * 5  # for the statistics, which x stands for, and the settings
    return dx, None if y is None else d_residual, d_weight, d_bias, *nothing


_normalise.register_autograd(_backward, setup_context=_remember)
