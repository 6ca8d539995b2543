"""Give xmoco thousands of damaged and hostile inputs, and count what goes wrong.

    python benchmarks/fuzz.py
    python benchmarks/fuzz.py --kinds images archives --cases 500
    python benchmarks/fuzz.py --one images:1234       # a case by its number, with its traceback

A case goes wrong if it raises what is no sentence, takes longer than a minute, kills the process,
needs more than 4 GiB more than before, starts a program or writes outside its run folder. Cases run
by the hundred in forked processes, which are watched; each is a function of the seed and its
number. What is given is in fuzz_cases.py. A record goes to benchmarks/results.
"""

import argparse
import json
import math
import os
import random
import resource
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from fuzz_cases import KINDS, SENTENCES, Templates, make_templates
from xmoco.records import Record, append_records, commit, machine, versions

RESULTS = Path(__file__).parent / "results"
LONGEST = 60.0  # seconds of a case
MOST_MEMORY = 4 * 2**30  # bytes that a case may add
AT_ONCE = 200  # cases of one process


@dataclass(frozen=True)
class Case:
    kind: str
    number: int

    def __str__(self) -> str:
        return f"{self.kind}:{self.number}"


@dataclass
class Outcome:
    """What became of all cases."""

    failures: dict[str, str] = field(default_factory=dict)
    refused: Counter[str] = field(default_factory=Counter)
    done: Counter[str] = field(default_factory=Counter)
    seconds: Counter[str] = field(default_factory=Counter)
    slowest: tuple[float, str] = (0.0, "")
    growth: tuple[int, str] = (0, "")

    def add(self, case: Case, told: dict[str, Any]) -> None:
        self.done[case.kind] += 1
        self.seconds[case.kind] += told["seconds"]
        self.slowest = max(self.slowest, (told["seconds"], str(case)))
        self.growth = max(self.growth, (told["growth"], str(case)))
        if told["growth"] > MOST_MEMORY:
            told["problem"] = f"took {told['growth'] / 2**30:.1f} GiB"
        if told["problem"]:
            self.failures[str(case)] = told["problem"]
            print(f"\n{case}\n{told['problem']}\n", flush=True)
        self.refused[case.kind] += told["refused"]


# In the process that runs the cases


class Guard:
    """Notices, by Python's own audit, what is written where, and programs that are started."""

    WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
    STARTING = ("subprocess.Popen", "os.exec", "os.posix_spawn", "os.system", "socket.connect")
    CHANGING = ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.symlink", "os.link")

    def __init__(self) -> None:
        self.allowed: str | None = None
        self.seen: list[str] = []
        sys.addaudithook(self.hook)

    def hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.allowed is None:
            return
        own = event == "subprocess.Popen" and arguments[0] == sys.executable  # that read files
        if event in self.STARTING and not own:
            self.seen.append(f"{event} {arguments[:2]!r:.200}")
        elif event == "open":
            path, mode, flags = arguments
            writes = any(letter in (mode or "") for letter in "wax+") or flags & self.WRITING
            if writes and isinstance(path, str | bytes | os.PathLike):
                self._note(path)
        elif event in self.CHANGING:
            self._note(arguments[0])

    def _note(self, path: Any) -> None:
        place = os.path.abspath(os.fsdecode(path))  # noqa: PTH100
        assert self.allowed is not None
        if not place.startswith(self.allowed) and place not in ("/dev/null", "/dev/tty"):
            self.seen.append(f"wrote to {place}")

    @contextmanager
    def watching(self, allowed: Path) -> Iterator[list[str]]:
        self.seen, self.allowed = [], str(allowed)
        try:
            yield self.seen
        finally:
            self.allowed = None


