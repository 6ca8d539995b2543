"""Two CPU processes train as one, on the command line and where a run goes on elsewhere."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers import (
    assert_done,
    be_process,
    checkpoints,
    free_port,
    knn_records,
    leave_pictures_out,
    logged_steps,
    make_images,
    no_pictures,
    run_cli,
    run_two,
    wait_until,
    write_recipe,
)
from xmoco.checkpoints import load_checkpoint
from xmoco.pretraining import pretrain
from xmoco.train.run_folder import RunFolder


def start_with_two(*arguments: str, folder: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "xmoco", "pretrain", "--data", "images", "--out", "run"]
    return subprocess.Popen(
        [*command, "devices=2", "device=cpu", *arguments],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def log(run: Path) -> list[str]:
    file = run / "train.log"
    return file.read_text().splitlines() if file.exists() else []


def child_of(process: int) -> int:
    """The other process of a run, which the first has started; readers may be others."""
    children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    return next(int(pid) for pid in children if b"-m" in Path(f"/proc/{pid}/cmdline").read_bytes())


def test_the_demo_recipe_trains_with_two_of_which_one_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_images(tmp_path / "images", each=64)
    settings = ("batch=32", "bank_length=96", "size=16", "knn_k=5", "log_every=4", "epochs=6")
    run = tmp_path / "run"
    first = start_with_two(
        "--recipe", "demo", *settings, "checkpoint_minutes=0", "readers=1", folder=tmp_path
    )
    try:
        wait_until(lambda: any("kNN of xmoco" in line for line in log(run)), seconds=240)
        os.kill(child_of(first.pid), signal.SIGKILL)
        out, errors = first.communicate(timeout=120)
    finally:
        first.kill()
    assert first.returncode == 1, out + errors
    assert "Traceback" not in out + errors
    assert [line for line in errors.splitlines() if line.startswith("xmoco: ")] == [
        "xmoco: the process of rank 1, of 2, was ended by SIGKILL. Resume with: "
        "xmoco pretrain --resume --out run devices=2"
    ]
    assert "2 × cpu, batch 32" in out
    assert out.count("run folder: run") == 1  # one process speaks
    # Where it runs may change on resuming.
    monkeypatch.chdir(tmp_path)
    with no_pictures():
        assert_done(run_cli("pretrain", "--resume", "--out", "run", "devices=1"))
    assert logged_steps(run) == [*range(4, 49, 4)]
    judged = [("xmoco", epoch) for epoch in range(1, 7)]
    assert knn_records(run) == [("raw pixels", 0), ("untrained", 0), *judged]
    assert {"backbone.safetensors", "report.html"} <= {path.name for path in run.iterdir()}
    state = load_checkpoint(checkpoints(run)[-1])["task"]
    assert state["loss.banks._extra_state"] == 48 * 32  # the keys of both


def pretrain_in_two(rank: int, port: int, arguments: dict[str, Any]) -> None:
    be_process(rank, port)
    leave_pictures_out()
    pretrain(**arguments, devices=2)
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize(
    ("devices", "asked"),
    [(1, "auto"), (2, "auto"), (2, "shuffled")],
    ids=["begun in one process", "begun in two", "begun in two who shuffle"],
)
def test_batch_norm_is_chosen_anew_where_a_run_goes_on(
    tmp_path: Path, devices: int, asked: str
) -> None:
    """``auto`` means shuffled in several processes and split in one: a run may change between. So
    does ``shuffled`` in one process, if the run had more."""
    images, run = make_images(tmp_path / "images", each=8), tmp_path / "run"
    model = {"batch_norm": asked, "batch_norm_groups": 4}
    train = {"checkpoint_minutes": 0.0}
    recipe = write_recipe(tmp_path / "fast.yaml", images, model=model, train=train)

    def lines_of_a_session(devices: int, **arguments: Any) -> list[str]:
        said = len(log(run))
        if devices == 2:
            run_two(pretrain_in_two, free_port(), arguments | {"out": run})
        else:
            with no_pictures():
                pretrain(**arguments, out=run, devices=1)
        assert RunFolder(run).config().model.batch_norm == asked
        assert RunFolder(run).environment()["batch_norm"] == chosen[devices]
        return [line.partition(" ")[2] for line in log(run)[said:]]

    chosen = {1: "split", 2: "shuffled"}
    words = {
        1: "batch norm: split into 4 groups, keys regrouped",
        2: "batch norm: keys shuffled between processes",
    }
    assert words[devices] in lines_of_a_session(devices, recipe=recipe)
    checkpoints(run)[-1].unlink()
    other = 3 - devices
    said = lines_of_a_session(other, resume=True)
    assert f"{words[other]} ({chosen[devices]} before, on {devices} × cpu)" in said
    # Several processes agree to save at ends of epochs, and every so many steps.
    assert f"resuming after step {'3 (epoch 1.5)' if devices == 1 else '2 (epoch 1.0)'}" in said
    assert logged_steps(run) == [4]
    checkpoints(run)[-1].unlink()
    assert words[other] in lines_of_a_session(other, resume=True)  # nothing changed this time


def test_a_mistake_of_two_is_told_once(tmp_path: Path) -> None:
    make_images(tmp_path / "images", each=4)
    recipe = str(write_recipe(tmp_path / "fast.yaml", "images"))
    process = start_with_two("--recipe", recipe, "batch=15", folder=tmp_path)
    out, errors = process.communicate(timeout=240)
    assert process.returncode == 2
    sentences = [line for line in errors.splitlines() if line.startswith("xmoco: ")]
    words = "a batch of 15 images cannot be shared equally by 2 processes; 14 can."
    assert sentences == [f"xmoco: {words}"]
    assert "Traceback" not in out + errors
    assert not (tmp_path / "run").exists()
