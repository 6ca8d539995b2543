"""The pictures of a run's report: what it was shown, and what it finds alike."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from xmoco.config import InputConfig
from xmoco.data import ImageSet, at_positions
from xmoco.data.subset import some_positions
from xmoco.data.views import ViewGroup, central, views_of
from xmoco.evaluate.monitor import Monitor
from xmoco.evaluate.similarities import NegativesMonitor, strongest
from xmoco.methods import Method
from xmoco.report.sheets import neighbours_sheet, views_sheet

COLUMNS = 8
ROWS = 8
NEGATIVES = 5  # of as many queries
SIDE = 128  # pictures of larger images are shrunk to this


def picture_views(
    images: ImageSet, groups: Sequence[ViewGroup], seed: int, device: torch.device
) -> bytes:
    """Some images, each with its views as the first step would draw them."""
    batch = at_positions(images, some_positions(len(images), COLUMNS), device)
    count = len(batch.images)
    shown = views_of(batch.images, batch.sizes, groups, seed=seed, step=0, batch=count)
    inputs = [group.input for group in groups for _ in group.names]
    sides = []
    for pixels, input in zip(shown, inputs, strict=True):
        mean, std = (
            torch.tensor(values, device=device)[:, None, None] for values in (input.mean, input.std)
        )
        sides.append(((pixels * std + mean).clamp(0, 1) * 255).round().byte().cpu())
    originals = [
        image[:, :height, :width].cpu()
        for image, (height, width) in zip(batch.images, batch.sizes.tolist(), strict=True)
    ]
    names = [name for group in groups for name in group.names]
    return views_sheet(names, list(zip(originals, *sides, strict=True)))


def picture_neighbours(monitor: Monitor, backbone: nn.Module) -> bytes | None:
    """Some images with their nearest neighbours; none where there are hardly any images."""
    train, asked = monitor.train, monitor.test or monitor.train
    rows, columns = min(ROWS, len(asked)), min(COLUMNS, len(train) - 1)
    if columns < 1:
        return None
    queries, neighbours, similarities = monitor.neighbours(backbone, rows, columns)
    query_pictures, query_labels = central_pictures(asked, queries, monitor.config.input)
    pictures, labels = central_pictures(train, neighbours.flatten(), monitor.config.input)
    if train.multi_label:  # no one class to name
        labels = None
    return neighbours_sheet(
        query_pictures,
        pictures.unflatten(0, neighbours.shape),
        similarities,
        query_labels=None if labels is None else query_labels,
        neighbour_labels=None if labels is None else labels.view_as(neighbours),
        classes=train.classes,
    )


def picture_negatives(similarities: NegativesMonitor, method: Method) -> bytes | None:
    """Some images with the negatives that received most of their label, or of their similarity."""
    look = similarities.look(method) if similarities.config.monitor.knn_every else None
    if look is None:
        return None
    rows, columns = min(NEGATIVES, len(look.source)), min(NEGATIVES, len(look.source) - 1)
    queries, negatives, shares = strongest(look, rows, columns)
    positions, input = similarities.positions, similarities.config.input
    query_pictures, _ = central_pictures(similarities.images, positions[queries], input)
    pictures, _ = central_pictures(similarities.images, positions[negatives.flatten()], input)
    classes = look.classes
    return neighbours_sheet(
        query_pictures,
        pictures.unflatten(0, negatives.shape),
        shares * (len(look.source) - 1),
        query_labels=None if classes is None else classes[queries],
        neighbour_labels=None if classes is None else classes[negatives],
        classes=similarities.images.classes,
        form="{:.1f} ×",
    )


def central_pictures(
    images: ImageSet, positions: Tensor, input: InputConfig
) -> tuple[Tensor, Tensor | None]:
    """Central squares, uint8 (n, 3, side, side), of the images at ``positions``; their labels."""
    plain = input.model_copy(update={"mean": (0.0, 0.0, 0.0), "std": (1.0, 1.0, 1.0)})
    side = min(input.size, SIDE)
    batch = at_positions(images, positions, torch.device("cpu"))
    squares = central(batch.images, batch.sizes, side, plain).clamp(0, 1)
    return (squares * 255).round().byte(), batch.labels
