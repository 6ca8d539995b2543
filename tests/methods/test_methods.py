"""Methods as the training loop sees them: steps, gradients, the momentum encoder, their state."""

import io

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.testing import assert_close

from helpers import TINY_SPLIT
from xmoco.config import MoCoV2PlusConfig, ModelConfig, XMoCoConfig
from xmoco.losses import MoCoLoss, XMoCoLoss
from xmoco.methods import Method, build_method
from xmoco.methods.base import MomentumMethod
from xmoco.methods.mocov2plus import MoCoV2Plus
from xmoco.methods.xmoco import XMoCo

PLAIN = TINY_SPLIT.model_copy(update={"batch_norm": "plain"})
XMOCO = XMoCoConfig(bank_length=24, key_momentum=0.9)
MOCO = MoCoV2PlusConfig(bank_length=24, key_momentum=0.9)
BATCH = 16

each_method = pytest.mark.parametrize("settings", [XMOCO, MOCO], ids=["xmoco", "mocov2plus"])


def built(
    settings: XMoCoConfig | MoCoV2PlusConfig, model: ModelConfig = TINY_SPLIT, seed: int = 0
) -> MomentumMethod:
    torch.manual_seed(seed)
    method = build_method(model, settings)
    assert isinstance(method, MomentumMethod)
    return method


def two_views(step: int) -> tuple[Tensor, Tensor]:
    """Two noisy looks at random images of 8×8, made of four large pixels."""
    generator = torch.Generator().manual_seed(step)
    images = F.interpolate(torch.randn(BATCH, 3, 2, 2, generator=generator), 8)
    noise = torch.randn(2, *images.shape, generator=generator)
    x_s, x_t = images + 0.2 * noise
    return x_s, x_t


def trainable(method: Method) -> dict[str, Tensor]:
    return {name: p for name, p in method.named_parameters() if p.requires_grad}


def train(method: Method, steps: range, rate: float = 0.05) -> list[float]:
    """What the loop does. (A momentum buffer would be the loop's to save; here there is none.)"""
    optimiser = torch.optim.SGD(trainable(method).values(), lr=rate)
    losses = []
    for step in steps:
        optimiser.zero_grad()
        precision = next(method.parameters()).dtype
        loss = method(*(view.to(precision) for view in two_views(step))).loss
        loss.backward()
        optimiser.step()
        method.after_step()
        losses.append(loss.item())
    return losses


def test_build_method_passes_every_setting_on() -> None:
    settings = XMoCoConfig(
        bank_length=11,
        temperature=0.3,
        key_momentum=0.5,
        sharpness=3.0,
        positive_mass=0.7,
        sinkhorn_iterations=4,
        history="probabilities",
    )
    xmoco = built(settings)
    assert isinstance(xmoco, XMoCo)
    loss = xmoco.loss
    assert isinstance(loss, XMoCoLoss)
    assert loss.banks.source.shape == (11, 16)
    assert loss.history is not None
    assert loss.history.source.shape == (11, 11)
    assert (loss.temperature, loss.sharpness, loss.positive_mass) == (0.3, 3.0, 0.7)
    assert (loss.iterations, xmoco.key_momentum) == (4, 0.5)

    moco = built(MoCoV2PlusConfig(bank_length=9, temperature=0.1, key_momentum=0.25))
    assert isinstance(moco, MoCoV2Plus)
    assert type(moco.loss) is MoCoLoss
    assert moco.loss.banks.source.shape == (9, 16)
    assert (moco.loss.temperature, moco.key_momentum) == (0.1, 0.25)


@each_method
@pytest.mark.parametrize("model", [TINY_SPLIT, PLAIN], ids=["split", "plain"])
def test_a_step_tells_loss_and_terms_and_gauges_when_asked(
    settings: XMoCoConfig | MoCoV2PlusConfig, model: ModelConfig
) -> None:
    method = built(settings, model)
    loss, terms, metrics = method(*two_views(0))
    assert loss.shape == ()
    assert_close(loss, torch.stack(list(terms.values())).sum())
    names = {"source", "target"}
    if settings is XMOCO:
        names = {f"{term}_{side}" for term in ("labels", "consistency") for side in names}
    assert set(terms) == names
    assert metrics == {}
    metrics = method(*two_views(1), with_metrics=True).metrics
    expected = {"feature_spread", "effective_rank", "positive_probability", "consistency_gap"}
    assert set(metrics) == expected | ({"label_entropy"} if settings is XMOCO else set())
    for gauge in metrics.values():
        assert gauge.shape == ()
        assert gauge.isfinite()
        assert not gauge.requires_grad


