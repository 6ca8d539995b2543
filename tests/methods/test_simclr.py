"""SimCLR as a whole against its formula; its loss alone is in tests/losses/test_nt_xent.py."""

import copy
import math

import torch
from torch.testing import assert_close
from toys import BATCH, PLAIN, built, two_views, values

from xmoco.config import Config, TrainConfig
from xmoco.config.methods import SimCLRConfig
from xmoco.methods import build_method


def test_a_step_is_nt_xent_of_both_views_features() -> None:
    """And so are its gradients, through both."""
    method = built(SimCLRConfig(temperature=0.3), PLAIN)
    encoder, views = copy.deepcopy(method.encoder), two_views(0)
    loss = method(views, values(method)).loss
    z = torch.cat([encoder(view) for view in views]).double()
    similarities = z @ z.T / 0.3
    losses = []
    for view in range(2 * BATCH):
        others = [other for other in range(2 * BATCH) if other != view]
        partner = similarities[view, (view + BATCH) % (2 * BATCH)]
        losses.append(similarities[view, others].logsumexp(dim=0) - partner)
    expected = torch.stack(losses).mean()
    assert_close(loss.double(), expected, rtol=1e-5, atol=1e-5)
    loss.backward()
    expected.backward()
    for found, by_hand in zip(method.encoder.parameters(), encoder.parameters(), strict=True):
        assert_close(found.grad, by_hand.grad, rtol=1e-3, atol=1e-5)


def test_chance_is_a_guess_among_the_other_views_of_a_part() -> None:
    config = Config(model=PLAIN, method=SimCLRConfig(), train=TrainConfig(batch=64, accumulate=4))
    assert build_method(config).reference_levels() == {"chance": math.log(2 * 16 - 1)}
