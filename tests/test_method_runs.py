"""benchmarks/methods.py: every method trains beside its untrained backbone, once."""

import importlib
import json
import sys
from pathlib import Path

import pytest

from helpers import no_pictures, two_splits, write_recipe


@pytest.mark.usefixtures("benchmarks")
def test_methods_are_trained_one_by_one_and_only_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program = importlib.import_module("methods")
    monkeypatch.chdir(tmp_path)
    write_recipe(tmp_path / "fast.yaml", two_splits(tmp_path / "gratings"), train={"epochs": 1})
    small = {"byol": "predictor_hidden=16", "swav": "prototypes=8 queue_length=16"}
    monkeypatch.setattr(program, "SETTINGS", program.SETTINGS | small)

    def train(*methods: str) -> list[str]:
        arguments = ["--recipe", "fast.yaml", "--results", ".", "--only", *methods]
        monkeypatch.setattr(sys, "argv", ["methods.py", *arguments])
        with no_pictures():
            program.main()
        lines = map(json.loads, Path("methods.jsonl").read_text().splitlines())
        return [line["subject"] for line in lines]

    assert train("byol") == ["untrained", "byol"]
    assert train("byol", "swav") == ["untrained", "byol", "untrained", "swav"]
    table = capsys.readouterr().out.rpartition("kNN top-1")[2]
    assert "byol" in table
    assert "swav" in table
    # What was recorded before a setting came is known still.
    file = Path("methods.jsonl")
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    del lines[3]["protocol"]["method"]["local_size"]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert len(train("swav")) == 4
    # With other settings it is another run.
    program.SETTINGS["byol"] = "predictor_hidden=24"
    assert train("byol")[4:] == ["untrained", "byol"]
