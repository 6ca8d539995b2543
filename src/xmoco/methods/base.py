"""What pre-training methods share: views of images, and encoders of which one backbone is kept."""

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from xmoco.config import Config
from xmoco.config.shared import (
    BankConfig,
    DirectedConfig,
    MomentumEncoderConfig,
    NeighbourConfig,
    SmallViewsConfig,
)
from xmoco.data.imagesets import ImageSet
from xmoco.data.streaming import Batch, sent
from xmoco.data.views import ViewGroup, views_of
from xmoco.losses.bank import KeyBank, KeyBanks, Ring
from xmoco.losses.contrast import Contrast, contrast
from xmoco.losses.cross_similarity import CrossSimilarity
from xmoco.losses.metrics import feature_metrics, similarity_metrics
from xmoco.nn.backbones import check_size
from xmoco.nn.encoder import Encoder, build_encoder, momentum_copy, momentum_update
from xmoco.nn.encoding import EncoderRunner
from xmoco.nn.heads import Ending, mlp_head
from xmoco.schedules import Schedule, rising
from xmoco.task import Moment, StepOutput, Task, Values

SIDES = ("source", "target")


def named(term: str, values: Sequence[Tensor]) -> dict[str, Tensor]:
    """A term by its name and, of both directions, side."""
    if len(values) == 1:
        return {term: values[0]}
    return {f"{term}_{side}": value for side, value in zip(SIDES, values, strict=True)}


def weak_views(config: Config, names: tuple[str, ...]) -> ViewGroup:
    """Views that hardly differ from their images, called so."""
    weak = tuple(f"weak {name}" for name in names)
    return ViewGroup(weak, config.weak_views.beside(config.views), config.input)


def query_and_key_views(
    config: Config, queries: tuple[str, ...], keys: tuple[str, ...]
) -> tuple[ViewGroup, ...]:
    """Views for queries and others for keys, which are weak ones if the method is to have such."""
    assert isinstance(config.method, BankConfig | NeighbourConfig)
    if not config.method.weak_keys:
        return (ViewGroup(queries + keys, config.views, config.input),)
    return ViewGroup(queries, config.views, config.input), weak_views(config, keys)