@each_method
def test_measuring_does_not_change_the_step(settings: XMoCoConfig | MoCoV2PlusConfig) -> None:
    one, other = built(settings), built(settings)
    for step in range(3):
        measured = one(*two_views(step), with_metrics=True).loss
        assert torch.equal(measured, other(*two_views(step)).loss)


@each_method
def test_only_the_encoder_gets_gradients(settings: XMoCoConfig | MoCoV2PlusConfig) -> None:
    method = built(settings)
    assert set(trainable(method)) == {
        f"encoder.{name}" for name, _ in method.encoder.named_parameters()
    }
    for step in range(3):  # the last with a full history
        method(*two_views(step)).loss.backward()
    for name, parameter in method.named_parameters():
        assert (parameter.grad is not None) == name.startswith("encoder."), name


@each_method
def test_after_a_step_the_momentum_encoder_follows(
    settings: XMoCoConfig | MoCoV2PlusConfig,
) -> None:
    method = built(settings)
    assert method.bank_fill == 0
    before = [p.clone() for p in method.momentum_encoder.parameters()]
    train(method, range(1))
    assert method.bank_fill == BATCH / 24
    followers, leaders = method.momentum_encoder.parameters(), method.encoder.parameters()
    moved = False
    for follower, leader, old in zip(followers, leaders, before, strict=True):
        assert_close(follower, 0.9 * old + 0.1 * leader.detach())
        moved |= not torch.equal(follower, old)
    assert moved
    train(method, range(1, 2))
    assert method.bank_fill == 1


def test_keys_come_from_the_momentum_encoder_in_other_company() -> None:
    views = two_views(0)
    split, plain = built(XMOCO), built(XMOCO, PLAIN)
    assert not any(keys.requires_grad for keys in split.keys(*views))
    for keys, view in zip(plain.keys(*views), views, strict=True):
        assert_close(keys, plain.momentum_encoder(view))
    split = built(XMOCO)
    keys, queries = torch.cat(split.keys(*views)), torch.cat(split.queries(*views)).detach()
    assert not torch.allclose(keys, queries, atol=1e-3)  # although f is still g
    split.eval()  # without batch statistics the company does not matter
    split.momentum_encoder.load_state_dict(split.encoder.state_dict())
    assert_close(torch.cat(split.keys(*views)), torch.cat(split.queries(*views)).detach())


@each_method
@pytest.mark.parametrize("model", [TINY_SPLIT, PLAIN], ids=["split", "plain"])
def test_what_suits_a_gpu_computes_the_same(
    settings: XMoCoConfig | MoCoV2PlusConfig, model: ModelConfig
) -> None:
    """Views stacked and norms fused, against one view after the other: losses and the state."""
    stacked, apart = (built(settings, model) for _ in range(2))
    for method in (stacked, apart):
        method.encoder.double()
        method.momentum_encoder.double()
    names = list(stacked.state_dict())
    stacked.suit_gpu()
    assert stacked.stacked
    assert list(stacked.state_dict()) == names
    assert trainable(stacked).keys() == trainable(apart).keys()
    steps = range(4)
    assert_close(train(stacked, steps), train(apart, steps), rtol=1e-6, atol=1e-6)
    for name, value in apart.state_dict().items():
        # The encoder ends in float32, so banks and features agree as far as that goes.
        assert_close(stacked.state_dict()[name], value, rtol=1e-3, atol=1e-5)


@each_method
@pytest.mark.parametrize("steps", [1, 3])
def test_state_dict_round_trip_continues_identically(
    settings: XMoCoConfig | MoCoV2PlusConfig, steps: int
) -> None:
    original, restored = built(settings), built(settings, seed=1)
    train(original, range(steps))
    file = io.BytesIO()
    torch.save(original.state_dict(), file)
    file.seek(0)
    restored.load_state_dict(torch.load(file, weights_only=True))
    following = range(steps, steps + 3)
    assert train(original, following) == train(restored, following)
    for name, value in original.state_dict().items():
        assert torch.equal(restored.state_dict()[name], value), name


@each_method
def test_twenty_steps_lower_the_loss(settings: XMoCoConfig | MoCoV2PlusConfig) -> None:
    method = built(settings)
    train(method, range(3), rate=0)  # the banks fill with keys
    losses = train(method, range(3, 23))
    assert sum(losses[-3:]) < 0.95 * sum(losses[:3])


@pytest.mark.parametrize("history", ["queries", "none"])
def test_full_positive_mass_contains_mocov2plus(history: str) -> None:
    xmoco = built(XMOCO.model_copy(update={"positive_mass": 1.0, "history": history}))
    moco = built(MOCO)
    for step in range(4):
        terms, expected = xmoco(*two_views(step)).terms, moco(*two_views(step)).loss
        assert_close(terms["labels_source"] + terms["labels_target"], expected)
