"""What each method learns in a demo-sized run, beside the untrained backbone.

    python benchmarks/methods.py
    python benchmarks/methods.py --only byol swav

Every method trains by the ``demo`` recipe on the embedded patterns, with settings of its own where
the recipe's are for others: under two minutes each, where two cores have nothing else to do. It
shows that a method learns, not which one is best: none was tuned, but ReSSL was given other
settings after a first try that learned nothing. The last kNN accuracy of each, and that of the
backbone before training, become records in benchmarks/results/methods.jsonl; a method that is there
already, with the same settings, is not trained again.
"""

import argparse
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import xmoco
from recipe import RESULTS, read_records
from xmoco.records import Record, append_records, read_lines
from xmoco.settings import load_config

SETTINGS = {
    "xmoco": "",
    "mocov2plus": "",
    "simclr": "temperature=0.5",
    # A predictor as wide as the head, and a momentum encoder that keeps up with 560 steps.
    "byol": "predictor_hidden=256 key_momentum=0.9 key_momentum_end=1.0",
    # Ten for every family of patterns. A batch of 64 cannot be balanced over these: eight more take
    # part from the start, and codes are sharper than for large batches.
    "swav": "prototypes=100 freeze_prototypes_epochs=0.2 queue_length=512 queue_from_epoch=0 "
    "epsilon=0.03",
    # With no positive to hold on to, it takes both directions, a steadier momentum encoder and
    # sharper targets to leave its flat beginning within so few steps.
    "ressl": "symmetric=true key_momentum=0.99 key_temperature=0.02",
    "sce": "",
    "co2": "",
    "alignuniform": "",
    "jcl": "",
    "uota": "prototypes=100 freeze_prototypes_epochs=0.2 queue_length=512 queue_from_epoch=0 "
    "epsilon=0.03",
    # 64 features can be told from as many, and the head is narrow: so is the predictor.
    "simsiam": "predictor_hidden=64",
    "barlowtwins": "",
    # Its loss is twenty times as large as others'.
    "vicreg": "learning_rate=0.1",
    "msf": "predictor_hidden=256",
    "mnn": "predictor_hidden=256",
    "supervised": "",
    "instdisc": "temperature=0.1",
    "moco": "",
}
UNTRAINED = "untrained"
FILE = "methods.jsonl"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=list(SETTINGS), default=list(SETTINGS))
    parser.add_argument("--recipe", default="demo")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    path = options.results / FILE
    for method in options.only:
        if method not in known(path, options.recipe):
            append_records(path, train(method, options.recipe))
    show(known(path, options.recipe))


def overrides(method: str) -> list[str]:
    return [f"method={method}", *SETTINGS[method].split()]


def train(method: str, recipe: str) -> list[Record]:
    """The last record of the method, and the one of the backbone that it started with."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        result = xmoco.pretrain(recipe, out=run, overrides=overrides(method))
        records = read_records(run / "metrics.jsonl", result.seconds)
    by_subject = {record.subject: record for record in records}
    for record in by_subject.values():
        for speed in ("run_seconds", "images_per_second"):  # no part of it: cores may be shared
            del record.protocol[speed]
        record.protocol["method"] = identity(method, recipe)
    # Records here go by the method's name; how it differs from its publication, its settings tell.
    subject = load_config(recipe, overrides(method)).method.subject
    return [by_subject[UNTRAINED], replace(by_subject[subject], subject=method)]


def identity(method: str, recipe: str) -> dict[str, Any]:
    """The method with all its settings."""
    return load_config(recipe, overrides(method)).method.model_dump(mode="json")


def known(path: Path, recipe: str) -> dict[str, tuple[float, float]]:
    """kNN of methods with today's settings, before and after training.

    Settings that a method did not have then are at their defaults, which change nothing.
    """
    if not path.exists():
        return {}
    found: dict[str, tuple[float, float]] = {}
    before = 0.0
    for record in (line.entry for line in read_lines(path)):
        if record["subject"] == UNTRAINED:
            before = record["value"]
        elif record["protocol"]["method"].items() <= identity(record["subject"], recipe).items():
            found[record["subject"]] = (before, record["value"])
    return found


def show(found: dict[str, tuple[float, float]]) -> None:
    table = Table(title="kNN top-1 on patterns of ten families, by the demo recipe")
    for heading in ("method", "untrained", "trained", "gained"):
        table.add_column(heading, justify="left" if heading == "method" else "right")
    for method, (before, after) in found.items():
        table.add_row(method, f"{before:.1f} %", f"{after:.1f} %", f"{after - before:+.1f}")
    Console().print(table)


if __name__ == "__main__":
    main()
