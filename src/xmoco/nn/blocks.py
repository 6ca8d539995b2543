# mypy: allow-subclassing-any
"""ResNets and heads whose layers run by kernels of our own on CUDA, as plain torch elsewhere.

``fuse_layers`` changes a network in place: what it computes, its parameters and their names stay.
Batch norms take the addition and the ReLU that follow along, in training (``nn/fused_norm.py``);
the large stem has a convolution and a max pooling that leave less of the GPU idle
(``nn/fused_stem.py``).
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.models.resnet import BasicBlock, Bottleneck, ResNet

from xmoco.nn.batchnorm import SplitBatchNorm1d, SplitBatchNorm2d, SplitStatistics
from xmoco.triton_here import HAS_TRITON


def fusible(x: Tensor, residual: Tensor | None = None) -> bool:
    """Whether the fused operations take these; else plain torch does the same."""
    return (
        HAS_TRITON
        and x.is_cuda
        and x.dim() in (2, 4)
        and x.dtype in (torch.bfloat16, torch.float16, torch.float32)
        and (residual is None or (residual.dtype, residual.shape) == (x.dtype, x.shape))
    )


class _Fused(SplitStatistics):
    """ReLU(batch norm + residual); both are optional, the ReLU an attribute of the layer."""

    relu = False

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        if self.training and fusible(x, residual):
            return self._forward_fused(x, residual)
        out = super().forward(x)
        if residual is not None:
            out += residual
        return F.relu_(out) if self.relu else out

    def _forward_fused(self, x: Tensor, residual: Tensor | None) -> Tensor:
        self._check(x)
        from xmoco.nn.fused_norm import fused_batch_norm  # here, since Triton is not everywhere

        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        assert self.momentum is not None
        return fused_batch_norm(
            x,
            residual,
            self.weight,
            self.bias,
            self.running_mean,
            self.running_var,
            self.num_batches_tracked,
            groups=self.groups,
            views=self.views,
            relu=self.relu,
            momentum=self.momentum,
            eps=self.eps,
        )


class FusedBatchNorm1d(_Fused, SplitBatchNorm1d):
    pass


class FusedBatchNorm2d(_Fused, SplitBatchNorm2d):
    pass


class FusedStem(nn.Conv2d):
    """7 × 7 over images, stride 2. What torch takes otherwise, or refuses, is left to torch."""

    def forward(self, x: Tensor) -> Tensor:
        fast = torch.is_autocast_enabled("cuda")
        dtype = torch.get_autocast_dtype("cuda") if fast else x.dtype
        if not self._takes(x) or not (fast or x.dtype == self.weight.dtype):
            return super().forward(x)
        from xmoco.nn.fused_stem import stem_convolution

        return stem_convolution(x, self.weight, dtype)

    @staticmethod
    def _takes(x: Tensor) -> bool:
        return (
            fusible(x)
            and x.dim() == 4
            and x.shape[1] == 3
            and not (x.shape[2] % 2 or x.shape[3] % 2)
            and not x.requires_grad
        )


class FusedMaxPool(nn.MaxPool2d):
    """3 × 3, stride 2."""

    def forward(self, x: Tensor) -> Tensor:
        if not fusible(x) or x.dim() != 4:
            pooled: Tensor = super().forward(x)
            return pooled
        from xmoco.nn.fused_stem import max_pool

        return max_pool(x)


class FusedBasicBlock(BasicBlock):
    def forward(self, x: Tensor) -> Tensor:
        identity = x if self.downsample is None else self.downsample(x)
        out = self.bn1(self.conv1(x))
        result: Tensor = self.bn2(self.conv2(out), identity)
        return result


class FusedBottleneck(Bottleneck):
    def forward(self, x: Tensor) -> Tensor:
        identity = x if self.downsample is None else self.downsample(x)
        out = self.bn1(self.conv1(x))
        out = self.bn2(self.conv2(out))
        result: Tensor = self.bn3(self.conv3(out), identity)
        return result


def fuse_layers(network: nn.Module) -> None:
    """Give torchvision's ResNets, whole or as part of a detector, and MLP heads the layers of this
    file, in place.

    Only norms in split form take part (``split_statistics``; one group is ordinary batch norm).
    Modules are changed, not replaced: parameters, buffers and their names stay.
    """
    for module in network.modules():
        if type(module) is SplitBatchNorm1d:
            module.__class__ = FusedBatchNorm1d
        elif type(module) is SplitBatchNorm2d:
            module.__class__ = FusedBatchNorm2d
        elif _is_stem(module):
            module.__class__ = FusedStem
        elif _is_stems_pool(module):
            module.__class__ = FusedMaxPool
    for module in network.modules():
        if isinstance(module, nn.Sequential):
            for norm, place in zip(module, range(1, len(module)), strict=False):
                if isinstance(norm, _Fused) and isinstance(module[place], nn.ReLU):
                    norm.relu = True
                    module[place] = nn.Identity()  # keeps the others' names
        elif isinstance(module, ResNet) and _end_in_relu(module.bn1):
            module.add_module("relu", nn.Identity())
        elif type(module) is BasicBlock and _end_in_relu(module.bn1, module.bn2):
            module.__class__ = FusedBasicBlock
        elif type(module) is Bottleneck and _end_in_relu(module.bn1, module.bn2, module.bn3):
            module.__class__ = FusedBottleneck


def _is_stem(module: nn.Module) -> bool:
    if type(module) is not nn.Conv2d:
        return False
    like = nn.Conv2d(3, module.out_channels, 7, stride=2, padding=3, bias=False, device="meta")
    return bool(module.extra_repr() == like.extra_repr())


def _is_stems_pool(module: nn.Module) -> bool:
    if type(module) is not nn.MaxPool2d or module.return_indices:
        return False
    like = nn.MaxPool2d(3, stride=2, padding=1)
    return bool(module.extra_repr() == like.extra_repr())


def _end_in_relu(*norms: object) -> bool:
    """Give the norms their ReLU, if they can take it."""
    fused = [norm for norm in norms if isinstance(norm, _Fused)]
    if len(fused) < len(norms):
        return False
    for norm in fused:
        norm.relu = True
    return True
