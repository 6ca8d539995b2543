"""Run the tests that need a GPU, and record that they passed.

    python benchmarks/gpu_tests.py            # or: make test-gpu

These are the tests marked ``gpu``: kernels, nvJPEG, streaming, CUDA graphs against plain steps. A
pass becomes a record in benchmarks/results/gpu-tests.jsonl; anything else only an exit status.
Other arguments are pytest's. Where there is no git, XMOCO_COMMIT tells the commit.
"""

import argparse
import subprocess
import sys
import tempfile
from collections import Counter
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
            [sys.executable, "-m", "pytest", *fixed, *arguments], cwd=TREE, check=False
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


def read_report(report: Path) -> Record:
    """The record of a pass, from pytest's own report."""
    cases = list(ElementTree.parse(report).getroot().iter("testcase"))
    outcomes = Counter(outcome(case) for case in cases)
    protocol = {
        "failed": outcomes["failed"],
        "skipped": outcomes["skipped"],
        "seconds": round(sum(float(case.get("time", 0)) for case in cases), 1),
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
