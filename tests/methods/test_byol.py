"""BYOL as a whole against its formula, and its rising momentum."""

import copy
import math

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close
from toys import EPOCH, EPOCHS, PLAIN, built, train, two_views, values

from xmoco.config.methods import BYOLConfig
from xmoco.methods.byol import BYOL
from xmoco.schedules import Clock, ScheduledValues

TINY = BYOLConfig(predictor_hidden=24)
STEPS = EPOCH * EPOCHS


def byol(settings: BYOLConfig = TINY) -> BYOL:
    method = built(settings, PLAIN)
    assert isinstance(method, BYOL)
    return method


def distance(p: Tensor, k: Tensor) -> Tensor:
    """2 − 2·cos, row by row."""
    cosines = [
        row @ target / (row.norm() * target.norm()) for row, target in zip(p, k, strict=True)
    ]
    return 2 - 2 * torch.stack(cosines).mean()


def test_a_step_is_the_symmetric_distance_of_predictions_and_targets() -> None:
    """And so are its gradients: none by way of the targets."""
    method, views = byol(), two_views(0)
    nn.init.normal_(method.momentum_encoder.head[-1].weight)  # g is no longer f
    f, g, predictor = (
        copy.deepcopy(part) for part in (method.encoder, method.momentum_encoder, method.predictor)
    )
    loss, terms, _ = method(views, values(method))
    p_s, p_t = (predictor(f(view)).double() for view in views)
    k_s, k_t = (g(view).double() for view in views)
    expected = {"source": distance(p_s, k_t), "target": distance(p_t, k_s)}
    found = {name: term.double() for name, term in terms.items()}
    assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert_close(loss.double(), expected["source"] + expected["target"], rtol=1e-5, atol=1e-5)
    loss.backward()
    (expected["source"] + expected["target"]).backward()
    for part, by_hand in ((method.encoder, f), (method.predictor, predictor)):
        for mine, theirs in zip(part.parameters(), by_hand.parameters(), strict=True):
            assert_close(mine.grad, theirs.grad, rtol=1e-3, atol=1e-5)
    assert all(parameter.grad is None for parameter in method.momentum_encoder.parameters())


def test_features_are_of_any_length_and_only_the_loss_makes_them_unit() -> None:
    lengths = byol().encoder(two_views(0)[0]).norm(dim=1)
    assert not torch.allclose(lengths, torch.ones(len(lengths)), atol=1e-2)


def test_momentum_rises_along_a_half_cosine() -> None:
    """Equation of BYOL's paper: 1 − (1 − m)·(cos(πt/T) + 1)/2."""
    method = byol(TINY.model_copy(update={"key_momentum": 0.96}))
    momenta = [values(method, step)["key_momentum"] for step in range(STEPS + 1)]
    by_formula = [
        1 - (1 - 0.96) * (math.cos(math.pi * step / STEPS) + 1) / 2 for step in range(STEPS + 1)
    ]
    assert momenta == pytest.approx(by_formula, abs=1e-12)
    assert momenta == sorted(momenta)
    assert (momenta[0], momenta[-1]) == (0.96, 1.0)


def test_momentum_ends_where_it_is_told_to() -> None:
    ends = {"key_momentum": 0.9, "key_momentum_end": 0.98}
    method = byol(TINY.model_copy(update=ends))
    assert values(method, STEPS)["key_momentum"] == pytest.approx(0.98)
    assert values(method, STEPS // 2)["key_momentum"] == pytest.approx(0.94)
    constant = byol(TINY.model_copy(update={"key_momentum_end": None}))
    assert values(constant, 0) == values(constant, STEPS) == {"key_momentum": 0.99}


@pytest.mark.parametrize("on_device", [False, True])
def test_the_momentum_of_a_step_is_what_the_momentum_encoder_follows_by(on_device: bool) -> None:
    """Whether a number, or one on the device, which a replayed CUDA graph would read."""
    method = byol(TINY.model_copy(update={"key_momentum": 0.5}))
    train(method, range(1), rate=0.2)
    device = torch.device("cpu") if on_device else None
    scheduled = ScheduledValues(method.schedules(), device)
    for step in (10, 30, STEPS):
        at = scheduled.at(Clock(step, STEPS, EPOCH))
        assert isinstance(at["key_momentum"], Tensor) == on_device
        momentum = float(at["key_momentum"])
        before = [parameter.clone() for parameter in method.momentum_encoder.parameters()]
        with torch.no_grad():
            for parameter in method.encoder.parameters():
                parameter.add_(0.1)
        method.after_update(at)
        for follower, leader, old in zip(
            method.momentum_encoder.parameters(), method.encoder.parameters(), before, strict=True
        ):
            assert_close(follower, momentum * old + (1 - momentum) * leader.detach())
            assert torch.equal(follower, old) == (momentum == 1)
