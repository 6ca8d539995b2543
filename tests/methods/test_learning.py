"""Methods learn: after a few steps on some families of the embedded patterns, images of a family
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
from xmoco.train.callback import Callback
from xmoco.train.engine import build_fabric
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
    "alignuniform": "method=alignuniform symmetric=false bank_length=128 learning_rate=1",
    "supervised": "method=supervised learning_rate=1 epochs=4",
    "instdisc": "method=instdisc temperature=0.2 learning_rate=4 epochs=5",
}


# Those that compare with negatives begin slowly, features being alike at first: two families that
# are easily told, in shades of grey.
TWO = (
    *("size=24", "head_hidden=256", "feature_size=64", "learning_rate=0.5", "temperature=0.1"),
    *("grey=1", "hue=0", "crop_scale=[0.7,1]"),
    *("weak_views.grey=1", "weak_views.invert=0.5", "weak_views.crop_scale=[0.7,1]"),
)
BANK = "bank_length=128"
COMPARING = {
    "ressl": f"method=ressl {BANK}",
    "sce": f"method=sce {BANK}",
    "co2": f"method=co2 {BANK}",
    "moco": f"method=moco {BANK}",
    "jcl": f"method=jcl {BANK} key_views=2",
    "uota": "method=uota prototypes=30 queue_length=128 queue_from_epoch=0 epsilon=0.03 "
    "freeze_prototypes_epochs=0.1",
    "simclr with ideas": "method=simclr label_weight=1 consistency_weight=1",
}


@lru_cache
def families(split: Any, names: tuple[str, ...], count: int) -> ArrayImages:
    pixels, labels, classes = patterns(split)
    kept = torch.isin(labels, torch.tensor([classes.index(name) for name in names])).nonzero()
    chosen = kept[:count, 0]
    return ArrayImages(f"patterns ({split})", pixels[chosen], labels[chosen], classes)


class Values(Callback):
    """Keeps what was told last."""

    def on_values(self, step: int, epoch: float, values: Any) -> None:  # noqa: ARG002
        self.last = values


@pytest.mark.parametrize("settings", METHODS.values(), ids=METHODS)
def test_a_short_training_beats_the_untrained_backbone(settings: str, tmp_path: Path) -> None:
    spread, rank = learned([*SMALL, *settings.split()], ("stripes", "dots", "rings"), tmp_path)
    assert spread > 0.3
    assert rank > 1.5


@pytest.mark.parametrize("settings", COMPARING.values(), ids=COMPARING)
def test_so_does_one_of_those_that_compare(settings: str, tmp_path: Path) -> None:
    spread, rank = learned([*SMALL, *TWO, *settings.split()], ("stripes", "dots"), tmp_path)
    assert spread > 0.1  # with other seeds, from 0.16 on; what has collapsed has none
    assert rank > 1.5


def learned(settings: list[str], names: tuple[str, ...], folder: Path) -> tuple[float, float]:
    """Spread and rank of features after a training that made a backbone better."""
    config = load_config("demo", settings)
    train, test = families("train", names, 512), families("test", names, 240)
    training = prepare_training(config, build_fabric(config.run), train, RunFolder(folder))
    backbone = training.task.encoder.backbone
    monitor = Monitor(config, "patterns", train, test, torch.device("cpu"))
    untrained, told = monitor.initial(backbone).value, Values()
    training.train(told)
    trained = monitor.trained(backbone, epoch=2, step=training.step).value
    assert trained > untrained + 5, (untrained, trained)
    return told.last["feature_spread"], told.last["effective_rank"]
