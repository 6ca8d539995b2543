"""The programs in benchmarks/ that measure detectors."""

import importlib
import json
import os
import re
import shlex
import signal
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from PIL import Image
from scenes import write_scenes
from small_detectors import build_small, small_detectors

import xmoco.detect.evaluation
from xmoco.detect.masks import bitmap_of_runs
from xmoco.detect.metrics import MEASURES
from xmoco.detect.sources import open_detection
from xmoco.errors import TRY_AGAIN, UserError
from xmoco.records import Measured, SpeedProtocol, read_records
from xmoco.train import in_folder
from xmoco.train.run_folder import RunFolder


@pytest.fixture
def pedestrians(tmp_path: Path) -> Path:
    """Five pictures in Penn-Fudan's layout, with two people each."""
    top = tmp_path / "archive" / "PennFudanPed"
    for folder in ("JPEGImages", "PedMasks"):
        (top / folder).mkdir(parents=True)
    for number in range(5):
        mask = np.zeros((40, 60), dtype=np.uint8)
        mask[5:35, 5 + number : 15] = 1
        mask[10:38, 30:45] = 2
        Image.fromarray(mask).save(top / "PedMasks" / f"Ped{number}_mask.png")
        Image.new("RGB", (60, 40), "grey").save(top / "JPEGImages" / f"Ped{number}.jpg")
    return tmp_path / "archive"


def test_penn_fudan_in_cocos_layout(benchmarks: None, pedestrians: Path, tmp_path: Path) -> None:
    program = importlib.import_module("penn_fudan")
    train, test = open_detection(
        program.write_penn_fudan(pedestrians, tmp_path / "coco", held_out=2)
    )
    assert (len(train), len(test)) == (3, 2)
    assert train.categories == ("pedestrian",)
    number = int(Path(train.images.where(0)).stem[-1])
    assert train.objects.boxes[:2].tolist() == [[5 + number, 5, 15, 35], [30, 10, 45, 38]]
    assert train.objects.masks is not None
    assert bitmap_of_runs(train.objects.masks[1], 40, 60)[10:38, 30:45].all()
    same = open_detection(program.write_penn_fudan(pedestrians, tmp_path / "few", only=2))
    assert same[0].digest() == same[1].digest()
    own = program.write_penn_fudan(pedestrians / "PennFudanPed", tmp_path / "own", held_out=2)
    assert open_detection(own)[0].digest() == train.digest()


