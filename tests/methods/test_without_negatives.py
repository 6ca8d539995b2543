"""SimSiam, Barlow Twins and VICReg as wholes against their formulas.

Their losses alone are in tests/losses/test_prediction_loss.py and test_redundancy.py.
"""

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close
from toys import PLAIN, built, two_views, values

from xmoco.config.methods import BarlowTwinsConfig, MethodConfig, SimSiamConfig, VICRegConfig
from xmoco.methods.simsiam import SimSiam


def simsiam(z_s: Tensor, z_t: Tensor, predictor: nn.Module) -> dict[str, Tensor]:
    def half(p: Tensor, z: Tensor) -> Tensor:
        return -F.cosine_similarity(p, z.detach()).mean() / 2

    return {"source": half(predictor(z_s), z_t), "target": half(predictor(z_t), z_s)}


def barlowtwins(z_s: Tensor, z_t: Tensor, _: nn.Module) -> dict[str, Tensor]:
    a, b = (F.batch_norm(z, None, None, training=True) for z in (z_s, z_t))
    c = torch.einsum("ni,nj->ij", a, b) / len(a)
    same = torch.eye(len(c), dtype=torch.bool)
    terms = {"invariance": (1 - c)[same].square(), "redundancy": 0.02 * c[~same].square()}
    return {name: 0.5 * term.sum() for name, term in terms.items()}


def vicreg(z_s: Tensor, z_t: Tensor, _: nn.Module) -> dict[str, Tensor]:
    hinges = [torch.relu(1 - (z.var(dim=0) + 1e-4).sqrt()).mean() for z in (z_s, z_t)]
    covariances = [torch.cov(z.T) for z in (z_s, z_t)]
    others = [(c - c.diag().diag()).square().sum() / len(c) for c in covariances]
    return {
        "invariance": 5 * (z_s - z_t).square().mean(),
        "variance": 6 * sum(hinges) / 2,
        "covariance": 7 * sum(others),
    }


Formula = Callable[[Tensor, Tensor, nn.Module], dict[str, Tensor]]
FORMULAS: dict[str, tuple[MethodConfig, Formula]] = {
    "simsiam": (SimSiamConfig(predictor_hidden=24), simsiam),
    "barlowtwins": (BarlowTwinsConfig(redundancy_weight=0.02, loss_scale=0.5), barlowtwins),
    "vicreg": (
        VICRegConfig(invariance_weight=5.0, variance_weight=6.0, covariance_weight=7.0),
        vicreg,
    ),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_a_step_is_the_formula(name: str) -> None:
    """Its terms and their sum, and the gradients of all that learns."""
    settings, formula = FORMULAS[name]
    method, views = built(settings, PLAIN), two_views(0)
    encoder = copy.deepcopy(method.encoder)
    predictor = copy.deepcopy(getattr(method, "predictor", nn.Identity()))
    loss, terms, _ = method(views, values(method))
    expected = formula(*(encoder(view) for view in views), predictor)
    assert_close(terms, expected, rtol=1e-4, atol=1e-5)
    assert_close(loss, torch.stack(list(expected.values())).sum(), rtol=1e-4, atol=1e-5)
    loss.backward()
    torch.stack(list(expected.values())).sum().backward()
    by_hand = [*encoder.parameters(), *predictor.parameters()]
    for mine, theirs in zip(method.parameters(), by_hand, strict=True):
        assert_close(mine.grad, theirs.grad, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", FORMULAS)
def test_heads_end_as_published(name: str) -> None:
    """SimSiam's in a batch norm that learns nothing; the others' in a layer without bias, which
    would not change what they look at."""
    method = built(FORMULAS[name][0], PLAIN)
    *_, last = method.encoder.head
    features = method.encoder(two_views(0)[0])
    if name == "simsiam":
        assert isinstance(last, nn.BatchNorm1d)
        assert not any(parameter.requires_grad for parameter in last.parameters())
        assert_close(features.mean(dim=0), torch.zeros(16), rtol=0, atol=1e-5)
        assert_close(features.var(dim=0, correction=0), torch.ones(16), rtol=0, atol=1e-2)
    else:
        assert isinstance(last, nn.Linear)
        assert last.bias is None


def test_simsiams_predictor_keeps_its_rate() -> None:
    method = built(SimSiamConfig(predictor_hidden=24))
    assert isinstance(method, SimSiam)
    encoder, predictor = method.param_groups()
    assert (encoder.scheduled, predictor.scheduled) == (True, False)
    assert predictor.parameters == list(method.predictor.parameters())
