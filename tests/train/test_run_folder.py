"""The run folder: created whole, never overwritten, metrics without gaps or repeats."""

import json
from pathlib import Path

import pytest

from xmoco.errors import UserError
from xmoco.records import Record
from xmoco.settings import load_config
from xmoco.train import run_folder
from xmoco.train.run_folder import RunFolder

CONFIG = load_config("demo", ["epochs=7"])


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return RunFolder.create(tmp_path / "deep" / "run", CONFIG)


def knn(step: int, value: float = 50.0, subject: str = "xmoco") -> Record:
    return Record("knn_top1", value, "%", subject, "work", {"epoch": step // 10, "step": step}, 0)


def test_a_new_run_holds_its_configuration(run: RunFolder) -> None:
    assert [path.name for path in run.path.iterdir()] == ["config.yaml"]
    assert run.config() == CONFIG
    assert RunFolder.open(run.path).config() == CONFIG
    assert [path.name for path in run.path.parent.iterdir()] == ["run"]
    assert run.path.stat().st_mode & 0o777 == 0o755


def test_creation_is_all_or_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_config: object) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(run_folder, "config_yaml", fail)
    with pytest.raises(UserError, match=r"cannot create .*run: No space left on device"):
        RunFolder.create(tmp_path / "run", CONFIG)
    assert list(tmp_path.iterdir()) == []


def test_an_interruption_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(_config: object) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(run_folder, "config_yaml", interrupt)
    with pytest.raises(KeyboardInterrupt):
        RunFolder.create(tmp_path / "run", CONFIG)
    assert list(tmp_path.iterdir()) == []


def test_existing_folders_are_refused(run: RunFolder, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="already holds a run"):
        RunFolder.create(run.path, CONFIG)
    (tmp_path / "photos").mkdir()
    with pytest.raises(UserError, match="already exists"):
        RunFolder.create(tmp_path / "photos", CONFIG)
    with pytest.raises(UserError, match=r"nothing to resume: .*photos holds no run"):
        RunFolder.open(tmp_path / "photos")
    with pytest.raises(UserError, match="does not exist"):
        RunFolder.open(tmp_path / "nowhere")


def test_a_folder_below_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot create"):
        RunFolder.create(tmp_path / "file" / "run", CONFIG)


def test_metrics_after_a_step_are_forgotten(run: RunFolder) -> None:
    run.forget_after(3)  # nothing there yet
    run.add_record(knn(0, 20, "untrained"))
    for step in (5, 10, 15, 20):
        run.add_values(step, step / 10, {"loss": step})
        if step % 10 == 0:
            run.add_record(knn(step, step))
    with (run.path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 25, "values": {"lo')
    run.forget_after(12)
    lines = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "values" in line] == [5, 10]
    assert run.knn_curve("xmoco") == [(1, 10)]
    assert run.last_knn() == {"untrained": 20, "xmoco": 10}
    run.forget_after(0)
    assert (run.path / "metrics.jsonl").read_text() == ""


def test_a_value_line(run: RunFolder) -> None:
    run.add_values(5, 1 / 3, {"loss": 1.5, "waiting": 0.0})
    (text,) = (run.path / "metrics.jsonl").read_text().splitlines()
    line = json.loads(text)
    assert (line["step"], line["epoch"]) == (5, 0.3333)
    assert line["values"] == {"loss": 1.5, "waiting": 0.0}
    assert line["time"].endswith("Z")


def test_environment_and_log(run: RunFolder) -> None:
    run.write_environment(device="cpu", processes=2)
    facts = json.loads((run.path / "environment.json").read_text())
    assert (facts["device"], facts["processes"]) == ("cpu", 2)
    assert {"python", "torch", "torchvision"} <= facts["versions"].keys()
    run.log("first")
    run.log("zweite Zeile ·")
    lines = (run.path / "train.log").read_text(encoding="utf-8").splitlines()
    assert [line.partition(" ")[2] for line in lines] == ["first", "zweite Zeile ·"]


def test_unreadable_images_are_listed_once(run: RunFolder) -> None:
    assert run.unreadable() == []
    run.add_unreadable([("a.png", "broken"), ("b c.png", "it ends too early")])
    run.add_unreadable([("a.png", "broken")])
    assert run.unreadable() == [("a.png", "broken"), ("b c.png", "it ends too early")]


@pytest.mark.parametrize("name", ["metrics.jsonl", "train.log", "unreadable.txt"])
def test_what_cannot_be_written_is_named(run: RunFolder, name: str) -> None:
    (run.path / name).symlink_to("/dev/full")
    write = {
        "metrics.jsonl": lambda: run.add_values(1, 0.1, {}),
        "train.log": lambda: run.log("text"),
        "unreadable.txt": lambda: run.add_unreadable([("a", "b")]),
    }[name]
    with pytest.raises(UserError, match=f"could not write .*{name}: No space left"):
        write()
