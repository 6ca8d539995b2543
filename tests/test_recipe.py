"""benchmarks/recipe.py: a run of a recipe is recorded as the recipe's only if it is."""

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from helpers import no_pictures, two_splits, write_recipe


@pytest.mark.usefixtures("benchmarks")
def test_changed_settings_are_named_and_kept_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = importlib.import_module("recipe")
    monkeypatch.chdir(tmp_path)
    write_recipe(tmp_path / "fast.yaml", two_splits(tmp_path / "gratings"))

    def train(*settings: str) -> None:
        monkeypatch.setattr(sys, "argv", ["recipe.py", "fast.yaml", "--results", ".", *settings])
        with no_pictures():
            program.main()

    def records(pattern: str) -> list[dict[str, Any]]:
        (file,) = tmp_path.glob(pattern)
        return [json.loads(line) for line in file.read_text().splitlines()]

    train("epochs=1", "monitor.knn_every=1", "seed=3")
    plain = records("recipe-*.jsonl")
    assert {record["protocol"].get("changes") for record in plain} == {None}
    assert {record["seed"] for record in plain} == {3}
    assert not (tmp_path / "changed-recipes.jsonl").exists()

    train("epochs=1", "knn_every=1", "method.temperature=0.3", "sharpness=3")
    changed = records("changed-*.jsonl")
    told = {record["protocol"]["changes"] for record in changed}
    assert told == {"method.temperature=0.3 sharpness=3"}
    assert [r["measure"] for r in changed] == [r["measure"] for r in plain] != []
    assert records("recipe-*.jsonl") == plain
