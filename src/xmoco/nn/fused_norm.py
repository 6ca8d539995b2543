# mypy: disable-error-code="import-untyped, no-untyped-def", allow-untyped-decorators
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

Import this only where Triton is installed. ``nn/blocks.py`` chooses between this and plain torch.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

# A tile has this many values, spread over this many warps: four loads of 16 bytes a thread in bf16.
TILE, WARPS = 4096, 4
# Widest block of channels; narrower layers take whole rows.
CHANNELS = 128
# Enough programmes to fill a large GPU twice; more would only lengthen the scratch tables.
PROGRAMMES = 1024
# The small kernels read the scratch tables in strips of channels, 32 bytes wide.
STRIP = 8

# Compiled anew for other tile shapes and types, and for channels that are no multiple of 16 (which
# take narrow loads), but not for every batch and image size.
_jit = triton.jit(
    do_not_specialize=[
        "pixels", "samples", "groups", "sets", "rows", "steps", "chunk_rows", "chunks",
    ]
)  # fmt: skip


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


@triton.jit
def _place(chunk, channels, pixels, samples, groups, rows, step, steps, HEIGHT, WIDTH):
    """A tile's offsets in the table, and which of them exist."""
    index = (chunk * steps + step) * HEIGHT + tl.arange(0, HEIGHT)
    view, group = tl.program_id(1) // groups, tl.program_id(1) % groups
    sample = view * samples + group + index // pixels * groups
    row = sample.to(tl.int64) * pixels + index % pixels
    channel = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    there = (index < rows)[:, None] & (channel < channels)[None, :]
    return row[:, None] * channels + channel[None, :], there


