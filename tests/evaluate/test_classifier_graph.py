"""On a GPU, a classifier whose steps are replayed as a CUDA graph is that of plain steps."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

from xmoco.config import InputConfig
from xmoco.data import ArrayImages
from xmoco.evaluate.classify import (
    Classifier,
    CosineProtocol,
    EpochProtocol,
    TrainingProtocol,
    train_classifier,
)
from xmoco.evaluate.evaluation import EvalOptions
from xmoco.nn.backbones import build_backbone

pytestmark = pytest.mark.gpu

PROTOCOLS = {
    "linear": EpochProtocol("linear", 16, 0.5, 0.0, 1e-3, 8, (6,), 0.1),
    "tuned": CosineProtocol("tuned", 16, 0.02, 0.02, 1e-4, 45),
}
"""Of 96 images, 6 steps make an epoch."""


@pytest.fixture(autouse=True)
def repeatable() -> Iterator[None]:
    """Two courses are compared, and cuDNN's usual sums are never the same twice."""
    with torch.backends.cudnn.flags(deterministic=True, allow_tf32=False):
        yield


def trained(protocol: TrainingProtocol, several: bool, folder: Path) -> Classifier:
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (96, 3, 16, 16), generator=generator, dtype=torch.uint8)
    labels = torch.rand(96, 3, generator=generator) < 0.5 if several else torch.arange(96) % 3
    images = ArrayImages("noise", pixels, labels, ("a", "b", "c"))
    torch.manual_seed(0)
    return train_classifier(
        build_backbone("tiny", "cifar"),
        images,
        protocol,
        folder,
        {"name": protocol.name},
        input=InputConfig(size=16),
        fabric=EvalOptions("cuda").fabric(),
    )


@pytest.mark.parametrize("kind", PROTOCOLS)
@pytest.mark.parametrize("several", [False, True], ids=["one class", "several classes"])
def test_a_graph_takes_the_same_course(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, several: bool
) -> None:
    monkeypatch.setattr("xmoco.train.step.HOST_SHARE", 0.0)  # always record
    graphed = trained(PROTOCOLS[kind], several, tmp_path / "graphed")
    assert "replayed as a CUDA graph" in (tmp_path / "graphed" / "train.log").read_text()
    monkeypatch.setattr(Classifier, "capturable", False)
    plain = trained(PROTOCOLS[kind], several, tmp_path / "plain")
    assert "CUDA graph" not in (tmp_path / "plain" / "train.log").read_text()
    for name, value in plain.state_dict().items():
        assert_close(graphed.state_dict()[name], value, rtol=1e-3, atol=1e-3)
