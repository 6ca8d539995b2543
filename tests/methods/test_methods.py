"""Methods as the training loop sees them: steps, gradients, the momentum encoder, their state."""

import io
import math

import pytest
import torch
from torch.testing import assert_close
from toys import (
    BATCH,
    METHODS,
    MOCO,
    PLAIN,
    XMOCO,
    assert_same_state,
    built,
    copied,
    train,
    trainable,
    two_views,
    values,
    views_for,
)

from helpers import TINY_SPLIT
from xmoco.config import ModelConfig
from xmoco.config.methods import (
    BYOLConfig,
    MethodConfig,
    MoCoV2PlusConfig,
    SimCLRConfig,
    SwAVConfig,
    XMoCoConfig,
)
from xmoco.losses import XMoCoLoss
from xmoco.methods.base import MomentumMethod
from xmoco.methods.byol import BYOL
from xmoco.methods.mocov2plus import MoCoV2Plus
from xmoco.methods.simclr import SimCLR
from xmoco.methods.swav import SwAV
from xmoco.methods.xmoco import XMoCo

BANKS = (
    *("xmoco", "mocov2plus", "ressl", "sce", "co2", "alignuniform", "jcl"),
    *("moco", "mnn", "msf"),
)
MOMENTUM = (*BANKS, "byol")
SIDES = {"source", "target"}
TERMS = {
    "xmoco": {f"{term}_{side}" for term in ("labels", "consistency") for side in SIDES},
    "mocov2plus": {f"contrast_{side}" for side in SIDES},
    "simclr": set(),
    "byol": SIDES,
    "swav": set(),
    "ressl": set(),
    "sce": set(),
    "co2": {"contrast", "agreement"},
    "alignuniform": {f"{term}_{side}" for term in ("alignment", "uniformity") for side in SIDES},
    "jcl": {"contrast", "spread"},
    "uota": set(),
    "simsiam": SIDES,
    "barlowtwins": {"invariance", "redundancy"},
    "vicreg": {"invariance", "variance", "covariance"},
    "msf": set(),
    "mnn": {"keys", "neighbours"},
    "supervised": set(),
    "instdisc": set(),
    "moco": set(),
}
METRICS = {"feature_spread", "effective_rank"}
CONTRAST_METRICS = {"positive_probability", "consistency_gap"}

each_method = pytest.mark.parametrize("name", METHODS)
each_norm = pytest.mark.parametrize("model", [TINY_SPLIT, PLAIN], ids=["split", "plain"])


def momentum_method(settings: MethodConfig, model: ModelConfig = TINY_SPLIT) -> MomentumMethod:
    method = built(settings, model)
    assert isinstance(method, MomentumMethod)
    return method


def test_build_method_passes_every_setting_on() -> None:
    settings = XMoCoConfig(
        bank_length=11,
        temperature=0.3,
        key_momentum=0.5,
        sharpness=3.0,
        positive_mass=0.7,
        sinkhorn_iterations=4,
        history="probabilities",
        consistency_weight=0.25,
    )
    xmoco = built(settings)
    assert isinstance(xmoco, XMoCo)
    loss, labels = xmoco.loss, xmoco.loss.soft_labels
    assert isinstance(loss, XMoCoLoss)
    assert loss.banks.source.shape == (11, 16)
    assert labels is not None
    assert labels.history is not None
    assert labels.history.source.shape == (11, 11)
    assert (loss.temperature, labels.sharpness, labels.positive_mass) == (0.3, 3.0, 0.7)
    assert labels.iterations == 4
    scheduled = {"key_momentum": 0.5, "consistency_weight": 0.25, "positive_mass": 0.7}
    assert values(xmoco) == scheduled

    moco = built(MoCoV2PlusConfig(bank_length=9, temperature=0.1, key_momentum=0.25))
    assert isinstance(moco, MoCoV2Plus)
    assert moco.loss.soft_labels is None
    assert moco.loss.banks.source.shape == (9, 16)
    assert moco.loss.temperature == 0.1
    assert values(moco) == {"key_momentum": 0.25, "consistency_weight": 0, "positive_mass": 1}

    simclr = built(SimCLRConfig(temperature=0.3))
    assert isinstance(simclr, SimCLR)
    assert simclr.temperature == 0.3
    assert values(simclr) == {}

    byol = built(BYOLConfig(key_momentum=0.5, predictor_hidden=12))
    assert isinstance(byol, BYOL)
    first, *_, last = byol.predictor
    assert (first.weight.shape, last.weight.shape) == ((12, 16), (16, 12))
    assert values(byol) == {"key_momentum": 0.5}

    swav = built(SwAVConfig(prototypes=5, queue_length=9, freeze_prototypes_epochs=0))
    assert isinstance(swav, SwAV)
    assert swav.prototypes.weight.shape == (5, 16)
    assert swav.queue is not None
    assert swav.queue.source.shape == (9, 16)
    assert values(swav) == {"prototypes_learn": 1.0, "queue_counts": 0.0}


