"""One way for every target: write the file, read it back as the target would, compare, keep it.

An export that does not give the network's own outputs is worth nothing, and nobody would notice
for weeks. So the file gets its name only after the target's loader has read it and has computed,
from random images of one size or two, the features of the original backbone or the scores of the
original classifier.
"""

import importlib
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor, nn

from xmoco.errors import UserError, nearest
from xmoco.export import to_detectron2, to_onnx, to_timm, to_torchvision
from xmoco.export.contents import Contents
from xmoco.export.detectron2_configs import write_configs
from xmoco.files import write_whole
from xmoco.nn.classifier_files import classifier_card, load_classifier
from xmoco.nn.weights import load_backbone, read_card, read_header

TOLERANCE = 1e-4
"""The largest difference between two outputs, as a share of the largest."""


@dataclass(frozen=True)
class Target:
    """A program that weights can go to."""

    ending: str  # of the file's name, instead of .safetensors
    libraries: tuple[str, ...]  # what it needs beyond xmoco's own; the extra has the target's name
    write: Callable[[nn.Module, Contents, BinaryIO], None]
    outputs: Callable[[Path, Contents, Tensor], Tensor]  # of images, read back from the file
    loading: Callable[[Path, Contents], str]  # the lines with which a user loads the file
    classifies: bool = True  # or it takes only the backbone of a classifier


TARGETS = {
    "torchvision": Target(
        ".torchvision.pth",
        (),
        to_torchvision.write,
        to_torchvision.outputs,
        to_torchvision.loading,
    ),
    "timm": Target(".timm.pth", ("timm",), to_timm.write, to_timm.outputs, to_timm.loading),
    "detectron2": Target(
        ".detectron2.pkl",
        (),
        to_detectron2.write,
        to_detectron2.outputs,
        to_detectron2.loading,
        classifies=False,
    ),
    "onnx": Target(
        ".onnx",
        ("onnx", "onnxruntime", "onnxscript"),
        to_onnx.write,
        to_onnx.outputs,
        to_onnx.loading,
    ),
}


def export_weights(
    weights: str | Path,
    to: str,
    out: str | Path | None = None,
    configs: str | Path | None = None,
    *,
    backbone_only: bool = False,
) -> Path:
    """Write the backbone or classifier in a run folder or a file of weights for another program.

    ``to`` is torchvision, timm, detectron2 or onnx; the file goes beside the weights unless ``out``
    says where. It is there only if it was read back and gave the same outputs, to ``TOLERANCE``; an
    existing file is left alone. ``configs`` is a new folder for configurations of Detectron2. Of a
    classifier the backbone alone is written with ``backbone_only``, and always for Detectron2.
    """
    target = _target(to)
    if configs is not None and to != "detectron2":
        raise UserError(f"--configs is for detectron2 only: leave it out for {to}.")
    contents, source = _contents(weights, target, backbone_only)
    default = source.with_suffix(target.ending)
    path = default if out is None else Path(out)
    if path.suffix != default.suffix:
        raise UserError(f"a file for {to} must end in {default.suffix}, and {path} does not.")
    if path.exists():
        raise UserError(f"{path} already exists: remove it or name another file with --out.")
    _require(target.libraries, extra=to)

    model = load_classifier(source) if contents.classes else load_backbone(source)
    side = contents.card.input().central_size
    random = torch.Generator().manual_seed(0)
    tests = [torch.randn(3, 3, side, side, generator=random)]
    if to_onnx.takes_any_size(model, contents.card):
        tests.append(torch.randn(2, 3, side + 32, side + 64, generator=random))
    with torch.no_grad():
        expected: list[Tensor] = [model(images) for images in tests]
    if not all(outputs.isfinite().all() for outputs in expected):
        raise UserError(
            f"the network in {source} gives {contents.outputs} that are NaN or infinite."
        )

    def write_and_check(file: BinaryIO) -> None:
        target.write(model, contents, file)
        file.flush()
        try:
            with torch.no_grad():
                found = [target.outputs(Path(file.name), contents, images) for images in tests]
        except Exception as error:  # whatever a foreign loader may say
            reason = str(error).strip().partition("\n")[0] or type(error).__name__
            raise UserError(f"{path} was not kept: {to} cannot read it back ({reason}).") from error
        sentence = f"{path} was not kept: read back by {to}, it gives {contents.outputs}"
        for theirs, ours in zip(found, expected, strict=True):
            _compare(theirs, ours, sentence)

    with nullcontext() if configs is None else _new_folder(Path(configs)):
        write_whole(path, write_and_check)
        if configs is not None:
            write_configs(contents.card, path, Path(configs))
    return path


@contextmanager
def _new_folder(folder: Path) -> Iterator[None]:
    """It is gone again where something fails."""
    if folder.exists():
        raise UserError(f"{folder} already exists: choose another folder with --configs.")
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise UserError(f"cannot create {folder}: {error.strerror or error}.") from None
    try:
        yield
    except UserError:
        shutil.rmtree(folder)
        raise


def how_to_load(
    weights: str | Path, to: str, path: str | Path, *, backbone_only: bool = False
) -> str:
    """The lines that load the exported file ``path``, to copy."""
    target = _target(to)
    contents, source = _contents(weights, target, backbone_only)
    card = contents.card
    side = card.input().central_size
    seen = f"# for RGB images of {side} × {side} in [0, 1], minus {card.mean}, over {card.std}"
    if to == "detectron2":  # there, images of any size have values up to 255
        seen = f"# for RGB images with values from 0 to 255; pre-trained at {side} × {side}"
    if not target.classifies and not backbone_only and _classes(source):
        seen = f"# the backbone without its classifier: {to} puts heads of its own on it\n{seen}"
    return f"{seen}\n{target.loading(Path(path), contents)}"


def _contents(weights: str | Path, target: Target, backbone_only: bool) -> tuple[Contents, Path]:
    """What is exported, and where it is."""
    card, source = read_card(weights)
    classes = _classes(source) if target.classifies and not backbone_only else ()
    return Contents(card, classes), source


def _classes(source: Path) -> tuple[str, ...]:
    """Those of the classifier, if the weights are those of one of ours."""
    card = classifier_card(*read_header(source))
    return () if card is None else card.classes


def _target(to: str) -> Target:
    if to not in TARGETS:
        known = ", ".join(TARGETS)
        raise UserError(f"unknown target {to!r}{nearest(to, TARGETS)}: there are {known}.")
    return TARGETS[to]


def _require(libraries: tuple[str, ...], extra: str) -> None:
    for library in libraries:
        try:
            importlib.import_module(library)
        except ModuleNotFoundError:
            raise UserError(
                f"exporting to {extra} needs {library}: pip install 'xmoco[{extra}]'."
            ) from None


def _compare(found: Tensor, expected: Tensor, sentence: str) -> None:
    if found.shape != expected.shape:
        shapes = f"{tuple(found.shape)} instead of {tuple(expected.shape)}"
        raise UserError(f"{sentence} of shape {shapes}.")
    difference = float((found - expected).abs().max())
    largest = float(expected.abs().max())
    if not difference <= TOLERANCE * largest:  # also when it is no number
        raise UserError(
            f"{sentence} that differ by {difference:.1e}, the largest being {largest:.1e} "
            f"(allowed is {TOLERANCE:g} of it)."
        )
