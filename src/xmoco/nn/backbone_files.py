"""Backbones with a card: what is known of them, and our own files that hold both.

A file is safetensors, its tensors by the names of torchvision or timm, with the card in its header.
"""

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal

import safetensors
from pydantic import AfterValidator, BaseModel, Field, ValidationError
from safetensors.torch import load_file, save
from torch import Tensor, nn

from xmoco.config import Config, InputConfig
from xmoco.errors import UserError
from xmoco.files import write_whole
from xmoco.nn.architectures import check_backbone
from xmoco.nn.checkpoint_formats import FoundBackbone, LoadReport, Pixels
from xmoco.text import printable, shortened

Rgb = tuple[float, float, float]

WHOLE = "backbone.safetensors", "detector.safetensors", "classifier.safetensors"
"""What runs leave behind; the backbone is a part of the others."""
BACKBONE, DETECTOR = "xmoco", "xmoco-detector"
"""Where the header of a file tells of it."""
CLASSIFIER = "classifier"  # what a header calls that of the classifier on the backbone
LONGEST_METHOD = 1000


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

    @classmethod
    def of_others(
        cls, name: str, stem: str, size: int, method: str, pixels: Pixels
    ) -> "BackboneCard":
        """What is known of other people's weights."""
        mean, std = pixels
        return cls(name, stem, size, mean, std, method, epochs=0, seed=0)

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
    """A backbone that was loaded, and what is known of it."""

    backbone: nn.Module  # in eval mode
    card: BackboneCard
    report: LoadReport
    guess: str | None = None
    """What is said of a usual mean and std that a file of others does not tell. Guesses that are
    less sure are among the notes of the report, which records hold."""

    @classmethod
    def of_others(cls, found: FoundBackbone, method: str, pixels: Pixels) -> "Weights":
        size = 32 if found.stem == "cifar" else 224
        card = BackboneCard.of_others(found.name, found.stem, size, method, pixels)
        return cls(found.backbone.eval(), card, found.report)


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


class DetectorHeader(BaseModel):
    """What the card of a detector tells of its backbone."""

    model: str
    data: Annotated[str, AfterValidator(printable)]
    method: Annotated[str, AfterValidator(printable)]
    mean: Rgb
    std: Rgb
    started_from: Annotated[str, AfterValidator(printable)] | None = None


def card_of(content: dict[str, Any], path: Path) -> BackboneCard:
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
