"""Every mistake a user can make gets one clear sentence, a non-zero exit, and breaks nothing."""

import errno
import os
import resource
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import xmoco
from helpers import (
    Outcome,
    assert_done,
    assert_refused,
    checkpoints,
    fingerprint,
    make_images,
    no_pictures,
    run_cli,
    start_cli,
    write_recipe,
)
from xmoco.checkpoints import load_checkpoint
from xmoco.errors import TRY_AGAIN
from xmoco.schedules import WarmupCosine
from xmoco.settings import load_config, recipe_names

PYPROJECT = Path(__file__).parents[1] / "pyproject.toml"


@pytest.fixture(autouse=True)
def quick() -> Iterator[None]:
    with no_pictures():
        yield


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_images(tmp_path_factory.mktemp("data") / "gratings")


@pytest.fixture(scope="module")
def finished(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished")
    recipe = write_recipe(folder / "fast.yaml", images, monitor={"knn_every": 0})
    with no_pictures():
        assert_done(run_cli("pretrain", "--recipe", recipe, "--out", folder / "run"))
    return folder / "run"


@pytest.fixture
def here(images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory but for fast.yaml, on a machine with nothing but a CPU."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    write_recipe(tmp_path / "fast.yaml", images, monitor={"knn_every": 0})
    return tmp_path


@pytest.fixture
def run(finished: Path, here: Path) -> Path:
    """A finished run of the recipe fast.yaml in a folder of its own, last epoch forgotten."""
    shutil.copytree(finished, here / "run")
    checkpoints(here / "run")[-1].unlink()
    return here / "run"


def pretrain(*arguments: str | Path) -> Outcome:
    return run_cli("pretrain", "--recipe", "fast.yaml", *arguments)


# A run that cannot start leaves nothing.


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--data", "nowhere"], ["nowhere"]),
        (["--data", "pattern"], ["did you mean patterns?"]),
        (["--data", "empty"], ["there are no images in", "png"]),
        (["--data", "fast.yaml"], ["fast.yaml is neither a folder nor a whole tar archive"]),
        (["--data", "torchvision:CIFAR11"], ["CIFAR11", "did you mean", "CIFAR10"]),
        (["--data", "torchvision:CIFAR10"], ["CIFAR10", "download=true"]),
        (["--recipe", "imagenete"], ["'imagenete' (did you mean imagenette?)", "cifar10"]),
        (["--recipe", "other.yaml"], ["cannot read the recipe other.yaml"]),
        (["--recipe", "broken.yaml"], ["broken.yaml is not valid yaml"]),
        (["--recipe", "list.yaml"], ["list.yaml must hold sections"]),
        (["--recipe", "typo.yaml"], ["'train.epoch' (did you mean train.epochs?)"]),
        (["--recipe", "orphan.yaml"], ["unknown recipe 'nobody'"]),
        (["--recipe", "own.yaml"], ["own.yaml inherits from itself"]),
        (["--recipe", "many.yaml"], ["many.yaml must inherit from one recipe"]),
        (["--recipe", "flat.yaml", "epochs=3"], ["train must hold keys and values"]),
        (["epoch=3"], ["unknown key 'epoch' (did you mean epochs?)"]),
        (["train.batchsize=3"], ["'train.batchsize' (did you mean"]),
        (["epochs"], ["'epochs' is not of the form key=value."]),
        (["flat.yaml"], ["'flat.yaml' is not of the form key=value (for images: --data flat"]),
        (["--recipe", "imagenet"], ["no images at 'data/imagenet'", "pass --data PATH"]),
        (["method=mocco"], ["unknown method 'mocco' (did you mean moco?)", "xmoco, mocov2plus"]),
        (["epochs=ten"], ["train.epochs = 'ten'"]),
        (["epochs="], ["train.epochs has no value: it must be a whole number."]),
        (["foo=1"], ["unknown key 'foo'."]),
        (["method=byol", "sharpness=2.0"], ["byol has no setting sharpness"]),
        (["batch=129"], ["128 images", "batch of 129", "largest batch possible is 128"]),
        (["batch=18", "accumulate=4"], ["batch of 18 images cannot be shared equally by 4 parts"]),
        (["batch_norm=shuffled"], ["batch_norm=split"]),
        (["batch_norm=synchronised"], ["CUDA"]),
        (["batch_norm=split", "batch=20"], ["20 images", "do not make 8"]),
        (["batch_norm=split", "batch=8"], ["equal groups of at least two"]),
        (["device=cuda"], ["device=cuda is not available"]),
        (["device=mps"], ["device=mps is not available"]),
        (["--weights", "nowhere"], ["no weights at ", "nowhere"]),
        (["--weights", "fast.yaml"], ["fast.yaml is damaged or no safetensors file"]),
        (["--out", "fast.yaml"], ["fast.yaml already exists"]),
        (["--out", "fast.yaml/run"], ["fast.yaml"]),
        (["--out", "empty"], ["empty already exists"]),
        (["--resume"], ["--out"]),
        (["--resume", "--out", "empty"], ["empty holds no run"]),
        (["--resume", "--out", "nowhere"], ["nowhere does not exist"]),
    ],
    ids=lambda value: " ".join(value) if "=" in "".join(value) or "--" in value[0] else "",
)
def test_a_wrong_start(here: Path, arguments: list[str], words: list[str]) -> None:
    (here / "empty").mkdir()
    (here / "broken.yaml").write_text("train: {epochs: 3\nbatch")
    (here / "list.yaml").write_text("- 1\n- 2\n")
    (here / "typo.yaml").write_text("train: {epoch: 3}\n")
    (here / "orphan.yaml").write_text("inherits: nobody\n")
    (here / "own.yaml").write_text("inherits: own.yaml\n")
    (here / "many.yaml").write_text("inherits: [demo, imagenet]\n")
    (here / "flat.yaml").write_text("train: 3\n")
    before = fingerprint(here)
    assert_refused(pretrain(*arguments), *words)
    assert fingerprint(here) == before


