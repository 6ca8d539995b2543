"""``--recipe auto``: settings that suit the images at hand and the device, each with its reason.

What is chosen depends on four facts only (how many images, how large, which device, how many
processes), on how fast that device is, which is measured, and on what there is no choice of: by the
weights to start from, if there are any, and by the user. Everything else is the recipe's that the
choice starts from.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from xmoco.config import Config, ModelConfig
from xmoco.config.optimizers import AdamWConfig
from xmoco.data.decode import UnreadableImage
from xmoco.data.imagesets import ArrayImages, ImageSet
from xmoco.data.streaming import Batch, sent
from xmoco.distributed import alone
from xmoco.methods import build_method
from xmoco.nn.architectures import timm_name
from xmoco.nn.backbone_files import BackboneCard
from xmoco.nn.backbones import suitable_size, wants_adamw
from xmoco.schedules import Clock, ScheduledValues
from xmoco.train.engine import in_bf16

LOOKED_AT = 16
"""Images whose sizes are looked at."""
PATIENCE = 20 * 60.0
"""Seconds that training on a CPU may take by our own choice."""
FEWEST_EPOCHS = 50
"""On a CPU: a network that could not see the images as often is too large for it."""
MOST_EPOCHS = 400
"""On a CPU."""
MANY = 100_000
"""Images, from which on a larger network has enough to learn."""
OF_WEIGHTS = "that of the weights"
NOT_EVERY_MODEL = "not every model of timm takes images of two sizes"
OWN_SIZES = {"cifar10": 32, "imagenette": 96}
"""Of views by the recipes for few images."""
STEPS = 30_000
"""Wanted on a GPU: what 200 epochs of ten thousand photographs in batches of 64 come to."""
MEASURED_ON_A_CPU = 16
"""Images at once when speed is measured there: a CPU gains little from larger batches, and even a
network far too large for it takes so few in seconds."""


WARM_UP = 0.1
"""Of the epochs, at most: the recipes' warm-ups are for hundreds of epochs."""

LONGEST_MEASUREMENT = 4.0
"""Seconds after which no further step is taken to measure a CPU, nearly all of whose time goes into
computing from the first step on."""


@dataclass(frozen=True)
class Situation:
    """What choices depend on; after the facts what there is no choice of, if anything."""

    images: int
    short_side: int  # of a typical image, in pixels
    device: str
    processes: int  # that share a batch
    start: BackboneCard | None = None  # of the weights to start from
    backbone: str | None = None
    size: int | None = None
    batch: int | None = None
    accumulate: int = 1

    @property
    def network(self) -> str | None:
        """The backbone, where there is no choice."""
        return self.backbone if self.start is None else self.start.backbone


class Choice(NamedTuple):
    setting: str
    value: Any
    reason: str


@dataclass(frozen=True)
class AutoRecipe:
    """A recipe to start from, and what is chosen in place of its settings."""

    base: str
    choices: tuple[Choice, ...]

    def settings(self) -> dict[str, Any]:
        return {choice.setting: choice.value for choice in self.choices}


Speed = Callable[[str, dict[str, Any]], float]
"""Images per second of training by a recipe with changes, over all processes."""


