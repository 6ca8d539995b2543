"""The pictures of a run's report: what it was shown, and what it finds alike."""

import torch
from torch import Tensor, nn

from xmoco.config import ViewsConfig
from xmoco.data import ImageSet, in_order
from xmoco.data.subset import Subset, at_most
from xmoco.data.views import central, draw, render
from xmoco.evaluate.monitor import Monitor
from xmoco.report.sheets import neighbours_sheet, views_sheet

COLUMNS = 8
ROWS = 8
SIDE = 128  # pictures of larger images are shrunk to this


def picture_views(images: ImageSet, views: ViewsConfig, seed: int, device: torch.device) -> bytes:
    """Some images, each with two views as the first step would draw them."""
    batch = next(in_order(at_most(images, COLUMNS), COLUMNS, device))
    mean, std = (
        torch.tensor(values, device=device)[:, None, None] for values in (views.mean, views.std)
    )
    sides = []
    for view in (0, 1):
        parameters = draw(views, len(batch.images), seed, 0, view)
        pixels = render(batch.images, batch.sizes, parameters, views) * std + mean
        sides.append((pixels.clamp(0, 1) * 255).round().byte().cpu())
    originals = [
        image[:, :height, :width].cpu()
        for image, (height, width) in zip(batch.images, batch.sizes.tolist(), strict=True)
    ]
    return views_sheet(list(zip(originals, *sides, strict=True)))


def picture_neighbours(monitor: Monitor, backbone: nn.Module) -> bytes | None:
    """Some images with their nearest neighbours; none where there are hardly any images."""
    train, asked = monitor.train, monitor.test or monitor.train
    rows, columns = min(ROWS, len(asked)), min(COLUMNS, len(train) - 1)
    if columns < 1:
        return None
    queries, neighbours, similarities = monitor.neighbours(backbone, rows, columns)
    found = _pictures(train, neighbours.flatten(), monitor.config.views)
    known = train.labels is not None and asked.labels is not None
    return neighbours_sheet(
        _pictures(asked, queries, monitor.config.views),
        found.unflatten(0, neighbours.shape),
        similarities,
        query_labels=asked.labels[queries] if known and asked.labels is not None else None,
        neighbour_labels=train.labels[neighbours] if known and train.labels is not None else None,
        classes=train.classes,
    )


def _pictures(images: ImageSet, positions: Tensor, views: ViewsConfig) -> Tensor:
    """Central squares of the images at ``positions``, uint8 (n, 3, side, side)."""
    plain = views.model_copy(update={"mean": (0.0, 0.0, 0.0), "std": (1.0, 1.0, 1.0)})
    side = min(views.size, SIDE)
    batch = next(in_order(Subset(images, positions), len(positions), torch.device("cpu")))
    return (central(batch.images, batch.sizes, side, plain).clamp(0, 1) * 255).round().byte()
