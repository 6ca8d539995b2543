"""The run folder: created whole, never overwritten, metrics without gaps or repeats."""

import json
import os
from pathlib import Path

import pytest

from xmoco.errors import UserError
from xmoco.records import Record
from xmoco.settings import config_yaml, load_config
from xmoco.train.run_folder import RunFolder

CONFIG = load_config("demo", ["epochs=7"])
TEXT = config_yaml(CONFIG)


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return RunFolder.create(tmp_path / "deep" / "run", TEXT)


def knn(step: int, value: float = 50.0, subject: str = "xmoco") -> Record:
    return Record("knn_top1", value, "%", subject, "work", {"epoch": step // 10, "step": step}, 0)


def test_a_new_run_holds_its_configuration(run: RunFolder) -> None:
    assert [path.name for path in run.path.iterdir()] == ["config.yaml"]
    assert run.config() == CONFIG
    assert RunFolder.open(run.path).config() == CONFIG
    assert [path.name for path in run.path.parent.iterdir()] == ["run"]
    assert run.path.stat().st_mode & 0o777 == 0o755


def test_creation_is_all_or_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(UserError, match=r"cannot create .*run: No space left on device"):
        RunFolder.create(tmp_path / "run", TEXT)
    assert list(tmp_path.iterdir()) == []


def test_an_interruption_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        RunFolder.create(tmp_path / "run", TEXT)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("more", "name"), [("objects: a1", " detect"), ("set: pets", " transfer"), ("size: 32", "")]
)
def test_the_run_of_an_evaluation_is_not_taken_for_a_pre_training(
    tmp_path: Path, more: str, name: str
) -> None:
    settings = f"model: fcos\nweights: abc\nimages: def\nseed: 0\n{more}\n"
    (tmp_path / "config.yaml").write_text(settings)
    with pytest.raises(UserError, match=f"holds a run of `xmoco evaluate{name}`, no pre-training"):
        RunFolder.open(tmp_path)


def test_existing_folders_are_refused(run: RunFolder, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="already holds a run"):
        RunFolder.create(run.path, TEXT)
    (tmp_path / "photos").mkdir()
    with pytest.raises(UserError, match="already exists"):
        RunFolder.create(tmp_path / "photos", TEXT)
    with pytest.raises(UserError, match=r"nothing to resume: .*photos holds no run"):
        RunFolder.open(tmp_path / "photos")
    with pytest.raises(UserError, match="does not exist"):
        RunFolder.open(tmp_path / "nowhere")


def test_the_same_settings_go_on(tmp_path: Path) -> None:
    settings = {"name": "linear", "rates": (1e-05, 60.0), "seed": 0, "note": None}
    assert not RunFolder.holds(tmp_path / "run", settings)
    assert not (tmp_path / "run").exists()
    run = RunFolder.begun(tmp_path / "run", settings)
    content = (run.path / "config.yaml").read_bytes()
    assert RunFolder.holds(run.path, settings)
    assert RunFolder.begun(run.path, settings).path == run.path
    assert (run.path / "config.yaml").read_bytes() == content


def test_other_settings_are_refused_and_named(tmp_path: Path) -> None:
    run = RunFolder.begun(tmp_path / "run", {"rates": (1.0,), "seed": 0})
    for changed, words in (
        ({"rates": (1.0,), "seed": 1}, "seed was 0 and is 1 now"),
        ({"rates": (2.0,), "seed": 0}, r"rates was \[1.0\] and is \[2.0\] now"),
        ({"rates": (1.0,)}, "seed was 0 and is null now"),
        ({"rates": (1.0,), "seed": 0, "size": 32}, "size was null and is 32 now"),
    ):
        with pytest.raises(UserError, match=f"begun with other settings: {words}.*--out"):
            RunFolder.begun(run.path, changed)
    with pytest.raises(UserError, match=r"holds a run of another kind: .*--out"):
        RunFolder.begun(run.path, {"data": {"source": "patterns"}, "train": {"epochs": 1}})


@pytest.mark.parametrize("content", [b"", b"{", b"- 1\n", b"\xff"])
def test_settings_that_are_damaged_are_refused(tmp_path: Path, content: bytes) -> None:
    run = RunFolder.begun(tmp_path / "run", {"seed": 0})
    (run.path / "config.yaml").write_bytes(content)
    with pytest.raises(UserError, match=r"config.yaml is damaged: .*--out"):
        RunFolder.begun(run.path, {"seed": 0})
    (tmp_path / "photos").mkdir()
    with pytest.raises(UserError, match="already exists"):
        RunFolder.begun(tmp_path / "photos", {"seed": 0})


def test_a_folder_below_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot create"):
        RunFolder.create(tmp_path / "file" / "run", TEXT)


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


def test_the_step_of_a_record_is_in_its_protocol(run: RunFolder) -> None:
    """Whatever else it holds: benchmarks/fuzz.py put a word there."""
    line = json.loads(knn(10, 20).json()) | {"step": "xmoco"}
    (run.path / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    run.forget_after(10)
    assert run.last_knn() == {"xmoco": 20}
    run.forget_after(9)
    assert run.last_knn() == {}


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


def test_sessions_are_listed_and_the_first_one_started_the_run(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = iter("abcd")
    monkeypatch.setattr("xmoco.train.run_folder.now", lambda: next(times))
    for device in ("cpu", "cuda"):
        run.write_environment(device=device)
    found = run.environment()
    assert (found["started"], found["sessions"], found["device"]) == ("a", ["a", "b"], "cuda")
    file = run.path / "environment.json"
    file.write_text('{"started": "x"}')  # of a run that is older than the list
    run.write_environment()
    assert run.environment()["sessions"] == ["x", "c"]
    file.write_text('{"started": "x", "sessions": 3}')
    run.write_environment()
    assert run.environment()["sessions"] == ["d"]


def test_what_a_killed_session_left_half_written_is_removed_by_the_next(run: RunFolder) -> None:
    half_written = run.path / ".environment.json.4711.part"
    half_written.write_bytes(b"{")
    run.lock()
    assert [path.name for path in run.path.iterdir()] == ["config.yaml"]
    half_written.write_bytes(b"{")  # by the one that holds the lock
    with pytest.raises(UserError, match="another process is training"):
        RunFolder(run.path).lock()
    assert half_written.exists()
    run.unlock()
