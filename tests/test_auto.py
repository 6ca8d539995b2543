"""``--recipe auto``: what is chosen over counts, sizes and devices."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from xmoco.asked import Asked
from xmoco.auto import (
    FEWEST_EPOCHS,
    OWN_SIZES,
    PATIENCE,
    AutoRecipe,
    Situation,
    choose,
    duration,
    following,
    images_measured,
    look_at,
    pace,
)
from xmoco.auto import images_per_second as measured
from xmoco.config import KINDS, Config, ModelConfig
from xmoco.data import ArrayImages, Batches
from xmoco.data.batches import equal_share
from xmoco.errors import UserError
from xmoco.methods import build_method, method_class
from xmoco.nn.encoding import resolve_batch_norm
from xmoco.settings import load_config

COST = {"resnet18": 1.0, "resnet50": 2.3, "tiny": 0.06}


def two_cores(base: str, changes: dict[str, Any]) -> float:
    """About what two cores do: the work of a network grows with the area of its views."""
    del base
    return 12.0 / (COST[changes["backbone"]] * (changes["size"] / 128) ** 2)


def never(base: str, changes: dict[str, Any]) -> float:
    raise AssertionError("a GPU's speed decides nothing")


def chosen(images: int, side: int, device: str, processes: int = 1) -> tuple[AutoRecipe, Config]:
    situation = Situation(images, side, device, processes)
    recipe = choose(situation, two_cores if device == "cpu" else never)
    return recipe, load_config(recipe.base, settings=recipe.settings())


@pytest.mark.parametrize(
    ("device", "epochs", "told"),
    [("cuda", 800, "8,000 steps in total"), ("cpu", 50, "as many as 20 minutes allow")],
)
def test_epochs_follow_from_the_batch_that_is_asked_for(
    device: str, epochs: int, told: str
) -> None:
    situation = Situation(1000, 128, device, 1, batch=100, size=64, backbone="resnet18")
    recipe = choose(situation, lambda *_: 1000 * 50 / PATIENCE)
    reasons = {choice.setting: choice.reason for choice in recipe.choices}
    assert recipe.settings()["epochs"] == epochs
    assert reasons["epochs"] == told
    assert reasons["batch"] == "10 steps per epoch"


@pytest.mark.parametrize(
    ("images", "size", "base", "backbone"),
    [
        (9_469, 32, "cifar10", "resnet18"),
        (9_469, 64, "imagenette", "resnet18"),
        (1_281_167, 32, "cifar10", "resnet18"),
        (1_281_167, 160, "imagenet", "resnet50"),
    ],
)
def test_the_recipe_suits_the_size_that_is_asked_for(
    images: int, size: int, base: str, backbone: str
) -> None:
    recipe = choose(Situation(images, 375, "cuda", 1, size=size), never)
    chosen = recipe.settings()
    assert (recipe.base, chosen["backbone"], chosen["size"]) == (base, backbone, size)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(("processes", "accumulate", "batch"), [(1, 3, 48), (2, 3, 48), (2, 4, 64)])
def test_a_batch_can_be_cut_into_the_parts_that_are_asked_for(
    device: str, processes: int, accumulate: int, batch: int
) -> None:
    situation = Situation(5_000, 128, device, processes, accumulate=accumulate)
    recipe = choose(replace(situation, images=520), two_cores if device == "cpu" else never)
    assert equal_share(recipe.settings()["batch"], processes, accumulate) >= 2
    wide = choose(situation, two_cores if device == "cpu" else never).settings()["batch"]
    assert wide == batch


@pytest.mark.parametrize(
    ("name", "side", "size"),
    [
        ("test_vit", 30, 32),  # patches of 16 px
        ("vit_tiny_patch16_224", 500, 96),
        ("vit_small_patch14_dinov2", 500, 84),
        ("efficientformer_l1", 500, 224),  # it takes nothing else
    ],
)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_models_of_timm_are_shown_what_they_can_take(
    name: str, side: int, size: int, device: str
) -> None:
    pytest.importorskip("timm")
    backbone = f"timm:{name}"
    recipe = choose(Situation(9_469, side, device, 1, backbone=backbone), lambda *_: 1000.0)
    config = load_config(recipe.base, settings=recipe.settings())
    assert (config.model.backbone, config.model.stem) == (backbone, "imagenet")
    assert (config.input.size, config.input.central_size) == (size, size)
    assert config.method.model_dump()["local_crops"] == 0
    assert all(choice.reason for choice in recipe.choices)


@pytest.mark.parametrize(
    ("backbone", "adamw"),
    [
        *(
            (f"timm:{name}", True)
            for name in ("test_vit", "pvt_v2_b0", "pit_ti_224", "mixer_s32_224")
        ),
        *((f"timm:{name}", True) for name in ("poolformer_s12", "convnext_atto", "resmlp_12_224")),
        *((f"timm:{name}", False) for name in ("test_resnet", "fastvit_t8", "levit_128s")),
        ("resnet18", False),
    ],
)
def test_layers_tell_which_optimiser_suits(backbone: str, adamw: bool) -> None:
    """Not names: of fastvit and levit all norms are those of a convolutional network."""
    pytest.importorskip("timm")
    config = load_config("imagenette", [f"backbone={backbone}", "size=224", "epochs=100"])
    chosen = {one.setting: one.value for one in following(config, other_optimiser=True)}
    assert (chosen.get("optim") == "adamw") == adamw
    assert (chosen.get("decay_norms_and_biases") is False) == adamw
    assert not list(following(config, other_optimiser=False))


@pytest.mark.parametrize(("fast", "words"), [(1234.5, "1,234"), (9.96, "10"), (0.234, "0.23")])
def test_a_slow_pace_is_not_called_nothing(fast: float, words: str) -> None:
    assert pace(fast) == words


SEVERAL = st.sampled_from([("mps", 1)]) | st.tuples(
    st.sampled_from(["cpu", "cuda"]), st.integers(1, 40) | st.sampled_from([64, 500])
)
"""Devices, and how many processes share a batch."""


@given(
    st.integers(4, 200) | st.integers(4, 2_000_000),
    st.integers(8, 4000),
    SEVERAL,
    st.booleans(),
)
def test_choices_are_settings_that_can_work(
    images: int, side: int, device_and_processes: tuple[str, int], hide_keys: bool
) -> None:
    device, processes = device_and_processes
    images = max(images, 2 * processes)  # with fewer, no batch could be normalised
    recipe, config = chosen(images, side, device, processes)
    bank, batch = config.method.model_dump()["bank_length"], config.train.batch
    assert 2 <= bank <= images / 2
    assert config.input.size <= max(32, side)
    assert config.train.epochs >= 1
    assert (config.model.stem == "cifar") == (config.input.size <= 48)
    assert all(choice.reason for choice in recipe.choices)
    assert batch <= images
    assert batch % processes == 0
    norm = resolve_batch_norm(
        config.model,
        processes=processes,
        device=device,
        images_per_forward=batch // processes,
        hide_keys=hide_keys,
    )
    if hide_keys:  # no batch is so small that groups could not be made
        assert norm.batch_norm == ("shuffled" if processes > 1 else "split")
    assert norm.batch_norm_groups == config.model.batch_norm_groups


@pytest.mark.parametrize(
    ("images", "device", "processes", "batch"),
    [
        (50_000, "cuda", 1, 256),
        (50_000, "cuda", 8, 256),
        (50_000, "cuda", 3, 192),
        (50_000, "cuda", 6, 192),
        (1_281_167, "cuda", 1, 512),
        (1_281_167, "cuda", 3, 384),
        (20, "cuda", 1, 16),
        (10, "cpu", 1, 8),
        (10, "cpu", 3, 6),
        (9_469, "cpu", 3, 48),
    ],
)
def test_a_batch_suits_images_and_processes(
    images: int, device: str, processes: int, batch: int
) -> None:
    _, config = chosen(images, 128, device, processes)
    assert config.train.batch == batch


@pytest.mark.parametrize(("images", "processes"), [(1, 1), (3, 8), (8, 9), (11, 6)])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_too_few_images_for_so_many_processes_are_called_too_few(
    images: int, processes: int, device: str
) -> None:
    """And nothing else is wrong with what was chosen."""
    _, config = chosen(images, 32, device, processes)
    pixels = torch.zeros(images, 3, 4, 4, dtype=torch.uint8)
    words = f"a few has {images} images?, too few for a batch of {2 * processes}"
    with pytest.raises(UserError, match=words):
        Batches(
            ArrayImages("a few", pixels),
            batch=config.train.batch,
            seed=0,
            device=torch.device("cpu"),
            processes=processes,
        )


@pytest.mark.parametrize(
    ("images", "side", "device", "expected"),
    [
        (9_469, 128, "cuda", ("imagenette", "resnet18", 96)),
        (50_000, 32, "cuda", ("cifar10", "resnet18", 32)),
        (1_281_167, 375, "cuda", ("imagenet", "resnet50", 224)),
        (200, 500, "cuda", ("imagenette", "resnet18", 96)),
        (1_281_167, 375, "cpu", ("cifar10", "tiny", 32)),
    ],
)
def test_what_well_known_sets_get(
    images: int, side: int, device: str, expected: tuple[str, str, int]
) -> None:
    recipe, config = chosen(images, side, device)
    assert (recipe.base, config.model.backbone, config.input.size) == expected


@pytest.mark.parametrize(
    ("images", "side", "device", "sizes"),
    [
        (50_000, 32, "cuda", (32, 48)),
        (50_000, 48, "cuda", (48, 64)),
        (9_469, 128, "cuda", (96, 160)),
        (9_469, 70, "cuda", (64, 96)),
        (9_469, 85, "cuda", (80, 112)),
        (1_000, 256, "cpu", (64, 96)),
        (1_281_167, 375, "cuda", (224, None)),  # as in the paper
    ],
)
def test_whole_images_are_shown_larger_than_crops(
    images: int, side: int, device: str, sizes: tuple[int, int | None]
) -> None:
    _, config = chosen(images, side, device)
    assert (config.input.size, config.input.eval_size) == sizes


@pytest.mark.parametrize("base", OWN_SIZES)
def test_recipes_have_the_sizes_that_are_ascribed_to_them(base: str) -> None:
    assert load_config(base).input.size == OWN_SIZES[base]


@pytest.mark.parametrize("method", sorted(KINDS["method"]))
def test_small_views_are_small_whatever_the_method(method: str) -> None:
    recipe = choose(Situation(9_469, 128, "cuda", 1), never)
    has_any = "local_crops" in KINDS["method"][method].model_fields
    wanted = ("local_crops=4", "local_size=null") if has_any else ()
    asked = Asked(None, (f"method={method}", *wanted), {})
    config = asked.config(recipe.base, recipe.settings())
    full, *others = method_class(config.method).view_groups(config)
    small = [group for group in others if group.names[0].startswith("small")]
    assert bool(small) == has_any
    assert all(group.input.size == full.input.size // 2 for group in small)


@pytest.mark.parametrize(("device", "small"), [("cuda", 4), ("mps", 4), ("cpu", 0)])
def test_a_cpu_is_spared_small_views(device: str, small: int) -> None:
    _, config = chosen(5_000, 128, device)
    assert config.method.model_dump()["local_crops"] == small


@given(st.integers(40, 20_000), st.integers(32, 1000))
def test_a_cpu_is_done_in_our_patience_or_sees_few_epochs(images: int, side: int) -> None:
    _, config = chosen(images, side, "cpu")
    work = config.train.epochs * (images // config.train.batch) * config.train.batch
    fast = two_cores("", {"backbone": config.model.backbone, "size": config.input.size})
    assert work / fast <= PATIENCE + 1 or config.train.epochs == 1
    if config.model.backbone != "tiny":
        assert config.train.epochs >= FEWEST_EPOCHS


def test_sizes_are_looked_at_and_unreadable_images_are_no_trouble() -> None:
    pixels = torch.zeros(40, 3, 50, 70, dtype=torch.uint8)
    assert look_at(ArrayImages("some", pixels), "cpu", 3) == Situation(40, 50, "cpu", 3)


def test_reasons_are_told_in_words() -> None:
    def reasons(images: int, device: str, processes: int) -> dict[str, str]:
        recipe, _ = chosen(images, 32, device, processes)
        return {choice.setting: choice.reason for choice in recipe.choices}

    on_a_gpu = reasons(5_000, "cuda", 1)
    assert on_a_gpu["batch"] == "78 steps per epoch"
    assert on_a_gpu["epochs"] == "29,640 steps in total"
    assert reasons(20, "cuda", 1)["batch"] == "1 step per epoch"
    assert reasons(5_000, "cpu", 1)["backbone"].endswith(" images/s on this CPU")
    assert reasons(5_000, "cpu", 3)["backbone"].endswith(" images/s on 3 CPU processes")


@pytest.mark.parametrize("method", ["xmoco", "supervised", "instdisc"])
def test_speed_is_measured_by_a_few_steps(method: str) -> None:
    """Also of who learns from more than noise: labels or positions are made up."""
    config = load_config("demo", [f"method={method}"], settings={"batch": 8})
    fast = measured(config, torch.device("cpu"), images_per_forward=4)
    assert math.isfinite(fast)
    assert fast > 0


@pytest.mark.parametrize(
    ("precision", "computed"), [("bf16", torch.bfloat16), ("auto", torch.float32)]
)
def test_speed_is_measured_in_the_precision_of_the_run(
    precision: str, computed: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU ``auto`` is float32."""
    found = set()

    def build(config: Config) -> Any:
        method = build_method(config)
        head = method.encoder.head
        head.register_forward_hook(lambda _layer, _inputs, made: found.add(made.dtype))
        return method

    monkeypatch.setattr("xmoco.auto.build_method", build)
    config = load_config("demo", settings={"precision": precision})
    measured(config, torch.device("cpu"), images_per_forward=4)
    assert found == {computed}


