"""Checkpoints: two are kept, none is half written, and none runs code."""

import errno
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from xmoco import checkpoints
from xmoco.checkpoints import BackgroundSaver, Checkpoints, load_checkpoint
from xmoco.errors import UserError


@pytest.fixture
def saved(tmp_path: Path) -> Checkpoints:
    return Checkpoints(tmp_path / "checkpoints")


def test_there_and_back(saved: Checkpoints) -> None:
    assert saved.latest() is None
    state = {"method": {"weight": torch.randn(3, 4)}, "optimizer": {"state": {0: [1, 2.5, None]}}}
    path = saved.save(12, state)
    assert path == saved.latest()
    loaded = load_checkpoint(path)
    assert loaded["step"] == 12
    assert torch.equal(loaded["method"]["weight"], state["method"]["weight"])
    assert loaded["optimizer"] == state["optimizer"]


def test_the_last_two_are_kept(saved: Checkpoints) -> None:
    for step in (1, 20, 300, 4000):
        saved.save(step, {})
    assert [load_checkpoint(path)["step"] for path in saved.paths()] == [300, 4000]
    assert len(list(saved.folder.iterdir())) == 3  # and a note which is the newest


def test_what_a_killed_run_left_half_written_is_removed(saved: Checkpoints) -> None:
    saved.save(1, {})
    (saved.folder / ".step-000000002.ckpt.4711.part").write_bytes(b"half")
    assert [path.name for path in saved.paths()] == ["step-000000001.ckpt"]
    saved.save(3, {})
    assert sorted(path.name for path in saved.folder.iterdir()) == [
        "newest",
        "step-000000001.ckpt",
        "step-000000003.ckpt",
    ]


