"""``--recipe auto``: what is chosen over counts, sizes and devices."""

import math
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
    look_at,
)
from xmoco.auto import images_per_second as measured
from xmoco.config import KINDS, Config
from xmoco.data import ArrayImages
from xmoco.methods import method_class
from xmoco.settings import load_config

COST = {"resnet18": 1.0, "resnet50": 2.3, "tiny": 0.06}


def two_cores(base: str, changes: dict[str, Any]) -> float:
    """About what two cores do: the work of a network grows with the area of its views."""
    del base
    return 12.0 / (COST[changes["backbone"]] * (changes["size"] / 128) ** 2)


def never(base: str, changes: dict[str, Any]) -> float:
    raise AssertionError("a GPU's speed decides nothing")


def chosen(images: int, side: int, device: str) -> tuple[AutoRecipe, Config]:
    recipe = choose(Situation(images, side, device), two_cores if device == "cpu" else never)
    return recipe, load_config(recipe.base, settings=recipe.settings())


@given(st.integers(40, 2_000_000), st.integers(8, 4000), st.sampled_from(["cpu", "cuda", "mps"]))
def test_choices_are_settings_that_can_work(images: int, side: int, device: str) -> None:
    recipe, config = chosen(images, side, device)
    bank = config.method.model_dump()["bank_length"]
    assert bank <= max(2, images / 2)
    assert config.input.size <= max(32, side)
    assert 2 <= config.train.batch <= max(images, 16)
    assert config.train.epochs >= 1
    assert (config.model.stem == "cifar") == (config.input.size <= 48)
    assert config.train.batch // config.model.batch_norm_groups >= 2
    assert all(choice.reason for choice in recipe.choices)


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
    recipe = choose(Situation(9_469, 128, "cuda"), never)
    asked = Asked(None, (f"method={method}",), {})
    config = asked.config(recipe.base, recipe.settings())
    full, *others = method_class(config.method).view_groups(config)
    small = [group for group in others if group.names[0].startswith("small")]
    assert bool(small) == ("local_crops" in type(config.method).model_fields)
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
    assert look_at(ArrayImages("some", pixels), "cpu") == Situation(40, 50, "cpu")


@pytest.mark.parametrize("method", ["xmoco", "supervised", "instdisc"])
def test_speed_is_measured_by_a_few_steps(method: str) -> None:
    """Also of who learns from more than noise: labels or positions are made up."""
    config = load_config("demo", [f"method={method}"], settings={"batch": 8})
    fast = measured(config, torch.device("cpu"), at_once=4)
    assert math.isfinite(fast)
    assert fast > 0


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(40, "40 seconds"), (600, "10 minutes"), (7200, "2.0 hours"), (500_000, "5.8 days")],
)
def test_durations_in_words(seconds: float, words: str) -> None:
    assert duration(seconds) == words
