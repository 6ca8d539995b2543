"""Train a recipe and record how its kNN accuracy grows with time.

    python benchmarks/recipe.py cifar10 --data cifar10.tar.xz epochs=20

Every kNN measurement of the run becomes a record in benchmarks/results, with the seconds of
training it took; a table is printed at the end. Other evaluations are separate programs. A run with
other settings than the recipe's is not what the recipe promises: its records lie in a file apart,
``changed-recipes.jsonl``, and name the changes.
"""

import argparse
import dataclasses
import re
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

import xmoco
from xmoco.config import MonitorConfig
from xmoco.records import Record, append_records, read_lines

RESULTS = Path(__file__).parent / "results"
NO_CHANGES = {"epochs", "seed", *MonitorConfig.model_fields}
"""Settings that leave a recipe what it is: records name epochs and seed, and kNN only watches."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recipe")
    parser.add_argument("settings", nargs="*", help="changes to the recipe, key=value")
    parser.add_argument("--data", help="images, where not the recipe's own")
    parser.add_argument("--run", type=Path, help="where the run folder goes; default: temporary")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_intermixed_args()
    with tempfile.TemporaryDirectory() as temporary:
        run = options.run or Path(temporary) / "run"
        result = xmoco.pretrain(
            options.recipe, data=options.data, out=run, overrides=options.settings
        )
        records = read_records(run / "metrics.jsonl", result.seconds)
    path = options.results / f"recipe-{records[-1].work}.jsonl"
    if changes := changes_of(options.settings):
        path = options.results / "changed-recipes.jsonl"
        for record in records:
            record.protocol["changes"] = changes
    append_records(path, records)
    table = Table(title=f"{records[-1].work}: kNN top-1 (k {records[-1].protocol['k']})")
    for heading in ("subject", "epoch", "kNN"):
        table.add_column(heading, justify="left" if heading == "subject" else "right")
    for record in records:
        table.add_row(record.subject, str(record.protocol["epoch"]), f"{record.value:.2f} %")
    Console().print(table)
    print(f"trained {result.seconds:.0f} s; records in {path}")


def changes_of(settings: list[str]) -> str:
    """Those settings, given as ``key=value`` or ``section.key=value``, that change the recipe."""
    return " ".join(
        setting
        for setting in settings
        if setting.partition("=")[0].rpartition(".")[2] not in NO_CHANGES
    )


def read_records(metrics: Path, seconds: float) -> list[Record]:
    """The run's kNN records, each with the settings and the time of the whole run."""
    # Images by their name: where they lay is nobody's business.
    settings = re.sub(r"(source: |root: )\S*/", r"\1", (metrics.parent / "config.yaml").read_text())
    lines = [line.entry for line in read_lines(metrics)]
    speeds = sorted(line["values"]["images_per_second"] for line in lines if "values" in line)
    known = {field.name for field in dataclasses.fields(Record)}
    records = []
    for line in lines:
        if line.get("measure") == "knn_top1":
            record = Record(**{name: value for name, value in line.items() if name in known})
            record.protocol["run_seconds"] = round(seconds, 1)
            record.protocol["images_per_second"] = round(speeds[len(speeds) // 2])
            records.append(record)
    records[-1].protocol["settings"] = settings
    return records


if __name__ == "__main__":
    main()
