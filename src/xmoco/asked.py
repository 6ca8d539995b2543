"""What a user asks of a run. Nothing here needs torch, so mistakes are told at once."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from xmoco.config import Config, RunConfig
from xmoco.settings import load_config

AUTO = "auto"
AUTO_BASE = "imagenette"
"""Whose settings hold until the images are known; ``auto`` may begin with another recipe."""


@dataclass(frozen=True)
class Asked:
    """What a user asks for: a recipe, or none for ``auto``, and changes to it."""

    recipe: str | Path | None
    overrides: tuple[str, ...]
    settings: Mapping[str, Any]

    @classmethod
    def of(
        cls,
        recipe: str | Path | None,
        overrides: Iterable[str],
        settings: Mapping[str, Any],
        *,
        data: str | Path | None,
        weights: str | Path | None,
    ) -> Self:
        """With images and weights, which have arguments of their own, among the settings."""
        given = {"source": data, "weights": weights}
        named = {key: str(value) for key, value in given.items() if value is not None}
        return cls(recipe, tuple(overrides), {**settings, **named})

    @property
    def automatic(self) -> bool:
        return self.recipe is None or str(self.recipe) == AUTO

    def config(self, base: str | Path | None, below: Mapping[str, Any] | None = None) -> Config:
        """By a recipe, with settings that give way to those asked for."""
        return load_config(base, self.overrides, self.settings, below)

    def run_config(self) -> RunConfig:
        """Where it is to run, which no recipe says by itself. Mistakes are found here already."""
        return self.config(AUTO_BASE if self.automatic else self.recipe).run
