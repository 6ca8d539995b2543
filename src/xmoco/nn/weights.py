"""Whatever holds a backbone, loaded: our own files, runs, anyone's ResNet, and models by name.

Of a run that is not finished, its last checkpoint serves. Files of others are of a format that
``nn/checkpoint_formats.py`` knows. Nothing in a file is ever run: pickles are read with
``weights_only=True``.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor, nn

from xmoco.checkpoints import FORMAT, Checkpoints
from xmoco.config.section import LARGEST_NUMBER
from xmoco.errors import UserError
from xmoco.nn.backbone_files import (
    CLASSIFIER,
    DETECTOR,
    LONGEST_METHOD,
    WHOLE,
    BackboneCard,
    DetectorHeader,
    Rgb,
    Weights,
    card_of,
    named_model,
    own_header,
    read_tensors,
)
from xmoco.nn.backbones import build_backbone
from xmoco.nn.checkpoint_formats import (
    GUESS,
    LoadReport,
    find_backbone,
    flat_tensors,
    guess_of,
    part_of,
)
from xmoco.nn.named_models import load_timm, load_torchvision, untrained
from xmoco.pickles import Harmless, RefusedPickle, read_pickle
from xmoco.settings import config_from_settings
from xmoco.text import printable

PICKLES = (".pth", ".pt", ".tar", ".ckpt", ".bin")
KEPT = "encoder.backbone."  # what a checkpoint of pre-training calls the backbone
INSIDE = "backbone."  # what a classifier calls a backbone that is no ResNet


def load_backbone(weights: str | Path) -> nn.Module:
    """The backbone of ``weights``, in eval mode, which maps normalised images to features.

    Weights are a run folder, finished or not, or its ``backbone.safetensors``; a model by name, as
    ``torchvision:resnet50``, ``torchvision:resnet50:IMAGENET1K_V1`` or ``timm:resnet50.a1_in1k``,
    or ``scratch:resnet50``, which was never trained;
    or a checkpoint (.pth, .pt, .tar, .ckpt, .safetensors) of torchvision, timm, MoCo v1 to v3,
    SwAV, DeepCluster-v2, BYOL, SimSiam, Barlow Twins, VICReg, DINO, lightly, solo-learn, VISSL,
    Hugging Face, or of anyone who keeps a single ResNet in it.

    Our own ResNets also load by hand::

        model = torchvision.models.resnet50()
        model.load_state_dict(safetensors.torch.load_file("backbone.safetensors"), strict=False)
    """
    return load_weights(weights).backbone


def load_weights(
    weights: str | Path,
    *,
    mean: Rgb | None = None,
    std: Rgb | None = None,
    labelled: bool | None = None,
) -> Weights:
    """The backbone as by ``load_backbone``, with its card and what became of the tensors.

    Files of others do not tell how images were normalised and whether there were labels; what is
    given here counts, and the rest is the card's, or a guess.
    """
    loaded = _load(weights)
    card = replace(loaded.card, mean=mean or loaded.card.mean, std=std or loaded.card.std)
    report, guess = loaded.report, loaded.guess
    if mean or std:
        report = replace(report, notes=_guessed_still(report.notes, mean, std))
        guess = next(iter(_guessed_still((guess,) if guess else (), mean, std)), None)
    if labelled is not None:
        report = replace(report, labelled=labelled)
    return Weights(loaded.backbone, card, report, guess)


def _guessed_still(notes: tuple[str, ...], mean: Rgb | None, std: Rgb | None) -> tuple[str, ...]:
    """The notes on weights of which mean, std or both were told."""
    if mean and std:
        return tuple(note for note in notes if not note.startswith(GUESS))
    rest = "std" if mean else "mean"
    return tuple(note.replace(GUESS, f"{rest} is a guess:") for note in notes)


def _load(weights: str | Path) -> Weights:
    library, _, model = str(weights).partition(":")
    if library == "torchvision":
        return load_torchvision(model, str(weights))
    if library == "timm":
        return load_timm(model, str(weights))
    if library == "scratch":
        return untrained(model, str(weights))
    path, notes = _weights_file(weights)
    if _is_pickle(path):
        content = _read_pickle(path)
        if content.get("format") == FORMAT:
            return _of_run(content, path, notes)
        return _others(content, path)
    header = own_header(path)
    tensors = read_tensors(path)
    if header is None:
        return _of_detector(_others(tensors, path), path)
    if CLASSIFIER in header:
        tensors = _without_head(tensors)
    return _ours(tensors, card_of(header, path), LoadReport("xmoco", len(tensors)), path)


def _of_detector(found: Weights, path: Path) -> Weights:
    """With what the header of one of our detectors tells of its backbone, if it is one."""
    told = own_header(path, DETECTOR)
    if told is None:
        return found
    try:
        header = DetectorHeader.model_validate(told)
    except ValidationError as error:
        field = printable(".".join(map(str, error.errors()[0]["loc"])))
        raise UserError(f"{path} has an invalid header: {field}.") from None
    method = f"{header.method}, {header.model} on {header.data}"
    card = replace(
        found.card,
        method=method[:LONGEST_METHOD],
        mean=header.mean,
        std=header.std,
        started_from=header.started_from,
    )
    notes = _guessed_still(found.report.notes, header.mean, header.std)
    return Weights(found.backbone, card, replace(found.report, notes=notes))


def _without_head(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Those of a classifier's tensors that are its backbone's: see ``nn/classifier_files.py``."""
    inside = {
        name.removeprefix(INSIDE): tensor
        for name, tensor in tensors.items()
        if name.startswith(INSIDE)
    }
    return inside or {k: tensor for k, tensor in tensors.items() if not k.startswith("fc.")}


