"""Judging weights from Python: records, splits, and mistakes."""

from pathlib import Path

import pytest
import torch

import xmoco
from helpers import make_images
from xmoco.nn.backbones import build_backbone
from xmoco.nn.weights import BackboneCard, save_backbone

CARD = BackboneCard("tiny", "cifar", 16, (0.5, 0.5, 0.5), (0.2, 0.2, 0.2), "xmoco", 3, 7)


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    save_backbone(build_backbone("tiny", "cifar"), CARD, tmp_path / "backbone.safetensors")
    return tmp_path / "backbone.safetensors"


def test_records_of_a_set_with_two_splits(weights: Path, tmp_path: Path) -> None:
    make_images(tmp_path / "Set.v2" / "train", each=6)
    make_images(tmp_path / "Set.v2" / "val", each=3)
    records = xmoco.evaluate_knn(weights, tmp_path / "Set.v2", ks=(2, 3), device="cpu")
    assert [record.protocol["k"] for record in records] == [2, 3]
    for record in records:
        assert (record.subject, record.work, record.seed) == ("xmoco", "set-tiny-3ep", 7)
        protocol = record.protocol
        assert (protocol["split"], protocol["epoch"], protocol["size"]) == ("test", 3, 16)
        assert (protocol["bank_images"], protocol["judged_images"]) == (24, 12)
    assert xmoco.evaluate_knn(weights, tmp_path / "Set.v2", ks=(2,))[0].value == records[0].value


def test_one_split_is_judged_by_leaving_one_out(weights: Path, tmp_path: Path) -> None:
    images = make_images(tmp_path / "images", each=4)
    (record,) = xmoco.evaluate_knn(str(weights), str(images), ks=(200,))
    assert record.protocol["split"] == "leave one out"
    assert record.protocol["judged_images"] == 16


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"ks": ()}, "k must be"),
        ({"ks": (5, 0)}, "k must be"),
        ({"temperature": -1.0}, "temperature"),
        ({"device": "cuda"}, "device=cuda is not available"),
        ({"device": "abacus"}, "device=abacus is not available"),
    ],
)
def test_mistakes(
    weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict, words: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    images = make_images(tmp_path / "images", each=2)
    with pytest.raises(xmoco.UserError, match=words):
        xmoco.evaluate_knn(weights, images, **changes)
