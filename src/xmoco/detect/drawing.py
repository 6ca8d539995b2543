"""Detections drawn on pictures: a frame, a name and a score for each and, where known, its mask."""

from collections.abc import Sequence
from functools import cache

import numpy as np
import torch
from matplotlib.font_manager import FontProperties, findfont
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor
from torchvision.utils import draw_bounding_boxes, draw_segmentation_masks

# Okabe and Ito's, which colour-blind readers can tell apart, but black and grey.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#f0e442")
MASK_STRENGTH = 0.45


def drawn(
    picture: Tensor,
    boxes: Tensor,
    labels: Tensor,
    scores: Tensor,
    categories: Sequence[str],
    masks: Tensor | None = None,
) -> Tensor:
    """A uint8 picture (3, height, width) with detections: boxes (d, 4), labels from 1, masks bool
    (d, height, width). The best are drawn last, on top."""
    if len(boxes) == 0:
        return picture
    order = scores.argsort()
    boxes, labels, scores = boxes[order], labels[order], scores[order]
    colours = [COLOURS[(label - 1) % len(COLOURS)] for label in labels.tolist()]
    if masks is not None:
        picture = draw_segmentation_masks(picture, masks[order], MASK_STRENGTH, list(colours))
    side = min(picture.shape[1:])
    names = [
        f"{categories[label - 1]} {score:.2f}"
        for label, score in zip(labels.tolist(), scores.tolist(), strict=True)
    ]
    found = draw_bounding_boxes(picture, boxes.round(), colors=list(colours), width=_line(picture))
    return _labelled(found, boxes.round(), names, colours, max(9, side // 28))


def _labelled(
    picture: Tensor, boxes: Tensor, names: Sequence[str], colours: Sequence[str], size: int
) -> Tensor:
    """With a name at each frame: above it or else where it covers no other name; the last first,
    as it is the best."""
    image = Image.fromarray(picture.permute(1, 2, 0).cpu().numpy())
    pen, font = ImageDraw.Draw(image), ImageFont.truetype(_font(), size)
    taken: list[tuple[int, int, int, int]] = []
    for box, name, colour in reversed(list(zip(boxes.tolist(), names, colours, strict=True))):
        left, top, _, bottom = map(int, box)
        wide, high = round(pen.textlength(name, font)) + 4, size + 4
        left = max(0, min(left, image.width - wide))
        heights = [top - high, bottom, top, bottom - high]
        places = [(left, y, left + wide, y + high) for y in heights]
        inside = [place for place in places if place[1] >= 0 and place[3] <= image.height]
        free = [place for place in inside if not any(_meet(place, other) for other in taken)]
        place = next(iter(free or inside or places[2:]))
        taken.append(place)
        pen.rectangle(place, fill=colour)
        pen.text((place[0] + 2, place[1] + high // 2), name, "white", font, anchor="lm")
    return torch.from_numpy(np.asarray(image).copy()).permute(2, 0, 1)


def _meet(one: tuple[int, int, int, int], other: tuple[int, int, int, int]) -> bool:
    across, down = (one[k] < other[k + 2] and other[k] < one[k + 2] for k in (0, 1))
    return across and down


def framed(picture: Tensor, boxes: Tensor) -> Tensor:
    """With white frames; dark ones around them show where the picture is white."""
    if len(boxes) == 0:
        return picture
    width = _line(picture)
    boxes = boxes.round() + width * boxes.new_tensor([-1, -1, 1, 1])  # seen beside what is found
    for colour, lines in (("black", width + 2), ("white", width)):
        picture = draw_bounding_boxes(picture, boxes, colors=colour, width=lines)
    return picture


def _line(picture: Tensor) -> int:
    """How wide the lines of frames are, in pixels."""
    return max(1, round(min(picture.shape[1:]) / 150))


@cache
def _font() -> str:
    return findfont(FontProperties(family="DejaVu Sans"))  # comes with matplotlib


def enlarged(picture: Tensor, boxes: Tensor, least: int) -> tuple[Tensor, Tensor]:
    """Small pictures so large that writing on them can be read, and their boxes with them."""
    factor = -(-least // min(picture.shape[1:]))
    if factor <= 1:
        return picture, boxes
    large = picture.repeat_interleave(factor, 1).repeat_interleave(factor, 2)
    return large, boxes * factor
