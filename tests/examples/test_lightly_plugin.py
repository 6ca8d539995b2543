"""The worked example with the real lightly: what is added is XMoCo's, and nothing else changes."""

import math
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close

from helpers import make_images
from xmoco import BatchXMoCoLoss, XMoCoLoss

pytest.importorskip("lightly", reason="lightly is an extra: pip install '.[examples]'")
EXAMPLES = Path(__file__).parents[2] / "examples"
N = 12


@pytest.fixture(scope="module")
def example() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLES))
        import lightly_plugin

        yield lightly_plugin
        del sys.modules["lightly_plugin"]


def built(example: ModuleType, method: str, add: str) -> Any:
    """With a backbone of one layer."""
    torch.manual_seed(0)
    backbone = nn.Sequential(nn.Flatten(), nn.Linear(48, 512))
    if method == "simclr":
        return example.SimCLR(backbone, add)
    return example.MoCo(backbone, add, bank=(24, 128))


def views(step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(step)
    images = torch.randn(N, 3, 4, 4, generator=generator)
    return [images + 0.3 * torch.randn(images.shape, generator=generator) for _ in "st"]


def consistency(P_s: Tensor, P_t: Tensor) -> Tensor:
    """CE(sg P_s, P_t) + CE(sg P_t, P_s), where 0 · log 0 is 0."""
    pairs = ((P_s.detach(), P_t), (P_t.detach(), P_s))
    return sum(-torch.where(t > 0, t * p.clamp_min(1e-30).log(), 0).sum() / N for t, p in pairs)


def probabilities(model: Any, method: str) -> tuple[Tensor, Tensor]:
    """P_s and P_t of the next step, from the model's own features and xmoco's banks."""
    features = [model.projection_head(model.backbone(x)) for x in views(0)]
    q_s, q_t = (F.normalize(z) for z in features)
    if method == "simclr":
        none = torch.eye(N).bool()

        def row(z: Tensor, other: Tensor) -> Tensor:
            to_others, to_own = ((z @ c.T / 0.2).masked_fill(none, -torch.inf) for c in (other, z))
            partner = (z * other).sum(dim=1, keepdim=True) / 0.2
            return torch.cat([partner, to_others, to_own], dim=1).softmax(dim=1)

        return row(q_s, q_t), row(q_t, q_s)
    keys = [model.projection_head_momentum(model.backbone_momentum(x)) for x in views(0)]
    k_s, k_t = (F.normalize(k.detach()) for k in keys)
    P = [
        torch.cat([(q * k).sum(dim=1, keepdim=True), q @ bank.T], dim=1).div(0.2).softmax(dim=1)
        for q, k, bank in (
            (q_s, k_t, model.xmoco.banks.target.clone()),
            (q_t, k_s, model.xmoco.banks.source.clone()),
        )
    ]
    return P[0], P[1]


@pytest.mark.parametrize("method", ["moco", "simclr"])
def test_the_term_alone_stands_beside_lightlys_loss(example: ModuleType, method: str) -> None:
    """Its value and its gradient."""
    plain, added = (built(example, method, add) for add in ("nothing", "consistency"))
    assert_close(plain.state_dict(), added.state_dict(), rtol=0, atol=0)
    term = consistency(*probabilities(added, method))
    (expected,) = torch.autograd.grad(term, added.backbone[1].weight)
    share = 0.5 if method == "simclr" else 1.0
    without, whole = plain(*views(0)), added(*views(0))
    assert_close(whole, without + share * term, rtol=1e-4, atol=1e-4)
    (gradient,) = torch.autograd.grad(whole, added.backbone[1].weight)
    (of_lightly,) = torch.autograd.grad(without, plain.backbone[1].weight)
    assert expected.norm() > 1e-3
    assert_close(gradient, of_lightly + share * expected, rtol=1e-3, atol=1e-5)


def test_without_its_ideas_xmocos_loss_is_lightlys() -> None:
    """Two programs that know nothing of each other: MoCo's by the same banks, SimCLR's by none."""
    from lightly.loss import NTXentLoss

    generator = torch.Generator().manual_seed(0)
    q_s, q_t, k_s, k_t = F.normalize(torch.randn(4, N, 128, generator=generator), dim=2)
    theirs = [NTXentLoss(0.2, (24, 128)) for _ in "st"]
    ours = XMoCoLoss(128, 24, 0.2, label_weight=0.0, consistency_weight=0.0)
    for loss, bank in zip(theirs, (ours.banks.target, ours.banks.source), strict=True):
        loss.memory_bank.bank = bank.clone()
    found, terms = ours(q_s, q_t, k_s, k_t)
    expected = {
        "contrast_source": theirs[0](q_s, k_t),
        "contrast_target": theirs[1](q_t, k_s),
    }
    assert_close(terms, expected)
    assert_close(found, expected["contrast_source"] + expected["contrast_target"])
    loss, _ = BatchXMoCoLoss(0.2, label_weight=0.0, consistency_weight=0.0)(q_s, q_t)
    assert_close(loss, NTXentLoss(0.2)(q_s, q_t))


@pytest.mark.parametrize("method", ["moco", "simclr"])
def test_twenty_steps_with_both_ideas_lower_the_loss(example: ModuleType, method: str) -> None:
    model = built(example, method, "both")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for step in range(24):
        loss = model(*views(step % 4))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        model.after_step()
        losses.append(loss.item())
    assert sum(losses[-4:]) < 0.97 * sum(losses[:4])
    for name, parameter in model.named_parameters():
        assert (parameter.grad is None) == ("momentum" in name), name


def test_it_runs_from_images_to_accuracy(
    example: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    images = make_images(tmp_path / "images", each=8, side=32)
    options = ("--data", str(images), "--batch", "16", "--epochs", "1", "--workers", "0")
    losses, accuracy = example.main(["moco", *options])
    assert [math.isfinite(loss) for loss in losses] == [True]
    assert 0 <= accuracy <= 100
    said = capsys.readouterr().out
    assert f"epoch 1: loss {losses[0]:.3f}" in said
    assert f"kNN: {accuracy:.1f} %" in said


@pytest.mark.parametrize(
    ("data", "options", "sentence"),
    [
        ("nowhere", [], "there is no folder 'nowhere'."),
        ("plain", [], "plain has no labels: put the images into one subfolder per class"),
        ("empty", [], "empty"),
        ("images", ["--batch", "64"], "32 images do not fill a batch: lower --batch."),
    ],
)
def test_what_cannot_be_judged_is_refused_before_training(
    example: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    data: str,
    options: list[str],
    sentence: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(example, "train", lambda *_: pytest.fail("it has trained"))
    make_images(tmp_path / "images", each=8, side=32)
    make_images(tmp_path / "one", each=8, classes=1)
    (tmp_path / "one" / "class0").rename(tmp_path / "plain")
    (tmp_path / "empty").mkdir()
    with pytest.raises(SystemExit, match="2"):
        example.main(["moco", "--data", data, *options])
    assert sentence in capsys.readouterr().err
