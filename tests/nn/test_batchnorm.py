"""Split batch norm against ordinary layers, one group at a time."""

import copy

import pytest
import torch
import torchvision.models
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.testing import assert_close

from xmoco.nn.batchnorm import (
    SplitBatchNorm1d,
    SplitBatchNorm2d,
    keys_in_split_groups,
    split_statistics,
    stack_views,
)

Norm = nn.BatchNorm1d | nn.BatchNorm2d


def ordinary_and_split(two_dimensional: bool, channels: int, groups: int) -> tuple[Norm, Norm]:
    """The same random weights and statistics in both."""
    ordinary: Norm
    split: Norm
    if two_dimensional:
        ordinary, split = nn.BatchNorm2d(channels), SplitBatchNorm2d(channels, groups)
    else:
        ordinary, split = nn.BatchNorm1d(channels), SplitBatchNorm1d(channels, groups)
    with torch.no_grad():
        for value in (*ordinary.parameters(), ordinary.running_mean, ordinary.running_var):
            assert value is not None
            value.copy_(torch.rand(channels) + 0.5)
    split.load_state_dict(ordinary.state_dict())
    return ordinary.double(), split.double()


def images_like(samples: int, channels: int, two_dimensional: bool) -> Tensor:
    shape = (samples, channels, 3, 2) if two_dimensional else (samples, channels)
    return (
        3 * torch.randn(shape) + torch.arange(samples).view(-1, *[1] * (len(shape) - 1))
    ).double()


@given(
    groups=st.integers(1, 5),
    per_group=st.integers(2, 4),
    channels=st.integers(1, 5),
    two_dimensional=st.booleans(),
    channels_last=st.booleans(),
)
@settings(max_examples=40, deadline=None)
def test_each_group_is_normalised_by_itself(
    groups: int, per_group: int, channels: int, two_dimensional: bool, channels_last: bool
) -> None:
    """Outputs, gradients and statistics: those of an ordinary layer on samples i, i+g, i+2g …"""
    ordinary, split = ordinary_and_split(two_dimensional, channels, groups)
    x = images_like(groups * per_group, channels, two_dimensional)
    if two_dimensional and channels_last:
        x = x.contiguous(memory_format=torch.channels_last)
    before = {name: value.clone() for name, value in ordinary.state_dict().items()}
    weights = torch.randn_like(x)
    expected, means, variances = torch.empty_like(x), [], []
    manual = x.clone().requires_grad_()
    for group in range(groups):
        ordinary.load_state_dict(before)
        part = ordinary(manual[group::groups])
        (part * weights[group::groups]).sum().backward()
        expected[group::groups] = part.detach()
        statistics = ordinary.state_dict()
        means.append(statistics["running_mean"].clone())
        variances.append(statistics["running_var"].clone())

    query = x.clone().requires_grad_()
    found = split(query)
    (found * weights).sum().backward()
    assert_close(found, expected)
    assert_close(query.grad, manual.grad)
    assert_close(split.weight.grad, ordinary.weight.grad)
    assert_close(split.bias.grad, ordinary.bias.grad)
    assert_close(split.running_mean, torch.stack(means).mean(dim=0))
    assert_close(split.running_var, torch.stack(variances).mean(dim=0))
    assert split.num_batches_tracked == 1


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("two_dimensional", [True, False])
def test_stacked_views_come_one_after_the_other(groups: int, two_dimensional: bool) -> None:
    """Outputs, gradients and statistics: those of two passes with one view each."""
    _, one = ordinary_and_split(two_dimensional, 4, groups)
    stacked = copy.deepcopy(one)
    assert isinstance(stacked, SplitBatchNorm1d | SplitBatchNorm2d)
    stacked.views = 2
    views = [images_like(6, 4, two_dimensional), images_like(6, 4, two_dimensional) - 2]
    weights = torch.randn_like(torch.cat(views))
    expected = torch.cat([one(view) for view in views])
    (expected * weights).sum().backward()
    found = stacked(torch.cat(views))
    (found * weights).sum().backward()
    assert_close(found, expected)
    assert_close(stacked.weight.grad, one.weight.grad)
    assert_close(stacked.bias.grad, one.bias.grad)
    for mine, theirs in zip(stacked.buffers(), one.buffers(), strict=True):
        assert_close(mine, theirs)
    assert stacked.num_batches_tracked == 2


@pytest.mark.parametrize(
    ("shape", "groups", "views"), [((6, 3), 4, 1), ((6, 3, 2, 2), 2, 2), ((4, 3), 2, 2)]
)
def test_groups_must_be_equal_and_of_two_values(
    shape: tuple[int, ...], groups: int, views: int
) -> None:
    kind = SplitBatchNorm1d if len(shape) == 2 else SplitBatchNorm2d
    norm = kind(3, groups)
    norm.views = views
    with pytest.raises(ValueError, match=rf"{views} × {groups} equal groups .* \(6, 3|\(4, 3\)"):
        norm(torch.randn(shape))


