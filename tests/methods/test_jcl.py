"""JCL as a whole: which views make queries and which keys, the bank of means, and λ."""

import copy

import pytest
import torch
from torch import nn
from torch.testing import assert_close
from toys import BATCH, EPOCH, EPOCHS, PLAIN, built, two_views, values

from xmoco.config import Config
from xmoco.config.methods import JCLConfig
from xmoco.losses.jcl import gaussian_contrast
from xmoco.methods.jcl import JCL

TINY = JCLConfig(bank_length=24, key_momentum=0.9, key_views=3, spread_weight=0.8)
HALF_WAY = EPOCH * EPOCHS // 2


def jcl(settings: JCLConfig = TINY) -> JCL:
    method = built(settings, PLAIN)
    assert isinstance(method, JCL)
    nn.init.normal_(method.momentum_encoder.head[-1].weight)  # g is no longer f
    return method


@pytest.mark.parametrize("symmetric", [False, True])
def test_a_step_is_the_loss_of_every_query_and_means_enter_the_bank(symmetric: bool) -> None:
    method = jcl(TINY.model_copy(update={"symmetric": symmetric}))
    sides = 2 if symmetric else 1
    views = two_views(0, sides + 3)
    f, g = copy.deepcopy(method.encoder), copy.deepcopy(method.momentum_encoder)
    bank = method.bank.keys.clone()
    loss = method(views, values(method, HALF_WAY)).loss
    loss.backward()
    with torch.no_grad():
        keys = [g(view) for view in views[sides:]]
    expected = torch.zeros(())
    for view in views[:sides]:
        P, penalty = gaussian_contrast(f(view), keys, bank, 0.2, 0.4)
        expected = expected + P.infonce() + penalty
    assert_close(loss, expected)
    expected.backward()
    for mine, theirs in zip(method.encoder.parameters(), f.parameters(), strict=True):
        assert_close(mine.grad, theirs.grad, rtol=1e-3, atol=1e-5)
    means = torch.stack(keys).mean(dim=0)
    assert_close(method.bank.keys[:BATCH], means)
    assert torch.equal(method.bank.keys[BATCH:], bank[BATCH:])
    assert (means.norm(dim=1) < 0.999).all()  # as published, they are not made unit length


def test_views_of_queries_and_keys() -> None:
    def names(**options: bool) -> list[tuple[str, ...]]:
        config = Config(method=TINY.model_copy(update=options))
        groups = JCL.view_groups(config)
        assert groups[-1].augmentation == (
            config.weak_views.beside(config.views) if options.get("weak_keys") else config.views
        )
        return [group.names for group in groups]

    keys = ("key view 1", "key view 2", "key view 3")
    assert names() == [("query view", *keys)]
    assert names(symmetric=True) == [("source view", "target view", *keys)]
    assert names(weak_keys=True) == [("query view",), tuple(f"weak {name}" for name in keys)]


def test_the_weight_of_the_spread_rises_to_the_end() -> None:
    steps = (0, HALF_WAY, EPOCH * EPOCHS)
    weights = [values(jcl(), step)["spread_weight"] for step in steps]
    assert weights == pytest.approx([0, 0.4, 0.8])
