"""What a method makes of negatives, as it learns: the paper's claims, measured.

XMoCo claims that an image should be as similar to another whichever views are taken, that a batch's
similarity should fall evenly on the negatives, and that negatives deserve a share of the label. So
a few training images are taken, always the same in the same random views, and every one of them is
a negative of all others: a stand-in for the banks, which hold images nobody kept the labels of.
Features are made anew by the networks in eval mode. Nothing of this enters the training: no
gradient, no batch statistic, no random number of it.

Labels, where there are any, serve for one figure only: how many of the negatives with the largest
soft labels are of the query's own class.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from xmoco.config import Config
from xmoco.data import ImageSet, at_positions
from xmoco.data.subset import some_positions
from xmoco.distributed import alone
from xmoco.evaluate.features import cudnn_search_where_it_pays
from xmoco.methods import Method
from xmoco.methods.base import Meeting
from xmoco.records import Record
from xmoco.task import Moment

MOST_IMAGES, FEWEST_IMAGES = 1024, 48
IMAGES_PER_STEP = 256
TRAINED_PER_IMAGE = 100
"""So many images are trained on for every one that is looked at. Of each of the latter, two views
pass both encoders; training also takes the way back through one, which is twice the way there. So
looking costs half a percent of the training."""
LARGEST = 5
"""So many negatives of every query are looked at for their class."""


def epochs_between(images: int, knn_every: int) -> int:
    """Looks are taken when kNN is measured, but not so often that they would cost more."""
    return knn_every * math.ceil(TRAINED_PER_IMAGE * FEWEST_IMAGES / (images * knn_every))


def sample_size(images: int, knn_every: int) -> int:
    affordable = images * epochs_between(images, knn_every) // TRAINED_PER_IMAGE
    return min(images, MOST_IMAGES, affordable)


class Look(NamedTuple):
    """How images see each other: (N, N) matrices, rows are queries. The diagonal is no negative."""

    source: Tensor
    """S(q_s, m_t): cosines of source queries to target keys."""
    target: Tensor | None
    """S(q_t, m_s), of methods with two sides."""
    shares: Tensor
    """P of the source queries over the negatives; rows sum to one."""
    labels: Tensor | None
    """The soft labels' mass over the negatives, of methods that make some; rows sum to one."""
    classes: Tensor | None
    """Of the images, where each has one."""


@dataclass(frozen=True)
class NegativesMonitor:
    """Looks at a method now and then."""

    config: Config
    work: str
    images: ImageSet
    device: torch.device

    @property
    def positions(self) -> Tensor:
        """Of the images that are looked at."""
        images = len(self.images)
        return some_positions(images, sample_size(images, self.config.monitor.knn_every))

    def due(self, epoch: int) -> bool:
        """Before the training, at its end, and now and then between."""
        every = self.config.monitor.knn_every
        if not every:
            return False
        last = self.config.train.epochs
        return epoch in (0, last) or epoch % epochs_between(len(self.images), every) == 0

    @torch.no_grad()
    @alone()
    def look(self, method: Method) -> Look | None:
        """None of methods that have no negatives to look at."""
        was_training = method.training
        method.eval()
        try:
            with cudnn_search_where_it_pays(len(self.images)):
                found = list(self._meetings(method))
        finally:
            method.train(was_training)
        if not found or len(self.positions) < 2:
            return None
        parts, labels = zip(*found, strict=True)
        one_class = self.images.labels is not None and not self.images.multi_label
        queries, keys = (
            [torch.cat(side).float() for side in zip(*sides, strict=True)]
            for sides in ([part.queries for part in parts], [part.keys for part in parts])
        )
        temperature, label_maker = parts[0].temperature, parts[0].label_maker
        q_s, k_s, k_t = queries[0], keys[0], keys[-1]
        source = q_s @ k_t.T
        itself = torch.eye(len(source), dtype=torch.bool, device=source.device)
        logits = (source / temperature).masked_fill(itself, -torch.inf)
        return Look(
            source,
            queries[1] @ k_s.T if len(queries) == 2 else None,
            logits.softmax(dim=1),
            label_maker and label_maker.labels_among(q_s, k_s, k_t, temperature),
            torch.cat(labels) if one_class else None,
        )

    def _meetings(self, method: Method) -> Iterator[tuple[Meeting, Tensor | None]]:
        positions = self.positions
        first = 0
        for some in positions.split(IMAGES_PER_STEP):
            batch = at_positions(self.images, some, self.device)
            moment = Moment(
                self.config.train.seed, 0, len(positions), slice(first, first + len(some))
            )
            meeting = method.meeting(method.inputs(batch, moment))
            if meeting is None:
                return
            yield meeting, batch.labels
            first += len(some)

    def records(self, look: Look, epoch: int, step: int) -> list[Record]:
        protocol = {
            "data": self.images.name,
            "images": len(self.positions),
            "views": "random, always the same",
            "size": self.config.input.size,
            "temperature": self.config.method.model_dump().get("temperature"),
            "largest": LARGEST,
            "epoch": epoch,
            "step": step,
        }
        subject, seed = self.config.method.subject, self.config.train.seed
        return [
            Record(measure, value, unit, subject, self.work, protocol, seed)
            for measure, (value, unit) in measures(look).items()
        ]


