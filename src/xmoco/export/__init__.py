"""Weights for other programs: torchvision, timm, Detectron2, ONNX; no file is kept unchecked.

::

    path = xmoco.export_weights("runs/demo/xmoco", to="onnx")
    print(xmoco.export.how_to_load("runs/demo/xmoco", "onnx", path))
"""

from xmoco.export.exporting import export_weights, how_to_load

__all__ = ["export_weights", "how_to_load"]
