"""Fabric, imported without a package that it imports only to learn its version.

Where torchmetrics is installed, lightning_fabric imports all of it for that, with much of SciPy: as
much again as torch itself. Nothing of Fabric that is used here asks for the answer.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast


@contextmanager
def _without(package: str) -> Iterator[None]:
    """As if a package were not installed, unless it has been imported already."""
    modules = cast(dict[str, Any], sys.modules)
    hidden = modules.setdefault(package, None) is None
    try:
        yield
    finally:
        if hidden:
            del modules[package]


with _without("torchmetrics"):
    from lightning_fabric import Fabric
    from lightning_fabric.plugins.environments.lightning import LightningEnvironment
    from lightning_fabric.strategies.ddp import DDPStrategy
    from lightning_fabric.wrappers import _FabricModule as FabricModule

__all__ = ["DDPStrategy", "Fabric", "FabricModule", "LightningEnvironment"]
