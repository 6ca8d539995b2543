"""Methods that are told more of images than their views: labels, or which image it is."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.testing import assert_close
from toys import BATCH, IMAGES, METHODS, PLAIN, built, train, values, views_for

from xmoco.config import Config
from xmoco.config.methods import InstDiscConfig, MoCoOneWayConfig, SupervisedConfig
from xmoco.data import ArrayImages, Batch
from xmoco.errors import UserError
from xmoco.methods import Method, build_method
from xmoco.methods.instdisc import InstDisc
from xmoco.methods.moco import MoCo
from xmoco.methods.supervised import Supervised
from xmoco.nn.backbones import build_backbone
from xmoco.task import Moment


def pictures(count: int = 6, labels: Tensor | None = None, *classes: str) -> ArrayImages:
    pixels = torch.zeros(count, 3, 8, 8, dtype=torch.uint8)
    return ArrayImages("pictures", pixels, labels, classes or None)


def new(settings: SupervisedConfig) -> Method:
    return build_method(Config(model=PLAIN, method=settings))


def test_supervised_is_the_cross_entropy_of_a_linear_classifier() -> None:
    method = built(METHODS["supervised"], PLAIN)
    assert isinstance(method, Supervised)
    backbone, head = copy.deepcopy(method.encoder.backbone), copy.deepcopy(method.classifier)
    view, labels = views_for(method, 0)
    assert set(labels.tolist()) == {0, 1}
    loss = method([view, labels], values(method)).loss
    log_p = head(backbone(view)).double().log_softmax(dim=1)
    expected = -log_p[torch.arange(BATCH), labels].mean()
    assert_close(loss.double(), expected, rtol=1e-5, atol=1e-5)
    loss.backward()
    expected.backward()
    by_hand = [*backbone.parameters(), *head.parameters()]
    for mine, theirs in zip(method.parameters(), by_hand, strict=True):
        assert_close(mine.grad, theirs.grad, rtol=1e-3, atol=1e-5)


def test_its_backbone_is_the_ordinary_one() -> None:
    method = new(SupervisedConfig())
    names = build_backbone("tiny", "cifar").state_dict().keys()
    assert method.encoder.backbone.state_dict().keys() == names


def test_labels_may_be_several() -> None:
    labels = torch.tensor([[1, 0, 1], [0, 0, 0], [1, 1, 1], [0, 1, 0]]).bool()
    method = new(SupervisedConfig())
    method.prepare_for(pictures(4, labels, "a", "b", "c"))
    view = torch.randn(4, 3, 8, 8)
    assert isinstance(method, Supervised)
    scores = method.classifier(copy.deepcopy(method.encoder)(view))
    expected = F.binary_cross_entropy(scores.sigmoid(), labels.float())
    assert_close(method([view, labels], values(method)).loss, expected)
    assert method.reference_levels()["chance"] == pytest.approx(torch.tensor(2.0).log().item())


@pytest.mark.parametrize(
    ("images", "words"),
    [
        (pictures(), "pictures has no labels, from which method=supervised .* labels at auto"),
        (pictures(2, torch.tensor([0, 0]), "a"), "pictures has a single class"),
    ],
)
def test_images_that_teach_nothing_are_refused(images: ArrayImages, words: str) -> None:
    with pytest.raises(UserError, match=words):
        new(SupervisedConfig()).prepare_for(images)


def test_other_methods_take_any_images() -> None:
    for name, settings in METHODS.items():
        if name != "supervised":
            build_method(Config(model=PLAIN, method=settings)).prepare_for(pictures())


@pytest.mark.parametrize(("name", "beside"), [("supervised", [1, 0]), ("instdisc", [4, 2])])
def test_what_stands_beside_the_views_belongs_to_the_images(name: str, beside: list[int]) -> None:
    """Labels and positions of the images shown, though others were asked for."""
    method = built(METHODS[name], PLAIN)
    pixels, sizes = torch.zeros(2, 3, 8, 8, dtype=torch.uint8), torch.full((2, 2), 8)
    batch = Batch(pixels, sizes, torch.tensor([4, 2]), torch.tensor([1, 0]))
    *views, found = method.inputs(batch, Moment(seed=0, step=0, batch=2, rows=slice(None)))
    assert [view.shape for view in views] == [(2, 3, 224, 224)]
    assert found.tolist() == beside


def test_instdisc_tells_an_image_from_all_others_and_remembers_its_look() -> None:
    method = built(METHODS["instdisc"], PLAIN)
    assert isinstance(method, InstDisc)
    encoder, before = copy.deepcopy(method.encoder), method.slots.rows.clone()
    assert len(before) == len(IMAGES)
    view, positions = views_for(method, 1)
    assert positions.tolist() == list(range(16, 32))
    loss = method([view, positions], values(method)).loss
    z = encoder(view)
    expected = F.cross_entropy(z.double() @ before.double().T / 0.07, positions)
    assert_close(loss.double(), expected, rtol=1e-5, atol=1e-5)
    loss.backward()
    expected.backward()
    for mine, theirs in zip(method.encoder.parameters(), encoder.parameters(), strict=True):
        assert_close(mine.grad, theirs.grad, rtol=1e-3, atol=1e-5)
    moved = F.normalize((before[16:32] + z.detach()) / 2, dim=1)
    assert_close(method.slots.rows, torch.cat([before[:16], moved, before[32:]]))


def test_instdisc_with_consistency_compares_two_views_over_the_same_slots() -> None:
    method = built(InstDiscConfig(consistency_weight=0.5), PLAIN)
    assert isinstance(method, InstDisc)
    encoder, before = copy.deepcopy(method.encoder), method.slots.rows.clone()
    *views, positions = views_for(method, 1)
    assert len(views) == 2
    loss = method([*views, positions], values(method)).loss
    z = [encoder(view).double() for view in views]
    # The own slot first, then the others in their order.
    others = torch.stack([torch.cat([torch.arange(i), torch.arange(i + 1, 48)]) for i in positions])
    order = torch.cat([positions[:, None], others], dim=1)
    log_p = [
        torch.einsum("nd,nkd->nk", features, before.double()[order]).div(0.07).log_softmax(dim=1)
        for features in z
    ]
    told = [-(p.exp().detach() * q).sum(1).mean() for p, q in (log_p, log_p[::-1])]
    expected = (-log_p[0][:, 0].mean() - log_p[1][:, 0].mean() + 0.5 * sum(told)) / 2
    assert_close(loss.double(), expected, rtol=1e-5, atol=1e-5)
    loss.backward()
    expected.backward()
    for mine, theirs in zip(method.encoder.parameters(), encoder.parameters(), strict=True):
        assert_close(mine.grad, theirs.grad, rtol=1e-3, atol=1e-5)
    mean = (z[0] + z[1]).detach().float() / 2
    assert_close(method.slots.rows[16:32], F.normalize((before[16:32] + mean) / 2, dim=1))


def test_moco_is_infonce_in_one_direction() -> None:
    method = built(METHODS["moco"], PLAIN)
    assert isinstance(method, MoCo)
    train(method, range(2))
    f, g = copy.deepcopy(method.encoder), copy.deepcopy(method.momentum_encoder)
    (bank,) = (rows.clone() for rows in method.banks.rows())
    views = views_for(method, 2)
    assert len(views) == 2
    q, k = f(views[0]).double(), g(views[1]).double()
    logits = torch.cat([(q * k).sum(dim=1, keepdim=True), q @ bank.double().T], dim=1) / 0.2
    expected = F.cross_entropy(logits, torch.zeros(BATCH, dtype=torch.long))
    found = method(views, values(method, 2))
    assert_close(found.loss.double(), expected, rtol=1e-5, atol=1e-5)
    assert_close(method.banks.rows()[0][torch.arange(32, 48) % 24], k.float())


def test_moco_in_both_directions_is_moco_v2_plus() -> None:
    both = built(MoCoOneWayConfig(bank_length=24, key_momentum=0.9, symmetric=True))
    plus = built(METHODS["mocov2plus"])
    banks = dict(zip(("source", "target"), both.banks.rows(), strict=True))
    for side, rows in zip(("source", "target"), plus.banks.rows(), strict=True):
        rows.copy_(banks[side])
    plus.encoder.load_state_dict(both.encoder.state_dict())
    plus.momentum_encoder.load_state_dict(both.momentum_encoder.state_dict())
    assert train(both, range(3)) == pytest.approx(train(plus, range(3)), rel=1e-5)
