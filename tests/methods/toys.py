"""What tests of methods share: a tiny encoder, images of four pixels, and the loop in ten lines."""

import torch
import torch.nn.functional as F
from torch import Tensor

from helpers import TINY_SPLIT
from xmoco.config import Config, ModelConfig
from xmoco.config.methods import (
    AlignUniformConfig,
    BarlowTwinsConfig,
    BYOLConfig,
    CO2Config,
    InstDiscConfig,
    JCLConfig,
    MethodConfig,
    MNNConfig,
    MoCoOneWayConfig,
    MoCoV2PlusConfig,
    MSFConfig,
    ReSSLConfig,
    SCEConfig,
    SimCLRConfig,
    SimSiamConfig,
    SupervisedConfig,
    SwAVConfig,
    UOTAConfig,
    VICRegConfig,
    XMoCoConfig,
)
from xmoco.config.shared import IdeasConfig
from xmoco.data import ArrayImages, Batch
from xmoco.methods import Method, build_method
from xmoco.methods.instdisc import InstDisc
from xmoco.schedules import Clock, ScheduledValues, Value

XMOCO = XMoCoConfig(bank_length=24, key_momentum=0.9)
MOCO = MoCoV2PlusConfig(bank_length=24, key_momentum=0.9)
METHODS: dict[str, MethodConfig] = {
    "xmoco": XMOCO,
    "mocov2plus": MOCO,
    "simclr": SimCLRConfig(),
    "byol": BYOLConfig(key_momentum=0.9, key_momentum_end=None, predictor_hidden=24),
    "swav": SwAVConfig(
        prototypes=7, queue_length=24, queue_from_epoch=0.5, freeze_prototypes_epochs=0.25
    ),
    "ressl": ReSSLConfig(bank_length=24, key_momentum=0.9),
    "sce": SCEConfig(bank_length=24, key_momentum=0.9),
    "co2": CO2Config(bank_length=24, key_momentum=0.9, agreement_weight=1.0),
    "alignuniform": AlignUniformConfig(bank_length=24, key_momentum=0.9, align_weight=1.0),
    "jcl": JCLConfig(bank_length=24, key_momentum=0.9, key_views=3),
    "uota": UOTAConfig(
        prototypes=7, queue_length=24, queue_from_epoch=0.5, outlier_temperature=2, outliers_from=0
    ),
    "simsiam": SimSiamConfig(predictor_hidden=24),
    "barlowtwins": BarlowTwinsConfig(),
    "vicreg": VICRegConfig(),
    "msf": MSFConfig(bank_length=24, key_momentum=0.9, predictor_hidden=24, neighbours=3),
    "mnn": MNNConfig(bank_length=24, key_momentum=0.9, predictor_hidden=24, neighbours=3),
    "supervised": SupervisedConfig(),
    "instdisc": InstDiscConfig(),
    "moco": MoCoOneWayConfig(bank_length=24, key_momentum=0.9),
}
"""Every method, small."""
_BOTH = {"label_weight": 0.8, "consistency_weight": 0.5}
IDEAS: dict[str, IdeasConfig | SCEConfig] = {
    "mocov2plus": MoCoV2PlusConfig(bank_length=24, key_momentum=0.9, **_BOTH),
    "simclr": SimCLRConfig(**_BOTH),
    "moco": MoCoOneWayConfig(bank_length=24, key_momentum=0.9, symmetric=True, **_BOTH),
    "co2": CO2Config(bank_length=24, key_momentum=0.9, symmetric=True, **_BOTH),
    "sce": SCEConfig(bank_length=24, key_momentum=0.9, symmetric=True, consistency_weight=0.5),
    "jcl": JCLConfig(bank_length=24, key_momentum=0.9, key_views=2, symmetric=True, **_BOTH),
    "instdisc": InstDiscConfig(**_BOTH),
}
"""Methods with XMoCo's ideas."""

PLAIN = TINY_SPLIT.model_copy(update={"batch_norm": "plain"})
BATCH = 16
EPOCH, EPOCHS = 4, 10
IMAGES = ArrayImages(
    "toys",
    torch.zeros(3 * BATCH, 3, 1, 1, dtype=torch.uint8),
    torch.arange(3 * BATCH) % 2,
    ("darker", "brighter"),
)
"""What methods are told of the images."""


def built(settings: MethodConfig, model: ModelConfig = TINY_SPLIT, seed: int = 0) -> Method:
    torch.manual_seed(seed)
    method = build_method(Config(model=model, method=settings))
    method.prepare_for(IMAGES)
    return method


def two_views(step: int, count: int = 2) -> list[Tensor]:
    """Two noisy looks, or more, at random images of 8×8, made of four large pixels."""
    generator = torch.Generator().manual_seed(step)
    images = F.interpolate(torch.randn(BATCH, 3, 2, 2, generator=generator), 8)
    return [images + 0.2 * torch.randn(images.shape, generator=generator) for _ in range(count)]


def six_views(step: int) -> list[Tensor]:
    """The same and four small ones, each of two of the large pixels."""
    generator = torch.Generator().manual_seed(1000 + step)
    full = two_views(step)
    small = [full[number % 2][:, :, 2:6, 2:6] for number in range(4)]
    return [
        *full,
        *(view + 0.2 * torch.randn(view.shape, generator=generator) for view in small),
    ]


def views_for(method: Method, step: int) -> list[Tensor]:
    """As many as the method asks for, and what it wants beside them. Who knows images by their
    positions sees the same three batches again and again."""
    full, *others = (group.input.size for group in method.views)
    if any(size != full for size in others):
        return six_views(step)
    step = step % 3 if isinstance(method, InstDisc) else step
    views = two_views(step, sum(group.count for group in method.views))
    positions = torch.arange(BATCH) + step % 3 * BATCH
    brighter = (views[0].mean(dim=(1, 2, 3)) > 0).long()
    batch = Batch(torch.empty(0), torch.empty(0), positions, brighter)
    return [*views, *method.beside_views(batch)]


def values(method: Method, step: int = 0) -> dict[str, Value]:
    """The scheduled values ``step`` steps into ten epochs of four."""
    return ScheduledValues(method.schedules()).at(Clock(step, EPOCHS * EPOCH, EPOCH))


def trainable(method: Method) -> dict[str, Tensor]:
    return {name: p for name, p in method.named_parameters() if p.requires_grad}


def train(method: Method, steps: range, rate: float = 0.05) -> list[float]:
    """What the loop does. (A momentum buffer would be the loop's to save; here there is none.)"""
    optimiser = torch.optim.SGD(trainable(method).values(), lr=rate)
    losses = []
    for step in steps:
        at = values(method, step)
        optimiser.zero_grad()
        precision = next(method.parameters()).dtype
        inputs = [
            view.to(precision) if view.is_floating_point() else view
            for view in views_for(method, step)
        ]
        loss = method(inputs, at).loss
        loss.backward()
        method.before_update(at)
        optimiser.step()
        method.after_update(at)
        losses.append(loss.item())
    return losses


def copied(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in state.items()}


def assert_same_state(one: Method, other: dict[str, Tensor]) -> None:
    """To the bit."""
    state = one.state_dict()
    assert state.keys() == other.keys()
    for name, value in other.items():
        assert torch.equal(state[name], value), name
