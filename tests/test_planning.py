"""What a run will be is said before it starts, and chosen where nobody says it."""

import contextlib
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

from helpers import (
    assert_done,
    assert_refused,
    be_process,
    free_port,
    make_images,
    no_pictures,
    run_cli,
    run_group,
)
from xmoco.auto import Situation, duration
from xmoco.config import Config
from xmoco.config.optimizers import AdamWConfig, SGDConfig
from xmoco.data import ArrayImages, trees
from xmoco.errors import UserError
from xmoco.nn.backbone_files import BackboneCard, save_backbone
from xmoco.nn.backbones import build_backbone
from xmoco.planning import (
    _idle_settings,
    _process_warnings,
    _schedule_warnings,
    forecast,
    show_plan,
    with_full_paths,
)
from xmoco.settings import load_config


@pytest.fixture(autouse=True)
def known_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not that of this machine, lest choices depend on it."""
    monkeypatch.setattr("xmoco.planning.images_per_second", on_a_slow_cpu)


def on_a_slow_cpu(config: Config, _device: torch.device, _images: int) -> float:
    return 200.0 if config.model.backbone == "tiny" else 0.1


def test_auto_says_what_it_chose_and_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    images = make_images(tmp_path / "photos", each=40)
    config = show_plan(data=images, overrides=["device=cpu", "batch=20"])
    said = capsys.readouterr().out
    assert config.model.backbone == "tiny"
    assert "backbone=tiny: trains 200 images/s on this CPU" in said
    assert "epochs=400" in said
    assert "batch=" not in said.partition("steps will take")[0]  # asked for, not chosen
    assert config.train.batch == 20
    assert config.method.model_dump()["bank_length"] == 80  # half of the images
    assert "steps will take about" in said
    assert not (tmp_path / "runs").exists()


def test_the_images_are_listed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[str] = []
    listed = trees._files_below
    monkeypatch.setattr(
        trees, "_files_below", lambda top, endings: looked.append(top) or listed(top, endings)
    )
    show_plan(data=make_images(tmp_path / "photos", each=40), overrides=["device=cpu", "batch=20"])
    assert looked == [str(tmp_path / "photos")]


def test_auto_tells_of_views_that_suit_a_gpu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("xmoco.planning.look_at", lambda *_: Situation(9_469, 70, "cuda", 1))
    images = make_images(tmp_path / "photos", each=40)
    show_plan(data=images, overrides=["device=cpu"])
    said = capsys.readouterr().out
    assert "  eval_size=96: crops show things larger than whole images do" in said
    views = "2 of 64 px and 2 weak ones of 64 px and 4 of 32 px, evaluated on centre crops of 96 px"
    assert views in said
    show_plan(data=images, overrides=["device=cpu", "eval_size=64", "local_crops=0"])
    said = capsys.readouterr().out
    assert "eval_size" not in said  # asked for, not chosen
    assert "4 of 32 px" not in said


@pytest.mark.parametrize("method", ["simclr", "swav", "mocov2plus", "supervised"])
def test_auto_chooses_for_every_method(tmp_path: Path, method: str) -> None:
    """What a method does not have is not chosen for it."""
    images = make_images(tmp_path / "photos", each=40)
    config = show_plan(data=images, overrides=["device=cpu", f"method={method}"])
    assert config.method.name == method
    assert config.method.model_dump().get("local_crops", 0) == 0


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_auto_takes_what_weights_to_start_from_leave_no_choice_of(
    tmp_path: Path,
    device: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("xmoco.planning.look_at", lambda *_: Situation(9_469, 70, device, 1))
    weights, images = tmp_path / "theirs.safetensors", make_images(tmp_path / "photos", each=40)
    pixels = {"mean": (0.1, 0.2, 0.3), "std": (0.4, 0.5, 0.6)}
    card = BackboneCard("tiny", "cifar", 32, **pixels, method="theirs", epochs=1, seed=0)
    save_backbone(build_backbone("tiny", "cifar", 32), card, weights)
    asked = ["device=cpu", "batch=20", f"weights={weights}"]
    config = show_plan(data=images, overrides=asked)
    assert (config.model.backbone, config.model.stem) == ("tiny", "cifar")
    assert {"mean": config.input.mean, "std": config.input.std} == pixels
    said = capsys.readouterr().out
    assert "  backbone=tiny: that of the weights" in said
    assert "  mean=[0.1, 0.2, 0.3]: that of the weights" in said
    assert "normalised by" not in said
    assert_refused(
        run_cli("pretrain", "--data", images, "--dry-run", *asked, "stem=imagenet"),
        "holds a tiny with cifar stem, but the run trains a tiny with imagenet stem",
    )


@pytest.mark.parametrize("name", ["timm:test_vit", "timm:test_resnet"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_models_of_timm_are_shown_images_of_their_own_size(
    name: str,
    device: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("timm")
    measured = []

    def measure(config: Config, *_: Any) -> float:
        measured.append((config.model.backbone, config.input.size))
        return 1.0  # so slow that smaller views would be tried

    monkeypatch.setattr("xmoco.planning.images_per_second", measure)
    monkeypatch.setattr("xmoco.planning.look_at", lambda *_: Situation(9_469, 128, device, 1))
    weights, images = tmp_path / "theirs.safetensors", make_images(tmp_path / "photos", each=40)
    grey = (0.5, 0.5, 0.5)
    card = BackboneCard(name, "imagenet", 160, grey, grey, method="theirs", epochs=1, seed=0)
    save_backbone(build_backbone(name, size=160), card, weights)
    config = show_plan(data=images, weights=weights, overrides=["device=cpu", "batch=20"])
    assert (config.model.backbone, config.input.size, config.input.central_size) == (name, 160, 160)
    assert config.method.model_dump()["local_crops"] == 0
    assert capsys.readouterr().out.count("local_crops=0") == 1
    assert len(measured) == (2 if device == "cpu" else 1)  # to choose and to forecast


def test_smaller_views_are_tried_of_weights_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = []

    def measure(config: Config, *_: Any) -> float:
        sizes.append(config.input.size)
        return 100.0 if config.input.size == 32 else 1.0

    monkeypatch.setattr("xmoco.planning.images_per_second", measure)
    images = make_images(tmp_path / "photos", each=40, side=70)
    config = show_plan(data=images, weights="scratch:tiny", overrides=["device=cpu"])
    assert (config.model.backbone, config.input.size) == ("tiny", 32)
    assert sizes == [64, 32, 32]  # what the images allow, less, and the forecast


def test_a_plan_of_a_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    config = show_plan("demo", overrides=["device=cpu", "epochs=2"])
    said = capsys.readouterr().out
    assert "recipe auto" not in said
    assert config.train.epochs == 2
    assert "steps will take about" in said
    assert "not counting kNN: measured 200 images/s on random input" in said


def test_a_plan_tells_what_is_passed_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for folder in ("train", "val", "masks"):
        make_images(tmp_path / folder, each=4)
    show_plan("demo", data=tmp_path, overrides=["device=cpu", "batch=8"])
    said = capsys.readouterr().out
    assert f"folder {tmp_path.name} (train): 16 images, 4 classes\n" in said
    assert "passed over beside train/ and val/: masks/ (16 images)\n" in said


def fabric_of(processes: int, device: str) -> Any:
    return SimpleNamespace(world_size=processes, device=torch.device(device))


def images_of(count: int) -> ArrayImages:
    return ArrayImages("some", torch.zeros(count, 3, 1, 1, dtype=torch.uint8))


Speeds = list[tuple[Config, int]]


@pytest.fixture
def measurements(monkeypatch: pytest.MonkeyPatch) -> Speeds:
    """What speed is measured of: settings, and how many images a pass takes."""
    asked: Speeds = []

    def measure(config: Config, _device: torch.device, images: int) -> float:
        asked.append((config, images))
        return 50.0

    monkeypatch.setattr("xmoco.planning.images_per_second", measure)
    return asked


@pytest.mark.parametrize(
    ("processes", "settings", "images"),
    [
        (1, ["batch=4096", "accumulate=16"], 256),
        (8, ["batch=512"], 64),
        (8, ["batch=4096", "accumulate=16"], 32),
        (1, ["batch=512"], 512),
    ],
)
def test_speed_is_measured_with_the_images_of_a_pass(
    processes: int, settings: list[str], images: int, measurements: Speeds
) -> None:
    """And counts for every process."""
    config = load_config("demo", [*settings, "epochs=3"])
    said = forecast(config, images_of(4096), fabric_of(processes, "cuda"))
    assert [found for _, found in measurements] == [images]
    assert f" will take about {duration(3 * 4096 / (50 * processes))}, " in said
    one = " per process" if processes > 1 else ""
    assert said.endswith(f"measured 50 images/s{one} on random input")


@pytest.mark.parametrize(
    ("batch_norm", "processes", "device", "found"),
    [
        ("shuffled", 8, "cuda", "shuffled"),
        ("shuffled", 2, "cpu", "shuffled"),
        ("synchronised", 8, "cuda", "synchronised"),
        ("auto", 8, "cuda", "shuffled"),
        ("auto", 1, "cuda", "split"),
    ],
)
def test_batch_norm_is_resolved_for_as_many_processes_as_there_are(
    batch_norm: str, processes: int, device: str, found: str, measurements: Speeds
) -> None:
    config = load_config("demo", [f"batch_norm={batch_norm}"])
    forecast(config, images_of(128), fabric_of(processes, device))
    assert [config.model.batch_norm for config, _ in measurements] == [found]


@pytest.mark.parametrize(
    ("processes", "setting", "words"),
    [
        (1, "batch_norm=shuffled", "and there is one"),
        (3, "batch=64", "a batch of 64 images cannot be shared equally by 3 processes; 63 can"),
        (1, "batch=256", "too few for a batch of 256; the largest batch possible is 128"),
    ],
)
def test_no_speed_is_measured_of_what_cannot_run(
    processes: int, setting: str, words: str, measurements: Speeds
) -> None:
    config = load_config("demo", [setting])
    with pytest.raises(UserError, match=words):
        forecast(config, images_of(128), fabric_of(processes, "cuda"))
    assert not measurements


def test_a_batch_that_does_not_fit_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_large(*_: Any) -> float:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")

    monkeypatch.setattr("xmoco.planning.images_per_second", too_large)
    words = (
        "186 steps, whose speed could not be measured because a batch does not fit in memory: "
        "lower batch (64 now) or size (32 now), or raise accumulate (2 now)\n"
    )
    show_plan("demo", overrides=["device=cpu", "epochs=2", "accumulate=2"])
    assert words in capsys.readouterr().out
    # On a GPU, choosing needs no speed.
    monkeypatch.setattr("xmoco.planning.look_at", lambda *_: Situation(9_469, 70, "cuda", 1))
    images = make_images(tmp_path / "photos", each=40)
    config = show_plan(data=images, overrides=["device=cpu"])
    assert config.model.backbone == "resnet18"
    assert "could not be measured because a batch does not fit" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("asked", "fits", "parts"),
    [([], 64, 4), ([], 1, 1), (["accumulate=2"], 64, 2), (["batch=60"], 20, 4)],
)
def test_a_batch_that_does_not_fit_is_cut_into_parts_that_do(
    asked: list[str],
    fits: int,
    parts: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Unless the user says into how many; where none fits, all stays as it is."""

    def measure(_config: Config, _device: torch.device, images: int) -> float:
        if images > fits:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return 50.0

    monkeypatch.setattr("xmoco.planning.images_per_second", measure)
    # As many as make a batch of 256, of which 160 files are there.
    monkeypatch.setattr("xmoco.planning.look_at", lambda *_: Situation(16_384, 70, "cuda", 1))
    monkeypatch.setattr("xmoco.planning._steps_per_epoch", lambda *_: 1)
    images = make_images(tmp_path / "photos", each=40)
    config = show_plan(data=images, overrides=["device=cpu", "epochs=10", *asked])
    said = capsys.readouterr().out
    assert config.train.accumulate == parts
    told = f"  accumulate={parts}: a whole batch does not fit in memory\n"
    assert (told in said) == (parts > 1 and "accumulate=2" not in asked)
    assert ("measured 50 images/s" in said) == (fits > 1 and "accumulate=2" not in asked)


