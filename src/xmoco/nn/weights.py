"""Backbone weights: our own files there and back, those of runs, and anyone's ResNet in.

Our own file is safetensors with torchvision's or timm's names and a card in the header. Of a run
that is not finished, its last checkpoint serves. Other weights are models of torchvision or timm by
name, and files of a format that ``nn/checkpoint_formats.py`` knows. Nothing in a file is ever run:
pickles are read with ``weights_only=True``.
"""

import argparse
import difflib
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import numpy as np
import safetensors
import torch
import torchvision.models
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError
from safetensors.torch import load_file, save
from torch import Tensor, nn

from xmoco.checkpoints import FORMAT, Checkpoints
from xmoco.config import Config, InputConfig
from xmoco.config.section import LARGEST_NUMBER
from xmoco.errors import UserError, nearest
from xmoco.files import write_whole
from xmoco.nn.architectures import (
    BACKBONES,
    check_backbone,
    timm_library,
    timm_models,
)
from xmoco.nn.backbones import build_backbone, create_timm
from xmoco.nn.checkpoint_formats import (
    GUESS,
    IMAGENET,
    FoundBackbone,
    LoadReport,
    Pixels,
    find_backbone,
    flat_tensors,
    guess_of,
    part_of,
)
from xmoco.pickles import Harmless, RefusedPickle, read_pickle
from xmoco.settings import config_from_settings
from xmoco.text import printable, shortened

Rgb = tuple[float, float, float]

PICKLES = (".pth", ".pt", ".tar", ".ckpt", ".bin")
SCRATCH = "scratch"  # what records call a backbone without any training
WHOLE = "backbone.safetensors", "detector.safetensors", "classifier.safetensors"
"""What runs leave behind; the backbone is a part of the others."""
KEPT = "encoder.backbone."  # what a checkpoint of pre-training calls the backbone
LONGEST_METHOD = 1000
LONGEST_NAME = 100
"""Letters of what may be a misspelt model."""
BACKBONE, DETECTOR = "xmoco", "xmoco-detector"
"""Where the header of a file tells of it."""
CLASSIFIER = "classifier"  # what a header calls that of the classifier on the backbone
INSIDE = "backbone."  # what a classifier calls a backbone that is no ResNet


@dataclass(frozen=True)
class BackboneCard:
    """What stands in the file's header beside the weights.

    Of other people's weights, epochs and seed are unknown: 0.
    """

    backbone: str
    stem: str
    size: int  # side of the random views it was trained on
    mean: Rgb
    std: Rgb
    method: str
    epochs: int
    seed: int
    eval_size: int | None = None  # side of the central views, where it is another
    started_from: str | None = None  # what training started from, if not from random weights

    @classmethod
    def of_run(cls, config: Config, epochs: int) -> "BackboneCard":
        """What a run of this configuration has made after so many epochs."""
        return cls(
            backbone=config.model.backbone,
            stem=config.model.stem,
            size=config.input.size,
            mean=config.input.mean,
            std=config.input.std,
            method=config.method.subject,
            epochs=epochs,
            seed=config.train.seed,
            eval_size=config.input.eval_size,
            started_from=weights_name(config.model.weights),
        )

    def as_json(self) -> str:
        return json.dumps(
            {name: value for name, value in asdict(self).items() if value is not None}
        )

    def input(self, size: int | None = None, eval_size: int | None = None) -> InputConfig:
        """What evaluations show it: views of its own sizes, or all of ``size``, or central ones
        of ``eval_size``."""
        own = self.eval_size if size is None else None
        return InputConfig(
            size=size or self.size,
            eval_size=eval_size or own,
            mean=self.mean,
            std=self.std,
        )


def weights_name(weights: str | Path | None) -> str | None:
    """What records call weights: a path tells where they are, which is nobody's business."""
    if weights is None or named_model(weights):
        return None if weights is None else str(weights)
    path = Path(weights).absolute()
    if path.name in WHOLE or path.parent.name == "checkpoints":  # of a run
        run = path.parents[1] if path.parent.name == "checkpoints" else path.parent
        return run.name or path.name
    return path.name or str(path)