def small_views(config: Config) -> tuple[ViewGroup, ...]:
    """Small views beside the full ones, as a last group, if there are to be any (multi-crop)."""
    settings = config.method
    assert isinstance(settings, SmallViewsConfig)
    if not settings.local_crops:
        return ()
    names = tuple(f"small view {n}" for n in range(1, settings.local_crops + 1))
    views = config.views.model_copy(update={"crop_scale": settings.local_scale})
    size = settings.local_size or max(8, config.input.size // 2)
    return (ViewGroup(names, views, config.input.model_copy(update={"size": size})),)


def small_views_warnings(groups: Sequence[ViewGroup]) -> list[str]:
    full, last = groups[0].input.size, groups[-1]
    if not last.names[0].startswith("small") or last.input.size < full:
        return []
    return [
        f"small views of {last.input.size} px are no smaller than the full ones of {full} px: "
        "lower local_size"
    ]


class Method(Task):
    """A way to learn from views of images. ``encoder.backbone`` is what is kept."""

    uses_labels: ClassVar[bool] = False
    """Whether it learns from labels, too."""
    hides_keys: ClassVar[bool] = False
    """Whether batch statistics must not tell a query which key is its own."""
    encoder: Encoder

    def __init__(self, config: Config) -> None:
        super().__init__()
        added, extras = config.method.added, config.method.extras
        ideas = [f"XMoCo's {' and '.join(added)}"] if added else []
        if ideas or extras:
            self.title = f"{self.title} with {', '.join([*ideas, *extras])}"
        self.views = self.view_groups(config)
        self.run = EncoderRunner(config.model)

    @staticmethod
    def view_groups(config: Config) -> tuple[ViewGroup, ...]:
        """The views a step is given, in this order: two alike unless a method wants others."""
        return (ViewGroup(("view 1", "view 2"), config.views, config.input),)

    def build_encoder(
        self, config: Config, unit_length: bool = True, ending: Ending = "biased"
    ) -> Encoder:
        encoder = build_encoder(config.model, config.input, unit_length, ending)
        for group in self.views:
            check_size(config.model.backbone, encoder.backbone, group.input.size)
        self.run.prepare(encoder)
        return encoder

    def start_from(self, backbone: nn.Module) -> None:
        """Take over the weights of a backbone of the same architecture."""
        self.encoder.backbone.load_state_dict(backbone.state_dict())

    def prepare_for(self, images: ImageSet) -> None:
        """Told once, before training, which images are to be learned from: what depends on them (a
        classifier's classes, a slot for every image) is made here. Images that do not suit are a
        ``UserError``."""

    def inputs(self, batch: Batch, moment: Moment) -> Sequence[Tensor]:
        views = views_of(
            batch.images,
            batch.sizes,
            self.views,
            seed=moment.seed,
            step=moment.step,
            batch=moment.batch,
            rows=moment.rows,
        )
        return [*views, *(sent(one, batch.images.device) for one in self.beside_views(batch))]

    def beside_views(self, batch: Batch) -> list[Tensor]:
        """What else ``forward`` is given, after the views and a row for every image, from the
        host: labels, or positions in the set."""
        return []

    @abstractmethod
    def forward(
        self, views: Sequence[Tensor], at: Values, with_metrics: bool = False
    ) -> StepOutput: ...

    def networks(self) -> list[nn.Module]:
        """All that ``run`` is asked to run."""
        return [self.encoder]

    def meeting(self, views: Sequence[Tensor]) -> "Meeting | None":
        """Of methods whose queries meet keys: those of some images, for whoever wants to look.

        Networks are taken in the mode they are in, in this process alone.
        """
        return None

    def optimize_for(self, device: torch.device) -> None:
        self.run.optimize_for(device, *self.networks())


class Meeting(NamedTuple):
    """Unit-length queries and keys of the same images, one of each for every side."""

    queries: list[Tensor]
    keys: list[Tensor]
    temperature: float
    label_maker: CrossSimilarity | None = None
    """What makes soft labels of them, if XMoCo's ideas are in the method."""


class MomentumMethod(Method):
    """An encoder f with gradients and a momentum encoder g without: g ← m·g + (1−m)·f."""

    def __init__(self, config: Config, unit_length: bool = True) -> None:
        super().__init__(config)
        assert isinstance(config.method, MomentumEncoderConfig)
        self.momentum = rising(config.method.key_momentum, config.method.key_momentum_end)
        self.encoder = self.build_encoder(config, unit_length)
        self.momentum_encoder = momentum_copy(self.encoder)

    def start_from(self, backbone: nn.Module) -> None:
        """The momentum encoder starts as the encoder."""
        super().start_from(backbone)
        self.momentum_encoder.load_state_dict(self.encoder.state_dict())

    def schedules(self) -> Mapping[str, Schedule]:
        return {"key_momentum": self.momentum}

    def networks(self) -> list[nn.Module]:
        return [self.encoder, self.momentum_encoder]

    def queries_and_keys(
        self, views: Sequence[Tensor], key_views: Sequence[Tensor]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Features of views by f, and of others or the same by g."""
        return self.run.queries_and_keys(self.encoder, self.momentum_encoder, views, key_views)

    def after_update(self, at: Values) -> None:
        momentum_update(self.momentum_encoder, self.encoder, at["key_momentum"])


class BankMethod(MomentumMethod):
    """Queries of either side of an image meet the keys of the other, and banks of past keys."""

    hides_keys = True
    small_views: int = 0
    """So many views come last, of which only queries are made."""

    def __init__(self, config: Config, temperature: float) -> None:
        """``temperature`` is that of the softmax over keys. A method without one says what comes
        nearest to it."""
        super().__init__(config)
        assert isinstance(config.method, BankConfig)
        self.temperature = temperature
        size, hidden = config.model.feature_size, config.method.predictor_hidden
        self.predictor = mlp_head(size, hidden, size, layers=2) if hidden else None
        if self.predictor is not None:
            self.run.prepare(self.predictor)

    @property
    @abstractmethod
    def banks(self) -> Ring: ...

    def networks(self) -> list[nn.Module]:
        return [*super().networks(), *([] if self.predictor is None else [self.predictor])]

    @staticmethod
    def view_groups(config: Config) -> tuple[ViewGroup, ...]:
        """Source and target; with weak keys, two weak views more."""
        settings, sides = config.method, ("source view", "target view")
        assert isinstance(settings, BankConfig)
        strong = ViewGroup(sides, config.views, config.input)
        return (strong, weak_views(config, sides)) if settings.weak_keys else (strong,)

    def queries_and_keys_of(self, views: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """(q_s, q_t) and (k_s, k_t) of unit length, and queries of small views after the others."""
        return self.queries_and_keys(*self.split_views(views))

    def split_views(self, views: Sequence[Tensor]) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """Those of queries, small ones last, and those of keys: the last two full ones, be they
        weak ones or those of the queries. Where banks have one side, one of each."""
        sides, full = len(self.banks.sides), len(views) - self.small_views
        return [*views[:sides], *views[full:]], views[full - sides : full]

    def queries_and_keys(
        self, views: Sequence[Tensor], key_views: Sequence[Tensor]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """The same with queries as a predictor makes them, where there is one."""
        queries, keys = super().queries_and_keys(views, key_views)
        if self.predictor is not None:
            predicted = self.run.encode(self.predictor, queries)
            queries = [F.normalize(features.float(), dim=1) for features in predicted]
        return queries, keys

    @staticmethod
    def metrics(contrasts: Sequence[Contrast]) -> dict[str, Tensor]:
        """How far features spread and, of both directions, how much these differ."""
        metrics = feature_metrics(contrasts[0].queries)
        if len(contrasts) == 2:
            metrics |= similarity_metrics(*(P.log_p for P in contrasts))
        return metrics

    def meeting(self, views: Sequence[Tensor]) -> Meeting | None:
        of_queries, of_keys = self.split_views(views)
        queries = [self.encoder(view) for view in of_queries[: len(of_keys)]]
        keys = [self.momentum_encoder(view) for view in of_keys]
        if self.predictor is not None:
            queries = [F.normalize(self.predictor(query).float(), dim=1) for query in queries]
        return Meeting(queries, keys, self.temperature, self.label_maker())

    def label_maker(self) -> CrossSimilarity | None:
        """What makes soft labels, if XMoCo's ideas are in the method."""
        return None

    def reference_levels(self) -> dict[str, float]:
        """The cross entropy of a guess among the positive and the keys of a bank."""
        return {"chance": math.log(self.banks.length + 1)}

    def fill_levels(self) -> dict[str, float]:
        return {"bank": self.banks.fill}

    def warnings(self, images: int) -> list[str]:
        if self.banks.length <= images:
            return []
        return [
            f"a bank of {self.banks.length} keys is larger than the {images} images, so an image "
            "meets itself as a negative; lower bank_length"
        ]


class NeighbourMethod(MomentumMethod):
    """A predictor tells keys and their neighbours in a bank of past keys; there are no negatives.

    Features are of any length, and so is what the bank holds.
    """

    hides_keys = True

    def __init__(self, config: Config) -> None:
        super().__init__(config, unit_length=False)
        assert isinstance(config.method, NeighbourConfig)
        self.settings = config.method
        size = config.model.feature_size
        self.predictor = mlp_head(size, self.settings.predictor_hidden, size, layers=2)
        self.run.prepare(self.predictor)
        self.bank = KeyBank(self.settings.bank_length, size)

    def networks(self) -> list[nn.Module]:
        return [*super().networks(), self.predictor]

    def reference_levels(self) -> dict[str, float]:
        """The squared distance of unrelated directions."""
        return {"unrelated": 2.0}

    def fill_levels(self) -> dict[str, float]:
        return {"bank": self.bank.fill}

    def warnings(self, images: int) -> list[str]:
        if self.bank.length <= images:
            return []
        return [
            f"a bank of {self.bank.length} keys is larger than the {images} images, so that an "
            "image's past keys are its neighbours; lower bank_length"
        ]


class Way(NamedTuple):
    """Queries of a side, with the keys and the bank that they meet."""

    queries: Tensor
    keys: Tensor
    bank: Tensor


class DirectedMethod(BankMethod):
    """Queries meet keys in one direction, of one view and another one; or in both."""

    def __init__(self, config: Config, temperature: float) -> None:
        super().__init__(config, temperature)
        settings = config.method
        assert isinstance(settings, DirectedConfig)
        kind = KeyBanks if settings.symmetric else KeyBank
        self.key_banks = kind(settings.bank_length, config.model.feature_size)

    @property
    def banks(self) -> Ring:
        return self.key_banks

    @staticmethod
    def view_groups(config: Config) -> tuple[ViewGroup, ...]:
        settings = config.method
        assert isinstance(settings, DirectedConfig)
        if settings.symmetric:
            return BankMethod.view_groups(config)
        return query_and_key_views(config, ("query view",), ("key view",))

    def ways(self, queries: Sequence[Tensor], keys: Sequence[Tensor]) -> list[Way]:
        """Source queries meet target keys and, in both directions, the other way round."""
        return [
            Way(*meeting)
            for meeting in zip(queries, keys[::-1], self.banks.rows()[::-1], strict=True)
        ]

    def similarities(self, queries: Sequence[Tensor], keys: Sequence[Tensor]) -> list[Contrast]:
        """P of every way."""
        return [contrast(*way, self.temperature) for way in self.ways(queries, keys)]
