"""Whole runs through the command line and from Python: what they leave behind, and that it fits."""

import json
import math
import re
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torchvision.models
from PIL import Image
from safetensors.torch import load_file
from torch.testing import assert_close

import xmoco
from helpers import (
    Outcome,
    assert_done,
    assert_refused,
    assert_same_end,
    checkpoints,
    fingerprint,
    knn_records,
    logged_steps,
    make_images,
    metrics,
    no_pictures,
    run_cli,
    write_recipe,
)
from xmoco.data import open_images
from xmoco.evaluate.features import backbone_features
from xmoco.nn.backbones import build_backbone
from xmoco.nn.weights import read_card
from xmoco.report.history import read_history
from xmoco.train.run_folder import RunFolder

METRICS = {"feature_spread", "effective_rank", "positive_probability", "consistency_gap"}
PACE = {"learning_rate", "images_per_second", "waiting", "fill/bank"}


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_images(tmp_path_factory.mktemp("data") / "gratings")


@pytest.fixture(scope="module")
def finished(images: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Outcome]:
    folder = tmp_path_factory.mktemp("finished")
    recipe = write_recipe(folder / "fast.yaml", images)
    return folder / "run", run_cli("pretrain", "--recipe", recipe, "--out", folder / "run")


@pytest.fixture
def quick() -> Iterator[None]:
    with no_pictures():
        yield


@pytest.fixture
def recipe(images: Path, tmp_path: Path) -> Path:
    return write_recipe(tmp_path / "fast.yaml", images)


def test_a_run_leaves_everything_under_its_name(finished: tuple[Path, Outcome]) -> None:
    run, outcome = finished
    assert_done(outcome)
    names = {re.sub(r"^events\..*", "events.*", path.name) for path in run.iterdir()}
    assert names == {
        "config.yaml",
        "environment.json",
        "metrics.jsonl",
        "train.log",
        "checkpoints",
        "backbone.safetensors",
        "report.html",
        "events.*",
    }
    assert [path.name for path in checkpoints(run)] == [
        "step-000000008.ckpt",
        "step-000000016.ckpt",
    ]
    others = {path.name for path in (run / "checkpoints").iterdir() if path.suffix != ".ckpt"}
    assert others == {"newest"}  # the name of the last one, by which a lost one is noticed
    assert [path.name for path in run.parent.iterdir() if path.name.startswith(".")] == []


def test_a_run_says_what_it_does_and_where_its_results_are(
    finished: tuple[Path, Outcome],
) -> None:
    run, outcome = finished
    for text in (
        "128 images, 4 classes",
        "labels are only used by the kNN monitor",
        "0.0675 × 16/256 = 0.00421875",
        "batch norm: plain",
        "XMoCo on tiny, ",
        "random views of an image: 2 of 16 px\n",
        "step 16/16",
        "chance 4.174",  # ln(64 + 1)
        f"weights  {run / 'backbone.safetensors'}",
        f"report   {run / 'report.html'}",
    ):
        assert text in outcome.stdout
    log = (run / "train.log").read_text()
    assert "128 images, 4 classes" in log
    assert "kNN of xmoco" in log
    environment = json.loads((run / "environment.json").read_text())
    assert environment["device"] == "cpu"
    assert environment["batch_norm"] == "plain"
    assert environment["method"]["title"] == "XMoCo"
    assert environment["method"]["reference_levels"] == {"chance": pytest.approx(math.log(65))}
    assert {"started", "commit", "versions", "machine", "processes"} <= environment.keys()


def test_values_have_terms_pace_and_metrics(finished: tuple[Path, Outcome]) -> None:
    run, _ = finished
    assert logged_steps(run) == [4, 8, 12, 16]
    terms = [
        f"{kind}_{side}" for kind in ("labels", "consistency") for side in ("source", "target")
    ]
    for line in metrics(run):
        if "values" not in line:
            continue
        values = line["values"]
        assert {"loss"} | PACE | METRICS | {"label_entropy"} <= values.keys()
        total = sum(values[f"loss/{term}"] for term in terms)
        assert values["loss"] == pytest.approx(total, rel=1e-5)
        assert values["fill/bank"] == min(1, line["step"] * 16 / 64)
        assert values["images_per_second"] > 0
        assert 0 <= values["waiting"] <= 1
        assert line["epoch"] == line["step"] / 8