def _ours(
    tensors: Mapping[str, Tensor], card: BackboneCard, report: LoadReport, path: Path
) -> Weights:
    try:
        if not _may_fit(tensors, card):
            raise RuntimeError("other tensors")
        backbone = build_backbone(card.backbone, card.stem, card.size)
        backbone.load_state_dict(tensors)
    except (RuntimeError, TypeError):
        raise UserError(f"{path} does not fit the {card.backbone} it says it holds.") from None
    return Weights(backbone.eval(), card, report)


def _may_fit(tensors: Mapping[str, Tensor], card: BackboneCard) -> bool:
    """Whether the tensors are of the sizes the backbone has, found out without its memory: a card
    of a few bytes may name a network of 27 gigabytes."""
    try:
        with torch.device("meta"):
            expected = build_backbone(card.backbone, card.stem, card.size).state_dict()
    except Exception:  # some models of timm look at numbers while they are built
        return True
    return {name: tensor.shape for name, tensor in expected.items()} == {
        name: tensor.shape for name, tensor in tensors.items()
    }


class _OfRun(BaseModel):
    """What is needed of a checkpoint of pre-training."""

    model_config = ConfigDict(strict=True, arbitrary_types_allowed=True)

    task: dict[str, Tensor]
    identity: dict[str, Any]
    step: int = Field(ge=0, le=LARGEST_NUMBER)
    epoch: float = Field(ge=0, le=LARGEST_NUMBER, allow_inf_nan=False)


def _of_run(checkpoint: Mapping[str, object], path: Path, notes: Sequence[str]) -> Weights:
    """What a run had learnt when it wrote this checkpoint."""
    try:
        found = _OfRun.model_validate(checkpoint)
        config = config_from_settings(found.identity["settings"])
    except (ValidationError, LookupError, UserError):
        identity = checkpoint.get("identity")
        if isinstance(identity, Mapping) and {"weights", "images"} <= identity.keys():
            raise UserError(
                f"{path} is of an evaluation that is not finished: finish it first, with the same "
                "command again."
            ) from None
        raise UserError(f"{path} is no checkpoint of pre-training with this xmoco.") from None
    state, step, epoch = found.task, found.step, found.epoch
    backbone = {k.removeprefix(KEPT): v for k, v in state.items() if k.startswith(KEPT)}
    others = (part_of(name, KEPT) for name in state if not name.startswith(KEPT))
    report = LoadReport(
        "xmoco",
        len(backbone),
        tuple(dict.fromkeys(others)),
        notes=(*notes, f"as it was at epoch {epoch:.4g} of {config.train.epochs}, step {step:,}"),
    )
    return _ours(backbone, BackboneCard.of_run(config, int(epoch)), report, path)


