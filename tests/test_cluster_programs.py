"""The programs that measure processes and shards, and the batch script that the page shows."""

import importlib
import math
import os
import re
import subprocess
from pathlib import Path
from types import ModuleType

import pytest

from xmoco.errors import Interrupted
from xmoco.launchers import Launcher, launcher
from xmoco.records import append_records

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "cluster.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def scaling(benchmarks: None) -> ModuleType:
    return importlib.import_module("scaling")


def test_the_model_of_a_step(scaling: ModuleType) -> None:
    """By hand: 8 processes, 4 images each, and a network that is slow enough to be noticed."""
    sizes = scaling.Sizes(
        batch=32, world=8, parameters=1000, side=10, width=5, bank=60, rounds=3, pixel_bytes=2
    )
    assert sizes.sent() == {
        "gradients": 7000.0,
        "images": 4200.0,
        "keys": 140.0 + 1120.0,
        "sums": 4 * 4 * 64 * 7 / 8 + 2 * 4 * 4 * 60 * 7 / 8,
    }
    network = scaling.Network(bandwidth=1000.0, latency=0.01)
    waited = (4200 + 1260 + 896 + 1680) / 1000 + 13 * 0.01 * 3
    hidden = 7.0 + 0.03
    assert math.isclose(scaling.predicted(100.0, sizes, network), 100 + waited)
    assert math.isclose(scaling.predicted(2.0, sizes, network), 2 + waited + hidden - 1)
    alone = scaling.Sizes(**vars(sizes) | {"world": 1})
    assert scaling.predicted(2.0, alone, network) == 2.0


def test_clusters_are_predicted_from_the_recorded_speed(scaling: ModuleType) -> None:
    records = scaling.predictions(scaling.RESULTS)
    assert [record.subject for record in records] == ["8 GPUs", "64 GPUs", "512 GPUs"] * 2
    for record in records:
        compute = record.protocol["images_per_gpu"] / record.protocol["speed_of_one"]
        assert record.value > 1000 * compute * 0.999
        parts = record.protocol["sent_mb_by_kind"].values()
        assert math.isclose(sum(parts), record.protocol["sent_mb"], abs_tol=0.05)
        assert 0 < record.protocol["of_ideal"] <= 100


def test_shards_are_measured_beside_files(
    benchmarks: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shards = importlib.import_module("shards")
    tables = importlib.import_module("pages.cluster")
    told = importlib.import_module("pages.common")
    monkeypatch.setattr(shards, "PER_SHARD", 40)
    monkeypatch.setattr(shards, "PER_FOLDER", 30)
    monkeypatch.setattr(shards, "index", shards.build_index)  # a process takes long to start
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # so that it is what it was afterwards
    records = shards.measure(tmp_path, count=100, reads=50, rounds=1)
    indexed = ["index_seconds", "index_memory"]
    read = ["read_per_second", "read_beside_files"]
    assert [(r.subject, r.measure) for r in records] == [
        *((name, measure) for name in ("tar", "parquet") for measure in indexed),
        *((name, measure) for name in ("files", "tar", "parquet") for measure in read),
    ]
    assert all(record.value > 0 for record in records if record.measure != "index_memory")
    assert records[0].protocol["shards"] == 3
    assert records[5].value == 100  # files beside themselves
    append_records(tmp_path / "shards.jsonl", records)
    rows = tables.shards_table(told.Place(tmp_path)).splitlines()[2:5]
    assert [row.split(" | ")[:2] for row in rows] == [
        *(["| 100", "files"], ["| 100", "tar"], ["| 100", "Parquet, uncompressed"])
    ]


SLURM = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_NTASKS": "16",
    "SLURM_NNODES": "2",
}


def run_script(folder: Path, status: int) -> list[str]:
    """What the script of the page starts, where a run ends with this status."""
    script = next(block for block in re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL))
    programs = folder / "bin"
    programs.mkdir(exist_ok=True)
    for name, program in {
        "srun": '"$@"',
        "xmoco": f'echo xmoco "$@" >> log; mkdir -p runs/photos; '
        f"touch runs/photos/config.yaml; exit {status}",
        "scontrol": 'echo scontrol "$@" >> log',
    }.items():
        (programs / name).write_text(f"#!/bin/bash\n{program}\n")
        (programs / name).chmod(0o755)
    (folder / "log").write_text("")
    environment = os.environ | {"PATH": f"{programs}:{os.environ['PATH']}", "SLURM_JOB_ID": "77"}
    ended = subprocess.run(["bash", "-c", script], cwd=folder, env=environment, timeout=60)
    assert ended.returncode == status, "SLURM is told how the run has ended"
    return (folder / "log").read_text().splitlines()


def test_the_batch_script_starts_goes_on_and_queues_again(tmp_path: Path) -> None:
    again = Interrupted(10, "somewhere", "somehow").status
    started, queued = run_script(tmp_path, again)
    assert started.startswith("xmoco pretrain --recipe imagenet ")
    assert " --out runs/photos batch=4096 bank_length=65536 optim=lars " in started
    assert queued == "scontrol requeue 77"
    assert run_script(tmp_path, again) == ["xmoco pretrain --resume --out runs/photos", queued]
    for status in (0, 2):  # done, or something is wrong
        assert run_script(tmp_path, status) == ["xmoco pretrain --resume --out runs/photos"]


def test_the_numbers_of_the_batch_script_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    for name, value in SLURM.items():
        monkeypatch.setenv(name, value)
    nodes, tasks = (int(n) for n in re.findall(r"--(?:nodes|ntasks-per-node)=(\d+)", PAGE))
    assert launcher() == Launcher("srun", tasks, nodes)
