"""Trained evaluations whose process is killed at any moment go on to the same weights."""

import multiprocessing
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import xmoco
from helpers import make_images, wait_until
from xmoco.data.fingerprint import tensors_digest
from xmoco.evaluate.classify import Classifier
from xmoco.evaluate.evaluation import EvalOptions, Evaluation
from xmoco.evaluate.grid import GRIDS, Grid
from xmoco.nn.backbone_files import BackboneCard, save_backbone
from xmoco.nn.backbones import build_backbone
from xmoco.train import loop

CARD = BackboneCard("tiny", "cifar", 16, (0.5, 0.5, 0.5), (0.2, 0.2, 0.2), "xmoco", 3, 7)
KILLS = 3
PROCESSES = multiprocessing.get_context("forkserver")


def evaluate(kind: str, out: Path) -> None:
    """Some protocol, with a checkpoint after every step: kills hit the writing of one, too.

    Of whatever is judged, a digest is noted.
    """
    torch.set_num_threads(1)
    scores = Evaluation.scores

    def noting(self: Evaluation, classifier: Classifier, *arguments: Any, **given: Any) -> Any:
        found = scores(self, classifier, *arguments, **given)
        with (out.parent / f"{out.name}.txt").open("a") as file:
            file.write(tensors_digest(classifier.state_dict()) + "\n")
        return found

    weights, images = out.parent / "weights.safetensors", out.parent / "images"
    options = EvalOptions("cpu", readers=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop.SaveClock, "due", lambda *_: True)
        patch.setattr(Evaluation, "scores", noting)
        patch.setitem(GRIDS, "tiny", Grid("tiny", (0.01, 0.1), (0.0,), 8, 8))
        if kind == "linear":
            xmoco.evaluate_linear(weights, images, epochs=30, out=out, options=options)
        elif kind == "finetune":
            xmoco.evaluate_finetune(weights, images, epochs=10, out=out, options=options)
        else:
            given = {"mode": "end-to-end", "grid": "tiny"}
            xmoco.evaluate_transfer(weights, images, out=out, options=options, **given)


@pytest.mark.parametrize("kind", ["linear", "finetune", "end-to-end"])
def test_killed_at_random_moments(tmp_path: Path, kind: str) -> None:
    chance, whole, killed = random.Random(kind), tmp_path / "whole", tmp_path / "killed"
    for split in ("train", "val", "test"):
        make_images(tmp_path / "images" / split, each=10 if split == "train" else 4)
    torch.manual_seed(0)
    save_backbone(build_backbone("tiny", "cifar"), CARD, tmp_path / "weights.safetensors")
    evaluate(kind, whole)

    kills, process = 0, None
    while process is None or process.exitcode != 0:
        before = set(killed.rglob("step-*.ckpt"))
        process = PROCESSES.Process(target=evaluate, args=(kind, killed))
        process.start()
        if kills < KILLS:
            wait_until(
                lambda old=before, at_work=process: (
                    set(killed.rglob("step-*.ckpt")) - old or not at_work.is_alive()
                )
            )
            time.sleep(chance.uniform(0, 0.05))
            process.kill()
        process.join(60)
        assert process.exitcode in (0, -signal.SIGKILL)
        kills += process.exitcode != 0
    assert kills > 0
    judged = [(tmp_path / f"{run.name}.txt").read_text().splitlines() for run in (whole, killed)]
    # What was judged twice, as the number was lost, was the same.
    assert list(dict.fromkeys(judged[1])) == judged[0]
    assert not list(killed.rglob("*.part"))
