"""Records carry their protocol and what they were measured with, and survive json."""

import json
import re
import socket
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

import xmoco
from helpers import make_images
from xmoco import records
from xmoco.errors import UserError
from xmoco.nn.backbone_files import BackboneCard, save_backbone
from xmoco.nn.backbones import build_backbone
from xmoco.records import (
    ClassifierProtocol,
    KnnProtocol,
    Measured,
    Record,
    RunMetrics,
    SpeedProtocol,
    StageProtocol,
    TransferProtocol,
    append_records,
    forget_half_line,
    read_lines,
    read_records,
)
from xmoco.report.history import read_history
from xmoco.train.run_folder import RunFolder

RESULTS = Path(__file__).parent.parent / "benchmarks" / "results"


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


@pytest.mark.parametrize("cut", [1, 40, -2])
def test_half_a_record_is_forgotten_and_nothing_else(tmp_path: Path, cut: int) -> None:
    file = tmp_path / "results.jsonl"
    append_records(file, [record(1), record(2)])
    whole = file.read_bytes()
    file.write_bytes(whole + record(3).json().encode()[:cut])
    forget_half_line(file)
    assert file.read_bytes() == whole
    open_end = whole.rstrip(b"\n")  # by hand: the last record is whole, though not its line
    file.write_bytes(open_end)
    forget_half_line(file)
    assert file.read_bytes() == open_end


@pytest.mark.parametrize(
    "content",
    [
        b"rows:\n  - a",
        b"\xff\xd8\xff\n\x00",
        b'{\n  "measure": 1\n}',
        b'{"name": 1',
        b'{"measure": 1, "seed": \n{"measure": ',
    ],
)
def test_a_file_without_records_is_left_as_it_is(tmp_path: Path, content: bytes) -> None:
    """A table, a picture, json of another kind: somebody gave the wrong name."""
    file = tmp_path / "no-records"
    file.write_bytes(content)
    forget_half_line(file)
    assert file.read_bytes() == content


def test_several_threads_append_whole_lines(tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"

    def add(number: int) -> None:
        append_records(file, [replace(record(number), work="w" * 20_000)] * 3)
        forget_half_line(file)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(add, range(40)))
    values = [read.value for read in read_records(file, Measured[dict[str, Any]])]
    assert sorted(values) == sorted(3 * list(range(40)))


# Reading

KNN = {"data": "patterns (train)", "split": "test", "size": 32, "k": 20, "temperature": 0.1}
KNN |= {"bank_images": 6000, "judged_images": 1500, "epoch": 6}


def test_records_are_read_as_they_were_written(tmp_path: Path) -> None:
    file = tmp_path / "records.jsonl"
    written = Record("knn_top1", 94.6, "%", "xmoco", "patterns-tiny-6ep", KNN | {"more": [1]}, 3)
    append_records(file, [written])
    (read,) = read_records(file, Measured[dict[str, Any]])
    assert read.model_dump() == asdict(written)


def test_who_reads_says_what_a_protocol_must_tell(tmp_path: Path) -> None:
    file = tmp_path / "records.jsonl"
    append_records(file, [Record("knn_top1", 94.6, "%", "xmoco", "patterns-tiny-6ep", KNN, 3)])
    (read,) = read_records(file, Measured[KnnProtocol])
    assert (read.protocol.k, read.protocol.judged_images, read.value) == (20, 1500, 94.6)
    assert read.protocol.run_seconds is None
    append_records(file, [record()])
    with pytest.raises(UserError, match=r"records\.jsonl, line 2: the record lacks protocol\.data"):
        read_records(file, Measured[KnnProtocol])


