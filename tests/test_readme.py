"""README.md keeps its word: its code runs, its commands exist, its tables are up to date."""

import importlib
import json
import math
import re
import shlex
from dataclasses import asdict
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import typer
import yaml
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

import xmoco
from xmoco.cli import app
from xmoco.data.label_file import read_label_file
from xmoco.data.torchvision_sets import SPLIT_ARGUMENTS
from xmoco.data.transfer_sets import HELD_OUT_PERCENT, TRANSFER_SETS
from xmoco.data.trees import FolderTree
from xmoco.evaluate.classify import FINETUNE, LINEAR
from xmoco.evaluate.grid import GRIDS
from xmoco.evaluate.logistic import STRENGTHS
from xmoco.nn.backbones import build_backbone
from xmoco.nn.weights import BackboneCard, save_backbone
from xmoco.records import Record, append_records
from xmoco.settings import load_config

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
DOCUMENTS = {
    name: (ROOT / name).read_text("utf-8")
    for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/measurements.md")
}


def blocks(language: str, text: str = README) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)


def shell_lines(text: str) -> list[str]:
    lines = "".join(blocks("sh", text)).splitlines()
    return [bare for line in lines if (bare := line.partition("#")[0].strip())]


def xmoco_commands() -> list[str]:
    """Commands in blocks, those that torchrun starts included, and whole ones within sentences."""
    in_blocks = [line.partition("-m xmoco ")[2] or line for line in shell_lines(README)]
    commands = [line.removeprefix("xmoco ") for line in in_blocks if "make" not in line]
    in_text = re.findall(r"`xmoco ([a-z]+ [^`]*)`", README)
    return [line for line in commands + in_text if not line.startswith("source ")]


def python_block(containing: str) -> str:
    (block,) = (block for block in blocks("python") if containing in block)
    return block


def run(code: str) -> dict[str, Any]:
    names: dict[str, Any] = {}
    exec(compile(code, "README.md", "exec"), names)
    return names


