"""The encoder, its head and its momentum copy."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.testing import assert_close

from xmoco.config import ModelConfig
from xmoco.nn.encoder import build_encoder, momentum_copy, momentum_update
from xmoco.nn.heads import mlp_head

SMALL = ModelConfig(backbone="tiny", stem="cifar", head_layers=3, head_hidden=24, feature_size=7)


@pytest.mark.parametrize("layers", [2, 3, 4, 5])
def test_head_has_its_layers_and_a_linear_end(layers: int) -> None:
    torch.manual_seed(layers)
    head = mlp_head(10, 6, 4, layers)
    kinds = [type(module) for module in head]
    assert kinds == [nn.Linear, nn.BatchNorm1d, nn.ReLU] * (layers - 1) + [nn.Linear]
    shapes = [tuple(module.weight.shape) for module in head if isinstance(module, nn.Linear)]
    assert shapes == [(6, 10)] + [(6, 6)] * (layers - 2) + [(4, 6)]
    features = head(torch.randn(16, 10))
    assert features.shape == (16, 4)
    assert (features < 0).any()  # all over the sphere, not only its positive corner


def test_features_have_unit_length_in_float32() -> None:
    encoder = build_encoder(SMALL)
    images = torch.randn(6, 3, 16, 16)
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            features = encoder(images)
        assert features.shape == (6, 7)
        assert features.dtype == torch.float32
        assert_close(features.norm(dim=1), torch.ones(6))


def test_features_may_keep_their_length() -> None:
    torch.manual_seed(0)
    of_any_length = build_encoder(SMALL, unit_length=False)
    torch.manual_seed(0)
    encoder, images = build_encoder(SMALL), torch.randn(6, 3, 16, 16)
    features = of_any_length(images)
    assert features.dtype == torch.float32
    assert not torch.allclose(features.norm(dim=1), torch.ones(6), atol=1e-2)
    assert_close(nn.functional.normalize(features, dim=1), encoder(images))


def test_momentum_copy_starts_equal_and_gets_no_gradients() -> None:
    encoder = build_encoder(SMALL)
    follower = momentum_copy(encoder)
    for name, value in encoder.state_dict().items():
        assert torch.equal(follower.state_dict()[name], value)
    own = {parameter.data_ptr() for parameter in encoder.parameters()}
    assert not own & {parameter.data_ptr() for parameter in follower.parameters()}
    assert all(parameter.requires_grad for parameter in encoder.parameters())
    assert not any(parameter.requires_grad for parameter in follower.parameters())
    assert not follower(torch.randn(4, 3, 16, 16)).requires_grad


@given(momentum=st.floats(0, 1), on_device=st.booleans())
@settings(max_examples=30, deadline=None)
def test_momentum_update_moves_parameters_and_leaves_buffers(
    momentum: float, on_device: bool
) -> None:
    """By a number, or by one on the device, which is taken in float32."""
    leader = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).double()
    follower = momentum_copy(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).double())
    follower(torch.randn(8, 3, dtype=torch.float64))  # statistics of its own
    before, of_leader = copy.deepcopy(follower), copy.deepcopy(leader)
    number = torch.tensor(momentum, dtype=torch.float64)
    momentum_update(follower, leader, number if on_device else momentum)
    tolerance = 1e-6 if on_device else 1e-12
    for new, old, lead in zip(
        follower.parameters(), before.parameters(), leader.parameters(), strict=True
    ):
        expected = momentum * old + (1 - momentum) * lead.detach()
        assert_close(new, expected, rtol=tolerance, atol=tolerance)
        assert not new.requires_grad
    for buffer, kept in zip(follower.buffers(), before.buffers(), strict=True):
        assert torch.equal(buffer, kept)
    for name, value in leader.state_dict().items():
        assert torch.equal(value, of_leader.state_dict()[name])


def test_momentum_zero_copies_and_one_stays() -> None:
    leader, follower = nn.Linear(3, 4), nn.Linear(3, 4).requires_grad_(False)
    stays = follower.weight.clone()
    momentum_update(follower, leader, 1.0)
    assert torch.equal(follower.weight, stays)
    momentum_update(follower, leader, 0.0)
    assert torch.equal(follower.weight, leader.weight)
