"""For ONNX: one file that maps normalised ``images`` to ``features`` or, of a classifier, to
``scores``, for any number of images.

The card of the weights (size, mean, std …) stands in the file's metadata under ``xmoco``, the names
of the classes, a list in JSON, under ``classes``.
"""

import importlib
import json
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor, nn

from xmoco.export.contents import Contents

OPSET = 20  # what torch's exporter writes natively; ONNX Runtime reads it since 1.17


def write(model: nn.Module, contents: Contents, file: BinaryIO) -> None:
    side = contents.card.input().central_size
    program = torch.onnx.export(
        model,
        (torch.zeros(2, 3, side, side),),
        input_names=["images"],
        output_names=[contents.outputs],
        dynamic_shapes=({0: torch.export.Dim("batch")},),
        opset_version=OPSET,
        verbose=False,
    )
    assert program is not None  # it is None only for the exporter of old
    metadata = program.model.metadata_props
    metadata["xmoco"] = contents.card.as_json()
    if contents.classes:
        metadata["classes"] = json.dumps(contents.classes)
    for node in program.model.graph:
        node.metadata_props.clear()  # torch's notes for debugging, with the paths of this machine
    file.write(program.model_proto.SerializeToString())


def outputs(path: Path, contents: Contents, images: Tensor) -> Tensor:
    onnxruntime = importlib.import_module("onnxruntime")
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    (found,) = session.run([contents.outputs], {"images": images.numpy()})
    return torch.from_numpy(found)


def loading(path: Path, contents: Contents) -> str:
    name = contents.outputs
    load = f"model = onnxruntime.InferenceSession({str(path)!r})"
    run = f'({name},) = model.run(["{name}"], {{"images": images}})  # a float32 array'
    if not contents.classes:
        return f"import onnxruntime\n{load}\n{run}"
    classes = 'classes = json.loads(model.get_modelmeta().custom_metadata_map["classes"])'
    return f"import json, onnxruntime\n{load}\n{classes}\n{run}"
