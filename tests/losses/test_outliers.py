"""UOTA's weights of views against the published algorithm, view by view."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from xmoco.losses.outliers import view_weights
from xmoco.losses.swav import codes, swapped_prediction


def by_hand(views: list[Tensor], tau: float) -> list[Tensor]:
    """Equations 9 to 11 of the paper, and their loop."""
    differences = []
    for view in views:
        differences += [z - (views[0][n] + views[1][n]) / 2 for n, z in enumerate(view)]
    size = differences[0].shape[0]
    sigma = sum(torch.outer(d, d) for d in differences) / len(differences)
    sigma = sigma + 1e-8 * torch.eye(size, dtype=torch.float64)
    uncertainty = [d @ torch.linalg.solve(sigma, d) / tau for d in differences]
    powers = torch.stack([(-u).exp() for u in uncertainty])
    weights = len(differences) * powers / powers.sum()
    return list(weights.split(len(views[0])))


def random_views(count: int, images: int, size: int, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shape = (count, images, size)
    return list(F.normalize(torch.randn(shape, dtype=torch.float64, generator=generator), dim=2))


@given(
    count=st.integers(2, 5),
    images=st.integers(5, 9),
    tau=st.floats(1, 400),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=25, deadline=None)
def test_weights_are_the_published_ones(count: int, images: int, tau: float, seed: int) -> None:
    views = random_views(count, images, 4, seed)
    found = view_weights(views, tau)
    assert_close(found, by_hand(views, tau), rtol=1e-6, atol=1e-9)
    assert torch.stack(found).mean().item() == pytest.approx(1)


def test_a_view_unlike_the_others_counts_least_and_has_no_gradient() -> None:
    image = random_views(1, 12, 6)[0]
    noise = random_views(4, 12, 6, seed=1)
    views = [F.normalize(image + 0.1 * other, dim=1).requires_grad_() for other in noise]
    outlier = views[3].detach().clone()
    outlier[5] = -outlier[5]
    weights = torch.stack(view_weights([*views[:3], outlier.requires_grad_()], 10.0))
    assert weights.argmin() == 3 * 12 + 5
    assert not weights.requires_grad


def test_features_in_float32_are_enough_where_images_are_few() -> None:
    """The covariance then has no inverse but for what is added to it."""
    views = random_views(3, 4, 32)
    found = view_weights([view.float() for view in views], 350.0)
    assert_close([weights.double() for weights in found], by_hand(views, 350.0), rtol=1e-3, atol=0)


def test_weighted_codes_are_told_by_the_weighted_view() -> None:
    """Equation 12: the cross entropy of every image times the weight of the view that tells."""
    scores = [view @ torch.eye(5, 4, dtype=torch.float64).T for view in random_views(3, 6, 4)]
    targets = [codes(score, epsilon=0.2, iterations=3) for score in scores[:2]]
    weights = [torch.rand(6, dtype=torch.float64) for _ in scores]
    loss = swapped_prediction(scores, targets, 0.1, weights)
    expected = []
    for full, q in enumerate(targets):
        for view, score in enumerate(scores):
            if view != full:
                rows = -(q * (score / 0.1).log_softmax(dim=1)).sum(dim=1)
                expected.append((rows * weights[view]).mean())
    assert_close(loss, torch.stack(expected).mean())
