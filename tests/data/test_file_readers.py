"""Files read by other processes: contents, errors, and processes that come and go."""

import errno
import os
import signal
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from xmoco.data.file_readers import FileReaders
from xmoco.data.file_server import OpenShards, Place, read_file

pytestmark = pytest.mark.skipif(os.name != "posix", reason="threads read there")


@pytest.fixture
def readers() -> Iterator[FileReaders]:
    readers = FileReaders()
    yield readers
    readers.close()


def write(folder: Path, contents: list[bytes]) -> list[str]:
    paths = [folder / str(number) for number in range(len(contents))]
    for path, content in zip(paths, contents, strict=True):
        path.write_bytes(content)
    return [str(path) for path in paths]


def places(paths: list[str]) -> list[Place]:
    return [Place(path) for path in paths]


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(contents=st.lists(st.binary(max_size=50), min_size=1, max_size=10))
def test_contents_come_whole_and_in_order(
    readers: FileReaders, tmp_path: Path, contents: list[bytes]
) -> None:
    assert readers.read(places(write(tmp_path, contents))) == contents


def test_large_files(readers: FileReaders, tmp_path: Path) -> None:
    """Longer than what goes through a socket at once."""
    sizes = (2**18 - 1, 2**18, 0, 20 * 2**18 + 7)
    contents = [os.urandom(size) for size in sizes]
    paths = write(tmp_path, contents)
    assert readers.read(places(paths)) == contents
    assert [read_file(path) for path in paths] == contents


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    content=st.binary(min_size=1, max_size=50), begin=st.integers(0, 49), length=st.integers(0, 60)
)
def test_parts_of_files(
    readers: FileReaders, tmp_path: Path, content: bytes, begin: int, length: int
) -> None:
    """Those that reach beyond the end of a file, which may have been longer, are no content."""
    (path,) = write(tmp_path, [content])
    part, whole = readers.read([Place(path, begin, length), Place(path)])
    assert whole == content
    if begin + length <= len(content):
        assert part == content[begin : begin + length]
    elif length:
        assert isinstance(part, OSError)
        assert part.errno == errno.ENODATA


def test_what_cannot_be_read_is_told_apart(readers: FileReaders, tmp_path: Path) -> None:
    (path,) = write(tmp_path, [b"content"])
    content, missing, folder, again = readers.read(
        places([path, f"{path}.not", str(tmp_path), path])
    )
    assert content == again == b"content"
    assert isinstance(missing, FileNotFoundError)
    assert isinstance(folder, IsADirectoryError)
    assert missing.strerror == "No such file or directory"


def test_names_may_hold_anything(readers: FileReaders, tmp_path: Path) -> None:
    names = ["ä b\n", os.fsdecode(b"\xff.jpg"), "x" * 200]
    paths = [str(tmp_path / name) for name in names]
    for path, name in zip(paths, names, strict=True):
        Path(path).write_bytes(os.fsencode(name))
    assert readers.read(places(paths)) == [os.fsencode(name) for name in names]


def test_relative_paths_are_as_here(
    readers: FileReaders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("here").write_bytes(b"found")
    assert readers.read([Place("here")]) == [b"found"]


def test_threads_do_not_get_each_others_files(readers: FileReaders, tmp_path: Path) -> None:
    contents = [os.urandom(10_000) for _ in range(40)]
    paths = write(tmp_path, contents)
    with ThreadPoolExecutor(4) as pool:
        for number, (content,) in enumerate(
            pool.map(lambda p: readers.read([Place(p)]), paths * 5)
        ):
            assert content == contents[number % 40]
    assert 1 <= len(readers._all) <= 4


def test_where_a_process_is_killed_this_one_reads(readers: FileReaders, tmp_path: Path) -> None:
    paths = write(tmp_path, [b"one", b"two"])
    assert readers.read(places(paths)) == [b"one", b"two"]
    (first,) = readers._all
    first._process.kill()
    first._process.wait()
    with pytest.warns(RuntimeWarning, match="a process that was to read files failed"):
        (content, error) = readers.read(places([paths[0], f"{paths[1]}.not"]))
    assert content == b"one"
    assert isinstance(error, FileNotFoundError)
    assert readers.read(places(paths)) == [b"one", b"two"]
    assert len(readers._all) == 1


def test_they_start_whatever_is_in_the_path_of_imports(
    readers: FileReaders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A ``Path``, say, which imports pass over, but notebooks put there."""
    path: list[Any] = [*sys.path, tmp_path, None, b"/bytes"]
    monkeypatch.setattr(sys, "path", path)
    assert readers.read(places(write(tmp_path, [b"one"]))) == [b"one"]
    assert readers._usable


@pytest.mark.filterwarnings("ignore:a process that was to read files failed")
@pytest.mark.parametrize("program", ["/there/is/no/python", "/bin/true"])
def test_where_none_can_be_started_this_one_reads(
    readers: FileReaders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str
) -> None:
    monkeypatch.setattr("sys.executable", program)
    paths = write(tmp_path, [b"one", b"two"])
    for _ in range(3):
        assert readers.read(places(paths)) == [b"one", b"two"]
    assert len(readers._all) <= 1


def test_nothing_is_asked_of_them_for_no_files(readers: FileReaders, tmp_path: Path) -> None:
    assert readers.read([]) == []
    assert readers.read(places(write(tmp_path, [b"one"]))) == [b"one"]


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_does_not_keep_them_alive(tmp_path: Path) -> None:
    readers = FileReaders()
    readers.read(places(write(tmp_path, [b"x"])))
    child = os.fork()
    if child == 0:
        time.sleep(60)
        os._exit(0)
    try:
        started = time.monotonic()
        readers.close()
        assert time.monotonic() - started < 30
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_processes_end_when_closed(tmp_path: Path) -> None:
    readers = FileReaders()
    readers.read(places(write(tmp_path, [b"x"])))
    (reader,) = readers._all
    assert reader._process.poll() is None
    readers.close()
    assert reader._process.returncode == 0


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs Linux")
def test_shards_stay_open_but_not_all(tmp_path: Path) -> None:
    paths = write(tmp_path, [bytes([number]) * 4 for number in range(5)])
    shards = OpenShards(most=2)
    for number in (0, 1, 0, 2, 3, 4, 0):
        assert shards.read(Place(paths[number], 1, 2)) == bytes([number]) * 2
    opened = [descriptor.resolve() for descriptor in Path("/proc/self/fd").iterdir()]
    assert sorted(path.name for path in opened if path.parent == tmp_path.resolve()) == ["0", "4"]
    Path(paths[0]).unlink()  # it is open, and what was indexed is still there
    assert shards.read(Place(paths[0], 0, 1)) == b"\0"
    with pytest.raises(FileNotFoundError):
        shards.read(Place(paths[0]))
    Path(paths[4]).write_bytes(b"")
    with pytest.raises(OSError, match="No data") as raised:
        shards.read(Place(paths[4], 0, 1))
    assert raised.value.errno == errno.ENODATA