def named_model(weights: str | Path) -> bool:
    """Whether weights are a model of a library by name, and no path."""
    return str(weights).startswith(("torchvision:", "timm:", "scratch:"))


def save_backbone(backbone: nn.Module, card: BackboneCard, path: Path) -> None:
    tensors = {
        name: value.detach().cpu().contiguous() for name, value in backbone.state_dict().items()
    }
    header = {BACKBONE: card.as_json()}  # one entry: several have no fixed order
    write_whole(path, save(tensors, metadata=header))


@dataclass(frozen=True)
class Weights:
    backbone: nn.Module  # in eval mode
    card: BackboneCard
    report: LoadReport
    guess: str | None = None
    """What is said of a usual mean and std that a file of others does not tell. Guesses that are
    less sure are among the notes of the report, which records hold."""


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
        return _load_torchvision(model, str(weights))
    if library == "timm":
        return _load_timm(model, str(weights))
    if library == "scratch":
        return _untrained(model, str(weights))
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
    return _ours(tensors, _card(header, path), LoadReport("xmoco", len(tensors)), path)


def _of_detector(found: Weights, path: Path) -> Weights:
    """With what the header of one of our detectors tells of its backbone, if it is one."""
    told = own_header(path, DETECTOR)
    if told is None:
        return found
    try:
        header = _DetectorHeader.model_validate(told)
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
    named = named_model(weights)
    path = Path(weights) if named else _weights_file(weights)[0]
    header = None if named or _is_pickle(path) else own_header(path)
    return load_weights(path).card if header is None else _card(header, path), path


def _weights_file(weights: str | Path) -> tuple[Path, list[str]]:
    """Where the weights are, and what is to be said of it."""
    path, notes = Path(weights), list[str]()
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


def own_header(path: Path, key: str = BACKBONE) -> dict[str, Any] | None:
    """What stands in the header of a safetensors file, or None if xmoco did not write it."""
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
    except Exception:  # damaged bytes can raise anything
        raise UserError(f"{path} is damaged or no safetensors file.") from None
    if key not in header:
        return None
    try:
        content = json.loads(header[key])
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict) or "backbone" not in content:
        raise UserError(f"{path} does not say which backbone it holds: xmoco did not write it.")
    return content


class _Header(InputConfig):
    """A card as it must be."""

    backbone: str
    stem: Literal["imagenet", "cifar"]
    method: Annotated[
        str, Field(min_length=1, max_length=LONGEST_METHOD), AfterValidator(printable)
    ]
    epochs: int = Field(ge=0)
    seed: int = Field(ge=0)
    started_from: Annotated[str, Field(max_length=1000), AfterValidator(printable)] | None = None


class _DetectorHeader(BaseModel):
    """What the card of a detector tells of its backbone."""

    model: str
    data: Annotated[str, AfterValidator(printable)]
    method: Annotated[str, AfterValidator(printable)]
    mean: Rgb
    std: Rgb
    started_from: Annotated[str, AfterValidator(printable)] | None = None


def _card(content: dict[str, Any], path: Path) -> BackboneCard:
    if "judged_size" in content:  # as files before version 0.2 call it
        content["eval_size"] = content.pop("judged_size")
    known = {field.name for field in fields(BackboneCard)}
    if unknown := [name for name in content if name not in {*known, CLASSIFIER}]:
        field = printable(unknown[0][:80])
        raise UserError(
            f"{path} was written by a newer xmoco (it has a field {field}): upgrade xmoco."
        )
    try:
        header = _Header.model_validate({k: v for k, v in content.items() if k != CLASSIFIER})
        missing = known - header.model_fields_set - {"eval_size", "started_from"}
    except ValidationError as error:
        first = error.errors()[0]
        missing = {str(first["loc"][0])}
    if missing:
        field = min(missing)
        raise UserError(
            f"{path} has a header that cannot be: {field} is {shortened(content.get(field))}."
        )
    try:
        check_backbone(header.backbone)
    except ValueError as error:
        name = shortened(header.backbone).strip("'")
        raise UserError(f"{path} holds a {name}, but {error}.") from None
    return BackboneCard(**{name: getattr(header, name) for name in known})


