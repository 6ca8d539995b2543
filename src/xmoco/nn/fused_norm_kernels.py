# mypy: disable-error-code="import-untyped, no-untyped-def", allow-untyped-decorators
"""The GPU kernels of ``fused_norm.py``, which says how they share the work."""

import triton
import triton.language as tl

# Compiled anew for other tile shapes and types, and for channels that are no multiple of 16 (which
# take narrow loads), but not for every batch and image size.
_jit = triton.jit(
    do_not_specialize=[
        "pixels", "samples", "groups", "sets", "rows", "steps", "chunk_rows", "chunks",
    ]
)  # fmt: skip


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
def statistics_kernel(
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
def finish_statistics_kernel(
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
def normalise_kernel(
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
def sum_gradients_kernel(
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
def finish_gradients_kernel(
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
def input_gradient_kernel(
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
