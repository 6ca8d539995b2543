"""For ONNX: one file that maps normalised ``images`` to ``features``, for any number of images.

The card of the weights (size, mean, std …) stands in the file's metadata under ``xmoco``.
"""

import importlib
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor, nn

from xmoco.nn.backbone_files import BackboneCard

OPSET = 20  # what torch's exporter writes natively; ONNX Runtime reads it since 1.17


def write(backbone: nn.Module, card: BackboneCard, file: BinaryIO) -> None:
    side = card.input().central_size
    program = torch.onnx.export(
        backbone,
        (torch.zeros(2, 3, side, side),),
        input_names=["images"],
        output_names=["features"],
        dynamic_shapes=({0: torch.export.Dim("batch")},),
        opset_version=OPSET,
        verbose=False,
    )
    assert program is not None  # it is None only for the exporter of old
    program.model.metadata_props["xmoco"] = card.as_json()
    for node in program.model.graph:
        node.metadata_props.clear()  # torch's notes for debugging, with the paths of this machine
    file.write(program.model_proto.SerializeToString())


def features(path: Path, _card: BackboneCard, images: Tensor) -> Tensor:
    onnxruntime = importlib.import_module("onnxruntime")
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    (found,) = session.run(["features"], {"images": images.numpy()})
    return torch.from_numpy(found)


def loading(path: Path, _card: BackboneCard) -> str:
    return (
        "import onnxruntime\n"
        f"model = onnxruntime.InferenceSession({str(path)!r})\n"
        '(features,) = model.run(["features"], {"images": images})  # a float32 array'
    )
