"""What a run will be: settings asked for or chosen, and what a person should know beforehand."""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.text import Text

from xmoco.asked import AUTO_BASE, Asked
from xmoco.auto import (
    OF_WEIGHTS,
    AutoRecipe,
    Choice,
    choose,
    duration,
    following,
    images_per_second,
    look_at,
    pace,
)
from xmoco.config import Config, ModelConfig, RunConfig
from xmoco.config.optimizers import AdamWConfig, SGDConfig
from xmoco.data import ImageSet, open_images
from xmoco.data.batches import batches_per_epoch, equal_share
from xmoco.data.sources import is_path, opened_once
from xmoco.data.stores import has_pattern, is_distant
from xmoco.data.views import ViewGroup
from xmoco.errors import UserError
from xmoco.fabric import Fabric
from xmoco.methods import Method, build_method, method_class
from xmoco.nn.backbone_files import BackboneCard, named_model
from xmoco.nn.encoding import describe_batch_norm, resolve_batch_norm
from xmoco.nn.weights import read_card
from xmoco.settings import as_yaml, find_field, load_config, value_of
from xmoco.starting_weights import Start, expect_size, start_from_weights
from xmoco.text import printable
from xmoco.train.engine import build_fabric, on_first, processes_of

FEW_IMAGES = 100
"""Fewer are likely a mistake: no recipe was tried with so few."""

BEGINNINGS = (
    ("freeze_prototypes_epochs", "prototypes", "prototypes do not move for"),
    ("queue_from_epoch", "queue_length", "the queue takes no part for"),
    ("consistency_warmup_epochs", "consistency_weight", "the weight of consistency rises for"),
    ("agreement_warmup_epochs", "agreement_weight", "the weight of agreement rises for"),
)
"""Settings of a method that end the beginning of training, each with one that is 0 where it does
not matter, and what the beginning is like."""

WEIGHTS = {
    "teacher": ("label_weight", "consistency_weight"),
    "positive_mass_end": ("label_weight",),
    "consistency_warmup_epochs": ("consistency_weight",),
    "agreement_warmup_epochs": ("agreement_weight",),
}
"""Settings that have no effect where all of these weights are 0."""


@opened_once()
def show_plan(
    recipe: str | Path | None = None,
    *,
    data: str | Path | None = None,
    weights: str | Path | None = None,
    overrides: Iterable[str] = (),
    **settings: Any,
) -> Config:
    """Print what ``pretrain`` would do with these arguments, and how long it would take."""
    asked = Asked.of(recipe, overrides, settings, data=data, weights=weights)
    fabric, console = launched(asked.run_config())
    config = chosen_config(asked, fabric, console)
    images = open_images(config.data, "train")
    assert images is not None
    _steps_per_epoch(config, images, fabric)  # too large a batch is told before anything else
    here, method, start = method_at_start(config, fabric, images)
    warnings = (f"warning: {warning}" for warning in start.warnings)
    for line in (*about(here, method, images, fabric), *warnings):
        say(console, line)
    if not asked.automatic:  # which has told it already
        say(console, on_first(fabric, lambda: forecast(config, images, fabric)))
    return config


def launched(run: RunConfig) -> tuple[Fabric, Console]:
    fabric = build_fabric(run)
    fabric.launch()
    return fabric, Console(quiet=not fabric.is_global_zero)