@_jit
def _statistics_kernel(
    x, means, deviations,
    channels, pixels, samples, groups, rows, steps,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Mean and summed squared deviation of a chunk, by Welford's method: no cancellation."""
    chunk = tl.program_id(2)
    mean = tl.zeros((HEIGHT, WIDTH), tl.float32)
    deviation = tl.zeros((HEIGHT, WIDTH), tl.float32)
    for step in range(steps):
        place, there = _place(
            chunk, channels, pixels, samples, groups, rows, step, steps, HEIGHT, WIDTH
        )
        value = tl.load(x + place, there, other=0).to(tl.float32)
        change = tl.where(there, value - mean, 0)
        mean += change * (1.0 / (step + 1))
        deviation += change * (value - mean)
    # Every row of the tile has walked by itself; put them together, each by its number of values.
    start = chunk * steps * HEIGHT + tl.arange(0, HEIGHT)
    count = tl.minimum(tl.maximum(tl.cdiv(rows - start, HEIGHT), 0), steps).to(tl.float32)[:, None]
    whole = tl.sum(count * mean, 0) / tl.sum(count)
    away = mean - whole[None, :]
    spread = tl.sum(deviation + count * away * away, 0)
    channel = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    place = (tl.program_id(1) * tl.num_programs(2) + chunk) * channels + channel
    tl.store(means + place, whole, channel < channels)
    tl.store(deviations + place, spread, channel < channels)


@_jit
def _finish_statistics_kernel(
    means, deviations, mean_out, scale_out, running_mean, running_var, batches,
    channels, groups, sets, rows, chunk_rows, chunks, momentum, eps,
    VIEWS: tl.constexpr, SETS: tl.constexpr, CHUNKS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Mean and 1/deviation of every set; running statistics, view by view."""
    set_ = tl.arange(0, SETS)[:, None, None]
    chunk = tl.arange(0, CHUNKS)[None, :, None]
    channel = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    place = (set_ * chunks + chunk) * channels + channel[None, None, :]
    there = (set_ < sets) & (chunk < chunks) & (channel[None, None, :] < channels)
    part_mean = tl.load(means + place, there, other=0)
    part_deviation = tl.load(deviations + place, there, other=0)
    count = tl.minimum(tl.maximum(rows - chunk * chunk_rows, 0), chunk_rows).to(tl.float32)
    mean = tl.sum(count * part_mean, 1) / rows
    away = part_mean - mean[:, None, :]
    variance = tl.sum(part_deviation + count * away * away, 1) / rows

    set_ = tl.arange(0, SETS)[:, None]
    place = set_ * channels + channel[None, :]
    there = (set_ < sets) & (channel < channels)[None, :]
    tl.store(mean_out + place, mean, there)
    tl.store(scale_out + place, 1 / tl.sqrt(variance + eps), there)

    old_mean = tl.load(running_mean + channel, channel < channels)
    old_var = tl.load(running_var + channel, channel < channels)
    for view in tl.static_range(VIEWS):
        here = set_ // groups == view
        fresh_mean = tl.sum(tl.where(here, mean, 0), 0) / groups
        fresh_var = tl.sum(tl.where(here, variance, 0), 0) / groups * (rows / (rows - 1))
        old_mean += momentum * (fresh_mean - old_mean)
        old_var += momentum * (fresh_var - old_var)
    tl.store(running_mean + channel, old_mean, channel < channels)
    tl.store(running_var + channel, old_var, channel < channels)
    if tl.program_id(0) == 0:
        tl.store(batches, tl.load(batches) + VIEWS)


@_jit
def _normalise_kernel(
    x, residual, y, weight, bias, means, scales,
    channels, pixels, samples, groups, rows, steps,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, RESIDUAL: tl.constexpr, RELU: tl.constexpr,
):  # fmt: skip
    # Backwards through memory: what the statistics read last is still in the cache.
    chunk = tl.num_programs(2) - 1 - tl.program_id(2)
    channel = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    known = channel < channels
    own = tl.program_id(1) * channels + channel
    mean = tl.load(means + own, known, other=0)[None, :]
    scale = (tl.load(scales + own, known, other=0) * tl.load(weight + channel, known))[None, :]
    shift = tl.load(bias + channel, known)[None, :]
    for step in range(steps):
        place, there = _place(
            chunk, channels, pixels, samples, groups, rows, step, steps, HEIGHT, WIDTH
        )
        value = (tl.load(x + place, there).to(tl.float32) - mean) * scale + shift
        if RESIDUAL:
            value += tl.load(residual + place, there).to(tl.float32)
        if RELU:
            value = tl.where(value < 0, 0, value)  # lets NaN through, as torch does
        tl.store(y + place, value, there)


@_jit
def _sum_gradients_kernel(
    dy, x, y, d_residual, weight, bias, means, scales, sums, products,
    channels, pixels, samples, groups, rows, steps,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, RESIDUAL: tl.constexpr, RELU: tl.constexpr,
):  # fmt: skip
    """Sums over a chunk of dz and dz·x̂, where dz is the gradient before the ReLU."""
    chunk = tl.program_id(2)
    channel = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    known = channel < channels
    own = tl.program_id(1) * channels + channel
    mean = tl.load(means + own, known, other=0)[None, :]
    slope = (tl.load(scales + own, known, other=0) * tl.load(weight + channel, known))[None, :]
    shift = tl.load(bias + channel, known)[None, :]
    total = tl.zeros((HEIGHT, WIDTH), tl.float32)
    product = tl.zeros((HEIGHT, WIDTH), tl.float32)
    for step in range(steps):
        place, there = _place(
            chunk, channels, pixels, samples, groups, rows, step, steps, HEIGHT, WIDTH
        )
        away = tl.load(x + place, there, other=0).to(tl.float32) - mean
        dz = tl.load(dy + place, there, other=0).to(tl.float32)
        if RELU:
            if RESIDUAL:
                positive = tl.load(y + place, there, other=0) > 0
            else:
                positive = away * slope + shift > 0  # cheaper than to fetch y
            dz = tl.where(positive, dz, 0)
        if RESIDUAL:
            tl.store(d_residual + place, dz, there)
        total += dz
        product += dz * away
    place = (tl.program_id(1) * tl.num_programs(2) + chunk) * channels + channel
    tl.store(sums + place, tl.sum(total, 0), known)
    scale = tl.load(scales + own, known, other=0)
    tl.store(products + place, tl.sum(product, 0) * scale, known)


@_jit
def _finish_gradients_kernel(
    sums, products, set_sums, set_products, d_weight, d_bias,
    channels, sets, chunks,
    SETS: tl.constexpr, CHUNKS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Sums of every set, and over all sets: gradients of bias and weight."""
    set_ = tl.arange(0, SETS)[:, None, None]
    chunk = tl.arange(0, CHUNKS)[None, :, None]
    channel = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    place = (set_ * chunks + chunk) * channels + channel[None, None, :]
    there = (set_ < sets) & (chunk < chunks) & (channel[None, None, :] < channels)
    total = tl.sum(tl.load(sums + place, there, other=0), 1)
    product = tl.sum(tl.load(products + place, there, other=0), 1)
    set_ = tl.arange(0, SETS)[:, None]
    place = set_ * channels + channel[None, :]
    there = (set_ < sets) & (channel < channels)[None, :]
    tl.store(set_sums + place, total, there)
    tl.store(set_products + place, product, there)
    tl.store(d_bias + channel, tl.sum(total, 0), channel < channels)
    tl.store(d_weight + channel, tl.sum(product, 0), channel < channels)


@_jit
def _input_gradient_kernel(
    dz, x, dx, weight, bias, means, scales, sums, products,
    channels, pixels, samples, groups, rows, steps,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, RELU: tl.constexpr,
):  # fmt: skip
    """dx = w/σ · (dz − mean(dz) − x̂·mean(dz·x̂)). With RELU, dz is yet to be cut by it."""
    chunk = tl.num_programs(2) - 1 - tl.program_id(2)  # from the cache, as above
    channel = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    known = channel < channels
    own = tl.program_id(1) * channels + channel
    mean = tl.load(means + own, known, other=0)[None, :]
    scale = tl.load(scales + own, known, other=0)[None, :]
    slope = scale * tl.load(weight + channel, known)[None, :]
    shift = tl.load(bias + channel, known)[None, :]
    mean_dz = tl.load(sums + own, known)[None, :] / rows
    tilt = scale * tl.load(products + own, known)[None, :] / rows
    for step in range(steps):
        place, there = _place(
            chunk, channels, pixels, samples, groups, rows, step, steps, HEIGHT, WIDTH
        )
        away = tl.load(x + place, there).to(tl.float32) - mean
        gradient = tl.load(dz + place, there).to(tl.float32)
        if RELU:
            gradient = tl.where(away * slope + shift > 0, gradient, 0)
        tl.store(dx + place, slope * (gradient - mean_dz - away * tilt), there)


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
        _statistics_kernel[layout.grid](x, *parts, *layout.walk, num_warps=WARPS)
        _finish_statistics_kernel[layout.strips](
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
        _normalise_kernel[layout.grid](
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
        _sum_gradients_kernel[layout.grid](
            dy, x, y if residual else x, d_residual, weight, bias, mean, scale, *parts,
            *layout.walk, residual, relu, num_warps=WARPS,
        )  # fmt: skip
        _finish_gradients_kernel[layout.strips](
            *parts, *sums, d_weight, d_bias,
            layout.channels, layout.sets, layout.chunks, *layout.strip, num_warps=WARPS,
        )  # fmt: skip
        # The residual's gradient has gone through the ReLU already.
        _input_gradient_kernel[layout.grid](
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
