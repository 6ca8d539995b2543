"""How right are scores? The paper's three metrics of classification, each a percentage.

Scores are (images, classes), larger for likelier. A score that is not a number never helps.
"""

import torch
from torch import Tensor

from xmoco.errors import UserError

TENTHS = [tenth * 0.1 for tenth in range(11)]
"""VOC's eleven recalls, as py-faster-rcnn and Detectron2 have them: what is less than
0.30000000000000004 falls short of the fourth, 3 of 10 images among it."""


def top_k(scores: Tensor, labels: Tensor, k: int) -> float:
    """How many images have their class among the k best. Of equal scores the first class wins."""
    return 100 * float((_places(scores, labels) < k).double().mean())


def mean_per_class(scores: Tensor, labels: Tensor) -> float:
    """Top-1 of every class that occurs, then their mean, so rare classes weigh as much."""
    right = labels.to(scores.device)[_places(scores, labels) == 0]
    images = labels.bincount(minlength=scores.shape[1]).cpu().double()
    hits = right.bincount(minlength=scores.shape[1]).cpu()
    return 100 * float((hits / images)[images > 0].mean())


def eleven_point_map(scores: Tensor, labels: Tensor) -> float:
    """PASCAL VOC 2007's mean average precision, for labels of 0 and 1 as (images, classes).

    The precision at a recall r is the best at any threshold that recalls at least r; a class has
    the mean of those at r = 0, 0.1 … 1. Images of equal score are retrieved together, so their
    order does not matter. A class without a positive image is left out.
    """
    if scores.shape != labels.shape or len(scores) == 0:
        raise _unfit(scores, labels)
    positives = labels.sum(dim=0).cpu()
    if not bool(positives.any()):
        raise UserError("average precision needs a class that some image has; none does.")
    # The curves are short and want float64, which not every device has.
    ranked, order = scores.cpu().nan_to_num(nan=-torch.inf).sort(dim=0, descending=True)
    found = labels.cpu().gather(0, order).cumsum(dim=0)
    precision = found.double() / torch.arange(1, len(found) + 1)[:, None]
    precision[:-1][ranked[:-1] == ranked[1:]] = 0  # no threshold lies between equal scores
    recall = found.double() / positives
    points = [precision.where(recall >= tenth, 0).amax(dim=0) for tenth in TENTHS]
    return 100 * float(torch.stack(points).mean(dim=0)[positives > 0].mean())


def _places(scores: Tensor, labels: Tensor) -> Tensor:
    """How many classes come before the right one, for each image."""
    if labels.shape != scores.shape[:1] or len(scores) == 0:
        raise _unfit(scores, labels)
    classes = scores.shape[1]
    if int(labels.min()) < 0 or int(labels.max()) >= classes:
        raise UserError(
            f"labels go from {int(labels.min())} to {int(labels.max())}, but the scores are of "
            f"{classes} classes, numbered 0 to {classes - 1}."
        )
    right = labels.to(scores.device)[:, None]
    own = scores.gather(1, right)
    earlier = torch.arange(classes, device=scores.device) < right
    # Not "scores > own": that would say nothing against a score that is not a number.
    return (~(scores <= own) | ((scores == own) & earlier)).sum(dim=1)


def _unfit(scores: Tensor, labels: Tensor) -> UserError:
    return UserError(
        f"scores of shape {tuple(scores.shape)} cannot be judged by labels of shape "
        f"{tuple(labels.shape)}; there must be as many of both, and at least one."
    )
