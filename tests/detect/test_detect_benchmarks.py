"""The programs in benchmarks/ that measure detectors."""

import importlib
import json
import os
import re
import shlex
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from scenes import write_scenes
from small_detectors import build_small, small_detectors
from torch.testing import assert_close

import xmoco.detect.evaluation
from xmoco.detect.courses import course_of
from xmoco.detect.masks import bitmap_of_runs
from xmoco.detect.metrics import MEASURES
from xmoco.detect.sources import open_detection
from xmoco.detect.training import batches_of_one_shape
from xmoco.errors import TRY_AGAIN, UserError
from xmoco.nn.backbones import build_backbone
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


@pytest.fixture
def measure(
    speed: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], list[Measured[dict[str, Any]]]]:
    """Calls the program on scenes; gives all records there are then."""
    data, results = write_scenes(tmp_path / "scenes"), tmp_path / "results"

    def call(arguments: str) -> list[Measured[dict[str, Any]]]:
        usual = "--weights scratch:tiny --batch 2 --size 64 --ap-size 64 --steps 1 --device cpu"
        usual += f" --workers 0 --data {data} --results {results}"
        monkeypatch.setattr(sys, "argv", ["detect_speed.py", *usual.split(), *arguments.split()])
        speed.main()
        return read_records(results / "detect-speed.jsonl", Measured[dict[str, Any]])

    return call


def test_both_loops_are_timed_and_judged(measure: Any, tmp_path: Path) -> None:
    records = measure("--rounds 2 --ap-steps 2")
    file = tmp_path / "results" / "detect-speed.jsonl"
    speeds = read_records(file, Measured[SpeedProtocol], ["detect_images_per_second"])
    assert [record.subject for record in speeds] == ["xmoco", "torchvision"]
    ours, theirs = speeds
    assert ours.protocol.times_baseline == pytest.approx(ours.value / theirs.value, abs=0.01)
    images = [record.protocol["images"] for record in records if record.unit == "images/s"]
    assert images == ["decoded, on cpu", "files, decoded by 0 workers"]
    judged = {(record.subject, record.measure) for record in records if record.unit == "%"}
    assert len(judged) == 2 * 2 * 3  # of two participants, boxes and masks, three measures
    assert not torch.backends.cudnn.benchmark, "whoever takes part"


