# mypy: disable-error-code="import-untyped, no-untyped-def", allow-untyped-decorators
"""Non-maximum suppression of many groups of boxes at once: two Triton kernels for CUDA.

The first asks of every pair of boxes whether the better one suppresses the other, and packs the
answers into words of 32 bits. The second walks through a group's boxes, best first, and gathers
what those suppress that stay: one programme a group, all side by side. Nothing is asked of the
device, so nobody waits for it.

Import this only where Triton is installed; ``suppression.py`` says what is right.
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

BITS = 32
ROWS = 64  # of a tile of pairs


@triton.jit
def _corner(boxes, group, count, rows, side: tl.constexpr):
    """One of left, top, right and bottom; of what is not there, 0."""
    return tl.load(boxes + (group * count + rows) * 4 + side, rows < count, other=0.0)


@triton.jit(do_not_specialize=["count", "words"])
def _pairs_kernel(
    boxes, pairs, threshold, count, words, ROWS: tl.constexpr, BITS: tl.constexpr
):  # fmt: skip
    """Bit j of word w of row i: box i, if it stays, suppresses box 32 w + j, which comes later."""
    word, group = tl.program_id(0), tl.program_id(2).to(tl.int64)
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    bits = tl.arange(0, BITS)
    columns = word * BITS + bits
    left, top, right, bottom = (
        _corner(boxes, group, count, rows, 0)[:, None],
        _corner(boxes, group, count, rows, 1)[:, None],
        _corner(boxes, group, count, rows, 2)[:, None],
        _corner(boxes, group, count, rows, 3)[:, None],
    )
    left2, top2, right2, bottom2 = (
        _corner(boxes, group, count, columns, 0)[None, :],
        _corner(boxes, group, count, columns, 1)[None, :],
        _corner(boxes, group, count, columns, 2)[None, :],
        _corner(boxes, group, count, columns, 3)[None, :],
    )
    wide = tl.maximum(tl.minimum(right, right2) - tl.maximum(left, left2), 0.0)
    high = tl.maximum(tl.minimum(bottom, bottom2) - tl.maximum(top, top2), 0.0)
    shared = wide * high
    union = (right - left) * (bottom - top) + (right2 - left2) * (bottom2 - top2) - shared
    over = (shared / union > threshold) & (columns[None, :] > rows[:, None])
    packed = tl.sum(over.to(tl.int32) << bits[None, :], axis=1)
    tl.store(pairs + (group * count + rows) * words + word, packed, rows < count)


@triton.jit(do_not_specialize=["count", "words"])
def _walk_kernel(pairs, kept, stay, count, words, WORDS: tl.constexpr, BITS: tl.constexpr):
    group = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, WORDS)
    own = pairs + group * count * words + lanes
    out = tl.zeros((WORDS,), tl.int32)  # bits of boxes that are suppressed
    # A row is fetched while the one before it is looked at: nothing else takes long here. One more
    # than there are can be fetched, too.
    row = tl.load(own, lanes < words, other=0)
    there = tl.load(kept + group * count)
    for box in range(count):
        next_row = tl.load(own + (box + 1) * words, lanes < words, other=0)
        next_there = tl.load(kept + group * count + box + 1)
        word = tl.sum(tl.where(lanes == box // BITS, out, 0))
        stays = (there != 0) & (((word >> (box % BITS)) & 1) == 0)
        tl.store(stay + group * count + box, stays.to(tl.int8))
        out = tl.where(stays, out | row, out)
        row, there = next_row, next_there


def suppressed_in_groups(boxes: Tensor, kept: Tensor, threshold: float) -> Tensor:
    """Which of the boxes (g, k, 4), best first, stay in each group; ``kept`` (g, k) take part."""
    groups, count = kept.shape
    words = triton.cdiv(count, BITS)
    pairs = torch.empty((groups * count + 1, words), dtype=torch.int32, device=boxes.device)
    grid = words, triton.cdiv(count, ROWS), groups
    _pairs_kernel[grid](boxes.contiguous(), pairs, threshold, count, words, ROWS, BITS)
    stay = torch.empty((groups, count), dtype=torch.int8, device=boxes.device)
    _walk_kernel[(groups,)](
        pairs,
        F.pad(kept.flatten(), (0, 1)).to(torch.int8),
        stay,
        count,
        words,
        WORDS=triton.next_power_of_2(words),
        BITS=BITS,
        num_warps=1,
    )
    return stay.bool()