def test_knn_records_name_their_protocol(finished: tuple[Path, Outcome]) -> None:
    run, _ = finished
    assert knn_records(run) == [("raw pixels", 0), ("untrained", 0), ("xmoco", 1), ("xmoco", 2)]
    for record in (line for line in metrics(run) if line.get("measure") == "knn_top1"):
        assert record["unit"] == "%"
        assert 0 <= record["value"] <= 100
        assert record["work"] == "gratings-tiny-2ep"
        assert record["protocol"] | {"features": "", "epoch": 0, "step": 0} == {
            "data": "folder gratings",
            "split": "leave one out",
            "features": "",
            "size": 16,
            "k": 5,
            "voters": 5,
            "temperature": 0.1,
            "bank_images": 128,
            "judged_images": 128,
            "epoch": 0,
            "step": 0,
        }


def test_what_it_makes_of_negatives_is_recorded(finished: tuple[Path, Outcome]) -> None:
    run, _ = finished
    records = [line for line in metrics(run) if line.get("measure", "").startswith("similar")]
    assert [(r["measure"], r["protocol"]["epoch"], r["protocol"]["step"]) for r in records] == [
        (measure, epoch, step)
        for epoch, step in ((0, 0), (2, 16))  # few images: not after every epoch
        for measure in (
            "similarity_gap",
            "similarity_gap_unrelated",
            "similarity_evenness",
            "similar_of_own_class",
        )
    ]
    for record in records:
        assert (record["subject"], record["work"]) == ("xmoco", "gratings-tiny-2ep")
        assert record["protocol"]["images"] == 48
        assert record["protocol"]["temperature"] == 0.2


def test_the_report_opens_by_itself(finished: tuple[Path, Outcome]) -> None:
    html = (finished[0] / "report.html").read_text()
    assert html.count("data:image/") >= 3  # curves, views, neighbours
    assert "<h2>Negatives</h2>" in html
    assert "|q_s·B_t − q_t·B_s| by epoch" in html
    assert not re.findall(r"(?:src|href)=[\"'](?!data:|#)", html)


def test_tensorboard_can_read_the_events(finished: tuple[Path, Outcome]) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(finished[0]))
    events.Reload()
    tags = events.Tags()["scalars"]
    assert {"loss", "learning_rate", "knn/xmoco", "knn/untrained", "knn/raw pixels"} <= set(tags)
    assert [scalar.step for scalar in events.Scalars("loss")] == [4, 8, 12, 16]


def test_the_backbone_is_the_trained_one(finished: tuple[Path, Outcome], images: Path) -> None:
    run, _ = finished
    state = torch.load(checkpoints(run)[-1], weights_only=True)["task"]
    trained = build_backbone("tiny", "cifar")
    start = "encoder.backbone."
    trained.load_state_dict(
        {name.removeprefix(start): value for name, value in state.items() if start in name[:17]}
    )
    config = RunFolder(run).config()
    pictures = open_images(config.data, "train")
    assert pictures is not None
    device = torch.device("cpu")
    for where in (run, run / "backbone.safetensors"):
        loaded = xmoco.load_backbone(where)
        assert not loaded.training
        assert torch.equal(
            backbone_features(loaded, pictures, config.input, device).vectors,
            backbone_features(trained, pictures, config.input, device).vectors,
        )
    untrained = build_backbone("tiny", "cifar").state_dict()
    assert not torch.equal(loaded.conv1.weight, untrained["conv1.weight"])


@pytest.mark.usefixtures("quick")
def test_weights_load_into_torchvision_by_hand(tmp_path: Path) -> None:
    few = make_images(tmp_path / "few", each=8)
    recipe = write_recipe(
        tmp_path / "resnet18.yaml",
        few,
        input={"size": 32},
        model={"backbone": "resnet18", "stem": "imagenet"},
        train={"epochs": 1},
    )
    result = xmoco.pretrain(recipe, out=tmp_path / "run")
    model = torchvision.models.resnet18()
    fit = model.load_state_dict(load_file(result.weights), strict=False)
    assert set(fit.missing_keys) == {"fc.weight", "fc.bias"}
    assert not fit.unexpected_keys
    model.fc = torch.nn.Identity()
    pixels = torch.randn(4, 3, 32, 32)
    with torch.no_grad():
        assert_close(model.eval()(pixels), xmoco.load_backbone(result.weights)(pixels))


