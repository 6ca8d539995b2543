"""For ONNX: one file that maps normalised ``images`` to ``features`` or, of a classifier, to
``scores``, for any number of images and, if the network is convolutional, for any size.

The card of the weights (size, mean, std …) stands in the file's metadata under ``xmoco``, the names
of the classes, a list in JSON, under ``classes``.
"""

import importlib
import json
import re
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor, nn

from xmoco.export.contents import Contents
from xmoco.nn.architectures import timm_name
from xmoco.nn.backbone_files import BackboneCard
from xmoco.nn.backbones import create_timm

OPSET = 20  # what torch's exporter writes natively; ONNX Runtime reads it since 1.17
SMALLEST_SIDE = 32
# Attention is over a fixed number of patches. Padding as TensorFlow's depends on the size, in terms
# that take torch's exporter minutes.
TIED_TO_A_SIZE = re.compile("Attention|Attn|Same")


def write(model: nn.Module, contents: Contents, file: BinaryIO) -> None:
    side = contents.card.input().central_size
    dimensions = {0: torch.export.Dim("batch")}
    if takes_any_size(model, contents.card):
        smallest = min(SMALLEST_SIDE, side)
        dimensions[2] = torch.export.Dim("height", min=smallest)
        dimensions[3] = torch.export.Dim("width", min=smallest)
    program = torch.onnx.export(
        model,
        (torch.zeros(2, 3, side, side),),
        input_names=["images"],
        output_names=[contents.outputs],
        dynamic_shapes=(dimensions,),
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


def takes_any_size(model: nn.Module, card: BackboneCard) -> bool:
    """Whether it is a convolutional network, which is not tied to one size of images."""
    name = timm_name(card.backbone)
    if name is None:
        return True
    _, arguments = create_timm(name, card.size)
    parts = {type(module).__name__ for module in model.modules()}
    return not arguments and not any(map(TIED_TO_A_SIZE.search, parts))


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