def read_card(weights: str | Path) -> tuple[BackboneCard, Path]:
    """The card of weights as given to ``load_backbone``, and where they are.

    Only our own files have a card to read; that of other weights is found out by loading them.
    """
    header, path = read_header(weights)
    return load_weights(path).card if header is None else card_of(header, path), path


def read_header(weights: str | Path) -> tuple[dict[str, Any] | None, Path]:
    """What stands in the header of our own files, None of other weights; and where they are."""
    if named_model(weights):
        return None, Path(weights)
    path = _weights_file(weights)[0]
    return None if _is_pickle(path) else own_header(path), path


def _weights_file(weights: str | Path) -> tuple[Path, list[str]]:
    """Where the weights are, and what is to be said of it."""
    path, notes = Path(weights).expanduser(), list[str]()
    if path.is_dir():
        path, notes = _file_of_run(path)
    if not path.is_file():
        raise UserError(
            f"no weights at {path}: give a run folder, a file of weights or torchvision:resnet50."
        )
    return path, notes


def _file_of_run(run: Path) -> tuple[Path, list[str]]:
    """The weights of a finished run, the last whole checkpoint of any other."""
    path = run / "backbone.safetensors"
    for other in WHOLE[1:]:
        if not path.is_file() and (run / other).is_file():
            return run / other, []
    if path.is_file() or not (run / "config.yaml").is_file():
        return path, []
    checkpoint, notes = Checkpoints(run / "checkpoints").newest_whole()
    if checkpoint is None:
        raise UserError(f"{run} has no weights yet, nor a checkpoint: go on with --resume first.")
    return checkpoint, notes


def _is_pickle(path: Path) -> bool:
    """Told by the first bytes, and by the name where they tell nothing."""
    try:
        with path.open("rb") as file:
            head = file.read(9)
    except OSError:
        head = b""  # whoever reads it in earnest will say why it cannot be read
    if head[8:] == b"{":  # after its length, the header of safetensors begins
        return False
    return head.startswith((b"PK", b"\x80")) or path.suffix.lower() in PICKLES


def _not_run(*_: object) -> None:
    """Stands for a function that a checkpoint mentions."""


# Where this is defined depends on numpy's version, and a pickle tells that of its writer.
_scalar = cast(Callable[..., object], np.float64(0).__reduce__()[0])
_number_types: list[type] = [type(np.dtype(kind)) for kind in "?bBhHiIlLqQefd"]

# What checkpoints hold beside tensors: the settings of DINO and others, in a class that only holds
# values; of Barlow Twins and VICReg the name of a function, which is never called; and numbers of
# numpy, such as the best accuracy so far.
HARMLESS: tuple[Harmless, ...] = (
    argparse.Namespace,
    (_not_run, "__main__.exclude_bias_and_norm"),
    *((_scalar, f"numpy.{core}.multiarray.scalar") for core in ("core", "_core")),
    *(np.dtype, *_number_types),
)


def _read_pickle(path: Path) -> Mapping[str, object]:
    try:
        content = read_pickle(path, HARMLESS)
    except RefusedPickle as error:
        raise UserError(f"{path} {error}.") from None
    if not isinstance(content, Mapping):
        raise UserError(f"{path} holds no named tensors.")
    return content


def _others(content: Mapping[str, object], path: Path) -> Weights:
    found = find_backbone(flat_tensors(content), str(path))
    # There are many files of one format.
    name = path.name
    while name.endswith((*PICKLES, ".safetensors")):
        name = name.rpartition(".")[0]
    whose = found.report.format
    method = name if whose == "torchvision" else f"{whose} ({name})"
    loaded = Weights.of_others(found, method, found.pixels)
    return loaded if found.report.notes else replace(loaded, guess=guess_of("ImageNet"))
