"""Projection heads: what stands on the backbone while it learns, and is thrown away afterwards."""

from torch import nn


def mlp_head(inputs: int, hidden: int, outputs: int, layers: int) -> nn.Sequential:
    """``layers`` linear layers, each but the last followed by batch norm and ReLU.

    The paper gives every layer batch norm and ReLU; on the last they would confine features to the
    positive corner of the sphere, so the last is linear only.
    """
    modules: list[nn.Module] = []
    for _ in range(layers - 1):
        modules += [nn.Linear(inputs, hidden, bias=False), nn.BatchNorm1d(hidden), nn.ReLU(True)]
        inputs = hidden
    return nn.Sequential(*modules, nn.Linear(inputs, outputs))
