"""How encoders are run: every fast way computes what one view after the other would."""

import copy
import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from timm.layers import DropPath
from torch import Tensor, nn
from torch.testing import assert_close

from helpers import TINY_SPLIT
from xmoco.config import ModelConfig
from xmoco.errors import UserError
from xmoco.nn.batchnorm import (
    SplitBatchNorm1d,
    SplitStatistics,
    keys_in_split_groups,
    stack_views,
)
from xmoco.nn.blocks import FusedBatchNorm2d
from xmoco.nn.encoder import Encoder, build_encoder, momentum_copy
from xmoco.nn.encoding import EncoderRunner, describe_batch_norm, resolve_batch_norm

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
LATE = 20_000_000
"""Cycles of a GPU: some ten milliseconds."""
PLAIN = TINY_SPLIT.model_copy(update={"batch_norm": "plain"})

each_policy = pytest.mark.parametrize("model", [TINY_SPLIT, PLAIN], ids=["split", "plain"])

# Sides of the views: two alike, one, two full and four small, sizes that alternate.
VIEWS = {"two": (8, 8), "one": (8,), "six": (8, 8, 4, 4, 4, 4), "in turn": (8, 4, 8)}
each_set_of_views = pytest.mark.parametrize("sides", VIEWS.values(), ids=VIEWS)


