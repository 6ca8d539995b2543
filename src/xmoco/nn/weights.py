"""Backbone weights: our own files there and back, and anyone's ResNet in.

Our own file is safetensors with torchvision's names and a card in the header. Other weights are
models of torchvision or timm by name, and files of a format that ``nn/checkpoint_formats.py``
knows. Nothing in a file is ever run: pickles are read with ``weights_only=True``.
"""

import argparse
import importlib
import json
import logging
import pickle
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import cast, get_args

import numpy as np
import safetensors
import torch
import torchvision.models
from safetensors.torch import load_file, save
from torch import Tensor
from torchvision.models.resnet import ResNet

from xmoco.config import Backbone, InputConfig
from xmoco.errors import UserError, nearest
from xmoco.files import write_whole
from xmoco.nn.backbones import build_backbone
from xmoco.nn.checkpoint_formats import (
    ARCHITECTURES,
    FoundBackbone,
    LoadReport,
    find_backbone,
    flat_tensors,
)

PICKLES = (".pth", ".pt", ".tar", ".ckpt", ".bin")
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@dataclass(frozen=True)
class BackboneCard:
    """What stands in the file's header beside the weights.

    Of other people's weights, epochs and seed are unknown: 0.
    """

    backbone: Backbone
    stem: str
    size: int  # side of the random views it was trained on
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    method: str
    epochs: int
    seed: int
    eval_size: int | None = None  # side of the central views, where it is another

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


def save_backbone(backbone: ResNet, card: BackboneCard, path: Path) -> None:
    tensors = {
        name: value.detach().cpu().contiguous() for name, value in backbone.state_dict().items()
    }
    header = {"xmoco": card.as_json()}  # one entry: several have no fixed order
    write_whole(path, save(tensors, metadata=header))


@dataclass(frozen=True)
class Weights:
    backbone: ResNet  # in eval mode
    card: BackboneCard
    report: LoadReport


def load_backbone(weights: str | Path) -> ResNet:
    """The backbone of ``weights``, in eval mode, which maps normalised images to features.

    Weights are a run folder or its ``backbone.safetensors``; a model by name, as
    ``torchvision:resnet50``, ``torchvision:resnet50:IMAGENET1K_V1`` or ``timm:resnet50.a1_in1k``;
    or a checkpoint (.pth, .pt, .tar, .ckpt, .safetensors) of torchvision, timm, MoCo v1 to v3,
    SwAV, DeepCluster-v2, BYOL, SimSiam, Barlow Twins, VICReg, DINO, lightly or solo-learn.

    Our own also load by hand::

        model = torchvision.models.resnet50()
        model.load_state_dict(safetensors.torch.load_file("backbone.safetensors"), strict=False)
    """
    return load_weights(weights).backbone


def load_weights(weights: str | Path) -> Weights:
    """The backbone as by ``load_backbone``, with its card and what became of the tensors."""
    library, _, model = str(weights).partition(":")
    if library in ("torchvision", "timm"):
        return _load_model(library, model)
    path = _weights_file(weights)
    if _is_pickle(path):
        return _others(_read_pickle(path), path)
    card = _own_card(path)
    tensors = _read_safetensors(path)
    if card is None:
        return _others(tensors, path)
    backbone = build_backbone(card.backbone, card.stem)
    try:
        backbone.load_state_dict(tensors)
    except RuntimeError:
        raise UserError(f"{path} does not fit the {card.backbone} it says it holds.") from None
    return Weights(backbone.eval(), card, LoadReport("xmoco", len(tensors)))


def read_card(weights: str | Path) -> tuple[BackboneCard, Path]:
    """The card of weights as given to ``load_backbone``, and where they are.

    Only our own files have a card to read; that of other weights is found out by loading them.
    """
    named = str(weights).startswith(("torchvision:", "timm:"))
    path = Path(weights) if named else _weights_file(weights)
    own = None if named or _is_pickle(path) else _own_card(path)
    return own or load_weights(path).card, path


def _weights_file(weights: str | Path) -> Path:
    path = Path(weights)
    if path.is_dir():
        path = path / "backbone.safetensors"
        if not path.is_file() and (path.parent / "config.yaml").is_file():
            raise UserError(f"{path.parent} has no weights yet: finish it with --resume first.")
    if not path.is_file():
        raise UserError(
            f"no weights at {path}: give a run folder, a file of weights or torchvision:resnet50."
        )
    return path


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


def _own_card(path: Path) -> BackboneCard | None:
    """The card in a safetensors file, or None if xmoco did not write it."""
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
        if "xmoco" not in header:
            return None
        fields = json.loads(header["xmoco"])
        if "judged_size" in fields:  # as files before version 0.2 call it
            fields["eval_size"] = fields.pop("judged_size")
        card = BackboneCard(**fields | {"mean": tuple(fields["mean"]), "std": tuple(fields["std"])})
        known = cast(tuple[str, ...], get_args(Backbone))
        if card.backbone not in known:
            raise KeyError(card.backbone)
    except (safetensors.SafetensorError, OSError):
        raise UserError(f"{path} is damaged or no safetensors file.") from None
    except (KeyError, TypeError, ValueError):
        raise UserError(
            f"{path} does not say which backbone it holds: xmoco did not write it."
        ) from None
    return card


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (safetensors.SafetensorError, OSError):
        raise UserError(f"{path} is damaged or no safetensors file.") from None


