"""README.md and docs/ keep their word: code runs, commands exist, tables are up to date."""

import importlib
import inspect
import json
import math
import re
import shlex
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torch.testing import assert_close
from typer.testing import CliRunner

import xmoco
import xmoco.data.transfer_sets
import xmoco.demo
import xmoco.detect.evaluation
import xmoco.detect.finding
import xmoco.detect.tables
import xmoco.evaluate.classification
import xmoco.evaluate.transfer
import xmoco.export
import xmoco.planning
import xmoco.pretraining
import xmoco.report.tables
import xmoco.tables.running
from xmoco.cli import app
from xmoco.data.label_file import read_label_file
from xmoco.data.torchvision_sets import SPLIT_ARGUMENTS
from xmoco.data.transfer_sets import HELD_OUT_PERCENT, TRANSFER_SETS
from xmoco.data.trees import FolderTree
from xmoco.detect.courses import COURSES, course_of
from xmoco.detect.detector_files import DetectorCard, save_detector
from xmoco.detect.models import DESIGNS
from xmoco.errors import UserError
from xmoco.evaluate.classify import FINETUNE, LINEAR
from xmoco.evaluate.grid import GRIDS
from xmoco.evaluate.logistic import STRENGTHS
from xmoco.nn.backbones import build_backbone
from xmoco.nn.weights import BackboneCard, save_backbone
from xmoco.planning import AUTO_BASE
from xmoco.records import Measured, Record, append_records
from xmoco.settings import load_config
from xmoco.tables.definition import read_table
from xmoco.tables.plan import Asked, plan

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
"""What users read."""
TEXTS = {str(page.relative_to(ROOT)): page.read_text("utf-8") for page in PAGES}
FOR_USERS = "\n".join(TEXTS.values())
DOCUMENTS = TEXTS | {
    name: (ROOT / name).read_text("utf-8") for name in ("CONTRIBUTING.md", "CHANGELOG.md")
}


