"""README.md and docs/ keep their word: code runs, commands exist, tables are up to date."""

import importlib
import inspect
import json
import re
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from torch.testing import assert_close
from typer.testing import CliRunner

import xmoco
import xmoco.classifying
import xmoco.data.transfer_sets
import xmoco.demo
import xmoco.detect.evaluation
import xmoco.detect.finding
import xmoco.detect.tables
import xmoco.embedding
import xmoco.evaluate.classification
import xmoco.evaluate.transfer
import xmoco.export
import xmoco.planning
import xmoco.pretraining
import xmoco.report.tables
import xmoco.tables.running
from xmoco.auto import PATIENCE, STEPS, Situation, choose
from xmoco.cli import app
from xmoco.config.methods import XMoCoConfig
from xmoco.data.label_file import read_label_file
from xmoco.data.torchvision_sets import SPLIT_ARGUMENTS
from xmoco.data.transfer_sets import HELD_OUT_PERCENT, TRANSFER_SETS
from xmoco.data.trees import FolderTree
from xmoco.detect.courses import COURSES, course_of
from xmoco.detect.detector_files import DetectorCard, save_detector
from xmoco.detect.models import DESIGNS
from xmoco.evaluate.classify import LINEAR
from xmoco.evaluate.grid import GRIDS
from xmoco.evaluate.logistic import STRENGTHS
from xmoco.nn.backbone_files import BackboneCard, save_backbone
from xmoco.nn.backbones import build_backbone
from xmoco.nn.classifier_files import ClassifierCard, save_classifier
from xmoco.planning import AUTO_BASE
from xmoco.records import KnnProtocol, Measured, Record, read_records
from xmoco.settings import load_config
from xmoco.tables.plan import plan

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
    'Image.open("cat.jpg")',
    'np.load("features.npz")',
    "load_file(",
    "xmoco.pretrain(",
    "eval_size=",
    "load_classifier(",
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
    features = run(python_block('Image.open("cat.jpg")'))["features"]
    assert features.shape == (1, 512)
    result = run(python_block("load_file("))["result"]
    assert result.missing_keys == ["fc.weight", "fc.bias"]
    assert not result.unexpected_keys
    assert "fc.weight" in capsys.readouterr().out


def test_similar_images_are_found_as_shown(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, colour in (("1.jpg", "grey"), ("2.jpg", "red"), ("cat/3.jpg", "grey")):
        (tmp_path / "photos" / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (200, 150), colour).save(tmp_path / "photos" / name)
    found = xmoco.embed(photos, "photos/", options=xmoco.EvalOptions("cpu"))
    found.save("features.npz")
    run(python_block('np.load("features.npz")'))
    *first_two, last = re.findall(r"'([^']+)'", capsys.readouterr().out)
    assert sorted(first_two) == ["1.jpg", "cat/3.jpg"]
    assert last == "2.jpg"


def test_classifiers_are_used_as_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("runs/cats").mkdir(parents=True)
    grey = (0.5, 0.5, 0.5)
    card = BackboneCard("tiny", "imagenet", 64, grey, grey, "xmoco", 1, 0)
    own = ClassifierCard(classes=("cat", "dog"), protocol="fine-tune", data="pictures", seed=0)
    file = Path("runs/cats/classifier.safetensors")
    save_classifier(build_backbone("tiny"), torch.nn.Linear(128, 2), own, card, file)
    Image.new("RGB", (60, 40), "grey").save("photo.jpg")
    run(python_block("load_classifier("))
    words = capsys.readouterr().out.split()
    assert words[0] in ("cat", "dog")
    assert 0.5 <= float(words[1]) <= 1


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


def test_every_run_of_the_first_page_has_a_folder_of_its_own() -> None:
    """Whoever follows it in its order meets no run that is there already."""
    text = TEXTS["README.md"]
    started = [line for line in shell_lines(text) if "pretrain" in line and "--resume" not in line]
    folders = re.findall(r"--out (\S+)", "\n".join(started))
    folders += re.findall(r'xmoco\.pretrain\(.*out="(.*?)"', text)
    assert len(folders) > 4
    assert sorted({*folders}) == sorted(folders)


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
        *(
            "--help",
            "pretrain",
            "evaluate",
            "detect",
            "embed",
            "classify",
            "export",
            "demo",
            "settings",
            "tables",
        )
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
            (xmoco.embedding, "embed", self.embedded),
            (xmoco.classifying, "classify", self.classified),
            (xmoco.report.tables, "draw_transfer", lambda asked: [asked["out"]]),
            (xmoco.detect.tables, "draw_detection", lambda asked: [asked["out"]]),
            (xmoco.tables.running, "run_table", self.table),
            (xmoco.export, "export_weights", self.export),
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
    def embedded(asked: dict[str, Any]) -> Any:
        assert isinstance(asked["options"], xmoco.EvalOptions)
        return xmoco.embedding.Embedded(["1.jpg"], np.zeros((1, 8), dtype=np.float32))

    @staticmethod
    def classified(_: dict[str, Any]) -> Any:
        shares = np.full((1, 2), 0.5, dtype=np.float32)
        return xmoco.classifying.Classified(["1.jpg"], ("cat", "dog"), shares)

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


@pytest.mark.parametrize("name", ["demo.png", "similarities.png"])
def test_pictures_show_the_runs_of_the_table(generator: ModuleType, name: str) -> None:
    """Both are of one run of the demo, with the accuracies of its last records."""
    last = {
        record.subject: record.value
        for record in read_records(generator.RESULTS / "demo.jsonl", Measured[KnnProtocol])
    }
    with Image.open(ROOT / "docs" / name) as picture:
        shown = json.loads(picture.info[generator.SHOWN])
    assert shown == {name: pytest.approx(last[name]) for name in ("xmoco", "mocov2plus")}


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
    own = load_config("imagenet").method
    assert isinstance(own, XMoCoConfig)
    few, many, slow = (
        choose(Situation(images, 300, device, 1), lambda *_: 1e9).settings()["epochs"]
        for images, device in ((200, "cuda"), (5_000_000, "cuda"), (200, "cpu"))
    )
    for fact in (
        f"one of {len(STRENGTHS)} strengths",
        f"`--grid paper` has {len(paper.points)} points of {paper.steps:,} steps each",
        f"`--grid small` {len(small.points)} of {small.steps:,}",
        f"{HELD_OUT_PERCENT} % of every class in `train/`",
        f"({load_config('imagenet').data.preload_gib:g} GiB unless you change it)",
        f"The paper uses K = {own.bank_length:,}, τ = {own.temperature:g}, "
        f"ξ = {own.positive_mass:g} and λ = {own.sharpness:g}.",
        f"what makes about {STEPS:,} steps, but at least {many} and at most "
        f"{few}; on a CPU it is what fits into {PATIENCE / 60:g} minutes at the measured "
        f"speed, at most {slow},",
    ):
        assert fact in FOR_USERS, fact


def test_the_label_file_is_read_as_shown(tmp_path: Path) -> None:
    (table,) = (block for block in blocks("") if block.startswith("image,labels"))
    (tmp_path / "labels.csv").write_text(table, encoding="utf-8")
    file = read_label_file(FolderTree(tmp_path), "")
    assert file is not None
    assert file.labels == {
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