def test_what_a_command_takes_is_suggested_for_a_set_that_is_not_there(here: Path) -> None:
    outcome = run_cli("pretrain", "--data", "torchvision:CIFAR10", "device=cpu")
    assert_refused(outcome, "add download=true to download it, or root=FOLDER for where it is")
    assert "--download" not in outcome.stderr
    outcome = run_cli("evaluate", "knn", "scratch:tiny", "torchvision:CIFAR10", "--device", "cpu")
    assert_refused(outcome, "add --download to download it, or say with --root where it is")
    assert "download=true" not in outcome.stderr


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--epochs", "3"], "there is no option --epochs: settings are given as epochs=3."),
        (["--epochs=3", "--dry-run"], "--epochs: settings are given as epochs=3."),
        (["--weight-decay", "0.1"], "settings are given as weight_decay=0.1."),
        (["--lr", "0.1"], "there is no option --lr: settings are given as learning_rate=0.1."),
        (["--nesterov", "--dry-run"], "settings are given as nesterov=VALUE."),
        (["--nesterov"], "settings are given as nesterov=VALUE."),
    ],
)
def test_a_setting_given_as_an_option(here: Path, arguments: list[str], told: str) -> None:
    assert_refused(pretrain(*arguments), told)


def test_an_option_that_is_no_setting(here: Path) -> None:
    outcome = pretrain("--dta", "images")
    assert outcome.status == 2
    assert "No such option" in outcome.stderr
    assert "--data" in outcome.stderr


def test_the_version() -> None:
    outcome = run_cli("--version")
    assert outcome == Outcome(0, f"{xmoco.__version__}\n", "")
    assert xmoco.__version__ == tomllib.loads(PYPROJECT.read_text())["project"]["version"]


def test_all_values_out_of_range_are_listed_at_once(here: Path) -> None:
    before = fingerprint(here)
    wrong = ["temperature=-1", "epochs=0", "flip=1.5", "crop_scale=[0.9,0.1]", "bathc=3", "std=x"]
    words = ["temperature", "epochs", "flip", "crop_scale", "did you mean batch?", "input.std"]
    assert_refused(pretrain(*wrong), *words[:3], *words[4:])
    assert_refused(pretrain(*wrong[:2], wrong[3]), "temperature", "epochs", "crop_scale")
    assert fingerprint(here) == before


