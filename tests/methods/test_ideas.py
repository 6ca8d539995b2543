"""XMoCo's two ideas in other methods: what is added, and that nothing is unless asked for."""

from typing import Any

import pytest
import torch
from torch.testing import assert_close
from toys import (
    IDEAS,
    METHODS,
    MOCO,
    PLAIN,
    XMOCO,
    assert_same_state,
    built,
    train,
    two_views,
    values,
    views_for,
)

from xmoco.config.methods import CO2Config
from xmoco.losses.cross_similarity import CrossSimilarity
from xmoco.methods.co2 import CO2
from xmoco.methods.sce import SCE
from xmoco.methods.simclr import SimCLR
from xmoco.methods.xmoco import XMoCo

BOTH = {"label_weight": 1.0, "consistency_weight": 1.0}
TERMS = {
    "mocov2plus": {"labels", "consistency"},
    "simclr": {"labels", "consistency"},
    "moco": {"labels", "consistency"},
    "co2": {"labels", "consistency", "agreement"},
    "sce": {"soft_contrast", "consistency"},
    "jcl": {"labels", "consistency", "spread"},
    "instdisc": {"labels", "consistency"},
}


def test_mocov2plus_with_both_ideas_is_xmoco_to_the_bit() -> None:
    options = {"positive_mass": 0.7, "sharpness": 3.0, "consistency_warmup_epochs": 1.0}
    xmoco = built(XMOCO.model_copy(update=options))
    moco = built(MOCO.model_copy(update=BOTH | options))
    assert train(moco, range(5)) == train(xmoco, range(5))
    assert_same_state(moco, xmoco.state_dict())
    assert moco.title == "MoCo v2+ with XMoCo's labels and consistency"


@pytest.mark.parametrize("idea", BOTH)
def test_mocov2plus_with_one_idea_is_xmoco_without_the_other(idea: str) -> None:
    (other,) = set(BOTH) - {idea}
    xmoco = built(XMOCO.model_copy(update={other: 0.0}))
    moco = built(MOCO.model_copy(update={idea: 1.0}))
    assert train(moco, range(4)) == train(xmoco, range(4))


@pytest.mark.parametrize("history", ["queries", "none"])
def test_co2_without_its_own_term_is_xmoco(history: str) -> None:
    options: dict[str, Any] = {**BOTH, "history": history}
    settings = CO2Config(bank_length=24, symmetric=True, agreement_weight=0.0, **options)
    co2, xmoco = built(settings, PLAIN), built(XMOCO.model_copy(update=options), PLAIN)
    assert isinstance(co2, CO2)
    assert isinstance(xmoco, XMoCo)
    co2.encoder.load_state_dict(xmoco.encoder.state_dict())
    co2.momentum_encoder.load_state_dict(xmoco.momentum_encoder.state_dict())
    co2.banks.load_state_dict(xmoco.banks.state_dict())
    for step in range(4):  # the history of 24 joins at the third
        loss = co2(two_views(step), values(co2)).loss
        assert_close(loss, xmoco(two_views(step), values(xmoco)).loss)


@pytest.mark.parametrize("name", IDEAS)
def test_terms_and_their_weights(name: str) -> None:
    """The weight of consistency may rise, and be a number on the device."""
    method = built(IDEAS[name].model_copy(update={"consistency_warmup_epochs": 2.0}))
    at = values(method, 4) | {"consistency_weight": torch.tensor(0.25, dtype=torch.float64)}
    assert values(method, 4)["consistency_weight"] == 0.5 * IDEAS[name].consistency_weight
    loss, terms, metrics = method(views_for(method, 0), at, with_metrics=True)
    kinds = {term.rpartition("_")[0] for term in terms}
    assert kinds == TERMS[name]
    assert {f"{kind}_{side}" for kind in kinds for side in ("source", "target")} == set(terms)
    assert {"consistency_gap", "positive_probability"} <= set(metrics)
    weights = {"labels": 1.0, "soft_contrast": 1.0, "consistency": 0.25, "spread": 1.0}
    weights["agreement"] = at.get("agreement_weight")
    total = sum(weights[term.rpartition("_")[0]] * value for term, value in terms.items())
    assert_close(loss, total / 2 if name in ("simclr", "instdisc") else total)
    assert loss.dtype == torch.float32


@pytest.mark.parametrize("name", IDEAS)
def test_it_learns_and_goes_on_from_its_state(name: str) -> None:
    method, restored = built(IDEAS[name]), built(IDEAS[name], seed=1)
    train(method, range(3), rate=0)
    losses = train(method, range(3, 15))
    assert sum(losses[-3:]) < 0.99 * sum(losses[:3])
    restored.load_state_dict(method.state_dict())
    assert train(method, range(15, 17)) == train(restored, range(15, 17))


def test_nothing_is_added_unless_asked_for() -> None:
    for name, kind in (("simclr", SimCLR), ("co2", CO2)):
        method = built(METHODS[name])
        assert isinstance(method, kind)
        assert method.ideas is None
        assert "consistency_weight" not in values(method)
        asked = built(IDEAS[name])
        assert isinstance(asked, kind)
        assert isinstance(asked.ideas, CrossSimilarity)
    assert isinstance(built(METHODS["sce"]), SCE)
    assert "consistency_weight" not in values(built(METHODS["sce"]))
