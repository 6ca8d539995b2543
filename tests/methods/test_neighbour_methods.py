"""MSF and MNN as wholes against their formulas; their losses alone are in
tests/losses/test_neighbours.py."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close
from toys import BATCH, METHODS, PLAIN, built, train, two_views, values

from xmoco.config import Config, TrainConfig
from xmoco.config.methods import MNNConfig, MSFConfig
from xmoco.errors import UserError
from xmoco.methods import build_method
from xmoco.methods.base import NeighbourMethod
from xmoco.methods.mnn import MNN
from xmoco.methods.msf import MSF
from xmoco.settings import load_config


def method(name: str) -> NeighbourMethod:
    found = built(METHODS[name], PLAIN)
    assert isinstance(found, NeighbourMethod)
    train(found, range(2))  # the bank is full, and g is no longer f
    found.zero_grad()
    return found


def distances(p: Tensor, u: Tensor) -> Tensor:
    return (F.normalize(p, dim=-1) - F.normalize(u, dim=-1)).square().sum(dim=-1)


def neighbours(k: Tensor, bank: Tensor, count: int = 3) -> Tensor:
    return bank[torch.cdist(F.normalize(k), F.normalize(bank)).argsort(dim=1)[:, :count]]


def msf(parts: list[nn.Module], views: list[Tensor], bank: Tensor, _: float) -> Tensor:
    f, g, predictor = parts
    k = F.normalize(g(views[1])).detach()
    now = torch.cat([bank[:8], k])  # of 32 rows in 24 slots the last 8 are in the first
    return distances(predictor(f(views[0]))[:, None], neighbours(k, now)).mean()


def mnn(parts: list[nn.Module], views: list[Tensor], bank: Tensor, share: float) -> Tensor:
    f, g, predictor = parts
    loss = torch.zeros(())
    for one, other in ((0, 1), (1, 0)):
        p, k = predictor(f(views[one])), g(views[other]).detach()
        mixed = share * neighbours(k, bank) + (1 - share) * k[:, None]
        loss = loss + distances(p, k).mean() + distances(p[:, None], mixed).mean()
    return loss / 2


@pytest.mark.parametrize(("name", "formula"), [("msf", msf), ("mnn", mnn)])
def test_a_step_is_the_formula(name: str, formula: type) -> None:
    """Its loss, and the gradients of all that learns."""
    ours, views = method(name), two_views(5)
    at = values(ours, 5)
    parts = [copy.deepcopy(part) for part in (ours.encoder, ours.momentum_encoder, ours.predictor)]
    share = float(at.get("share", 0.0))
    expected = formula(parts, views, ours.bank.keys.clone(), share)
    loss = ours(views, at).loss
    assert_close(loss, expected, rtol=1e-4, atol=1e-5)
    loss.backward()
    expected.backward()
    for mine, theirs in ((ours.encoder, parts[0]), (ours.predictor, parts[2])):
        for own, by_hand in zip(mine.parameters(), theirs.parameters(), strict=True):
            assert_close(own.grad, by_hand.grad, rtol=1e-3, atol=1e-4)


def test_msfs_bank_holds_unit_keys_of_the_weak_view_before_the_search() -> None:
    ours, views = method("msf"), two_views(5)
    keys = F.normalize(copy.deepcopy(ours.momentum_encoder)(views[1]))
    ours(views, values(ours, 5))
    newest = (torch.arange(2 * BATCH, 3 * BATCH)) % 24
    assert_close(ours.bank.keys[newest], keys.detach())
    # With one neighbour, which is the key itself, it is BYOL in one direction.
    single = built(MSFConfig(bank_length=24, predictor_hidden=24, neighbours=1), PLAIN)
    assert isinstance(single, MSF)
    parts = copy.deepcopy(single)
    expected = distances(parts.predictor(parts.encoder(views[0])), parts.momentum_encoder(views[1]))
    assert_close(single(views, values(single)).loss, expected.mean())


def test_mnns_bank_holds_raw_keys_of_the_weak_view_after_the_search() -> None:
    ours, views = method("mnn"), two_views(5)
    keys = copy.deepcopy(ours.momentum_encoder)(views[1]).detach()
    ours(views, values(ours, 5))
    assert_close(ours.bank.keys[torch.arange(2 * BATCH, 3 * BATCH) % 24], keys)


def test_mnns_share_is_drawn_at_every_step_and_the_same_everywhere() -> None:
    one, again = (built(METHODS["mnn"], seed=seed) for seed in (0, 1))
    shares = [float(values(one, step)["share"]) for step in range(40)]
    assert shares == [float(values(again, step)["share"]) for step in range(40)]
    assert len(set(shares)) == 40
    assert min(shares) < 0.2
    assert max(shares) > 0.8
    other = build_method(Config(model=PLAIN, method=MNNConfig(), train=TrainConfig(seed=1)))
    assert values(other)["share"] != shares[0]


@pytest.mark.parametrize(("settings", "kind"), [(MSFConfig, MSF), (MNNConfig, MNN)])
def test_the_second_view_may_be_weak(settings: type, kind: type[NeighbourMethod]) -> None:
    config = Config(method=settings())
    strong, weak = kind.view_groups(config)
    assert (strong.count, weak.count) == (1, 1)
    assert (strong.augmentation, weak.augmentation) == (
        config.views,
        config.weak_views.beside(config.views),
    )
    (alike,) = kind.view_groups(Config(method=settings(weak_keys=False)))
    assert (alike.count, alike.augmentation) == (2, config.views)


def test_a_bank_that_cannot_hold_a_batch_is_told() -> None:
    config = Config(model=PLAIN, method=MSFConfig(bank_length=24), train=TrainConfig(batch=24))
    assert build_method(config).warnings(images=24) == []
    (warning,) = build_method(config).warnings(images=23)
    assert "lower bank_length" in warning
    short = config.model_copy(update={"train": TrainConfig(batch=32)})
    (warning,) = build_method(short).warnings(images=24)
    assert "raise bank_length" in warning
    parts = config.model_copy(update={"train": TrainConfig(batch=32, accumulate=2)})
    assert build_method(parts).warnings(images=24) == []  # 16 keys enter at once


def test_neighbours_must_be_in_the_bank() -> None:
    with pytest.raises(UserError, match=r"method.neighbours = 9: must be at most bank_length"):
        load_config("demo", ["method=msf", "bank_length=8", "neighbours=9"])
