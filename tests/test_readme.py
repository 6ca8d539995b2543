"""README.md keeps its word: its code runs, its commands exist, its tables are up to date."""

import importlib.util
import json
import re
import shlex
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import typer

import xmoco
from xmoco.cli import app
from xmoco.nn.backbones import build_backbone
from xmoco.nn.weights import BackboneCard, save_backbone
from xmoco.settings import load_config

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
DOCUMENTS = {name: (ROOT / name).read_text("utf-8") for name in ("README.md", "CONTRIBUTING.md")}


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
    assert names["criterion"].banks.entered == 4 * 32
    slow, fast = (names[name].fc.weight for name in ("momentum_encoder", "encoder"))
    assert slow.grad is None
    assert not torch.equal(slow, fast)


def test_weights_load_as_shown(photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    features = run(python_block("load_backbone("))["features"]
    assert features.shape == (8, 512)
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

    def evaluate_knn(weights: Path, data: str, *, ks: tuple[int, ...]) -> None:
        assert (weights, data, ks) == (photos, "patterns", (20,))

    monkeypatch.setattr(xmoco, "pretrain", pretrain, raising=False)
    monkeypatch.setattr(xmoco, "evaluate_knn", evaluate_knn, raising=False)
    run(python_block("xmoco.pretrain("))
    assert asked["epochs"] == 3


def test_there_are_commands_of_every_kind() -> None:
    verbs = {line.split()[0] for line in xmoco_commands()}
    assert verbs == {"--help", "pretrain", "evaluate", "export", "demo", "settings"}


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
    targets = re.findall(r"\]\(([^)#]+)\)", DOCUMENTS[name])
    for target in targets:
        assert target.startswith("https://") or (ROOT / target).exists(), target


def test_the_picture_is_small() -> None:
    assert (ROOT / "docs" / "demo.png").stat().st_size < 300_000


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("readme", ROOT / "benchmarks" / "readme.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_tables_are_up_to_date(generator: ModuleType) -> None:
    assert generator.up_to_date(README) == README, "run: python benchmarks/readme.py"


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


def test_tables_hold_the_last_records_and_their_protocol(
    generator: ModuleType, tmp_path: Path
) -> None:
    records = [
        record("raw pixels", 10.04, 0),
        record("xmoco", 33.3, 1, run_seconds=61.6),
        record("xmoco", 11.1, 2, run_seconds=99.9),
        record("xmoco", 44.44, 2, run_seconds=61.6),  # measured again
    ]
    lines = "".join(json.dumps(line) + "\n" for line in records)
    (tmp_path / "pets.jsonl").write_text(lines, encoding="utf-8")
    text = generator.results_tables(tmp_path)
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
        "(pets.jsonl)",
    ):
        assert fact in text, fact


def test_only_generated_parts_are_rewritten(generator: ModuleType, tmp_path: Path) -> None:
    before = README.replace("<!-- results:end -->", "typed by hand\n<!-- results:end -->")
    after = generator.up_to_date(before)
    assert "typed by hand" not in after
    assert after == generator.up_to_date(README)