@pytest.mark.usefixtures("quick")
def test_the_size_to_be_judged_at_goes_from_the_recipe_into_the_weights(tmp_path: Path) -> None:
    few = make_images(tmp_path / "few", each=8)
    sizes = {"size": 16, "eval_size": 24}
    recipe = write_recipe(tmp_path / "two.yaml", few, input=sizes, train={"epochs": 1})
    result = xmoco.pretrain(recipe, out=tmp_path / "run")
    log = (result.folder / "train.log").read_text()
    assert "random views of an image: 2 of 16 px, evaluated on centre crops of 24 px\n" in log
    records = [line for line in metrics(result.folder) if line.get("measure") == "knn_top1"]
    assert {record["protocol"]["size"] for record in records} == {24}
    (judged,) = xmoco.evaluate_knn(result.folder, few, ks=(records[-1]["protocol"]["k"],))
    assert (judged.protocol["size"], judged.value) == (24, pytest.approx(records[-1]["value"]))
    assert xmoco.load_transform(result.folder)(Image.new("RGB", (50, 40))).shape == (3, 24, 24)


def test_evaluate_knn_prints_and_appends_records(
    finished: tuple[Path, Outcome], images: Path, tmp_path: Path
) -> None:
    run, _ = finished
    before = fingerprint(run)
    file = tmp_path / "deep" / "results.jsonl"
    for _ in range(2):
        arguments = ("--k", "5", "--k", "9", "--records", file)
        outcome = run_cli("evaluate", "knn", run, images, *arguments)
        assert_done(outcome)
    records = [json.loads(line) for line in file.read_text().splitlines()]
    assert [record["protocol"]["k"] for record in records] == [5, 9, 5, 9]
    knn = [line for line in metrics(run) if line.get("measure") == "knn_top1"]
    monitored = [line for line in knn if line["subject"] == "xmoco"][-1]
    assert records[0]["value"] == monitored["value"]
    assert (records[0]["work"], monitored["work"]) == ("gratings-tiny", "gratings-tiny-2ep")
    assert records[0]["subject"] == "xmoco"
    assert f"{records[1]['value']:.2f} %" in outcome.stdout
    assert fingerprint(run) == before
    outcome = run_cli("evaluate", "knn", run / "backbone.safetensors", images)
    assert_done(outcome)
    assert all(f" {k} " in outcome.stdout for k in (10, 20, 100, 200))


@pytest.mark.usefixtures("quick")
def test_python_gives_the_same_bits_as_the_command_line(
    finished: tuple[Path, Outcome], recipe: Path, images: Path, tmp_path: Path
) -> None:
    result = xmoco.pretrain(
        recipe, data=images, out=tmp_path / "run", overrides=["knn_k=5"], epochs=2, batch=16
    )
    assert result.folder == tmp_path / "run"
    assert_same_end(result.folder, finished[0])
    assert result.weights.read_bytes() == (finished[0] / "backbone.safetensors").read_bytes()
    assert result.report.is_file()
    assert result.knn.keys() == {"raw pixels", "untrained", "xmoco"}
    assert result.seconds > 0


@pytest.mark.usefixtures("quick")
def test_another_seed_gives_other_weights(
    finished: tuple[Path, Outcome], recipe: Path, tmp_path: Path
) -> None:
    outcome = run_cli("pretrain", "-r", recipe, "--out", tmp_path / "run", "seed=1", "knn_every=0")
    assert_done(outcome)
    other = load_file(tmp_path / "run" / "backbone.safetensors")
    ours = load_file(finished[0] / "backbone.safetensors")
    assert not torch.equal(other["layer1.0.conv1.weight"], ours["layer1.0.conv1.weight"])
    assert knn_records(tmp_path / "run") == []


