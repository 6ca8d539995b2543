"""Memory on the CPU: kept by the process, since every step wants it again."""

import ctypes
import sys

# mallopt's names for its settings, from glibc's malloc.h.
TRIM_THRESHOLD, TOP_PAD, MMAP_MAX = -1, -2, -4
PAD = 64 * 2**20


def keep_memory() -> bool:
    """Have malloc keep what is freed. False where there is no glibc, and nothing is changed.

    glibc gives large blocks back to the system when they are freed, and the system has to clear
    every page before a process gets it: each step would pay for its activations again.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    settings = {MMAP_MAX: 0, TRIM_THRESHOLD: -1, TOP_PAD: PAD}  # no mappings, no giving back
    return all(mallopt(name, value) for name, value in settings.items())
