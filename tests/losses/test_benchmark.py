"""benchmarks/loss.py at a toy's size: it runs, prints its table and leaves comparable records."""

import importlib
import json
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.parametrize("fits", [True, False])
def test_every_loss_is_timed_and_the_plain_one_only_where_it_fits(
    fits: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    benchmark = importlib.import_module("loss")
    monkeypatch.setattr(benchmark.Work, "fits_plainly", fits)
    size = ["--device", "cpu", "--batch", "4", "--lengths", "8", "12", "--features", "5"]
    arguments = ["loss.py", *size, "--trials", "2", "--results", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", arguments)
    benchmark.main()
    records = [json.loads(line) for line in (tmp_path / "loss.jsonl").read_text().splitlines()]
    subjects = ["mocov2plus", "xmoco", "xmoco (plain)"][: 3 if fits else 2]
    assert [(record["work"], record["subject"]) for record in records] == [
        (work, subject) for work in ("loss-4x8x5", "loss-4x12x5") for subject in subjects
    ]
    for record in records:
        assert (record["measure"], record["unit"]) == ("loss_ms", "ms")
        assert record["value"] > 0
        assert record["protocol"]["launch"] == "eager"
    assert ("does not fit" in capsys.readouterr().out) != fits
