"""Checkpoints: two are kept, none is half written, and none runs code."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from xmoco.checkpoints import Checkpoints, load_checkpoint
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
    assert len(list(saved.folder.iterdir())) == 2


def test_what_a_killed_run_left_half_written_is_removed(saved: Checkpoints) -> None:
    saved.save(1, {})
    (saved.folder / ".step-000000002.ckpt.4711.part").write_bytes(b"half")
    assert [path.name for path in saved.paths()] == ["step-000000001.ckpt"]
    saved.save(3, {})
    assert sorted(path.name for path in saved.folder.iterdir()) == [
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
    assert len(list(saved.folder.iterdir())) == 2
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