def _not_run(*_: object) -> None:
    """Stands for a function that a checkpoint mentions."""


# Where this is defined depends on numpy's version, and a pickle tells that of its writer.
_scalar = cast(Callable[..., object], np.float64(0).__reduce__()[0])
_number_types: list[type] = [type(np.dtype(kind)) for kind in "?bBhHiIlLqQefd"]

# What checkpoints hold beside tensors: the settings of DINO and others, in a class that only holds
# values; of Barlow Twins and VICReg the name of a function, which is never called; and numbers of
# numpy, such as the best accuracy so far.
HARMLESS: tuple[Callable[..., object] | tuple[Callable[..., object], str], ...] = (
    argparse.Namespace,
    (_not_run, "__main__.exclude_bias_and_norm"),
    *((_scalar, f"numpy.{core}.multiarray.scalar") for core in ("core", "_core")),
    *(np.dtype, *_number_types),
)


def _read_pickle(path: Path) -> Mapping[str, object]:
    try:
        with path.open("rb") as file, torch.serialization.safe_globals(list(HARMLESS)):
            content = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # damaged bytes can raise anything
        if isinstance(error, OSError) and error.filename is not None:
            raise
        code = re.search(r"GLOBAL (\S*\w) ", str(error))
        if code is None or not isinstance(error, pickle.UnpicklingError):
            raise UserError(f"{path} is damaged or no checkpoint of PyTorch.") from None
        raise UserError(
            f"{path} holds more than tensors and plain values ({code[1]}), so loading it could "
            "run code; it was refused."
        ) from None
    if not isinstance(content, Mapping):
        raise UserError(f"{path} holds no named tensors.")
    return content


def _others(content: Mapping[str, object], path: Path) -> Weights:
    found = find_backbone(flat_tensors(content), str(path))
    # There are many files of one layout.
    name = path.name
    while name.endswith((*PICKLES, ".safetensors")):
        name = name.rpartition(".")[0]
    layout = found.report.layout
    return _weights(found, name if layout == "torchvision" else f"{layout} ({name})")


def _weights(
    found: FoundBackbone,
    method: str,
    mean: tuple[float, float, float] = IMAGENET_MEAN,
    std: tuple[float, float, float] = IMAGENET_STD,
) -> Weights:
    card = BackboneCard(
        backbone=found.name,
        stem=found.stem,
        size=32 if found.stem == "cifar" else 224,
        mean=mean,
        std=std,
        method=method,
        epochs=0,
        seed=0,
    )
    return Weights(found.backbone.eval(), card, found.report)


def _load_model(library: str, name: str) -> Weights:
    """A trained model of a library: a name of its own, then perhaps that of certain weights."""
    given = f"{library}:{name}"
    model = re.split("[:.]", name)[0]
    known = [ours for ours in ARCHITECTURES.values() if ours in torchvision.models.list_models()]
    if model not in known:
        raise UserError(
            f"{given} is not among the models taken by name, which are {', '.join(known)}"
            f"{nearest(model, known)}."
        )
    load = _load_timm if library == "timm" else _load_torchvision
    return load(name, given)


def _load_torchvision(name: str, given: str) -> Weights:
    model, _, version = name.partition(":")
    versions = torchvision.models.get_model_weights(model).__members__
    if version and version not in versions:
        raise UserError(f"torchvision has no weights {version} for {model}: {', '.join(versions)}.")
    try:
        tensors = versions[version or "DEFAULT"].get_state_dict(
            progress=False, check_hash=True, map_location="cpu", weights_only=True
        )
    except (OSError, RuntimeError) as error:
        raise _unavailable(given, error) from None
    return _weights(find_backbone(tensors, given), given)


def _load_timm(name: str, given: str) -> Weights:
    try:
        timm = importlib.import_module("timm")
    except ImportError:
        raise UserError(f"{given} needs timm: pip install 'xmoco[timm]'.") from None
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # it tells of every attempt
    try:
        model = timm.create_model(name, pretrained=True)
    except Exception as error:  # the hub's libraries each have errors of their own
        raise _unavailable(given, error) from None
    trained = model.pretrained_cfg
    found = find_backbone(model.state_dict(), given)
    return _weights(found, given, tuple(trained["mean"]), tuple(trained["std"]))


def _unavailable(given: str, error: Exception) -> UserError:
    reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
    return UserError(
        f"the weights of {given} could not be fetched ({reason}): download them where there is a "
        "network, and give the file."
    )
