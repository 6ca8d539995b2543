"""Faults where a GPU is: steps that are replayed from a CUDA graph, memory that runs out."""

from pathlib import Path
from typing import Any

import pytest
import torch

from xmoco.checkpoints import load_checkpoint
from xmoco.data import ArrayImages
from xmoco.errors import UserError
from xmoco.pretraining import prepare_training
from xmoco.settings import load_config
from xmoco.train.callback import Callback
from xmoco.train.engine import build_fabric
from xmoco.train.loop import Training
from xmoco.train.run_folder import RunFolder
from xmoco.train.step import WARM_UP, GraphedStepper

pytestmark = pytest.mark.gpu

SMALL = (
    *("size=16", "eval_size=null", "blur=0.0", "epochs=6", "batch=16", "log_every=7"),
    *("backbone=tiny", "stem=cifar", "head_layers=2", "head_hidden=32", "feature_size=16"),
    *("bank_length=48", "batch_norm=plain", "device=cuda", "precision=fp32", "knn_every=0"),
)


@pytest.fixture
def images() -> ArrayImages:
    pixels = torch.randint(256, (64, 3, 16, 16), generator=torch.Generator().manual_seed(0))
    return ArrayImages("noise", pixels.byte())


def new_training(folder: Path, images: ArrayImages, *changes: str) -> Training:
    config = load_config(None, [*SMALL, *changes])
    fabric = build_fabric(config.run)
    torch.backends.cudnn.benchmark = False
    folder.mkdir(exist_ok=True)
    return prepare_training(config, fabric, images, RunFolder(folder))


@pytest.mark.parametrize("bad", [1, WARM_UP + 5], ids=["before the first look", "replayed"])
def test_a_step_is_left_out_without_a_trace(
    tmp_path: Path, images: ArrayImages, monkeypatch: pytest.MonkeyPatch, bad: int
) -> None:
    """Only its loss is spoilt, so the same course without the step is known from plain steps."""
    monkeypatch.setattr("xmoco.train.step.HOST_SHARE", 0.0)  # always record
    with torch.backends.cudnn.flags(deterministic=True, allow_tf32=False):
        training = new_training(tmp_path / "run", images, "skip_bad_steps=true")
        advance, spoilt = training.advance, []

        def spoil(*given: Any, **options: Any) -> Any:
            step = advance(*given, **options)
            if training.step == bad + 1 and not spoilt:
                spoilt.append(bad)
                for value in (*training.task.parameters(), *training.task.buffers()):
                    value.detach().fill_(7)
                return step._replace(loss=step.loss * torch.nan)
            return step

        monkeypatch.setattr(training, "advance", spoil)
        training.train(Callback())
        assert isinstance(training.stepper, GraphedStepper)
        assert training.stepper.graph is not None
        assert training.bad_steps.left_out == {bad}

        plain = new_training(tmp_path / "plain", images)
        plain.task.train()
        stream = plain.batches.from_step(0)
        while not plain.finished:
            if plain.step == bad:
                next(stream)
                plain.step += 1
            else:
                plain.advance(stream, with_metrics=True)  # which is never replayed
    for name, value in plain.task.state_dict().items():
        torch.testing.assert_close(
            training.task.state_dict()[name], value, rtol=0.05, atol=0.05, msg=name
        )


def test_a_checkpoint_is_of_its_own_step(tmp_path: Path, images: ArrayImages) -> None:
    """Written while the device goes on."""
    training = new_training(tmp_path / "run", images)
    training.task.train()
    stream = training.batches.from_step(0)
    training.advance(stream)
    before = {k: v.clone() for k, v in training.task.named_parameters()}
    training.begin_saving()
    for _ in range(5):
        training.advance(stream)
    training.saver.finish()
    state = load_checkpoint(training.run.checkpoints.paths()[-1])
    assert state["step"] == 1
    for name, value in before.items():
        assert torch.equal(state["task"][name], value.cpu()), name


def test_memory_runs_out(
    tmp_path: Path, images: ArrayImages, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = new_training(tmp_path / "run", images)
    real = training.stepper.take

    def take(*given: Any, **options: Any) -> Any:
        torch.empty(2**50, dtype=torch.uint8, device="cuda")
        return real(*given, **options)

    monkeypatch.setattr(training.stepper, "take", take)
    with pytest.raises(UserError, match=r"ran out of memory .* lower batch \(16 now\)"):
        training.train(Callback())