def blocks(language: str, text: str = FOR_USERS) -> list[str]:
    found = re.findall(r"^```(\w*)\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
    return [block for spoken, block in found if spoken == language]


def shell_lines(text: str) -> list[str]:
    lines = "".join(blocks("sh", text)).splitlines()
    return [bare for line in lines if (bare := line.partition("#")[0].strip())]


def xmoco_commands() -> list[str]:
    """Commands in blocks, those that torchrun starts included, and whole ones within sentences."""
    in_blocks = [line.partition("-m xmoco ")[2] or line for line in shell_lines(FOR_USERS)]
    commands = [line.removeprefix("xmoco ") for line in in_blocks if "make" not in line]
    in_text = re.findall(r"`xmoco ([a-z]+ [^`]*)`", FOR_USERS)
    found = [line for line in commands + in_text if not line.startswith("source ")]
    return list(dict.fromkeys(found))


def python_block(containing: str) -> str:
    (block,) = (block for block in blocks("python") if containing in block)
    return block


TESTED_BLOCKS = (
    "import XMoCoLoss",
    "import BatchXMoCoLoss",
    "load_backbone(",
    "load_file(",
    "xmoco.pretrain(",
    "eval_size=",
    "load_detector(",
)
"""Each by something that only it contains; every one is run by a test below."""


def test_every_block_is_run() -> None:
    assert len({python_block(containing) for containing in TESTED_BLOCKS}) == len(blocks("python"))


def run(code: str) -> dict[str, Any]:
    names: dict[str, Any] = {}
    exec(compile(code, "a page", "exec"), names)
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
    names = run(python_block("import XMoCoLoss"))
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


def test_the_loop_without_banks_runs_as_it_stands(capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    names = run(python_block("import BatchXMoCoLoss"))
    assert len(capsys.readouterr().out.splitlines()) == 2
    assert {name.rpartition("_")[0] for name in names["terms"]} == {"labels", "consistency"}
    assert_close(names["loss"], sum(names["terms"].values()) / 2)


def test_weights_load_as_shown(photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Image.new("RGB", (200, 150), "grey").save("cat.jpg")
    features = run(python_block("load_backbone("))["features"]
    assert features.shape == (1, 512)
    result = run(python_block("load_file("))["result"]
    assert result.missing_keys == ["fc.weight", "fc.bias"]
    assert not result.unexpected_keys
    assert "fc.weight" in capsys.readouterr().out


def test_detectors_are_used_as_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("runs/street").mkdir(parents=True)
    grey = (0.5, 0.5, 0.5)
    card = DetectorCard(
        *("faster-rcnn-c4", "tiny", "imagenet", ("cat", "dog"), 64, grey, grey, "xmoco"),
        *("1x", "street", 0),
    )
    torch.manual_seed(0)
    save_detector(card.built(), card, Path("runs/street/detector.safetensors"))
    Image.new("RGB", (60, 40), "grey").save("photo.jpg")
    found = run(python_block("load_detector("))["found"]
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(found["boxes"]) > 0
    assert {line.split()[0] for line in lines} <= {"cat", "dog"}


def test_the_schedules_of_detectors_are_those_in_force() -> None:
    page = TEXTS["docs/detection.md"]
    for name, course in COURSES.items():
        first, second = course.milestones
        row = f"| `{name}` | {course.steps:,} | {first:,}, {second:,} | {course.sizes[0]} to 800 |"
        assert row in page, row
    for model in DESIGNS:
        assert f"`{model}`" in page


def test_the_stem_for_small_images_loads_as_described(photos: Path) -> None:
    replacements = re.findall(r"`(model\.\w+ = torch\.nn\.[^`]*)`", FOR_USERS)
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


def test_evaluation_from_python_runs_as_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = inspect.signature(xmoco.evaluate_knn)

    def evaluate_knn(*given: Any, **named: Any) -> list[Record]:
        asked = real.bind(*given, **named).arguments
        assert asked["options"] == xmoco.EvalOptions(device="cpu", eval_size=48)
        return [
            Record("knn_top1", 90.0 + k, "%", "xmoco", "patterns-tiny", {"k": k}, 0)
            for k in asked["ks"]
        ]

    monkeypatch.setattr(xmoco, "evaluate_knn", evaluate_knn, raising=False)
    run(python_block("eval_size="))
    assert capsys.readouterr().out == "20 110.0\n200 290.0\n"


def test_there_are_commands_of_every_kind() -> None:
    verbs = {line.split()[0] for line in xmoco_commands()}
    assert verbs == {
        *("--help", "pretrain", "evaluate", "detect", "export", "demo", "settings", "tables")
    }


class StandIns:
    """In the place of what takes long or needs data: takes what the real function takes, checks
    what it was asked for, and gives back what the command shows."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.called: list[str] = []
        for module, name, answer in (
            (xmoco.pretraining, "pretrain", self.pretrain),
            (xmoco.planning, "show_plan", self.plan),
            (xmoco.evaluate.classification, "evaluate_knn", self.records),
            (xmoco.evaluate.classification, "evaluate_linear", self.records),
            (xmoco.evaluate.classification, "evaluate_finetune", self.records),
            (xmoco.data.transfer_sets, "open_transfer_sets", self.transfer_sets),
            (xmoco.evaluate.transfer, "evaluate_transfer", self.transfer),
            (xmoco.detect.evaluation, "evaluate_detect", self.detectors),
            (xmoco.detect.finding, "detect", self.found),
            (xmoco.report.tables, "draw_transfer", lambda asked: [asked["out"]]),
            (xmoco.detect.tables, "draw_detection", lambda asked: [asked["out"]]),
            (xmoco.tables.running, "run_table", self.table),
            (xmoco.export, "export", self.export),
            (xmoco.export, "how_to_load", lambda asked: f"load {asked}"),
            (xmoco.demo, "run_demo", lambda _: {}),
        ):
            monkeypatch.setattr(module, name, self.standing_in_for(getattr(module, name), answer))

    def standing_in_for(self, real: Any, answer: Callable[[dict[str, Any]], Any]) -> Any:
        def stand_in(*given: Any, **named: Any) -> Any:
            self.called.append(real.__name__)
            return answer(inspect.signature(real).bind(*given, **named).arguments)

        return stand_in

    @staticmethod
    def pretrain(asked: dict[str, Any]) -> Any:
        if not asked["resume"]:
            StandIns.plan(asked)
        return SimpleNamespace(weights="backbone.safetensors", report="report.html")

    @staticmethod
    def plan(asked: dict[str, Any]) -> Any:
        assert asked["recipe"] is not None or asked["data"] is not None  # for auto
        return load_config(asked["recipe"] or AUTO_BASE, asked["overrides"])

    @staticmethod
    def records(asked: dict[str, Any]) -> list[Record]:
        assert asked.get("preset", "paper") in LINEAR
        assert isinstance(asked["options"], xmoco.EvalOptions)
        protocol = {"name": "a protocol", "data": "images", "judged": "others", "k": 20}
        protocol |= {"split": "test", "judged_images": 10, "size": 32}
        return [Record("linear_top1", 50.0, "%", "xmoco", "work", protocol, 0)]

    def detectors(self, asked: dict[str, Any]) -> list[Record]:
        course_of(asked["schedule"], asked["model"], images=16, batch=asked["batch"])
        (record,) = self.records(asked)
        record.protocol.update(schedule=asked["schedule"], metric="COCO")
        return [replace(record, measure="box_ap50", seed=seed) for seed in asked["seeds"]]

    @staticmethod
    def found(asked: dict[str, Any]) -> Any:
        assert 0 <= asked["threshold"] <= 1
        return SimpleNamespace(objects=3, images=1, json=asked["out"] / "detections.json")

    @staticmethod
    def transfer_sets(asked: dict[str, Any]) -> list[Any]:
        known = {name.lower() for name in TRANSFER_SETS}
        assert all(name.lower() in known or "/" in name for name in asked["sources"])
        return asked["sources"]

    def transfer(self, asked: dict[str, Any]) -> Record:
        assert asked["mode"] in ("frozen", "end-to-end")
        assert asked["grid"] in GRIDS
        (record,) = self.records(asked)
        record.protocol.update(set=asked["data"], metric="top-1")
        return record

    @staticmethod
    def table(asked: dict[str, Any]) -> Any:
        assert plan(asked["job"].table, asked["job"].asked)
        return SimpleNamespace(files=[asked["job"].out], problem=None)

    @staticmethod
    def export(asked: dict[str, Any]) -> Path:
        assert asked["to"] in ("torchvision", "timm", "onnx", "detectron2")
        return asked["out"] or Path("exported")


@pytest.mark.parametrize("line", xmoco_commands())
def test_commands_run(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for block in blocks("yaml"):  # a recipe of one's own; its first line is a comment, its name
        first = block.splitlines()[0]
        Path(first.removeprefix("# ")).write_text(block, encoding="utf-8")
    stand_ins = StandIns(monkeypatch)
    result = CliRunner().invoke(app, shlex.split(line))
    assert result.exit_code == 0, (result.output, result.exception)
    assert stand_ins.called or line.startswith(("--help", "settings")) or line == "tables"


@pytest.mark.parametrize(
    "line",
    [
        "pretrain --recipy demo",
        "pretrain --recipe demo epocs=3",
        "evaluate knn runs/first",
        "evaluate linear runs/first patterns --preset ours",
        "export runs/first --to keras",
        "train",
    ],
)
def test_wrong_commands_do_not_run(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    StandIns(monkeypatch)
    assert CliRunner().invoke(app, shlex.split(line)).exit_code != 0


def test_other_commands_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for text in DOCUMENTS.values():
        for line in shell_lines(text):
            program, *arguments = line.split()
            if program == "make":
                assert re.search(rf"^{arguments[0]}:", makefile, flags=re.MULTILINE), line
            if program.endswith("python"):
                assert (ROOT / arguments[0]).is_file(), line


def anchors(text: str) -> set[str]:
    """Of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("name", DOCUMENTS)
def test_links_lead_somewhere(name: str) -> None:
    folder = (ROOT / name).parent
    for target in re.findall(r"\]\(([^)]+)\)", DOCUMENTS[name]):
        path, _, anchor = target.partition("#")
        if not target.startswith("https://"):
            file = folder / path if path else ROOT / name
            assert file.exists(), target
            assert not anchor or anchor in anchors(file.read_text("utf-8")), target


def test_every_page_is_linked_from_the_first() -> None:
    for name in TEXTS:
        assert name == "README.md" or f"]({name})" in TEXTS["README.md"], name


def test_the_first_page_is_read_in_three_minutes() -> None:
    assert len(TEXTS["README.md"].splitlines()) <= 220


def test_no_page_names_a_folder_of_the_machine_it_was_written_on() -> None:
    for name, text in DOCUMENTS.items():
        assert not re.search(r"(?<![\w.~-])/(home|root|work|tmp|mnt)/", text), name


def test_pictures_are_small() -> None:
    pictures = [*(ROOT / "docs").glob("*.png")]
    assert pictures
    for picture in pictures:
        assert picture.stat().st_size < 300_000


def test_names_of_sets_are_those_there_are() -> None:
    (sentence,) = re.findall(r"The paper's ten sets are (.*?), or `all`", FOR_USERS)
    assert re.findall(r"`(\w+)`", sentence) == [name.lower() for name in TRANSFER_SETS]
    (names,) = re.findall(r"`torchvision:NAME`, for (.*?) \(", FOR_USERS)
    assert set(re.split(r", | or ", names)) == set(SPLIT_ARGUMENTS)


def test_metrics_are_those_of_the_paper() -> None:
    text = (ROOT / "src" / "xmoco" / "report" / "paper_transfer.yaml").read_text(encoding="utf-8")
    metrics: dict[str, str] = yaml.safe_load(text)["sets"]
    (names,) = re.findall(r"mean per class for (.*?), 11-point mAP for VOC2007, top-1", FOR_USERS)
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
        assert fact in FOR_USERS, fact


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


@pytest.fixture(scope="module")
def faults(benchmarks: None) -> ModuleType:
    return importlib.import_module("fault_tables")


@pytest.fixture(scope="module")
def plain(benchmarks: None) -> ModuleType:
    return importlib.import_module("plain_tables")


@pytest.fixture
def place(benchmarks: None, tmp_path: Path) -> Any:
    """Records in a temporary folder, shown on a page in the root."""
    return importlib.import_module("told").Place(tmp_path)


@pytest.mark.parametrize("name", DOCUMENTS)
def test_tables_are_up_to_date(generator: ModuleType, name: str) -> None:
    text = DOCUMENTS[name]
    assert generator.up_to_date(text, ROOT / name) == text, "run: python benchmarks/readme.py"


def test_every_part_stands_on_one_page(generator: ModuleType) -> None:
    text = "\n".join(DOCUMENTS[str(page.relative_to(ROOT))] for page in generator.pages())
    parts = re.findall(r"^<!-- ([\w-]+):begin -->$", text, flags=re.MULTILINE)
    assert sorted(parts) == sorted(generator.PARTS)


def test_every_file_of_records_is_shown(generator: ModuleType) -> None:
    for file in generator.RESULTS.glob("*.jsonl"):
        assert any(f"benchmarks/results/{file.name})" in text for text in DOCUMENTS.values()), file


def test_only_generated_parts_are_rewritten(generator: ModuleType) -> None:
    page, text = ROOT / "README.md", TEXTS["README.md"]
    end = "<!-- speed-in-brief:end -->"
    after = generator.up_to_date(text.replace(end, f"typed by hand\n{end}"), page)
    assert after == text
    assert generator.up_to_date(f"By hand.\n{text}", page) == f"By hand.\n{text}"


def rows_of(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("|")]


def mostly_empty_columns(text: str) -> list[str]:
    """Headings of columns that have nothing to say in more than half of their rows."""
    found = []
    for table in re.findall(r"(?:^\|.*\|\n?)+", text, flags=re.MULTILINE):
        headings, _, *rows = (
            [cell.strip() for cell in line[1:-1].split("|")] for line in table.splitlines()
        )
        for column, heading in zip(zip(*rows, strict=True), headings, strict=True):
            if sum(cell in ("", "–") for cell in column) > len(column) / 2:
                found.append(heading)
    return found


@pytest.mark.parametrize("name", TEXTS)
def test_no_column_is_mostly_empty(name: str) -> None:
    assert mostly_empty_columns(TEXTS[name]) == []


def test_the_rule_finds_such_columns() -> None:
    assert mostly_empty_columns("| a | b |\n|---|---|\n| 1 | – |\n| 2 |  |\n") == ["b"]


# Learning


def knn(subject: str, value: float, epoch: int, **protocol: Any) -> Record:
    settings = {"data": "folder pets (train)", "split": "test", "size": 64, "k": 20}
    sizes = {"temperature": 0.1, "bank_images": 3000, "judged_images": 1000, "epoch": epoch}
    return Record(
        "knn_top1",
        value,
        "%",
        subject,
        "pets-resnet18-2ep",
        settings | sizes | protocol,
        seed=7,
        commit="0123456789ab",
        versions={"torch": "2.11.0"},
        machine={"processor": "Abacus", "threads": 2},
        time="2026-01-02T03:04:05Z",
    )


def learning(tables: ModuleType, place: Any, *records: Record) -> str:
    file = place.results / "recipe-pets.jsonl"
    file.unlink(missing_ok=True)
    append_records(file, records)
    return str(tables.learning_tables(place, "recipe-*.jsonl"))


def test_a_training_judged_by_other_sizes_than_its_baselines_names_them(
    tables: ModuleType, place: Any
) -> None:
    text = learning(
        tables, place, knn("raw pixels", 10.04, 0, size=32), knn("xmoco", 44.44, 2, size=48)
    )
    assert rows_of(text)[2:] == [
        "| raw pixels, 32 px | 10.0 % |",
        "| XMoCo, 2 epochs, 48 px | 44.4 % |",
    ]


def test_tables_hold_the_last_records_and_their_protocol(tables: ModuleType, place: Any) -> None:
    text = learning(
        tables,
        place,
        knn("raw pixels", 10.04, 0),
        knn("xmoco", 33.3, 1, run_seconds=61.6),
        knn("xmoco", 11.1, 2, run_seconds=99.9),
        knn("xmoco", 44.44, 2, run_seconds=61.6),  # measured again
    )
    assert rows_of(text)[2:] == [
        "| raw pixels | 10.0 % |",
        "| XMoCo, 1 epoch | 33.3 % |",
        "| XMoCo, 2 epochs | 44.4 % |",
    ]
    for fact in (
        "Time of training: XMoCo 62 s.",
        "One seed (7);",
        "folder pets;",
        "1,000 test images judged by 3,000 training images",
        "k 20, temperature 0.1",
        "Abacus, 2 threads",
        "torch 2.11.0",
        "commit 0123456789ab",
        "2026-01-02.",
        "(recipe-pets.jsonl)",
    ):
        assert fact in text, fact


def test_of_a_long_training_the_quarters_are_shown(tables: ModuleType, place: Any) -> None:
    records = [knn("untrained", 1.0, 0)]
    records += [knn("xmoco", epoch / 10, epoch) for epoch in range(7, 205, 7)]
    records += [knn("mocov2plus", 7.7, 50)]  # not finished yet
    rows = [row.split("|")[1].strip() for row in rows_of(learning(tables, place, *records))[2:]]
    assert rows == [
        "untrained backbone",
        *(f"XMoCo, {epochs} epochs" for epochs in (49, 98, 147, 203)),
        "MoCo v2+, 50 epochs",
    ]


def test_the_time_of_a_run_tells_how_often_knn_was_in_it(tables: ModuleType, place: Any) -> None:
    for every, words in ((1, "every epoch."), (50, "every 50 epochs.")):
        settings = f"monitor:\n  knn_every: {every}\n"
        text = learning(tables, place, knn("xmoco", 44, 2, run_seconds=61.6, settings=settings))
        assert f"XMoCo 62 s, with kNN {words}" in text


def test_methods_are_compared_if_they_were_measured(tables: ModuleType, place: Any) -> None:
    assert tables.methods_table(place) == ""
    values = {"byol": (17, 80), "swav": (16, 95)}, {"swav": (15, 90)}  # once more
    for measured in values:
        for method, (before, after) in measured.items():
            pair = [knn("untrained", before, 0), knn(method, after, 6)]
            append_records(place.results / "methods.jsonl", pair)
    assert rows_of(tables.methods_table(place))[2:] == [
        "| SwAV, 6 epochs | 15.0 % | 90.0 % |",
        "| BYOL, 6 epochs | 17.0 % | 80.0 % |",
    ]


def test_a_record_that_a_table_cannot_show_is_named(tables: ModuleType, place: Any) -> None:
    with pytest.raises(UserError, match=r"recipe-pets\.jsonl, line 2: protocol\.k = '20' must be"):
        learning(tables, place, knn("xmoco", 1, 1), knn("xmoco", 1, 1, k="20"))


# Protocols


def protocol_record(
    measure: str, value: float, subject: str, work: str = "pets-resnet18", **protocol: Any
) -> Record:
    """As ``Evaluation.record`` makes them."""
    epoch = {"xmoco": 200, "supervised": 40, "untrained": 0}[subject]
    shared = {"data": "archive pets.tar (train)", "backbone": "resnet18", "size": 32}
    shared |= {"epoch": epoch, "split": "test", "judged_images": 1500}
    if measure == "knn_top1":
        shared |= {"temperature": 0.1, "bank_images": 6000}
    if measure.startswith("linear"):
        shared |= {"label_fraction": 1.0}
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


def test_protocols_are_rows_and_backbones_columns(
    tables: ModuleType, plain: ModuleType, place: Any
) -> None:
    file = place.results / "protocols-pets-resnet18.jsonl"
    append_records(file, judged("untrained", 10))
    append_records(file, judged("supervised", 50.04)[:4])
    append_records(file, judged("xmoco", 30))
    append_records(file, judged("xmoco", 40))  # measured again
    text = tables.protocols_tables(place)
    heading, _, *rows = rows_of(text)
    assert (
        heading == "| protocol | XMoCo, 200 epochs | supervised, 40 epochs | untrained backbone |"
    )
    assert rows == [
        "| kNN, k 20 | 40.2 % | 50.2 % | 10.2 % |",
        "| kNN, k 200 | 42.0 % | 52.0 % | 12.0 % |",
        "| linear (paper) | 41.0 % | – | 11.0 % |",
        "| linear (MoCo) | 41.0 % | – | 11.0 % |",
        "| fine-tune, 1 % of the labels | 41.0 % | – | 11.0 % |",
        "| fine-tune, 10 % of the labels | 41.0 % | – | 11.0 % |",
        "| fine-tune, 100 % of the labels | 41.0 % | – | 11.0 % |",
        "| transfer to birds, frozen, mean per class | 40.0 % | – | 10.0 % |",
        "| transfer to birds, end to end (small grid), mean per class | 40.0 % | – | 10.0 % |",
    ]
    assert "archive pets.tar, 1,500 test images / folder birds, 99 test images;" in text
    assert "images of 32 px" in text
    assert plain.other_tables(place) == ""


def test_images_of_several_sizes_have_columns_of_their_own(tables: ModuleType, place: Any) -> None:
    file = place.results / "protocols-pets-resnet18.jsonl"
    moco = {"name": "linear (MoCo)", "size": 48, "crop_size": 32}
    large = protocol_record("linear_top1", 50, "xmoco", **moco)
    small = protocol_record("linear_top1", 45, "xmoco", **moco | {"size": 32})
    neighbours = protocol_record("knn_top1", 30, "xmoco", k=200, size=48)
    append_records(file, [large, small, neighbours])
    append_records(file, [*judged("xmoco", 40)[:4], *judged("untrained", 10)[:4]])
    text = tables.protocols_tables(place)
    heading, _, *rows = rows_of(text)
    assert heading == (
        "| protocol | XMoCo, 200 epochs, 32 px | XMoCo, 200 epochs, 48 px "
        "| untrained backbone, 32 px |"
    )
    assert rows == [
        "| kNN, k 20 | 40.2 % | – | 10.2 % |",
        "| kNN, k 200 | 42.0 % | 30.0 % | 12.0 % |",
        "| linear (MoCo) | 45.0 % | 50.0 % | – |",
    ]
    assert "images of 48 px / images of 32 px; crops of 32 px;" in text


def test_crops_of_several_sizes_have_rows_of_their_own(tables: ModuleType, place: Any) -> None:
    file = place.results / "protocols-pets-resnet18.jsonl"
    for value, crops in ((40, 32), (50, 48)):
        facts = {"name": "linear (MoCo)", "size": 48, "crop_size": crops}
        append_records(file, [protocol_record("linear_top1", value, "xmoco", **facts)])
    assert rows_of(tables.protocols_tables(place))[2:] == [
        "| linear (MoCo), crops of 32 px | 40.0 % |",
        "| linear (MoCo), crops of 48 px | 50.0 % |",
    ]


def test_different_weights_of_one_name_have_columns_of_their_own(
    tables: ModuleType, place: Any
) -> None:
    file = place.results / "protocols-pets-resnet18.jsonl"
    for value, digest in ((40, "aaaaaaaaaaaa"), (50, "bbbbbbbbbbbb")):
        record = protocol_record("knn_top1", value, "xmoco", k=200, digest=digest)
        append_records(file, [record])
    append_records(file, [protocol_record("knn_top1", 10, "untrained", k=200)])
    heading, _, row = rows_of(tables.protocols_tables(place))
    names = "XMoCo, 200 epochs (aaaaaa) | XMoCo, 200 epochs (bbbbbb) | untrained backbone"
    assert heading == f"| protocol | {names} |"
    assert row == "| kNN, k 200 | 40.0 % | 50.0 % | 10.0 % |"


def test_of_changed_recipes_shared_protocols_are_shown(tables: ModuleType, place: Any) -> None:
    file = place.results / "changed-recipes.jsonl"
    append_records(file, [knn("untrained", 5, 0, changes="batch=1")])
    for changes, value in (("batch=1", 10), ("batch=2", 20)):
        append_records(file, [knn("xmoco", value, 2, changes=changes)])
    append_records(file, [protocol_record("knn_top1", 30, "xmoco", k=200, changes="batch=1")])
    assert rows_of(tables.changed_recipes_table(place)) == [
        "| changes | kNN, k 20 |",
        "| --- | ---: |",
        "| `batch=1` | 10.0 % |",
        "| `batch=2` | 20.0 % |",
    ]


def test_comparisons_are_means_over_seeds(tables: ModuleType, place: Any) -> None:
    assert tables.comparison_tables(place) == ""

    def trial(subject: str, changes: str, value: float, seed: int, k: int = 20) -> Record:
        facts = {"split": "test", "size": 128, "k": k, "changes": changes, "recipe_digest": "ab"}
        return Record("knn_top1", value, "%", subject, "pets-resnet18-9ep", facts, seed)

    trials = [
        trial("xmoco", "batch=128 hue=0.1", 99, 0),
        trial("xmoco", "batch=128 hue=0.1", 70, 0),  # again
        trial("xmoco", "batch=128 hue=0.1", 72, 1),
        trial("xmoco+", "batch=128 hue=0.1 teacher=keys", 75, 0),
        trial("xmoco+", "batch=128 hue=0.1 teacher=keys", 74, 0, k=200),
    ]
    append_records(place.results / "compare-pets.jsonl", trials)
    text = tables.comparison_tables(place)
    assert "**pets-resnet18-9ep, judged at 128 px on test images; recipe ab**" in text
    assert rows_of(text) == [
        "| entry | changes | kNN, k 20 | kNN, k 200 | seeds |",
        "| --- | --- | ---: | ---: | ---: |",
        "| XMoCo |  | 71.0 ± 1.4 % | – | 2 |",
        "| XMoCo+ | `teacher=keys` | 75.0 % | 74.0 % | 1 |",
    ]
    assert "All have `batch=128 hue=0.1`. Seeds 0, 1;" in text


def test_sizes_and_times_of_a_comparison_are_told(tables: ModuleType, place: Any) -> None:
    """Of runs that shared a GPU the time is no measure of speed, and that is said."""

    def trial(seed: int, size: int, seconds: float, value: float, **others: Any) -> Record:
        facts = {"split": "test", "size": size, "k": 20, "changes": "", "recipe_digest": "ab"}
        facts |= {"train_seconds": seconds} | others
        return Record("knn_top1", value, "%", "xmoco", "pets-resnet18-9ep", facts, seed)

    alone = [trial(seed, size, 60.0 * (1 + seed), 70 + seed) for seed in (0, 1) for size in (96, 8)]
    append_records(place.results / "compare-pets.jsonl", alone)
    text = tables.comparison_tables(place)
    assert "**pets-resnet18-9ep, judged on test images; recipe ab**" in text
    assert rows_of(text) == [
        "| entry | training | judged at | kNN, k 20 | seeds |",
        "| --- | ---: | ---: | ---: | ---: |",
        "| XMoCo | 1.5 min | 96 px | 70.5 ± 0.7 % | 2 |",
        "| XMoCo | 1.5 min | 8 px | 70.5 ± 0.7 % | 2 |",
    ]
    file = place.results / "compare-pets.jsonl"
    append_records(file, [trial(2, 8, 900.0, 70, runs_at_once=3)])
    assert "| XMoCo | 1.5 min | 8 px |" in tables.comparison_tables(place)  # of those alone
    append_records(file, [trial(0, 4, 900.0, 70, runs_at_once=3)])
    assert "| 15.0 min, 3 at once | 4 px |" in tables.comparison_tables(place)
    append_records(file, [trial(0, 2, 900.0, 70, watched_every=40)])
    assert "| 15.0 min, watched | 2 px |" in tables.comparison_tables(place)


def test_tables_stand_beside_the_paper(tables: ModuleType, plain: ModuleType, place: Any) -> None:
    assert tables.paper_tables(place) == ""

    def measured(one: Any, value: float, **changed: Any) -> Record:
        facts = {**one.trial.facts, **one.trial.told, "data": "archive pets.tar (train)", "k": 200}
        facts |= {"size": 128, "train_images": 90, "judged_images": 10} | changed
        subject, work, seed = one.trial.subject, one.trial.work, one.trial.seed
        return Record("knn_top1", value, "%", subject, work, facts, seed)

    runs = plan(read_table("xi"), Asked(data="pets", seeds=(0, 1), rows=("0.5", "0.9")))
    records = [measured(one, value) for one, value in zip(runs, (70, 75, 72, 75), strict=True)]
    records.append(measured(runs[0], 11, settings={"method": {"name": "older"}}))
    append_records(place.results / "tables.jsonl", records)
    text = tables.paper_tables(place)
    assert "### ξ, the share of a soft label given to the positive" in text
    assert "Trained on pets for 60 epochs, judged on test images." in text
    assert rows_of(text)[:4] == [
        "| ξ | kNN, k 200 | seeds | paper: kNN, k 200 |",
        "| --- | ---: | ---: | ---: |",
        "| 0.5 | 71.0 ± 1.4 % | 2 | 42.5 % |",
        "| 0.9 | 75.0 ± 0.0 % | 2 | 51.4 % |",
    ]
    assert "Not measured yet: 0.6, 0.7, 0.8, 1.0. By kNN, k 200, 1 of 1 pairs" in text
    assert "**With settings of former days: pets-resnet18-60ep**" in text
    assert "11.0 %" in rows_of(text)[-1]
    assert plain.other_tables(place) == ""


def test_the_headline_tells_size_seed_and_time(tables: ModuleType, place: Any) -> None:
    assert tables.headline(place) == ""
    run = Record(
        **asdict(knn("xmoco", 80, 200, run_seconds=408.0))
        | {"machine": {"gpus": ["Loom"], "processor": "Abacus", "threads": 2}}
    )
    append_records(place.results / "recipe-cifar10-resnet18-200ep.jsonl", [run])
    moco = {"name": "linear (MoCo)", "crop_size": 32}
    found = [
        protocol_record("linear_top1", 88.8, "xmoco", **moco),
        protocol_record("linear_top1", 91.2, "xmoco", **moco | {"size": 48}),
    ]
    append_records(place.results / "protocols-cifar10-resnet18.jsonl", found)
    text = tables.headline(place)
    assert "in 7 minutes on one Loom" in text
    assert "91.2 %" in text
    assert "(one seed (0); images shown at 48 px, 88.8 % at 32 px)" in text
    assert rows_of(tables.results_in_brief(place))[-1] == "| linear classifier | 88.8 % | 91.2 % |"


def test_the_headline_tells_who_is_ahead_on_photographs(tables: ModuleType, place: Any) -> None:
    work = "imagenette-q75-resnet18-200ep"
    current = tables.digest(load_config("imagenette"))
    facts = {"recipe": "imagenette", "recipe_digest": current, "changes": "", "split": "test"}
    input = {"size": 96, "eval_size": 128}
    facts |= {"epochs": 200, "size": 128, "k": 20}
    facts["settings"] = {"method": {"weak_keys": True}, "input": input}

    def add(subject: str, *values: float, seed: int = 0, day: int = 3, **changed: Any) -> str:
        """What the page says then; values are of one seed after the other."""
        records = [
            Record("knn_top1", value, "%", subject, work, facts | changed, number)
            for number, value in enumerate(values, seed)
        ]
        when = {"time": f"2026-01-0{day}T00:00:00Z"}
        append_records(
            place.results / "compare-imagenette.jsonl",
            [Record(**asdict(record) | when) for record in records],
        )
        return str(tables.headline(place))

    assert add("xmoco+", 85, 86) == ""  # nobody to compare with
    held_out = "validation, held out of the training images"
    for other in ({"k": 200}, {"split": held_out}, {"size": 64}, {"recipe_digest": "old"}):
        assert add("mocov2plus", 99, 99, day=2, **other) == ""
    assert add("mocov2plus", 87) == ""  # one seed against two
    text = add("mocov2plus", 88, seed=1)
    assert "The recipe `imagenette`: after 200 epochs of photographs, a vote of the 20" in text
    assert "images re-encoded as JPEG of quality 75 and shown at 128 px" in text
    ahead = "names with MoCo v2+ 87.5 ± 0.7 %, with XMoCo+ 85.5 ± 0.7 % of the test images rightly"
    assert ahead in text
    assert "px; all with keys of [weak views]" in text
    tried = [Record("knn_top1", 1, "%", one, "trial", {}, 0) for one in ("xmoco+", "mocov2plus")]
    append_records(place.results / "trials-imagenette.jsonl", tried)
    told = "px; each with settings of its own, found on images held out"
    assert told in tables.headline(place)
    assert ahead in add("xmoco+", 10, 10, changes="batch=8")  # a variant
    last = add("xmoco", 95, 95, settings={"method": {"weak_keys": False}, "input": input})
    assert "names with XMoCo 95.0 ± 0.0 %, with MoCo" in last
    assert "weak views" not in last
    assert "held out" not in last  # of that one there are no trials
    simclr = add("simclr", 96, 96, settings={"method": {"name": "simclr"}, "input": input})
    assert "names with SimCLR 96.0 ± 0.0 %" in simclr
    assert add("simclr", 99, 99, day=4, size=160) == simclr  # judged besides
    for rival in ("xmoco+", "mocov2plus+small views"):
        former = add(rival, 50, 51, day=5, recipe_digest="older")
    assert "An earlier recipe `imagenette`: after" in former
    assert "with MoCo v2+ with small views 50.5 ± 0.7 %" in former
    for rival in ("xmoco+", "mocov2plus"):
        gone = add(rival, 52, 53, day=6, recipe="mine.yaml", recipe_digest="gone")
    assert "An earlier recipe `mine.yaml`: after" in gone


def test_the_headline_tells_of_the_newest_long_run(tables: ModuleType, place: Any) -> None:
    def run(changes: str, day: int, subject: str = "xmoco+", **values: float) -> None:
        facts = {"recipe": "imagenette", "recipe_digest": "d", "changes": changes, "k": 20}
        facts |= {"split": "test", "epochs": 800, "train_seconds": 240.0}
        sizes = [int(size.removeprefix("at")) for size in values]
        told = {"settings": {"input": {"size": sizes[0], "eval_size": sizes[-1]}}}
        records = [
            Record("knn_top1", value, "%", subject, "w-q9", facts | {"size": size} | told, 0)
            for size, value in zip(sizes, values.values(), strict=True)
        ]
        when = {"time": f"2026-01-0{day}T00:00:00Z"}
        append_records(
            place.results / "compare-imagenette.jsonl",
            [Record(**asdict(record) | when) for record in records],
        )

    run("", 2, at96=88, at160=89)
    run("batch=8", 1, at96=98, at160=99)
    run("", 3, "mocov2plus", at96=98, at160=99)
    text = tables.headline(place)
    assert "After 800 epochs of photographs, trained in 4.0 min, a vote of the 20 nearest" in text
    assert "names 89.0 % rightly with XMoCo+ (one seed (0); images re-encoded as JPEG of" in text
    assert "quality 9 and shown at 160 px)." in text


def test_a_figure_of_fewer_seeds_than_its_row_says_so(tables: ModuleType, place: Any) -> None:
    facts = {"recipe_digest": "d", "changes": "", "size": 128, "split": "test"}
    found = [Record("knn_top1", 80, "%", "xmoco", "w", facts | {"k": 20}, seed) for seed in (0, 1)]
    found.append(Record("linear_top1", 81, "%", "xmoco", "w", facts, 1))
    append_records(place.results / "compare-imagenette.jsonl", found)
    row = rows_of(tables.comparison_tables(place))[-1]
    assert row == "| XMoCo | 80.0 ± 0.0 % | 81.0 % (1 seed) | 2 |"


def test_what_test_images_chose_is_not_shown(tables: ModuleType, place: Any) -> None:
    facts = {"recipe_digest": "d", "changes": "", "size": 128, "strengths": [1, 2]}

    def measured(value: float, **changed: Any) -> Record:
        return Record("logistic_top1", value, "%", "xmoco", "pets", facts | changed, 0)

    chosen = {"split": "test", "strength_chosen_on": "others"}
    records = [measured(91, split="test"), measured(81, **chosen), measured(71, split="validation")]
    append_records(place.results / "compare-pets.jsonl", records)
    text = tables.comparison_tables(place)
    assert "91.0 %" not in text
    assert "81.0 %" in text
    assert "71.0 %" in text


# Speed


def speed_record(subject: str, value: float, times: float | None, **protocol: Any) -> Record:
    facts = {"data": "CIFAR-10", "batch": 512, "size": 32, "bank_length": 4096}
    facts |= {"precision": "bf16", "rounds": [value], "steps": 60, "waiting": 0.0123}
    facts |= {"gpu_memory_gib": 3.21, "times_baseline": times} | protocol
    work = "speed-cifar10-resnet18"
    return Record("images_per_second", value, "images/s", subject, work, facts, seed=0)


def stage_record(stage: str, value: float, subject: str = "xmoco") -> Record:
    facts = {"data": "CIFAR-10", "batch": 512, "size": 32, "bank_length": 4096, "stage": stage}
    return Record("stage_ms", value, "ms", subject, "speed-cifar10-resnet18", facts, seed=0)


def test_speeds_stand_beside_the_best_baseline_and_above_their_stages(
    tables: ModuleType, place: Any
) -> None:
    append_records(
        place.results / "speed.jsonl",
        [
            speed_record("xmoco", 1111, 0.2),
            speed_record("lightly (its defaults)", 2500, 0.5, precision="fp32"),
            speed_record("xmoco", 20000, 4.0, rounds=[1.0, 2.0, 3.0]),
            speed_record("lightly", 5000, 1.0),
            speed_record("xmoco", 21000, None),  # later, beside nobody
            speed_record("xmoco (before)", 20500, None),
            speed_record("mocov2plus", 22000, None),
            *(stage_record(stage, 5.0) for stage in ("images", "gone")),
            *(stage_record(stage, value) for stage, value in (("images", 1.0), ("views", 3.0))),
            stage_record("views", 2.0, "mocov2plus"),
        ],
    )
    text = tables.speed_tables(place)
    assert text.startswith("### ResNet-18, CIFAR-10, 32 px\n")
    assert rows_of(text) == [
        "|  | precision | images/s | × best baseline | GPU memory | waiting |",
        "| --- | --- | ---: | ---: | ---: | ---: |",
        "| XMoCo | bf16 | 20,000 | 4.00 | 3.2 GiB | 1.2 % |",
        "| lightly, its defaults | fp32 | 2,500 | 0.50 | 3.2 GiB | 1.2 % |",
        "| lightly, at its best | bf16 | 5,000 | 1.00 | 3.2 GiB | 1.2 % |",
        "| MoCo v2+ | bf16 | 22,000 |  | 3.2 GiB | 1.2 % |",
        "| stage of a step | XMoCo | MoCo v2+ |",
        "| --- | ---: | ---: |",
        "| images | 1.00 ms, 25 % | – |",
        "| views | 3.00 ms, 75 % | 2.00 ms, 100 % |",
    ]
    assert "One seed (0); the median of 3 rounds / one round; CIFAR-10; batch 512; K 4,096;" in text
    row = rows_of(tables.speed_in_brief(place))[-1]
    assert row.startswith("| ResNet-18, CIFAR-10, 32 px | ")
    assert row.endswith("| 20,000 | 5,000 (lightly, at its best) | 4.00 | the median of 3 rounds |")


def test_the_encoder_alone_is_shown_where_it_is_a_bound(tables: ModuleType, place: Any) -> None:
    file = place.results / "speed.jsonl"
    append_records(file, [speed_record("xmoco", 200, 2.0), speed_record("encoder only", 100, 1.0)])
    assert "encoder" not in tables.speed_tables(place)
    append_records(file, [speed_record("encoder only", 150, 1.5, graph=True)])
    assert "| the encoder alone, compiled | bf16 | 150 |" in tables.speed_tables(place)
    append_records(file, [speed_record("encoder only", 300, 3.0)])
    assert "| the encoder alone, compiled | bf16 | 300 |" in tables.speed_tables(place)


def test_what_the_benchmark_measures_can_be_shown(
    tables: ModuleType, place: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    speed = importlib.import_module("speed")
    config = load_config("cifar10", ["batch=512"])
    options = SimpleNamespace(work="cifar10", results=place.results)
    outcomes = {}
    for name, images_per_second in (("xmoco", 20000), ("lightly", 5000)):
        outcomes[name] = outcome = speed.Outcome(config, 60, graphed=False)
        outcome.speeds, outcome.waiting, outcome.gib = [images_per_second], [0.0123], 3.21
    speed.show(outcomes, options)
    speed.show_stages({"images": 1.0, "views": 3.0}, config, options)
    rows = rows_of(tables.speed_tables(place))
    assert "| XMoCo | bf16 | 20,000 | 4.00 | 3.2 GiB | 1.2 % |" in rows
    assert "| views | 3.00 ms, 75 % |" in rows


# Any records


def test_what_became_of_faults_is_told(faults: ModuleType, place: Any) -> None:
    assert faults.faults_table(place) == ""
    facts = {"steps": 400, "faults": 60, "kinds": {"SIGKILL": 60}, "steps_taken_again": 7}
    names = ("differing_tensors", "checkpoints_lost", "steps_repeated", "problems")
    chaos = [
        Record(f"chaos_{name}", value, "", "xmoco", "chaos", facts, 0)
        for value, name in enumerate(names)
    ]
    append_records(place.results / "chaos.jsonl", chaos)
    facts = {"cases": 10_000, "kinds": {"images": 10_000}, "refused": 9000}
    facts |= {"slowest_seconds": 3.2, "most_memory_gib": 0.25}
    fuzz = Record("fuzz_failures", 4, "cases", "xmoco", "fuzz", facts, 0)
    append_records(place.results / "fuzz.jsonl", [fuzz])
    grown = [
        Record("endurance_growth", value, "%", "xmoco", f"endurance-{what}", facts, 0)
        for what, value in (("memory", 1.25), ("files", 0.0))
        for facts in ({"steps": 10_000, "what": what},)
    ]
    append_records(place.results / "endurance.jsonl", grown)
    _, _, chaos_row, fuzz_row, endurance_row = faults.faults_table(place).splitlines()
    assert "400 steps with 60 faults of 1 kinds" in chaos_row
    told = "0 tensors of the end differ; 1 checkpoints lost; 2 steps repeated that a checkpoint "
    assert f"{told}held (7 that none held); 3 other problems" in chaos_row
    assert "| 10,000 damaged or hostile inputs of 1 kinds | 4 tracebacks" in fuzz_row
    assert "memory +1.2 %, files +0.0 %" in endurance_row


def test_the_last_pass_of_the_gpu_tests_is_told(tables: ModuleType, place: Any) -> None:
    assert tables.gpu_tests(place) == ""
    for passed in (50, 61):
        facts = {"failed": 0, "skipped": 2, "seconds": 94.6}
        found = Record("gpu_tests_passed", passed, "tests", "xmoco", "gpu-tests", facts, 0)
        append_records(place.results / "gpu-tests.jsonl", [found])
    assert tables.gpu_tests(place).startswith("Last pass: 61 tests, 2 skipped, in 95 s; ")


def test_records_nobody_asks_for_are_shown_as_they_are(plain: ModuleType, place: Any) -> None:
    strange = [
        Record("fluffiness", 12345.6, "hairs", "cat", "fur", {"off": 1e-5}, seed=3),
        Record("weight", 4, "kg", "cat", "fur", {}, seed=3),
        Record("weight", 9, "kg", "dog", "fur", {}, seed=3),
        Record("weight", 8, "kg", "dog", "fur", {}, seed=4),
    ]
    append_records(place.results / "strange.jsonl", strange)
    text = plain.other_tables(place)
    assert text.startswith("## Other records\n\n### strange\n\nfluffiness:\n\n")
    assert "| settings | cat | dog |\n| --- | ---: | ---: |\n" in text
    assert "| seed 3 | 4.000 kg | 9.000 kg |\n| seed 4 | – | 8.000 kg |\n" in text
    assert "12,346 hairs" in text
    assert "Seeds 3, 4;" in text


def test_a_question_tells_rows_apart_by_what_it_names(plain: ModuleType, place: Any) -> None:
    def loss(subject: str, value: float, launch: str, length: int, **protocol: Any) -> Record:
        settings = {"batch": 512, "launch": launch, "bank_length": length, "settings": "x" * 999}
        return Record("loss_ms", value, "ms", subject, "loss", settings | protocol, seed=0)

    records = [
        loss("xmoco", 9, "eager", 4096),
        loss("xmoco", 2, "graph", 4096, off=1e-5),
        loss("mocov2plus", 1, "graph", 4096),
        loss("xmoco", 1.23456, "eager", 4096, values={"a": 1}),  # measured again
    ]
    append_records(place.results / "loss.jsonl", records)
    text = plain.answer(place, plain.QUESTIONS["loss"])
    assert rows_of(text) == [
        "| launched | XMoCo | MoCo v2+ |",
        "| --- | ---: | ---: |",
        "| eager | 1.235 ms | – |",
        "| graph | 2.000 ms | 1.000 ms |",
    ]
    assert "One seed (0); batch 512; bank length 4,096;" in text
    assert plain.other_tables(place) == ""


def test_what_a_short_run_spends_besides_training_is_told(plain: ModuleType, place: Any) -> None:
    assert plain.answer(place, plain.QUESTIONS["startup"]) == ""
    for measure, seconds in (("first_run_seconds", 14.4), ("later_run_seconds", 1.2)):
        for stage, more in (("the first step", 0), ("together", 3)):
            facts = {"recipe": "demo", "changes": "", "when": "before the first step"}
            found = Record(measure, seconds + more, "s", "xmoco", "a", facts | {"stage": stage}, 0)
            append_records(place.results / "startup.jsonl", [found])
    text = plain.answer(place, plain.QUESTIONS["startup"])
    assert text.startswith("## How long does a short run take")
    assert rows_of(text) == [
        "| stage | first run | later run |",
        "| --- | ---: | ---: |",
        "| the first step | 14.40 s | 1.200 s |",
        "| together | 17.40 s | 4.200 s |",
    ]


short_texts = st.text("abc", min_size=1, max_size=2)
protocols = st.dictionaries(
    st.sampled_from(["data", "k", "launch", "stage", "epoch"]),
    st.one_of(short_texts, st.integers()),  # which look different if they are
)


@given(st.lists(st.tuples(short_texts, short_texts, short_texts, protocols), min_size=1))
def test_any_record_has_its_cell(
    plain: ModuleType, measured: list[tuple[str, str, str, dict[str, Any]]]
) -> None:
    """Of records that measure the same, the last has it."""
    records = [
        Measured[dict[str, Any]](
            measure=measure,
            value=float(number),
            unit="s",
            subject=subject,
            work=work,
            protocol=protocol,
            seed=0,
        )
        for number, (measure, subject, work, protocol) in enumerate(measured, start=1000)
    ]
    text = "\n".join(plain.plain_tables(records, plain.settings_of(records)))
    found = re.findall(r" ([\d,]+) s (?=\|)", text)
    last = {
        (r.work, r.subject, r.measure, json.dumps(r.protocol, sort_keys=True)): r for r in records
    }
    assert sorted(found) == sorted(plain.significant(r.value) for r in last.values())


@given(st.floats(1e-9, 1e9) | st.floats(-1e9, -1e-9))
def test_four_digits_are_enough(plain: ModuleType, value: float) -> None:
    shown = plain.significant(value).replace(",", "")
    assert math.isclose(float(shown), value, rel_tol=5.1e-4)
    assert len(re.sub(r"^-?0\.0*|[-.]", "", shown)) in range(4, 11)


def test_the_bound_is_one_only_where_it_is_one(tables: ModuleType, place: Any) -> None:
    def measured(commit: str, graph: bool, **speeds: float) -> str:
        for name, speed in speeds.items():
            record = speed_record(name.replace("_", " "), speed, None, graph=graph)
            append_records(place.results / "speed.jsonl", [replace(record, commit=commit)])
        return str(tables.speed_bounds(place))

    assert tables.speed_bounds(place) == ""
    assert measured("a", False, xmoco=100.0, encoder_only=80.0) == ""  # launched one by one
    row = "| 90 | 100 | 90.0 % | one round |"
    assert row in measured("b", True, xmoco=90.0, encoder_only=100.0)
    assert row in measured("c", True, xmoco=95.0)  # without the other
