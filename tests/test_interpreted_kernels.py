"""Kernels on a machine without CUDA: Triton's interpreter runs them on the CPU.

It must be chosen before Triton is imported, so their tests run again in another process, which is
one for all of them: starting it takes as long as they do.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from helpers import interpreter_out_of_date

pytest.importorskip("triton")

HERE = Path(__file__).parent
FILES = [
    HERE / "nn" / "test_fused_norm.py",
    HERE / "nn" / "test_fused_stem.py",
    HERE / "data" / "test_view_kernels.py",
]


@pytest.mark.skipif(torch.cuda.is_available(), reason="they run as they are")
@pytest.mark.skipif(interpreter_out_of_date(), reason="Triton's is older than this numpy")
def test_kernels_through_the_interpreter() -> None:
    command = [sys.executable, "-m", "pytest", "-rA", "-p", "no:cacheprovider", *map(str, FILES)]
    environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    # As a worker of several, this process is told so by variables that are not for its child.
    for name in [name for name in environment if name.startswith("PYTEST_")]:
        del environment[name]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stdout + run.stderr
    for file in FILES:
        assert f"PASSED tests/{file.relative_to(HERE).as_posix()}::" in run.stdout
