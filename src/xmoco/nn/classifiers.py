"""Trained classifiers as files: safetensors, a ResNet's under torchvision's names.

The header has the backbone's card, and in it what the classifier is. So the file serves as the
backbone's weights, too.
"""

import copy
import json
from collections import OrderedDict
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError
from safetensors.torch import save
from torch import nn
from torchvision.models.resnet import ResNet

from xmoco.errors import UserError
from xmoco.files import write_whole
from xmoco.nn.backbones import feature_size
from xmoco.nn.weights import (
    CLASSIFIER,
    INSIDE,
    BackboneCard,
    load_weights,
    own_header,
    read_tensors,
)
from xmoco.text import printable

FILE = "classifier.safetensors"
HEADS = ("fc.weight", "head.weight")
"""What ``assembled`` calls it."""
Name = Annotated[str, Field(min_length=1, max_length=1000), AfterValidator(printable)]


@dataclass(frozen=True)
class ClassifierCard:
    """What stands in the file's header beside the backbone's card."""

    classes: tuple[str, ...]
    protocol: str
    data: str
    seed: int


class _Header(BaseModel):
    """The same as it must be."""

    model_config = ConfigDict(extra="forbid")

    classes: Annotated[tuple[Name, ...], Field(min_length=1)]
    protocol: Name
    data: Name
    seed: int = Field(ge=0)


def assembled(backbone: nn.Module, head: nn.Linear) -> nn.Module:
    """Images to scores. A ResNet becomes torchvision's, with its classifier."""
    if not isinstance(backbone, ResNet):
        return nn.Sequential(OrderedDict([(INSIDE.rstrip("."), backbone), ("head", head)]))
    backbone.add_module("fc", head)
    whole: nn.Module = backbone
    return whole


def save_classifier(
    backbone: nn.Module,
    head: nn.Linear,
    card: ClassifierCard,
    backbone_card: BackboneCard,
    path: Path,
) -> None:
    whole = assembled(copy.deepcopy(backbone), head)
    tensors = {k: value.detach().cpu().contiguous() for k, value in whole.state_dict().items()}
    header = json.loads(backbone_card.as_json()) | {CLASSIFIER: asdict(card)}
    write_whole(path, save(tensors, metadata={"xmoco": json.dumps(header)}))


def load_classifier(weights: str | Path) -> nn.Module:
    """The classifier in a run folder or a file, in eval mode.

    It takes images (N, 3, height, width) as ``load_transform`` makes them, and gives scores
    (N, classes), whose softmax are probabilities. Column n is ``classifier.classes[n]``. On a
    ResNet it is torchvision's model.
    """
    return read_classifier(weights)[0]


def read_classifier(weights: str | Path) -> tuple[nn.Module, ClassifierCard, BackboneCard]:
    path = Path(weights)
    if path.is_dir():
        path = path / FILE
    if not path.is_file():
        raise UserError(
            f"no classifier at {path}: give the folder of `xmoco evaluate finetune` or `linear`, "
            f"or a {FILE}."
        )
    header = own_header(path) or {}
    if CLASSIFIER not in header:
        raise UserError(
            f"{path} holds no classifier of xmoco: `xmoco evaluate finetune` makes one of a "
            "backbone."
        )
    try:
        card = ClassifierCard(**_Header.model_validate(header[CLASSIFIER]).model_dump())
    except ValidationError as error:
        place = printable(".".join(map(str, error.errors()[0]["loc"])) or CLASSIFIER)
        raise UserError(f"{path} has a header that cannot be: {place} is wrong.") from None
    loaded, tensors = load_weights(path), read_tensors(path)
    backbone, own = loaded.backbone, loaded.card
    shape = len(card.classes), feature_size(backbone)
    if not any(name in tensors and tensors[name].shape == shape for name in HEADS):
        raise UserError(f"{path} does not fit the {len(card.classes)} classes it says it has.")
    classifier: Any = assembled(backbone, nn.Linear(shape[1], shape[0]))
    try:
        classifier.load_state_dict(tensors)
    except RuntimeError:
        raise UserError(f"{path} does not fit the {own.backbone} it says it holds.") from None
    classifier.classes = card.classes
    return classifier.eval(), card, own
