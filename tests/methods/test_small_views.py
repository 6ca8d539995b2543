"""Small views in XMoCo and MoCo v2+: not in the paper, and off unless asked for."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.testing import assert_close
from toys import MOCO, XMOCO, built, six_views, train, values, views_for

from xmoco.config import Config
from xmoco.config.methods import MoCoV2PlusConfig, XMoCoConfig
from xmoco.errors import UserError
from xmoco.methods import build_method
from xmoco.methods.xmoco import XMoCo
from xmoco.settings import load_config

SMALL = {"local_crops": 4, "local_size": 96}
KINDS: dict[str, XMoCoConfig | MoCoV2PlusConfig] = {
    "xmoco": XMOCO.model_copy(update=SMALL),
    "weak keys": XMOCO.model_copy(update=SMALL | {"weak_keys": True}),
    "keys teach": XMOCO.model_copy(update=SMALL | {"teacher": "keys", "consistency_weight": 0.5}),
    "mocov2plus": MOCO.model_copy(update=SMALL),
}
each_kind = pytest.mark.parametrize("kind", KINDS)


def xmoco(kind: str) -> XMoCo:
    method = built(KINDS[kind])
    assert isinstance(method, XMoCo)
    return method


def views_of(method: XMoCo, step: int) -> list[Tensor]:
    """Weak ones come between the full and the small ones."""
    full, small = six_views(step)[:2], six_views(step)[2:]
    return [*full, *(six_views(step + 50)[:2] if len(method.views) == 3 else []), *small]


def cross_entropy(target: Tensor, logits: Tensor) -> Tensor:
    return -(target * logits.log_softmax(dim=1)).sum(dim=1).mean()


@each_kind
def test_small_views_learn_from_both_sides(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    method = xmoco(kind)
    for step in range(4):  # banks and history are full then
        method(views_of(method, step), values(method))
    method.eval()
    queries, keys = method.queries_and_keys_of(views_of(method, 9))
    assert (len(queries), len(keys)) == (6, 2)
    learnt = [query.detach().requires_grad_() for query in queries]
    monkeypatch.setattr(method, "queries_and_keys_of", lambda _: (learnt, keys))
    found = method([], values(method))
    found.loss.backward()

    settings, tau = KINDS[kind], KINDS[kind].temperature
    B_s, B_t = (bank.double() for bank in method.banks.rows())
    k_s, k_t = (key.double() for key in keys)
    told = [query.detach().double().requires_grad_() for query in learnt]

    def logits(q: Tensor, k: Tensor, bank: Tensor) -> Tensor:
        return torch.cat([(q * k).sum(dim=1, keepdim=True), q @ bank.T], dim=1) / tau

    def similar(q_s: Tensor, q_t: Tensor) -> tuple[Tensor, Tensor]:
        """To target keys, and to source keys."""
        return logits(q_s, k_t, B_t), logits(q_t, k_s, B_s)

    by_keys = settings.teacher == "keys"
    sides = (k_s, k_t) if by_keys else (told[0].detach(), told[1].detach())
    T_s, T_t = (S.softmax(dim=1) for S in similar(*sides))
    teachers = method.loss.teachers(*method.loss.similarities(*learnt[:2], *keys))
    Y_s, Y_t = method.loss.labels(*teachers)  # tested by themselves
    if Y_s is None or Y_t is None:
        Y_s = Y_t = F.one_hot(torch.zeros(len(k_s), dtype=torch.long), T_s.shape[1])
    w = settings.consistency_weight
    losses, parts = [], []
    for q_s, q_t in [(told[0], told[1]), *((q, q) for q in told[2:])]:
        S_s, S_t = similar(q_s, q_t)
        labels = [cross_entropy(Y_s.double(), S_t), cross_entropy(Y_t.double(), S_s)]
        agreement = [cross_entropy(T_s, S_t), cross_entropy(T_t, S_s)]
        losses.append(sum(labels) + w * sum(agreement))
        parts.append(torch.stack([*labels, *agreement] if w else labels).mean())
    expected = torch.stack(losses).mean()
    expected.backward()
    assert_close(found.loss.double(), expected, rtol=1e-5, atol=1e-5)
    small = torch.stack(parts[1:]).mean()  # of every cross entropy, comparable with chance
    assert_close(found.terms["small_views"].double(), small, rtol=1e-5, atol=1e-5)
    for ours, theirs in zip(learnt, told, strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        assert_close(ours.grad.double(), theirs.grad, rtol=1e-4, atol=1e-6)


@each_kind
def test_keys_are_of_full_views_only(kind: str) -> None:
    method, same = xmoco(kind), xmoco(kind)
    views = views_of(method, 0)
    _, keys = method.queries_and_keys_of(views)
    of_keys = views[2:4] if method.views[1].names[0].startswith("weak") else views[:2]
    expected = same.run.encode_keys(same.momentum_encoder, of_keys)
    assert_close(torch.stack(keys), torch.stack(expected))
    met = method.meeting(views)
    assert met is not None
    assert (len(met.queries), len(met.keys)) == (2, 2)
    assert met.queries[0].shape == met.keys[0].shape


@pytest.mark.parametrize("kind", ["xmoco", "mocov2plus"])
def test_thirty_steps_lower_the_loss(kind: str) -> None:
    losses = train(xmoco(kind), range(30))
    assert sum(losses[-6:]) < sum(losses[4:10])  # the banks are full by then


def groups(**settings: Any) -> list[tuple[int, int]]:
    method = XMoCoConfig(**settings)
    return [(group.count, group.input.size) for group in XMoCo.view_groups(Config(method=method))]


def test_small_views_are_a_group_after_all_others() -> None:
    assert groups() == [(2, 224)]
    assert groups(local_crops=3, local_size=80) == [(2, 224), (3, 80)]
    assert groups(local_crops=3, weak_keys=True) == [(2, 224), (2, 224), (3, 112)]
    config = Config(method=XMoCoConfig(local_crops=1, local_scale=(0.1, 0.3)))
    assert XMoCo.view_groups(config)[-1].augmentation.crop_scale == (0.1, 0.3)


def test_who_has_them_is_called_so() -> None:
    assert XMoCoConfig(local_crops=1).subject == "xmoco+"
    assert built(KINDS["xmoco"]).title == "XMoCo+"
    assert XMoCoConfig().subject == "xmoco"
    assert KINDS["mocov2plus"].subject == "mocov2plus+small views"
    assert built(KINDS["mocov2plus"]).title == "MoCo v2+ with small views"
    assert MoCoV2PlusConfig().subject == "mocov2plus"


def test_small_views_that_a_backbone_does_not_take_are_refused_before_a_run() -> None:
    changes = ["backbone=timm:test_vit", "size=32", "stem=imagenet", "local_crops=2"]
    build_method(load_config("demo", [*changes, "local_size=16"]))
    with pytest.raises(UserError, match="20 px"):
        build_method(load_config("demo", [*changes, "local_size=20"]))


def test_small_views_that_are_large_are_warned_of() -> None:
    method = built(XMOCO.model_copy(update={"local_crops": 1, "local_size": 224}))
    assert any("no smaller than the full ones" in line for line in method.warnings(1000))
    assert built(KINDS["weak keys"]).warnings(1000) == []


def test_without_them_nothing_changes() -> None:
    one, other = built(XMOCO), built(XMOCO.model_copy(update={"local_size": 32}))
    views = views_for(one, 0)
    assert torch.equal(one(views, values(one)).loss, other(views, values(other)).loss)
