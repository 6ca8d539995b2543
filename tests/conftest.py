"""What all tests share."""

import os
from collections.abc import Iterator
from pathlib import Path

# Before torch is imported: two test processes on two cores must not fight for both.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def benchmarks() -> Iterator[None]:
    """Lets the programs in benchmarks/ be imported, as they import each other."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parent.parent / "benchmarks"))
        yield