@each_method
@each_norm
def test_a_step_tells_loss_and_terms_and_metrics_when_asked(name: str, model: ModelConfig) -> None:
    method = built(METHODS[name], model)
    loss, terms, metrics = method(views_for(method, 0), values(method))
    assert loss.shape == ()
    assert loss.requires_grad
    assert set(terms) == TERMS[name]
    if terms:
        assert_close(loss, torch.stack(list(terms.values())).sum())
    assert metrics == {}
    metrics = method(views_for(method, 1), values(method, 1), with_metrics=True).metrics
    contrast = CONTRAST_METRICS if name in ("xmoco", "mocov2plus") else set()
    assert set(metrics) == METRICS | contrast | ({"label_entropy"} if name == "xmoco" else set())
    for metric in metrics.values():
        assert metric.shape == ()
        assert metric.isfinite()
        assert not metric.requires_grad


@each_method
def test_measuring_does_not_change_the_step(name: str) -> None:
    one, other = built(METHODS[name]), built(METHODS[name])
    for step in range(3):
        measured = one(views_for(one, step), values(one, step), with_metrics=True).loss
        assert torch.equal(measured, other(views_for(other, step), values(other, step)).loss)
    assert_same_state(one, other.state_dict())


@each_method
def test_only_what_learns_gets_gradients(name: str) -> None:
    """The encoder, and a predictor or prototypes where there are some; never the keys' side."""
    method = built(METHODS[name])
    learns = {
        "byol": ("encoder.", "predictor."),
        "swav": ("encoder.", "prototypes."),
        "supervised": ("encoder.", "classifier."),
        **dict.fromkeys(("simsiam", "msf", "mnn"), ("encoder.", "predictor.")),
        "uota": ("encoder.", "prototypes."),
    }
    prefixes = learns.get(name, ("encoder.",))
    still = {"encoder.head.4.weight", "encoder.head.4.bias"} if name == "simsiam" else set()
    learning = {key for key, _ in method.named_parameters() if key.startswith(prefixes)} - still
    assert set(trainable(method)) == learning
    assert {group_id for group in method.param_groups() for group_id in map(id, group[0])} == {
        id(p) for p in trainable(method).values()
    }
    for step in range(3):  # the last with a full history
        method(views_for(method, step), values(method, step)).loss.backward()
    for key, parameter in method.named_parameters():
        assert (parameter.grad is not None) == (key in learning), key
        if parameter.grad is not None:
            assert parameter.grad.isfinite().all()
            assert parameter.grad.any(), key


@pytest.mark.parametrize("name", MOMENTUM)
def test_after_a_step_the_momentum_encoder_follows(name: str) -> None:
    method = momentum_method(METHODS[name])
    before = [p.clone() for p in method.momentum_encoder.parameters()]
    train(method, range(1))
    followers, leaders = method.momentum_encoder.parameters(), method.encoder.parameters()
    moved = False
    for follower, leader, old in zip(followers, leaders, before, strict=True):
        assert_close(follower, 0.9 * old + 0.1 * leader.detach())
        moved |= not torch.equal(follower, old)
    assert moved


@pytest.mark.parametrize(
    ("name", "memory"), [*((name, "bank") for name in BANKS), ("swav", "queue"), ("uota", "queue")]
)
def test_memories_fill_step_by_step(name: str, memory: str) -> None:
    method = built(METHODS[name])
    fills = [method.fill_levels()]
    for step in range(2):
        train(method, range(step, step + 1))
        fills.append(method.fill_levels())
    assert fills == [{memory: 0}, {memory: BATCH / 24}, {memory: 1}]


def test_methods_without_a_memory_have_no_fill() -> None:
    for settings in (SimCLRConfig(), METHODS["byol"], SwAVConfig(prototypes=5)):
        assert built(settings).fill_levels() == {}


def test_keys_come_from_the_momentum_encoder_in_other_company() -> None:
    views = two_views(0)
    split, plain = momentum_method(XMOCO), momentum_method(XMOCO, PLAIN)
    _, keys = split.queries_and_keys(views, views)
    assert not any(key.requires_grad for key in keys)
    _, keys = plain.queries_and_keys(views, views)
    for key, view in zip(keys, views, strict=True):
        assert_close(key, plain.momentum_encoder(view))
    split = momentum_method(XMOCO)
    queries, keys = split.queries_and_keys(views, views)
    # although f is still g
    assert not torch.allclose(torch.cat(keys), torch.cat(queries).detach(), atol=1e-3)
    split.eval()  # without batch statistics the company does not matter
    split.momentum_encoder.load_state_dict(split.encoder.state_dict())
    queries, keys = split.queries_and_keys(views, views)
    assert_close(torch.cat(keys), torch.cat(queries).detach())


