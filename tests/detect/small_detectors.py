"""Detectors that a test can train: torchvision's, but narrow, and with few regions an image."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torchvision.models.detection.mask_rcnn import MaskRCNNHeads, MaskRCNNPredictor

from xmoco.detect import courses, evaluation, models

CHANNELS = 32
REGIONS = 48


def shrunk(detector: Any, classes: int) -> nn.Module:
    if not hasattr(detector, "rpn"):
        for head in (detector.head.classification_head, detector.head.regression_head):
            for layer in head.conv.modules():  # made for 256 channels, they begin too small for 32
                if isinstance(layer, nn.Conv2d):
                    nn.init.kaiming_normal_(layer.weight, mode="fan_out")
        return detector
    detector.roi_heads.fg_bg_sampler.batch_size_per_image = REGIONS
    if isinstance(detector.roi_heads.box_head, models.C4Head):
        detector.roi_heads.box_roi_pool.output_size = (8, 8)
    detector.rpn._pre_nms_top_n = {"training": 100, "testing": 100}
    detector.rpn._post_nms_top_n = {"training": 50, "testing": 50}
    if isinstance(detector.roi_heads.mask_head, MaskRCNNHeads):
        detector.roi_heads.mask_head = MaskRCNNHeads(CHANNELS, (CHANNELS, CHANNELS), 1)
        detector.roi_heads.mask_predictor = MaskRCNNPredictor(CHANNELS, CHANNELS, classes)
    return detector


def build_small(model: str, backbone: nn.Module, categories: int, **settings: Any) -> nn.Module:
    """Inside ``small_detectors``."""
    detector = models.build_detector(model, backbone, categories, **settings)
    return shrunk(detector, categories + 1)


@contextmanager
def small_detectors(report: bool = False) -> Iterator[None]:
    """Every detector that is built meanwhile is a small one, and learns at 0.01 for two images.

    Its report takes longer to draw than such a detector to train, and is left out.
    """
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(models, "PYRAMID_CHANNELS", CHANNELS)
        patch.setattr(evaluation, "build_detector", build_small)
        if not report:
            patch.setattr(evaluation._Job, "report", lambda *_: None)
        patch.setattr("xmoco.detect.detector_files.build_detector", build_small)
        patch.setattr(courses, "RATE", {True: 0.08, False: 0.08})
        yield
