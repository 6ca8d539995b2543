"""Features of whole sets: central views, eval mode, as the backbone gives them."""

from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import nn
from torch.testing import assert_close
from torchvision.transforms import v2

from xmoco.config import DataConfig, InputConfig
from xmoco.data import ArrayImages, open_images
from xmoco.data.batches import preload
from xmoco.evaluate import features
from xmoco.evaluate.features import backbone_features, home, pixel_features
from xmoco.evaluate.knn import knn_accuracy
from xmoco.nn.backbones import build_backbone

CPU = torch.device("cpu")
INPUT = InputConfig(size=16, mean=(0.5, 0.4, 0.3), std=(0.2, 0.3, 0.4))


def pictures(count: int = 11, side: int = 16) -> ArrayImages:
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(256, (count, 3, side, side), generator=generator, dtype=torch.uint8)
    return ArrayImages("noise", pixels)


def normalised(images: ArrayImages) -> torch.Tensor:
    mean, std = (torch.tensor(value)[:, None, None] for value in (INPUT.mean, INPUT.std))
    return (images.pixels / 255 - mean) / std


def test_backbone_features_are_those_of_the_frozen_backbone(monkeypatch) -> None:
    """Images of the size of a view are shown as they are, or shrunk in one crop."""
    monkeypatch.setattr(features, "BATCH", 4)
    backbone, images = build_backbone("tiny", "cifar").train(), pictures()
    before = {name: value.clone() for name, value in backbone.state_dict().items()}
    found = backbone_features(backbone, images, INPUT, CPU).vectors
    assert backbone.training
    assert found.shape == (11, 128)
    assert found.dtype == torch.float32
    assert not found.requires_grad
    assert all(torch.equal(value, before[name]) for name, value in backbone.state_dict().items())
    whole = backbone_features(backbone.eval(), images, INPUT, CPU).vectors
    assert not backbone.training
    assert_close(found, whole)


@pytest.mark.parametrize("border", [True, False])
def test_the_border_is_left_out_or_not(border: bool) -> None:
    images = pictures(side=100)
    images.pixels = images.pixels[:, :, :80]
    input = INPUT.model_copy(update={"size": 64})
    shown = v2.Compose(
        [
            v2.ToDtype(torch.float32, scale=True),
            v2.Resize(73 if border else 64, antialias=True),
            v2.CenterCrop(64),
            v2.Normalize(list(INPUT.mean), list(INPUT.std)),
            nn.Flatten(),
        ]
    )
    found = backbone_features(nn.Flatten(), images, input, CPU, border=border)
    assert_close(found.vectors, shown(images.pixels), atol=1e-4, rtol=0)


def test_progress_counts_images(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(features, "BATCH", 4)
    told: list[tuple[int, int]] = []
    backbone_features(
        nn.Flatten(), pictures(), INPUT, CPU, on_progress=lambda *counts: told.append(counts)
    )
    assert told == [(4, 11), (8, 11), (11, 11)]


def test_features_of_low_precision_become_float32() -> None:
    class Half(nn.Module):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return images.mean((2, 3)).bfloat16()

    found = backbone_features(Half(), pictures(), INPUT, CPU).vectors
    assert found.dtype == torch.float32
    assert_close(found, normalised(pictures()).mean((2, 3)), atol=1e-2, rtol=1e-2)


def test_many_features_live_in_host_memory() -> None:
    cuda = torch.device("cuda")
    assert home(50_000, 512, cuda) == cuda
    assert home(2**18, 2048, cuda) == cuda  # 2 GiB
    assert home(2**18 + 1, 2048, cuda) == CPU
    assert home(1_281_167, 2048, cuda) == CPU
    assert home(1_281_167, 2048, CPU) == CPU


@pytest.mark.gpu
@pytest.mark.parametrize("on_device", [0, 2**30])
def test_on_cuda_features_are_the_same_wherever_they_live(
    monkeypatch: pytest.MonkeyPatch, on_device: int
) -> None:
    monkeypatch.setattr(features, "ON_DEVICE", on_device)
    expected = backbone_features(nn.Flatten(), pictures(), INPUT, CPU).vectors
    found = backbone_features(nn.Flatten(), pictures(), INPUT, torch.device("cuda")).vectors
    assert found.is_cuda == (on_device > 0)
    assert_close(found.cpu(), expected, atol=4.5e-5, rtol=0)


def test_several_labels_per_image() -> None:
    images = pictures()
    images.labels = torch.rand(11, 3, generator=torch.Generator().manual_seed(0)) > 0.5
    found = backbone_features(nn.Flatten(), images, INPUT, CPU).labels
    assert found is not None
    assert torch.equal(found, images.labels)


def test_pixel_features_are_normalised_pixels() -> None:
    images = pictures(side=16)
    found = pixel_features(images, INPUT, CPU).vectors
    assert found.shape == (11, 3 * 16 * 16)
    flat = pictures(side=16)
    flat.pixels[:] = flat.pixels[:, :, :1, :1]  # nothing changes when cropped or resized
    assert_close(pixel_features(flat, INPUT, CPU).vectors, normalised(flat).flatten(1))
    large = pixel_features(pictures(side=64), INPUT.model_copy(update={"size": 64}), CPU)
    assert large.labels is None
    assert large.vectors.shape == (11, 3 * 32 * 32)


def test_backbone_sees_normalised_images() -> None:
    flat = pictures()
    flat.pixels[:] = flat.pixels[:, :, :1, :1]
    backbone = build_backbone("tiny", "cifar").eval()
    with torch.no_grad():
        expected = backbone(normalised(flat))
    assert_close(backbone_features(backbone, flat, INPUT, CPU).vectors, expected)


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
        images = preload(images, CPU)
    flat = INPUT.model_copy(update={"mean": (0.0, 0.0, 0.0), "std": (1.0, 1.0, 1.0)})
    for found in (
        pixel_features(images, flat, CPU),
        backbone_features(nn.Flatten(), images, flat, CPU),
    ):
        is_red = found.vectors[:, 0] > 0
        assert is_red.sum() == 59
        assert found.labels is not None
        assert torch.equal(found.labels == 0, is_red)
        accuracy = knn_accuracy(found.vectors, found.labels, None, None, ks=(5,))
        assert accuracy == {5: 100}


def test_an_error_leaves_the_mode_as_it_was() -> None:
    class Broken(nn.Module):
        def forward(self, _images: torch.Tensor) -> torch.Tensor:
            raise ValueError

    broken = Broken().train()
    with pytest.raises(ValueError):  # noqa: PT011
        backbone_features(broken, pictures(), INPUT, CPU)
    assert broken.training


def test_cudnn_does_not_try_all_algorithms_for_a_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """Training has it do so, before and after."""

    class Asks(nn.Module):
        def forward(self, views: torch.Tensor) -> torch.Tensor:
            tried.append(torch.backends.cudnn.benchmark)
            return views.flatten(1)

    tried: list[bool] = []
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    backbone_features(Asks(), pictures(), INPUT, CPU)
    assert tried == [False]
    assert torch.backends.cudnn.benchmark
    monkeypatch.setattr(features, "FEW", 10)  # of many images it pays
    backbone_features(Asks(), pictures(11), INPUT, CPU)
    assert tried == [False, True]
