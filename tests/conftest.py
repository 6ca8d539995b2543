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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What is marked ``gpu`` needs CUDA, or Triton's interpreter in its stead."""
    if torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1":
        return
    for item in items:
        marker = item.get_closest_marker("gpu")
        if marker is not None and not marker.kwargs.get("elsewhere", False):
            item.add_marker(pytest.mark.skip(reason="needs CUDA"))


def pytest_configure(config: pytest.Config) -> None:
    if config.pluginmanager.has_plugin("xdist"):  # it may not be there, as where GPUs are lent
        from scheduling import Scheduling

        config.pluginmanager.register(Scheduling())


@pytest.fixture(scope="module")
def benchmarks() -> Iterator[None]:
    """Lets the programs in benchmarks/ be imported, as they import each other."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parent.parent / "benchmarks"))
        yield