def test_more_than_one_percent_unreadable(here: Path) -> None:
    images = make_images(here / "images")
    for name in ("class1/004.png", "class1/005.png", "class1/006.png", "class3/030.png"):
        (images / name).write_bytes(b"no picture")
    before = fingerprint(here)
    words = ["4 of 128 images cannot be read", "more than the 3 that may be", "class1/004.png"]
    assert_refused(pretrain("--data", images), *words)
    assert fingerprint(here) == before
    # Streamed images are found out later, when a run exists; it stops as clearly.
    outcome = pretrain("--data", images, "preload_gib=0", "--out", "run", "knn_every=0")
    assert_refused(outcome, "4 of 128 images cannot be read", "more than the 3 that may be")


def test_weights_of_another_architecture(here: Path, finished: Path) -> None:
    before = fingerprint(here)
    words = ["holds a tiny with cifar stem", "resnet18 with cifar stem"]
    assert_refused(pretrain("--weights", finished, "backbone=resnet18"), *words)
    assert fingerprint(here) == before


@pytest.mark.parametrize("kept", [0, 7, 100_000])
def test_damaged_weights(here: Path, finished: Path, kept: int) -> None:
    content = (finished / "backbone.safetensors").read_bytes()
    (here / "backbone.safetensors").write_bytes(content[:kept])
    before = fingerprint(here)
    assert_refused(pretrain("--weights", "backbone.safetensors"), "damaged")
    outcome = run_cli("evaluate", "knn", "backbone.safetensors", "patterns")
    assert_refused(outcome, "backbone.safetensors is damaged")
    assert fingerprint(here) == before


def test_weights_that_xmoco_did_not_write(here: Path) -> None:
    save_file({"weight": torch.zeros(3)}, here / "other.safetensors")
    assert_refused(
        pretrain("--weights", "other.safetensors"), "does not say which backbone it holds"
    )


# An existing run is never harmed.


def test_an_existing_run_is_not_overwritten(here: Path, run: Path) -> None:
    before = fingerprint(here)
    assert_refused(pretrain("--out", "run"), "run already holds a run", "--resume", "--out")
    assert fingerprint(here) == before


@pytest.mark.parametrize("command", ["linear", "finetune"])
def test_the_run_of_an_evaluation_is_called_so(
    here: Path, finished: Path, images: Path, command: str
) -> None:
    arguments = (finished, images, "--held-out", "0.2", "--epochs", "1", "--device", "cpu")
    assert_done(run_cli("evaluate", command, *arguments, "--out", "judged"))
    outcome = run_cli("pretrain", "--resume", "--out", "judged", "device=cpu")
    assert_refused(outcome, f"judged holds a run of `xmoco evaluate {command}`, no pre-training")


def test_resuming_with_another_configuration_names_the_changes(here: Path, run: Path) -> None:
    before = fingerprint(here)
    outcome = run_cli("pretrain", "--resume", "--out", "run", "epochs=9", "hue=0.4", "batch=16")
    assert_refused(outcome, "train.epochs: 2 → 9", "views.hue: 0.2 → 0.4")
    assert "batch" not in outcome.stderr
    assert_refused(pretrain("--resume", "--out", "run", "method=mocov2plus"), "method.name")
    others = run_cli("pretrain", "--resume", "--out", "run", "--data", "patterns")
    assert_refused(others, "belongs to other settings or images")
    assert fingerprint(here) == before


def test_resuming_with_the_same_configuration_or_elsewhere_is_fine(here: Path, run: Path) -> None:
    outcome = pretrain("--resume", "--out", "run", "epochs=2", "readers=3", "precision=fp32")
    assert_done(outcome)
    assert "resuming after step 8 (epoch 1.0)" in outcome.stdout
    assert [path.name for path in checkpoints(run)][-1] == "step-000000016.ckpt"


