"""Detections drawn on pictures: a frame, a name and a score for each and, where known, its mask."""

from collections.abc import Sequence
from functools import cache

from matplotlib.font_manager import FontProperties, findfont
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
    found: Tensor = draw_bounding_boxes(
        picture,
        boxes.round(),
        labels=names,
        colors=list(colours),
        width=_line(picture),
        font=_font(),
        font_size=max(9, side // 28),
        fill_labels=True,
        label_colors="white",
    )
    return found


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
