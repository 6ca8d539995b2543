"""The data sets that torchvision knows by name, such as ``torchvision:CIFAR10``.

STL10 was made for learning without labels, so its training split is all 105,000 images, without
labels, unless ``data.labels=folders`` asks for the 5,000 that have some.
"""

from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from xmoco.config import DataConfig
from xmoco.data.imagesets import ArrayImages, EncodedImages, ImageSet
from xmoco.data.trees import FolderTree
from xmoco.errors import UserError, nearest

_BY_TRAIN = {"train": {"train": True}, "test": {"train": False}}
_BY_SPLIT = {"train": {"split": "train"}, "test": {"split": "test"}}
_WITH_VALIDATION = {"train": {"split": "trainval"}, "test": {"split": "test"}}

SPLIT_ARGUMENTS: dict[str, dict[str, dict[str, Any]]] = {
    "CIFAR10": _BY_TRAIN,
    "CIFAR100": _BY_TRAIN,
    "DTD": _BY_SPLIT,
    "FGVCAircraft": _WITH_VALIDATION,
    "FashionMNIST": _BY_TRAIN,
    "Flowers102": _BY_SPLIT,
    "Food101": _BY_SPLIT,
    "Imagenette": {"train": {"split": "train"}, "test": {"split": "val"}},
    "MNIST": _BY_TRAIN,
    "OxfordIIITPet": _WITH_VALIDATION,
    "STL10": {"train": {"split": "train+unlabeled"}, "test": {"split": "test"}},
    "SVHN": _BY_SPLIT,
}
"""How each set is told which split is meant."""


def open_torchvision(data: DataConfig, set_name: str, split: Literal["train", "test"]) -> ImageSet:
    if set_name not in SPLIT_ARGUMENTS:
        raise UserError(
            f"unknown torchvision set {set_name}{nearest(set_name, SPLIT_ARGUMENTS)}; "
            f"known are {', '.join(SPLIT_ARGUMENTS)}."
        )
    arguments = SPLIT_ARGUMENTS[set_name][split]
    if set_name == "STL10" and split == "train" and data.labels == "folders":
        arguments = {"split": "train"}
    found = _find(data, set_name, arguments)
    name = f"torchvision {set_name} ({split})"
    labels = None if data.labels == "none" else _labels(found)
    classes = None if labels is None else _classes(found, labels)
    if hasattr(found, "data"):
        return ArrayImages(name, _pixels(found.data), labels, classes)
    paths = [str(Path(path).absolute()) for path in _paths(found)]
    return EncodedImages(name, FolderTree(Path(data.root)), paths, labels, classes, data.short_side)


def _find(data: DataConfig, set_name: str, arguments: dict[str, Any]) -> Any:
    """torchvision's own object, downloading the set only if it is missing and that is allowed."""
    from torchvision import (
        datasets,
    )  # takes seconds to import, which other sources need not wait for

    kind = getattr(datasets, set_name)
    try:
        return kind(data.root, **arguments)
    except ModuleNotFoundError as error:
        raise UserError(
            f"torchvision:{set_name} needs the package {error.name}: pip install {error.name}."
        ) from error
    except (RuntimeError, OSError) as error:
        if not data.download:
            raise UserError(
                f"torchvision:{set_name} is not in {data.root}, or not whole ({error}); "
                "add data.download=true to download it, or set data.root to where it is."
            ) from error
    try:
        return kind(data.root, download=True, **arguments)
    except (RuntimeError, OSError) as error:
        reason = str(error).rstrip(".")
        raise UserError(f"torchvision:{set_name} cannot be downloaded: {reason}.") from error


def _pixels(values: Any) -> Tensor:
    """Images as torchvision keeps them, grey or RGB, channels first or last, as (n, 3, H, W)."""
    pixels = torch.as_tensor(np.asarray(values))
    if pixels.ndim == 3:
        pixels = pixels[:, None].expand(-1, 3, -1, -1)
    elif pixels.shape[-1] == 3:
        pixels = pixels.permute(0, 3, 1, 2)
    return pixels.contiguous()


def _labels(found: Any) -> Tensor | None:
    if hasattr(found, "_samples"):  # Imagenette
        values = [label for _, label in found._samples]
    else:
        names = ("targets", "labels", "_labels")
        values = next(getattr(found, name) for name in names if hasattr(found, name))
    labels = torch.as_tensor(np.asarray(values), dtype=torch.int64)
    return None if (labels < 0).any() else labels  # STL10 marks the unlabelled by -1


def _classes(found: Any, labels: Tensor) -> tuple[str, ...]:
    if hasattr(found, "classes"):
        names = found.classes  # Imagenette gives several words for each class
        return tuple(name if isinstance(name, str) else name[0] for name in names)
    return tuple(str(number) for number in range(int(labels.max()) + 1))


def _paths(found: Any) -> list[str | Path]:
    if hasattr(found, "_samples"):  # Imagenette
        return [path for path, _ in found._samples]
    return list(found._images if hasattr(found, "_images") else found._image_files)
