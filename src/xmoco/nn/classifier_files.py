"""Trained classifiers as files: safetensors, a ResNet's under torchvision's names.

The header has the backbone's card, and in it what the classifier is. So the file serves as the
backbone's weights, too.
"""

import copy
import json
from collections import OrderedDict
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import torch
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError
from safetensors.torch import save
from torch import nn
from torchvision.models.resnet import ResNet

from xmoco.errors import UserError
from xmoco.files import write_whole
from xmoco.nn.backbone_files import BACKBONE, CLASSIFIER, BackboneCard, own_header, read_tensors
from xmoco.nn.backbones import feature_size
from xmoco.nn.weights import INSIDE, load_weights
from xmoco.text import printable

FILE = "classifier.safetensors"
HEADS = ("fc", "head")
"""What ``assembled`` calls it: on a ResNet, on others."""
Name = Annotated[str, AfterValidator(printable)]


class ClassifierCard(BaseModel):
    """What stands in the file's header beside the backbone's card."""

    model_config = ConfigDict(extra="forbid", frozen=True)

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
    """Written only if what is read back gives the same scores: backbones of others may be built in
    ways that no card tells."""
    whole = assembled(copy.deepcopy(backbone), copy.deepcopy(head)).cpu().eval()
    header = json.loads(backbone_card.as_json()) | {CLASSIFIER: card.model_dump()}
    tensors = {name: value.contiguous() for name, value in whole.state_dict().items()}
    side = backbone_card.input().central_size
    images = torch.randn(3, 3, side, side, generator=torch.Generator().manual_seed(0))

    @torch.no_grad()
    def write_and_check(file: BinaryIO) -> None:
        file.write(save(tensors, metadata={BACKBONE: json.dumps(header)}))
        file.flush()
        try:
            same = torch.allclose(load_classifier(file.name)(images), whole(images), 1e-3, 1e-3)
        except UserError:
            same = False
        if not same:
            raise UserError(f"its backbone is no ordinary {backbone_card.backbone}.")

    write_whole(path, write_and_check)


def load_classifier(weights: str | Path) -> nn.Module:
    """The classifier in a run folder or a file, in eval mode.

    It takes images (N, 3, height, width) as ``load_transform`` makes them, and gives scores
    (N, classes), whose softmax are probabilities. Column n is ``classifier.classes[n]``. On a
    ResNet it is torchvision's model.
    """
    return read_classifier(weights)[0]


def read_classifier(weights: str | Path) -> tuple[nn.Module, ClassifierCard, BackboneCard]:
    path = _file(Path(weights).expanduser())
    card = classifier_card(own_header(path), path)
    if card is None:
        raise UserError(
            f"{path} holds no classifier of xmoco: `xmoco evaluate finetune` makes one of a "
            "backbone."
        )
    loaded, tensors = load_weights(path), read_tensors(path)
    name = HEADS[not isinstance(loaded.backbone, ResNet)]
    parts = {kind: tensors.get(f"{name}.{kind}") for kind in ("weight", "bias")}
    shapes = [None if part is None else tuple(part.shape) for part in parts.values()]
    classes, length = len(card.classes), feature_size(loaded.backbone)
    if shapes != [(classes, length), (classes,)]:
        raise UserError(f"{path} does not fit the {classes} classes it says it has.")
    head = nn.Linear(length, classes)
    head.load_state_dict(parts)
    classifier: Any = assembled(loaded.backbone, head)
    classifier.classes = card.classes
    return classifier.eval(), card, loaded.card


def classifier_card(header: dict[str, Any] | None, path: Path) -> ClassifierCard | None:
    """What the header of a file tells of a classifier, if there is one."""
    told = (header or {}).get(CLASSIFIER)
    if told is None:
        return None
    try:
        return ClassifierCard.model_validate(told)
    except ValidationError as error:
        place = printable(".".join(map(str, error.errors()[0]["loc"])) or CLASSIFIER)
        raise UserError(f"{path} has an invalid header: {place}.") from None


def _file(path: Path) -> Path:
    if path.is_dir():
        if (path / "config.yaml").is_file() and not (path / FILE).is_file():
            raise UserError(
                f"{path} has no {FILE}: give the run folder of `xmoco evaluate finetune` or "
                "`linear`. If it is one that was interrupted, finish it first, with the same "
                "command again."
            )
        path = path / FILE
    if not path.is_file():
        raise UserError(
            f"no classifier at {path}: give the folder of `xmoco evaluate finetune` or `linear`, "
            f"or a {FILE}."
        )
    return path