def chosen_config(asked: Asked, fabric: Fabric, console: Console) -> Config:
    """Every setting of a new run."""
    if not asked.automatic:
        config = asked.config(asked.recipe)
        _expect_images(config, asked.recipe)
        return with_full_paths(config)
    config = with_full_paths(asked.config(AUTO_BASE))
    if not _asks_for(asked, "source"):
        raise UserError("no images given: pass --data PATH, a folder, an archive or a known set.")
    images = open_images(config.data, "train")
    assert images is not None
    if _asks_for(asked, "batch"):  # too large a batch needs no measurement
        _steps_per_epoch(config, images, fabric)
    start = on_first(fabric, lambda: _start(config, with_size=_asks_for(asked, "size")))
    fixed = {
        setting: value_of(config, setting)
        for setting in ("backbone", "size", "batch", "accumulate")
        if _asks_for(asked, setting)
    }

    def speed(base: str, changes: Mapping[str, Any]) -> float:
        config = asked.config(base, changes)
        return (_speed_of_one(config, fabric) or 0.0) * _at_full_speed(config, fabric)

    def choose_for(images: ImageSet) -> AutoRecipe:
        with console.status(Text(f"looking at {images.name}")):
            situation = look_at(images, fabric.device.type, fabric.world_size)
            return choose(replace(situation, start=start, **fixed), speed)

    chosen = on_first(fabric, lambda: choose_for(images))
    config = asked.config(chosen.base, chosen.settings())
    more = following(config, other_optimiser=not _asks_for_sgd(asked))
    chosen = replace(chosen, choices=(*chosen.choices, *more))
    config = with_full_paths(asked.config(chosen.base, chosen.settings()))
    may_split = not _asks_for(asked, "accumulate")
    parts, fast = on_first(fabric, lambda: _parts_that_fit(config, fabric, may_split))
    if parts != config.train.accumulate:
        split = Choice("accumulate", parts, "a whole batch does not fit in memory")
        chosen = replace(chosen, choices=(*chosen.choices, split))
        config = with_full_paths(asked.config(chosen.base, chosen.settings()))
    told = [one for one in chosen.choices if not _asks_for(asked, one.setting)]
    for line in _choices(chosen.base, told, config):
        say(console, line)
    if fabric.device.type == "cpu" and (keys := _by_speed(told)):
        say(
            console, f"this follows the speed measured just now; to have the same again, add {keys}"
        )
    say(console, _forecast(config, images, fabric, fast))
    return config


def _start(config: Config, with_size: bool) -> BackboneCard | None:
    """The card of the weights to start from, whose size may have to be the run's."""
    if config.model.weights is None:
        return None
    card, _ = read_card(config.model.weights)
    if with_size:
        expect_size(card, config)
    return card


def _parts_that_fit(config: Config, fabric: Fabric, may_split: bool) -> tuple[int, float | None]:
    """Into how many parts a step's batch is cut so that one fits in memory, and how fast that is;
    as it was if none fits or if it ``may`` not be ``split`` further."""
    train, parts = config.train, config.train.accumulate
    fast = _speed_of_one(config, fabric)
    while fast is None and may_split:
        parts *= 2
        share, rest = divmod(train.batch, parts * fabric.world_size)
        if rest or share < 2:  # which batch norm needs
            return train.accumulate, None
        cut = config.model_copy(update={"train": train.model_copy(update={"accumulate": parts})})
        fast = _speed_of_one(cut, fabric)
    return parts, fast


def _asks_for_sgd(asked: Asked) -> bool:
    """Whether the user says which optimiser to take, be it by a setting that only SGD has."""
    only_sgds = SGDConfig.model_fields.keys() - AdamWConfig.model_fields.keys()
    return any(_asks_for(asked, setting) for setting in ("optim", *only_sgds))


def _asks_for(asked: Asked, setting: str) -> bool:
    keys = (override.partition("=")[0].strip() for override in asked.overrides)
    wanted = find_field(setting)
    return any(find_field(key) == wanted for key in (*keys, *asked.settings))


def _by_speed(choices: Iterable[Choice]) -> str:
    """The settings that another moment could make others, as arguments."""
    return " ".join(
        f"{setting}={value}"
        for setting, value, reason in choices
        if setting in ("backbone", "size", "epochs") and reason != OF_WEIGHTS
    )


def _choices(base: str, choices: Iterable[Choice], config: Config) -> Iterator[str]:
    """What was chosen and why; what a method does not have is not told."""
    yield f"recipe auto: starts from {base} and sets"
    for setting, value, reason in choices:
        if value_of(config, setting) == value:
            yield f"  {setting}={as_yaml(value)}: {reason}"


def forecast(config: Config, images: ImageSet, fabric: Fabric) -> str:
    """How long it will take, by the speed of a few steps over noise."""
    _steps_per_epoch(config, images, fabric)  # what cannot be is not measured
    return _forecast(config, images, fabric, _speed_of_one(config, fabric))