def test_resuming_a_complete_run_is_fine(here: Path, finished: Path) -> None:
    shutil.copytree(finished, here / "run")
    before = load_file(here / "run" / "backbone.safetensors")
    outcome = run_cli("pretrain", "--resume", "--out", "run")
    assert_done(outcome)
    assert "complete" in outcome.stdout
    after = load_file(here / "run" / "backbone.safetensors")
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("text", ["", "[1, 2]", "train: {epochs: 0}", "train: {", "\x00"])
def test_a_damaged_config(here: Path, run: Path, text: str) -> None:
    (run / "config.yaml").write_text(text)
    before = fingerprint(here)
    assert_refused(run_cli("pretrain", "--resume", "--out", "run"), "config.yaml")
    assert fingerprint(here) == before


class Malicious:
    """Would create a file when unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def truncated(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


def bits_flipped(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[200:260] = bytes(60)
    path.write_bytes(content)


DAMAGE = {
    "truncated": (truncated, "incomplete or no checkpoint"),
    "empty": (lambda path: path.write_bytes(b""), "incomplete or no checkpoint"),
    "text": (lambda path: path.write_text("hello"), "incomplete or no checkpoint"),
    "bits flipped": (bits_flipped, ""),
    "foreign": (lambda path: torch.save({"model": torch.zeros(3)}, path), "not a checkpoint of"),
    "foreign tensor": (lambda path: torch.save(torch.zeros(3), path), "not a checkpoint of"),
    "old pickle": (
        lambda path: torch.save({}, path, _use_new_zipfile_serialization=False),
        "incomplete or no checkpoint",
    ),
    "malicious": (
        lambda path: torch.save(
            torch.load(path) | {"extra": Malicious(path.parents[2] / "harm")}, path
        ),
        "loading it could run code",
    ),
    "another shape": (
        lambda path: torch.save(
            torch.load(path) | {"task": {"encoder.backbone.conv1.weight": torch.zeros(3)}}, path
        ),
        "belongs to another configuration",
    ),
    "parts missing": (
        lambda path: torch.save({"format": torch.load(path)["format"], "step": 8}, path),
        "belongs to other settings",
    ),
    "wrong types": (
        lambda path: torch.save(torch.load(path) | {"task": 3, "optimizer": []}, path),
        "",
    ),
    "wrong step": (lambda path: torch.save(torch.load(path) | {"step": "eight"}, path), ""),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_bad_checkpoint(here: Path, run: Path, kind: str) -> None:
    damage, words = DAMAGE[kind]
    (last,) = checkpoints(run)
    damage(last)
    before = fingerprint(here)
    assert_refused(run_cli("pretrain", "--resume", "--out", "run"), last.name, words)
    assert not (here / "harm").exists()
    assert fingerprint(here) == before


def test_where_a_checkpoint_is_bad_an_older_one_serves(here: Path, run: Path) -> None:
    older = checkpoints(run)[0]
    (run / "checkpoints" / "step-000000012.ckpt").write_bytes(older.read_bytes()[:1000])
    outcome = run_cli("pretrain", "--resume", "--out", "run")
    assert_done(outcome)
    assert "step-000000012.ckpt is incomplete" in outcome.stdout
    assert "going on from step-000000008.ckpt" in outcome.stdout


# Trouble on the way.


def stop_at(step: int, monkeypatch: pytest.MonkeyPatch, here: Path) -> Path:
    """A run that was interrupted after ``step``."""
    import signal

    from xmoco.run_logger import RunLogger

    with monkeypatch.context() as patch:
        patch.setattr(
            RunLogger,
            "on_step",
            lambda _, now: os.kill(os.getpid(), signal.SIGTERM) if now == step else None,
        )
        outcome = pretrain("--out", "run")
    assert outcome.status == TRY_AGAIN
    return here / "run"


def test_a_full_disk_while_saving(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = stop_at(5, monkeypatch, here)
    good = fingerprint(run / "checkpoints")

    def fsync(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    from xmoco.checkpoints import Checkpoints

    save = Checkpoints.save

    def save_on_a_full_disk(self: Checkpoints, step: int, state: dict[str, Any]) -> Path:
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", fsync)
            return save(self, step, state)

    monkeypatch.setattr(Checkpoints, "save", save_on_a_full_disk)
    outcome = run_cli("pretrain", "--resume", "--out", "run")
    assert_refused(outcome, "run/checkpoints/step-000000008.ckpt", "No space left on device")
    assert fingerprint(run / "checkpoints") == good
    assert load_checkpoint(checkpoints(run)[-1])["step"] == 5


@pytest.mark.parametrize("name", ["metrics.jsonl", "train.log", "environment.json"])
def test_a_full_disk_while_logging(
    here: Path, run: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device that is always full stands for the file."""
    good = fingerprint(run / "checkpoints")
    open_path = Path.open

    def open_or_full(self: Path, mode: str = "r", **options: Any) -> Any:
        full = mode[0] != "r" and name in self.name
        return open_path(Path("/dev/full") if full else self, mode, **options)

    monkeypatch.setattr(Path, "open", open_or_full)
    outcome = run_cli("pretrain", "--resume", "--out", "run")
    assert_refused(outcome, f"could not write run/{name}", "No space left on device")
    assert good.items() <= fingerprint(run / "checkpoints").items()
    assert not list(run.rglob("*.part"))


