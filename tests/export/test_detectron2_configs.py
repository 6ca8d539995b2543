"""Configuration files for Detectron2 have its keys, and the paper's settings."""

import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from helpers import assert_done, assert_refused, run_cli
from xmoco.detect.courses import COURSES
from xmoco.detect.models import DESIGNS
from xmoco.export.detectron2_configs import write_configs
from xmoco.nn.backbone_files import BackboneCard, save_backbone
from xmoco.nn.backbones import build_backbone

KEYS = yaml.safe_load(Path(__file__).with_name("detectron2_keys.yaml").read_text())
KINDS: Mapping[str, type] = {"int": int, "str": str, "bool": bool, "float": float, "list": list}
CARD = BackboneCard("resnet50", "imagenet", 224, (0.5, 0.4, 0.3), (0.2, 0.25, 0.3), "xmoco", 1, 0)


def assert_known(content: Mapping[str, Any], known: Mapping[str, Any], where: str) -> None:
    for key, value in content.items():
        assert key in known, f"{where}{key}"
        if isinstance(value, dict):
            assert_known(value, known[key], f"{where}{key}.")
        else:
            assert type(value) is KINDS[known[key]], f"{where}{key} = {value!r}"


@pytest.fixture
def configs(tmp_path: Path) -> dict[str, dict[str, Any]]:
    (tmp_path / "configs").mkdir()
    write_configs(CARD, Path("photos.pkl"), tmp_path / "configs")
    files = (tmp_path / "configs").glob("*.yaml")
    return {path.stem: yaml.safe_load(path.read_text()) for path in files}


def test_a_file_for_every_detector_and_schedule(configs: Mapping[str, Any]) -> None:
    wanted = {
        f"{model}-{course}"
        for model, design in DESIGNS.items()
        for course in COURSES
        if not (design.masks and course.startswith("voc"))
    }
    assert configs.keys() == wanted


def test_all_keys_and_kinds_are_detectron2s(configs: Mapping[str, Any]) -> None:
    for name, content in configs.items():
        assert_known(content, KEYS, f"{name}: ")


def test_keys_that_are_none_are_found() -> None:
    for wrong in ({"MODEL": {"MASKS_ON": True}}, {"SOLVER": {"BASE_LR": 1}}):
        with pytest.raises(AssertionError):
            assert_known(wrong, KEYS, "")


def test_settings_are_the_papers(configs: Mapping[str, Any]) -> None:
    for name, content in configs.items():
        model = content["MODEL"]
        assert model["WEIGHTS"] == "photos.pkl"
        assert content["INPUT"]["FORMAT"] == "RGB"
        assert model["PIXEL_MEAN"] == [127.5, 102.0, 76.5]
        assert model["PIXEL_STD"] == [51.0, 63.75, 76.5]
        assert model["RESNETS"]["STRIDE_IN_1X1"] is False
        assert model["RESNETS"]["NORM"] == "SyncBN"
        assert model["BACKBONE"]["FREEZE_AT"] == 0
        assert content["TEST"]["PRECISE_BN"]["ENABLED"]
        assert content["SOLVER"]["WARMUP_ITERS"] == 100
        assert content["SOLVER"]["IMS_PER_BATCH"] == 16
        assert content["SOLVER"]["BASE_LR"] == (0.01 if "retinanet" in name else 0.02)
        assert model["MASK_ON"] == ("mask" in name)
        assert content["SOLVER"]["WEIGHT_DECAY"] == 1e-4
        assert content["SOLVER"]["WEIGHT_DECAY_NORM"] == 0.0
        if "fpn" in name:
            assert model["FPN"]["NORM"] == "SyncBN"
        if "rcnn-fpn" in name:  # those of Detectron2's Base-RCNN-FPN
            assert model["RPN"]["PRE_NMS_TOPK_TRAIN"] == 2000
            assert model["RPN"]["POST_NMS_TOPK_TRAIN"] == 1000
    c4 = configs["faster-rcnn-c4-voc-24k"]
    assert c4["SOLVER"]["STEPS"] == [18_000, 22_000]
    assert c4["SOLVER"]["MAX_ITER"] == 24_000
    assert c4["INPUT"]["MIN_SIZE_TRAIN"] == list(range(480, 801, 32))
    assert c4["MODEL"]["ROI_HEADS"] == {"NAME": "Res5ROIHeadsExtraNorm", "NUM_CLASSES": 20}
    assert c4["DATASETS"]["TEST"] == ["voc_2007_test"]
    assert configs["mask-rcnn-fpn-2x"]["SOLVER"]["MAX_ITER"] == 180_000
    assert configs["mask-rcnn-fpn-2x"]["MODEL"]["ROI_HEADS"]["NUM_CLASSES"] == 80
    assert configs["retinanet-fpn-1x"]["MODEL"]["META_ARCHITECTURE"] == "RetinaNet"


