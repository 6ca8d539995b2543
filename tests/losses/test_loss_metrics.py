"""Metrics at the points where their values are known."""

import pytest
import torch
import torch.nn.functional as F

from xmoco.losses.metrics import feature_metrics, label_metrics, similarity_metrics


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_features_all_over_the_sphere_and_collapsed_ones(precision: torch.dtype) -> None:
    axes = torch.cat([torch.eye(6), -torch.eye(6)]).to(precision)
    spread = feature_metrics(axes)
    assert spread["feature_spread"].item() == pytest.approx(1)
    assert spread["effective_rank"].item() == pytest.approx(6, rel=1e-5)
    collapsed = feature_metrics(axes[:1].expand(12, 6))
    assert collapsed["feature_spread"].item() == 0
    assert collapsed["effective_rank"].item() == 1


def test_effective_rank_of_features_in_a_plane() -> None:
    angles = torch.arange(8) * (torch.pi / 4)
    plane = F.pad(torch.stack([angles.cos(), angles.sin()], dim=1), (0, 10))
    assert feature_metrics(plane)["effective_rank"].item() == pytest.approx(2, rel=1e-5)


def test_gap_is_zero_for_equal_sides_and_one_for_disjoint_ones() -> None:
    left = torch.tensor([[1.0, 0.0, 0.0]]).log()
    right = torch.tensor([[0.0, 0.5, 0.5]]).log()
    assert similarity_metrics(left, left)["consistency_gap"] == 0
    assert similarity_metrics(left, right)["consistency_gap"] == 1
    assert similarity_metrics(left, right)["positive_probability"] == 0.5


def test_label_entropy_of_one_hot_and_uniform_labels() -> None:
    one_hot, uniform = torch.eye(4)[:2], torch.full((2, 4), 0.25)
    assert label_metrics(one_hot, one_hot)["label_entropy"] == 0
    entropy = label_metrics(one_hot, uniform)["label_entropy"]
    assert entropy.item() == pytest.approx(torch.tensor(4.0).log().item() / 2)
