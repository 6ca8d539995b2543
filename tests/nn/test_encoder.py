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


@given(momentum=st.floats(0, 1))
@settings(max_examples=20, deadline=None)
def test_momentum_update_moves_parameters_and_leaves_buffers(momentum: float) -> None:
    leader = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).double()
    follower = momentum_copy(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).double())
    follower(torch.randn(8, 3, dtype=torch.float64))  # statistics of its own
    before, of_leader = copy.deepcopy(follower), copy.deepcopy(leader)
    momentum_update(follower, leader, momentum)
    for new, old, lead in zip(
        follower.parameters(), before.parameters(), leader.parameters(), strict=True
    ):
        assert_close(new, momentum * old + (1 - momentum) * lead.detach())
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
