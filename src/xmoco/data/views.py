"""Random views of images: what the method is taught to see through.

A view is a pure function of an image and some random numbers, and so is every random number of its
place (seed, step, view, sample). ``draw`` makes the numbers of a whole global batch on the host;
each process takes its rows by slicing. ``render`` turns images and numbers into views on any
device, whole batches at a time: on CUDA in a few kernels of view_kernels.py, elsewhere by the plain
operations of resample.py and colour.py. Hence views do not depend on how many processes or which
devices there are, but for rounding, and any step can be replayed.

The order is the paper's: crop, flip, jitter, grey, (inversion,) blur, normalise. Each operation
equals torchvision's for the same parameters.
"""

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from xmoco.config import AugmentationConfig, InputConfig
from xmoco.data.colour import CONTRAST, HUE, LUMA, SATURATION, mix, turn_hue
from xmoco.data.resample import blur_weights, resample, sandwich
from xmoco.triton_here import HAS_TRITON

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Flags = NDArray[np.bool_]

CROP_TRIES = 10
UNCHANGED = np.array((1.0, 1.0, 1.0, 0.0))  # the factors that leave an image as it is


@dataclass(frozen=True)
class ViewGroup:
    """Views of every image that are made alike, each with a name for pictures of them."""

    names: tuple[str, ...]
    augmentation: AugmentationConfig
    input: InputConfig

    @property
    def count(self) -> int:
        return len(self.names)


@dataclass(frozen=True)
class ViewParameters:
    """One row per sample. Indexing takes the same rows of everything."""

    areas: Floats  # (n, tries) share of the image's area that a crop covers
    ratios: Floats  # (n, tries) width : height of a crop
    places: Floats  # (n, 2) from 0 (top, left) to 1 (bottom, right)
    flip: Flags
    jitter: Flags
    factors: Floats  # (n, 4) brightness, contrast, saturation; turn of the hue
    order: Integers  # (n, 4) the kinds of jitter, first to last
    grey: Flags
    invert: Flags
    blur: Flags
    sigmas: Floats

    def __len__(self) -> int:
        return len(self.flip)

    def __getitem__(self, rows: slice | Integers) -> "ViewParameters":
        return ViewParameters(*(column[rows] for column in self.columns))

    @property
    def columns(self) -> list[NDArray[Any]]:
        return [getattr(self, field.name) for field in dataclasses.fields(self)]


def stacked(*parts: ViewParameters) -> ViewParameters:
    """All rows of ``parts``, one part after the other."""
    return ViewParameters(*map(np.concatenate, zip(*(p.columns for p in parts), strict=True)))


def draw(views: AugmentationConfig, count: int, seed: int, step: int, view: int) -> ViewParameters:
    """The random numbers of view number ``view`` of all ``count`` samples of a global batch."""
    # numpy hashes the three numbers into one well-mixed state.
    uniform = np.random.default_rng((seed, step, view)).random((count, 2 * CROP_TRIES + 16))
    areas, ratios, places, chances, factors, order, sigmas = np.split(
        uniform, np.cumsum([CROP_TRIES, CROP_TRIES, 2, 5, 4, 4]), axis=1
    )
    flip, jitter, grey, invert, blur = (
        chances < (views.flip, views.jitter, views.grey, views.invert, views.blur)
    ).T
    narrowest, widest = views.crop_ratio
    reach = np.array((views.brightness, views.contrast, views.saturation, views.hue))
    return ViewParameters(
        areas=_between(views.crop_scale, areas),
        ratios=narrowest * (widest / narrowest) ** ratios,  # log-uniform
        places=places,
        flip=flip,
        jitter=jitter,
        factors=UNCHANGED + reach * (2 * factors - 1),
        order=order.argsort(axis=1),
        grey=grey,
        invert=invert,
        blur=blur,
        sigmas=_between(views.blur_sigma, sigmas[:, 0]),
    )