@pytest.mark.usefixtures("quick")
def test_weights_start_a_new_run_from_another(
    finished: tuple[Path, Outcome], recipe: Path, tmp_path: Path
) -> None:
    """A rate next to nothing leaves the backbone where it started."""
    changes = ("epochs=1", "learning_rate=1e-12", "seed=3", "knn_every=0")
    arguments = ("--recipe", recipe, "--out", tmp_path / "run", "--weights", finished[0], *changes)
    assert_done(run_cli("pretrain", *arguments))
    began, now = (load_file(r / "backbone.safetensors") for r in (finished[0], tmp_path / "run"))
    for name, value in began.items():
        if "running" not in name and "num_batches" not in name:
            assert_close(now[name], value)


def test_unlabelled_images_train_without_knn(tmp_path: Path) -> None:
    flat = tmp_path / "flat"
    flat.mkdir()
    for number, path in enumerate(sorted(make_images(tmp_path / "tree", each=8).rglob("*.png"))):
        path.rename(flat / f"{number}.png")
    recipe = write_recipe(tmp_path / "fast.yaml", flat, train={"epochs": 1})
    outcome = run_cli("pretrain", "--recipe", recipe, "--out", tmp_path / "run")
    assert_done(outcome)
    assert "32 images, no labels" in outcome.stdout
    assert "kNN" not in outcome.stdout
    assert knn_records(tmp_path / "run") == []
    assert (tmp_path / "run" / "report.html").is_file()