def _forecast(config: Config, images: ImageSet, fabric: Fabric, fast: float | None) -> str:
    train = config.train
    steps = train.epochs * _steps_per_epoch(config, images, fabric)
    if fast is None:
        return (
            f"{steps:,} steps, whose speed could not be measured because a batch does not fit in "
            f"memory: lower batch ({train.batch} now) or size ({config.input.size} now), or raise "
            f"accumulate ({train.accumulate} now)"
        )
    seconds = steps * train.batch / (fast * _at_full_speed(config, fabric))
    each = " per process" if fabric.world_size > 1 else ""
    return (
        f"{steps:,} steps will take about {duration(seconds)}, not counting kNN: measured "
        f"{pace(fast)} images/s{each} on random input"
    )


def _steps_per_epoch(config: Config, images: ImageSet, fabric: Fabric) -> int:
    """A ``UserError`` where the images make no such batch."""
    train = config.train
    return batches_per_epoch(images, train.batch, fabric.world_size, train.accumulate)


def _speed_of_one(config: Config, fabric: Fabric) -> float | None:
    """Images per second of each process; none if what goes through the encoder at once does not fit
    in memory. A batch or batch norm that the run could not have is a ``UserError`` here already."""
    here = config.model_copy(update={"model": model_here(config, fabric)})
    try:
        return images_per_second(here, fabric.device, _share(config, fabric.world_size))
    except torch.OutOfMemoryError:
        return None


