"""Cropping, resizing, flipping and blurring as matrix products.

All four are linear and act on rows and columns apart, so a view of image X is ``A X Bᵀ`` with one
matrix A for its rows and one matrix B for its columns. Each sample has its own pair, hence its own
crop or blur, while the whole batch takes two batched products.
"""

import torch
from torch import Tensor

# Canvases of large photographs become float in parts of at most this many numbers (256 MiB).
PART = 2**26


def triangle_weights(
    start: Tensor, length: Tensor, resized: Tensor, outputs: Tensor, canvas: int
) -> Tensor:
    """Antialiased bilinear resizing along one axis: a matrix (n, size, canvas) per sample.

    The box of ``length`` pixels from ``start`` is resized to ``resized`` pixels, of which row i
    keeps number ``outputs[:, i]``. A triangle as wide as the shrinkage (but at least bilinear's)
    is centred on each output pixel, cut off at the box and normalised, as torchvision does with
    ``antialias=True``. All tensors are (n,), but ``outputs`` is (n, size).
    """
    # A triangle's centre, counted from the box's start, is (output + 0.5) · length / resized. Its
    # whole and its fraction, kept apart, lose nothing in float32 (while the product is below 2²⁴),
    # nor does a pixel's distance from it: not even at the far end of a large photograph.
    doubled, denominator = (2 * outputs + 1) * length[:, None], 2 * resized[:, None]
    wholes = doubled.div(denominator, rounding_mode="floor")
    fractions = (doubled - wholes * denominator) / denominator
    pixels = torch.arange(canvas, device=start.device) - start[:, None]
    distance = (pixels[:, None, :] - wholes[:, :, None]).sub_((fractions - 0.5)[:, :, None]).abs_()
    reach = (length / resized).clamp(min=1)[:, None, None]
    weights = distance.div_(-reach).add_(1).clamp_(min=0)
    inside = (pixels >= 0) & (pixels < length[:, None])
    weights *= inside[:, None, :]
    return weights.div_(weights.sum(-1, keepdim=True))


def blur_weights(sigmas: Tensor, side: int, size: int) -> Tensor:
    """Gaussian blur along one axis of ``size`` pixels: a matrix (n, size, size) per sample.

    ``side`` is the odd length of the kernel. The image continues beyond its border by reflection.
    """
    half = side // 2
    taps = torch.arange(-half, half + 1, device=sigmas.device)
    kernels = torch.softmax(-0.5 * (taps / sigmas[:, None]) ** 2, dim=1)
    pixels = torch.arange(size, device=sigmas.device)
    # Where each tap of each output pixel reads: 0 1 2 … reflected at 0 and at size − 1.
    reads = (taps[:, None] + pixels).abs()
    reads = (size - 1) - (size - 1 - reads).abs()
    hits = (reads[:, :, None] == pixels).to(kernels.dtype)
    return (kernels @ hits.flatten(1)).view(-1, size, size)


def sandwich(rows: Tensor, images: Tensor, columns: Tensor) -> Tensor:
    """``rows · X · columnsᵀ`` for every channel X of every sample, float (n, c, height, width)."""
    count, channels, height, _ = images.shape
    half = torch.bmm(images.flatten(1, 2), columns.mT).view(count, channels, height, -1)
    result = images.new_empty(count, channels, rows.shape[1], columns.shape[1])
    for channel in range(channels):
        torch.bmm(rows, half[:, channel], out=result[:, channel])
    return result


def resample(
    images: Tensor, start: Tensor, length: Tensor, resized: Tensor, outputs: Tensor
) -> Tensor:
    """Crop and resize uint8 images (n, 3, H, W) to float (n, 3, size, size) between 0 and 1.

    The other arguments are those of ``triangle_weights``, for rows and for columns: (2, n), and
    (2, n, size) for ``outputs``, all on the images' device.
    """
    step = max(1, PART // images[0].numel())
    parts = []
    for first in range(0, len(images), step):
        part = slice(first, first + step)
        rows, columns = (
            triangle_weights(
                start[axis, part],
                length[axis, part],
                resized[axis, part],
                outputs[axis, part],
                canvas,
            )
            for axis, canvas in enumerate(images.shape[2:])
        )
        parts.append(sandwich(rows.div_(255), images[part].float(), columns))
    return torch.cat(parts) if len(parts) > 1 else parts[0]
