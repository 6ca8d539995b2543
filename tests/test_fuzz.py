"""The program that gives damaged inputs notices everything that may go wrong with one."""

import contextlib
import io
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from helpers import run_group
from xmoco.errors import UserError

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
LIMIT = 2**26


def refuse() -> None:
    raise UserError("no.")


def fail() -> None:
    raise ZeroDivisionError("division")


ACTIONS: dict[str, Callable[[], object]] = {
    "fine": lambda: Path("inside.txt").write_text("x"),
    "refused": refuse,
    "no file": lambda: Path("nothing").read_text(),
    "traceback": fail,
    "hang": lambda: time.sleep(60),
    "crash": os.abort,
    "elsewhere": lambda: Path("../elsewhere.txt").write_text("x"),
    "program": lambda: subprocess.run(["true"], check=True),
    "memory": lambda: bytearray(os.urandom(2 * LIMIT)),
}


def watch_all(_: int, folder: Path) -> None:
    """In a process of its own, since it is forked, and what it listens to is never unheard."""
    sys.path.insert(0, str(BENCHMARKS))
    import fuzz

    fuzz.LONGEST, fuzz.MOST_MEMORY = 2.0, LIMIT
    fuzz.KINDS = {name: (lambda *_, act=act: act, 1) for name, act in ACTIONS.items()}
    cases = [fuzz.Case(name, 0) for name in ACTIONS]
    with contextlib.redirect_stdout(io.StringIO()):
        found = fuzz.watch(cases, 0, fuzz.Templates(folder), folder, math.inf)
    told: dict[str, Any] = {"failures": found.failures, "refused": dict(found.refused)}
    (folder / "told.json").write_text(json.dumps(told))


def test_whatever_goes_wrong_is_noticed(tmp_path: Path) -> None:
    run_group(1, watch_all, tmp_path)
    told = json.loads((tmp_path / "told.json").read_text())
    problems = {case.removesuffix(":0"): problem for case, problem in told["failures"].items()}
    words = {
        "traceback": "ZeroDivisionError: division",
        "hang": "took longer than 2 s",
        "crash": "ended the process",
        "elsewhere": f"wrote to {tmp_path}/case/elsewhere.txt",
        "program": "subprocess.Popen ('true'",
        "memory": "took 0.",
    }
    assert problems.keys() == words.keys()
    for kind, word in words.items():
        assert word in problems[kind], (kind, problems[kind])
    assert {kind for kind, count in told["refused"].items() if count} == {"refused", "no file"}
