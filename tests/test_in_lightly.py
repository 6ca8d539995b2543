"""benchmarks/in_lightly.py: lightly's MoCo by the loop and the measures of all other methods."""

import copy
import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

from helpers import make_images, write_recipe
from xmoco.settings import load_config

pytest.importorskip("lightly", reason="lightly is an extra: pip install '.[examples]'")


@pytest.fixture(scope="module")
def program(benchmarks: None) -> ModuleType:
    return importlib.import_module("in_lightly")


@pytest.fixture
def measure(
    program: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., list[dict[str, Any]]]:
    """Calls the program with a quick recipe; gives all records there are then."""
    monkeypatch.chdir(tmp_path)
    write_recipe(tmp_path / "fast.yaml", "patterns")
    images = make_images(tmp_path / "made", each=6)
    (tmp_path / "set").mkdir()
    for split in ("train", "val"):
        (tmp_path / "set" / split).symlink_to(images)

    def call(*arguments: str) -> list[dict[str, Any]]:
        quick = ["backbone=resnet18", "batch=4", "bank_length=8", "--epochs", "1"]
        fixed = ["fast.yaml", *quick, "--data", "set", "--results", "."]
        monkeypatch.setattr(sys, "argv", ["in_lightly.py", *fixed, *arguments])
        program.main()
        lines = (tmp_path / "compare-lightly.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    return call


def test_each_way_is_trained_once_by_seed(
    measure: Callable[..., list[dict[str, Any]]], capsys: pytest.CaptureFixture[str]
) -> None:
    first = measure("--add", "nothing")
    assert {r["subject"] for r in first} == {"lightly's MoCo"}
    assert {r["measure"] for r in first} >= {"knn_top1", "logistic_top1"}
    records = measure()
    assert records[: len(first)] == first
    ways = ("lightly's MoCo", "lightly's MoCo with consistency", "lightly's MoCo with both ideas")
    assert {r["subject"] for r in records} == set(ways)
    assert len(records) == 3 * len(first)
    told = capsys.readouterr().out
    assert all(way in told for way in ways)
    assert measure() == records


@pytest.mark.parametrize("add", ["nothing", "consistency", "both"])
def test_a_step_is_that_of_lightly(program: ModuleType, add: str) -> None:
    """Loss, and the momentum update after it; in bfloat16, the loss is still in float32."""
    config = load_config("imagenette", program.SETTINGS.split(), {"source": "patterns"})
    torch.manual_seed(0)
    method = program.LightlyMoCo(config, add).eval()
    views = list(torch.randn(2, 4, 3, 32, 32))
    own = copy.deepcopy(method.encoder)
    with torch.autocast("cpu", torch.bfloat16):
        seen = [own.projection_head(own.backbone(x)) for x in views]
        seen += [own.projection_head_momentum(own.backbone_momentum(x)) for x in views]
    assert seen[0].dtype == torch.bfloat16
    q_s, q_t, k_s, k_t = (x.float() for x in seen)
    torch.manual_seed(1)  # lightly's banks begin with random keys
    plain = own.criterion_s(q_s, k_t) + own.criterion_t(q_t, k_s)
    both, terms = own.xmoco(*map(F.normalize, (q_s, q_t, k_s, k_t)))
    consistency = terms["consistency_source"] + terms["consistency_target"]
    whole = {"nothing": plain, "consistency": plain + consistency, "both": both}[add]
    torch.manual_seed(1)
    with torch.autocast("cpu", torch.bfloat16):
        loss = method(views, {}).loss
    assert loss.dtype == torch.float32
    assert {f"encoder.criterion_{side}.memory_bank.bank" for side in "st"} <= {*method.state_dict()}
    assert_close(loss, whole / 2)
    slow = method.encoder.backbone_momentum.conv1.weight
    fast = method.encoder.backbone.conv1.weight
    with torch.no_grad():
        fast += 1
    before = slow.clone()
    method.after_update({})
    assert_close(slow, 0.99 * before + 0.01 * fast)
    assert {p for group in method.param_groups() for p in group.parameters} == {
        *method.encoder.backbone.parameters(),
        *method.encoder.projection_head.parameters(),
    }
