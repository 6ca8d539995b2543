"""A process that is gone takes the others with it, soon and with a sentence; the run goes on later.

The processes are started as srun and torchrun start them, by their variables.
"""

import os
import re
import signal
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch.distributed as dist

from helpers import (
    assert_done,
    checkpoints,
    free_port,
    make_images,
    no_pictures,
    run_cli,
    start_cli,
    wait_until,
    write_recipe,
)
from xmoco.asked import Asked
from xmoco.errors import UserError
from xmoco.launchers import Launcher, first_process, launcher
from xmoco.pretraining import resumed_config
from xmoco.settings import config_yaml, load_config
from xmoco.train import partners
from xmoco.train.engine import build_fabric, processes_of
from xmoco.train.run_folder import RunFolder


def srun(rank: int, world: int, port: int) -> dict[str, str]:
    return {
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_ID": "0",
        "SLURM_NTASKS": str(world),
        "SLURM_STEP_NUM_TASKS": str(world),
        "SLURM_STEP_NUM_NODES": "1",
        "SLURM_NNODES": "1",
        "SLURM_NODELIST": "127.0.0.1",
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank),
        "SLURM_NODEID": "0",
        "MASTER_PORT": str(port),
    }


def torchrun(rank: int, world: int, port: int) -> dict[str, str]:
    return {
        "TORCHELASTIC_RUN_ID": "run",
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "GROUP_RANK": "0",
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        # A launch by another srun is not to be mistaken for this one.
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": "0",
    }


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """80 steps, of which each is saved."""
    images = make_images(tmp_path / "images", each=8)
    train = {"epochs": 40, "checkpoint_minutes": 0.0}
    return write_recipe(tmp_path / "fast.yaml", images, train=train, monitor={"knn_every": 0})


def prepare(environment: dict[str, str]) -> None:
    os.environ.update(environment)
    partners.BEAT, partners.GRACE = 0.1, 1.0  # 3 seconds of silence instead of 30


@pytest.mark.parametrize(
    ("start", "sent", "rank"),
    [(srun, signal.SIGKILL, 0), (torchrun, signal.SIGKILL, 1), (torchrun, signal.SIGSTOP, 1)],
    ids=["the first is killed", "the second is killed", "the second falls silent"],
)
def test_the_others_end_with_a_sentence_and_the_run_goes_on(
    tmp_path: Path, recipe: Path, start: Any, sent: signal.Signals, rank: int
) -> None:
    run, port = tmp_path / "run", free_port()
    said = [tmp_path / f"said-{rank}" for rank in range(2)]
    both = [
        start_cli(
            *("pretrain", "--recipe", recipe, "--out", run),
            said=said[number],
            prepare=partial(prepare, start(number, 2, port)),
        )
        for number in range(2)
    ]
    try:
        wait_until(lambda: len(checkpoints(run)) == 2)
        os.kill(both[rank].pid or 0, sent)
        both[1 - rank].join(60)
        assert both[1 - rank].exitcode == 1, said[1 - rank].read_text()
    finally:
        for process in both:
            process.kill()
            process.join()
    text = said[1 - rank].read_text()
    assert "Traceback" not in text
    (sentence,) = [line for line in text.splitlines() if "xmoco: " in line]
    assert f"the process of rank {rank}, of 2, has ended" in sentence
    assert sentence.endswith(f"Resume with: xmoco pretrain --resume --out {run}")
    assert said[0].read_text().count("run folder:") == 1  # the first speaks, known by variables
    assert "run folder:" not in said[1].read_text()
    if rank == 0:
        last = int(re.findall(r"\d+", checkpoints(run)[-1].name)[0])
        with no_pictures():
            assert_done(run_cli("pretrain", "--resume", "--out", run))
        assert f"resuming after step {last} " in (run / "train.log").read_text()
        assert checkpoints(run)[-1].name == "step-000000080.ckpt"