def test_a_setting_that_only_sgd_has_asks_for_sgd(tmp_path: Path) -> None:
    pytest.importorskip("timm")
    images = make_images(tmp_path / "photos", each=40, side=40)
    vit = ["device=cpu", "backbone=timm:test_vit", "batch=20", "epochs=30"]
    config = show_plan(data=images, overrides=[*vit, "sgd_momentum=0.8"])
    assert isinstance(config.optim, SGDConfig)
    assert config.optim.sgd_momentum == 0.8
    assert isinstance(show_plan(data=images, overrides=vit).optim, AdamWConfig)


@pytest.mark.parametrize("recipe", ["demo", None])
def test_too_large_a_batch_is_refused_before_anything_is_told(
    recipe: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    images = make_images(tmp_path / "photos", each=5)
    with pytest.raises(UserError, match="too few for a batch of 512; the largest batch possible"):
        show_plan(recipe, data=images, overrides=["device=cpu", "batch=512"])
    assert capsys.readouterr().out == ""


def test_another_size_than_that_of_weights_is_refused_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("timm")
    monkeypatch.setattr("xmoco.planning.images_per_second", never)
    weights, images = tmp_path / "theirs.safetensors", make_images(tmp_path / "photos", each=40)
    grey = (0.5, 0.5, 0.5)
    card = BackboneCard("timm:test_vit", "imagenet", 160, grey, grey, "theirs", epochs=1, seed=0)
    save_backbone(build_backbone("timm:test_vit", size=160), card, weights)
    asked = ["device=cpu", "batch=20", "size=64"]
    words = r"a timm:test_vit for images of 160 px, which cannot start a run on 64 px: set size=160"
    with pytest.raises(UserError, match=words):
        show_plan(data=images, weights=weights, overrides=asked)


@pytest.mark.parametrize(
    ("settings", "warned"),
    [
        (["bank_length=16"], True),
        (["bank_length=16", "accumulate=4"], False),  # a part has as many
        (["bank_length=64"], False),
        (["method=simclr"], False),
    ],
)
def test_a_bank_smaller_than_a_batch_is_warned_of(
    settings: list[str], warned: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    show_plan("demo", overrides=["device=cpu", *settings])
    words = "warning: a bank of 16 keys cannot hold those of one batch, of 64 images: raise bank_le"
    assert (words in capsys.readouterr().out) == warned


def test_a_home_folder_is_expanded_where_torchvision_sets_are_kept() -> None:
    config = load_config("cifar10", ["root=~/sets"])
    assert with_full_paths(config).data.root == str(Path.home() / "sets")


def plan_in_three(rank: int, port: int, said: Path, arguments: list[dict[str, Any]]) -> None:
    be_process(rank, port)
    with said.open("a") as file, contextlib.redirect_stdout(file):
        for asked in arguments:
            show_plan(**asked)
    torch.distributed.destroy_process_group()


def test_three_processes_plan_together(tmp_path: Path) -> None:
    """The first looks and measures while the others wait."""
    images, said = make_images(tmp_path / "photos", each=4, classes=3), tmp_path / "said"
    here = ["device=cpu", "devices=3", "backbone=tiny", "size=16"]  # soon measured
    shuffled = [*here, "batch=12", "batch_norm=shuffled"]
    asked = [{"data": images, "overrides": here}, {"recipe": "demo", "overrides": shuffled}]
    run_group(3, plan_in_three, free_port(), said, asked)
    lines = said.read_text().splitlines()
    assert "  batch=12: 1 step per epoch" in lines
    assert [line for line in lines if "3 × cpu, batch 12" in line][1:]
    assert lines.count("batch norm: keys shuffled between processes") == 2
    forecasts = [line for line in lines if "images/s per process on random input" in line]
    assert len(forecasts) == 2


@pytest.mark.parametrize(
    ("setting", "views"),
    [
        ("weak_keys=true", "2 of 32 px and 2 weak ones of 32 px"),
        ("method=ressl", "1 of 32 px and 1 weak one of 32 px"),
    ],
)
def test_weak_views_are_called_so(
    setting: str, views: str, capsys: pytest.CaptureFixture[str]
) -> None:
    show_plan("demo", overrides=["device=cpu", setting])
    assert f"random views of an image: {views}\n" in capsys.readouterr().out


def test_auto_takes_a_method_without_banks(tmp_path: Path) -> None:
    images = make_images(tmp_path / "photos", each=40)
    config = show_plan(data=images, overrides=["device=cpu", "method=simclr"])
    assert config.method.name == "simclr"


def test_auto_wants_images() -> None:
    with pytest.raises(UserError, match=r"^no images given: pass --data PATH, .*\.$"):
        show_plan(overrides=["device=cpu"])


def test_mistakes_are_found_before_images_are_looked_at(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="unknown key 'epoch'"):
        show_plan(data=tmp_path / "nowhere", overrides=["epoch=3"])


def test_a_run_by_auto_keeps_what_was_chosen(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    images = make_images(tmp_path / "photos", each=20)
    arguments = ["pretrain", "--data", str(images), "--out", "run", "device=cpu", "epochs=1"]
    with no_pictures():
        outcome = run_cli(*arguments)
    assert_done(outcome)
    assert "recipe auto: starts from" in outcome.stdout
    settings = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert settings["model"]["backbone"] == "tiny"
    assert settings["train"]["epochs"] == 1
    with no_pictures():
        again = run_cli("pretrain", "--resume", "--out", "run")
    assert_done(again)
    assert "this run is complete" in again.stdout


def test_a_dry_run_does_nothing(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    outcome = run_cli("pretrain", "--recipe", "demo", "--dry-run", "device=cpu")
    assert_done(outcome)
    assert list(tmp_path.iterdir()) == []
    outcome = run_cli("pretrain", "--recipe", "demo", "--dry-run", "--out", "run")
    assert_refused(outcome, "--dry-run does nothing")


def test_settings_of_a_head_that_is_not_there_are_told_to_do_nothing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    show_plan("demo", overrides=["device=cpu", "method=supervised", "head_layers=3"])
    assert "head_layers, head_hidden and feature_size do nothing" in capsys.readouterr().out
    show_plan("demo", overrides=["device=cpu", "head_layers=3"])
    assert "do nothing" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--out", "run"], "run already holds a run"),
        (["--out", "file"], "file already exists"),
        (["--out", ""], "already exists"),
        (["--out", "file/run"], "file is not a folder"),
        (["--out", "closed/deep/run"], "closed cannot be written to"),
        (["batch=81"], "too few for a batch of 81"),
    ],
)
def test_what_cannot_be_is_told_before_anything_is_measured(
    arguments: list[str],
    words: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("xmoco.planning.images_per_second", never)
    real = os.access
    monkeypatch.setattr(os, "access", lambda p, m: p != tmp_path / "closed" and real(p, m))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").touch()
    (tmp_path / "closed").mkdir()  # root may write anywhere, so it is only said to be
    (tmp_path / "file").touch()
    images = make_images(tmp_path / "photos", each=20)
    outcome = run_cli("pretrain", "--data", images, "device=cpu", *arguments)
    assert_refused(outcome, words)
    assert outcome.stdout == ""
    assert not (tmp_path / "runs").exists()


def never(*_: Any) -> float:
    raise AssertionError("nothing needs to be measured")


@pytest.mark.parametrize(
    ("recipe", "settings", "warm_up", "words"),
    [
        (None, ["epochs=4"], 0.4, "  warmup_epochs=0.4: 10% of 4 epochs"),
        (None, ["epochs=4", "warmup_epochs=3"], 3.0, "warning: the learning rate rises for 3 of 4"),
        ("imagenette", ["epochs=4"], 5.0, "rises for 5 of 4 epochs: set warmup_epochs, a tenth"),
        ("imagenette", ["epochs=10"], 5.0, None),
        (None, ["epochs=400"], 5.0, None),
    ],
)
def test_a_warm_up_suits_the_epochs_or_is_warned_of(
    recipe: str | None,
    settings: list[str],
    warm_up: float,
    words: str | None,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("xmoco.planning.look_at", lambda *_: Situation(9_469, 128, "cuda", 1))
    images = make_images(tmp_path / "photos", each=40)
    small = ["device=cpu", "backbone=tiny", "batch=20", *settings]
    config = show_plan(recipe, data=images, overrides=small)
    assert config.optim.warmup_epochs == warm_up
    said = capsys.readouterr().out
    if words is None:
        assert "warmup_epochs" not in said
        assert "the learning rate rises" not in said
    else:
        assert words in said


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ("method=swav freeze_prototypes_epochs=4", "prototypes do not move for 4 of 4 epochs"),
        ("method=uota queue_length=64", "the queue takes no part for 15 of 4 epochs"),
        ("consistency_warmup_epochs=4", "the weight of consistency rises for 4 of 4 epochs"),
        ("method=co2 agreement_warmup_epochs=9", "the weight of agreement rises for 9 of 4 epochs"),
        ("method=mocov2plus teacher=keys", "label_weight and consistency_weight are 0"),
        (
            "positive_mass_end=0.5 label_weight=0",
            "positive_mass_end has no effect: label_weight is",
        ),
        (
            "method=simclr consistency_warmup_epochs=9",
            "consistency_warmup_epochs has no effect: consistency_weight is 0",
        ),
        ("method=co2 agreement_warmup_epochs=9 agreement_weight=0", "agreement_weight is 0"),
        ("method=swav", None),
        ("consistency_warmup_epochs=2", None),
        ("method=mocov2plus teacher=keys consistency_weight=1", None),
        ("positive_mass_end=0.5", None),
    ],
)
def test_settings_that_come_too_late_or_do_nothing_are_warned_of(
    settings: str, words: str | None
) -> None:
    config = load_config("demo", ["epochs=4", *settings.split()])
    warnings = [*_schedule_warnings(config), *_idle_settings(config)]
    assert len(warnings) == (words is not None)
    assert all(words in warning for warning in warnings if words)


@pytest.mark.parametrize(
    ("settings", "rate"),
    [
        ([], AdamWConfig().learning_rate),
        (["learning_rate=0.001"], 0.001),
        (["optim=sgd"], 0.24),  # the recipe's
    ],
)
def test_auto_trains_transformers_by_adamw(
    settings: list[str],
    rate: float,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("timm")
    monkeypatch.setattr("xmoco.planning.look_at", lambda *_: Situation(9_469, 160, "cuda", 1))
    images = make_images(tmp_path / "photos", each=40)
    vit = ["device=cpu", "backbone=timm:test_vit", "batch=20", "size=160", "local_crops=0"]
    config = show_plan(data=images, overrides=[*vit, "epochs=30", *settings])
    optim, said = config.optim, capsys.readouterr().out
    assert (optim.learning_rate, optim.warmup_epochs) == (rate, 3.0)
    adamw = "optim=sgd" not in settings
    assert isinstance(optim, AdamWConfig) == adamw
    assert ("  optim=adamw: networks of this kind hardly learn by SGD\n" in said) == adamw
    assert ("  learning_rate=0.0005: " in said) == (not settings)
    assert ("  decay_norms_and_biases=false: usual with adamw\n" in said) == adamw
    assert optim.decay_norms_and_biases == (not adamw)


@pytest.mark.parametrize(
    ("processes", "cores", "threads", "counted"),
    [(1, 2, 2, 1), (2, 2, 1, 2), (8, 2, 1, 2), (8, 2, 2, 1), (3, 16, 5, 3), (2, 1, 4, 1)],
)
def test_processes_are_no_faster_than_the_cores(
    processes: int, cores: int, threads: int, counted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("xmoco.planning._cores", lambda: cores)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    config = load_config("demo", [f"devices={processes}", "batch=48", "epochs=300"])
    said = forecast(config, images_of(4800), fabric_of(processes, "cpu"))
    assert f" will take about {duration(300 * 4800 / (200 * counted))}, " in said
    warnings = list(_process_warnings(config, fabric_of(processes, "cpu")))
    assert any("set devices=" in words for words in warnings) == (processes > cores)
    assert not list(_process_warnings(config, fabric_of(processes, "cuda")))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ([], "size=64 backbone=tiny epochs=400"),
        (["backbone=tiny"], "size=96 epochs=400"),
        (["size=48", "train.epochs=3"], "backbone=tiny"),
        (["backbone=tiny", "size=64", "epochs=400"], None),
    ],
)
def test_what_follows_from_a_speed_is_told_to_do_so(
    settings: list[str], words: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    images = make_images(tmp_path / "photos", each=40, side=128)
    config = show_plan(data=images, overrides=["device=cpu", "batch=20", *settings])
    said = capsys.readouterr().out
    told = "this follows the speed measured just now; to have the same again, add"
    assert (told in said) == (words is not None)
    if words is not None:
        assert f"{told} {words}\n" in said
        again = ["device=cpu", "batch=20", *settings, *words.split()]
        assert show_plan(data=images, overrides=again) == config


def test_a_large_network_that_is_asked_for_is_shown_large_views(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    images = make_images(tmp_path / "photos", each=40, side=256)
    config = show_plan(data=images, overrides=["device=cpu", "batch=20", "backbone=resnet50"])
    assert (config.model.backbone, config.model.stem) == ("resnet50", "imagenet")
    assert config.input.size == 64
    said = capsys.readouterr().out
    assert "starts from imagenette" in said
    assert "backbone=" not in said  # asked for, not chosen


@pytest.mark.parametrize(("each", "few"), [(5, True), (25, False)])
def test_what_the_images_do_not_suffice_for_is_told_beside_them(
    each: int, few: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    images = make_images(tmp_path / "photos", each=each)
    count = 4 * each
    asked = ["device=cpu", "batch=16", f"bank_length={count + 4}"]
    show_plan(data=images, overrides=asked)
    said = capsys.readouterr().out.splitlines()
    first = next(n for n, line in enumerate(said) if line.startswith("folder photos: "))
    told = [f"warning: hardly anything can be learnt from {count} images: "] * few
    told.append(f"warning: a bank of {count + 4} keys is larger than the {count} images")
    lines = said[first + 1 :]
    assert all(line.startswith(start) for line, start in zip(lines, told, strict=False))
    assert not any(line.startswith("warning: ") for line in lines[len(told) :])
