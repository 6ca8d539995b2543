"""Run the tests that need a GPU, and record that they passed.

    python benchmarks/gpu_tests.py            # or: make test-gpu

These are the tests marked ``gpu``: kernels, nvJPEG, streaming, CUDA graphs against plain steps. A
pass becomes a record in benchmarks/results/gpu-tests.jsonl; anything else only an exit status.
Most of their time is the host's (imports, compiling kernels), so several processes share the GPU
where pytest-xdist is installed. Other arguments are pytest's, ``-n 1`` for one. Where there is no
git, XMOCO_COMMIT tells the commit.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from xml.etree import ElementTree

import torch

from recipe import RESULTS
from xmoco.records import Record, append_records

TREE = Path(__file__).resolve().parent.parent
FAILED = {"failure", "error"}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, default=RESULTS)
    options, arguments = parser.parse_known_args()
    if not torch.cuda.is_available():
        sys.exit("benchmarks/gpu_tests.py needs CUDA.")
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        fixed = ["-m", "gpu", "-p", "no:cacheprovider", f"--junitxml={report}", *files()]
        status = subprocess.run(
            [sys.executable, "-m", "pytest", *fixed, *shared_out(), *arguments],
            cwd=TREE,
            check=False,
        ).returncode
        if status:
            sys.exit(status)
        found = read_report(report)
    append_records(options.results / "gpu-tests.jsonl", [found])
    print(f"{found.value:g} tests passed on {torch.cuda.get_device_name()}, {found.protocol}")


def files() -> list[Path]:
    """Those with such tests: what others import need not be installed."""
    everything = sorted((TREE / "tests").rglob("test_*.py"))
    return [file for file in everything if "pytest.mark.gpu" in file.read_text(encoding="utf-8")]


def shared_out() -> list[str]:
    """Over three of four cores, where pytest-xdist is there to do it."""
    return ["-n", str(max(1, (os.cpu_count() or 1) * 3 // 4))] if find_spec("xdist") else []


def read_report(report: Path) -> Record:
    """The record of a pass, from pytest's own report."""
    (suite,) = ElementTree.parse(report).getroot().iter("testsuite")
    outcomes = Counter(outcome(case) for case in suite.iter("testcase"))
    protocol = {
        "failed": outcomes["failed"],
        "skipped": outcomes["skipped"],
        "seconds": round(float(suite.get("time", 0)), 1),
    }
    passed = outcomes["passed"]
    return Record("gpu_tests_passed", passed, "tests", "xmoco", "gpu-tests", protocol, seed=0)


def outcome(case: ElementTree.Element) -> str:
    told = {element.tag for element in case}
    if told & FAILED:
        return "failed"
    return "skipped" if "skipped" in told else "passed"


if __name__ == "__main__":
    main()