@pytest.mark.parametrize(
    ("number", "name"), [(9, "SIGKILL"), (40, "signal 40")], ids=["usual", "real-time"]
)
def test_the_signal_that_ended_a_process_is_named(
    monkeypatch: pytest.MonkeyPatch, number: int, name: str
) -> None:
    """Most real-time signals have no name in Python: then it is their number."""
    store = dist.HashStore()
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
    child = Mock(returncode=-number, **{"poll.return_value": -number})
    fabric = Mock(global_rank=0, world_size=2, local_rank=0)
    fabric.strategy.launcher.procs = [child]
    watch = partners._Watch(fabric, "xmoco again")
    watch._talk()
    assert watch.gone == 1
    words = f"the process of rank 1, of 2, was ended by {name}. Resume with: xmoco again"
    assert str(watch.lost_partner()) == words


def test_patience_is_less_than_a_minute() -> None:
    assert 20 < partners.BEAT * partners.SILENCE + partners.GRACE < 60


BATCH_SCRIPT = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8", "SLURM_PROCID": "0"}


@pytest.mark.parametrize(
    ("environment", "expected", "first"),
    [
        ({}, None, True),
        ({"LOCAL_RANK": "1"}, None, False),
        ({"NODE_RANK": "1", "LOCAL_RANK": "0"}, None, False),
        (srun(0, 4, 1), Launcher("srun", 4, 1), True),
        (srun(3, 4, 1), Launcher("srun", 4, 1), False),
        (srun(2, 6, 1) | {"SLURM_STEP_NUM_NODES": "3"}, Launcher("srun", 2, 3), False),
        (BATCH_SCRIPT, None, True),
        (BATCH_SCRIPT | {"SLURM_STEP_ID": str(0xFFFFFFFB)}, None, True),
        (torchrun(1, 4, 1), Launcher("torchrun", 4, 1), False),
        (torchrun(0, 8, 1) | {"LOCAL_WORLD_SIZE": "4"}, Launcher("torchrun", 4, 2), True),
    ],
)
def test_who_has_started_it_and_which_it_is(
    monkeypatch: pytest.MonkeyPatch,
    environment: dict[str, str],
    expected: Launcher | None,
    first: bool,
) -> None:
    for name in {**srun(0, 1, 1), **torchrun(0, 1, 1), "NODE_RANK": ""}:
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert launcher() == expected
    assert first_process() == first


@pytest.mark.parametrize("start", [srun, torchrun])
def test_numbers_that_do_not_agree_are_refused(monkeypatch: pytest.MonkeyPatch, start: Any) -> None:
    for name, value in start(0, 4, 1).items():
        monkeypatch.setenv(name, value)
    run = load_config("demo", ["devices=2", "device=cpu"]).run
    with pytest.raises(UserError, match=rf"{start.__name__} has started 4 × 1 .* give devices=4"):
        build_fabric(run)


@pytest.mark.parametrize("start", [srun, torchrun])
def test_a_run_goes_on_in_as_many_as_are_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: Any
) -> None:
    run = RunFolder.create(tmp_path / "run", config_yaml(load_config("demo", ["devices=8"])))
    assert resumed_config(run, Asked(None, (), {})).run.devices == 8
    for name, value in start(0, 4, 1).items():
        monkeypatch.setenv(name, value)
    assert processes_of(resumed_config(run, Asked(None, (), {})).run) == (4, 1)
    with pytest.raises(UserError, match="but devices=8"):
        processes_of(resumed_config(run, Asked(None, ("devices=8",), {})).run)


def test_several_machines_need_someone_who_starts_processes_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They would be waited for without end, and without a word."""
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    run = load_config("demo", ["nodes=2", "device=cpu"]).run
    words = (
        r"^nodes=2, but nothing has started .* with torchrun or srun, as docs/cluster\.md shows\.$"
    )
    with pytest.raises(UserError, match=words):
        build_fabric(run)
    monkeypatch.setenv("MASTER_ADDR", "first-host")
    assert processes_of(run) == (1, 2)


def test_a_batch_script_of_slurm_starts_its_processes_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Fabric would wait for processes that nobody has started."""
    for name, value in BATCH_SCRIPT.items():
        monkeypatch.setenv(name, value)
    fabric = build_fabric(load_config("demo", ["devices=2", "device=cpu"]).run)
    assert not fabric.strategy.cluster_environment.creates_processes_externally
