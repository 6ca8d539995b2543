"""Recipes and ``key=value`` changes become a configuration; every mistake becomes a sentence.

A recipe may come from anyone, too: it is text of a bearable length, without aliases, by which a few
hundred bytes could stand for gigabytes.
"""

import copy
import os
import re
import shlex
from collections.abc import Iterable, Mapping
from functools import cache, lru_cache
from importlib import resources
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError
from pydantic.fields import FieldInfo

from xmoco.config import KINDS, Config, InputConfig
from xmoco.config.section import Section
from xmoco.errors import UserError, nearest
from xmoco.files import text_of
from xmoco.text import printable, shortened

LONGEST_YAML = 2**17
"""Letters of a recipe or a value; the longest recipe here has 2,000."""
MOST_HEIRS = 20
"""Recipes that inherit from each other in a row."""
MOST_MISTAKES = 10
"""That are told of at once."""
LONGEST_REASON = 300
"""Letters of why yaml is not valid."""

# What other programs and the paper call some settings: not keys, but we know what is meant.
OTHER_NAMES = {
    "lr": "learning_rate",
    "wd": "weight_decay",
    "tau": "temperature",
    "lambda": "sharpness",
    "xi": "positive_mass",
    "K": "bank_length",
    "workers": "readers",
    "judged_size": "eval_size",
    "resident_gib": "preload_gib",
}

Settings = dict[str, dict[str, Any]]


def load_config(
    recipe: str | Path | None = None,
    overrides: Iterable[str] = (),
    settings: Mapping[str, Any] | None = None,
    below: Mapping[str, Any] | None = None,
) -> Config:
    """The recipe (a name, a yaml file, or none for plain defaults) with changes to it.

    Changes come as ``key=value`` texts and as a mapping of keys to values; those ``below`` give way
    to them. A key is ``section.field``, or just ``field``, which is that of the first section that
    has it. All mistakes are reported at once, in one ``UserError``.
    """
    mistakes: list[str] = []
    asked: list[tuple[str, Any]] = []
    for override in overrides:
        key, equals, text = override.partition("=")
        if equals:
            asked.append((key.strip(), _parse(key.strip(), text)))
        else:
            is_there = os.path.exists(override)  # noqa: PTH110 - unlike Path's, it never raises
            meant = f" (for images: --data {shlex.quote(override)})" if is_there else ""
            mistakes.append(f"{shortened(override)} is not of the form key=value{meant}")
    merged = {} if recipe is None else read_recipe(recipe)
    for layer in ((below or {}).items(), [*asked, *(settings or {}).items()]):
        merged = _merged(merged, _by_section(layer, mistakes))
    return _validated(merged, mistakes)


def _by_section(changes: Iterable[tuple[str, Any]], mistakes: list[str]) -> Settings:
    found: Settings = {}
    for key, value in changes:
        path = find_field(key)
        if path is None:
            known = [name for pair in all_fields() for name in (pair[1], ".".join(pair))]
            mistakes.append(_unknown(key, known))
        else:
            section, field = path
            found.setdefault(section, {})[field] = value
    return found


def read_config(path: Path) -> Config:
    """The configuration in a run's config.yaml."""
    try:
        return config_from_settings(read_yaml(read_text(path), "it"))
    except UserError as error:
        raise UserError(f"{path} cannot be used: {error}") from None


def config_from_settings(settings: Any) -> Config:
    """Settings as they stand in a run's config.yaml."""
    if not isinstance(settings, dict):
        raise UserError("it holds no settings.")
    return _validated(settings, [])


def read_recipe(recipe: str | Path, heirs: tuple[str, ...] = ()) -> Settings:
    """The settings of a recipe, those of the recipe it ``inherits`` from included.

    ``heirs`` are the recipes that inherit from this one.
    """
    text, where = _recipe_text(recipe)
    if where in heirs:
        raise UserError(f"{where} inherits from itself.")
    if len(heirs) > MOST_HEIRS:
        raise UserError(f"{where} has more than {MOST_HEIRS} heirs, each of the one before.")
    content = read_yaml(text, where) or {}
    if not isinstance(content, dict):
        raise UserError(
            f"{where} must hold sections such as `train:`, not {type(content).__name__}."
        )
    parent = content.pop("inherits", None)
    if parent is not None and not isinstance(parent, str):
        raise UserError(
            f"{where} must inherit from one recipe by name, not from {shortened(parent)}."
        )
    for section, fields in content.items():
        if section in KINDS and isinstance(fields, str):
            content[section] = {"name": fields}
        elif not isinstance(fields, dict):
            raise UserError(
                f"{where}: {printable(str(section)[:80])} must hold keys and values, not "
                f"{shortened(fields)}."
            )
    if parent is None:
        return content
    if _is_file(parent):  # looked for beside the file that inherits from it
        try:
            parent = (Path(recipe).parent / parent).resolve()
        except (OSError, ValueError, RuntimeError):  # a name no file can have, or links in a circle
            raise UserError(f"{where} cannot inherit from {shortened(parent)}.") from None
    return _merged(read_recipe(parent, (*heirs, where)), content)