def small_files() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**21, 2**21))


def test_files_that_may_not_grow(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real process whose files are limited to 2 MB cannot write checkpoints of 4 MB."""
    run = stop_at(5, monkeypatch, here)
    good = fingerprint(run / "checkpoints")
    process = start_cli(
        "pretrain", "--resume", "--out", run, said=here / "said", prepare=small_files
    )
    process.join(120)
    assert process.exitcode == 2
    sentence = (here / "said").read_text().splitlines()[-1]
    assert sentence.startswith("xmoco: ")
    assert all(part in sentence for part in ("step-000000008.ckpt", "File too large"))
    assert fingerprint(run / "checkpoints") == good
    assert load_checkpoint(checkpoints(run)[-1])["step"] == 5
    assert_done(run_cli("pretrain", "--resume", "--out", "run"))


def test_records_that_cannot_be_written(here: Path, finished: Path, images: Path) -> None:
    (here / "full.jsonl").symlink_to("/dev/full")
    arguments = ("evaluate", "knn", finished, images, "--k", "5", "--records")
    assert_refused(run_cli(*arguments, "full.jsonl"), "No space left", "full.jsonl")
    assert_refused(run_cli(*arguments, "fast.yaml/records.jsonl"), "fast.yaml")


def test_a_loss_that_is_no_number(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After an epoch the rate becomes absurd; the checkpoint of that epoch stays as it was."""
    calm = WarmupCosine.__call__
    monkeypatch.setattr(
        WarmupCosine, "__call__", lambda self, at: calm(self, at) if at.step < 9 else 1e30
    )
    outcome = pretrain("--out", "run", "checkpoint_minutes=0.0001")
    # The weights are the first not to be numbers; they are looked at before they are saved.
    assert_refused(
        outcome,
        *("NaN or infinite", "at step 1", "go on with --resume and skip_bad_steps=true"),
        "in another folder with --out, lower the learning rate",
    )
    last = checkpoints(here / "run")[-1]
    assert str(last.relative_to(here)) in outcome.stderr
    state = load_checkpoint(last)
    assert state["step"] <= 9
    assert all(value.isfinite().all() for value in state["task"].values())
    assert not list((here / "run").rglob("*.part"))
    assert not (here / "run" / "backbone.safetensors").exists()


def test_a_loss_that_never_was_a_number(here: Path) -> None:
    outcome = pretrain("--out", "run", "temperature=1e-45")
    assert_refused(outcome, "the loss is NaN or infinite", "there is no checkpoint yet")
    assert not checkpoints(here / "run")


# Evaluation.


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere", "patterns"], ["no weights at nowhere"]),
        (["WEIGHTS", "nowhere"], ["nowhere"]),
        (["WEIGHTS", "flat"], ["no labels", "one subfolder per class"]),
        (["WEIGHTS", "IMAGES", "--k", "0"], ["k must be at least 1"]),
        (["WEIGHTS", "IMAGES", "--temperature", "0"], ["temperature"]),
        (["WEIGHTS", "IMAGES", "--device", "cuda"], ["device=cuda is not available"]),
        (["WEIGHTS", "IMAGES", "--device", "gpu"], ["gpu"]),
    ],
    ids=lambda value: " ".join(value) if len(value) > 1 else "",
)
def test_a_wrong_evaluation(
    here: Path, finished: Path, images: Path, arguments: list[str], words: list[str]
) -> None:
    (here / "flat").mkdir()
    for picture in (images / "class0").iterdir():
        shutil.copy(picture, here / "flat")
    before = fingerprint(here)
    real = {"WEIGHTS": str(finished), "IMAGES": str(images)}
    chosen = [real.get(argument, argument) for argument in arguments]
    assert_refused(run_cli("evaluate", "knn", *chosen), *words)
    assert fingerprint(here) == before


