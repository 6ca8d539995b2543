# mypy: allow-subclassing-any
"""torchvision's detectors on a ResNet, and the C4 design, which torchvision has not.

All layers learn, batch norms among them: they are ordinary ones, not frozen, and the feature
pyramid has them too. Labels are 1, 2 … in the order of the categories, 0 is the background.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torchvision.models._utils import IntermediateLayerGetter
from torchvision.models.detection import FasterRCNN, MaskRCNN, RetinaNet
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.backbone_utils import BackboneWithFPN
from torchvision.models.detection.faster_rcnn import FastRCNNPredictor
from torchvision.models.detection.mask_rcnn import MaskRCNNPredictor
from torchvision.models.resnet import ResNet
from torchvision.ops import MultiScaleRoIAlign
from torchvision.ops.feature_pyramid_network import LastLevelMaxPool, LastLevelP6P7

from xmoco.errors import UserError, nearest
from xmoco.nn.backbones import feature_size

Rgb = tuple[float, float, float]

RATIOS = (0.5, 1.0, 2.0)
PYRAMID_CHANNELS = 256
DETECTIONS = 100  # an image, at most
LONGEST_SIDE = 1333 / 800
"""Of an image, as a multiple of the length to which its shorter side is brought."""


@dataclass(frozen=True)
class Design:
    """A kind of detector."""

    title: str
    masks: bool
    pyramid: bool
    two_stages: bool = True


DESIGNS: Mapping[str, Design] = {
    "faster-rcnn-c4": Design("Faster R-CNN C4", masks=False, pyramid=False),
    "faster-rcnn-fpn": Design("Faster R-CNN FPN", masks=False, pyramid=True),
    "mask-rcnn-c4": Design("Mask R-CNN C4", masks=True, pyramid=False),
    "mask-rcnn-fpn": Design("Mask R-CNN FPN", masks=True, pyramid=True),
    "retinanet-fpn": Design("RetinaNet FPN", masks=False, pyramid=True, two_stages=False),
}


def design_of(model: str) -> Design:
    if model not in DESIGNS:
        known = ", ".join(DESIGNS)
        raise UserError(f"unknown model {model!r}{nearest(model, DESIGNS)}; there are {known}.")
    return DESIGNS[model]


def build_detector(
    model: str, backbone: nn.Module, categories: int, *, size: int, mean: Rgb, std: Rgb
) -> nn.Module:
    """A torchvision detector around the layers of ``backbone``, which become its own.

    In eval mode it takes a list of images (3, height, width) of 0 to 1 and brings their shorter
    sides to ``size``, their longer ones to at most 5/3 of that.
    """
    design = design_of(model)
    if not isinstance(backbone, ResNet):
        raise UserError(
            f"{model} needs a backbone of five stages, a ResNet: {type(backbone).__name__} has no "
            "such stages."
        )
    settings = {
        "min_size": size,
        "max_size": round(size * LONGEST_SIDE),
        "image_mean": list(mean),
        "image_std": list(std),
    }
    if not design.two_stages:
        return _retinanet(backbone, categories + 1, settings)
    if design.pyramid:
        kind = MaskRCNN if design.masks else FasterRCNN
        levels = ("layer1", "layer2", "layer3", "layer4")
        pyramid = _with_pyramid(backbone, levels, LastLevelMaxPool())
        detector: nn.Module = kind(pyramid, categories + 1, **settings)
        return detector
    return _c4(backbone, categories + 1, design.masks, settings)


def _channels(backbone: ResNet, stages: Sequence[str]) -> list[int]:
    """Of the stages' outputs: each has half of the next one's."""
    names = ("layer1", "layer2", "layer3", "layer4")
    return [feature_size(backbone) // 2 ** (3 - names.index(stage)) for stage in stages]


def _with_pyramid(backbone: ResNet, stages: Sequence[str], more: nn.Module) -> nn.Module:
    pyramid: nn.Module = BackboneWithFPN(
        backbone,
        {stage: str(number) for number, stage in enumerate(stages)},
        _channels(backbone, stages),
        PYRAMID_CHANNELS,
        extra_blocks=more,
        norm_layer=nn.BatchNorm2d,
    )
    return pyramid


def _retinanet(backbone: ResNet, classes: int, settings: Mapping[str, Any]) -> nn.Module:
    stages = ("layer2", "layer3", "layer4")
    coarser = LastLevelP6P7(feature_size(backbone), PYRAMID_CHANNELS)
    detector: nn.Module = RetinaNet(
        _with_pyramid(backbone, stages, coarser),
        classes,
        detections_per_img=DETECTIONS,
        **settings,
    )
    return detector


class C4Head(nn.Module):
    """The last stage of the ResNet on every region, and one batch norm more (MoCo's extra norm)."""

    def __init__(self, stage: nn.Module, channels: int) -> None:
        super().__init__()
        self.res5 = stage
        self.norm = nn.BatchNorm2d(channels)

    def forward(self, regions: Tensor) -> Tensor:
        found: Tensor = self.norm(self.res5(regions))
        return found


class C4Predictor(FastRCNNPredictor):
    """Classes and boxes from the mean over a region."""

    def forward(self, regions: Tensor) -> tuple[Tensor, Tensor]:
        scores, deltas = super().forward(regions.mean((2, 3)))
        return scores, deltas


class Shared(nn.Module):
    """A module that is someone else's, and stands in ``state_dict`` only there."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.others = (module,)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.others[0](x)
        return found


def _c4(backbone: ResNet, classes: int, masks: bool, settings: Mapping[str, Any]) -> nn.Module:
    """Regions are cut out of the fourth stage's features, and the fifth is their head.

    As in Detectron2: 12,000 proposals before suppression and 2,000 after it in training, 6,000 and
    1,000 in testing; anchors of five sizes at every place, also where they cross the border.
    """
    channels = feature_size(backbone)
    body = IntermediateLayerGetter(backbone, {"layer3": "0"})
    (body.out_channels,) = _channels(backbone, ("layer3",))
    regions = MultiScaleRoIAlign(["0"], output_size=14, sampling_ratio=0)
    head = C4Head(backbone.layer4, channels)
    detector: nn.Module = FasterRCNN(
        body,
        rpn_anchor_generator=AnchorGenerator(((32, 64, 128, 256, 512),), (RATIOS,)),
        rpn_pre_nms_top_n_train=12_000,
        rpn_pre_nms_top_n_test=6_000,
        box_roi_pool=regions,
        box_head=head,
        box_predictor=C4Predictor(channels, classes),
        **settings,
    )
    if masks:
        roi_heads: Any = detector.roi_heads
        roi_heads.mask_roi_pool = regions
        roi_heads.mask_head = Shared(head)
        roi_heads.mask_predictor = MaskRCNNPredictor(channels, 256, classes)
    return detector
