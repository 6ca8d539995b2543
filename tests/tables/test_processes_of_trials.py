"""Processes that train trials: stopped together, and never left behind; and counted on a GPU."""

import multiprocessing
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from xmoco.tables.processes import stop_all
from xmoco.tables.sharing import taking_part

SPAWN = multiprocessing.get_context("spawn")
SLOW_TO_STOP = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: (time.sleep(1.5), sys.exit(0)))
open({!r}, "w").close()
time.sleep(60)
"""


def wait_for(*files: Path) -> None:
    until = time.monotonic() + 60
    while not all(file.exists() for file in files):
        assert time.monotonic() < until
        time.sleep(0.05)


def test_all_are_asked_to_stop_before_any_is_waited_for(tmp_path: Path) -> None:
    begun = [tmp_path / str(number) for number in range(3)]
    processes = [SPAWN.Process(target=exec, args=[SLOW_TO_STOP.format(str(p)), {}]) for p in begun]
    for process in processes:
        process.start()
    wait_for(*begun)
    started = time.monotonic()
    stop_all(processes)
    assert time.monotonic() - started < 4  # one after the other, it were 4.5 s
    assert [process.exitcode for process in processes] == [0, 0, 0]


CHILD = """
import os, time
from xmoco.tables.processes import end_with_parent
end_with_parent()
open({!r}, "w").write(str(os.getpid()))
time.sleep(60)
"""
PARENT = """
import multiprocessing, time
if __name__ == "__main__":
    process = multiprocessing.get_context("spawn").Process(target=exec, args=[{!r}, {{}}])
    process.start()
    time.sleep(60)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_a_process_ends_when_its_parent_is_killed(tmp_path: Path) -> None:
    told = tmp_path / "child"
    (tmp_path / "parent.py").write_text(PARENT.format(CHILD.format(str(told))))
    parent = subprocess.Popen([sys.executable, tmp_path / "parent.py"])
    wait_for(told)
    time.sleep(0.2)
    child = int(told.read_text())
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    until = time.monotonic() + 20
    while True:
        try:
            state = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            break
        if state == "Z":  # whom nobody collects here
            break
        assert time.monotonic() < until
        time.sleep(0.05)


HOLDER = """
import sys, time
from pathlib import Path
from xmoco.tables.sharing import taking_part
with taking_part(Path(sys.argv[1])) as count:
    print(count(), flush=True)
    time.sleep(60)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="locks")
def test_trials_that_share_a_gpu_are_counted_while_they_live(tmp_path: Path) -> None:
    place = tmp_path / "gpu"
    with taking_part(place) as count:
        assert count() == 1
        command = [sys.executable, "-c", HOLDER, str(place)]
        other = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert other.stdout is not None
        assert other.stdout.readline() == "2\n"
        assert count() == 2
        other.kill()
        other.wait()
        other.stdout.close()
        assert len([*place.iterdir()]) == 2  # what it held is free, though its file is left
        assert count() == 1
    with taking_part(None) as count:
        assert count() == 1