@pytest.mark.parametrize(("images", "groups"), [(256, 16), (24, 3), (64, 24), (4, 2)])
def test_speed_is_measured_with_the_groups_of_the_run(images: int, groups: int) -> None:
    """Also where sixteen images do not make as many."""
    settings = {"batch": images, "batch_norm": "split", "batch_norm_groups": groups}
    config = load_config("demo", settings=settings)
    assert measured(config, torch.device("cpu"), images_per_forward=images) > 0


@given(st.integers(2, 40), st.integers(2, 200))
def test_enough_images_for_a_measurement(groups: int, each: int) -> None:
    images, split = groups * each, ModelConfig(batch_norm="split", batch_norm_groups=groups)
    few = images_measured(split, "cpu", images)
    assert few <= images
    assert few % groups == 0
    assert few // groups >= 2
    assert few <= max(16, 2 * groups)
    assert few > 8 or few == images  # not fewer than need be
    assert images_measured(split, "cuda", images) == images
    assert images_measured(ModelConfig(batch_norm="plain"), "cpu", images) == min(16, images)


@pytest.mark.parametrize("batch_norm", ["shuffled", "synchronised"])
def test_speed_is_measured_without_other_processes(
    batch_norm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They wait meanwhile, and would never answer."""
    built: list[ModelConfig] = []

    def build(config: Config) -> Any:
        built.append(config.model)
        return build_method(config)

    monkeypatch.setattr("xmoco.auto.build_method", build)
    config = load_config("demo", settings={"batch_norm": batch_norm})
    assert measured(config, torch.device("cpu"), images_per_forward=4) > 0
    assert [model.batch_norm for model in built] == ["plain"]
    assert config.model.batch_norm == batch_norm


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(40, "40 seconds"), (600, "10 minutes"), (7200, "2.0 hours"), (500_000, "5.8 days")],
)
def test_durations_in_words(seconds: float, words: str) -> None:
    assert duration(seconds) == words


def test_a_slow_cpu_is_measured_by_fewer_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    config, steps = load_config("demo"), []

    def build(config: Config) -> Any:
        method = build_method(config)
        method.encoder.head.register_forward_hook(lambda *_: steps.append(1))
        return method

    monkeypatch.setattr("xmoco.auto.build_method", build)
    assert measured(config, torch.device("cpu"), images_per_forward=4) > 0
    of_three = len(steps)
    monkeypatch.setattr("xmoco.auto.LONGEST_MEASUREMENT", 0.0)
    assert measured(config, torch.device("cpu"), images_per_forward=4) > 0
    assert len(steps) - of_three == of_three // 3