def test_the_extra_norm_registers_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a stand-in for Detectron2, which is on no index: the head is that of Res5 and a norm."""

    class Last:
        out_channels = 2048

    class Res5(list[Any]):
        def add_module(self, name: str, module: object) -> None:
            self.added = (name, module)

    class Res5ROIHeads:
        def __init__(self, *_: Any) -> None:
            self.res5 = Res5([Last()])

    registered: dict[str, Any] = {}

    class Registry:
        @staticmethod
        def register() -> Any:
            return lambda kind: registered.setdefault(kind.__name__, kind)

    parts = {
        "detectron2": {},
        "detectron2.layers": {"get_norm": lambda norm, channels: (norm, channels)},
        "detectron2.modeling": {"ROI_HEADS_REGISTRY": Registry},
        "detectron2.modeling.roi_heads": {"Res5ROIHeads": Res5ROIHeads},
    }
    for name, content in parts.items():
        module = ModuleType(name)
        module.__dict__.update(content)
        monkeypatch.setitem(sys.modules, name, module)
    write_configs(CARD, Path("photos.pkl"), tmp_path)
    exec((tmp_path / "extra_norm.py").read_text(), {})
    names = ModuleType("cfg")
    names.MODEL = ModuleType("model")
    names.MODEL.RESNETS = ModuleType("resnets")
    names.MODEL.RESNETS.NORM = "SyncBN"
    heads = registered["Res5ROIHeadsExtraNorm"](names, None)
    assert heads.res5.added == ("norm", ("SyncBN", 2048))


def test_the_command(tmp_path: Path) -> None:
    file = tmp_path / "backbone.safetensors"
    card = BackboneCard("resnet18", "imagenet", 64, (0.5,) * 3, (0.2,) * 3, "xmoco", 1, 0)
    save_backbone(build_backbone("resnet18"), card, file)
    folder = tmp_path / "configs"
    outcome = run_cli("export", file, "--to", "detectron2", "--configs", folder)
    assert_done(outcome)
    assert f"configs  {folder}" in outcome.stdout
    names = {path.name for path in folder.iterdir()}
    assert "faster-rcnn-fpn-1x.yaml" in names
    assert not any("c4" in name or name.endswith(".py") for name in names), "needs bottlenecks"
    weights = tmp_path / "backbone.detectron2.pkl"
    content = yaml.safe_load((folder / "retinanet-fpn-voc-12k.yaml").read_text())
    assert content["MODEL"]["WEIGHTS"] == str(weights)
    assert content["MODEL"]["RESNETS"]["RES2_OUT_CHANNELS"] == 64
    assert "&" not in (folder / "faster-rcnn-fpn-1x.yaml").read_text(), "a list points at another"
    weights.unlink()
    again = run_cli("export", file, "--to", "detectron2", "--configs", folder)
    assert_refused(again, "already exists: choose another folder with --configs")
    assert not weights.exists()
    inside = run_cli("export", file, "--to", "detectron2", "--configs", file / "configs")
    assert_refused(inside, f"cannot create {file / 'configs'}: Not a directory")
    assert not weights.exists()
    more = ("--configs", tmp_path / "more")
    lost = run_cli("export", file, "--to", "detectron2", "--out", tmp_path / "no" / "x.pkl", *more)
    assert_refused(lost, "could not write")
    assert not (tmp_path / "more").exists()
    other = run_cli("export", file, "--to", "torchvision", *more)
    assert_refused(other, "--configs is for detectron2 only")