def look_at(images: ImageSet, device: str, processes: int) -> Situation:
    """How many and how large they are, by the size of some of them."""
    places = sorted({n * len(images) // LOOKED_AT for n in range(LOOKED_AT)})
    sides = []
    for place in places:
        try:
            sides.append(min(images.read(place).shape[1:]))
        except UnreadableImage:  # met again in its turn, and told then
            continue
    typical = sorted(sides)[len(sides) // 2] if sides else 224
    return Situation(len(images), typical, device, processes)


def choose(situation: Situation, speed: Speed) -> AutoRecipe:
    """What suits a situation. ``speed`` is asked for on a CPU only, where time decides between the
    networks and sizes that are open."""
    return (_for_cpu if situation.device == "cpu" else _for_gpu)(situation, speed)


def following(config: Config, other_optimiser: bool) -> Sequence[Choice]:
    """What follows from settings by our choice or the user's: the epochs and the backbone.
    ``other_optimiser``: whether the user leaves it to us which one to take."""
    own: list[Choice] = []
    if other_optimiser and wants_adamw(config.model.backbone, config.input.size):
        usual, why = AdamWConfig(), "usual with adamw"
        own += (
            Choice("optim", "adamw", "networks of this kind hardly learn by SGD"),
            Choice("learning_rate", usual.learning_rate, "per 256 images, usual"),
            Choice("weight_decay", usual.weight_decay, why),
            Choice("decay_norms_and_biases", False, why),
        )
    most = round(WARM_UP * config.train.epochs, 2)
    if own or config.optim.warmup_epochs > most:
        own.append(Choice("warmup_epochs", most, f"{WARM_UP:.0%} of {config.train.epochs} epochs"))
    return own


def _for_gpu(situation: Situation, _speed: Speed) -> AutoRecipe:
    images, many = situation.images, situation.images >= MANY
    larger = "cost more than so few images teach"
    views = _views(situation, situation.network, 224 if many else 96, larger)
    usual = "resnet50" if many and views.value > 48 else "resnet18"
    backbone = situation.network or usual
    batch = situation.batch or _batch(
        512 if images >= 500_000 else min(256, max(32, images // 64)), situation
    )
    steps = max(1, images // batch)
    epochs = min(800, max(100, round(STEPS / steps / 10) * 10))
    base = _base(views.value, many)
    return AutoRecipe(
        base,
        (
            views,
            *_evaluation_size(situation, base, backbone, views.value),
            *(_no_small_views(base, NOT_EVERY_MODEL) if timm_name(backbone) else ()),
            *_network(situation, base, backbone, f"{images:,} images suit a network of this size"),
            Choice("batch", batch, _per_epoch(steps)),
            _bank(images),
            Choice("epochs", epochs, f"{epochs * steps:,} steps in total"),
        ),
    )


def _base(size: int, many: bool) -> str:
    return "cifar10" if size <= 48 else "imagenet" if many else "imagenette"


def _candidates(situation: Situation) -> Sequence[tuple[str, Choice]]:
    """Networks and views, the most demanding first. Views as small as 32 px suit a tiny network
    only; a larger one that a user wants has the time it takes."""
    found = [("resnet18", 96), ("resnet18", 64), ("tiny", 64), ("tiny", 32)]
    name = situation.network
    if name is not None:
        found = [(name, most) for most in ((96, 64, 32) if name == "tiny" else (96, 64))]
    larger = "would take too long on a CPU"
    views = ((one, _views(situation, one, most, larger)) for one, most in found)
    return list(dict.fromkeys(views))


def _for_cpu(situation: Situation, speed: Speed) -> AutoRecipe:
    """The largest network and views that see the images often enough within our patience."""
    images = situation.images
    batch = situation.batch or _batch(min(64, max(16, images // 8)), situation)
    steps = max(1, images // batch)
    for backbone, views in _candidates(situation):
        base = _base(views.value, many=False)
        network = {
            choice.setting: choice.value for choice in _network(situation, base, backbone, "")
        }
        fast = speed(base, {**network, "size": views.value, "batch": batch, "local_crops": 0})
        epochs = int(PATIENCE * fast / (steps * batch))
        if epochs >= FEWEST_EPOCHS:
            break
    epochs = min(MOST_EPOCHS, max(1, epochs))
    return AutoRecipe(
        base,
        (
            views,
            *_evaluation_size(situation, base, backbone, views.value),
            *_no_small_views(base, "on a CPU, small views would leave time for fewer epochs"),
            *_network(situation, base, backbone, _about_speed(fast, situation.processes)),
            Choice("batch", batch, _per_epoch(steps)),
            _bank(images),
            Choice("epochs", epochs, _about_epochs(epochs)),
        ),
    )


def _network(situation: Situation, base: str, backbone: str, reason: str) -> Sequence[Choice]:
    """Where weights are given, theirs, and the pixels they know."""
    start = situation.start
    if start is not None:
        own = ("backbone", "stem", "mean", "std")
        return tuple(Choice(name, getattr(start, name), OF_WEIGHTS) for name in own)
    chosen = Choice("backbone", backbone, reason)
    if timm_name(backbone) is None or base != "cifar10":
        return (chosen,)
    return chosen, Choice("stem", "imagenet", "models of timm have their own")


def _views(situation: Situation, backbone: str | None, most: int, larger: str) -> Choice:
    """Their size: no larger than the images and ``most``, than which ``larger`` ones are no good,
    in steps of 16 pixels. Of models of timm, such as transformers, many take some sizes only."""
    start, side = situation.start, situation.short_side
    if situation.size is not None:
        return Choice("size", situation.size, "asked for")
    if start is not None and timm_name(start.backbone):
        return Choice("size", start.size, OF_WEIGHTS)
    size = max(32, min(most, side // 16 * 16))
    if backbone is not None and (taken := suitable_size(backbone, size)) != size:
        return Choice("size", taken, f"{backbone} cannot take images of {size} px")
    return Choice("size", size, _about_size(side, size, larger))


def _evaluation_size(situation: Situation, base: str, backbone: str, size: int) -> Sequence[Choice]:
    """Recipes for few images know what suits their own size; elsewhere about half as much again, in
    steps of 16 pixels, as some backbones want it."""
    start = situation.start
    if timm_name(backbone) and start is not None and situation.size is None:
        return (Choice("eval_size", start.input().central_size, OF_WEIGHTS),)
    if base == "imagenet":
        return ()
    if timm_name(backbone):
        return (Choice("eval_size", size, NOT_EVERY_MODEL),)
    if size == OWN_SIZES[base]:
        return ()
    larger = size * 3 // 2 // 16 * 16
    return (Choice("eval_size", larger, "crops show things larger than whole images do"),)


def _no_small_views(base: str, why: str) -> Sequence[Choice]:
    """Only one recipe has any."""
    return (Choice("local_crops", 0, why),) if base == "imagenette" else ()


def _about_size(side: int, size: int, larger: str) -> str:
    return f"images are {side} px" + (f", and larger views {larger}" if size < side else "")


def _bank(images: int) -> Choice:
    return Choice("bank_length", max(2, min(4096, images // 2)), "no more than half of the images")


def _batch(wanted: int, situation: Situation) -> int:
    """About ``wanted``, but no more than there are images: of every process, and of every part of a
    step, a power of two, and two at least, which batch norm needs. Where there are too few images
    even for that, they are refused as too few for such a batch, as they are by any recipe."""
    shares = situation.processes * situation.accumulate
    share = min(wanted, situation.images) // shares
    return shares * max(2, 1 << (max(1, share).bit_length() - 1))


def _per_epoch(steps: int) -> str:
    return "1 step per epoch" if steps == 1 else f"{steps:,} steps per epoch"


def _about_speed(fast: float, processes: int) -> str:
    where = "this CPU" if processes == 1 else f"{processes} CPU processes"
    return f"trains {pace(fast)} images/s on {where}"


def _about_epochs(epochs: int) -> str:
    return "enough" if epochs == MOST_EPOCHS else f"as many as {duration(PATIENCE)} allow"


def pace(fast: float) -> str:
    """Images per second in words: of a slow one, not 0."""
    return f"{fast:,.0f}" if fast >= 10 else f"{fast:.2g}"


def duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} seconds"
    if seconds < 90 * 60:
        return f"{seconds / 60:.0f} minutes"
    if seconds < 48 * 3600:
        return f"{seconds / 3600:.1f} hours"
    return f"{seconds / 86400:.1f} days"


def images_per_second(config: Config, device: torch.device, images_per_forward: int) -> float:
    """How fast one process trains by ``config``, from a few steps over noise.

    ``config`` and ``images_per_forward`` are those of the run: what its batch norm is has been
    resolved, and a pass through the encoder takes so many images. Other processes take no part.
    """
    with alone():
        count = images_measured(config.model, device.type, images_per_forward)
        return _images_per_second(_without_others(config), device, count)


def images_measured(model: ModelConfig, device: str, images_per_forward: int) -> int:
    """How many images are enough to measure speed with."""
    if device != "cpu":  # whose speed, and whether memory is enough, depend on the number
        return images_per_forward
    few = min(MEASURED_ON_A_CPU, images_per_forward)
    if model.batch_norm != "split":
        return few
    groups = model.batch_norm_groups
    return groups * max(2, few // groups)  # as equal groups of two at least, like the run's own


def _without_others(config: Config) -> Config:
    """Batch norm by which processes talk to each other would wait for those that take no part."""
    if config.model.batch_norm not in ("shuffled", "synchronised"):
        return config
    plain = config.model.model_copy(update={"batch_norm": "plain"})
    return config.model_copy(update={"model": plain})


def _images_per_second(config: Config, device: torch.device, count: int) -> float:
    task = build_method(config)
    noise = _noise_set(count)
    task.prepare_for(noise)
    task.optimize_for(device)
    task.to(device).to(memory_format=torch.channels_last)
    values, bf16 = ScheduledValues(task.schedules()), in_bf16(config.run, device.type)
    views = [_noise(count, group.input.size, device) for group in task.views for _ in group.names]
    batch = Batch(noise.pixels, torch.ones(count, 2), torch.arange(count), noise.labels)
    views += [sent(one, device) for one in task.beside_views(batch)]
    learned = [p for p in task.parameters() if p.requires_grad]
    seconds, begun = math.inf, time.perf_counter()
    for step in range(3):  # the first warms up
        started = time.perf_counter()
        if step and device.type == "cpu" and started - begun > LONGEST_MEASUREMENT:
            break
        at = values.at(Clock(step, 3, 3))
        with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
            task(views, at).loss.backward()
        torch._foreach_zero_([p.grad for p in learned if p.grad is not None])
        task.after_update(at)
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds = min(seconds, time.perf_counter() - started)
    return count / seconds


def _noise_set(count: int) -> ArrayImages:
    """What a method is told of the images: so many, of two classes."""
    labels = torch.arange(count) % 2
    return ArrayImages("noise", torch.zeros(count, 3, 1, 1, dtype=torch.uint8), labels, ("a", "b"))


def _noise(count: int, size: int, device: torch.device) -> Tensor:
    noise = torch.randn(count, 3, size, size, device=device)
    return noise.to(memory_format=torch.channels_last)