@pytest.mark.parametrize(
    ("name", "model"),
    [*((name, TINY_SPLIT) for name in METHODS), *((name, PLAIN) for name in ("xmoco", "swav"))],
)
def test_what_suits_a_gpu_computes_the_same(name: str, model: ModelConfig) -> None:
    """Views stacked and norms fused, against one view after the other: losses and the state."""
    stacked, apart = (built(METHODS[name], model) for _ in range(2))
    for method in (stacked, apart):
        method.encoder.double()
        if isinstance(method, MomentumMethod):
            method.momentum_encoder.double()
    names = list(stacked.state_dict())
    stacked.optimize_for(torch.device("cuda"))
    assert set(stacked.run.stacked) == set(stacked.networks())
    assert list(stacked.state_dict()) == names
    assert trainable(stacked).keys() == trainable(apart).keys()
    steps = range(4)
    assert_close(train(stacked, steps), train(apart, steps), rtol=1e-6, atol=1e-6)
    for key, value in apart.state_dict().items():
        # The encoder ends in float32, so banks and features agree as far as that goes.
        assert_close(stacked.state_dict()[key], value, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(("name", "steps"), [*((name, 3) for name in METHODS), ("xmoco", 1)])
def test_state_dict_round_trip_continues_identically(name: str, steps: int) -> None:
    original, restored = built(METHODS[name]), built(METHODS[name], seed=1)
    train(original, range(steps))
    file = io.BytesIO()
    torch.save(original.state_dict(), file)
    file.seek(0)
    restored.load_state_dict(torch.load(file, weights_only=True))
    following = range(steps, steps + 3)
    assert train(original, following) == train(restored, following)
    assert_same_state(restored, original.state_dict())


@each_method
def test_eval_mode_changes_nothing(name: str) -> None:
    method = built(METHODS[name])
    train(method, range(2))
    before = copied(method.state_dict())
    method.eval()
    first, second = (method(views_for(method, 3), values(method, 3)).loss for _ in range(2))
    assert torch.equal(first, second)
    assert_same_state(method, before)


@each_method
def test_twenty_steps_lower_the_loss(name: str) -> None:
    method = built(METHODS[name])
    train(method, range(3), rate=0)  # the banks fill with keys
    losses = train(method, range(3, 23))
    first, last = sum(losses[:3]), sum(losses[-3:])
    assert last < first - 0.05 * abs(first)


@pytest.mark.parametrize("history", ["queries", "none"])
def test_full_positive_mass_contains_mocov2plus(history: str) -> None:
    xmoco = built(XMOCO.model_copy(update={"positive_mass": 1.0, "history": history}))
    moco = built(MOCO)
    for step in range(4):
        terms = xmoco(two_views(step), values(xmoco)).terms
        expected = moco(two_views(step), values(moco)).loss
        assert_close(terms["labels_source"] + terms["labels_target"], expected)


def test_without_its_two_parts_xmoco_trains_as_mocov2plus() -> None:
    """To the bit: losses and everything that is kept."""
    off = {"label_weight": 0.0, "consistency_weight": 0.0}
    xmoco, moco = built(XMOCO.model_copy(update=off)), built(MOCO)
    assert train(xmoco, range(4)) == train(moco, range(4))
    assert_same_state(xmoco, moco.state_dict())


def test_a_rising_weight_of_consistency_reaches_the_loss() -> None:
    rising = {"consistency_weight": 0.5, "consistency_warmup_epochs": 2.0}
    method = built(XMOCO.model_copy(update=rising))
    weights = [values(method, step)["consistency_weight"] for step in (0, 2, 4, 8, 20)]
    assert weights == [0, 0.125, 0.25, 0.5, 0.5]
    loss, terms, _ = method(views_for(method, 0), values(method, 2))
    labels = terms["labels_source"] + terms["labels_target"]
    agreement = terms["consistency_source"] + terms["consistency_target"]
    assert_close(loss, labels + 0.125 * agreement)


@pytest.mark.parametrize("weight", [1.0, 0.5])
def test_a_rising_positive_mass_reaches_the_labels(weight: float) -> None:
    """Half way, along a half cosine, ξ is half way too; then the step is that of such a ξ."""
    mixed = {"bank_length": 24, "label_weight": weight}
    rising = built(XMoCoConfig(positive_mass=0.5, positive_mass_end=0.9, **mixed))
    half_way = built(XMoCoConfig(positive_mass=0.7, **mixed))
    assert (rising.title, half_way.title) == ("XMoCo+", "XMoCo")
    for step in range(2):  # with a bank that has something in it
        found, wanted = (m(two_views(step), values(m, 20)) for m in (rising, half_way))
    assert found.terms.keys() == wanted.terms.keys()
    for name, term in found.terms.items():
        assert_close(term, wanted.terms[name])
    first = rising(two_views(2), values(rising))
    last = half_way(two_views(2), values(half_way))
    assert not torch.isclose(first.terms["labels_source"], last.terms["labels_source"])


@pytest.mark.parametrize(("end", "shared"), [(None, False), (0.5, True)])
def test_labels_that_will_be_shared_can_be_looked_at(end: float | None, shared: bool) -> None:
    method = built(XMoCoConfig(bank_length=24, positive_mass=1.0, positive_mass_end=end))
    assert isinstance(method, XMoCo)
    features = torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(0))
    q, k = torch.nn.functional.normalize(features, dim=-1)
    assert (method.loss.labels_among(q, k, k, 0.2) is not None) == shared