@pytest.mark.parametrize("two_dimensional", [True, False])
def test_evaluation_is_ordinary_batch_norm(two_dimensional: bool) -> None:
    ordinary, split = ordinary_and_split(two_dimensional, 4, 3)
    x = images_like(7, 4, two_dimensional)  # no multiple of the groups
    assert torch.equal(split.eval()(x), ordinary.eval()(x))
    assert split.num_batches_tracked == 0


def test_a_network_keeps_its_weights_and_behaviour_in_evaluation() -> None:
    model = torchvision.models.resnet18(num_classes=4).eval()
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        expected = model(images)
        split_statistics(model, 4)
        assert torch.equal(model(images), expected)
    kinds = {type(module) for module in model.modules()}
    assert SplitBatchNorm2d in kinds
    assert nn.BatchNorm2d not in kinds


def test_trained_weights_load_into_the_ordinary_network_and_back() -> None:
    torch.manual_seed(0)
    split = split_statistics(torchvision.models.resnet18(num_classes=4), 2)
    split(torch.randn(4, 3, 32, 32))  # moves the running statistics
    ordinary = torchvision.models.resnet18(num_classes=4)
    ordinary.load_state_dict(split.state_dict())
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(ordinary.eval()(images), split.eval()(images))
    split.load_state_dict(ordinary.state_dict())


def test_options_of_the_layers_survive() -> None:
    norm = nn.BatchNorm1d(3, eps=0.5, momentum=0.7)
    network = split_statistics(nn.Sequential(norm), 4)
    stack_views(network, views=2)
    (split,) = network.children()
    assert isinstance(split, SplitBatchNorm1d)
    assert (split.eps, split.momentum, split.groups, split.views) == (0.5, 0.7, 4, 2)


class WitnessOfItsGroup(nn.Module):
    """Tells an image by its first column, and by the second the sum over its group."""

    def __init__(self, groups: int) -> None:
        super().__init__()
        self.groups = groups

    def forward(self, images: Tensor) -> Tensor:
        told = torch.empty(len(images), 2, dtype=torch.long)
        for group in range(self.groups):
            members = images[group :: self.groups, 0]
            told[group :: self.groups, 0] = members
            told[group :: self.groups, 1] = members.sum()
        return told


@pytest.mark.parametrize(("samples", "groups"), [(16, 4), (6, 3), (6, 2), (32, 4), (8, 8)])
def test_keys_keep_their_order_and_change_their_company(samples: int, groups: int) -> None:
    images = 2 ** torch.arange(samples)[:, None]  # a sum of powers of two names its members
    encoder = WitnessOfItsGroup(groups)
    queries, keys = encoder(images), keys_in_split_groups(encoder, images, groups)
    assert torch.equal(keys[:, 0], images[:, 0])
    for image, query_company, key_company in zip(
        images[:, 0].tolist(), queries[:, 1].tolist(), keys[:, 1].tolist(), strict=True
    ):
        common = query_company & key_company
        assert common & image
        # No more in common than it takes: a group's members are spread evenly over the new ones.
        assert common.bit_count() <= -(-samples // groups**2)
        assert key_company.bit_count() == samples // groups


def test_keys_of_stacked_views_are_rearranged_view_by_view() -> None:
    encoder = split_statistics(nn.Sequential(nn.BatchNorm1d(3)), 4).double()
    stack_views(encoder, views=2)
    alone = split_statistics(nn.Sequential(nn.BatchNorm1d(3)), 4).double()
    views = [torch.randn(8, 3, dtype=torch.float64) + shift for shift in (0, 5)]
    expected = [keys_in_split_groups(alone, view, 4) for view in views]
    found = keys_in_split_groups(encoder, torch.cat(views), 4, views=2)
    assert_close(found, torch.cat(expected))


def test_keys_are_encoded_in_the_memory_format_of_the_images() -> None:
    formats = []

    class NotesFormat(nn.Module):
        def forward(self, images: Tensor) -> Tensor:
            formats.append(images.is_contiguous(memory_format=torch.channels_last))
            return images.mean(dim=(2, 3))

    images = torch.randn(8, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    keys_in_split_groups(NotesFormat(), images, 4)
    assert formats == [True]


def test_without_batch_norm_the_company_does_not_matter() -> None:
    encoder = nn.Sequential(nn.Flatten(), nn.Linear(12, 5)).double()
    images = torch.randn(8, 3, 2, 2, dtype=torch.float64)
    assert_close(keys_in_split_groups(encoder, images, 4), encoder(images))


def test_with_split_norm_a_key_is_normalised_among_neighbours() -> None:
    encoder = split_statistics(nn.Sequential(nn.BatchNorm1d(3)), 4).double()
    images = torch.randn(8, 3, dtype=torch.float64)
    plain = nn.BatchNorm1d(3).double()
    expected = torch.cat([plain(images[first : first + 2]) for first in range(0, 8, 2)])
    assert_close(keys_in_split_groups(encoder, images, 4), expected)