@pytest.fixture
def speed(benchmarks: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    module = importlib.import_module("detect_speed")
    monkeypatch.setattr(module, "build_detector", build_small)
    with small_detectors():
        yield module


def test_both_loops_are_timed_and_judged(
    speed: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, results = write_scenes(tmp_path / "scenes"), tmp_path / "results"
    arguments = "--weights scratch:tiny --batch 2 --size 64 --steps 1 --rounds 2 --ap-steps 2"
    arguments += f" --device cpu --workers 0 --data {data} --results {results}"
    monkeypatch.setattr(sys, "argv", ["detect_speed.py", *arguments.split()])
    speed.main()
    file = results / "detect-speed.jsonl"
    speeds = read_records(file, Measured[SpeedProtocol], ["detect_images_per_second"])
    assert [record.subject for record in speeds] == ["xmoco", "torchvision"]
    ours, theirs = speeds
    assert ours.protocol.times_baseline == pytest.approx(ours.value / theirs.value, abs=0.01)
    judged = {
        (record.subject, record.measure)
        for record in read_records(file, Measured[dict[str, Any]])
        if record.unit == "%"
    }
    assert len(judged) == 2 * 2 * 3  # of two participants, boxes and masks, three measures


def test_speeds_outlive_what_is_measured_after_them(
    speed: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(speed, "precision_of", killed)
    data, results = write_scenes(tmp_path / "scenes"), tmp_path / "results"
    arguments = "--weights scratch:tiny --batch 2 --size 64 --steps 1 --rounds 1 --only xmoco"
    arguments += f" --device cpu --data {data} --results {results}"
    monkeypatch.setattr(sys, "argv", ["detect_speed.py", *arguments.split()])
    with pytest.raises(KeyboardInterrupt):
        speed.main()
    (record,) = read_records(results / "detect-speed.jsonl", Measured[dict[str, Any]])
    assert record.measure == "detect_images_per_second"


@pytest.fixture
def compare(
    benchmarks: None, pedestrians: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., list[tuple[str, int]]]]:
    """Calls the program with two quick steps on Penn-Fudan; gives what it has tuned."""
    program = importlib.import_module("detect")
    tuned: list[tuple[str, int]] = []

    def evaluate(*given: Any, **named: Any) -> Any:
        tuned.append((given[0], *named["seeds"]))
        return xmoco.detect.evaluation.evaluate_detect(*given, **named)

    monkeypatch.setattr(program, "evaluate_detect", evaluate)
    monkeypatch.setattr(program.write_penn_fudan, "__defaults__", (2, None))

    def call(*arguments: str, batch: int = 2) -> list[tuple[str, int]]:
        usual = f"--penn-fudan {pedestrians} --penn-fudan-steps 2 --penn-fudan-size 64 --device cpu"
        usual += f" --precision fp32 --batch {batch} --out {tmp_path / 'runs'}"
        results = ["--results", str(tmp_path / "results")]
        words = ["detect.py", *results, "compare", *arguments, *usual.split()]
        monkeypatch.setattr(sys, "argv", words)
        before = len(tuned)
        program.main()
        return tuned[before:]

    with small_detectors():
        yield call


def records_in(tmp_path: Path) -> list[Measured[dict[str, Any]]]:
    return read_records(tmp_path / "results" / "detect.jsonl", Measured[dict[str, Any]])


def test_what_has_its_records_is_not_done_again(
    compare: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seeds = ("--penn-fudan-seeds", "0", "1")
    assert compare("scratch:tiny", *seeds) == [("scratch:tiny", seed) for seed in (0, 1)]
    told = capsys.readouterr().out
    for seed in (0, 1):
        line = rf"Mask R-CNN FPN on penn-fudan, scratch:tiny, seed {seed}: box AP \d+\.\d, "
        assert re.search(line + r"mask AP \d+\.\d; \d+ s of training, \d+ s of judging", told)
    assert compare("scratch:tiny", *seeds) == []
    assert {record.seed for record in records_in(tmp_path)} == {0, 1}
    assert not [*tmp_path.glob("runs/*/detector/checkpoints")], "which take most of the disk"
    another = compare("scratch:tiny", "--penn-fudan-seeds", "0", batch=3)
    assert another == [("scratch:tiny", 0)], "batches of another size are another job"
    assert {record.protocol["batch"] for record in records_in(tmp_path)} == {2, 3}


def test_rows_are_of_one_backbone_each(
    compare: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """There need be no record from scratch, and seeds that are not asked for do not count."""
    compare("scratch:tiny", "--penn-fudan-seeds", "5")
    capsys.readouterr()
    file = tmp_path / "results" / "detect.jsonl"
    (ap,) = (record for record in records_in(tmp_path) if record.measure == "box_ap")
    digests = [ap.protocol["digest"], "of another", ap.protocol["digest"]]
    values = [(digests[0], 5, 20.0), (digests[1], 5, 90.0), (digests[2], 6, 40.0)]
    for digest, seed, value in values:
        changed = ap.model_dump() | {"value": value, "seed": seed}
        changed["protocol"] = ap.protocol | {"digest": digest}
        with file.open("a") as lines:
            lines.write(json.dumps(changed) + "\n")
    assert compare("scratch:tiny", "--penn-fudan-seeds", "5") == []
    (row,) = (line for line in capsys.readouterr().out.splitlines() if "scratch:tiny" in line)
    assert row.split("│")[2].strip() == "20.0", "the last of seed 5"


def test_what_another_process_tunes_is_left_to_it(
    compare: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    compare("scratch:tiny", "--penn-fudan-seeds", "0")
    (tmp_path / "results" / "detect.jsonl").unlink()
    (folder,) = (tmp_path / "runs").iterdir()
    claim = RunFolder(folder)
    claim.lock()
    with pytest.raises(SystemExit, match="not measured here, as told above: 1"):
        compare("scratch:tiny", "--penn-fudan-seeds", "0", "1")
    told = capsys.readouterr().out
    assert "seed 0: another process is at it" in told
    assert {record.seed for record in records_in(tmp_path)} == {1}
    claim.unlock()
    assert compare("scratch:tiny", "--penn-fudan-seeds", "0", "1") == [("scratch:tiny", 0)]


def test_what_fails_keeps_nothing_else_from_being_done(
    compare: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    real = xmoco.detect.evaluation.evaluate_detect

    def evaluate(*given: Any, **named: Any) -> Any:
        if named["seeds"] == (0,):
            raise UserError("seed 0 brings no luck.")
        return real(*given, **named)

    monkeypatch.setattr(xmoco.detect.evaluation, "evaluate_detect", evaluate)
    with pytest.raises(SystemExit, match="not measured here, as told above: 1"):
        compare("scratch:tiny", "--penn-fudan-seeds", "0", "1")
    told = capsys.readouterr()
    assert "scratch:tiny, seed 0 failed: seed 0 brings no luck." in told.err
    assert "scratch:tiny" in told.out.splitlines()[-2], "the table is shown all the same"
    assert {record.seed for record in records_in(tmp_path)} == {1}


@pytest.mark.parametrize("moment", ["training", "judging"])
def test_stopped_it_keeps_what_is_finished_and_goes_on(
    compare: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    def asked_to_stop(*_: Any) -> None:
        if len(records_in(tmp_path)):  # the first one is done
            os.kill(os.getpid(), signal.SIGTERM)

    module, name = {
        "training": (in_folder.Told, "on_step"),
        "judging": (xmoco.detect.evaluation, "verdicts"),
    }[moment]
    real = getattr(module, name)
    with monkeypatch.context() as patch:
        patch.setattr(module, name, lambda *given: (asked_to_stop(), real(*given))[1])
        with pytest.raises(SystemExit) as stopped:
            compare("scratch:tiny", "--penn-fudan-seeds", "0", "1")
    assert stopped.value.code == TRY_AGAIN
    assert {record.seed for record in records_in(tmp_path)} == {0}
    assert compare("scratch:tiny", "--penn-fudan-seeds", "0", "1") == [("scratch:tiny", 1)]
    assert {record.seed for record in records_in(tmp_path)} == {0, 1}


def test_mistakes_end_in_a_sentence(compare: Any, tmp_path: Path) -> None:
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun" / "config.yaml").write_text("seed: 0\n")
    with pytest.raises(SystemExit, match="begun is not trained to its end: go on with `pretrain`"):
        compare(str(tmp_path / "begun"))
    with pytest.raises(SystemExit, match="no images for faster-rcnn-c4: give --penn-fudan"):
        compare("scratch:tiny", "--models", "faster-rcnn-c4")


def test_commands_told_at_the_top_are_understood(
    benchmarks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = importlib.import_module("detect")
    found = {}
    for name in ("pretrain_all", "compare", "overfit"):
        monkeypatch.setattr(program, name, partial(found.__setitem__, name))
    assert program.__doc__ is not None
    _, told, _ = program.__doc__.split("\n\n", maxsplit=2)
    for command in told.replace("\\\n", "").splitlines():
        monkeypatch.setattr(sys, "argv", shlex.split(command)[1:])
        program.main()
    changes = ["backbone=resnet50", "epochs=200"]
    changes += ["weak_keys=false", "local_crops=0", "knn_every=0"]
    assert found["pretrain_all"].entries == ["xmoco:", "mocov2plus: method=mocov2plus", *changes]
    assert len(found["compare"].weights) == 3
    assert found["overfit"].penn_fudan == "pennfudan.tar.xz"


def test_how_far_above_scratch(benchmarks: None) -> None:
    program = importlib.import_module("detect")
    assert program._above([30.0], [20.0]) == "+10.0"
    assert program._above([30.0, 32.0], [20.0, 22.0]) == "+10.0 (7.1 deviations)"
    assert program._above([20.0], []) == ""
    assert program._above([0.0, 0.0], [0.0, 0.0, 0.0]) == "+0.0"


@pytest.fixture
def judging(benchmarks: None) -> ModuleType:
    return importlib.import_module("detect_metrics")


def judge(judging: ModuleType, monkeypatch: pytest.MonkeyPatch, arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["detect_metrics.py", *arguments.split()])
    judging.main()


def test_judging_is_timed_beside_pycocotools(
    judging: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = f"--images 4 --detections 30 --objects 6 --rounds 3 --results {tmp_path}"
    judge(judging, monkeypatch, small)
    (file,) = tmp_path.iterdir()
    ours, theirs = read_records(file, Measured[dict[str, Any]], ["judge_seconds"])
    assert (ours.subject, theirs.subject) == ("xmoco", "pycocotools")
    assert min(ours.value, theirs.value) > 0
    assert (ours.protocol.pop("rounds"), theirs.protocol.pop("rounds")) == (3, 1)
    assert ours.protocol == theirs.protocol
    assert (ours.protocol["images"], ours.protocol["detections"]) == (4, 4 * 30)
    assert tuple(ours.protocol["figures"]) == MEASURES
    assert 0 < ours.protocol["figures"]["AP"] < 100

    monkeypatch.setattr(judging, "by_pycocotools", lambda *_: {"AP": 50.0})
    with pytest.raises(SystemExit, match=r"The figures differ: .* by pycocotools"):
        judge(judging, monkeypatch, small)
    assert len(file.read_text(encoding="utf-8").splitlines()) == 2, "nothing is recorded then"


@pytest.mark.parametrize("wrong", ["0", "-3", "2.5", "many"])
@pytest.mark.parametrize("option", ["images", "detections", "objects", "rounds"])
def test_judging_takes_whole_numbers(
    judging: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    option: str,
    wrong: str,
) -> None:
    with pytest.raises(SystemExit, match="2"):
        judge(judging, monkeypatch, f"--{option}={wrong}")
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.endswith(f"--{option}: '{wrong}' is no whole number of at least 1")