def views_of(sides: Sequence[int], seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [
        place + torch.randn(16, 3, side, side, dtype=torch.float64, generator=generator)
        for place, side in enumerate(sides)
    ]


def prepared(model: ModelConfig) -> tuple[EncoderRunner, Encoder]:
    torch.manual_seed(0)
    runner, encoder = EncoderRunner(model), build_encoder(model)
    runner.prepare(encoder)
    return runner, encoder.double()


def learn(runner: EncoderRunner, encoder: nn.Module, sides: Sequence[int]) -> dict[str, Tensor]:
    """Features, gradients and running statistics of two steps."""
    learnt: dict[str, Tensor] = {}
    for step in range(2):
        features = runner.encode(encoder, views_of(sides, step))
        learnt |= {f"{step}/{place}": view for place, view in enumerate(features)}
        weights = torch.linspace(-1, 1, features[0].numel()).view(features[0].shape)
        loss = sum(((place + 1) * weights * view).sum() for place, view in enumerate(features))
        assert isinstance(loss, Tensor)
        loss.backward()
    for name, parameter in encoder.named_parameters():
        assert parameter.grad is not None, name
        learnt[f"gradient of {name}"] = parameter.grad
    return learnt | dict(encoder.named_buffers())


# Stacked views, as on a GPU


@each_policy
@each_set_of_views
def test_stacked_views_are_encoded_as_one_after_the_other(
    model: ModelConfig, sides: tuple[int, ...]
) -> None:
    runner, apart = prepared(model)
    stacked = copy.deepcopy(apart)
    on_gpu = EncoderRunner(model)
    on_gpu.optimize_for(CUDA, stacked)  # changes modules only: it runs on the CPU as well
    assert stacked in on_gpu.stacked
    assert apart not in runner.stacked
    assert isinstance(stacked.backbone.bn1, FusedBatchNorm2d)
    # Features are float32 in the end, whatever came before.
    assert_close(learn(on_gpu, stacked, sides), learn(runner, apart, sides), rtol=1e-4, atol=1e-4)
    assert on_gpu.notes == []


@each_set_of_views
def test_views_of_one_size_go_in_one_pass(sides: tuple[int, ...]) -> None:
    runner, encoder = prepared(PLAIN)
    runner.optimize_for(CUDA, encoder)
    passes: list[tuple[int, int]] = []
    encoder.register_forward_pre_hook(
        lambda _, images: passes.append((len(images[0]) // 16, images[0].shape[-1]))
    )
    runner.encode(encoder, views_of(sides))
    expected = {
        VIEWS["two"]: [(2, 8)],
        VIEWS["one"]: [(1, 8)],
        VIEWS["six"]: [(2, 8), (4, 4)],
        VIEWS["in turn"]: [(1, 8), (1, 4), (1, 8)],
    }
    assert passes == expected[sides]
    norms = [norm for norm in encoder.modules() if isinstance(norm, SplitStatistics)]
    assert {norm.views for norm in norms} == {passes[-1][0]}


@pytest.mark.parametrize("views", [1, 4])
def test_norms_that_were_put_back_are_prepared_anew(views: int) -> None:
    """As when a bad step is left out: attributes of modules are again what they were before."""
    runner, encoder = prepared(PLAIN)
    again, same = prepared(PLAIN)
    for one, its in ((runner, encoder), (again, same)):
        one.optimize_for(CUDA, its)
        one.encode(its, views_of((8, 8)))
    stack_views(encoder, views)
    expected = learn(again, same, (8, 8))
    for name, value in learn(runner, encoder, (8, 8)).items():
        assert torch.equal(value, expected[name]), name


@pytest.mark.parametrize("device", ["cpu", "mps"])
def test_elsewhere_views_are_not_stacked(device: str) -> None:
    runner, encoder = prepared(PLAIN)
    kinds = [type(module) for module in encoder.modules()]
    runner.optimize_for(torch.device(device), encoder)
    assert runner.stacked == {}
    assert [type(module) for module in encoder.modules()] == kinds


def test_a_copy_of_a_runner_knows_the_copied_encoders() -> None:
    """As when a whole method is copied."""
    runner, encoder = prepared(PLAIN)
    runner.optimize_for(CUDA, encoder)
    stream: Any = threading.Lock()  # which can be copied as little
    runner.keys_stream = stream
    again, follower = copy.deepcopy((runner, encoder))
    assert follower in again.stacked
    assert encoder not in again.stacked
    assert again.keys_stream is None
    assert runner.keys_stream is stream


@each_policy
@pytest.mark.parametrize("stacked", [False, True])
def test_small_views_leave_no_mark_on_running_statistics(model: ModelConfig, stacked: bool) -> None:
    """Which are for whole images; they are normalised by their own statistics as ever."""
    runner, encoder = prepared(model)
    again, same = prepared(model)
    if stacked:
        runner.optimize_for(CUDA, encoder)
    views = views_of((16, 16, 8, 8))
    features = runner.encode(encoder, views)
    expected = again.encode(same, views[:2])
    assert_close(features[:2], expected, rtol=1e-4, atol=1e-5)
    statistics = {name: value for name, value in same.named_buffers() if "running" in name}
    assert statistics
    for name, value in encoder.named_buffers():
        if name in statistics:
            assert_close(value, statistics[name])
    momenta = {norm.momentum for norm in encoder.modules() if isinstance(norm, nn.BatchNorm2d)}
    assert 0.0 not in momenta
    assert not torch.allclose(features[2], again.encode(same.eval(), views[2:])[0], atol=1e-3)


# Keys


@each_policy
@pytest.mark.parametrize("stacked", [False, True])
def test_keys_are_regrouped_where_statistics_are_split(model: ModelConfig, stacked: bool) -> None:
    runner, encoder = prepared(model)
    alone = copy.deepcopy(encoder)
    if stacked:
        runner.optimize_for(CUDA, encoder)
    views = views_of((8, 8))
    keys = runner.encode_keys(encoder, views)
    assert not any(key.requires_grad for key in keys)
    with torch.no_grad():
        in_order = [copy.deepcopy(alone)(view) for view in views]
        regrouped = [keys_in_split_groups(copy.deepcopy(alone), view, 4) for view in views]
    split = model is TINY_SPLIT
    for key, same, other in zip(keys, in_order, regrouped, strict=True):
        assert_close(key, other if split else same, rtol=1e-4, atol=1e-5)
        assert torch.allclose(key, same, rtol=1e-3, atol=1e-4) != split


@each_policy
def test_queries_and_keys_may_be_of_other_views(model: ModelConfig) -> None:
    runner, encoder = prepared(model)
    momentum_encoder = momentum_copy(encoder)
    views, others = views_of((8, 8)), views_of((8, 8), seed=1)
    queries, keys = runner.queries_and_keys(encoder, momentum_encoder, views, others)
    again, same = prepared(model)
    assert_close(queries, again.encode(same, views))
    assert_close(keys, again.encode_keys(momentum_copy(same), others))
    assert all(query.requires_grad for query in queries)
    assert not any(key.requires_grad for key in keys)


# Two streams, as on a GPU


@each_policy
@pytest.mark.gpu
def test_two_streams_give_what_one_does(
    model: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Again and again, with the memory of one step used in the next. Each side is late, so that who
    does not wait for it finds what was there before."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # it would blur the comparison
    found = []
    for streams in (1, 2):
        runner, encoder = prepared(model)
        momentum_encoder = momentum_copy(encoder)
        encoder.float().to(CUDA)
        momentum_encoder.float().to(CUDA)
        runner.optimize_for(CUDA, encoder, momentum_encoder)
        momentum_encoder.register_forward_pre_hook(lambda *_: torch.cuda._sleep(LATE))
        course = []
        for step in range(10):
            images = [view.float().to(CUDA) for view in views_of((32, 32), seed=step)]
            torch.cuda._sleep(LATE)
            views = [view.clone() for view in images]
            if streams == 2:
                queries, keys = runner.queries_and_keys(encoder, momentum_encoder, views, views)
                assert runner.keys_stream is not None
            else:
                queries = runner.encode(encoder, views)
                keys = runner.encode_keys(momentum_encoder, views)
            (queries[0] * keys[1] + queries[1] * keys[0]).sum().backward()
            course += [value.detach().clone() for value in (*queries, *keys)]
        gradients = [parameter.grad for parameter in encoder.parameters()]
        found.append([*course, *gradients, *encoder.buffers(), *momentum_encoder.buffers()])
    assert_close(found[1], found[0], rtol=1e-4, atol=1e-4)


# Two threads, as on a CPU


@each_policy
@each_set_of_views
def test_two_threads_give_the_same_bits(model: ModelConfig, sides: tuple[int, ...]) -> None:
    """Of features, gradients and statistics. Two views take the way back at once."""
    runner, encoder = prepared(model)
    in_two, same = prepared(model)
    in_two.two_threads = True
    expected, found = learn(runner, encoder, sides), learn(in_two, same, sides)
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


@each_policy
def test_two_threads_give_the_same_queries_and_keys(model: ModelConfig) -> None:
    found = []
    for two_threads in (False, True):
        runner, encoder = prepared(model)
        runner.two_threads = two_threads
        momentum_encoder = momentum_copy(encoder)
        views = views_of((8, 8))
        queries, keys = runner.queries_and_keys(encoder, momentum_encoder, views, views)
        (queries[0] * keys[1] + queries[1].square() * keys[0]).sum().backward()
        gradients = [parameter.grad for parameter in encoder.parameters()]
        statistics = [*encoder.buffers(), *momentum_encoder.buffers()]
        found.append([*queries, *keys, *gradients, *statistics])
    for one, other in zip(*found, strict=True):
        assert one is not None
        assert other is not None
        assert torch.equal(one, other)


def test_with_two_threads_gradients_go_on_beyond_what_is_encoded() -> None:
    """As through a predictor, whose inputs come from an encoder."""
    gradients = []
    for two_threads in (False, True):
        runner, encoder = prepared(PLAIN)
        runner.two_threads = two_threads
        predictor = nn.Linear(16, 16)
        nn.init.eye_(predictor.weight)
        first, second = runner.encode(predictor, runner.encode(encoder, views_of((8, 8))))
        (first * second.roll(1, 0)).sum().backward()
        learned = [*encoder.parameters(), *predictor.parameters()]
        gradients.append([parameter.grad for parameter in learned])
    for one, other in zip(*gradients, strict=True):
        assert one is not None
        assert other is not None
        assert torch.equal(one, other)


@pytest.mark.parametrize("threads", [1, 2])
def test_a_cpu_with_halves_gets_two_threads(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    runner, encoder = prepared(PLAIN)
    runner.optimize_for(CPU, encoder)
    assert runner.two_threads == (threads == 2)
    runner, encoder = prepared(PLAIN)
    runner.optimize_for(CUDA, encoder)
    assert not runner.two_threads


@pytest.mark.parametrize(
    ("layer", "drawn"),
    [(nn.Dropout(0.1), True), (nn.Dropout(0.0), False), (DropPath(0.1), True), (DropPath(), False)],
)
def test_two_threads_do_not_draw_at_once(
    layer: nn.Module, drawn: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    runner, encoder = prepared(PLAIN)
    encoder.head.add_module("drawing", layer)
    runner.optimize_for(CPU, encoder)
    assert runner.two_threads == (not drawn)
    name = type(layer).__name__
    note = f"encoders run one after the other: {name} draws random numbers"
    assert runner.notes == [note] * drawn


# Norms that nobody here knows


class OwnBatchNorm(nn.BatchNorm2d):
    """As other libraries have them: a batch norm that does something more."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def with_own_norm(model: ModelConfig) -> tuple[EncoderRunner, Encoder]:
    torch.manual_seed(0)
    encoder = build_encoder(model)
    encoder.backbone.add_module("bn1", OwnBatchNorm(encoder.backbone.bn1.num_features))
    runner = EncoderRunner(model)
    runner.prepare(encoder)
    return runner, encoder.double()


def test_unknown_norms_are_not_split_and_a_note_says_so() -> None:
    runner, encoder = with_own_norm(TINY_SPLIT)
    assert type(encoder.backbone.bn1) is OwnBatchNorm
    assert isinstance(encoder.head[1], SplitStatistics)  # the others are
    assert runner.notes == [
        "batch norm is not split in OwnBatchNorm: only plain layers of PyTorch can be"
    ]


def test_unknown_norms_make_views_go_one_by_one_and_a_note_says_so() -> None:
    """Stacked, they would share statistics; so the fast way falls back to the same numbers."""
    (runner, encoder), (on_gpu, same) = with_own_norm(PLAIN), with_own_norm(PLAIN)
    on_gpu.optimize_for(CUDA, same)
    assert on_gpu.stacked == {}
    assert on_gpu.notes == [
        "views go through the encoder one by one: OwnBatchNorm has statistics of its own"
    ]
    expected = learn(runner, encoder, VIEWS["six"])
    for name, value in learn(on_gpu, same, VIEWS["six"]).items():
        assert torch.equal(value, expected[name]), name
    assert runner.notes == []


def test_one_encoder_with_unknown_norms_keeps_both_apart() -> None:
    """Or f and g would be run in two ways."""
    runner, encoder = with_own_norm(PLAIN)
    runner.optimize_for(CUDA, build_encoder(PLAIN), encoder)
    assert runner.stacked == {}


def test_synchronised_norms_are_converted_and_never_stacked() -> None:
    model = PLAIN.model_copy(update={"batch_norm": "synchronised"})
    runner, encoder = EncoderRunner(model), build_encoder(model)
    runner.prepare(encoder)
    norms = [m for m in encoder.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    assert {type(norm) for norm in norms} == {nn.SyncBatchNorm}
    runner.optimize_for(CUDA, encoder)
    assert (runner.stacked, runner.notes) == ({}, [])


def test_an_encoder_without_batch_norm_is_stacked_without_a_word() -> None:
    runner = EncoderRunner(PLAIN)
    encoder = nn.Sequential(nn.Flatten(), nn.Linear(12, 5), nn.LayerNorm(5)).double()
    runner.prepare(encoder)
    expected = [encoder(view) for view in views_of((2, 2))]
    runner.optimize_for(CUDA, encoder)
    assert_close(runner.encode(encoder, views_of((2, 2))), expected)
    assert runner.notes == []


# Which batch norm


def resolved_model(
    batch_norm: str = "auto",
    *,
    processes: int = 1,
    device: str = "cpu",
    images: int = 32,
    hide_keys: bool = True,
    groups: int = 8,
    resumed: bool = False,
) -> ModelConfig:
    model = ModelConfig.model_validate({"batch_norm": batch_norm, "batch_norm_groups": groups})
    found = resolve_batch_norm(
        model,
        processes=processes,
        device=device,
        images_per_forward=images,
        hide_keys=hide_keys,
        resumed=resumed,
    )
    own = {"batch_norm": found.batch_norm, "batch_norm_groups": found.batch_norm_groups}
    assert found == model.model_copy(update=own)
    return found


def resolved(batch_norm: str = "auto", **situation: Any) -> str:
    """Where as many groups as asked for are possible, or play no part."""
    found = resolved_model(batch_norm, **situation)
    assert found.batch_norm_groups == situation.get("groups", 8)
    return found.batch_norm


@pytest.mark.parametrize(
    ("hide_keys", "processes", "device", "expected"),
    [
        (True, 1, "cpu", "split"),
        (True, 1, "cuda", "split"),
        (True, 1, "mps", "split"),
        (True, 2, "cpu", "shuffled"),
        (True, 2, "cuda", "shuffled"),
        (False, 1, "cpu", "plain"),
        (False, 1, "cuda", "plain"),
        (False, 1, "mps", "plain"),
        (False, 2, "cpu", "plain"),
        (False, 2, "cuda", "synchronised"),
    ],
)
def test_auto_becomes_what_suits_method_and_processes(
    hide_keys: bool, processes: int, device: str, expected: str
) -> None:
    assert resolved(hide_keys=hide_keys, processes=processes, device=device) == expected


@pytest.mark.parametrize("hide_keys", [True, False])
@pytest.mark.parametrize(
    ("choice", "processes", "device"),
    [
        ("plain", 1, "cpu"),
        ("plain", 2, "cuda"),
        ("split", 1, "cpu"),
        ("split", 2, "cuda"),
        ("shuffled", 2, "cpu"),
        ("shuffled", 2, "cuda"),
        ("synchronised", 1, "cuda"),
        ("synchronised", 2, "cuda"),
    ],
)
def test_a_choice_that_works_stays(
    choice: str, processes: int, device: str, hide_keys: bool
) -> None:
    assert resolved(choice, processes=processes, device=device, hide_keys=hide_keys) == choice


def test_shuffling_needs_somebody_to_shuffle_with() -> None:
    with pytest.raises(UserError, match=r"and there is one; use batch_norm=split, or more devices"):
        resolved("shuffled")


@pytest.mark.parametrize("device", ["cpu", "mps"])
def test_synchronising_needs_cuda(device: str) -> None:
    with pytest.raises(UserError, match="batch_norm=synchronised needs CUDA; use"):
        resolved("synchronised", processes=2, device=device)


@pytest.mark.parametrize("resumed", [False, True])
@pytest.mark.parametrize(("images", "groups"), [(30, 8), (8, 8), (15, 2), (6, 4), (100, 8)])
def test_groups_must_be_equal_and_of_two(images: int, groups: int, resumed: bool) -> None:
    words = rf"equal groups of at least two: {images} images .* do not make {groups}; change batch"
    with pytest.raises(UserError, match=words):
        resolved("split", images=images, groups=groups, resumed=resumed)
    assert resolved("plain", images=images, groups=groups, resumed=resumed) == "plain"


UNHIDDEN = (
    "plain (statistics over a process's batch; keys are not hidden, as batch_norm_groups allows no "
    "equal groups of at least two images)"
)


@pytest.mark.parametrize("resumed", [False, True])
@pytest.mark.parametrize(
    ("images", "groups", "words"),
    [
        (32, 8, "split into 8 groups, keys regrouped"),
        (100, 8, "split into 5 groups, keys regrouped"),
        (30, 8, "split into 6 groups, keys regrouped"),
        (8, 8, "split into 4 groups, keys regrouped"),
        (6, 4, "split into 3 groups, keys regrouped"),
        (4, 8, "split into 2 groups, keys regrouped"),
        (15, 2, UNHIDDEN),
        (7, 8, UNHIDDEN),
        (2, 8, UNHIDDEN),
    ],
)
def test_auto_takes_as_many_groups_as_the_images_make(
    images: int, groups: int, words: str, resumed: bool
) -> None:
    found = resolved_model(images=images, groups=groups, resumed=resumed)
    assert describe_batch_norm(found) == words


@given(images=st.integers(2, 300), groups=st.integers(2, 64))
@example(images=2, groups=10**12)
def test_groups_that_auto_takes_can_be_trained_with_and_are_the_most(
    images: int, groups: int
) -> None:
    found = resolved_model(images=images, groups=groups)
    taken = found.batch_norm_groups
    assert found.batch_norm == ("split" if taken > 1 else "plain")
    assert taken <= groups
    SplitBatchNorm1d(1, taken)(torch.rand(images, 1))
    for more in range(taken + 1, min(groups, images) + 1):
        with pytest.raises(ValueError, match="equal groups with at least two"):
            SplitBatchNorm1d(1, more)(torch.rand(images, 1))


def test_who_shuffled_before_and_is_alone_now_asked_for_no_split() -> None:
    """Which is what both become where a run goes on in one process."""
    for choice in ("auto", "shuffled"):
        assert resolved(choice, images=100, processes=2) == "shuffled"
        assert resolved(choice, images=32, resumed=True) == "split"
        found = resolved_model(choice, images=100, resumed=True)
        assert (found.batch_norm, found.batch_norm_groups) == ("split", 5)
        assert describe_batch_norm(resolved_model(choice, images=7, resumed=True)) == UNHIDDEN


@pytest.mark.parametrize("choice", ["auto", "plain", "split"])
@pytest.mark.parametrize("hide_keys", [True, False])
@pytest.mark.parametrize(
    ("processes", "instead"),
    [(1, "lower accumulate"), (2, "take fewer processes, or lower accumulate where it is above 1")],
)
def test_one_image_has_no_statistics(
    choice: str, hide_keys: bool, processes: int, instead: str
) -> None:
    words = f"at least two images at once: raise batch, or {instead}\\.$"
    with pytest.raises(UserError, match=words):
        resolved(choice, images=1, hide_keys=hide_keys, processes=processes)


def test_the_choice_in_words() -> None:
    words = {
        choice: describe_batch_norm(
            ModelConfig.model_validate({"batch_norm": choice, "batch_norm_groups": 4})
        )
        for choice in ("plain", "split", "shuffled", "synchronised")
    }
    assert words == {
        "plain": "plain (statistics over a process's batch)",
        "split": "split into 4 groups, keys regrouped",
        "shuffled": "keys shuffled between processes",
        "synchronised": "synchronised over all processes",
    }
