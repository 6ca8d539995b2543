"""The paper's claims, measured: by hand what is measured, and nothing of it in the training."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor
from torch.testing import assert_close

from xmoco.config import Config
from xmoco.data import ArrayImages, at_positions
from xmoco.evaluate.similarities import (
    FEWEST_IMAGES,
    MOST_IMAGES,
    Look,
    NegativesMonitor,
    epochs_between,
    measures,
    sample_size,
    strongest,
)
from xmoco.losses.soft_labels import SoftLabels
from xmoco.methods import Method, build_method
from xmoco.pretraining import prepare_training
from xmoco.records import Record
from xmoco.report.pictures import picture_negatives
from xmoco.settings import load_config
from xmoco.task import Moment
from xmoco.train.engine import build_fabric
from xmoco.train.run_folder import RunFolder

SMALL = (
    *("backbone=tiny", "stem=cifar", "head_layers=2", "head_hidden=32", "feature_size=16"),
    *("size=8", "blur=0", "batch_norm=plain", "batch=12", "epochs=4"),
    *("device=cpu", "knn_every=1"),
)
CPU = torch.device("cpu")


def pictures(count: int = 60, labelled: bool = True) -> ArrayImages:
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(256, (count, 3, 10, 10), generator=generator).to(torch.uint8)
    labels = torch.arange(count) % 3
    return ArrayImages("pictures", pixels, *((labels, tuple("abc")) if labelled else ()))


def configured(*changes: str) -> Config:
    return load_config(None, [*SMALL, *changes])


def similarities(config: Config, images: ArrayImages | None = None) -> NegativesMonitor:
    return NegativesMonitor(config, "work", images or pictures(), CPU)


def built(config: Config) -> Method:
    """With an encoder that its momentum copy has not followed yet."""
    torch.manual_seed(1)
    method = build_method(config)
    with torch.no_grad():
        for parameter in method.encoder.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return method


def looked(
    *changes: str, images: ArrayImages | None = None
) -> tuple[Look, Method, NegativesMonitor]:
    config = configured("bank_length=24", *changes)
    method, looking = built(config), similarities(config, images)
    look = looking.look(method)
    assert look is not None
    return look, method, looking


# What is measured


def by_hand(S: NDArray[Any], T: NDArray[Any], tau: float, classes: list[int]) -> dict[str, float]:
    """In float64, image by image."""
    n = len(S)
    gaps = [abs(S[i, j] - T[i, j]) for i in range(n) for j in range(n) if i != j]
    strange = [
        abs(S[i, j] - T[(i + 1) % n, j])
        for i in range(n)
        for j in range(n)
        if j not in (i, (i + 1) % n)
    ]
    falls, right, chance = np.zeros(n), [], []
    for i in range(n):
        others = [j for j in range(n) if j != i]
        weights = np.exp([S[i, j] / tau for j in others])
        falls[others] += weights / weights.sum() / n
        largest = sorted(others, key=lambda j: -S[i, j])[:5]
        right.append(np.mean([classes[j] == classes[i] for j in largest]))
        chance.append(np.mean([classes[j] == classes[i] for j in others]))
    entropy = -sum(share * math.log(share) for share in falls)
    return {
        "similarity_gap": float(np.mean(gaps)),
        "similarity_gap_unrelated": float(np.mean(strange)),
        "similarity_evenness": math.exp(entropy) / n,
        "similar_of_own_class": 100 * float(np.mean(right)),
        "any_of_own_class": 100 * float(np.mean(chance)),
    }


@settings(max_examples=20, deadline=None)
@given(st.integers(7, 12), st.integers(0, 2**31), st.sampled_from([0.05, 0.2, 1.0]))
def test_measures_are_those_computed_by_hand(n: int, seed: int, tau: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    S, T = (2 * torch.rand(n, n, generator=generator) - 1 for _ in range(2))
    classes = torch.randint(3, (n,), generator=generator)
    shares = (S / tau).masked_fill(torch.eye(n, dtype=torch.bool), -torch.inf).softmax(1)
    found = {
        name: value for name, (value, _) in measures(Look(S, T, shares, None, classes)).items()
    }
    wanted = by_hand(S.double().numpy(), T.double().numpy(), tau, classes.tolist())
    assert found == pytest.approx(wanted, rel=1e-4, abs=1e-5)


def test_a_look_is_at_what_the_encoders_make_of_the_views() -> None:
    look, method, looking = looked()
    images = looking.images
    assert isinstance(images, ArrayImages)
    assert len(looking.positions) == FEWEST_IMAGES
    batch = at_positions(images, looking.positions, CPU)
    moment = Moment(0, 0, FEWEST_IMAGES, slice(0, FEWEST_IMAGES))
    x_s, x_t = method.inputs(batch, moment)
    method.eval()
    with torch.no_grad():
        q_s, q_t = method.encoder(x_s), method.encoder(x_t)
        k_s, k_t = (method.momentum_encoder(x) for x in (x_s, x_t))  # type: ignore[operator]
    assert_close(look.source, q_s @ k_t.T)
    assert look.target is not None
    assert_close(look.target, q_t @ k_s.T)
    off = ~torch.eye(FEWEST_IMAGES, dtype=torch.bool)
    for row in range(3):
        expected = (look.source[row][off[row]] / 0.2).softmax(0)
        assert_close(look.shares[row][off[row]], expected)
    assert look.classes is not None
    assert look.classes.tolist() == (looking.positions % 3).tolist()


def test_many_images_are_looked_at_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, method, looking = looked()
    monkeypatch.setattr("xmoco.evaluate.similarities.IMAGES_PER_STEP", 20)
    parts = looking.look(method)
    assert parts is not None
    assert_close(parts.source, whole.source)
    assert_close(parts.labels, whole.labels)
    assert_close(parts.classes, whole.classes)


def plan_by_hand(S: NDArray[Any], tau: float, power: float, rounds: int) -> NDArray[Any]:
    """Sinkhorn over P^λ in float64; an image is no negative of its own, though P knows it."""
    P = np.exp(S / tau)
    P /= P.sum(axis=1, keepdims=True)
    plan = P**power
    np.fill_diagonal(plan, 0)
    for _ in range(rounds):
        plan /= plan.sum(axis=0)
        plan /= plan.sum(axis=1, keepdims=True)
    return plan


@pytest.mark.parametrize("iterations", [1, 3, 40])
def test_soft_labels_among_images_are_the_transport_plan(iterations: int) -> None:
    generator = torch.Generator().manual_seed(0)
    queries, keys = (
        torch.nn.functional.normalize(torch.randn(9, 5, generator=generator), dim=1)
        for _ in range(2)
    )
    labels = SoftLabels(5, 16, sharpness=3.0, iterations=iterations).among(queries, keys, 0.3)
    S = (queries.double() @ keys.double().T).numpy()
    assert_close(labels, torch.tensor(plan_by_hand(S, 0.3, 3.0, iterations)).float())
    if iterations == 40:
        assert_close(labels.sum(dim=0), torch.ones(9), rtol=1e-3, atol=1e-3)


def test_labels_are_told_by_whoever_teaches() -> None:
    look, *_ = looked("sharpness=3")
    assert look.labels is not None
    assert_close(
        look.labels, torch.tensor(plan_by_hand(look.source.double().numpy(), 0.2, 3.0, 3)).float()
    )
    found = {name: value for name, (value, _) in measures(look).items()}
    assert found["label_evenness"] > found["similarity_evenness"]
    by_keys, *_ = looked("sharpness=3", "teacher=keys")
    assert by_keys.labels is not None
    assert_close(by_keys.source, look.source)
    assert not torch.allclose(by_keys.labels, look.labels)


@pytest.mark.parametrize(
    ("changes", "sides", "labels"),
    [
        (("method=mocov2plus",), 2, False),
        (("label_weight=0",), 2, False),
        (("positive_mass=1",), 2, False),
        (("weak_keys=true", "predictor_hidden=8"), 2, True),
        (("method=ressl",), 1, False),
        (("method=sce", "symmetric=true"), 2, False),
        (("method=co2",), 1, False),
        (("method=jcl", "key_views=2"), 1, False),
        (("method=alignuniform", "symmetric=true"), 2, False),
        (("method=co2", "symmetric=true", "label_weight=1"), 2, True),
        (("method=mocov2plus", "label_weight=1"), 2, True),
    ],
)
def test_any_method_with_banks_can_be_looked_at(
    changes: tuple[str, ...], sides: int, labels: bool
) -> None:
    look, *_ = looked(*changes)
    assert (look.target is not None) == (sides == 2)
    assert (look.labels is not None) == labels
    found = measures(look)
    assert ("similarity_gap" in found) == (sides == 2)
    assert ("labelled_of_own_class" in found) == labels
    for value, _ in found.values():
        assert math.isfinite(value)


@pytest.mark.parametrize("changes", [(), ("label_weight=1", "positive_mass=0.5")])
def test_negatives_in_the_batch_can_be_looked_at(changes: tuple[str, ...]) -> None:
    config = configured("method=simclr", *changes)
    look = similarities(config).look(built(config))
    assert look is not None
    assert look.target is not None
    assert_close(look.target, look.source.T)
    assert (look.labels is not None) == bool(changes)


@pytest.mark.parametrize("method", ["byol", "swav", "vicreg", "msf"])
def test_methods_without_negatives_are_not(method: str) -> None:
    config = configured(f"method={method}")
    looking = similarities(config)
    assert looking.look(built(config)) is None
    assert picture_negatives(looking, built(config)) is None


def test_without_labels_nothing_is_told_of_classes() -> None:
    look, _, looking = looked(images=pictures(labelled=False))
    names = {record.measure for record in looking.records(look, 1, 5)}
    assert names == {
        *("similarity_gap", "similarity_gap_unrelated", "similarity_evenness", "label_evenness"),
    }


def test_records_name_their_protocol() -> None:
    look, _, looking = looked("seed=3", "temperature=0.3")
    first = looking.records(look, epoch=2, step=10)[0]
    assert isinstance(first, Record)
    assert (first.measure, first.unit, first.subject, first.seed) == (
        *("similarity_gap", "cosine", "xmoco", 3),
    )
    assert first.protocol == {
        "data": "pictures",
        "images": FEWEST_IMAGES,
        "views": "random, always the same",
        "size": 8,
        "temperature": 0.3,
        "largest": 5,
        "epoch": 2,
        "step": 10,
    }


# What it costs


@given(st.integers(1, 2_000_000), st.integers(1, 50))
def test_looks_cost_half_a_percent_at_most(images: int, knn_every: int) -> None:
    """A look takes four forward passes an image; training eight, ways back included."""
    between, looked_at = epochs_between(images, knn_every), sample_size(images, knn_every)
    assert between % knn_every == 0
    assert between >= knn_every
    assert looked_at <= min(images, MOST_IMAGES)
    assert looked_at >= min(images, FEWEST_IMAGES)
    assert 4 * looked_at <= 0.005 * 8 * images * between


def test_when_to_look() -> None:
    looking = similarities(configured("epochs=9"), pictures(1200))
    assert [epoch for epoch in range(10) if looking.due(epoch)] == [0, 4, 8, 9]
    never = similarities(configured("knn_every=0"))
    assert not any(never.due(epoch) for epoch in range(5))


@pytest.mark.parametrize("changes", [(), ("batch_norm=split", "batch_norm_groups=2")])
def test_training_is_the_same_whether_anybody_looks(
    tmp_path: Path, changes: tuple[str, ...]
) -> None:
    """To the bit: weights, banks, history, batch statistics, and the numbers that are drawn."""
    states: list[dict[str, Tensor]] = []
    for looks in (False, True):
        config = configured(*changes)
        training = prepare_training(
            config, build_fabric(config.run), pictures(), RunFolder(tmp_path)
        )
        looking = similarities(config)
        training.task.train()
        stream = training.batches.from_step(0)
        for _ in range(4):
            if looks:
                before = torch.get_rng_state()
                assert isinstance(training.task, Method)
                assert looking.look(training.task) is not None
                assert torch.equal(torch.get_rng_state(), before)
                assert training.task.training
                assert training.task.encoder.training
            training.advance(stream)
        stream.close()
        states.append(dict(training.task.state_dict()))
    for name, value in states[0].items():
        assert torch.equal(value, states[1][name]), name


# The sheet


def test_the_sheet_shows_the_negatives_with_the_largest_labels() -> None:
    look, method, looking = looked()
    queries, negatives, shares = strongest(look, queries=4, count=3)
    assert queries.tolist() == [0, 15, 31, 47]
    assert look.labels is not None
    for query, own, values in zip(queries, negatives, shares, strict=True):
        row = look.labels[query]
        assert query not in own
        assert values.tolist() == sorted(row.tolist(), reverse=True)[:3]
        assert_close(row[own], values)
    png = picture_negatives(looking, method)
    assert png is not None
    assert png.startswith(b"\x89PNG")


@pytest.mark.parametrize("count", [1, 2, 7])
def test_a_few_images_are_enough(count: int) -> None:
    config = configured()
    looking = similarities(config, pictures(count))
    look = looking.look(built(config))
    if count == 1:
        assert look is None
        return
    assert look is not None
    assert len(look.source) == count
    assert picture_negatives(looking, built(config)) is not None


@pytest.mark.gpu
@pytest.mark.parametrize(
    "changes", [(), ("method=mocov2plus",), ("batch_norm=split", "batch_norm_groups=2")]
)
def test_a_look_on_a_gpu_is_that_of_a_cpu(
    tmp_path: Path, changes: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # it would blur the comparison
    config = configured(*changes, "device=cuda", "precision=fp32")
    training = prepare_training(config, build_fabric(config.run), pictures(), RunFolder(tmp_path))
    training.task.train()
    stream = training.batches.from_step(0)
    for _ in range(3):
        training.advance(stream)
    assert isinstance(training.task, Method)
    here = NegativesMonitor(config, "work", pictures(), torch.device("cuda")).look(training.task)
    elsewhere = build_method(config)
    elsewhere.load_state_dict(training.task.state_dict())
    there = similarities(config).look(elsewhere)
    assert here is not None
    assert there is not None
    assert_close(here.source.cpu(), there.source, rtol=1e-3, atol=1e-3)
    if there.labels is not None:
        assert here.labels is not None
        assert_close(here.labels.cpu(), there.labels, rtol=1e-2, atol=1e-3)


def test_a_look_spares_cudnn_its_search(monkeypatch: pytest.MonkeyPatch) -> None:
    config = configured()
    method, searched = build_method(config), set()
    method.prepare_for(pictures())
    backbone = method.encoder.backbone
    backbone.register_forward_hook(lambda *_: searched.add(torch.backends.cudnn.benchmark))
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    assert similarities(config).look(method) is not None
    assert searched == {False}
    assert torch.backends.cudnn.benchmark
