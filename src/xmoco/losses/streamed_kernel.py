"""The one GPU kernel of ``streamed.py``, in a file of its own: only GPUs need Triton installed."""

import triton
import triton.language as tl


def _log2_sums(
    rows: tl.tensor,  # (sides, row_count, WIDTH), float16
    columns: tl.tensor,  # (sides, column_count, WIDTH), float16
    addend: tl.tensor,  # (sides, column_count), float32
    row_slots: tl.tensor,  # (row_count,), int32
    column_slots: tl.tensor,  # (column_count,), int32
    out: tl.tensor,  # (parts, sides, row_count), float32
    scale: tl.tensor,
    row_count: tl.tensor,
    column_count: tl.tensor,
    tiles_per_part: tl.tensor,
    SKIP_OWN: tl.constexpr,
    ROW_TILE: tl.constexpr,
    COLUMN_TILE: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    """log2 Σ_j 2^(scale · row_i · column_j + addend_j) over one part of the columns.

    With SKIP_OWN, pairs that share a slot are left out. Counts are multiples of the tiles: columns
    that fill up have an addend of −inf, and nobody reads the results of rows that do.
    """
    row_tile, part, side = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    features = tl.arange(0, WIDTH)
    i = row_tile * ROW_TILE + tl.arange(0, ROW_TILE)
    row = tl.load(rows + (side * row_count + i)[:, None] * WIDTH + features[None, :])
    row_slot = tl.load(row_slots + i)
    # Finite, so that a difference to −inf is no nan where nothing has been added yet.
    largest = tl.full([ROW_TILE], -1e30, tl.float32)
    total = tl.zeros([ROW_TILE], tl.float32)
    first = part * tiles_per_part
    last = tl.minimum(first + tiles_per_part, column_count // COLUMN_TILE)
    for column_tile in range(first, last):
        j = column_tile * COLUMN_TILE + tl.arange(0, COLUMN_TILE)
        column = tl.load(columns + (side * column_count + j)[None, :] * WIDTH + features[:, None])
        exponent = tl.fma(
            tl.dot(row, column), scale, tl.load(addend + side * column_count + j)[None, :]
        )
        if SKIP_OWN:
            own = row_slot[:, None] == tl.load(column_slots + j)[None, :]
            exponent = tl.where(own, float("-inf"), exponent)
        # The usual stable sum: relative to the largest exponent so far.
        larger = tl.maximum(largest, tl.max(exponent, 1))
        total = total * tl.exp2(largest - larger) + tl.sum(tl.exp2(exponent - larger[:, None]), 1)
        largest = larger
    tl.store(out + (part * tl.num_programs(2) + side) * row_count + i, largest + tl.log2(total))


log2_sums = triton.jit(_log2_sums)
