"""The data sets that torchvision knows by name, such as ``torchvision:CIFAR10``.

``open_torchvision`` gives the two splits that training and most evaluations use. ``transfer_sets``
needs others, for which it asks torchvision by ``find``.

STL10 was made for learning without labels, so its training split is all 105,000 images, without
labels, unless ``data.labels=folders`` asks for the 5,000 that have some.
"""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from torch import Tensor

from xmoco.config import DataConfig
from xmoco.data.imagesets import ArrayImages, EncodedImages, ImageSet
from xmoco.data.trees import FolderTree
from xmoco.distributed import first_on_machine
from xmoco.errors import UserError, nearest

T = TypeVar("T")

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
    "StanfordCars": _BY_SPLIT,
    "STL10": {"train": {"split": "train+unlabeled"}, "test": {"split": "test"}},
    "SVHN": _BY_SPLIT,
}
"""How each set is told which split is meant."""

_TROUBLE = (ImportError, OSError, RuntimeError, LookupError, ValueError, EOFError)
"""What torchvision raises when a set is not there, damaged, or needs a package."""

_BY_HAND = {
    "StanfordCars": "put devkit/, cars_train/, cars_test/ and cars_test_annos_withlabels.mat into "
    "{root}/stanford_cars, as it can no longer be downloaded",
}
"""What to do for a set that torchvision only reads."""


def open_torchvision(data: DataConfig, set_name: str, split: Literal["train", "test"]) -> ImageSet:
    if set_name not in SPLIT_ARGUMENTS:
        raise UserError(
            f"unknown torchvision set {set_name}{nearest(set_name, SPLIT_ARGUMENTS)}; "
            f"known are {', '.join(SPLIT_ARGUMENTS)}."
        )
    arguments = SPLIT_ARGUMENTS[set_name][split]
    if set_name == "STL10" and split == "train" and data.labels == "folders":
        arguments = {"split": "train"}
    return images_of(find(data, set_name, arguments), data, f"torchvision {set_name} ({split})")


def images_of(found: Any, data: DataConfig, name: str) -> ImageSet:
    """The image set of a torchvision object."""
    labels = None if data.labels == "none" else _labels(found)
    classes = None if labels is None else _classes(found, labels)
    if hasattr(found, "data"):
        return ArrayImages(name, _pixels(found.data), labels, classes)
    return images_at(_paths(found), data, name, labels, classes)


def images_at(
    paths: Iterable[str | Path],
    data: DataConfig,
    name: str,
    labels: Tensor | None,
    classes: tuple[str, ...] | None,
) -> ImageSet:
    """The image set of some files."""
    files = [str(Path(path).absolute()) for path in paths]
    return EncodedImages(name, FolderTree(Path(data.root)), files, labels, classes, data.short_side)


def find(data: DataConfig, set_name: str, arguments: dict[str, Any]) -> Any:
    """torchvision's own object, downloading the set only if it is missing and that is allowed."""
    return _first_alone(data, lambda: _found(data, set_name, arguments))


def _first_alone(data: DataConfig, find: Callable[[], T]) -> T:
    """What ``find`` finds, in every process. If it may download, one process of the machine does
    first: several would write to the same files."""
    if not data.download:
        return find()
    found: list[T] = []
    first_on_machine(lambda: found.append(find()))
    return found[0] if found else find()


def _found(data: DataConfig, set_name: str, arguments: dict[str, Any]) -> Any:
    from torchvision import (
        datasets,
    )  # takes seconds to import, which other sources need not wait for

    kind = getattr(datasets, set_name)
    try:
        return kind(data.root, **arguments)
    except _TROUBLE as error:
        package = error if isinstance(error, ModuleNotFoundError) else error.__context__
        if isinstance(package, ModuleNotFoundError):
            raise UserError(
                f"torchvision:{set_name} needs the package {package.name}: "
                f"pip install {package.name}."
            ) from error
        if not data.download or set_name in _BY_HAND:
            raise _missing(data, set_name, str(error)) from error
    return download(data, set_name, arguments)


def find_folder(data: DataConfig, set_name: str, folder: str) -> Path:
    """The folder of a set that torchvision can download, but does not read as it is needed."""
    path = Path(data.root) / folder

    def find() -> Path:
        if not path.is_dir():
            if not data.download:
                raise _missing(data, set_name, f"there is no {folder}")
            download(data, set_name, {})
        return path

    return _first_alone(data, find)


def download(data: DataConfig, set_name: str, arguments: dict[str, Any]) -> Any:
    from torchvision import datasets

    try:
        return getattr(datasets, set_name)(data.root, download=True, **arguments)
    except _TROUBLE as error:
        reason = str(error).rstrip(".")
        raise UserError(f"torchvision:{set_name} cannot be downloaded: {reason}.") from error


class MissingSetError(UserError):
    """What to do is said as settings are given; ``with_options`` for commands that have some."""

    def __init__(self, what: str, by_hand: str | None) -> None:
        super().__init__(what, by_hand)  # by which it can be told to other processes
        self._what, self._by_hand = what, by_hand

    def __str__(self) -> str:
        settings = "add download=true to download it, or root=FOLDER for where it is"
        return f"{self._what}; {self._by_hand or settings}."

    @property
    def with_options(self) -> str:
        options = "add --download to download it, or say with --root where it is"
        return f"{self._what}; {self._by_hand or options}."


def _missing(data: DataConfig, set_name: str, reason: str) -> MissingSetError:
    by_hand = _BY_HAND.get(set_name)
    reason = reason.partition(". You can")[0].rstrip(".")  # torchvision's own advice is not ours
    return MissingSetError(
        f"torchvision:{set_name} is not in {data.root}, or not whole ({reason})",
        None if by_hand is None else by_hand.format(root=data.root),
    )


def _pixels(values: Any) -> Tensor:
    """Images as torchvision keeps them, grey or RGB, channels first or last, as (n, 3, H, W)."""
    pixels = torch.as_tensor(np.asarray(values))
    if pixels.ndim == 3:
        pixels = pixels[:, None].expand(-1, 3, -1, -1)
    elif pixels.shape[-1] == 3:
        pixels = pixels.permute(0, 3, 1, 2)
    return pixels.contiguous()


def _labels(found: Any) -> Tensor | None:
    if hasattr(found, "_samples"):  # Imagenette, StanfordCars
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
    if hasattr(found, "_samples"):  # Imagenette, StanfordCars
        return [path for path, _ in found._samples]
    return list(found._images if hasattr(found, "_images") else found._image_files)
