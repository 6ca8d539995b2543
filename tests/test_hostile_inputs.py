"""Recipes, names and records that were made to do harm, through the command line."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from helpers import (
    FAST,
    Outcome,
    assert_done,
    assert_refused,
    make_images,
    metrics,
    no_pictures,
    run_cli,
    write_recipe,
)
from xmoco.cli import LONGEST_SENTENCE
from xmoco.settings import config_yaml, load_config, read_config


def settings_of(folder: Path, text: str | bytes) -> Outcome:
    path = folder / "recipe.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    started = time.monotonic()
    outcome = run_cli("settings", "--recipe", path)
    assert time.monotonic() - started < 20
    return outcome


LAUGHS = "\n".join(
    ["a0: &a0 [x, x]", *(f"a{n}: &a{n} [{f'*a{n - 1}, ' * 10}]" for n in range(1, 12))]
)
RECIPES = {
    "aliases that expand": (f"data: {{}}\n{LAUGHS}", "aliases are not taken"),
    "an alias of itself": ("train: &a {b: *a}", "aliases are not taken"),
    "lists in lists": (f"train: {{epochs: {'[' * 50_000}", "nested too deeply"),
    "maps in maps": ("train: " + "{a: " * 20_000, "nested too deeply"),
    "blocks in blocks": ("- " * 40_000, "nested too deeply"),
    "a long text": ("#" * 200_000, "File too large"),
    "a number without end": (f"train: {{epochs: {'9' * 10_000}}}", "not valid yaml"),
    "a large number": (f"train: {{epochs: {'9' * 400}}}", "train.epochs"),
    "another": ("data: {preload_gib: 1.0e+308}", "data.preload_gib = 1e+308: must not be beyond"),
    "a number beyond numbers": ("data: {preload_gib: 1.0e+309}", "data.preload_gib = inf"),
    "a long value": (f"train: {{epochs: {'x' * 100_000}}}", "train.epochs = 'xxx"),
    "a long key": (f"train: {{{'x' * 1000}: 1}}", "unknown key 'train.xxx"),
    "a long section": (f"{'x' * 1000}: {{}}", "unknown key 'xxx"),
    "many keys": (f"train: {{{', '.join(f'k{n}: 1' for n in range(3000))}}}", "and 2,990 more"),
    "many sections": ("\n".join(f"s{n}: {{}}" for n in range(3000)), "and 2,990 more"),
    "a zero byte to inherit from": ('inherits: "a\\0b.yaml"', "cannot inherit from 'a\\x00b.yaml'"),
    "a zero byte in a name": ('inherits: "a\\0b"', "unknown recipe 'a\\x00b'"),
    "a folder to inherit from": ("inherits: folder.yaml", "Is a directory"),
    "half a letter as a section": ('"\\ud800": {}', "a key = '\\ud800': must be a valid string"),
    "codes in a key": ('"\\e[31mred": {}', "unknown key '\\x1b[31mred'"),
    "codes in a section": ('"\\e[31mred": 3', "must hold keys and values"),
    "binary": (b"\xff\xfe\x00\x01", "not a text file"),
    "a tag": ("train: !!python/object/apply:os.system [ls]", "not valid yaml"),
    "a date that is none": ("train: {epochs: 2024-13-45}", "not valid yaml"),
    "a value of another kind": ("train: {epochs: !!binary aGFsbG8=}", "train.epochs"),
    "keys of another kind": ("train: {1: 2, null: 3, 2024-01-01: 4}", "unknown key"),
}


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_that_were_made_to_do_harm(tmp_path: Path, name: str) -> None:
    (tmp_path / "folder.yaml").mkdir()
    text, words = RECIPES[name]
    outcome = settings_of(tmp_path, text)
    assert_refused(outcome, words)
    assert len(outcome.stderr) < LONGEST_SENTENCE
    assert outcome.stderr.rstrip("\n").isprintable()


def test_heirs_without_end(tmp_path: Path) -> None:
    for number in range(100):
        (tmp_path / f"{number}.yaml").write_text(f"inherits: {number + 1}.yaml")
    assert_refused(run_cli("settings", "--recipe", tmp_path / "0.yaml"), "more than 20 heirs")


def test_recipes_in_a_circle_of_links(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").symlink_to(tmp_path / "b.yaml")
    (tmp_path / "b.yaml").symlink_to(tmp_path / "a.yaml")
    (tmp_path / "c.yaml").write_text("inherits: a.yaml")
    assert_refused(run_cli("settings", "--recipe", tmp_path / "a.yaml"), "symbolic links")
    assert_refused(run_cli("settings", "--recipe", tmp_path / "c.yaml"), "a.yaml")


def test_a_recipe_that_never_ends(tmp_path: Path) -> None:
    (tmp_path / "zero.yaml").symlink_to("/dev/zero")
    assert_refused(run_cli("settings", "--recipe", tmp_path / "zero.yaml"), "not supported")


@pytest.mark.parametrize("source", ["~nobody", "~nobody/photos", "a\0b", "x" * 5000, "y/" * 3000])
def test_paths_that_nobody_has(tmp_path: Path, source: str) -> None:
    recipe = {**FAST, "data": {"source": source}}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    outcome = run_cli("pretrain", "--recipe", tmp_path / "recipe.yaml", "--out", tmp_path / "run")
    assert_refused(outcome)
    assert len(outcome.stderr) < LONGEST_SENTENCE + 100
    assert not (tmp_path / "run").exists()


def test_values_are_shown_as_text(tmp_path: Path) -> None:
    outcome = settings_of(tmp_path, 'data: {source: "[/nothing] [red]\\e[31m"}')
    assert_done(outcome)
    shown = outcome.stdout.replace("\n", "").replace(" ", "")
    assert "[/nothing]" in shown
    assert "\x1b" not in shown


def test_configurations_are_written_without_aliases() -> None:
    twice = (0.5, 0.5, 0.5)
    config = load_config("demo", settings={"mean": twice, "std": twice})
    assert "&" not in config_yaml(config)


# Whole runs


@pytest.fixture
def images(tmp_path: Path) -> Path:
    return make_images(tmp_path / "images", each=8)


@pytest.fixture(autouse=True)
def quick() -> Iterator[None]:
    with no_pictures():
        yield


def test_names_of_folders_are_no_markup(tmp_path: Path, images: Path) -> None:
    odd = images.rename(tmp_path / "[nothing] [bold]\x1b[31m")
    recipe = write_recipe(tmp_path / "fast.yaml", odd, train={"epochs": 1})
    outcome = run_cli("pretrain", "--recipe", recipe, "--out", tmp_path / "run")
    assert_done(outcome)
    assert "folder [nothing] [bold]\\x1b[31m: 32 images" in outcome.stdout
    assert "\x1b" not in outcome.stdout + outcome.stderr


def test_a_run_goes_on_with_damaged_notes(tmp_path: Path, images: Path) -> None:
    recipe = write_recipe(tmp_path / "fast.yaml", images, train={"epochs": 1})
    run = tmp_path / "run"
    assert_done(run_cli("pretrain", "--recipe", recipe, "--out", run))
    before = metrics(run)
    for environment in ("[]", "{", '{"batch_norm": 3, "device": {}}', '{"method": []}'):
        with (run / "metrics.jsonl").open("a") as file:
            file.write('3\n{"values": []}\n')
        (run / "environment.json").write_text(environment)
        outcome = run_cli("pretrain", "--resume", "--out", run)
        assert_done(outcome)
        assert "2 lines of metrics.jsonl were damaged and have been left out" in outcome.stdout
        assert metrics(run) == before


@pytest.mark.parametrize("content", ["&a [*a]", "[" * 10_000, "", "3", "train: 3", '"\\e[0m": 1'])
def test_a_run_whose_settings_are_damaged(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.yaml").write_text(content)
    with pytest.raises(Exception, match="cannot be used"):
        read_config(tmp_path / "config.yaml")
    assert_refused(run_cli("pretrain", "--resume", "--out", tmp_path), "cannot be used")