def test_other_measures_are_passed_over_and_so_are_training_values(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    training = json.dumps({"step": 3, "epoch": 0.5, "values": {"loss": 1.0}})
    file.write_text(f"{training}\n\n{record(7).json()}\n")
    assert [one.value for one in read_records(file, Measured[dict[str, Any]])] == [7]
    assert read_records(file, Measured[KnnProtocol], {"linear_top1"}) == []
    assert [line.where for line in read_lines(file)] == [f"{file}, line 1", f"{file}, line 3"]


VALUES = '{"step": 3, "epoch": 0.5, "time": "now", "values": {"loss": 1.0}}'
OF_RUN = Record("knn_top1", 50.0, "%", "xmoco", "w", KNN | {"step": 3}, 3)


def test_of_a_run_that_goes_on_whole_lines_are_read(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    assert RunMetrics.read(file) == RunMetrics([], 0)
    file.write_bytes(f"{VALUES}\n{OF_RUN.json()}\n".encode() + b'3\n\xff\n{"ste')
    metrics = RunMetrics.read(file)
    assert [line.entry.get("value") for line in metrics.lines] == [None, 50.0]
    assert [record["value"] for record in metrics.knn()] == [50.0]
    assert metrics.damaged == 2  # the half line at the end is what a killed run leaves
    with pytest.raises(UserError, match="is not a text file"):
        list(read_lines(file))


DAMAGED = [
    *("3", "[]", "null", '"text"', "{}", '{"values": 3}', '{"values": []}', "{" * 5000),
    *(VALUES.replace("3", wrong, 1) for wrong in ("-1", "null", '"3"', "3.5", "1e999", "true")),
    *(VALUES.replace("0.5", wrong) for wrong in ("-1", "null", '"1"', "NaN", "Infinity", "[]")),
    *(VALUES.replace("1.0", wrong) for wrong in ("null", '"1"', "[]", "{}", "1" + "0" * 400)),
    VALUES.replace('"step": 3, ', ""),
    VALUES.replace('"epoch": 0.5, ', ""),
    *(
        json.dumps({**asdict(OF_RUN), field: wrong})
        for field in ("measure", "value", "subject", "protocol")
        for wrong in (None, [], {}, "x" if field in ("value", "protocol") else 3)
    ),
    *(
        json.dumps({**asdict(OF_RUN), "protocol": KNN | {"step": 3} | wrong})
        for wrong in ({"epoch": "1"}, {"epoch": -1}, {"epoch": None}, {"step": 0.5}, {"step": []})
    ),
]


@pytest.mark.parametrize("text", DAMAGED, ids=lambda text: text[:60])
def test_a_damaged_line_of_a_run_is_counted_and_passed_over(tmp_path: Path, text: str) -> None:
    run = RunFolder(tmp_path)
    (tmp_path / "metrics.jsonl").write_text(f"{VALUES}\n{text}\n{OF_RUN.json()}\n")
    assert run.metrics().damaged == 1
    assert run.last_knn() == {"xmoco": 50.0}
    assert run.knn_curve("xmoco") == [(6, 50.0)]
    history = read_history(tmp_path)
    assert list(history.training) == ["loss"]
    assert list(history.knn()) == ["xmoco"]
    assert run.forget_after(3) == 1
    assert (tmp_path / "metrics.jsonl").read_text() == f"{VALUES}\n{OF_RUN.json()}\n"


KINDS: dict[str, type[Measured[Any]]] = {
    "images_per_second": Measured[SpeedProtocol],
    "stage_ms": Measured[StageProtocol],
    "linear_top1": Measured[ClassifierProtocol],
    "linear_top5": Measured[ClassifierProtocol],
    "linear_mean_per_class": Measured[ClassifierProtocol],
    "finetune_top1": Measured[ClassifierProtocol],
    "finetune_top5": Measured[ClassifierProtocol],
    "finetune_mean_per_class": Measured[ClassifierProtocol],
    "transfer_frozen": Measured[TransferProtocol],
    "transfer_end_to_end": Measured[TransferProtocol],
}


@pytest.mark.parametrize("file", sorted(RESULTS.glob("*.jsonl")), ids=lambda file: str(file.stem))
def test_the_records_of_this_repository_are_of_these_kinds(file: Path) -> None:
    assert read_records(file, Measured[dict[str, Any]])
    for measure, kind in KINDS.items():
        read_records(file, kind, {measure})
    if file.name.startswith(("demo", "methods", "recipe-", "protocols-", "changed-recipes")):
        read_records(file, Measured[KnnProtocol], {"knn_top1"})  # others have their own protocols


def test_what_evaluations_write_is_of_these_kinds(tmp_path: Path) -> None:
    for split in ("train", "test"):
        make_images(tmp_path / "my.photos" / split, each=6, classes=2)
    grey = (0.5, 0.5, 0.5)
    card = BackboneCard("tiny", "cifar", 16, grey, grey, "xmoco", 1, 0)
    weights = tmp_path / "backbone.safetensors"
    save_backbone(build_backbone("tiny", "cifar"), card, weights)
    photos, cpu = tmp_path / "my.photos", xmoco.EvalOptions("cpu", readers=1)
    tuned = tmp_path / "tuned"
    found = [
        *xmoco.evaluate_knn(weights, photos, ks=(3,), options=cpu),
        *xmoco.evaluate_finetune(weights, photos, epochs=1, out=tuned, options=cpu),
        xmoco.evaluate_transfer(weights, str(photos), options=cpu),
    ]
    file = tmp_path / "records.jsonl"
    append_records(file, found)
    assert {record.work for record in found} == {"my.photos-tiny"}
    kinds = {"knn_top1": Measured[KnnProtocol], **KINDS}
    read = [one for measure, kind in kinds.items() for one in read_records(file, kind, {measure})]
    assert len(read) == len(found) == 5
