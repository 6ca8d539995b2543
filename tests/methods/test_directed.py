"""ReSSL, SCE, CO2, align/uniform as a whole: one direction or both, whose views, whose banks."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close
from toys import PLAIN, built, two_views, values

from xmoco.config import Config
from xmoco.config.methods import AlignUniformConfig, CO2Config, ReSSLConfig, SCEConfig
from xmoco.config.shared import DirectedConfig
from xmoco.losses.co2 import disagreement
from xmoco.losses.contrast import contrast
from xmoco.losses.ressl import relational_loss
from xmoco.losses.sce import soft_contrast
from xmoco.losses.uniformity import uniformity
from xmoco.methods.base import DirectedMethod
from xmoco.methods.ressl import ReSSL

SMALL = {"bank_length": 24, "key_momentum": 0.9}


def co2_loss(q: Tensor, k: Tensor, bank: Tensor) -> Tensor:
    P = contrast(q, k, bank, 0.2)
    return P.infonce() + 2.0 * disagreement(P, 0.1)


KINDS: dict[str, tuple[DirectedConfig, Callable[[Tensor, Tensor, Tensor], Tensor]]] = {
    "ressl": (
        ReSSLConfig(**SMALL, temperature=0.2, key_temperature=0.07),
        lambda q, k, bank: relational_loss(q, k, bank, temperature=0.2, key_temperature=0.07),
    ),
    "sce": (
        SCEConfig(**SMALL, temperature=0.3, key_temperature=0.06, positive_share=0.4),
        lambda q, k, bank: soft_contrast(
            contrast(q, k, bank, 0.3), positive_share=0.4, key_temperature=0.06
        ),
    ),
    "co2": (CO2Config(**SMALL, agreement_weight=2.0, agreement_temperature=0.1), co2_loss),
    "alignuniform": (
        AlignUniformConfig(
            **SMALL, align_weight=2.0, uniform_weight=0.5, uniform_sharpness=1.5, symmetric=False
        ),
        lambda q, k, bank: (
            2.0 * (q - k).square().sum(dim=1).mean() + 0.5 * uniformity(q, bank, 1.5)
        ),
    ),
}


def directed(settings: DirectedConfig) -> DirectedMethod:
    method = built(settings, PLAIN)
    assert isinstance(method, DirectedMethod)
    nn.init.normal_(method.momentum_encoder.head[-1].weight)  # g is no longer f
    return method


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("symmetric", [False, True])
def test_a_step_is_the_loss_of_every_direction(name: str, symmetric: bool) -> None:
    """Loss, gradients, and the keys that enter the banks; the losses alone have tests too."""
    settings, loss_of = KINDS[name]
    method = directed(settings.model_copy(update={"symmetric": symmetric}))
    views = two_views(0, sum(group.count for group in method.views))
    f, g = copy.deepcopy(method.encoder), copy.deepcopy(method.momentum_encoder)
    banks = [rows.clone() for rows in method.banks.rows()]
    loss = method(views, values(method)).loss
    loss.backward()
    sides = len(banks)
    queries, keys = [f(view) for view in views[:sides]], [g(view) for view in views[-sides:]]
    if symmetric:  # source queries meet target keys and the other way round
        bank_s, bank_t = banks
        expected = loss_of(queries[0], keys[1], bank_t) + loss_of(queries[1], keys[0], bank_s)
    else:
        expected = loss_of(queries[0], keys[0], banks[0])
    assert_close(loss, expected)
    expected.backward()
    for mine, theirs in zip(method.encoder.parameters(), f.parameters(), strict=True):
        assert_close(mine.grad, theirs.grad, rtol=1e-3, atol=1e-5)
    for rows, expected_rows in zip(method.banks.rows(), keys, strict=True):
        assert_close(rows[: len(expected_rows)], expected_rows)


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("weak_keys", [False, True])
def test_views_of_one_direction_and_of_both(symmetric: bool, weak_keys: bool) -> None:
    config = Config(method=ReSSLConfig(symmetric=symmetric, weak_keys=weak_keys))
    groups = ReSSL.view_groups(config)
    assert [group.names for group in groups] == {
        (False, False): [("query view", "key view")],
        (False, True): [("query view",), ("weak key view",)],
        (True, False): [("source view", "target view")],
        (True, True): [
            ("source view", "target view"),
            ("weak source view", "weak target view"),
        ],
    }[symmetric, weak_keys]
    assert groups[0].augmentation == config.views
    weak = config.weak_views.beside(config.views)
    assert groups[-1].augmentation == (weak if weak_keys else config.views)


def test_terms_are_told_by_side_where_there_are_two() -> None:
    all_terms = {
        "ressl": "relations",
        "sce": "soft_contrast",
        "co2": "contrast agreement",
        "alignuniform": "alignment uniformity",
    }
    for name, terms in all_terms.items():
        method = directed(KINDS[name][0].model_copy(update={"symmetric": True}))
        step = method(two_views(0, 4), values(method), with_metrics=True)
        assert set(step.terms) == {
            f"{term}_{side}" for term in terms.split() for side in ("source", "target")
        }
        assert ("consistency_gap" in step.metrics) == (name in ("sce", "co2"))


def test_the_weight_of_agreement_may_rise_and_be_on_the_device() -> None:
    settings = CO2Config(**SMALL, agreement_weight=0.8, agreement_warmup_epochs=2.0)
    method = built(settings, PLAIN)
    weights = [values(method, step)["agreement_weight"] for step in (0, 2, 8, 20)]
    assert weights == [0, 0.2, 0.8, 0.8]
    on_device = torch.tensor(0.25, dtype=torch.float64)
    loss, terms, _ = method(two_views(0), values(method) | {"agreement_weight": on_device})
    assert loss.dtype == torch.float32
    assert_close(loss, terms["contrast"] + 0.25 * terms["agreement"])
