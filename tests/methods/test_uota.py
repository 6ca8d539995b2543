"""SwAV with UOTA: from half way on views count unequally, and the rate is another."""

from typing import Any

import pytest
import torch
from torch.testing import assert_close
from toys import (
    EPOCH,
    EPOCHS,
    PLAIN,
    assert_same_state,
    built,
    six_views,
    train,
    two_views,
    values,
)

from xmoco.config.methods import SwAVConfig, UOTAConfig
from xmoco.losses.outliers import view_weights
from xmoco.losses.swav import codes, swapped_prediction
from xmoco.methods.swav import SwAV
from xmoco.methods.uota import UOTA
from xmoco.schedules import Clock

HALF_WAY, STEPS = EPOCH * EPOCHS // 2, EPOCH * EPOCHS
TINY: dict[str, Any] = {"prototypes": 7, "queue_length": 24, "queue_from_epoch": 0.0}


def uota(**options: Any) -> UOTA:
    method = built(UOTAConfig(**TINY, **options), PLAIN)
    assert isinstance(method, UOTA)
    return method


def test_until_half_way_it_is_swav_to_the_bit() -> None:
    method, swav = uota(), built(SwAVConfig(**TINY), PLAIN)
    assert train(method, range(4)) == train(swav, range(4))
    assert_same_state(method, swav.state_dict())
    views = six_views(9)
    for step, same in ((HALF_WAY - 1, True), (HALF_WAY, False)):
        losses = [model(views, values(model, step)).loss for model in (method, swav)]
        assert torch.isclose(*losses, rtol=1e-6) == same


@pytest.mark.parametrize("views", [two_views(0), six_views(0)], ids=["two views", "six"])
def test_then_the_one_that_tells_is_weighted(views: Any) -> None:
    method = uota(outlier_temperature=3.0, local_crops=4 if len(views) == 6 else 0)
    method.eval()  # no queue moves on
    loss = method(views, values(method, HALF_WAY)).loss
    assert isinstance(method, SwAV)
    z = [method.encoder(view) for view in views]
    scores = [method.scores(features) for features in z]
    targets = [codes(score, epsilon=0.05, iterations=3) for score in scores[:2]]
    weights = view_weights(z, 3.0)
    assert torch.stack(weights).std() > 0.01
    assert_close(loss, swapped_prediction(scores, targets, 0.1, weights))


def test_the_rate_is_doubled_half_way() -> None:
    method = uota()
    factors = [method.rate_factor(Clock(step, STEPS, EPOCH)) for step in range(STEPS)]
    assert factors == [1.0] * HALF_WAY + [2.0] * HALF_WAY
    other = uota(outliers_from=0.25, outliers_rate=1.0)
    assert {other.rate_factor(Clock(step, STEPS, EPOCH)) for step in range(STEPS)} == {1.0}
    begun = [values(other, step)["outliers_count"] for step in (STEPS // 4 - 1, STEPS // 4)]
    assert begun == [0, 1]
