"""The encoder f: backbone, head, unit length; and its momentum copy g."""

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.models.resnet import ResNet

from xmoco.config import ModelConfig
from xmoco.nn.backbones import build_backbone, feature_size
from xmoco.nn.heads import mlp_head


class Encoder(nn.Module):
    """Images → unit vectors of length ``feature_size``."""

    def __init__(self, backbone: ResNet, head: nn.Module) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = head

    def forward(self, images: Tensor) -> Tensor:
        return F.normalize(self.head(self.backbone(images)).float(), dim=1)


def build_encoder(model: ModelConfig) -> Encoder:
    backbone = build_backbone(model.backbone, model.stem)
    head = mlp_head(
        feature_size(backbone), model.head_hidden, model.feature_size, model.head_layers
    )
    return Encoder(backbone, head)


def momentum_copy(encoder: nn.Module) -> nn.Module:
    """g starts as f and gets no gradients."""
    return copy.deepcopy(encoder).requires_grad_(False)


@torch.no_grad()
def momentum_update(follower: nn.Module, leader: nn.Module, momentum: float) -> None:
    """g ← m·g + (1−m)·f on the parameters, in one fused call.

    Buffers (batch statistics) of g come from its own forward passes.
    """
    torch._foreach_lerp_(list(follower.parameters()), list(leader.parameters()), 1 - momentum)