def run_cases(cases: list[Case], seed: int, templates: Templates, scratch: Path, pipe: int) -> None:
    """Tell of each case when it begins and when it ends, as lines of json."""
    warnings.simplefilter("ignore")
    size = _status("VmSize")
    resource.setrlimit(resource.RLIMIT_AS, (size + MOST_MEMORY + 2**30,) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    silence = os.open(scratch / "said.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(silence, 1)
    os.dup2(silence, 2)
    guard = Guard()
    for case in cases:
        _tell(pipe, {"begun": True})
        _tell(pipe, run_case(case, seed, templates, scratch / "case", guard))


def run_case(
    case: Case, seed: int, templates: Templates, folder: Path, guard: Guard, loud: bool = False
) -> dict[str, Any]:
    shutil.rmtree(folder, ignore_errors=True)
    out = folder / "out"
    out.mkdir(parents=True)
    os.environ["XDG_CACHE_HOME"] = str(out / "cache")
    os.chdir(out)
    make, _ = KINDS[case.kind]
    rng = random.Random(f"{seed} {case}")
    problem, refused = "", False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        action = make(rng, folder, templates)
    Path("/proc/self/clear_refs").write_text("5")  # the most memory so far is forgotten
    before, started = _status("VmRSS"), time.perf_counter()
    try:
        with guard.watching(out) as seen:
            action()
    except SENTENCES:
        refused = True
    except OSError as error:
        refused = error.errno is not None
        problem = "" if refused else _traceback()
    except BaseException:
        problem = _traceback()
        if loud:
            raise
    return {
        "seconds": time.perf_counter() - started,
        "growth": max(0, _status("VmHWM") - before),
        "problem": problem or "; ".join(dict.fromkeys(seen)),
        "refused": refused,
    }


def _traceback() -> str:
    return traceback.format_exc(limit=-6)[-3000:]


def _status(name: str) -> int:
    """Bytes, by the system's account of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise LookupError(name)


def _tell(pipe: int, content: dict[str, Any]) -> None:
    os.write(pipe, (json.dumps(content) + "\n").encode())


# In the process that watches


def watch(
    cases: list[Case], seed: int, templates: Templates, scratch: Path, most_minutes: float
) -> Outcome:
    outcome = Outcome()
    left = list(cases)
    started = time.monotonic()
    while left and time.monotonic() < started + 60 * most_minutes:
        batch = left[:AT_ONCE]
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reader)
            try:
                run_cases(batch, seed, templates, scratch, writer)
            except BaseException:  # a mistake of this program, in making a case
                (scratch / "mistake.txt").write_text(traceback.format_exc())
                os._exit(1)
            os._exit(0)
        os.close(writer)
        done, hung = 0, False
        for told in _lines(reader):
            if told is None:
                hung = True
                os.kill(child, signal.SIGKILL)
            elif "begun" not in told:
                outcome.add(batch[done], told)
                done += 1
        os.close(reader)
        _, status = os.waitpid(child, 0)
        if (scratch / "mistake.txt").exists():
            raise RuntimeError((scratch / "mistake.txt").read_text())
        if done < len(batch):  # the case that was under way is to blame
            what = f"took longer than {LONGEST:.0f} s" if hung else f"ended the process ({status})"
            end = {"seconds": 0.0, "growth": 0, "problem": what, "refused": False}
            outcome.add(batch[done], end)
            done += 1
        left = left[done:]
        minutes = (time.monotonic() - started) / 60
        print(
            f"{len(cases) - len(left):,} of {len(cases):,} cases, {minutes:.1f} minutes, "
            f"{len(outcome.failures)} failures",
            flush=True,
        )
    return outcome


def _lines(reader: int) -> Iterator[dict[str, Any] | None]:
    """What the process tells, until it ends; none if it says nothing for too long."""
    rest = b""
    while True:
        if not select.select([reader], [], [], LONGEST)[0]:
            yield None
        more = os.read(reader, 2**16)
        if not more:
            return
        *whole, rest = (rest + more).split(b"\n")
        yield from map(json.loads, whole)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--cases", type=int, help="of each kind; default: as fuzz_cases.py says")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=math.inf, help="after which it ends")
    parser.add_argument("--one", help="KIND:NUMBER of a single case, to look at")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()

    torch.set_num_threads(1)  # no threads, so that processes can be forked
    commit(), versions(), machine()  # found out by starting git, which no case may
    with tempfile.TemporaryDirectory(prefix="xmoco-fuzz-") as place:
        scratch = Path(place)
        templates = make_templates(scratch / "templates")
        if options.one:
            kind, _, number = options.one.partition(":")
            case = Case(kind, int(number))
            print(run_case(case, options.seed, templates, scratch / "case", Guard(), loud=True))
            return
        cases = [
            Case(kind, number)
            for kind in options.kinds
            for number in range(options.cases or KINDS[kind][1])
        ]
        random.Random(options.seed).shuffle(cases)
        started = time.monotonic()
        outcome = watch(cases, options.seed, templates, scratch, options.minutes)
        minutes = (time.monotonic() - started) / 60
        os.chdir("/")
    show(outcome)
    if options.kinds == list(KINDS):
        path = options.results / "fuzz.jsonl"
        append_records(path, [record_of(outcome, options.seed, minutes)])
        print(f"records in {path}")
    if outcome.failures:
        sys.exit(1)


def record_of(outcome: Outcome, seed: int, minutes: float) -> Record:
    protocol = {
        "data": "mutated inputs",
        "cases": outcome.done.total(),
        "refused": outcome.refused.total(),
        "kinds": dict(sorted(outcome.done.items())),
        "failures": sorted(outcome.failures),
        "minutes": round(minutes, 1),
        "slowest_seconds": round(outcome.slowest[0], 2),
        "slowest": outcome.slowest[1],
        "most_memory_gib": round(outcome.growth[0] / 2**30, 3),
        "limit_seconds": LONGEST,
        "limit_memory_gib": MOST_MEMORY / 2**30,
    }
    failures = len(outcome.failures)
    return Record("fuzz_failures", failures, "cases", "xmoco", "fuzz", protocol, seed)


def show(outcome: Outcome) -> None:
    table = Table()
    table.add_column("kind")
    for heading in ("cases", "refused", "ms each", "failures"):
        table.add_column(heading, justify="right")
    for kind, count in sorted(outcome.done.items()):
        failures = sum(case.partition(":")[0] == kind for case in outcome.failures)
        each = 1000 * outcome.seconds[kind] / count
        table.add_row(
            kind, f"{count:,}", f"{outcome.refused[kind]:,}", f"{each:.0f}", f"{failures}"
        )
    Console().print(table)
    print(f"slowest: {outcome.slowest[0]:.1f} s, {outcome.slowest[1]}")
    print(f"most memory: {outcome.growth[0] / 2**30:.2f} GiB, {outcome.growth[1]}")


if __name__ == "__main__":
    main()