def test_ap_is_measured_once_for_each_seed_and_without_speeds_if_asked(
    measure: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    ap = "--rounds 0 --ap-steps 2 --seeds 0 1"
    records = measure(ap)
    assert {record.unit for record in records} == {"%"}
    assert {(r.subject, r.seed) for r in records} == {
        (name, seed) for name in ("xmoco", "torchvision") for seed in (0, 1)
    }
    assert {record.protocol["precise_batches"] for record in records} == {1}, "for all alike"
    table = capsys.readouterr().out
    assert "±" in table
    assert "box_ap of xmoco above it" in table
    assert measure(ap) == records
    assert len(measure("--rounds 0 --ap-steps 3")) == len(records) * 3 // 2
    assert len(measure("--rounds 1 --ap-steps 0")) == len(records) * 3 // 2 + 2


def test_stages_are_ours_whoever_is_timed(measure: Any, capsys: pytest.CaptureFixture[str]) -> None:
    records = measure("--rounds 1 --ap-steps 0 --only torchvision --stages")
    assert [record.subject for record in records] == ["torchvision"]
    assert "Self CPU" in capsys.readouterr().out


def test_speeds_outlive_what_is_measured_after_them(
    speed: ModuleType, measure: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(speed, "judge", killed)
    with pytest.raises(KeyboardInterrupt):
        measure("--rounds 1 --only xmoco")
    file = tmp_path / "results" / "detect-speed.jsonl"
    (record,) = read_records(file, Measured[dict[str, Any]])
    assert record.measure == "detect_images_per_second"


@pytest.fixture
def usual(speed: ModuleType, tmp_path: Path) -> Any:
    """The baseline, on four pictures."""
    train, _ = open_detection(write_scenes(tmp_path / "scenes"))
    detector = build_small(
        "faster-rcnn-fpn", build_backbone("tiny"), 2, size=64, mean=(0.5,) * 3, std=(0.2,) * 3
    )
    course = replace(course_of("4", "faster-rcnn-fpn", images=4, batch=3), sizes=(64,))
    return speed.Usual(
        detector, train, course, torch.device("cpu"), masks=False, amp=False, workers=0
    )


def test_the_baselines_batches_are_ours_and_never_end(usual: Any) -> None:
    """Of four images in batches of three, an epoch has one batch."""
    order = batches_of_one_shape(usual.loader.dataset.data, 3)
    found = list(islice(usual.loader.batch_sampler, 3))
    assert found == [order(4, 0, epoch)[:3].tolist() for epoch in range(3)]
    stream = usual.stream
    usual.steps(2)
    assert usual.stream is stream, "workers that are there stay"


def test_the_baselines_norms_are_made_precise_and_do_not_decay(usual: Any) -> None:
    norm = usual.detector.backbone.body.bn1
    decays = {p: g["weight_decay"] for g in usual.optimizer.param_groups for p in g["params"]}
    assert decays.keys() == set(usual.detector.parameters())
    assert decays[norm.weight] == 0
    assert decays[usual.detector.backbone.body.conv1.weight] == 1e-4
    seen: list[torch.Tensor] = []
    norm.register_forward_hook(lambda _module, inputs, _output: seen.append(inputs[0]))
    before = norm.weight.detach().clone()
    usual.make_batch_norms_precise(2)
    assert len(seen) == 2
    assert_close(norm.running_mean, torch.stack([x.mean((0, 2, 3)) for x in seen]).mean(0))
    assert norm.momentum == 0.1
    assert torch.equal(norm.weight, before), "nothing is learnt meanwhile"


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
        assert re.search(line + r"mask AP \d+\.\d; \d+ s, of which \d+ of training ", told)
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
        "training": (in_folder.StepReporter, "on_step"),
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
    difference = importlib.import_module("pages.detection").difference
    assert difference([30.0], [20.0]) == "+10.0"
    assert difference([30.0, 32.0], [20.0, 22.0]) == "+10.0 (7.1 deviations)"
    assert difference([20.0], []) == ""
    assert difference([0.0, 0.0], [0.0, 0.0, 0.0]) == "+0.0"


def page(results: Path, part: str) -> str:
    pages = importlib.import_module("pages.detection")
    place = importlib.import_module("pages.common").Place(results)
    text: str = getattr(pages, part)(place)
    return text


def test_the_page_shows_whether_ap_is_equal(measure: Any, tmp_path: Path) -> None:
    records = measure("--rounds 1 --ap-steps 2 --seeds 0 1")
    file = tmp_path / "results" / "detect-speed.jsonl"
    values = {("xmoco", 0): 30.0, ("xmoco", 1): 32.0, ("torchvision", 0): 29.0}
    changed = [
        record.model_copy(update={"value": values.get((record.subject, record.seed), 31.0)})
        for record in records
        if record.measure in ("box_ap", "detect_images_per_second")
    ]
    file.write_text("".join(record.model_dump_json() + "\n" for record in changed))
    text = page(tmp_path / "results", "training_tables")
    assert "**Mask R-CNN FPN, folder scenes, 64 px**" in text
    assert "| xmoco | fp32 | decoded, on cpu | 30.0 |" in text
    assert "**AP of Mask R-CNN FPN, folder scenes, 64 px, after 2 steps**" in text
    assert "| xmoco | 31.0 ± 1.4 |  |" in text
    assert "| torchvision's reference loop | 30.0 ± 1.4 | +1.0 (0.7 deviations) |" in text


def test_the_page_shows_how_far_above_scratch(compare: Any, tmp_path: Path) -> None:
    compare("scratch:tiny", "--penn-fudan-seeds", "0", "1")
    file = tmp_path / "results" / "detect.jsonl"
    lines = []
    for record in records_in(tmp_path):
        for subject, value in (("scratch", 20.0), ("xmoco", 30.0)):
            protocol = record.protocol | {"digest": subject}
            told = {"subject": subject, "value": value + record.seed, "protocol": protocol}
            lines.append(record.model_copy(update=told).model_dump_json() + "\n")
    file.write_text("".join(lines))
    text = page(tmp_path / "results", "detection_tables")
    heading, _, *rows = (line for line in text.splitlines() if line.startswith("|"))
    assert heading.endswith("| box AP above scratch |")
    assert rows[0].endswith("|  |")
    assert rows[1].endswith("| +10.0 (14.1 deviations) |")


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