def measures(look: Look) -> dict[str, tuple[float, str]]:
    """All that can be told of a look, with units."""
    classes = look.classes
    found: dict[str, tuple[float, str]] = {}
    if look.target is not None:
        found["similarity_gap"] = gap(look.source, look.target), "cosine"
        found["similarity_gap_unrelated"] = gap(look.source, look.target, related=False), "cosine"
    found["similarity_evenness"] = evenness(look.shares), ""
    if look.labels is not None:
        found["label_evenness"] = evenness(look.labels), ""
    if classes is not None:
        found["similar_of_own_class"] = of_own_class(look.shares, classes), "%"
        if look.labels is not None:
            found["labelled_of_own_class"] = of_own_class(look.labels, classes), "%"
        found["any_of_own_class"] = chance_of_own_class(classes), "%"
    return found


def gap(source: Tensor, target: Tensor, related: bool = True) -> float:
    """Mean of |S(q_s, m_t) − S(q_t, m_s)| over queries and negatives (paper, section III-C).

    Not ``related``, the two queries are of different images: what the gap is if the views of an
    image have nothing in common.
    """
    itself = torch.eye(len(source), dtype=torch.bool, device=source.device)
    left_out = itself
    if not related:
        target, left_out = target.roll(-1, dims=0), itself | itself.roll(-1, dims=0)
    differences = (source - target).abs()[~left_out]
    return float(differences.mean()) if differences.numel() else math.nan


def evenness(shares: Tensor) -> float:
    """The perplexity of what falls on each negative, as a share of their number: 1 is perfectly
    even, 1/N all on one."""
    falls_on = shares.mean(dim=0)
    return float(torch.special.entr(falls_on).sum().exp() / len(falls_on))


def of_own_class(shares: Tensor, classes: Tensor) -> float:
    """Of the negatives with the largest shares, the percentage that is of the query's class."""
    top = shares.topk(min(LARGEST, len(shares) - 1), dim=1).indices.cpu()
    return float((classes[top] == classes[:, None]).float().mean() * 100)


def chance_of_own_class(classes: Tensor) -> float:
    """The same of negatives that are picked blindly."""
    same = (classes[:, None] == classes).float().sum() - len(classes)
    return float(same / (len(classes) * (len(classes) - 1)) * 100)


def strongest(look: Look, queries: int, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Some rows, the negatives with their largest labels (or similarities), and these shares."""
    shares = look.shares if look.labels is None else look.labels
    chosen = torch.linspace(0, len(shares) - 1, queries).long()
    values, places = shares[chosen.to(shares.device)].topk(count, dim=1)
    return chosen, places.cpu(), values.cpu()
