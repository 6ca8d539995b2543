"""What the backbone of a run starts from, if not from random numbers."""

from collections.abc import Iterator
from typing import NamedTuple

import torch

from xmoco.config import Config
from xmoco.data.fingerprint import tensors_digest
from xmoco.errors import UserError
from xmoco.methods import Method
from xmoco.nn.architectures import timm_name
from xmoco.nn.backbone_files import BackboneCard, Weights
from xmoco.nn.backbones import build_backbone, outline
from xmoco.nn.weights import load_weights

SAME_PIXELS = 0.01
"""Means and deviations of colours that differ by less are the same: ImageNet's stand in many
papers, with other last digits."""


class Start(NamedTuple):
    digest: str | None = None
    """Of the weights, if there are any."""
    warnings: tuple[str, ...] = ()


def start_from_weights(method: Method, config: Config, digest: str | None = None) -> Start:
    """Let the backbone start from the weights that the settings name, if they name any.

    With a ``digest``, they must still be those. Random numbers are drawn neither more nor fewer
    for it, so that the rest of the method starts as it would without them.
    """
    weights = config.model.weights
    if weights is None:
        return Start()
    with torch.random.fork_rng(devices=[]):
        loaded = load_weights(weights)
        _check_architecture(loaded, config)
    now = tensors_digest(loaded.backbone.state_dict())[:12]
    if digest is not None and digest != now:
        raise UserError(
            f"{weights} has changed since the run started from it, and there is no checkpoint yet: "
            "start a new run with --out."
        )
    try:
        method.start_from(loaded.backbone)
    except RuntimeError:  # what a transformer knows of places depends on the size of images
        raise _other_size(loaded.card, config) from None
    return Start(now, tuple(_other_pixels(loaded.card, config)))


def expect_size(card: BackboneCard, config: Config) -> None:
    """That these weights can start a run on images of its size, before they are loaded."""
    if timm_name(card.backbone) is None:  # ours take images of any size
        return
    now, then = (
        {name: tensor.shape for name, tensor in outline(card.backbone, size).state_dict().items()}
        for size in (config.input.size, card.size)
    )
    if now != then:
        raise _other_size(card, config)


def _other_size(card: BackboneCard, config: Config) -> UserError:
    return UserError(
        f"{config.model.weights} holds a {card.backbone} for images of {card.size} px, which "
        f"cannot start a run on {config.input.size} px: set size={card.size}."
    )


def _check_architecture(loaded: Weights, config: Config) -> None:
    """The backbone must be the run's own, layer by layer: tensors of others may fit, too."""
    weights, model, card = config.model.weights, config.model, loaded.card
    if (card.backbone, card.stem) != (model.backbone, model.stem):
        raise UserError(
            f"{weights} holds a {card.backbone} with {card.stem} stem, but the run trains a "
            f"{model.backbone} with {model.stem} stem."
        )
    own = str(build_backbone(model.backbone, model.stem, card.size)).splitlines()
    different = [line.strip() for line in str(loaded.backbone).splitlines() if line not in own]
    if different:
        raise UserError(
            f"{weights} holds a {card.backbone} that is built in another way, with "
            f"{different[0]}: it can be evaluated, but no run can start from it."
        )


def _other_pixels(card: BackboneCard, config: Config) -> Iterator[str]:
    input = config.input
    colours = zip((*card.mean, *card.std), (*input.mean, *input.std), strict=True)
    if max(abs(one - other) for one, other in colours) >= SAME_PIXELS:
        yield (
            f"{config.model.weights} expects images normalised by mean {list(card.mean)} and std "
            f"{list(card.std)}, but this run has {list(input.mean)} and {list(input.std)}: set "
            "mean and std"
        )