def _between(ends: tuple[float, float], uniform: Floats) -> Floats:
    low, high = ends
    return low + (high - low) * uniform


def crop_boxes(parameters: ViewParameters, sizes: Integers, ratio: tuple[float, float]) -> Integers:
    """Top, left, height and width (n, 4) of each sample's crop of an image of ``sizes`` (n, 2).

    As torchvision's RandomResizedCrop: the first try that fits inside the image; if none does, the
    largest central crop whose ratio is allowed.
    """
    heights, widths = sizes[:, :1], sizes[:, 1:]
    areas = heights * widths * parameters.areas
    tried_heights = np.rint(np.sqrt(areas / parameters.ratios))
    tried_widths = np.rint(np.sqrt(areas * parameters.ratios))
    fits = (tried_heights >= 1) & (tried_heights <= heights)
    fits &= (tried_widths >= 1) & (tried_widths <= widths)
    tries = np.stack((tried_heights, tried_widths), axis=2)
    chosen = tries[np.arange(len(sizes)), fits.argmax(axis=1)]

    narrowest = np.rint(sizes[:, 1] / ratio[0])
    widest = np.rint(sizes[:, 0] * ratio[1])
    fallback = np.minimum(sizes, np.stack((narrowest, widest), axis=1)).clip(min=1)

    fitting = fits.any(axis=1, keepdims=True)
    box = np.where(fitting, chosen, fallback)
    corner = np.where(
        fitting, np.floor(parameters.places * (sizes - box + 1)), np.floor((sizes - box) / 2)
    )
    return np.concatenate((corner, box), axis=1).astype(np.int64)


