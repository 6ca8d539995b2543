"""Features of whole sets: central views, unit length, eval mode."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch.testing import assert_close

from xmoco.config import DataConfig, ViewsConfig
from xmoco.data import ArrayImages, open_images
from xmoco.data.batches import resident
from xmoco.evaluate import features
from xmoco.evaluate.features import backbone_features, pixel_features
from xmoco.evaluate.knn import knn_accuracy
from xmoco.nn.backbones import build_backbone

CPU = torch.device("cpu")
VIEWS = ViewsConfig(size=16, mean=(0.5, 0.4, 0.3), std=(0.2, 0.3, 0.4))


def pictures(count: int = 11, side: int = 16) -> ArrayImages:
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(256, (count, 3, side, side), generator=generator, dtype=torch.uint8)
    return ArrayImages("noise", pixels)


def normalised(images: ArrayImages) -> torch.Tensor:
    mean, std = (torch.tensor(value)[:, None, None] for value in (VIEWS.mean, VIEWS.std))
    return (images.pixels / 255 - mean) / std


def test_backbone_features_are_those_of_the_frozen_backbone(monkeypatch) -> None:
    """Images of the size of a view are shown as they are, or shrunk in one crop."""
    monkeypatch.setattr(features, "BATCH", 4)
    backbone, images = build_backbone("tiny", "cifar").train(), pictures()
    before = {name: value.clone() for name, value in backbone.state_dict().items()}
    found = backbone_features(backbone, images, VIEWS, CPU).vectors
    assert backbone.training
    assert found.shape == (11, 128)
    assert found.dtype == torch.float32
    assert not found.requires_grad
    assert_close(found.norm(dim=1), torch.ones(11))
    assert all(torch.equal(value, before[name]) for name, value in backbone.state_dict().items())
    whole = backbone_features(backbone.eval(), images, VIEWS, CPU).vectors
    assert not backbone.training
    assert_close(found, whole)


def test_pixel_features_are_normalised_pixels() -> None:
    images = pictures(side=16)
    found = pixel_features(images, VIEWS, CPU).vectors
    assert found.shape == (11, 3 * 16 * 16)
    assert_close(found.norm(dim=1), torch.ones(11))
    flat = pictures(side=16)
    flat.pixels[:] = flat.pixels[:, :, :1, :1]  # nothing changes when cropped or resized
    expected = F.normalize(normalised(flat).flatten(1), dim=1)
    assert_close(pixel_features(flat, VIEWS, CPU).vectors, expected)
    large = pixel_features(pictures(side=64), VIEWS.model_copy(update={"size": 64}), CPU)
    assert large.labels is None
    assert large.vectors.shape == (11, 3 * 32 * 32)


def test_backbone_sees_normalised_images() -> None:
    flat = pictures()
    flat.pixels[:] = flat.pixels[:, :, :1, :1]
    backbone = build_backbone("tiny", "cifar").eval()
    with torch.no_grad():
        expected = F.normalize(backbone(normalised(flat)), dim=1)
    assert_close(backbone_features(backbone, flat, VIEWS, CPU).vectors, expected)


@pytest.mark.parametrize("held", [False, True])
def test_labels_are_those_of_the_images_seen(tmp_path: Path, held: bool) -> None:
    """The last image of a class is unreadable, so the first of the next class takes its place."""
    colours = {"a": (250, 0, 0), "b": (0, 0, 250)}
    for name, colour in colours.items():
        for number in range(60):
            path = tmp_path / name / f"{number:02}.png"
            path.parent.mkdir(exist_ok=True)
            Image.new("RGB", (16, 16), colour).save(path)
    (tmp_path / "a" / "59.png").write_bytes(b"broken")
    images = open_images(DataConfig(source=str(tmp_path)), "train")
    assert images is not None
    if held:
        images = resident(images, CPU)
    flat = VIEWS.model_copy(update={"mean": (0.0, 0.0, 0.0), "std": (1.0, 1.0, 1.0)})
    for found in (
        pixel_features(images, flat, CPU),
        backbone_features(torch.nn.Flatten(), images, flat, CPU),
    ):
        is_red = found.vectors[:, 0] > 0
        assert is_red.sum() == 59
        assert found.labels is not None
        assert torch.equal(found.labels == 0, is_red)
        accuracy = knn_accuracy(found.vectors, found.labels, None, None, ks=(5,))
        assert accuracy == {5: 100}


def test_an_error_leaves_the_mode_as_it_was() -> None:
    class Broken(torch.nn.Module):
        def forward(self, _images: torch.Tensor) -> torch.Tensor:
            raise ValueError

    broken = Broken().train()
    with pytest.raises(ValueError):  # noqa: PT011
        backbone_features(broken, pictures(), VIEWS, CPU)
    assert broken.training
