"""The encoder f: backbone, head, unit length; and its momentum copy g."""

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from xmoco.config import InputConfig, ModelConfig
from xmoco.nn.backbones import build_backbone, check_size, feature_size
from xmoco.nn.heads import Ending, mlp_head
from xmoco.schedules import Value


class Encoder(nn.Module):
    """Images → vectors of length ``feature_size``, of unit length unless said otherwise."""

    def __init__(self, backbone: nn.Module, head: nn.Module, unit_length: bool = True) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = head
        self.unit_length = unit_length

    def forward(self, images: Tensor) -> Tensor:
        features: Tensor = self.head(self.backbone(images)).float()
        return F.normalize(features, dim=1) if self.unit_length else features


def build_encoder(
    model: ModelConfig,
    input: InputConfig | None = None,
    unit_length: bool = True,
    ending: Ending = "biased",
) -> Encoder:
    """``input`` says which images it must take, which matters to some backbones of timm."""
    backbone = checked_backbone(model, input or InputConfig())
    head = mlp_head(
        feature_size(backbone), model.head_hidden, model.feature_size, model.head_layers, ending
    )
    return Encoder(backbone, head, unit_length)


def checked_backbone(model: ModelConfig, input: InputConfig) -> nn.Module:
    """One that takes such images."""
    backbone = build_backbone(model.backbone, model.stem, input.size)
    check_size(model.backbone, backbone, input.central_size)
    return backbone


def momentum_copy(encoder: nn.Module) -> nn.Module:
    """g starts as f and gets no gradients."""
    return copy.deepcopy(encoder).requires_grad_(False)


@torch.no_grad()
def momentum_update(follower: nn.Module, leader: nn.Module, momentum: Value) -> None:
    """g ← m·g + (1−m)·f on the parameters, in one fused call.

    Buffers (batch statistics) of g come from its own forward passes.
    """
    g: list[Tensor] = list(follower.parameters())
    f: list[Tensor] = list(leader.parameters())
    if isinstance(momentum, Tensor):  # on the device; there is no fused call for that
        steps = list(torch._foreach_sub(f, g))
        torch._foreach_mul_(steps, (1 - momentum).float())
        torch._foreach_add_(g, steps)
    else:
        torch._foreach_lerp_(g, f, 1 - momentum)