@pytest.mark.usefixtures("quick")
def test_deep_folders_and_archives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same images, deep in folders or in a compressed archive, give the same weights."""
    make_images(tmp_path / "deep" / "wrapped" / "train", each=8)
    with tarfile.open(tmp_path / "deep.tar.xz", "w:xz") as archive:
        archive.add(tmp_path / "deep", "deep")
    monkeypatch.chdir(tmp_path)
    write_recipe(tmp_path / "fast.yaml", "nowhere", train={"epochs": 1})
    for source in ("deep", "deep.tar.xz"):
        out = f"run-{source}"
        assert_done(run_cli("pretrain", "--recipe", "fast.yaml", "--data", source, "--out", out))
        assert ("xmoco", 1) in knn_records(tmp_path / out)
    assert_same_end(tmp_path / "run-deep", tmp_path / "run-deep.tar.xz")


@pytest.mark.usefixtures("quick")
def test_a_test_split_is_judged_by_the_training_split(tmp_path: Path) -> None:
    make_images(tmp_path / "set" / "train", each=8)
    make_images(tmp_path / "set" / "val", each=5)
    recipe = write_recipe(tmp_path / "fast.yaml", tmp_path / "set", train={"epochs": 1})
    run = tmp_path / "run"
    assert_done(run_cli("pretrain", "--recipe", recipe, "--out", run, "knn_images=16"))
    protocols = [line["protocol"] for line in metrics(run) if line.get("measure") == "knn_top1"]
    assert len(protocols) == 3
    for protocol in protocols:
        assert protocol["split"] == "test"
        assert (protocol["bank_images"], protocol["judged_images"]) == (16, 16)


@pytest.mark.usefixtures("quick")
def test_accumulation_and_the_second_method(recipe: Path, tmp_path: Path) -> None:
    changes = ("method=mocov2plus", "accumulate=2", "epochs=1", "knn_every=0")
    run = tmp_path / "run"
    assert_done(run_cli("pretrain", "--recipe", recipe, "--out", run, *changes))
    values = metrics(run)[-1]["values"]
    assert {name for name in values if name.startswith("loss/")} == {
        "loss/contrast_source",
        "loss/contrast_target",
    }
    assert values.keys() >= METRICS
    # Parts of a step enter the banks one by one: 8 steps of 2 parts of 8 images.
    state = torch.load(checkpoints(run)[-1], weights_only=True)["task"]
    assert state["loss.banks._extra_state"] == 128


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    ("method", "title", "views", "changes"),
    [
        ("simclr", "SimCLR", "2 of 16 px", []),
        ("byol", "BYOL", "2 of 16 px", ["predictor_hidden=16", "optim=lars"]),
        ("barlowtwins", "Barlow Twins", "2 of 16 px", ["optim=lars", "clip=true"]),
        ("supervised", "Supervised", "1 of 16 px", []),
        (
            "swav",
            "SwAV",
            "2 of 16 px and 3 of 8 px",
            ["prototypes=8", "local_crops=3", "local_size=8", "queue_length=32"],
        ),
    ],
)
def test_methods_without_banks(
    recipe: Path, tmp_path: Path, method: str, title: str, views: str, changes: list[str]
) -> None:
    """Nothing is said of banks, and every view and memory that there is."""
    run = tmp_path / "run"
    arguments = (f"method={method}", *changes, "epochs=1")
    outcome = run_cli("pretrain", "--recipe", recipe, "--out", run, *arguments)
    assert_done(outcome)
    assert f"{title} on tiny, " in outcome.stdout
    assert f"random views of an image: {views}\n" in outcome.stdout
    assert "bank" not in outcome.stdout.replace(str(run), "")
    learned = method == "supervised"
    assert ("trains on labels\n" in outcome.stdout) == learned
    assert ("labels are only used by the kNN monitor\n" in outcome.stdout) != learned
    assert knn_records(run) == [("raw pixels", 0), ("untrained", 0), (method, 1)]
    values = [line["values"] for line in metrics(run) if "values" in line]
    assert all(math.isfinite(value) for line in values for value in line.values())
    assert {name for name in values[-1] if name.startswith("fill/")} == (
        {"fill/queue"} if method == "swav" else set()
    )
    assert xmoco.load_backbone(run)(torch.zeros(1, 3, 16, 16)).shape == (1, 128)


@pytest.mark.parametrize("dry", [False, True])
def test_labels_that_are_not_there_cannot_be_learned(
    recipe: Path, tmp_path: Path, dry: bool
) -> None:
    run = tmp_path / "run"
    how = ("--dry-run",) if dry else ("--out", run)
    outcome = run_cli("pretrain", "-r", recipe, *how, "method=supervised", "labels=none")
    assert_refused(outcome, "has no labels, from which method=supervised learns")
    assert not run.exists()


@pytest.mark.usefixtures("quick")
def test_runs_without_a_name_get_one_of_their_own(
    recipe: Path, images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "gratings-xmoco").mkdir(parents=True)
    outcome = run_cli("pretrain", "--recipe", recipe, "epochs=1", "knn_every=0")
    assert_done(outcome)
    assert (tmp_path / "runs" / "gratings-xmoco-2" / "backbone.safetensors").is_file()
    assert "runs/gratings-xmoco-2/report.html" in outcome.stdout


@pytest.mark.usefixtures("quick")
def test_a_bank_larger_than_the_set_is_worth_a_warning(recipe: Path, tmp_path: Path) -> None:
    changes = ("bank_length=200", "epochs=1", "knn_every=0")
    outcome = run_cli("pretrain", "--recipe", recipe, "--out", tmp_path / "run", *changes)
    assert_done(outcome)
    assert "warning: a bank of 200 keys is larger than the 128 images" in outcome.stdout
    assert "lower bank_length" in (tmp_path / "run" / "train.log").read_text()


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("preload_gib", ["4", "0"])
def test_one_unreadable_image_in_a_hundred_is_named_and_replaced(
    tmp_path: Path, preload_gib: str
) -> None:
    images = make_images(tmp_path / "images")
    broken = images / "class2" / "007.png"
    broken.write_bytes(broken.read_bytes()[:100])
    recipe = write_recipe(tmp_path / "fast.yaml", images, train={"epochs": 1})
    run = tmp_path / "run"
    outcome = run_cli("pretrain", "-r", recipe, "--out", run, f"preload_gib={preload_gib}")
    assert_done(outcome)
    (line,) = (run / "unreadable.txt").read_text().splitlines()
    assert line.startswith(f"{broken}\t")
    if preload_gib != "0":
        assert "warning: 1 image could not be read" in outcome.stdout


@pytest.mark.usefixtures("quick")
def test_what_is_not_in_the_paper_has_another_name(tmp_path: Path) -> None:
    """Lest its figures be taken for the paper's: in records, weights and the report."""
    few = make_images(tmp_path / "few")
    recipe = write_recipe(
        tmp_path / "plus.yaml", few, method={"weak_keys": True}, train={"epochs": 1}
    )
    result = xmoco.pretrain(recipe, out=tmp_path / "run")
    assert "xmoco+" in result.knn
    assert "xmoco" not in result.knn
    assert read_card(result.weights)[0].method == "xmoco+"
    assert read_history(tmp_path / "run").method == "xmoco+"
