"""Run the demonstration and record what it shows.

    python benchmarks/demo.py

The last kNN accuracy of every subject (raw pixels, untrained backbone, MoCo v2+, XMoCo) becomes a
record in benchmarks/results/demo.jsonl, those of trained ones with the seconds their run took.
The runs themselves are kept only where ``--out`` says so; benchmarks/readme.py draws them.
"""

import argparse
import tempfile
from datetime import datetime
from pathlib import Path

from recipe import RESULTS, read_records
from xmoco.demo import run_demo
from xmoco.records import Record, append_records


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="where the two runs go; default: temporary")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        runs = options.out or Path(temporary) / "demo"
        run_demo(runs)
        records = final_records(runs)
    path = options.results / "demo.jsonl"
    append_records(path, records)
    print(f"records in {path}")


def final_records(runs: Path) -> list[Record]:
    """The last record of every subject; both runs measure the same baselines, which count once."""
    last: dict[str, Record] = {}
    for method in ("mocov2plus", "xmoco"):
        records = read_records(runs / method / "metrics.jsonl", seconds=0)
        seconds = seconds_between(records[1], records[-1])
        for record in records:
            if record.subject == method:
                record.protocol["run_seconds"] = seconds
            else:  # measured before training
                del record.protocol["run_seconds"], record.protocol["images_per_second"]
            last[record.subject] = record
    return list(last.values())


def seconds_between(start: Record, end: Record) -> float:
    """Training begins when the untrained backbone is judged and ends when the trained one is."""
    started, ended = (datetime.fromisoformat(record.time) for record in (start, end))
    return (ended - started).total_seconds()


if __name__ == "__main__":
    main()
