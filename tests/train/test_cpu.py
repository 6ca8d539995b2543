"""Memory that is freed stays with the process, where malloc is glibc's."""

import ctypes
import platform
import subprocess
import sys

import pytest

from xmoco.train.cpu import keep_memory

# Large blocks come and go; how many pages had to be fetched from the system for the last of them?
COUNT_FAULTS = """
import ctypes, resource
from xmoco.train.cpu import keep_memory
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
if {keep}:
    assert keep_memory()
def use(megabytes):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [libc.malloc(megabytes << 20) for _ in range(4)]
    for block in blocks:
        ctypes.memset(block, 1, megabytes << 20)
    for block in blocks:
        libc.free(block)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
use(48)
print(use(48))
"""


def faults(keep: bool) -> int:
    done = subprocess.run(
        [sys.executable, "-c", COUNT_FAULTS.format(keep=keep)],
        capture_output=True,
        text=True,
        check=True,
    )
    return int(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="malloc is another here")
def test_freed_memory_is_there_for_the_next_step() -> None:
    assert faults(keep=False) > 1000
    assert faults(keep=True) < 100


def test_another_malloc_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda _: object())
    assert not keep_memory()
    monkeypatch.setattr(sys, "platform", "darwin")
    assert not keep_memory()