@pytest.fixture
def photos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a finished run in runs/photos, as some blocks expect."""
    folder = tmp_path / "runs" / "photos"
    folder.mkdir(parents=True)
    grey = (0.5, 0.5, 0.5)
    card = BackboneCard("resnet18", "imagenet", 128, grey, grey, "xmoco", 1, 0)
    save_backbone(build_backbone("resnet18"), card, folder / "backbone.safetensors")
    monkeypatch.chdir(tmp_path)
    return folder


def test_the_loop_runs_as_it_stands(capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    names = run(python_block("XMoCoLoss"))
    assert len(capsys.readouterr().out.splitlines()) == 4
    assert names["loss"].item() > 0
    assert set(names["terms"]) == {
        "labels_source",
        "labels_target",
        "consistency_source",
        "consistency_target",
    }
    assert names["criterion"].banks.enqueued == 4 * 32
    slow, fast = (names[name].fc.weight for name in ("momentum_encoder", "encoder"))
    assert slow.grad is None
    assert not torch.equal(slow, fast)


def test_weights_load_as_shown(photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Image.new("RGB", (200, 150), "grey").save("cat.jpg")
    features = run(python_block("load_backbone("))["features"]
    assert features.shape == (1, 512)
    result = run(python_block("load_file("))["result"]
    assert result.missing_keys == ["fc.weight", "fc.bias"]
    assert not result.unexpected_keys
    assert "fc.weight" in capsys.readouterr().out


def test_the_stem_for_small_images_loads_as_described(photos: Path) -> None:
    replacements = re.findall(r"`(model\.\w+ = torch\.nn\.[^`]*)`", README)
    assert len(replacements) == 2
    code = "import torch, torchvision\nmodel = torchvision.models.resnet18()\n"
    model = run(code + "\n".join(replacements))["model"]
    assert model.load_state_dict(
        build_backbone("resnet18", "cifar").state_dict(), strict=False
    ).missing_keys == ["fc.weight", "fc.bias"]


def test_pretraining_from_python_has_real_settings(
    photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {}

    def pretrain(recipe: str, out: str, **settings: Any) -> SimpleNamespace:
        asked.update(load_config(recipe, settings=settings).train)
        return SimpleNamespace(weights=photos, knn={}, report="report.html")

    def evaluate_knn(
        weights: Path, data: str, *, ks: tuple[int, ...], options: xmoco.EvalOptions
    ) -> None:
        assert (weights, data, ks) == (photos, "patterns", (20,))
        assert options == xmoco.EvalOptions(device="cpu")

    monkeypatch.setattr(xmoco, "pretrain", pretrain, raising=False)
    monkeypatch.setattr(xmoco, "evaluate_knn", evaluate_knn, raising=False)
    run(python_block("xmoco.pretrain("))
    assert asked["epochs"] == 3


def test_there_are_commands_of_every_kind() -> None:
    verbs = {line.split()[0] for line in xmoco_commands()}
    assert verbs == {"--help", "pretrain", "evaluate", "export", "demo", "settings", "tables"}


@pytest.mark.parametrize("line", xmoco_commands())
def test_commands_parse(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for block in blocks("yaml"):  # a recipe of one's own; its first line is a comment, its name
        first = block.splitlines()[0]
        Path(first.removeprefix("# ")).write_text(block, encoding="utf-8")
    if line == "--help":
        return
    options = parse(line)
    if line.startswith("pretrain"):
        load_config(options["recipe"] or "imagenet", options["settings"] or [])
    elif line.startswith("settings"):
        load_config(options["recipe"])


def parse(line: str) -> dict[str, Any]:
    """The options of a command; an error where one of them does not exist. Nothing is run."""
    command: Any = typer.main.get_command(app)
    arguments = shlex.split(line)
    context = command.make_context("xmoco", list(arguments), resilient_parsing=False)
    while hasattr(command, "resolve_command"):
        name, command, arguments = command.resolve_command(context, arguments)
        context = command.make_context(name, list(arguments), parent=context)
    return dict(context.params)


@pytest.mark.parametrize("line", ["pretrain --recipy demo", "evaluate knn runs/first", "train"])
def test_wrong_commands_do_not_parse(line: str) -> None:
    with pytest.raises(Exception, match=r"recipy|data|train"):
        parse(line)


def test_other_commands_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for text in DOCUMENTS.values():
        for line in shell_lines(text):
            program, *arguments = line.split()
            if program == "make":
                assert re.search(rf"^{arguments[0]}:", makefile, flags=re.MULTILINE), line
            if program.endswith("python"):
                assert (ROOT / arguments[0]).is_file(), line


@pytest.mark.parametrize("name", DOCUMENTS)
def test_links_lead_somewhere(name: str) -> None:
    text, folder = DOCUMENTS[name], (ROOT / name).parent
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        assert target.startswith("https://") or (folder / target).exists(), target
    headings = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    for anchor in re.findall(r"\]\(#([^)]+)\)", text):
        assert anchor in [heading.lower().replace(" ", "-") for heading in headings]


def test_the_picture_is_small() -> None:
    assert (ROOT / "docs" / "demo.png").stat().st_size < 300_000


def test_names_of_sets_are_those_there_are() -> None:
    (sentence,) = re.findall(r"The paper's ten sets are (.*?), or `all`", README)
    assert re.findall(r"`(\w+)`", sentence) == [name.lower() for name in TRANSFER_SETS]
    (names,) = re.findall(r"`torchvision:NAME`, for (.*?) \(", README)
    assert set(re.split(r", | or ", names)) == set(SPLIT_ARGUMENTS)


def test_metrics_are_those_of_the_paper() -> None:
    text = (ROOT / "src" / "xmoco" / "report" / "paper_transfer.yaml").read_text(encoding="utf-8")
    metrics: dict[str, str] = yaml.safe_load(text)["sets"]
    (names,) = re.findall(r"mean per class for (.*?), 11-point mAP for VOC2007, top-1", README)
    named = dict.fromkeys(re.split(r", | and ", names), "mean per class")
    assert metrics == dict.fromkeys(TRANSFER_SETS, "top-1") | named | {"VOC2007": "11-point mAP"}


def test_figures_that_are_settings_are_those_in_force() -> None:
    paper, small = GRIDS["paper"], GRIDS["small"]
    for fact in (
        f"one of {len(STRENGTHS)} strengths",
        f"`--grid paper` has {len(paper.points)} points of {paper.steps:,} steps each",
        f"`--grid small` {len(small.points)} of {small.steps:,}",
        f"{HELD_OUT_PERCENT} % of every class in `train/`",
        f"({load_config('imagenet').data.preload_gib:g} GiB unless you change it)",
    ):
        assert fact in README, fact


def test_the_label_file_is_read_as_shown(tmp_path: Path) -> None:
    (table,) = (block for block in blocks("") if block.startswith("image,labels"))
    (tmp_path / "labels.csv").write_text(table, encoding="utf-8")
    assert read_label_file(FolderTree(tmp_path), "") == {
        "street/0012.jpg": {"car", "person"},
        "sky.jpg": set(),
    }


def test_files_named_for_contributors_exist() -> None:
    named = re.findall(r"`(\w+/[\w/]+\.py)`", DOCUMENTS["CONTRIBUTING.md"])
    assert len(named) > 30
    for name in named:
        inside = ROOT if name.startswith("benchmarks/") else ROOT / "src" / "xmoco"
        assert (inside / name).is_file(), name


@pytest.fixture(scope="module")
def generator(benchmarks: None) -> ModuleType:
    return importlib.import_module("readme")


@pytest.fixture(scope="module")
def tables(benchmarks: None) -> ModuleType:
    return importlib.import_module("tables")


def test_tables_are_up_to_date(generator: ModuleType) -> None:
    advice = "run: python benchmarks/readme.py"
    assert generator.up_to_date(README) == README, advice
    page = generator.MEASUREMENTS.read_text(encoding="utf-8")
    assert generator.measurements_page(generator.RESULTS) == page, advice


def record(subject: str, value: float, epoch: int, **protocol: Any) -> dict[str, Any]:
    settings = {"data": "folder pets (train)", "split": "test", "size": 64, "k": 20}
    sizes = {"temperature": 0.1, "bank_images": 3000, "judged_images": 1000, "epoch": epoch}
    return {
        "measure": "knn_top1",
        "value": value,
        "unit": "%",
        "subject": subject,
        "work": "pets-resnet18-2ep",
        "protocol": settings | sizes | protocol,
        "seed": 7,
        "commit": "0123456789ab",
        "versions": {"torch": "2.11.0"},
        "machine": {"processor": "Abacus", "threads": 2},
        "time": "2026-01-02T03:04:05Z",
    }


def test_a_training_judged_by_other_sizes_than_its_baselines_names_them(
    tables: ModuleType, tmp_path: Path
) -> None:
    records = [record("raw pixels", 10.04, 0, size=32), record("xmoco", 44.44, 2, size=48)]
    lines = "".join(json.dumps(line) + "\n" for line in records)
    (tmp_path / "recipe-pets.jsonl").write_text(lines, encoding="utf-8")
    text = tables.results_tables(tmp_path)
    assert "| raw pixels, 32 px |  | 10.0 % |  |\n| XMoCo, 48 px | 2 | 44.4 % |  |\n" in text


def test_tables_hold_the_last_records_and_their_protocol(
    tables: ModuleType, tmp_path: Path
) -> None:
    records = [
        record("raw pixels", 10.04, 0),
        record("xmoco", 33.3, 1, run_seconds=61.6),
        record("xmoco", 11.1, 2, run_seconds=99.9),
        record("xmoco", 44.44, 2, run_seconds=61.6),  # measured again
    ]
    lines = "".join(json.dumps(line) + "\n" for line in records)
    (tmp_path / "recipe-pets.jsonl").write_text(lines, encoding="utf-8")
    text = tables.results_tables(tmp_path)
    assert "| raw pixels |  | 10.0 % |  |\n| XMoCo | 1 | 33.3 % |  |\n" in text
    assert "| XMoCo | 2 | 44.4 % | 62 s |" in text
    assert "11.1" not in text
    for fact in (
        "folder pets;",
        "1,000 test images judged by 3,000 training images",
        "k 20, temperature 0.1",
        "seed 7",
        "Abacus, 2 threads",
        "torch 2.11.0",
        "commit 0123456789ab",
        "2026-01-02",
        "(recipe-pets.jsonl)",
    ):
        assert fact in text, fact


def test_of_a_long_training_the_quarters_are_shown(tables: ModuleType, tmp_path: Path) -> None:
    records = [record("untrained", 1.0, 0)]
    records += [record("xmoco", epoch / 10, epoch) for epoch in range(7, 205, 7)]
    records += [record("mocov2plus", 7.7, 50)]  # not finished yet
    lines = "".join(json.dumps(line) + "\n" for line in records)
    (tmp_path / "recipe-pets.jsonl").write_text(lines, encoding="utf-8")
    rows = re.findall(r"^\| ([\w +]+) \| (\d*) \|", tables.results_tables(tmp_path), re.MULTILINE)
    assert rows == [
        ("untrained backbone", ""),
        *(("XMoCo", epoch) for epoch in ("49", "98", "147", "203")),
        ("MoCo v2+", "50"),
    ]


def protocol_record(
    measure: str, value: float, subject: str, work: str = "pets-resnet18", **protocol: Any
) -> Record:
    """As ``Case.record`` makes them."""
    epoch = {"xmoco": 200, "supervised": 40, "untrained": 0}[subject]
    shared = {"data": "archive pets.tar (train)", "backbone": "resnet18", "size": 32}
    shared |= {"epoch": epoch, "split": "test", "judged_images": 1500}
    return Record(measure, value, "%", subject, work, shared | protocol, seed=0)


def judged(subject: str, value: float) -> list[Record]:
    """What benchmarks/protocols.py appends for a backbone, in its order."""
    birds: dict[str, Any] = {"work": "birds-resnet18", "set": "birds", "judged_images": 99}
    birds |= {"data": "folder birds (train), 80 % kept", "metric": "mean per class"}
    knn = [protocol_record("knn_top1", value + k / 100, subject, k=k) for k in (10, 20, 100, 200)]
    frozen = protocol_record("transfer_frozen", value, subject, name="transfer, frozen", **birds)
    tuned = [
        protocol_record(
            f"finetune_top{k}", value + k, subject, **asdict(FINETUNE), label_fraction=fraction
        )
        for fraction in (0.01, 0.1, 1.0)
        for k in (1, 5)
    ]
    grid = GRIDS["small"]
    name = grid.protocol(grid.points[0]).name
    end_to_end = protocol_record("transfer_end_to_end", value, subject, name=name, **birds)
    linear = [
        protocol_record(f"linear_top{k}", value + k, subject, **asdict(LINEAR[preset]))
        for preset in ("paper", "moco")
        for k in (1, 5)
    ]
    return [*knn, frozen, *tuned, end_to_end, *linear]


def test_protocols_are_rows_and_backbones_columns(tables: ModuleType, tmp_path: Path) -> None:
    file = tmp_path / "protocols-pets-resnet18.jsonl"
    append_records(file, judged("untrained", 10))
    append_records(file, judged("supervised", 50.04)[:4])
    append_records(file, judged("xmoco", 30))
    append_records(file, judged("xmoco", 40))  # measured again
    text = tables.results_tables(tmp_path)
    heading, _, *rows = [line for line in text.splitlines() if line.startswith("|")]
    assert text.startswith("**pets-resnet18**\n")
    assert (
        heading == "| protocol | XMoCo, 200 epochs | supervised, 40 epochs | untrained backbone |"
    )
    assert rows == [
        "| kNN, k 20 | 40.2 % | 50.2 % | 10.2 % |",
        "| kNN, k 200 | 42.0 % | 52.0 % | 12.0 % |",
        "| linear (paper) | 41.0 % |  | 11.0 % |",
        "| linear (MoCo) | 41.0 % |  | 11.0 % |",
        "| fine-tune, 1 % of the labels | 41.0 % |  | 11.0 % |",
        "| fine-tune, 10 % of the labels | 41.0 % |  | 11.0 % |",
        "| fine-tune, 100 % of the labels | 41.0 % |  | 11.0 % |",
        "| transfer to birds, frozen, mean per class | 40.0 % |  | 10.0 % |",
        "| transfer to birds, end to end (small grid), mean per class | 40.0 % |  | 10.0 % |",
    ]
    assert "archive pets.tar, 1,500 test images / folder birds, 99 test images;" in text
    assert "images of 32 px" in text
    assert tables.measurements_page(tmp_path).endswith("There are no such records yet.\n")


def test_images_of_several_sizes_have_columns_of_their_own(
    tables: ModuleType, tmp_path: Path
) -> None:
    file = tmp_path / "protocols-pets-resnet18.jsonl"
    moco = {"name": "linear (MoCo)", "size": 48, "crop_size": 32}
    large = protocol_record("linear_top1", 50, "xmoco", **moco)
    small = protocol_record("linear_top1", 45, "xmoco", **moco | {"size": 32})
    neighbours = protocol_record("knn_top1", 30, "xmoco", k=200, size=48)
    append_records(file, [large, small, neighbours])
    append_records(file, [*judged("xmoco", 40)[:4], *judged("untrained", 10)[:4]])
    text = tables.results_tables(tmp_path)
    heading, _, *rows = [line for line in text.splitlines() if line.startswith("|")]
    assert heading == (
        "| protocol | XMoCo, 200 epochs, 32 px | XMoCo, 200 epochs, 48 px "
        "| untrained backbone, 32 px |"
    )
    assert rows == [
        "| kNN, k 20 | 40.2 % |  | 10.2 % |",
        "| kNN, k 200 | 42.0 % | 30.0 % | 12.0 % |",
        "| linear (MoCo) | 45.0 % | 50.0 % |  |",
    ]
    assert "images of 48 px / images of 32 px; crops of 32 px;" in text


def test_crops_of_several_sizes_have_rows_of_their_own(tables: ModuleType, tmp_path: Path) -> None:
    file = tmp_path / "protocols-pets-resnet18.jsonl"
    for value, crops in ((40, 32), (50, 48)):
        facts = {"name": "linear (MoCo)", "size": 48, "crop_size": crops}
        append_records(file, [protocol_record("linear_top1", value, "xmoco", **facts)])
    _, _, *rows = [r for r in tables.results_tables(tmp_path).splitlines() if r.startswith("|")]
    assert rows == [
        "| linear (MoCo), crops of 32 px | 40.0 % |",
        "| linear (MoCo), crops of 48 px | 50.0 % |",
    ]


def test_different_weights_of_one_name_have_columns_of_their_own(
    tables: ModuleType, tmp_path: Path
) -> None:
    file = tmp_path / "protocols-pets-resnet18.jsonl"
    for value, digest in ((40, "aaaaaaaaaaaa"), (50, "bbbbbbbbbbbb")):
        record = protocol_record("knn_top1", value, "xmoco", k=200, digest=digest)
        append_records(file, [record])
    append_records(file, [protocol_record("knn_top1", 10, "untrained", k=200)])
    heading, _, row = [
        line for line in tables.results_tables(tmp_path).splitlines() if line.startswith("|")
    ]
    names = "XMoCo, 200 epochs (aaaaaa) | XMoCo, 200 epochs (bbbbbb) | untrained backbone"
    assert heading == f"| protocol | {names} |"
    assert row == "| kNN, k 200 | 40.0 % | 50.0 % | 10.0 % |"


def test_the_time_of_a_run_tells_how_often_knn_was_in_it(
    tables: ModuleType, tmp_path: Path
) -> None:
    for every, words in ((1, "every epoch;"), (50, "every 50 epochs;")):
        settings = f"monitor:\n  knn_every: {every}\n"
        line = json.dumps(record("xmoco", 44.44, 2, run_seconds=61.6, settings=settings))
        (tmp_path / "recipe-pets.jsonl").write_text(line + "\n", encoding="utf-8")
        assert f"the time includes kNN {words}" in tables.results_tables(tmp_path)


def test_speeds_stand_beside_lightly_and_above_their_stages(
    tables: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    speed = importlib.import_module("speed")
    config = load_config("cifar10", ["batch=512"])
    options = SimpleNamespace(work="cifar10", results=tmp_path)

    def race(**speeds_and_gib: tuple[float, float]) -> None:
        outcomes = {}
        for name, (images_per_second, gib) in speeds_and_gib.items():
            outcomes[name] = outcome = speed.Outcome(config, steps=60)
            outcome.speeds, outcome.waiting, outcome.gib = [images_per_second], [0.0123], gib
        speed.show(outcomes, options)

    race(xmoco=(1111, 1.0), lightly=(5000, 4.0), **{"lightly (its defaults)": (2500, 4.25)})
    race(xmoco=(20000, 3.21), lightly=(5000, 4.0))
    race(mocov2plus=(22000, 3.0))  # without lightly
    speed.show_stages({"images": 5.0, "gone": 1.0, "views": 1.0}, config, options)
    speed.show_stages({"images": 1.0, "views": 3.0}, config, options)
    text = tables.speed_tables(tmp_path)
    for line in (
        "**speed-cifar10-resnet18**",
        "| XMoCo | bf16 | 20,000 | 4.00 | 3.2 GiB | 1.2 % |",
        "| lightly, at its best | bf16 | 5,000 | 1.00 | 4.0 GiB | 1.2 % |",
        "| lightly, its defaults | fp32 | 2,500 | 0.50 | 4.2 GiB | 1.2 % |",
        "| MoCo v2+ | bf16 | 22,000 |  | 3.0 GiB | 1.2 % |",
        "**speed-cifar10-resnet18: stages of a step of XMoCo**",
        "| images | 1.00 | 25.0 % |",
        "| views | 3.00 | 75.0 % |",
    ):
        assert line in text.splitlines(), line
    assert "CIFAR-10; batch 512; K 4096; images of 32 px;" in text
    assert "1,111" not in text
    assert "gone" not in text
    assert tables.results_tables(tmp_path) == ""


def test_the_rest_is_on_a_page_of_its_own(tables: ModuleType, tmp_path: Path) -> None:
    def loss(value: float, launch: str, **protocol: Any) -> Record:
        settings = {"batch": 512, "k": [10, 20], "launch": launch, "settings": "x" * 999}
        return Record("loss_ms", value, "ms", "xmoco", "loss-512", settings | protocol, seed=0)

    append_records(tmp_path / "loss.jsonl", [loss(9, "eager"), loss(2, "graph", off=1e-5)])
    append_records(tmp_path / "loss.jsonl", [loss(1.23456, "eager", values={"a": 1})])
    strange = [
        Record("fluffiness", 12345.6, "hairs", "cat", "fur", {}, seed=3),
        Record("weight", 4, "kg", "cat", "fur", {}, seed=3),
        Record("weight", 9, "kg", "dog", "fur", {}, seed=3),
        Record("weight", 8, "kg", "dog", "fur", {}, seed=4),
    ]
    append_records(tmp_path / "speed.jsonl", strange)
    text = tables.measurements_page(tmp_path)
    loss_part, speed_part = text.split("## ")[1:]
    assert "| work | settings | loss ms |\n" in loss_part
    assert "| loss-512 | launch eager | 1.235 ms |\n" in loss_part
    assert "| loss-512 | launch graph | 2.000 ms |\n" in loss_part
    assert "9.000" not in loss_part
    assert "\n\nloss ms; xmoco; batch 512; k 10, 20; seed 0; " in loss_part
    assert "| work | settings | cat: fluffiness | cat: weight | dog: weight |\n" in speed_part
    assert "| fur | seed 3 | 12,346 hairs | 4.000 kg | 9.000 kg |\n" in speed_part
    assert "| fur | seed 4 |  |  | 8.000 kg |\n" in speed_part
    assert tables.speed_tables(tmp_path) == ""


short_texts = st.text("abc", min_size=1, max_size=2)
protocols = st.dictionaries(
    st.sampled_from(["data", "k", "launch", "stage", "epoch"]),
    st.one_of(short_texts, st.integers()),  # which look different if they are
)


@given(st.lists(st.tuples(short_texts, short_texts, short_texts, protocols), min_size=1))
def test_any_record_has_its_cell(
    tables: ModuleType, measured: list[tuple[str, str, str, dict[str, Any]]]
) -> None:
    """Of records that measure the same, the last has it."""
    records = [
        asdict(Record(measure, float(number), "s", subject, work, protocol, seed=0))
        for number, (measure, subject, work, protocol) in enumerate(measured, start=1000)
    ]
    table = tables.plain_table(Path("some.jsonl"), records)
    found = re.findall(r" ([\d,]+) s (?=\|)", table)
    last = {
        (r["work"], r["subject"], r["measure"], json.dumps(r["protocol"], sort_keys=True)): r
        for r in records
    }
    assert sorted(found) == sorted(tables.significant(r["value"]) for r in last.values())


@given(st.floats(1e-9, 1e9) | st.floats(-1e9, -1e-9))
def test_four_digits_are_enough(tables: ModuleType, value: float) -> None:
    shown = tables.significant(value).replace(",", "")
    assert math.isclose(float(shown), value, rel_tol=5.1e-4)
    assert len(re.sub(r"^-?0\.0*|[-.]", "", shown)) in range(4, 11)


def test_only_generated_parts_are_rewritten(generator: ModuleType, tmp_path: Path) -> None:
    before = README.replace("<!-- results:end -->", "typed by hand\n<!-- results:end -->")
    after = generator.up_to_date(before)
    assert "typed by hand" not in after
    assert after == generator.up_to_date(README)
