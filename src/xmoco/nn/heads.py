"""Projection heads: what stands on the backbone while it learns, and is thrown away afterwards."""

from typing import Literal

from torch import nn

Ending = Literal["biased", "unbiased", "normalised"]


def mlp_head(
    inputs: int, hidden: int, outputs: int, layers: int, ending: Ending = "biased"
) -> nn.Sequential:
    """``layers`` linear layers, each but the last followed by batch norm and ReLU.

    The paper gives every layer batch norm and ReLU; on the last they would confine features to the
    positive corner of the sphere, so the last is linear only. For methods whose loss subtracts the
    mean, it is ``unbiased``; or it is ``normalised`` by a batch norm that learns nothing.
    """
    modules: list[nn.Module] = []
    for _ in range(layers - 1):
        modules += [nn.Linear(inputs, hidden, bias=False), nn.BatchNorm1d(hidden), nn.ReLU(True)]
        inputs = hidden
    modules.append(nn.Linear(inputs, outputs, bias=ending == "biased"))
    if ending == "normalised":
        # Not affine=False: norms in groups, and fused ones, want weights, be they ever 1 and 0.
        modules.append(nn.BatchNorm1d(outputs).requires_grad_(False))
    return nn.Sequential(*modules)