def render(
    images: Tensor,
    sizes: Tensor,
    parameters: ViewParameters,
    group: ViewGroup,
    *,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """The views (k · n, 3, size, size), channels-last, of uint8 ``images`` (n, 3, H, W).

    ``sizes`` (n, 2), on the host, tells how much of each canvas is image: its height and width from
    the top left. Nothing beyond is ever seen. ``parameters`` has a row for every image or, with
    several parts ``stacked``, k rows: one view of every image after another. All is done on the
    images' device, in float32 but for the result, and no step waits for it.
    """
    fused = images.is_cuda and HAS_TRITON
    return (render_fused if fused else render_plain)(images, sizes, parameters, group, dtype)


def views_of(
    images: Tensor,
    sizes: Tensor,
    groups: Iterable[ViewGroup],
    *,
    seed: int,
    step: int,
    batch: int,
    rows: slice | Integers = slice(None),
) -> list[Tensor]:
    """All views of a step, group after group: ``images`` are the ``rows`` of its global batch."""
    views: list[Tensor] = []
    for group in groups:
        numbers = range(len(views), len(views) + group.count)
        drawn = [draw(group.augmentation, batch, seed, step, number)[rows] for number in numbers]
        views += render(images, sizes, stacked(*drawn), group).chunk(group.count)
    return views


def render_plain(
    images: Tensor,
    sizes: Tensor,
    parameters: ViewParameters,
    group: ViewGroup,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """``render`` in plain operations, for any device: what the kernels are measured by."""
    boxes = _boxes_of_views(images, sizes, parameters, group)
    size = group.input.size
    result = _empty_views(images, len(parameters), size, dtype)
    with torch.no_grad(), torch.autocast(images.device.type, enabled=False):
        for first in range(0, len(parameters), len(images)):
            rows = slice(first, first + len(images))
            part = parameters[rows]
            pixels = _crop(images, boxes[rows], part.flip, size)
            pixels = _jitter(pixels, part)
            finish = _finish(part.grey, part.invert, group.input)
            pixels = mix(pixels, *_upload(images.device, *finish))
            # Blur takes weighted means of neighbours, so normalising before it changes nothing.
            result[rows] = _blur(pixels, part, blur_side(group))
    return result


def render_fused(
    images: Tensor,
    sizes: Tensor,
    parameters: ViewParameters,
    group: ViewGroup,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """``render`` by Triton's kernels, for CUDA: all numbers go there in one copy."""
    from xmoco.data import view_kernels  # only here: Triton is not on every machine

    boxes = _boxes_of_views(images, sizes, parameters, group)
    places = np.argsort(~parameters.blur, kind="stable")  # the kernels want blurred views first
    rows = parameters[places]
    turns_before_contrast = (rows.order == CONTRAST).argmax(axis=1)
    turns = np.stack((turns_before_contrast, np.full_like(places, 4)), axis=1)
    matrices, offsets = _finish(rows.grey, rows.invert, group.input)
    arrays = {
        "places": places,
        "boxes": boxes[places],
        "flips": rows.flip,
        "turns": turns * rows.jitter[:, None],
        "kinds": rows.order,
        "strengths": np.take_along_axis(rows.factors, rows.order, axis=1),
        "matrices": matrices,
        "offsets": offsets,
        "sigmas": rows.sigmas,
    }
    numbers = dict(zip(arrays, _upload(images.device, *arrays.values()), strict=True))
    result = _empty_views(images, len(parameters), group.input.size, dtype)
    blurred = int(np.count_nonzero(parameters.blur))
    view_kernels.render(images, result, **numbers, blurred=blurred, side=blur_side(group))
    return result


def _boxes_of_views(
    images: Tensor, sizes: Tensor, parameters: ViewParameters, group: ViewGroup
) -> Integers:
    per_image, rest = divmod(len(parameters), len(images))
    if len(images) != len(sizes) or rest or not per_image:
        raise ValueError(
            f"{len(images)} images, {len(sizes)} sizes and {len(parameters)} parameters"
        )
    ratio = group.augmentation.crop_ratio
    return crop_boxes(parameters, np.tile(sizes.numpy(), (per_image, 1)), ratio)


def _empty_views(images: Tensor, count: int, size: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(
        (count, 3, size, size),
        dtype=dtype,
        device=images.device,
        memory_format=torch.channels_last,
    )


def central(
    images: Tensor, sizes: Tensor, size: int, input: InputConfig, *, border: bool = True
) -> Tensor:
    """The view for evaluation, without chance: the middle of the image, normalised.

    The shorter side becomes 256/224 of ``size`` and the central square of ``size`` pixels is kept.
    Small views (under 64 px) and images that already are ``size`` × ``size`` lose no border: there
    the shorter side becomes ``size``, as it does everywhere if there is to be no ``border``. Other
    arguments and the result are as in ``render``.
    """
    real = sizes.numpy()
    short = np.full(len(real), central_short_side(size, border=border))
    short[(real == size).all(axis=1)] = size
    resized = short[:, None] * real // real.min(axis=1, keepdims=True)
    first = np.rint((resized - size) / 2)
    outputs = first.T[:, :, None] + np.arange(size)
    none = np.zeros(len(real), dtype=np.bool_)
    with torch.no_grad(), torch.autocast(images.device.type, enabled=False):
        pixels = _resample(images, np.zeros_like(real.T), real.T, resized.T, outputs)
        return mix(pixels, *_upload(images.device, *_finish(none, none, input)))


def central_short_side(size: int, *, border: bool = True) -> int:
    """How long the shorter side of an image is in its central view, before that is cut out."""
    return round(size * 256 / 224) if border and size >= 64 else size


def _crop(images: Tensor, boxes: Integers, flip: Flags, size: int) -> Tensor:
    outputs = np.empty((2, len(boxes), size))
    outputs[:] = np.arange(size)
    outputs[1, flip] = np.arange(size)[::-1]
    start, length = boxes.T[:2], boxes.T[2:]
    return _resample(images, start, length, np.full_like(length, size), outputs)


def _resample(images: Tensor, *box: NDArray[Any]) -> Tensor:
    return resample(images, *_upload(images.device, *box))


def _jitter(pixels: Tensor, parameters: ViewParameters) -> Tensor:
    """Brightness, contrast, saturation and hue, in each sample's own order.

    Every sample has three turns, in which the first three kinds are mixed in, in its order; its hue
    changes before, between or after them. Changes ``pixels`` in place where it can.
    """
    factors = np.where(parameters.jitter[:, None], parameters.factors, UNCHANGED)
    if (factors == UNCHANGED).all():
        return pixels
    kinds = parameters.order[parameters.order != HUE].reshape(-1, 3).T  # (turns, n)
    strengths = np.take_along_axis(factors.T, kinds, axis=0)
    # Each kind blends the image: with black, with its mean luma, or with the luma of each pixel.
    to_mean = (1 - strengths) * (kinds == CONTRAST)
    to_luma = (1 - strengths) * (kinds == SATURATION)
    mixing = _scaled(strengths, np.eye(3)) + _scaled(to_luma, LUMA)
    matrices, mean_shares, luma, hues = _upload(
        pixels.device, mixing, to_mean, LUMA, factors[:, HUE]
    )
    # The host knows whose hue changes when, so the device is never asked.
    hue_turns = np.where(factors[:, HUE] != 0, (parameters.order == HUE).argmax(axis=1), -1)
    rows_by_turn = _upload(pixels.device, *(np.flatnonzero(hue_turns == turn) for turn in range(4)))

    for turn, rows in enumerate(rows_by_turn):
        if len(rows):
            turned = turn_hue(pixels.index_select(0, rows), hues.index_select(0, rows))
            pixels.index_copy_(0, rows, turned)
        if turn < len(strengths) and (strengths[turn] != 1).any():
            offsets = mean_shares[turn] * (pixels.mean((2, 3)) @ luma)
            pixels = mix(pixels, matrices[turn], offsets[:, None]).clamp_(0, 1)
    return pixels


def _scaled(numbers: Floats, matrix: Floats) -> Floats:
    return numbers[..., None, None] * matrix


def _finish(grey: Flags, invert: Flags, input: InputConfig) -> tuple[Floats, Floats]:
    """Grey, inversion and normalisation, which together are one matrix and one offset."""
    mean, std = np.array(input.mean), np.array(input.std)
    signs = np.where(invert, -1, 1)
    matrices = _scaled(signs, np.where(grey[:, None, None], LUMA, np.eye(3))) / std[:, None]
    return matrices, (invert[:, None] - mean) / std


def _blur(pixels: Tensor, parameters: ViewParameters, side: int) -> Tensor:
    blurred = np.flatnonzero(parameters.blur)
    if len(blurred) == 0:
        return pixels
    (rows,) = _upload(pixels.device, blurred)
    (sigmas,) = _upload(pixels.device, parameters.sigmas[blurred])
    weights = blur_weights(sigmas, side, pixels.shape[-1])
    return pixels.index_copy_(0, rows, sandwich(weights, pixels.index_select(0, rows), weights))


def blur_side(group: ViewGroup) -> int:
    """The kernel's odd side: ``blur_kernel`` is meant for 224 px and scales with the view.

    At least 3, so that blur does something; at most what one reflection at the border can fill.
    """
    size = group.input.size
    side = int(group.augmentation.blur_kernel * size / 224) | 1
    return min(max(side, 3), 2 * size - 1)


def _upload(device: torch.device, *arrays: NDArray[Any]) -> list[Tensor]:
    """Send host numbers to the device in one copy, without waiting for it; floats as float32."""
    together = np.concatenate([array.ravel() for array in arrays])
    if together.dtype == np.float64:
        together = together.astype(np.float32)
    sent = torch.from_numpy(together)
    if device.type == "cuda":  # only from pinned memory does a copy run beside the host
        sent = sent.pin_memory()
    sent = sent.to(device, non_blocking=device.type == "cuda")
    parts = torch.split(sent, [array.size for array in arrays])
    return [part.view(array.shape) for part, array in zip(parts, arrays, strict=True)]
