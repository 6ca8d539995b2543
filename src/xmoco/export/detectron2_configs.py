"""Configuration files with which Detectron2 tunes detectors on exported weights.

One for every model and schedule of ``xmoco evaluate detect``, in Detectron2's own keys: the paper's
settings, which are MoCo's. The C4 head with its extra norm is not Detectron2's, so a few lines of
Python that add it go beside the files.
"""

from pathlib import Path
from typing import Any

import yaml

from xmoco.detect.courses import BATCH, COURSES, NORM_DECAY, RATE, Course
from xmoco.detect.models import DESIGNS, Design
from xmoco.export.to_detectron2 import architecture_of, settings_of
from xmoco.files import write_whole
from xmoco.nn.backbone_files import BackboneCard

EXTRA_NORM = "extra_norm.py"
EXTRA_NORM_CODE = '''"""Adds the C4 head with one batch norm more: import it before training."""

from detectron2.layers import get_norm
from detectron2.modeling import ROI_HEADS_REGISTRY
from detectron2.modeling.roi_heads import Res5ROIHeads


@ROI_HEADS_REGISTRY.register()
class Res5ROIHeadsExtraNorm(Res5ROIHeads):
    def __init__(self, cfg, input_shape):
        super().__init__(cfg, input_shape)
        channels = self.res5[-1].out_channels
        self.res5.add_module("norm", get_norm(cfg.MODEL.RESNETS.NORM, channels))
'''
VOC_CLASSES = 20
COCO_CLASSES = 80
PYRAMID = ["res2", "res3", "res4", "res5"]


class _InFull(yaml.SafeDumper):
    """Writes a list again where it comes again, instead of pointing at it."""

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002
        return True


def write_configs(card: BackboneCard, weights: Path, folder: Path) -> list[Path]:
    """Files in the empty ``folder`` for the exported file ``weights``; those that Detectron2 has a
    model for: C4 needs bottlenecks."""
    architecture = architecture_of(card)
    written = []
    for model, design in DESIGNS.items():
        if not design.pyramid and architecture.block == "basic":
            continue
        for course in COURSES.values():
            if design.masks and _is_voc(course):
                continue  # its boxes have no masks
            path = folder / f"{model}-{course.name}.yaml"
            content = _config(card, weights, design, course)
            lines = yaml.dump(content, Dumper=_InFull, sort_keys=False, default_flow_style=None)
            write_whole(path, lines.encode())
            written.append(path)
    if architecture.block != "basic":
        path = folder / EXTRA_NORM
        write_whole(path, EXTRA_NORM_CODE.encode())
        written.append(path)
    return written


def _is_voc(course: Course) -> bool:
    return course.name.startswith("voc")


def _config(card: BackboneCard, weights: Path, design: Design, course: Course) -> dict[str, Any]:
    classes = VOC_CLASSES if _is_voc(course) else COCO_CLASSES
    given = settings_of(card, weights)
    model = {
        "META_ARCHITECTURE": "GeneralizedRCNN" if design.two_stages else "RetinaNet",
        "MASK_ON": design.masks,
        **given["MODEL"],
        "BACKBONE": {"FREEZE_AT": 0},
    }
    model["RESNETS"] = model["RESNETS"] | {"NORM": "SyncBN"}
    if not design.two_stages:
        _add_retinanet(model, classes)
    elif design.pyramid:
        _add_pyramid(model, classes)
    else:
        _add_c4(model, classes)
    train = ["voc_2007_trainval", "voc_2012_trainval"] if _is_voc(course) else ["coco_2017_train"]
    return {
        "VERSION": 2,
        "MODEL": model,
        "INPUT": given["INPUT"]
        | {"MIN_SIZE_TRAIN": list(course.sizes), "MIN_SIZE_TEST": course.test_size},
        "DATASETS": {
            "TRAIN": train,
            "TEST": ["voc_2007_test"] if _is_voc(course) else ["coco_2017_val"],
        },
        "SOLVER": {
            "IMS_PER_BATCH": BATCH,
            "BASE_LR": RATE[design.two_stages],
            "MOMENTUM": course.momentum,
            "WEIGHT_DECAY": course.weight_decay,
            "WEIGHT_DECAY_NORM": NORM_DECAY,
            "STEPS": list(course.milestones),
            "MAX_ITER": course.steps,
            "WARMUP_ITERS": course.warmup,
        },
        "TEST": {"PRECISE_BN": {"ENABLED": True, "NUM_ITER": course.precise}},
    }


def _add_c4(model: dict[str, Any], classes: int) -> None:
    model["RESNETS"] |= {"OUT_FEATURES": ["res4"]}
    model["RPN"] = {"PRE_NMS_TOPK_TEST": 6000, "POST_NMS_TOPK_TEST": 1000}
    model["ROI_HEADS"] = {"NAME": "Res5ROIHeadsExtraNorm", "NUM_CLASSES": classes}


def _add_pyramid(model: dict[str, Any], classes: int) -> None:
    model["BACKBONE"] |= {"NAME": "build_resnet_fpn_backbone"}
    model["RESNETS"] |= {"OUT_FEATURES": PYRAMID}
    model["FPN"] = {"IN_FEATURES": PYRAMID, "NORM": "SyncBN"}
    model["ANCHOR_GENERATOR"] = {"SIZES": [[32], [64], [128], [256], [512]]}
    model["RPN"] = {
        "IN_FEATURES": ["p2", "p3", "p4", "p5", "p6"],
        "PRE_NMS_TOPK_TRAIN": 2000,
        "PRE_NMS_TOPK_TEST": 1000,
        "POST_NMS_TOPK_TRAIN": 1000,
        "POST_NMS_TOPK_TEST": 1000,
    }
    model["ROI_HEADS"] = {
        "NAME": "StandardROIHeads",
        "IN_FEATURES": ["p2", "p3", "p4", "p5"],
        "NUM_CLASSES": classes,
    }
    model["ROI_BOX_HEAD"] = {"NAME": "FastRCNNConvFCHead", "NUM_FC": 2, "POOLER_RESOLUTION": 7}
    model["ROI_MASK_HEAD"] = {"NUM_CONV": 4, "POOLER_RESOLUTION": 14}


def _add_retinanet(model: dict[str, Any], classes: int) -> None:
    model["BACKBONE"] |= {"NAME": "build_retinanet_resnet_fpn_backbone"}
    model["RESNETS"] |= {"OUT_FEATURES": PYRAMID[1:]}
    model["FPN"] = {"IN_FEATURES": PYRAMID[1:], "NORM": "SyncBN"}
    sizes = [[size * 2 ** (third / 3) for third in range(3)] for size in (32, 64, 128, 256, 512)]
    model["ANCHOR_GENERATOR"] = {"SIZES": sizes}
    model["RETINANET"] = {"NUM_CLASSES": classes, "SMOOTH_L1_LOSS_BETA": 0.0}
