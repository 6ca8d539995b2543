"""Exports: what others load gives the backbone's own features, or there is no file at all."""

import pickle
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
import torchvision.models
import yaml
from torch import Tensor, nn
from torch.testing import assert_close
from torchvision.models.resnet import ResNet

from helpers import (
    assert_done,
    assert_refused,
    fingerprint,
    make_images,
    no_pictures,
    run_cli,
)
from xmoco.errors import UserError
from xmoco.export import export_weights, exporting, how_to_load, to_onnx, to_timm
from xmoco.export.contents import Contents
from xmoco.nn import checkpoint_formats
from xmoco.nn.architectures import BACKBONES, TimmModel
from xmoco.nn.backbone_files import BackboneCard, save_backbone
from xmoco.nn.backbones import build_backbone, feature_size
from xmoco.nn.classifier_files import ClassifierCard, load_classifier, save_classifier
from xmoco.nn.weights import load_backbone, read_card

CARD = BackboneCard(
    backbone="resnet18",
    stem="imagenet",
    size=32,
    mean=(0.5, 0.4, 0.3),
    std=(0.2, 0.25, 0.3),
    method="xmoco",
    epochs=2,
    seed=0,
)


def save_lively(folder: Path, name: str, stem: str = "imagenet") -> Path:
    """A run folder's weights, with batch norms whose every number matters."""
    backbone = build_backbone(name, stem, CARD.size)
    for module in backbone.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias, std=0.2)
            nn.init.normal_(module.running_mean, std=0.2)
            nn.init.uniform_(module.running_var, 0.5, 2)
    folder.mkdir(exist_ok=True)
    save_backbone(
        backbone, replace(CARD, backbone=name, stem=stem), folder / "backbone.safetensors"
    )
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("weights")


@pytest.fixture(scope="module")
def resnet18(folder: Path) -> Path:
    return save_lively(folder / "resnet18", "resnet18")


@pytest.fixture(scope="module")
def resnet50(folder: Path) -> Path:
    return save_lively(folder / "resnet50", "resnet50")


@pytest.fixture(scope="module")
def tiny(folder: Path) -> Path:
    return save_lively(folder / "tiny", "tiny", "cifar")


@pytest.fixture
def wide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """resnet50w2, but an eighth of the width, in xmoco and in timm."""
    timm = TimmModel("resnetv2_50", {"preact": False, "width_factor": 0.25})
    narrow = replace(BACKBONES["resnet50w2"], width=16, timm=timm)
    monkeypatch.setitem(BACKBONES, "resnet50w2", narrow)
    kind = (narrow.block, narrow.blocks, narrow.width)
    monkeypatch.setitem(checkpoint_formats.ARCHITECTURES, kind, "resnet50w2")
    return save_lively(tmp_path / "wide", "resnet50w2")


def random_images(count: int = 5, side: int = 32) -> Tensor:
    return torch.randn(count, 3, side, side)


