"""Records carry their protocol and what they were measured with, and survive json."""

import json
import re
import socket
from dataclasses import asdict
from pathlib import Path

import pytest

from xmoco import records
from xmoco.errors import UserError
from xmoco.records import Record, append_records


def record(value: float = 87.25) -> Record:
    return Record("knn_top1", value, "%", "xmoco", "cifar10-resnet18-200ep", {"k": 200}, 3)


def test_a_record_is_one_line_of_json_with_all_fields() -> None:
    one = record()
    text = one.json()
    assert "\n" not in text
    assert json.loads(text) == asdict(one)
    assert list(json.loads(text)) == [
        "measure",
        "value",
        "unit",
        "subject",
        "work",
        "protocol",
        "seed",
        "commit",
        "versions",
        "machine",
        "time",
    ]


def test_what_it_was_measured_with() -> None:
    one = record()
    assert {"python", "xmoco", "torch", "torchvision"} <= one.versions.keys()
    assert {"system", "processor", "threads"} <= one.machine.keys()
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", one.time)
    assert one.commit is None or re.fullmatch(r"[0-9a-f]{12}\+?", one.commit)
    assert socket.gethostname() not in json.dumps(one.machine)


def test_elsewhere_than_in_a_clone_there_is_no_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_git(*_: object) -> str:
        raise FileNotFoundError

    monkeypatch.setattr(records, "_git", no_git)
    assert records.commit.__wrapped__() is None


def test_records_are_appended(tmp_path: Path) -> None:
    file = tmp_path / "deep" / "results.jsonl"
    append_records(file, [record(1), record(2)])
    append_records(file, [record(3)])
    file.write_text(file.read_text().rstrip("\n"))  # by hand, say
    append_records(file, [record(4)])
    values = [json.loads(line)["value"] for line in file.read_text().splitlines()]
    assert values == [1, 2, 3, 4]


def test_records_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="could not write"):
        append_records(tmp_path / "file" / "results.jsonl", [record()])
