"""Trained detectors as files: safetensors under torchvision's names, with a card in the header."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import safetensors
from safetensors.torch import load_file, save
from torch import nn

from xmoco.detect.models import DESIGNS, build_detector
from xmoco.errors import UserError
from xmoco.files import write_whole
from xmoco.nn.backbone_files import DETECTOR
from xmoco.nn.backbones import build_backbone

FILE = "detector.safetensors"
Rgb = tuple[float, float, float]


@dataclass(frozen=True)
class DetectorCard:
    """What stands in the file's header beside the weights."""

    model: str
    backbone: str
    stem: str
    categories: tuple[str, ...]
    size: int  # to which the shorter side of an image is brought
    mean: Rgb
    std: Rgb
    method: str  # that made the backbone
    schedule: str
    data: str
    seed: int
    started_from: str | None = None  # what the backbone's own training did, if from weights

    def as_json(self) -> str:
        return json.dumps(
            {name: value for name, value in asdict(self).items() if value is not None}
        )

    def built(self) -> nn.Module:
        """Such a detector, untrained."""
        return build_detector(
            self.model,
            build_backbone(self.backbone, self.stem),
            len(self.categories),
            size=self.size,
            mean=self.mean,
            std=self.std,
        )


def save_detector(detector: nn.Module, card: DetectorCard, path: Path) -> None:
    tensors = {
        name: value.detach().cpu().contiguous() for name, value in detector.state_dict().items()
    }
    write_whole(path, save(tensors, metadata={DETECTOR: card.as_json()}))


def load_detector(weights: str | Path) -> nn.Module:
    """The detector in a run folder or a file, in eval mode: a torchvision model.

    It takes a list of images (3, height, width) with values of 0 to 1, and gives for each a
    dictionary with ``boxes``, ``labels``, ``scores`` and, where it draws them, ``masks``. Label n
    is ``detector.categories[n - 1]``.
    """
    return read_detector(weights)[0]


def read_detector(weights: str | Path) -> tuple[nn.Module, DetectorCard]:
    path = Path(weights)
    if path.is_dir():
        path = path / FILE
    if not path.is_file():
        raise UserError(
            f"no detector at {path}: give the folder of `xmoco evaluate detect`, or a {FILE}."
        )
    card = _card(path)
    detector: Any = card.built()
    try:
        detector.load_state_dict(load_file(path))
    except RuntimeError:
        raise UserError(f"{path} does not fit the {card.model} it says it holds.") from None
    detector.categories = card.categories
    return detector.eval(), card


def _card(path: Path) -> DetectorCard:
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            told = (file.metadata() or {}).get(DETECTOR)
    except (OSError, safetensors.SafetensorError):
        raise UserError(f"{path} is damaged or no safetensors file.") from None
    if told is None:
        raise UserError(
            f"{path} holds no detector of xmoco: `xmoco evaluate detect` makes one of a backbone."
        )
    try:
        content: dict[str, Any] = json.loads(told)
        lists = {name: tuple(content[name]) for name in ("categories", "mean", "std")}
        card = DetectorCard(**content | lists)
    except (ValueError, TypeError, LookupError):
        raise UserError(f"{path} has a header that this xmoco does not know.") from None
    if card.model not in DESIGNS:
        raise UserError(f"{path} holds a {card.model}, which this xmoco does not know.")
    return card