def _at_full_speed(config: Config, fabric: Fabric) -> int:
    """How many processes are as fast together as one by itself: on a CPU no more than have cores
    of their own for all their threads."""
    if fabric.device.type != "cpu":
        return fabric.world_size
    _, nodes = processes_of(config.run)
    on_each = fabric.world_size // nodes
    return nodes * min(on_each, max(1, _cores() // torch.get_num_threads()))


def _cores() -> int:
    """That this process may use; not every system tells."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def say(console: Console, line: str) -> None:
    console.print(printable(line), markup=False, highlight=False, soft_wrap=True)


def _expect_images(config: Config, recipe: str | Path | None) -> None:
    """Where a recipe only guesses where the images are, somebody has to say."""
    source = config.data.source
    guessed = source == load_config(recipe).data.source and is_path(source)
    if guessed and not _is_there(source):
        raise UserError(
            f"there are no images at {source!r}, where the recipe looks for them: pass --data PATH."
        )


def with_full_paths(config: Config) -> Config:
    """Data and weights by their full paths, so that a run can be resumed from anywhere."""
    data, model = config.data, config.model
    if _is_there(data.source) or (has_pattern(data.source) and not is_distant(data.source)):
        data = data.model_copy(update={"source": _full_path(data.source)})
    if data.source.startswith("torchvision:"):
        data = data.model_copy(update={"root": _full_path(data.root)})
    if model.weights is not None and not named_model(model.weights):
        model = model.model_copy(update={"weights": _full_path(model.weights)})
    return config.model_copy(update={"data": data, "model": model})


def _full_path(path: str) -> str:
    return os.path.abspath(os.path.expanduser(path))  # noqa: PTH100, PTH111


def _is_there(source: str) -> bool:
    """Unlike ``Path``'s own ways, it takes any name: one too long, or of nobody's home."""
    return os.path.exists(os.path.expanduser(source))  # noqa: PTH110, PTH111


def model_here(config: Config, fabric: Fabric, resumed: bool = False) -> ModelConfig:
    """What was ``auto`` becomes what suits these processes and this device."""
    return resolve_batch_norm(
        config.model,
        processes=fabric.world_size,
        device=fabric.device.type,
        images_per_forward=_share(config, fabric.world_size),
        hide_keys=method_class(config.method).hides_keys,
        resumed=resumed,
    )


class AtStart(NamedTuple):
    """A method before its first step."""

    config: Config
    """With what ``auto`` means here."""
    method: Method
    start: Start


def method_at_start(
    config: Config,
    fabric: Fabric,
    images: ImageSet,
    *,
    build: Callable[[Config], Method] = build_method,
    resumed: bool = False,
    with_weights: bool = True,
    digest: str | None = None,
) -> AtStart:
    """The method, built from random numbers of the run's seed and prepared for its images. Without
    weights if a checkpoint will replace them; a ``digest`` is which they must be."""
    here = config.model_copy(update={"model": model_here(config, fabric, resumed)})
    torch.manual_seed(config.train.seed)
    method = build(here)
    start = start_from_weights(method, config, digest) if with_weights else Start(digest)
    method.prepare_for(images)
    return AtStart(here, method, start)


def _share(config: Config, processes: int) -> int:
    """Images that go through the encoder at once."""
    return equal_share(config.train.batch, processes, config.train.accumulate)


def peak_rate(config: Config) -> float:
    return config.optim.learning_rate * config.train.batch / 256


def about(
    config: Config, method: Method, images: ImageSet, fabric: Fabric, other_norm: str = ""
) -> Iterator[str]:
    """What is to be trained, on what, and how."""
    train = config.train
    millions = sum(p.numel() for p in method.encoder.parameters()) / 1e6
    labels = "no labels" if images.classes is None else f"{len(images.classes)} classes"
    yield f"{images.name}: {len(images):,} images, {labels}"
    if images.passed_over is not None:
        yield images.passed_over
    warnings = [
        *_few_images(len(images)),
        *method.warnings(len(images)),
        *_bank_warnings(config),
        *_schedule_warnings(config),
        *_idle_settings(config),
        *_process_warnings(config, fabric),
    ]
    yield from (f"warning: {warning}" for warning in warnings)
    if method.uses_labels:
        yield "trains on labels"
    elif images.classes is not None:
        yield "labels are only used by the kNN monitor"
    parameters = f"{millions:.1f} M parameters including its head"
    yield f"{method.title} on {config.model.backbone}, {parameters}"
    if config.model.weights is not None:
        yield f"the backbone starts from {config.model.weights}"
    yield (
        f"{fabric.world_size} × {fabric.device.type}, batch {train.batch}, learning rate "
        f"{config.optim.learning_rate:g} × {train.batch}/256 = {peak_rate(config):g}"
    )
    yield f"batch norm: {describe_batch_norm(config.model)}{other_norm}"
    central = config.input.eval_size
    judged = f", evaluated on centre crops of {central} px" if central else ""
    yield f"random views of an image: {describe_views(method.views)}{judged}"
    yield from method.run.notes


def _few_images(images: int) -> Iterator[str]:
    if images < FEW_IMAGES:
        many = "1 image" if images == 1 else f"{images} images"
        yield f"hardly anything can be learnt from {many}: take hundreds, better thousands"


def _bank_warnings(config: Config) -> Iterator[str]:
    length, part = value_of(config, "bank_length"), config.train.batch // config.train.accumulate
    if length is not None and length < part:
        yield (
            f"a bank of {length} keys cannot hold those of one batch, of {part} images: raise "
            "bank_length"
        )


def _process_warnings(config: Config, fabric: Fabric) -> Iterator[str]:
    on_each, _ = processes_of(config.run)
    if fabric.device.type == "cpu" and on_each > _cores():
        cores = "1 core" if _cores() == 1 else f"{_cores()} cores"
        yield (
            f"{on_each} processes share {cores}, which is slower than fewer processes: set "
            f"devices={_cores()} or less"
        )


def _schedule_warnings(config: Config) -> Iterator[str]:
    epochs, rising = config.train.epochs, config.optim.warmup_epochs
    if rising > epochs / 2:
        yield (
            f"the learning rate rises for {rising:g} of {epochs} epochs: set warmup_epochs, a "
            f"tenth of them is usual (warmup_epochs={epochs / 10:g})"
        )
    for setting, weight, words in BEGINNINGS:
        late = value_of(config, setting)
        if late is not None and late >= epochs and value_of(config, weight):
            yield f"{words} {late:g} of {epochs} epochs: lower {setting}"


def _idle_settings(config: Config) -> Iterator[str]:
    fields = type(config.method).model_fields
    for setting, weights in WEIGHTS.items():
        asked = setting in fields and value_of(config, setting) != fields[setting].default
        if asked and not any(value_of(config, weight) for weight in weights):
            verb = "is" if len(weights) == 1 else "are"
            yield f"{setting} has no effect: {' and '.join(weights)} {verb} 0"


def describe_views(groups: Sequence[ViewGroup]) -> str:
    return " and ".join(f"{group.count}{_kind(group)} of {group.input.size} px" for group in groups)


def _kind(group: ViewGroup) -> str:
    if not group.names[0].startswith("weak"):
        return ""
    return " weak one" if group.count == 1 else " weak ones"