@torch.no_grad()
def assert_same_features(model: Callable[[Tensor], Tensor], weights: Path, side: int = 32) -> None:
    images = random_images(side=side)
    expected = load_backbone(weights)(images)
    assert_close(model(images), expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


def follow(advice: str) -> Any:
    """What ``model`` is after the lines that a user is told to copy."""
    names: dict[str, Any] = {"images": random_images().numpy()}
    exec(advice, names)
    return names["model"]


# torchvision


@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
def test_torchvision(name: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    weights = request.getfixturevalue(name)
    path = export_weights(weights, "torchvision", tmp_path / "model.pth")
    model = torchvision.models.get_model(name)
    report = model.load_state_dict(torch.load(path, weights_only=True), strict=False)
    assert set(report.missing_keys) == {"fc.weight", "fc.bias"}
    assert not report.unexpected_keys
    model.fc = nn.Identity()
    assert_same_features(model.eval(), weights, side=64)

    advised = follow(how_to_load(weights, "torchvision", path))
    assert_same_features(advised.eval(), weights)


@pytest.mark.parametrize("name", ["wide", "tiny"])
def test_torchvision_with_other_widths_and_stems(
    name: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    weights = request.getfixturevalue(name)
    path = export_weights(weights, "torchvision", tmp_path / "model.pth")
    advice = how_to_load(weights, "torchvision", path)
    assert "xmoco." not in advice.replace("xmoco.load_backbone(", ""), "only what is public"
    model = follow(advice)
    assert isinstance(model, ResNet)
    assert_same_features(model.eval(), weights)


# timm


@pytest.mark.parametrize("name", ["resnet18", "resnet50", "wide"])
def test_timm(name: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    weights = request.getfixturevalue(name)
    path = export_weights(weights, "timm", tmp_path / "model.pth")
    model = follow(how_to_load(weights, "timm", path))
    assert type(model).__module__.startswith("timm.")
    assert_same_features(model.eval(), weights, side=64)


@pytest.mark.parametrize("name", ["resnet50w2", "resnet50w4"])
def test_timm_makes_the_wide_resnets_with_the_arguments_named(name: str) -> None:
    """Shapes only: the largest has 1.5 GB of weights."""
    import timm

    with torch.device("meta"):
        ours = build_backbone(name).state_dict()
        theirs = timm.create_model(
            "resnetv2_50", num_classes=0, **BACKBONES[name].timm.arguments
        ).state_dict()
    renamed = to_timm.renamed(ours, to_timm.RESNETV2_NAMES)
    assert {key: value.shape for key, value in renamed.items()} == {
        key: value.shape for key, value in theirs.items()
    }


# Models of timm


TIMM_MODELS = ["test_convnext", "test_vit", "test_efficientnet"]


@pytest.fixture(scope="module", params=TIMM_MODELS)
def timm_weights(request: pytest.FixtureRequest, folder: Path) -> Path:
    return save_lively(folder / request.param, f"timm:{request.param}")


def test_models_of_timm_go_back_to_timm(timm_weights: Path, tmp_path: Path) -> None:
    path = export_weights(timm_weights, "timm", tmp_path / "model.pth")
    advice = how_to_load(timm_weights, "timm", path)
    sized = ", img_size=32, dynamic_img_size=True" if "vit" in timm_weights.name else ""
    assert f"{timm_weights.name!r}, num_classes=0, checkpoint_path={str(path)!r}{sized}\n" in advice
    for side in (32, 64):
        assert_same_features(follow(advice).eval(), timm_weights, side)


def test_models_of_timm_go_to_onnx(timm_weights: Path, tmp_path: Path) -> None:
    path = export_weights(timm_weights, "onnx", tmp_path / "model.onnx")
    session, images = follow(how_to_load(timm_weights, "onnx", path)), random_images(7)
    (found,) = session.run(None, {"images": images.numpy()})
    with torch.no_grad():
        expected = load_backbone(timm_weights)(images)
    assert_close(torch.from_numpy(found), expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(("to", "program"), [("torchvision", "torchvision"), ("detectron2", "Det")])
def test_models_of_timm_go_nowhere_else(timm_weights: Path, to: str, program: str) -> None:
    before = fingerprint(timm_weights)
    outcome = run_cli("export", timm_weights, "--to", to)
    assert_refused(outcome, f"has no timm:{timm_weights.name}: export this one to timm or onnx")
    assert program in outcome.stderr
    assert fingerprint(timm_weights) == before


# From images to a file for timm


@pytest.mark.parametrize(("name", "method"), [("test_convnext", "xmoco"), ("test_vit", "byol")])
def test_a_model_of_timm_from_images_to_timm(name: str, method: str, tmp_path: Path) -> None:
    """Trained, judged while it is trained and after, started from, exported: by commands."""
    images, run = make_images(tmp_path / "images", each=16, side=32), tmp_path / "run"
    changes = [
        *(f"backbone=timm:{name}", f"method={method}", "stem=imagenet", "size=32", "epochs=1"),
        *("batch=16", "head_layers=2", "head_hidden=32", "device=cpu", "readers=1", "knn_k=5"),
        *(["bank_length=64"] if method == "xmoco" else ["predictor_hidden=32"]),
    ]
    command = ["pretrain", "--recipe", "demo", "--data", images, *changes]
    with no_pictures():
        outcome = run_cli(*command, "--out", run)
        assert_done(outcome)
        assert f"timm:{name}" in outcome.stdout
        assert_done(run_cli(*command, "--weights", run, "--out", tmp_path / "again"))
        if name == "test_vit":
            larger = run_cli(*command, "--weights", run, "--out", tmp_path / "larger", "size=48")
            assert_refused(larger, "for images of 32 px, which cannot", "on 48 px: set size=32")
    assert read_card(run)[0].backbone == f"timm:{name}"
    for size in ("32", "64"):
        knn = ("evaluate", "knn", run, images, "--k", "5", "--device", "cpu", "--size", size)
        assert_done(run_cli(*knn))
    path = tmp_path / "model.pth"
    assert_done(run_cli("export", run, "--to", "timm", "--out", path))
    assert_same_features(follow(how_to_load(run, "timm", path)).eval(), run)

    (run / "backbone.safetensors").unlink()  # as if it were not finished
    assert_done(run_cli(*knn))
    beside = run / "checkpoints" / "step-000000004.timm.pth"
    assert_done(run_cli("export", run, "--to", "timm"))
    assert_same_features(follow(how_to_load(run, "timm", beside)).eval(), run)


# Detectron2


def detectron2_shapes(
    blocks: list[int], width: int, bottleneck: bool
) -> dict[str, tuple[int, ...]]:
    """Names and shapes of Detectron2's ResNet, counted from its documented configuration:
    STEM_OUT_CHANNELS = WIDTH_PER_GROUP = ``width``, RES2_OUT_CHANNELS = ``width`` × 1 or 4."""
    shapes: dict[str, tuple[int, ...]] = {}

    def conv(name: str, source: int, out: int, kernel: int) -> None:
        shapes[f"{name}.weight"] = (out, source, kernel, kernel)
        for part in ("weight", "bias", "running_mean", "running_var"):
            shapes[f"{name}.norm.{part}"] = (out,)
        shapes[f"{name}.norm.num_batches_tracked"] = ()

    conv("stem.conv1", 3, width, 7)
    source = width
    for stage, count in enumerate(blocks):
        inner = width * 2**stage
        out = inner * 4 if bottleneck else inner
        for block in range(count):
            name = f"res{stage + 2}.{block}"
            if source != out:
                conv(f"{name}.shortcut", source, out, 1)
            if bottleneck:
                conv(f"{name}.conv1", source, inner, 1)
                conv(f"{name}.conv2", inner, inner, 3)
                conv(f"{name}.conv3", inner, out, 1)
            else:
                conv(f"{name}.conv1", source, inner, 3)
                conv(f"{name}.conv2", inner, out, 3)
            source = out
    return shapes


@pytest.mark.parametrize(
    ("name", "blocks", "width"),
    [
        ("resnet18", [2, 2, 2, 2], 64),
        ("resnet50", [3, 4, 6, 3], 64),
        ("wide", [3, 4, 6, 3], 16),
    ],
)
def test_detectron2(
    name: str, blocks: list[int], width: int, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    weights = request.getfixturevalue(name)
    path = export_weights(weights, "detectron2", tmp_path / "model.pkl")
    product = pickle.loads(path.read_bytes())
    assert product.keys() == {"model", "__author__", "matching_heuristics"}
    assert product["__author__"] == "xmoco"
    assert product["matching_heuristics"] is True
    arrays = product["model"]
    assert all(type(value) is np.ndarray for value in arrays.values())
    assert {key: value.shape for key, value in arrays.items()} == detectron2_shapes(
        blocks, width, bottleneck=name != "resnet18"
    )

    state = load_backbone(weights).state_dict()
    for ours, theirs in {
        "conv1.weight": "stem.conv1.weight",
        "bn1.running_var": "stem.conv1.norm.running_var",
        "layer1.0.conv2.weight": "res2.0.conv2.weight",
        "layer2.1.bn1.bias": "res3.1.conv1.norm.bias",
        "layer3.0.downsample.0.weight": "res4.0.shortcut.weight",
        "layer4.0.downsample.1.running_mean": "res5.0.shortcut.norm.running_mean",
        "layer4.1.bn2.weight": "res5.1.conv2.norm.weight",
    }.items():
        assert_close(torch.from_numpy(arrays[theirs]), state[ours])


@pytest.mark.parametrize(
    ("backbone", "resnets"),
    [
        ("resnet34", (34, 64, 64, 64)),
        ("resnet152", (152, 64, 256, 64)),
        ("resnet50w4", (50, 256, 1024, 256)),
    ],
)
def test_detectron2_configuration(backbone: str, resnets: tuple[int, ...], tmp_path: Path) -> None:
    path = tmp_path / "backbone.safetensors"
    save_backbone(build_backbone("tiny"), replace(CARD, backbone=backbone), path)
    text = how_to_load(path, "detectron2", "model.pkl")
    assert text.startswith("# for RGB images with values from 0 to 255; ")
    advice = yaml.safe_load(text)
    depth, stem, res2, group = resnets
    assert advice == {
        "INPUT": {"FORMAT": "RGB"},
        "MODEL": {
            "WEIGHTS": "model.pkl",
            "PIXEL_MEAN": [127.5, 102, 76.5],
            "PIXEL_STD": [51, 63.75, 76.5],
            "RESNETS": {
                "DEPTH": depth,
                "STRIDE_IN_1X1": False,
                "STEM_OUT_CHANNELS": stem,
                "RES2_OUT_CHANNELS": res2,
                "WIDTH_PER_GROUP": group,
            },
        },
    }


# ONNX


@pytest.mark.parametrize(
    ("name", "sides"),
    [
        ("resnet18", ["height", "width"]),
        ("tiny", ["height", "width"]),
        ("timm:test_convnext", ["height", "width"]),
        ("timm:test_efficientnet", ["height", "width"]),
        ("timm:test_vit", [48, 48]),
    ],
)
def test_convolutional_networks_take_images_of_any_size_in_onnx(
    name: str, sides: list[object], tmp_path: Path
) -> None:
    card = replace(CARD, backbone=name, size=48)
    weights = tmp_path / "backbone.safetensors"
    save_backbone(build_backbone(name, size=48), card, weights)
    path = export_weights(weights, "onnx", tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    assert session.get_inputs()[0].shape == ["batch", 3, *sides]
    if sides == ["height", "width"]:
        images = torch.randn(1, 3, 32, 57)
        (found,) = session.run(None, {"images": images.numpy()})
        with torch.no_grad():
            expected = load_backbone(weights)(images)
        assert_close(torch.from_numpy(found), expected, rtol=1e-3, atol=1e-4)


def test_padding_as_tensorflows_keeps_the_size_fixed() -> None:
    """As torch's exporter takes minutes for it."""
    card = replace(CARD, backbone="timm:tf_efficientnet_b0")
    assert not to_onnx.takes_any_size(build_backbone(card.backbone), card)


@pytest.mark.parametrize("eval_size", [24, 40])
def test_onnx_is_for_the_size_that_evaluations_show(eval_size: int, tmp_path: Path) -> None:
    card = replace(CARD, backbone="tiny", stem="cifar", eval_size=eval_size)
    weights = tmp_path / "backbone.safetensors"
    save_backbone(build_backbone("tiny", "cifar"), card, weights)
    path = export_weights(weights, "onnx", tmp_path / "model.onnx")
    assert f"images of {eval_size} × {eval_size}" in how_to_load(weights, "onnx", path)


def test_a_product_that_differs_at_a_second_size_is_not_kept(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = exporting.TARGETS["torchvision"]

    def outputs(path: Path, contents: Contents, images: Tensor) -> Tensor:
        return target.outputs(path, contents, images[..., :32, :32])

    monkeypatch.setitem(exporting.TARGETS, "torchvision", replace(target, outputs=outputs))
    with pytest.raises(UserError, match="not kept: read back by torchvision, it gives features"):
        export_weights(tiny, "torchvision")
    assert [path.name for path in tiny.iterdir()] == ["backbone.safetensors"]


def test_onnx(tiny: Path, tmp_path: Path) -> None:
    path = export_weights(tiny, "onnx", tmp_path / "model.onnx")
    model = onnx.load(path)
    onnx.checker.check_model(model, full_check=True)
    assert [entry.version for entry in model.opset_import if not entry.domain] == [20]
    metadata = {entry.key: entry.value for entry in model.metadata_props}
    card = replace(CARD, backbone="tiny", stem="cifar")
    assert metadata["xmoco"] == card.as_json()
    here = str(Path(exporting.__file__).parents[2])
    assert here.encode() not in path.read_bytes()

    session = follow(how_to_load(tiny, "onnx", path))
    assert isinstance(session, onnxruntime.InferenceSession)
    for count in (1, 7):
        images = random_images(count)
        (found,) = session.run(None, {"images": images.numpy()})
        with torch.no_grad():
            assert_close(torch.from_numpy(found), load_backbone(tiny)(images), rtol=1e-4, atol=1e-4)


# Classifiers


CLASSES = ("cat's", "dog", "Kuh")


def save_classes(run: Path) -> Path:
    """A classifier on the backbone in ``run``, in a folder as of ``evaluate finetune``."""
    backbone, folder = load_backbone(run), run.with_name(f"{run.name}-classes")
    folder.mkdir(exist_ok=True)
    save_classifier(
        backbone,
        nn.Linear(feature_size(backbone), len(CLASSES)),
        ClassifierCard(classes=CLASSES, protocol="fine-tuned", data="pets", seed=0),
        read_card(run)[0],
        folder / "classifier.safetensors",
    )
    return folder


@torch.no_grad()
def assert_same_scores(found: Tensor, images: Tensor, weights: Path) -> None:
    assert_close(found, load_classifier(weights)(images), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("to", "name"),
    [
        ("torchvision", "resnet18"),
        ("torchvision", "tiny"),
        ("timm", "resnet18"),
        ("timm", "wide"),
        *(("timm", name) for name in TIMM_MODELS),
    ],
)
def test_classifiers(to: str, name: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    if name in TIMM_MODELS:
        weights = save_classes(save_lively(tmp_path / name, f"timm:{name}"))
    else:
        weights = save_classes(request.getfixturevalue(name))
    path, images = export_weights(weights, to, tmp_path / "model.pth"), random_images()
    advice = how_to_load(weights, to, path)
    names: dict[str, Any] = {}
    exec(advice, names)
    assert tuple(names["classes"]) == CLASSES
    assert "strict" not in advice
    assert any(kind.__module__.startswith(f"{to}.") for kind in type(names["model"]).__mro__)
    with torch.no_grad():
        assert_same_scores(names["model"](images), images, weights)


def test_classifiers_to_onnx(tiny: Path, tmp_path: Path) -> None:
    weights = save_classes(tiny)
    path, images = export_weights(weights, "onnx", tmp_path / "model.onnx"), random_images()
    names: dict[str, Any] = {"images": images.numpy()}
    exec(how_to_load(weights, "onnx", path), names)
    assert tuple(names["classes"]) == CLASSES
    assert_same_scores(torch.from_numpy(names["scores"]), images, weights)


@pytest.mark.parametrize("to", ["torchvision", "timm", "onnx"])
def test_the_backbone_of_a_classifier_alone(to: str, resnet18: Path) -> None:
    run = save_classes(resnet18)
    outcome = run_cli("export", run, "--to", to, "--backbone")
    assert_done(outcome)
    path = run / f"classifier{exporting.TARGETS[to].ending}"
    advice = how_to_load(run, to, path, backbone_only=True)
    assert advice in outcome.stdout
    assert "classes = " not in advice
    model = follow(advice)
    if to == "onnx":
        assert [output.name for output in model.get_outputs()] == ["features"]
    else:
        assert_same_features(model.eval(), resnet18)
    path.unlink()


def test_detectron2_gets_the_backbone_of_a_classifier_and_says_so(
    resnet18: Path, tmp_path: Path
) -> None:
    run = save_classes(resnet18)
    outcome = run_cli("export", run, "--to", "detectron2", "--out", tmp_path / "model.pkl")
    assert_done(outcome)
    said = "# the backbone without its classifier: detectron2 puts heads of its own on it\n"
    assert said in outcome.stdout
    content = pickle.loads((tmp_path / "model.pkl").read_bytes())["model"]
    assert not any("fc" in name for name in content)
    for weights, alone in ((run, True), (resnet18, False)):
        assert said not in how_to_load(weights, "detectron2", "a.pkl", backbone_only=alone)


def test_a_classifier_with_other_scores_is_not_kept(
    resnet18: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, target = save_classes(resnet18), exporting.TARGETS["timm"]

    def write(model: Any, contents: Contents, file: BinaryIO) -> None:
        model.fc.bias.data += 0.1
        target.write(model, contents, file)

    monkeypatch.setitem(exporting.TARGETS, "timm", replace(target, write=write))
    with pytest.raises(UserError, match="not kept: read back by timm, it gives scores that differ"):
        export_weights(run, "timm")
    assert [path.name for path in run.iterdir()] == ["classifier.safetensors"]


# Where files go, and that nothing but a checked file is left


def test_default_files_lie_beside_the_weights(tmp_path: Path) -> None:
    run = save_lively(tmp_path / "run", "resnet18")
    assert export_weights(run, "torchvision") == run / "backbone.torchvision.pth"
    assert (
        export_weights(str(run / "backbone.safetensors"), "detectron2")
        == run / "backbone.detectron2.pkl"
    )
    assert {path.name for path in run.iterdir()} == {
        "backbone.safetensors",
        "backbone.torchvision.pth",
        "backbone.detectron2.pkl",
    }


def test_the_command_says_where_and_how(tiny: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.pth"
    outcome = run_cli("export", tiny, "--to", "torchvision", "--out", path)
    assert_done(outcome)
    assert str(path) in outcome.stdout
    assert "32 × 32" in outcome.stdout
    assert how_to_load(tiny, "torchvision", path) in outcome.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["RESNET18", "--to", "tim"], ["unknown target 'tim' (did you mean timm?)", "detectron2"]),
        (["RESNET18", "--to", "keras"], ["unknown target 'keras':", "torchvision, timm"]),
        (["nowhere", "--to", "timm"], ["no weights at nowhere"]),
        (["cut.safetensors", "--to", "timm"], ["cut.safetensors is damaged"]),
        (["RESNET18", "--to", "timm", "--out", "old.pth"], ["old.pth already exists", "--out"]),
        (["RESNET18", "--to", "onnx", "--out", "a.pth"], ["onnx must end in .onnx", "a.pth"]),
        (["RESNET18", "--to", "timm", "--out", "no/a.pth"], ["no/a.pth", "No such file"]),
        (["TINY", "--to", "timm"], ["timm has no tiny ResNet", "torchvision or onnx"]),
        (["TINY", "--to", "detectron2"], ["Detectron2 has no tiny ResNet", "torchvision or onnx"]),
        (["cifar", "--to", "timm"], ["timm has no cifar stem", "torchvision or onnx"]),
        (["cifar", "--to", "detectron2"], ["Detectron2 has no cifar stem", "torchvision or onnx"]),
        (["misfit", "--to", "timm"], ["does not fit the resnet18"]),
        (["nan", "--to", "torchvision"], ["features that are NaN or infinite"]),
    ],
    ids=lambda value: " ".join(value) if "--to" in value else "",
)
def test_refusals(
    arguments: list[str],
    words: list[str],
    resnet18: Path,
    tiny: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    whole = (tiny / "backbone.safetensors").read_bytes()
    Path("cut.safetensors").write_bytes(whole[:-100])
    Path("old.pth").write_text("precious")
    if arguments[0] == "cifar":
        save_lively(Path("cifar"), "resnet18", "cifar")
    for name in ("misfit", "nan"):
        Path(name).mkdir()
    save_backbone(build_backbone("tiny"), CARD, Path("misfit/backbone.safetensors"))
    broken = build_backbone("tiny")
    nn.init.constant_(broken.bn1.running_mean, torch.nan)
    save_backbone(broken, replace(CARD, backbone="tiny"), Path("nan/backbone.safetensors"))
    before = fingerprint(tmp_path), fingerprint(resnet18), fingerprint(tiny)

    real = {"RESNET18": str(resnet18), "TINY": str(tiny)}
    outcome = run_cli("export", *[real.get(argument, argument) for argument in arguments])
    assert_refused(outcome, *words)
    assert (fingerprint(tmp_path), fingerprint(resnet18), fingerprint(tiny)) == before


@pytest.mark.parametrize(
    ("to", "library"),
    [("timm", "timm"), ("onnx", "onnx"), ("onnx", "onnxruntime"), ("onnx", "onnxscript")],
)
def test_a_library_that_is_missing(
    to: str, library: str, resnet18: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    before = fingerprint(resnet18)
    outcome = run_cli("export", resnet18, "--to", to)
    assert_refused(outcome, f"exporting to {to} needs {library}", f"pip install 'xmoco[{to}]'")
    assert fingerprint(resnet18) == before


# A product that is wrong


Write = Callable[[ResNet, Contents, BinaryIO], None]


def spoiled(name: str, change: Callable[[Tensor], Tensor], write: Write) -> Write:
    """``write``, with one parameter changed on the way."""

    def write_spoiled(backbone: ResNet, contents: Contents, file: BinaryIO) -> None:
        other = build_backbone(contents.card.backbone, contents.card.stem)
        state = backbone.state_dict()
        other.load_state_dict(state | {name: change(state[name])})
        write(other.eval(), contents, file)

    return write_spoiled


@pytest.mark.parametrize(
    ("to", "weights"),
    [("torchvision", "tiny"), ("timm", "resnet18"), ("detectron2", "resnet18")],
)
def test_a_product_with_other_features_is_not_kept(
    to: str, weights: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = request.getfixturevalue(weights)
    target = exporting.TARGETS[to]
    write = spoiled("layer4.0.bn2.bias", lambda bias: bias + 1e-2, target.write)
    monkeypatch.setitem(exporting.TARGETS, to, replace(target, write=write))
    before = fingerprint(run)
    with pytest.raises(UserError, match=rf"not kept: read back by {to}, it gives features that"):
        export_weights(run, to)
    assert fingerprint(run) == before


@pytest.mark.parametrize("to", ["torchvision", "timm", "detectron2", "onnx"])
def test_a_product_that_cannot_be_read_is_not_kept(
    to: str, resnet18: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = replace(exporting.TARGETS[to], write=lambda _b, _c, file: file.write(b"nonsense"))
    monkeypatch.setitem(exporting.TARGETS, to, broken)
    before = fingerprint(resnet18)
    assert_refused(run_cli("export", resnet18, "--to", to), f"not kept: {to} cannot read it back")
    assert fingerprint(resnet18) == before


@pytest.mark.parametrize("to", ["torchvision", "timm", "detectron2"])
def test_a_product_with_more_than_the_backbone_is_not_kept(
    to: str, resnet18: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = exporting.TARGETS[to]

    class Fuller(nn.Module):
        def __init__(self, backbone: ResNet) -> None:
            super().__init__()
            self.state = backbone.state_dict() | {"fc.weight": torch.zeros(3)}

        def state_dict(self, *_: Any, **__: Any) -> dict[str, Tensor]:
            return self.state

    def write(backbone: ResNet, contents: Contents, file: BinaryIO) -> None:
        target.write(Fuller(backbone), contents, file)

    monkeypatch.setitem(exporting.TARGETS, to, replace(target, write=write))
    with pytest.raises(UserError, match=f"{to} cannot read it back"):
        export_weights(resnet18, to)
    assert [path.name for path in resnet18.iterdir()] == ["backbone.safetensors"]


def test_features_of_another_shape_or_no_numbers_are_refused() -> None:
    expected = torch.ones(2, 4)
    exporting._compare(expected * (1 + 5e-5), expected, "it gives features")
    for found in (torch.ones(2, 5), expected * (1 + 2e-4), torch.full((2, 4), torch.nan)):
        with pytest.raises(UserError, match=r"it gives features (of shape|that differ)"):
            exporting._compare(found, expected, "it gives features")