def read_tensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except Exception:  # as above
        raise UserError(f"{path} is damaged or no safetensors file.") from None


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
    loaded = _weights(found, method, found.pixels)
    return loaded if found.report.notes else replace(loaded, guess=guess_of("ImageNet"))


def _weights(found: FoundBackbone, method: str, pixels: Pixels) -> Weights:
    size = 32 if found.stem == "cifar" else 224
    card = _foreign_card(found.name, found.stem, size, method, pixels)
    return Weights(found.backbone.eval(), card, found.report)


def _foreign_card(name: str, stem: str, size: int, method: str, pixels: Pixels) -> BackboneCard:
    mean, std = pixels
    return BackboneCard(name, stem, size, mean, std, method, epochs=0, seed=0)


def _load_torchvision(name: str, given: str) -> Weights:
    """A trained model: torchvision's name for it, then perhaps that of certain weights."""
    model, _, version = name.partition(":")
    known = [entry.torchvision for entry in BACKBONES.values() if entry.torchvision]
    if model not in known:
        raise UserError(
            f"{given} is not among the models taken by name, which are {', '.join(known)}"
            f"{nearest(model, known)}."
        )
    versions = torchvision.models.get_model_weights(model).__members__
    if version and version not in versions:
        raise UserError(f"torchvision has no weights {version} for {model}: {', '.join(versions)}.")
    try:
        tensors = versions[version or "DEFAULT"].get_state_dict(
            progress=False, check_hash=True, map_location="cpu", weights_only=True
        )
    except (OSError, RuntimeError) as error:
        raise _unavailable(given, error) from None
    found = find_backbone(tensors, given)
    return _weights(found, given, found.pixels)


def _untrained(name: str, given: str) -> Weights:
    """A backbone as it is before any training, for comparison."""
    if name not in BACKBONES:
        raise UserError(
            f"{given} is no backbone: after scratch: there may be {', '.join(BACKBONES)}"
            f"{nearest(name, BACKBONES)}."
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        backbone = build_backbone(name)
    card = _foreign_card(name, "imagenet", 224, SCRATCH, IMAGENET)
    return Weights(backbone.eval(), card, LoadReport(SCRATCH, 0))


def _load_timm(name: str, given: str) -> Weights:
    """A trained model: timm's name for it, then perhaps that of certain weights."""
    architecture = name.partition(".")[0]
    try:
        known = timm_models()
    except ValueError as error:
        raise UserError(f"no weights of {given}: {error}.") from None
    if architecture not in known:
        # Among a thousand names, one is always a little like it.
        near = difflib.get_close_matches(architecture[:LONGEST_NAME], known, n=1, cutoff=0.7)
        raise UserError(f"timm has no model {architecture}{nearest(architecture, near)}.")
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # it tells of every attempt
    try:
        trained = timm_library().get_pretrained_cfg(name)
        size = trained.input_size[-1]
        model, _ = create_timm(name, size, pretrained=True)
    except Exception as error:  # the hub's libraries each have errors of their own
        raise _unavailable(given, error) from None
    labelled = trained.num_classes > 0
    pixels = tuple(trained.mean), tuple(trained.std)
    if architecture in _TIMM_RESNETS:
        found = find_backbone(model.state_dict(), given)
        report = replace(found.report, labelled=labelled)
        return _weights(replace(found, report=report), given, pixels)
    card = _foreign_card(f"timm:{architecture}", "imagenet", size, given, pixels)
    report = LoadReport("timm", len(model.state_dict()), labelled=labelled)
    return Weights(model.eval(), card, report)


# Those that are ours by another name; the arguments of others make them what they are.
_TIMM_RESNETS = {
    entry.timm.name for entry in BACKBONES.values() if entry.timm and not entry.timm.arguments
}


def _unavailable(given: str, error: Exception) -> UserError:
    reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
    return UserError(
        f"the weights of {given} could not be fetched ({reason}): download them where there is a "
        "network, and give the file."
    )