def test_a_failed_save_leaves_the_others(
    saved: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = saved.save(1, {"x": 1}), saved.save(2, {"x": 2})

    class Stubborn:
        def __reduce__(self) -> Any:
            raise ValueError("cannot be saved")

    with pytest.raises(ValueError, match="cannot be saved"):
        saved.save(3, {"x": Stubborn()})
    assert saved.paths() == [first, second]
    assert len(list(saved.folder.iterdir())) == 3
    assert load_checkpoint(second)["x"] == 2


class Harm:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_code_is_refused(saved: Checkpoints, tmp_path: Path) -> None:
    path = saved.save(1, {"x": Harm(tmp_path / "harm")})
    with pytest.raises(UserError, match="could run code"):
        load_checkpoint(path)
    assert not (tmp_path / "harm").exists()


@pytest.mark.parametrize("kept", [0, 1, 100, 0.3, 0.9, 0.999])
def test_truncated_anywhere(saved: Checkpoints, kept: float) -> None:
    path = saved.save(1, {"weight": torch.randn(100, 100)})
    content = path.read_bytes()
    path.write_bytes(content[: kept if isinstance(kept, int) else int(kept * len(content))])
    with pytest.raises(UserError, match="incomplete or no checkpoint"):
        load_checkpoint(path)


def test_a_message_tells_the_way_out(saved: Checkpoints) -> None:
    first, second = saved.save(1, {}), saved.save(2, {})
    second.write_bytes(b"")
    with pytest.raises(UserError, match=r"Remove it to go on from step-000000001\.ckpt"):
        load_checkpoint(second)
    second.unlink()
    first.write_bytes(b"")
    with pytest.raises(UserError, match="start this run again from the beginning"):
        load_checkpoint(first)


@pytest.mark.parametrize("content", [{}, {"format": "other"}, [1], torch.zeros(2), None])
def test_somebody_else_s(tmp_path: Path, content: Any) -> None:
    torch.save(content, tmp_path / "step-000000001.ckpt")
    with pytest.raises(UserError, match="not a checkpoint of xmoco"):
        load_checkpoint(tmp_path / "step-000000001.ckpt")


def test_missing_or_a_folder(tmp_path: Path) -> None:
    for path in (tmp_path / "nothing.ckpt", tmp_path):
        with pytest.raises(UserError):
            load_checkpoint(path)


# The last one damaged or lost


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


WEIGHT = {"weight": torch.zeros(1000)}


def test_a_whole_newest_is_taken_in_silence(saved: Checkpoints) -> None:
    assert saved.newest_whole() == (None, [])
    saved.save(1, WEIGHT)
    second = saved.save(2, WEIGHT)
    assert saved.newest_whole() == (second, [])


@pytest.mark.parametrize("harm", ["a bit", "cut", "emptied"])
def test_where_the_newest_is_damaged_the_one_before_serves(saved: Checkpoints, harm: str) -> None:
    first, second = saved.save(1, WEIGHT), saved.save(2, WEIGHT)
    if harm == "a bit":
        damage(second)
    else:
        second.write_bytes(second.read_bytes()[: 500 if harm == "cut" else 0])
    found, (note,) = saved.newest_whole()
    assert found == first
    assert note.startswith("step-000000002.ckpt is ")
    assert note.endswith("; going on from step-000000001.ckpt")
    saved.put_aside(after=first)
    assert saved.paths() == [first]
    third = saved.save(3, WEIGHT)
    assert saved.paths() == [first, third]
    assert not list(saved.folder.glob("*.damaged"))


def test_where_the_newest_cannot_be_read_the_one_before_serves(
    saved: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = saved.save(1, WEIGHT), saved.save(2, WEIGHT)
    real = checkpoints.check_parts

    def failing_disk(path: Path, checked: bool) -> None:
        if path == second:
            raise OSError(errno.EIO, "Input/output error")
        real(path, checked)

    monkeypatch.setattr(checkpoints, "check_parts", failing_disk)
    words = "cannot be read (Input/output error); going on from step-000000001.ckpt"
    assert saved.newest_whole() == (first, [f"step-000000002.ckpt {words}"])


def test_a_lost_newest_is_noticed(saved: Checkpoints) -> None:
    first, second = saved.save(1, WEIGHT), saved.save(2, WEIGHT)
    second.unlink()
    note = "step-000000002.ckpt is missing; going on from step-000000001.ckpt"
    assert saved.newest_whole() == (first, [note])
    first.unlink()
    note = "step-000000002.ckpt is missing; beginning anew"
    assert saved.newest_whole() == (None, [note])


def test_killed_between_a_checkpoint_and_its_note(saved: Checkpoints) -> None:
    saved.save(1, WEIGHT)
    note = (saved.folder / "newest").read_bytes()
    second = saved.save(2, WEIGHT)
    (saved.folder / "newest").write_bytes(note)
    assert saved.newest_whole() == (second, [])


def test_a_note_that_is_none(saved: Checkpoints) -> None:
    first = saved.save(1, WEIGHT)
    for content in (b"", b"\xff\xfe", b"step-../../x", b"x" * 10**6):
        (saved.folder / "newest").write_bytes(content)
        assert saved.newest_whole() == (first, [])


def test_where_none_is_whole_nothing_begins_anew(saved: Checkpoints) -> None:
    for step in (1, 2):
        damage(saved.save(step, WEIGHT))
    with pytest.raises(
        UserError, match=r"no checkpoint in .* is whole: .*; .*Remove them to start"
    ):
        saved.newest_whole()


# In the background


def test_training_may_go_on_while_a_checkpoint_is_written(
    saved: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    written, go_on = threading.Event(), threading.Event()
    real = Checkpoints.save

    def slow(self: Checkpoints, step: int, state: dict[str, Any]) -> Path:
        written.set()
        assert go_on.wait(30)
        return real(self, step, state)

    monkeypatch.setattr(Checkpoints, "save", slow)
    saver, weight = BackgroundSaver(saved), torch.zeros(3)
    saver.save(1, {"nested": [{"weight": weight}], "rate": (0.5, 1)})
    assert written.wait(30)
    assert saver.busy
    weight += 1  # the next step
    time.sleep(0.05)
    go_on.set()
    saver.finish()
    assert not saver.busy
    assert saver.seconds >= 0.05  # writing counts
    state = load_checkpoint(saved.paths()[-1])
    assert state["nested"][0]["weight"].tolist() == [0, 0, 0]
    assert state["rate"] == (0.5, 1)


def test_what_goes_wrong_in_the_background_is_told(
    saved: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise UserError("could not write: No space left on device.")

    monkeypatch.setattr(Checkpoints, "save", fail)
    saver = BackgroundSaver(saved)
    for ask in (saver.finish, saver.check, lambda: saver.save(2, {})):
        saver.save(1, {})
        saver.wait()
        with pytest.raises(UserError, match="No space left"):
            ask()
        saver.finish()  # of which nobody need be told twice
