"""A run of xmoco from another checkout, for ``speed.py --beside CHECKOUT``, which calls this.

Everything but the way to ask it is of that checkout: its package (PYTHONPATH says so) and its
benchmarks, by which the run is made as it was timed there.
"""

import sys

sys.path.pop(0)  # the programs beside this one, which have the same names as those over there

from xmoco import cli  # noqa: I001 - first: it sets what a process of xmoco is to find

import importlib
import importlib.util
import multiprocessing
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

assert cli.app
FORMER_KEYS = {"preload_gib": "resident_gib"}
"""What settings were called where the participants were contenders."""


class Shown:
    """A participant whose settings stay in its process: elsewhere they would not be understood."""

    config = None

    def __init__(self, participant: Any) -> None:
        self.participant = participant

    @property
    def graphed(self) -> bool:
        return getattr(self.participant.training.stepper, "graph", None) is not None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.participant, name)


def main() -> None:
    checkout, pipe, recipe, folder, source, pixels, *overrides = sys.argv[1:]
    serve = module_at(Path(__file__).with_name("own_process.py")).serve
    sys.path.insert(0, str(Path(checkout) / "benchmarks"))
    if importlib.util.find_spec("contenders") is None:
        kind = importlib.import_module("baselines").Workload
    else:
        kind = importlib.import_module("contenders").Course
        overrides = [former(override) for override in overrides]
    workload = kind(
        recipe,
        tuple(overrides),
        Path(folder),
        source or None,
        Path(pixels) if pixels else None,
    )
    serve(
        lambda: Shown(workload.xmoco()),
        Connection(int(pipe)),
        multiprocessing.get_start_method(),
    )


def module_at(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def former(override: str) -> str:
    key, _, value = override.partition("=")
    return f"{FORMER_KEYS.get(key, key)}={value}"


if __name__ == "__main__":
    main()
