"""Methods learn: after a few steps on three families of the embedded patterns, images of a family
lie nearer to each other than an untrained backbone has them, and features have not collapsed."""

from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch

from xmoco.data import ArrayImages
from xmoco.data.patterns import patterns
from xmoco.evaluate.monitor import Monitor
from xmoco.pretraining import prepare_training
from xmoco.settings import load_config
from xmoco.train.engine import build_fabric
from xmoco.train.loop import Callback
from xmoco.train.run_folder import RunFolder

SMALL = (
    *("device=cpu", "readers=1", "size=20", "batch=32", "epochs=2", "log_every=32"),
    *("head_hidden=64", "feature_size=32"),
)
NEIGHBOURS = "key_momentum=0.9 predictor_hidden=64 weak_keys=false learning_rate=1"
METHODS = {
    "simsiam": "method=simsiam predictor_hidden=16 feature_size=16 learning_rate=2",
    "barlowtwins": "method=barlowtwins",
    "vicreg": "method=vicreg learning_rate=0.1",
    "msf": f"method=msf {NEIGHBOURS} bank_length=64 neighbours=2 epochs=6",
    "mnn": f"method=mnn {NEIGHBOURS} bank_length=128",
}


@lru_cache
def families(split: Any, count: int) -> ArrayImages:
    pixels, labels, classes = patterns(split)
    names = ("stripes", "dots", "rings")
    kept = torch.isin(labels, torch.tensor([classes.index(name) for name in names])).nonzero()
    chosen = kept[:count, 0]
    return ArrayImages(f"patterns ({split})", pixels[chosen], labels[chosen], classes)


class Values(Callback):
    """Keeps what was told last."""

    def on_values(self, step: int, epoch: float, values: Any) -> None:  # noqa: ARG002
        self.last = values


@pytest.mark.parametrize("settings", METHODS.values(), ids=METHODS)
def test_a_short_training_beats_the_untrained_backbone(settings: str, tmp_path: Path) -> None:
    config = load_config("demo", [*SMALL, *settings.split()])
    train, test = families("train", 512), families("test", 240)
    training = prepare_training(config, build_fabric(config.run), train, RunFolder(tmp_path))
    backbone = training.task.encoder.backbone
    monitor = Monitor(config, "patterns", train, test, torch.device("cpu"))
    untrained, told = monitor.untrained(backbone).value, Values()
    training.train(told)
    trained = monitor.trained(backbone, epoch=2, step=training.step).value
    assert trained > untrained + 5, (untrained, trained)
    assert told.last["feature_spread"] > 0.3
    assert told.last["effective_rank"] > 1.5
