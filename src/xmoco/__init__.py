"""xmoco pre-trains vision backbones on unlabelled images and evaluates them.

The whole public surface::

    result = xmoco.pretrain("demo", out="runs/first")        # images to weights
    backbone = xmoco.load_backbone(result.weights)           # a torchvision ResNet
    transform = xmoco.load_transform(result.weights)         # from an image to its input
    features = xmoco.embed(result.weights, "photos/")        # what it sees in each image
    criterion = xmoco.XMoCoLoss(feature_size=128)            # the loss, for a loop of your own
    criterion = xmoco.BatchXMoCoLoss()                       # the same over a batch's negatives
    xmoco.evaluate_knn(result.weights, "patterns")           # how good is it?
    xmoco.evaluate_finetune(result.weights, "pets/", out="runs/pets")  # a classifier
    xmoco.classify("runs/pets", "photos/")                   # what is in each image?
    xmoco.export_weights("runs/pets", to="onnx")             # for other programs
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    __version__: str
    from xmoco.classifying import classify as classify
    from xmoco.detect.detector_files import load_detector as load_detector
    from xmoco.detect.evaluation import evaluate_detect as evaluate_detect
    from xmoco.embedding import embed as embed
    from xmoco.errors import UserError as UserError
    from xmoco.evaluate.classification import evaluate_finetune as evaluate_finetune
    from xmoco.evaluate.classification import evaluate_knn as evaluate_knn
    from xmoco.evaluate.classification import evaluate_linear as evaluate_linear
    from xmoco.evaluate.evaluation import EvalOptions as EvalOptions
    from xmoco.evaluate.transfer import evaluate_transfer as evaluate_transfer
    from xmoco.evaluate.transform import load_transform as load_transform
    from xmoco.export.exporting import export_weights as export_weights
    from xmoco.losses import BatchXMoCoLoss as BatchXMoCoLoss
    from xmoco.losses import XMoCoLoss as XMoCoLoss
    from xmoco.nn.classifier_files import load_classifier as load_classifier
    from xmoco.nn.weights import load_backbone as load_backbone
    from xmoco.pretraining import pretrain as pretrain

# Loaded when first used, so that `xmoco --help` need not wait for torch.
_WHERE = {
    "BatchXMoCoLoss": "xmoco.losses",
    "EvalOptions": "xmoco.evaluate.evaluation",
    "UserError": "xmoco.errors",
    "XMoCoLoss": "xmoco.losses",
    "classify": "xmoco.classifying",
    "embed": "xmoco.embedding",
    "evaluate_detect": "xmoco.detect.evaluation",
    "evaluate_finetune": "xmoco.evaluate.classification",
    "evaluate_knn": "xmoco.evaluate.classification",
    "evaluate_linear": "xmoco.evaluate.classification",
    "evaluate_transfer": "xmoco.evaluate.transfer",
    "export_weights": "xmoco.export.exporting",
    "load_backbone": "xmoco.nn.weights",
    "load_classifier": "xmoco.nn.classifier_files",
    "load_detector": "xmoco.detect.detector_files",
    "load_transform": "xmoco.evaluate.transform",
    "pretrain": "xmoco.pretraining",
}

__all__ = [
    "BatchXMoCoLoss",
    "EvalOptions",
    "UserError",
    "XMoCoLoss",
    "classify",
    "embed",
    "evaluate_detect",
    "evaluate_finetune",
    "evaluate_knn",
    "evaluate_linear",
    "evaluate_transfer",
    "export_weights",
    "load_backbone",
    "load_classifier",
    "load_detector",
    "load_transform",
    "pretrain",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("xmoco")
    if name not in _WHERE:
        raise AttributeError(f"module 'xmoco' has no attribute {name!r}")
    return getattr(importlib.import_module(_WHERE[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
