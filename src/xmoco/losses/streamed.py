"""Sinkhorn balancing over past queries without their similarities in memory (GPUs with Triton).

A history of K queries has K² similarities to the bank, and Sinkhorn reads them six times; for
K = 65,536 they are 17 GB a side. But each half of a round needs only log-sums over rows or columns
of ``scale · similarity + addend``, so they are computed tile by tile, used and forgotten.

The result is that of ``sinkhorn.column_scaling`` up to rounding. Tiles multiply in float16, whose
mantissa is TF32's (a similarity of unit vectors errs by some 2e-5, by 1e-3 at the very worst), and
add up in float32. Only the scaling of the negatives, an average over all samples, comes from here:
labels and losses are made from float32 similarities all the same.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from xmoco.distributed import logsumexp_over_rows
from xmoco.losses.similarity import precise
from xmoco.triton_here import HAS_TRITON

# Fixed, and not tuned on the spot: a resumed run must add in the order of the first.
ROWS, COLUMNS = 128, 64  # of a tile of similarities of up to 128 features; more make it smaller
WARPS, STAGES = 8, 2
MOST_FEATURES = 512
PROGRAMS = 4096  # wanted, so that the last ones to finish leave a large GPU idle for a short time
FEWEST_TILES = 4  # in a program, so that it is worth its start
NO_SLOT = -1
LN_2 = math.log(2)


def can_stream(queries: Tensor) -> bool:
    """Whether there is a GPU with Triton, which starts kernels on the current GPU only.

    Queries in float64 ask for more precision than tiles have.
    """
    if not (queries.is_cuda and HAS_TRITON):
        return False
    here = queries.get_device() == torch.cuda.current_device()
    return here and queries.dtype != torch.float64 and queries.shape[1] <= MOST_FEATURES


@torch.no_grad()
def streamed_column_scaling(
    *,
    queries: Tensor,
    keys: Tensor,
    banks: Tensor,
    past: Tensor,
    past_slots: Tensor,
    past_counts: Tensor,
    temperature: float,
    sharpness: float,
    iterations: int,
) -> Tensor:
    """log β of shape (S, K) for S sides at once, up to a constant per side.

    Args:
        queries: this batch's, (S, N, d).
        keys: the batch's own, (S, N, d).
        banks: the keys of the negatives, (S, K, d).
        past: past queries, (S, M, d).
        past_slots: where the bank has their own keys, (M,); see ``similarity.past_similarities``.
        past_counts: whether past queries take part, or which of them do, (M,); on the device, so
            that no step waits for it.
    """
    queries, keys, banks, past = (precise(vectors) for vectors in (queries, keys, banks, past))
    past_count, column_count = past.shape[1], banks.shape[1]
    samples = _Tiles(
        torch.cat([past, queries], dim=1),
        slots=F.pad(past_slots, (0, queries.shape[1]), value=NO_SLOT),
    )
    negatives = _Tiles(banks, slots=torch.arange(column_count, device=banks.device))

    # log P = similarity/τ − log_total. A past query's own key is in the bank, a new one's is not.
    alike = torch.zeros_like(banks[:, :, 0])
    log_total = _logsumexp(samples, negatives, alike, 1 / temperature, skip_own=False).logsumexp(
        dim=0
    )
    positives = (queries * keys).sum(dim=2) / temperature
    log_total[:, past_count:] = log_total[:, past_count:].logaddexp(positives)

    scale = sharpness / temperature

    def balance_columns(sample_scaling: Tensor) -> Tensor:
        # Samples that do not take part weigh e^−∞.
        sample_scaling[:, :past_count].masked_fill_(~past_counts, -torch.inf)
        return -logsumexp_over_rows(_logsumexp(negatives, samples, sample_scaling, scale))

    column_scaling = balance_columns(-sharpness * log_total)
    for _ in range(iterations - 1):
        sample_scaling = -_logsumexp(samples, negatives, column_scaling, scale).logsumexp(dim=0)
        column_scaling = balance_columns(sample_scaling)
    return column_scaling


class _Tiles:
    """Unit vectors of all sides (S, n, d) in float16, filled up with zeros to whole tiles."""

    def __init__(self, vectors: Tensor, slots: Tensor) -> None:
        sides, self.count, features = vectors.shape
        self.width = max(16, 2 ** math.ceil(math.log2(features)))
        self.filled = math.ceil(self.count / ROWS) * ROWS
        self.vectors = vectors.new_zeros(sides, self.filled, self.width, dtype=torch.float16)
        self.vectors[:, : self.count, :features] = vectors
        self.slots = F.pad(slots, (0, self.filled - self.count), value=NO_SLOT).int()


def _logsumexp(
    rows: _Tiles, columns: _Tiles, addend: Tensor, scale: float, skip_own: bool = True
) -> Tensor:
    """log Σ_j exp(scale · row_i · column_j + addend_j) of shape (parts, S, rows).

    Few rows would leave a GPU idle, so columns are split into parts, which remain to be summed.
    With ``skip_own``, pairs that share a slot are left out.
    """
    from xmoco.losses.streamed_kernel import log2_sums

    sides = len(addend)
    smaller = max(1, rows.width // 128)
    row_tiles = rows.filled * smaller // ROWS
    column_tiles = columns.filled * smaller // COLUMNS
    tiles_per_part = max(FEWEST_TILES, math.ceil(column_tiles * row_tiles * sides / PROGRAMS))
    parts = math.ceil(column_tiles / tiles_per_part)
    out = addend.new_empty(parts, sides, rows.filled)
    fill_up = (0, columns.filled - columns.count)
    log2_sums[(row_tiles, parts, sides)](
        rows.vectors,
        columns.vectors,
        F.pad(addend / LN_2, fill_up, value=-torch.inf),
        rows.slots,
        columns.slots,
        out,
        scale / LN_2,
        rows.filled,
        columns.filled,
        tiles_per_part,
        SKIP_OWN=skip_own,
        ROW_TILE=ROWS // smaller,
        COLUMN_TILE=COLUMNS // smaller,
        WIDTH=rows.width,
        num_warps=WARPS,
        num_stages=STAGES,
    )
    return out[:, :, : rows.count] * LN_2
