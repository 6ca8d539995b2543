"""benchmarks/protocols.py: a backbone judged by the protocols asked for, at the size asked for."""

import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from helpers import make_images
from xmoco.errors import UserError
from xmoco.nn.backbone_files import BackboneCard, save_backbone
from xmoco.nn.backbones import build_backbone

Judge = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def judge(benchmarks: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Judge:
    """Calls the program for a small backbone that is to be judged at 24 px."""
    monkeypatch.chdir(tmp_path)
    half = (0.5, 0.5, 0.5)
    card = BackboneCard("tiny", "cifar", 16, half, half, "xmoco", 1, 0, 24)
    save_backbone(build_backbone("tiny", "cifar"), card, tmp_path / "weights.safetensors")
    images = make_images(tmp_path / "made", each=4)
    for split in ("train", "val"):
        (tmp_path / "set").mkdir(exist_ok=True)
        (tmp_path / "set" / split).symlink_to(images)

    def call(*arguments: str) -> list[dict[str, Any]]:
        fixed = ["weights.safetensors", "--data", "set", "--device", "cpu", "--out", "found.jsonl"]
        monkeypatch.setattr(sys, "argv", ["protocols.py", "judge", *fixed, *arguments])
        importlib.import_module("protocols").main()
        return [json.loads(line) for line in Path("found.jsonl").read_text().splitlines()]

    return call


def test_the_protocols_asked_for_at_the_size_asked_for(judge: Judge) -> None:
    own = judge("--only", "knn", "frozen", "finetune-1", "--transfer", "set")
    kinds = ["knn_top1"] * 4 + ["transfer_frozen", "finetune_top1"]
    beside = ("finetune_top5", "finetune_mean_per_class")
    assert [record["measure"] for record in own if record["measure"] not in beside] == kinds
    assert {record["protocol"]["size"] for record in own} == {24}
    assert [record["protocol"].get("crop_size") for record in own[-2:]] == [16, 16]
    assert own[-1]["protocol"]["label_fraction"] == 0.01
    asked = judge("--only", "knn", "--size", "16")[len(own) :]
    assert {record["protocol"]["size"] for record in asked} == {16}


def test_mistakes_are_told_before_anything_is_judged(
    judge: Judge, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UserError, match="other labelled images by --transfer"):
        judge("--only", "knn", "frozen")
    with pytest.raises(UserError, match="5 px are too small"):
        judge("--size", "5")
    with pytest.raises(SystemExit):
        judge("--only", "neighbours")
    assert "invalid choice: 'neighbours'" in capsys.readouterr().err
    assert not (tmp_path / "found.jsonl").exists()