def recipe_names() -> list[str]:
    folder = resources.files("xmoco") / "recipes"
    return sorted(item.name[:-5] for item in folder.iterdir() if item.name.endswith(".yaml"))


@cache
def all_fields() -> dict[tuple[str, str], FieldInfo]:
    """Every (section, field) of any method and optimiser."""
    found: dict[tuple[str, str], FieldInfo] = {}
    for section, info in Config.model_fields.items():
        for kind in KINDS[section].values() if section in KINDS else [info.annotation]:
            assert isinstance(kind, type)
            assert issubclass(kind, Section)
            found |= {(section, field): about for field, about in kind.model_fields.items()}
    return found


def setting_descriptions(config: Config) -> dict[str, list[tuple[str, str, str]]]:
    """By section: key, value and meaning of every setting."""
    described = {}
    for section in Config.model_fields:
        values = getattr(config, section)
        described[section] = [
            (field, as_yaml(getattr(values, field)), info.description or "")
            for field, info in type(values).model_fields.items()
        ]
    return described


def as_yaml(value: Any) -> str:
    """A setting's value as it may stand in ``key=value``."""
    text = yaml.dump(value, Dumper=_Dumper, default_flow_style=True)
    return text.removesuffix("\n...\n").strip()


def config_yaml(config: Config) -> str:
    settings = config.model_dump(mode="json")
    return yaml.dump(settings, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


FREE = {
    "data": ("source", "root", "download", "preload_gib"),
    "train": ("log_every", "checkpoint_minutes"),
}
"""What may change when a run is resumed, beside the section ``run``: where its images are, as a
fingerprint tells whether they are still the same, and how often something is written."""


def is_bound(section: str, field: str) -> bool:
    """Whether a run keeps this setting from its beginning to its end."""
    return section != "run" and field not in FREE.get(section, ())


def differences(old: Config, new: Config) -> list[str]:
    """``section.field: old → new`` for all that a run keeps."""
    before, after = old.model_dump(), new.model_dump()
    found = []
    for section in before:
        for field in filter(lambda name: is_bound(section, name), before[section] | after[section]):
            was, now = before[section].get(field), after[section].get(field)
            if was != now:
                found.append(f"{section}.{field}: {was} → {now}")
    return found


def _recipe_text(recipe: str | Path) -> tuple[str, str]:
    if str(recipe) in recipe_names():
        resource = resources.files("xmoco") / "recipes" / f"{recipe}.yaml"
        return resource.read_text(encoding="utf-8"), f"recipe {recipe}"
    if _is_file(recipe):
        try:
            return read_text(Path(recipe)), str(recipe)
        except UserError as error:
            raise UserError(f"cannot read the recipe {recipe}: {error}") from None
    names = recipe_names()
    raise UserError(
        f"unknown recipe {shortened(str(recipe))}{nearest(str(recipe), names)}; "
        f"there are {', '.join(names)}, or give a .yaml file."
    )


def _is_file(recipe: str | Path) -> bool:
    return Path(recipe).suffix in {".yaml", ".yml"}


def read_text(path: Path) -> str:
    try:
        return text_of(path, LONGEST_YAML)
    except (OSError, ValueError) as error:
        raise UserError(getattr(error, "strerror", None) or "it is not a text file") from None


def read_yaml(text: str, where: str) -> Any:
    if len(text) > LONGEST_YAML:
        raise UserError(f"{where} is longer than {LONGEST_YAML:,} letters.")
    try:
        return copy.deepcopy(_loaded(text))
    except RecursionError:
        raise UserError(f"{where} is not valid yaml: it is nested too deeply.") from None
    except (yaml.YAMLError, ValueError, OverflowError, LookupError, TypeError) as error:
        # Not only yaml's own errors: a date such as 2024-13-45, or a number that is none.
        reason = " ".join(str(error).split())
        raise UserError(f"{where} is not valid yaml: {reason[:LONGEST_REASON]}") from None


@lru_cache(maxsize=64)
def _loaded(text: str) -> Any:
    """The rows of a table read the same few recipes again and again."""
    return yaml.load(text, Loader=_Loader)


def find_field(key: str) -> tuple[str, str] | None:
    """The section and field that a key stands for."""
    if key in KINDS:
        return key, "name"
    return next((pair for pair in all_fields() if key in (pair[1], ".".join(pair))), None)


def value_of(config: Config, key: str) -> Any:
    """What a setting is; nothing where the method or optimiser has no such setting."""
    path = find_field(key)
    return None if path is None else getattr(getattr(config, path[0]), path[1], None)


def _parse(key: str, text: str) -> Any:
    """The value of ``key=text``: yaml, except that a setting which is text is taken as it is."""
    path = find_field(key)
    if path is not None and all_fields()[path].annotation is str:
        return text
    try:
        return read_yaml(text, key)
    except UserError:
        return text


def _merged(below: Settings, above: Settings) -> Settings:
    """``above`` laid over ``below``, key by key.

    Where ``above`` names another method or optimiser, only what means the same to both is kept;
    where it names another size of views, the size in evaluations that suited the old one is not.
    """
    for section, kinds in KINDS.items():
        name = above.get(section, {}).get("name")
        own = below.get(section, {})
        if isinstance(name, str) and name in kinds:
            former = kinds.get(str(own.get("name")), next(iter(kinds.values())))
            kept = {k: v for k, v in own.items() if _means_the_same(k, former, kinds[name])}
            below = below | {section: kept}
    old = below.get("input", {})
    size = old.get("size", InputConfig().size)
    if above.get("input", {}).get("size", size) != size:
        below = below | {"input": old | {"eval_size": None}}
    return below | {section: below.get(section, {}) | above[section] for section in above}


def _means_the_same(field: str, old: type[Section], new: type[Section]) -> bool:
    """Whether another kind of a section may take a field over: both have it from a class that they
    share, and it is nothing that stays with the old one. What is not of the old one was meant for
    the new one."""
    if old is new or field not in old.model_fields or field == "name":
        return True
    if any(field in getattr(c, "staying", ()) for c in (*old.__mro__, *new.__mro__)):
        return False
    shared = [c for c in old.__mro__ if issubclass(new, c)]
    return any(field in vars(c).get("__annotations__", {}) for c in shared)


def _validated(settings: Settings, mistakes: list[str]) -> Config:
    settings = dict(settings)
    for section, kinds in KINDS.items():
        chosen = settings.get(section)
        if isinstance(chosen, dict):
            settings[section] = {"name": next(iter(kinds))} | chosen
    try:
        config = Config.model_validate(settings)
    except ValidationError as error:
        found = error.errors()
        room = max(0, MOST_MISTAKES - len(mistakes))
        mistakes = mistakes + [_sentence(item) for item in found[:room]]
        mistakes += [f"and {len(found) - room:,} more"] if len(found) > room else []
    if mistakes:
        raise UserError("; ".join(dict.fromkeys(mistakes)) + ".")
    return config


def _unknown(key: str, known: Iterable[str]) -> str:
    return f"unknown key {shortened(key)}{_suggestion(key, known)}"


def _suggestion(key: str, known: Iterable[str]) -> str:
    field = key.rpartition(".")[2]
    elsewhere = (".".join(pair) for pair in all_fields() if pair[1] == field)
    meant = OTHER_NAMES.get(field) or next(elsewhere, None)
    return f" (did you mean {meant}?)" if meant else nearest(key, known)


# By pydantic's name of an error, where its own words are not a user's.
_WANTED = {
    "int_type": "must be a whole number",
    "float_type": "must be a number",
    "bool_type": "must be true or false",
    "string_type": "must be text, in quotes if it looks like something else",
    "string_too_short": "must not be empty",
    "model_type": "must hold keys and values",
    "model_attributes_type": "must hold keys and values",
}


def _sentence(error: Any) -> str:
    """One pydantic error as ``section.field = value: what it must be``."""
    place = [str(part) for part in error["loc"]] or ["a key"]
    kind = place.pop(1) if place[0] in KINDS and len(place) > 1 else None
    key, value = ".".join(place), error["input"]
    fields = all_fields()
    match error["type"]:
        case "extra_forbidden" if kind and (place[0], place[1]) in fields:
            return f"{kind} has no setting {place[1]}"
        case "extra_forbidden" | "invalid_key":
            known = map(".".join, fields) if len(place) > 1 else Config.model_fields
            return _unknown(key, known)
        case "union_tag_invalid":
            name, kinds = value.get("name"), KINDS[place[0]]
            what = {"method": "method", "optim": "optimiser"}[place[0]]
            there = ", ".join(kinds)
            return f"unknown {what} {shortened(name)}{nearest(str(name), kinds)}; there are {there}"
        case "value_error":
            wanted = str(error["ctx"]["error"])
        case other:
            wanted = _WANTED.get(other) or error["msg"].replace("Input should", "must")
    if value is None and wanted.startswith("must"):
        return f"{printable(key)} has no value: it {wanted}"
    return f"{printable(key)} = {shortened(value)}: {wanted}"


class _Loader(yaml.SafeLoader):
    """Safe yaml that reads 1e-4 as a number (yaml 1.1 asks for 1.0e-4) and takes no aliases."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("aliases are not taken")
        return super().compose_node(parent, index)


class _Dumper(yaml.SafeDumper):
    """Writes what ``_Loader`` reads: the text 1e-4 needs quotes, and nothing is an alias."""

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002
        return True


for _side in (_Loader, _Dumper):
    _side.add_implicit_resolver(
        "tag:yaml.org,2002:float",
        re.compile(r"^[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+$"),
        list("-+0123456789."),
    )