def test_levels_that_losses_are_compared_with() -> None:
    chance = dict.fromkeys(("xmoco", "mocov2plus", "sce", "co2", "jcl"), math.log(25))
    chance |= {"swav": math.log(7), "uota": math.log(7), "ressl": math.log(24)}
    for name, level in chance.items():
        assert built(METHODS[name]).reference_levels() == {"chance": level}
    # The default batch of 512 makes 1,023 other views.
    assert built(METHODS["simclr"]).reference_levels() == {"chance": math.log(1023)}
    for name in ("byol", "msf", "mnn", "alignuniform"):
        assert built(METHODS[name]).reference_levels() == {"unrelated": 2.0}
    assert built(METHODS["supervised"]).reference_levels() == {"chance": math.log(2)}
    assert built(METHODS["instdisc"]).reference_levels() == {"chance": math.log(48)}
    assert built(METHODS["simsiam"]).reference_levels() == {"unrelated": 0.0}
    assert built(METHODS["barlowtwins"]).reference_levels() == {"unrelated": 0.024 * 16}
    assert built(METHODS["vicreg"]).reference_levels() == {"collapsed": 25 * 0.99}


@pytest.mark.parametrize(
    ("name", "words"),
    [*((name, "lower bank_length") for name in BANKS[:-1]), ("swav", "queue_length")],
)
def test_a_memory_longer_than_the_set_is_warned_of(name: str, words: str) -> None:
    method = built(METHODS[name])
    assert method.warnings(images=24) == []
    (warning,) = method.warnings(images=23)
    assert words in warning
    for other in ("simclr", "byol", "simsiam", "barlowtwins", "vicreg"):
        assert built(METHODS[other]).warnings(images=2) == []


def test_who_hides_keys_from_batch_statistics() -> None:
    hiding = {name for name, settings in METHODS.items() if built(settings).hides_keys}
    assert hiding == set(BANKS)


def test_titles_are_the_methods_names() -> None:
    titles = [built(settings).title for settings in METHODS.values()]
    assert titles == [
        *("XMoCo", "MoCo v2+", "SimCLR", "BYOL", "SwAV", "ReSSL", "SCE", "CO2"),
        *("MoCo v2 + align/uniform", "JCL", "SwAV + UOTA"),
        *("SimSiam", "Barlow Twins", "VICReg", "MSF", "MNN", "Supervised", "InstDisc", "MoCo"),
    ]


# What is not in the paper, and off unless asked for


def test_weak_keys_are_of_views_of_their_own() -> None:
    method = momentum_method(XMOCO.model_copy(update={"weak_keys": True}))
    (strong, weak) = method.views
    assert strong.names == ("source view", "target view")
    assert weak.names == ("weak source view", "weak target view")
    assert (weak.augmentation.jitter, weak.augmentation.blur) == (0, 0)
    assert weak.input == strong.input
    views = [*two_views(0), *two_views(1)]
    (q_s, q_t), keys = method.queries_and_keys_of(views)
    again = momentum_method(XMOCO)
    expected = again.queries_and_keys(views[:2], views[2:])
    assert_close(torch.stack([q_s, q_t]), torch.stack(expected[0]))
    assert_close(torch.stack(keys), torch.stack(expected[1]))


def test_a_predictor_stands_between_queries_and_keys() -> None:
    method = built(XMOCO.model_copy(update={"predictor_hidden": 12}))
    assert any(name.startswith("predictor.") for name in trainable(method))
    method(views_for(method, 0), values(method)).loss.backward()
    for name, parameter in trainable(method).items():
        assert parameter.grad is not None, name
        assert parameter.grad.any(), name
    assert isinstance(method, XMoCo)
    for query in method.queries_and_keys_of(two_views(0))[0]:
        assert_close(query.norm(dim=1), torch.ones(BATCH))
    method.optimize_for(torch.device("cuda"))
    assert method.predictor in method.run.stacked
