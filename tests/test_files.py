"""Files are written whole or not at all."""

import errno
import os
from pathlib import Path
from typing import BinaryIO

import pytest
import torch

from xmoco.errors import UserError
from xmoco.files import write_whole


def test_bytes_or_a_function(tmp_path: Path) -> None:
    write_whole(tmp_path / "a", b"old")
    write_whole(tmp_path / "a", b"new")
    write_whole(tmp_path / "b", lambda file: file.write(b"more"))
    assert (tmp_path / "a").read_bytes() == b"new"
    assert (tmp_path / "b").read_bytes() == b"more"
    assert len(list(tmp_path.iterdir())) == 2


def fail_to_write(file: BinaryIO) -> None:
    file.write(b"half of the new")
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_old_content_survives_a_full_disk(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with pytest.raises(UserError, match=r"could not write .*file: No space left on device\."):
        write_whole(path, fail_to_write)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_old_content_survives_a_late_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def fail(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(*((os, "fsync", fail) if call == "fsync" else (Path, "replace", fail)))
    with pytest.raises(UserError, match="could not write"):
        write_whole(path, b"new")
    monkeypatch.undo()
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_other_errors_pass_through(tmp_path: Path, error: type[BaseException]) -> None:
    def fail(file: BinaryIO) -> None:
        file.write(b"half")
        raise error

    with pytest.raises(error):
        write_whole(tmp_path / "file", fail)
    assert list(tmp_path.iterdir()) == []


def test_torch_hides_a_full_disk_in_an_error_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_path = Path.open
    monkeypatch.setattr(
        Path,
        "open",
        lambda _, mode="r", **options: open_path(Path("/dev/full"), mode, **options),
    )
    with pytest.raises(UserError, match=r"could not write .*weights: No space left"):
        write_whole(tmp_path / "weights", lambda file: torch.save(torch.zeros(10**5), file))


def test_a_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="No such file or directory"):
        write_whole(tmp_path / "nowhere" / "file", b"")