@pytest.mark.parametrize(
    "option",
    [
        ["--grid", "small"],
        ["--grid", "paper"],  # the default, but given
        ["--out", "grid"],
        ["--seed", "1"],
        ["--precision", "bf16"],
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("mode", [[], ["--mode", "frozen"]], ids=" ".join)
def test_frozen_transfer_takes_no_option_of_training(
    here: Path, finished: Path, images: Path, mode: list[str], option: list[str]
) -> None:
    before = fingerprint(here)
    outcome = run_cli("evaluate", "transfer", finished, images, *mode, *option)
    reason = f"{option[0]} is for end-to-end transfer only: leave it out, or give --mode end-to-end"
    assert_refused(outcome, reason)
    assert fingerprint(here) == before


def test_evaluating_an_unfinished_run(here: Path, run: Path, images: Path) -> None:
    (run / "backbone.safetensors").unlink()
    outcome = run_cli("evaluate", "knn", run, images)
    assert_done(outcome)
    assert "as it was at epoch 1 of 2, step 8" in outcome.stderr
    (last,) = checkpoints(run)
    last.unlink()
    outcome = run_cli("evaluate", "knn", run, images)
    assert_refused(outcome, "has no weights yet", "--resume")


# Help.


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "pretrain"),
        (["--help"], "evaluate"),
        (["pretrain", "--help"], "--resume"),
        (["evaluate", "knn", "--help"], "--temperature"),
        (["tables"], "main-cifar10"),
        (["pretrain", "epoch=3"], "did you mean epochs?"),
        (["pretrain", "--recipe", "imagenete", "--dry-run"], "did you mean imagenette?"),
    ],
)
def test_help_and_mistakes_do_not_wait_for_torch(arguments: list[str], words: str) -> None:
    program = (
        "import sys\n"
        "from xmoco.cli import main\n"
        f"sys.argv = ['xmoco', *{arguments!r}]\n"
        "try:\n    main()\n"
        "finally:\n    print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert words in done.stdout + done.stderr
    assert done.stdout.endswith("False\n")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("recipe", [None, *recipe_names()])
def test_settings_lists_every_field(recipe: str | None) -> None:
    outcome = run_cli("settings", *([] if recipe is None else ["--recipe", recipe]))
    assert_done(outcome)
    for section, settings in load_config(recipe):
        assert section in outcome.stdout
        assert all(field in outcome.stdout for field in type(settings).model_fields)


def test_settings_of_an_unknown_recipe() -> None:
    assert_refused(run_cli("settings", "--recipe", "dmeo"), "did you mean demo?")


def test_options_of_evaluations_default_to_those_of_python() -> None:
    """They stand twice, so that help need not wait for torch; the cache is the command line's."""
    from xmoco.cli.options import DEFAULTS

    usual = xmoco.EvalOptions()
    others = {name: value for name, value in DEFAULTS.items() if name != "cache"}
    assert others == {name: getattr(usual, name) for name in others}
